"""`provision verify` and `provision report`; the nodes are root shells on this machine."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from provision.cli import verbs
from provision.components import registry
from provision.engine import limits
from provision.engine.journal import Journal
from provision.engine.remote import RemoteError, RootShell, local_shell
from provision.profiles import Distribution
from provision.site.models import Node, Site
from provision.verify import run
from provision.verify.check import Check, Found, Target, expect

SITE = """
cluster: atlas
groups:
  head: {hosts: head-1, roles: [head]}
  gpu: {hosts: "gpu-[1-2]", roles: [worker]}
scheduler: {slurm: {}}
"""

Command = Callable[..., Result]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site file whose nodes are this machine; gpu-2 has a GPU less than it should."""

    def count(at: Target) -> Found:
        return expect(at.host.check_output("echo %s", "7" if at.node.name == "gpu-2" else "8"), "8")

    profile = Distribution.model_validate({"key": "this one", "family": "debian"})
    monkeypatch.setattr(run, "of_os_release", lambda text: profile)
    monkeypatch.setattr(limits, "PATH", str(tmp_path / "limits.json"))
    monkeypatch.setattr(run, "GENERIC_CHECKS", ())
    monkeypatch.setattr(run, "connect", lambda site, node, sudo_password: local_shell(node.name))
    checks = {"base": (Check("gpu-count", "worker", count, "base"),)}
    monkeypatch.setattr(registry, "checks", lambda name: checks.get(name, ()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "atlas.yml"
    path.write_text(SITE)
    return path


@pytest.fixture
def provision() -> Command:
    app = typer.Typer()
    verbs.register(app, [])
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_it_shows_what_is_wrong_and_ends_with_1(site: Path, provision: Command) -> None:
    answer = provision("verify", site)
    assert answer.exit_code == 1
    lines = [line.rstrip() for line in answer.stdout.splitlines()]
    assert "fail    gpu-2: gpu-count: 7, expected 8" in lines
    assert lines[-1].startswith("fail: verify; atlas; 3 nodes; 1 fail, 4 pass;")


def test_progress_goes_to_standard_error_a_line_a_node(site: Path, provision: Command) -> None:
    answer = provision("verify", site, "--limit", "gpu")
    assert sorted(answer.stderr.splitlines()) == ["gpu-1: 2 pass", "gpu-2: 1 fail, 1 pass"]


def test_limited_to_what_is_good_it_ends_with_0(site: Path, provision: Command) -> None:
    answer = provision("verify", site, "--limit", "head,gpu-1", "--json")
    assert answer.exit_code == 0
    document = json.loads(answer.stdout)
    assert document["verdict"] == "pass"
    assert list(document["nodes"]) == ["head-1", "gpu-1"]
    assert len(document["details"]["digest"]) == 16


def test_a_node_out_of_reach_ends_with_1(
    site: Path, provision: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(site: Site, node: Node, sudo_password: str | None) -> RootShell:
        raise RemoteError(f"{node.name}: Connection refused", "is the node up?")

    monkeypatch.setattr(run, "connect", refuse)
    answer = provision("verify", site, "--limit", "gpu-1", "--json")
    assert answer.exit_code == 1
    (finding,) = json.loads(answer.stdout)["findings"]
    assert (finding["check"], finding["verdict"]) == ("node-reachable", "unknown")


def test_a_component_without_checks_here_is_refused(site: Path, provision: Command) -> None:
    answer = provision("verify", site, "--component", "storage")
    assert answer.exit_code == 2
    assert "--component storage: has no checks in atlas; these have: verify, base, " in answer.stderr


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_done(
    site: Path, provision: Command, tmp_path: Path
) -> None:
    answer = provision("verify", site, "--html", tmp_path / "absent" / "report.html")
    assert answer.exit_code == 2
    assert not (tmp_path / "state").exists()


def test_a_report_that_cannot_be_written_after_all_does_not_take_the_answer_along(
    site: Path, provision: Command
) -> None:
    answer = provision("verify", site, "--limit", "gpu-1", "--html", "/dev/full", "--json")
    assert answer.exit_code == 1
    document = json.loads(answer.stdout)
    assert document["nodes"]["gpu-1"]["verdict"] == "pass"
    written = document["findings"][-1]
    assert (written["check"], written["subject"]) == ("report-written", "/dev/full")
    assert provision("report", site).exit_code == 0, "what was found is kept"


def test_an_unknown_site_is_refused(provision: Command) -> None:
    assert provision("verify", "no-such-site").exit_code == 2
    assert provision("report", "no-such-site").exit_code == 2


def test_files_are_written_beside_the_answer(site: Path, provision: Command, tmp_path: Path) -> None:
    page, xml = tmp_path / "report.html", tmp_path / "report.xml"
    answer = provision("verify", site, "--html", page, "--junit", xml)
    assert answer.exit_code == 1
    assert "gpu-count" in page.read_text()
    assert ElementTree.parse(xml).getroot().attrib["failures"] == "1"


def test_report_gives_the_last_answer_again(site: Path, provision: Command, tmp_path: Path) -> None:
    first = provision("verify", site, "--json")
    again = provision("report", site, "--json", "--html", tmp_path / "report.html")
    assert again.exit_code == first.exit_code == 1
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert "verify of atlas" in (tmp_path / "report.html").read_text()


def test_a_run_is_in_the_journal_with_what_was_not_in_order(
    site: Path, provision: Command, tmp_path: Path
) -> None:
    run = json.loads(provision("verify", site, "--json").stdout)["details"]["run"]
    (directory,) = (tmp_path / "state" / "provision").iterdir()
    journal = Journal(directory)
    (entry,) = journal.runs()
    assert (entry["run"], entry["verb"], entry["verdict"]) == (run, "verify", "fail")
    assert entry["ended"] is not None
    with sqlite3.connect(journal.path) as db:
        events = [json.loads(content) for (content,) in db.execute("SELECT content FROM events")]
    assert [(event["node"], event["check"], event["read"]) for event in events] == [
        ("gpu-2", "gpu-count", "7")
    ]


def test_where_nothing_can_be_kept_nodes_are_verified_and_it_is_said(
    site: Path, provision: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    answer = provision("verify", site, "--json")
    assert answer.exit_code == 1
    document = json.loads(answer.stdout)
    assert document["nodes"]["gpu-2"]["reason"] == "gpu-count: 7, expected 8"
    [finding] = [finding for finding in document["findings"] if finding["check"] == "journaled"]
    assert (finding["verdict"], "XDG_STATE_HOME" in finding["why"]) == ("warn", True)
    assert "warning: the answer is not kept" in answer.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_interrupted_leaves_what_it_came_to(
    site: Path, provision: Command, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def ended(at: Target) -> Found:
        if at.node.name == "gpu-2":
            os.kill(os.getpid(), number)
            at.host.run("sleep 30")
        return expect("8", "8")

    checks = {"base": (Check("gpu-count", "worker", ended, "base"),)}
    monkeypatch.setattr(registry, "checks", lambda name: checks.get(name, ()))
    answer = provision("verify", site, "--json")
    assert answer.exit_code == 130
    document = json.loads(answer.stdout)
    assert document["details"]["interrupted"]
    assert document["nodes"]["gpu-2"] == {
        "verdict": "unknown",
        "state": None,
        "changed": 0,
        "failed": 0,
        "reason": "verify-ended: interrupted",
    }
    again = provision("report", site, "--json")
    assert (again.exit_code, json.loads(again.stdout)) == (130, document)


def test_report_before_any_run_says_so(site: Path, provision: Command) -> None:
    answer = provision("report", site, "--verb", "apply")
    assert answer.exit_code == 2
    assert "apply has no stored answer about atlas" in answer.stderr


def test_a_missing_sudo_password_is_wrong_input(
    site: Path, provision: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROVISION_SUDO_PASSWORD", raising=False)
    site.write_text(SITE + "access: {user: ops, sudo_password: true}\n")
    answer = provision("verify", site)
    assert answer.exit_code == 2
    assert "PROVISION_SUDO_PASSWORD" in answer.stderr


def test_the_head_that_other_nodes_are_tried_with_may_want_a_password_too(
    site: Path, provision: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROVISION_SUDO_PASSWORD", raising=False)
    head = "{hosts: head-1, roles: [head], access: {user: ops, sudo_password: true}}"
    site.write_text(SITE.replace("{hosts: head-1, roles: [head]}", head))
    answer = provision("verify", site, "--limit", "gpu-1")
    assert answer.exit_code == 2
    assert "head-1 needs a sudo password" in answer.stderr
