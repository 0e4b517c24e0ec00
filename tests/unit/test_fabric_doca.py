"""DOCA-Host: facts in, commands out, against fabric_operations.yml; what is refused; the lock; the check."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from provision.components import registry
from provision.components.fabric import checks, doca, exports
from provision.components.fabric.settings import DocaSettings, FabricSettings
from provision.components.nvidia import locking
from provision.components.nvidia.operations import Ensure, Exact, Stop, Write, words
from provision.profiles import distribution
from provision.profiles import doca as rules
from provision.report.model import Verdict
from provision.site.lock import Lock
from provision.site.models import Site, SiteFile
from provision.verify.check import Target

DATA = yaml.safe_load((Path(__file__).parent / "fabric_operations.yml").read_text())
SUM = "5" * 64
DOCA = {"version": "3.2.1", "keyring": SUM}


def said(
    kernel: str,
    mlx5: str = "absent",
    ofed: str = "",
    arch: str = "x86_64",
    boot: str = "absent",
    key: str = "",
) -> str:
    return (
        f"kernel={kernel}\narch={arch}\nnouveau=no\nloaded=\nsecure_boot={boot}\nkey={key}\nreboot=no\n"
        f"mlx5={mlx5}\nofed={ofed}\n"
    )


def place(on: str, text: str, *, peermem: bool = False, **more: Any) -> doca.Place:
    wanted = DocaSettings.model_validate({**DOCA, **more})
    return doca.place(text, on, wanted, distribution(*on.split()).manager, peermem=peermem)


def commands(at: doca.Place) -> list[str]:
    return [words(operation, at.manager) for operation in doca.operations(at)]


@pytest.mark.parametrize("on", DATA["distributions"])
@pytest.mark.parametrize(
    "state", DATA["states"], ids=lambda state: f"{state['mlx5']} {state.get('peermem', '')}"
)
def test_commands(on: str, state: dict[str, Any]) -> None:
    case = DATA["distributions"][on]
    text = said(case["kernel"], state["mlx5"], state["ofed"])
    at = place(on, text, peermem=state.get("peermem", False))
    wanted = [line.format(kernel=case["kernel"]) for line in case["commands"]]
    assert commands(at) == [*state.get("first", []), *wanted, *state.get("last", [])]


@pytest.mark.parametrize("on", DATA["distributions"])
def test_the_entry_is_of_one_release_and_trusts_one_key(on: str) -> None:
    case = DATA["distributions"][on]
    at = place(on, said(case["kernel"]))
    writes = {each.path: each.content for each in doca.operations(at) if isinstance(each, Write)}
    entry = writes[at.manager.doca.path]
    assert case["address"] in entry
    assert SUM[:12] in entry
    key = next(
        each for each in doca.operations(at) if isinstance(each, Ensure) and each.title.startswith("the key")
    )
    assert f"{case['address']}GPG-KEY-Mellanox.pub" in key.make
    assert SUM in key.make


def test_a_mirror_has_the_same_folders() -> None:
    at = place("ubuntu 24.04", said("6.8.0-90-generic"), mirror="https://mirror.example.org/doca")
    (text,) = (
        each.content for each in doca.operations(at) if isinstance(each, Write) and "sources" in each.path
    )
    assert "URIs: https://mirror.example.org/doca/3.2.1/ubuntu24.04/x86_64/\n" in text


def test_the_pin_holds_each_package_to_its_version() -> None:
    at = place("debian 13", said("6.12.57+deb13-amd64"))
    (text,) = (
        each.content for each in doca.operations(at) if isinstance(each, Write) and "preferences" in each.path
    )
    assert "Package: doca-ofed\nPin: version 3.2.1-*\nPin-Priority: 1001\n" in text
    assert "Package: mlnx-ofed-kernel-dkms\nPin: version *.OFED.25.10.1.7.1*\nPin-Priority: 1001\n" in text


@pytest.mark.parametrize(
    ("on", "text", "part"),
    [
        ("debian 12", said("6.1.0-41-amd64"), "no repository of release 3.2.0 or later"),
        ("ubuntu 26.04", said("7.0.0-10-generic"), "its own archive has DOCA-OFED"),
        ("rocky 10", said("6.12.0-55.el10.x86_64"), "in no document"),
        ("ubuntu 24.04", said("6.17.0-1029-nvidia"), "do not build for kernel 6.17.0-1029-nvidia"),
        ("ubuntu 24.04", said("6.8.0-90-generic", arch="riscv64"), "no DOCA-Host for riscv64"),
        ("ubuntu 24.04", said("6.8.0-90-generic", boot="1"), "signed by nobody"),
        ("ubuntu 24.04", said("6.8.0-90-generic", boot="1", key="x is not enrolled"), "signed by nobody"),
    ],
)
def test_what_a_person_has_to_do_first(on: str, text: str, part: str) -> None:
    (stop,) = todo = list(doca.operations(place(on, text)))
    assert isinstance(stop, Stop)
    assert part in stop.reason
    assert doca.stopped(todo)


@pytest.mark.parametrize(
    ("mlx5", "changes"), [("inbox", True), ("24.10-1.1.4", True), ("25.10-1.7.1", False), ("absent", False)]
)
def test_nobody_is_sent_away_where_no_other_stack_runs(mlx5: str, changes: bool) -> None:
    assert place("debian 13", said("6.12.57+deb13-amd64", mlx5)).changes is changes


def test_with_its_key_enrolled_secure_boot_takes_them() -> None:
    at = place("ubuntu 24.04", said("6.8.0-90-generic", boot="1", key="x is already enrolled"))
    assert any(isinstance(each, Exact) for each in doca.operations(at))


@pytest.mark.parametrize("lost", ["mlx5", "ofed", "kernel"])
def test_a_node_that_does_not_tell(lost: str) -> None:
    text = "".join(
        f"{line}\n" for line in said("6.8.0-90-generic").splitlines() if not line.startswith(f"{lost}=")
    )
    with pytest.raises(ValueError, match=f"not told: {lost}"):
        place("ubuntu 24.04", text)


def test_the_question_is_one_that_a_shell_answers() -> None:
    answer = subprocess.run(["sh", "-c", doca.QUERY], capture_output=True, text=True, check=True)
    assert place("debian 13", answer.stdout).running != ""


@pytest.mark.parametrize(
    ("mine", "stack", "rc"),
    [(None, 2, 0), (1, 2, 1), (2, 1, 0), (1, None, 1)],
    ids=["none", "old", "new", "no stack"],
)
def test_a_peermem_older_than_the_stack_is_built_again(
    tmp_path: Path, mine: int | None, stack: int | None, rc: int
) -> None:
    for name, when in (("nvidia-peermem", mine), ("ib_core", stack)):
        if when is not None:
            (tmp_path / name).write_text("")
            os.utime(tmp_path / name, (when, when))
    (tmp_path / "modinfo").write_text(f"#!/bin/sh\n[ -e {tmp_path}/$4 ] && echo {tmp_path}/$4\n")
    (tmp_path / "modinfo").chmod(0o755)
    at = place("ubuntu 24.04", said("6.8.0-90-generic"), peermem=True)
    (operation,) = (
        each for each in doca.operations(at) if isinstance(each, Ensure) and "peermem" in each.title
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["sh", "-c", operation.test], env=environment, check=False).returncode == rc


def test_the_module_that_dkms_has_is_the_one_that_is_built(tmp_path: Path) -> None:
    (tmp_path / "dkms").write_text(
        f"""#!/bin/sh
case $1 in
  status) echo 'nvidia/580.126.20, 6.8.0-90-generic, x86_64: installed' ;;
  *) echo "$*" >>{tmp_path}/done ;;
esac
"""
    )
    (tmp_path / "dkms").chmod(0o755)
    at = place("ubuntu 24.04", said("6.8.0-90-generic"), peermem=True)
    (operation,) = (
        each for each in doca.operations(at) if isinstance(each, Ensure) and "peermem" in each.title
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", operation.make], env=environment, check=True)
    assert (tmp_path / "done").read_text().splitlines() == [
        f"{verb} --force -k 6.8.0-90-generic nvidia/580.126.20" for verb in ("build", "install")
    ]


# The site file and the lock


def make_site(fabric: dict[str, Any], nvidia: dict[str, Any] | None = None, kind: str = "roce") -> Site:
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g1", "roles": ["worker"], "gpu": {"model": "h100-sxm", "count": 8}},
        },
        "networks": {"fabric": {"kind": kind, "rails": 2}},
        "scheduler": {"slurm": {}},
        "nvidia": nvidia or {},
        "fabric": fabric,
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


@pytest.mark.parametrize(
    ("fabric", "nvidia", "kind", "expected"),
    [
        ({"stack": "doca", "doca": DOCA}, {}, "roce", []),
        ({"stack": "doca", "doca": DOCA}, {}, "infiniband", []),
        ({"stack": "doca"}, {}, "roce", ["fabric-doca"]),
        ({"doca": DOCA}, {}, "roce", ["fabric-doca"]),
        ({"stack": "doca", "doca": DOCA}, {}, "ethernet", ["fabric-doca"]),
        ({"stack": "doca", "doca": {**DOCA, "version": "2.9.1"}}, {}, "roce", ["fabric-doca-release"]),
        (
            {"stack": "doca", "doca": DOCA, "peer_memory": "nvidia-peermem"},
            {"source": "distribution"},
            "roce",
            ["fabric-peer-memory"],
        ),
        (
            {"stack": "doca", "doca": DOCA, "peer_memory": "nvidia-peermem"},
            {"source": "distribution", "build": "dkms"},
            "roce",
            [],
        ),
        ({"roce": {}}, {}, "infiniband", ["fabric-roce"]),
        ({"roce": {"priority": 6}}, {}, "roce", ["fabric-roce-cnp"]),
        ({"roce": {"priority": 6, "cnp_dscp": 40}}, {}, "roce", []),
    ],
)
def test_what_contradicts_itself(
    fabric: dict[str, Any], nvidia: dict[str, Any], kind: str, expected: list[str]
) -> None:
    assert [problem.rule for problem in exports.problems(make_site(fabric, nvidia, kind))] == expected


@pytest.mark.parametrize(
    "fabric",
    [
        {"doca": {"version": "3.2", "keyring": SUM}},
        {"doca": {"version": "3.2.1"}},  # whose key it is nobody has said
        {"doca": {"version": "3.2.1", "keyring": "abc"}},
        {"roce": {"priority": 8}},
        {"roce": {"dscp": 64}},
        {"roce": {"cnp_dscp": -1}},
        {"roce": {"mtu": 100}},
    ],
)
def test_settings_that_are_refused(fabric: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FabricSettings.model_validate(fabric)


def offer(on: str, kernel: str) -> locking.Offer:
    return locking.Offer("g1", on, kernel, {})


TODAY = date(2026, 1, 15)


def test_the_lock_has_the_release() -> None:
    site = make_site({"stack": "doca", "doca": DOCA})
    entry = locking.resolve(site, "gpu", TODAY, offer("ubuntu 24.04", "6.8.0-90-generic"))
    assert entry.doca == "3.2.1"
    assert locking.lock_problems(site, Lock(nvidia={"gpu": entry})) == []
    other = Lock(nvidia={"gpu": entry.model_copy(update={"doca": None})})
    assert locking.lock_problems(site, other) == [
        "group gpu: doca is None in the lock, 3.2.1 in the site file"
    ]


@pytest.mark.parametrize(
    ("on", "kernel", "part"),
    [
        ("debian 12", "6.1.0-41-amd64", "no repository of release"),
        ("ubuntu 24.04", "6.17.0-1018-nvidia", "do not build"),
    ],
)
def test_what_cannot_work_is_refused_before_a_node_is_touched(on: str, kernel: str, part: str) -> None:
    with pytest.raises(locking.Unresolvable, match=part):
        locking.resolve(make_site({"stack": "doca", "doca": DOCA}), "gpu", TODAY, offer(on, kernel))


@pytest.mark.parametrize("release", rules.doca().releases)
@pytest.mark.parametrize("on", rules.doca().distributions)
def test_every_release_has_a_name_on_every_distribution(release: str, on: str) -> None:
    known = rules.doca()
    assert known.why_not(release, on, None) is None
    assert release in known.address(release, on, "x86_64")
    assert any(version.startswith(f"{release}-") for version in known.packages(release, on).values())
    assert known.releases[release].source


# The check


RIGHT = ["3.2.1-044000", "25.10-1.7.1", "25.10-1.7.1", "OFED-internal-25.10-1.7.1:"]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("read", ["", "24.10-1.1.4"])
def test_one_of_four_places_is_another(place: int, read: str) -> None:
    assert checks.judge_doca("3.2.1", RIGHT).verdict is Verdict.PASS
    found = checks.judge_doca("3.2.1", [read if at == place else text for at, text in enumerate(RIGHT)])
    assert found.verdict is Verdict.FAIL
    assert (read or "not there") in (found.read or "")


@pytest.mark.parametrize(
    ("rc", "out", "fabric", "verdict"),
    [
        (0, "\n".join(RIGHT) + "\n", {"stack": "doca", "doca": DOCA}, Verdict.PASS),
        (0, "3.2.1-044000\n25.10-1.7.1\ninbox\n\n", {"stack": "doca", "doca": DOCA}, Verdict.FAIL),
        (2, "", {"stack": "doca", "doca": DOCA}, Verdict.UNKNOWN),
        (0, "", {"stack": "doca", "doca": DOCA}, Verdict.UNKNOWN),
        (0, "", {}, Verdict.SKIP),
    ],
)
def test_the_check(rc: int, out: str, fabric: dict[str, Any], verdict: Verdict) -> None:
    site = make_site(fabric)
    host = SimpleNamespace(run=lambda command: SimpleNamespace(rc=rc, stdout=out, stderr=""))
    (check,) = (check for check in registry.checks("fabric") if check.name == "doca")
    target = Target(site, site.nodes["g1"], "fabric", Lock(), distribution("ubuntu", "24.04"), host)
    assert check.run(target).verdict is verdict
