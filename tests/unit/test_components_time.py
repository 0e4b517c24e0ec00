"""Time: who follows whom, and how chrony's answers are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.components.time import checks, exports
from provision.engine.remote import local_shell
from provision.profiles import distribution
from provision.site.models import Site, SiteFile

DEBIAN = distribution("debian", "13")


def make_site(tmp_path: Path, time: dict[str, Any] | None = None, **document: Any) -> Site:
    groups = {
        "head": {"hosts": "h[1-2]", "addresses": "192.0.2.[1-2]", "roles": ["head"]},
        "gpu": {"hosts": "g1", "addresses": "198.51.100.11", "roles": ["worker"]},
    }
    whole = {"cluster": "tiny", "groups": groups, "time": time or {}, **document}
    return Site.from_file(SiteFile.model_validate(whole), tmp_path / "tiny.yml")


def lines(site: Site, node: str) -> list[str]:
    return exports.chrony_conf(site, site.nodes[node], DEBIAN).splitlines()


def test_workers_follow_the_heads_alone_and_serve_nobody(tmp_path: Path) -> None:
    conf = lines(make_site(tmp_path, {"servers": ["ntp.example.org"]}), "g1")
    assert [line for line in conf if line.startswith(("server", "pool"))] == [
        "server 192.0.2.1 iburst minpoll 4 maxpoll 4",
        "server 192.0.2.2 iburst minpoll 4 maxpoll 4",
    ]
    assert not [line for line in conf if line.startswith(("allow", "local"))]


def test_heads_follow_the_sites_servers_and_each_other(tmp_path: Path) -> None:
    conf = lines(make_site(tmp_path, {"servers": ["ntp.example.org", "2001:db8::7"]}), "h1")
    assert [line for line in conf if line.startswith(("server", "pool"))] == [
        "server ntp.example.org iburst",
        "server 2001:db8::7 iburst",
        "server 192.0.2.2 iburst minpoll 4 maxpoll 4",
    ]


def test_without_servers_heads_use_the_pool_of_the_distribution(tmp_path: Path) -> None:
    assert "pool 2.debian.pool.ntp.org iburst maxsources 4" in lines(make_site(tmp_path), "h1")
    assert "pool ntp.example.org iburst maxsources 4" in lines(
        make_site(tmp_path, {"pool": "ntp.example.org"}), "h1"
    )


def test_a_head_without_a_way_out_still_serves_the_cluster_and_nobody_else(tmp_path: Path) -> None:
    site = make_site(tmp_path, networks={"management": "192.0.2.0/24"})
    conf = lines(site, "h2")
    assert "local stratum 10 orphan" in conf
    assert [line for line in conf if line.startswith("allow")] == [
        "allow 192.0.2.0/24",
        "allow 198.51.100.11/32",
    ]


def test_a_single_head_without_a_way_out_does_not_wait_for_other_heads(tmp_path: Path) -> None:
    """With `orphan`, chrony 4.6 gives no time for five minutes."""
    site = make_site(tmp_path, groups={"head": {"hosts": "h1", "roles": ["head"]}})
    assert "local stratum 10" in lines(site, "h1")


def test_where_no_address_is_known_everybody_is_served(tmp_path: Path) -> None:
    site = make_site(tmp_path, groups={"head": {"hosts": "h1", "roles": ["head"]}})
    assert exports.clients(site) == ["all"]


def test_a_source_that_is_a_worker_of_the_cluster_is_a_problem(tmp_path: Path) -> None:
    (problem,) = exports.problems(make_site(tmp_path, {"servers": ["ntp.example.org", "g1"]}))
    assert (problem.rule, problem.key) == ("time-circle", ("time", "servers", 1))
    assert list(exports.problems(make_site(tmp_path, {"servers": ["h2"]}))) == []


FOLLOWS = (
    "C0000201,192.0.2.1,4,1764525600.1,0.000012,-0.000003,0.00001,-5.1,0.001,0.05,0.001,0.002,64.2,Normal\n"
)
ALONE = "7F7F0101,,10,1764525600.1,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,Normal\n"
NOTHING = "00000000,,0,0.000000000,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (FOLLOWS, exports.Tracking("192.0.2.1", 4, 0.000012, True)),
        (ALONE, exports.Tracking("", 10, 0.0, True)),
        (NOTHING, exports.Tracking("", 0, 0.0, False)),
    ],
)
def test_what_chronyd_follows(output: str, expected: exports.Tracking) -> None:
    assert exports.parse_tracking(output) == expected


def test_sources_with_their_reach_and_measured_offset() -> None:
    output = "^,*,192.0.2.1,3,6,377,12,-0.000021,0.000019,0.001\n^,?,192.0.2.2,0,7,0,4294967295,0.0,0.0,0.0\n"
    assert exports.parse_sources(output) == [
        exports.Source("192.0.2.1", True, 255, 0.000019),
        exports.Source("192.0.2.2", False, 0, 0.0),
    ]
    assert exports.parse_sources("") == []


@given(st.text(max_size=80))
def test_anything_else_is_an_error_and_never_a_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid|could not|new-line"):
        exports.parse_tracking(text)


def test_a_chronyd_that_does_not_answer_is_asked_once_and_in_bounded_time(tmp_path: Path) -> None:
    """The shell text of the checks, with a chronyc that counts its calls and never hears from its daemon."""
    program = tmp_path / "chronyc"
    program.write_text(
        f"#!/bin/sh\necho called >>{tmp_path}/calls\necho '506 Cannot talk to daemon'\nexit 1\n"
    )
    program.chmod(0o755)
    shell = local_shell("h1")
    try:
        asked = f"PATH={tmp_path}:$PATH; {checks.SETTLED}{checks.CHRONYC} tracking"
        answer = shell.run(asked, timeout=30)
    finally:
        shell.close()
    assert (answer.rc, answer.stdout) == (1, "506 Cannot talk to daemon\n")
    assert (tmp_path / "calls").read_text() == "called\n"
    assert "timeout 4 " in checks.CHRONYC
