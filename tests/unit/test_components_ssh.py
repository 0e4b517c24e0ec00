"""The ssh server's drop-in, and what it means to sshd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from provision.components.ssh import exports
from provision.components.ssh.settings import SshSettings
from provision.site.models import Site, SiteFile


def make_site(tmp_path: Path, ssh: dict[str, Any], user: str = "root") -> Site:
    groups = {"head": {"hosts": "h1", "roles": ["head"]}, "gpu": {"hosts": "g[1-2]", "roles": ["worker"]}}
    document = {"cluster": "tiny", "access": {"user": user}, "groups": groups, "ssh": ssh}
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def test_logins_are_by_key_and_dead_connections_end_within_a_minute() -> None:
    options = exports.options(SshSettings())
    assert options["PubkeyAuthentication"] == "yes"
    assert options["PasswordAuthentication"] == options["KbdInteractiveAuthentication"] == "no"
    assert options["PermitRootLogin"] == "prohibit-password"
    assert int(options["ClientAliveInterval"]) * int(options["ClientAliveCountMax"]) <= 60


def test_the_drop_in_is_one_keyword_a_line() -> None:
    text = exports.drop_in(SshSettings(max_sessions=7))
    assert "MaxSessions 7\n" in text
    assert all(len(line.split()) == 2 for line in text.splitlines())


def test_locking_out_the_user_that_nodes_are_reached_as_is_a_problem(tmp_path: Path) -> None:
    (problem,) = exports.problems(make_site(tmp_path, {"root_login": "no"}))
    assert (problem.rule, problem.key, problem.read) == ("root-login", ("ssh", "root_login"), "no")
    assert list(exports.problems(make_site(tmp_path, {"root_login": "no"}, user="admin"))) == []
    assert list(exports.problems(make_site(tmp_path, {}))) == []


def test_what_sshd_would_do_is_read_from_its_own_words() -> None:
    read = exports.effective("port 22\nlistenaddress [::]:22\nlistenaddress 0.0.0.0:22\nmaxstartups 9:30:9\n")
    assert read == {"port": "22", "listenaddress": "[::]:22", "maxstartups": "9:30:9"}


@pytest.mark.parametrize(
    ("read", "wanted", "same"),
    [
        ("no", "no", True),
        ("yes", "no", False),
        (None, "no", False),
        ("without-password", "prohibit-password", True),
        ("yes", "prohibit-password", False),
        ("100:30:500", "100:30:500", True),
    ],
)
def test_values_that_mean_the_same(read: str | None, wanted: str, same: bool) -> None:
    assert exports.same_value(read, wanted) is same


@pytest.mark.parametrize("value", ["", "lots", "10:30", "0:1:2"])
def test_a_limit_of_new_connections_that_sshd_would_refuse(value: str) -> None:
    with pytest.raises(ValidationError):
        SshSettings(max_startups=value)
