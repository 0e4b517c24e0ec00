"""A bring-up: its journal, its lease on the head, the verdict of the whole."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provision.acceptance import bringup
from provision.engine.headstate import Acceptance
from provision.engine.journal import Journal, journaled
from provision.engine.remote import RemoteError
from provision.report.model import Document, Finding, NodeResult, Verdict
from provision.report.store import state_directory
from provision.site.models import Node, Site, SiteFile


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    document = {"cluster": "tiny", "groups": {"head": {"hosts": "h1", "roles": ["head"]}}}
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def test_a_bring_up_that_ends_badly_is_not_journaled_as_what_its_apply_came_to(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def converge(site: Site, nodes: Any, *, verb: str, **more: Any) -> Document:
        with journaled(site, verb) as entry:
            entry.verdict = Verdict.PASS
        nodes = {node.name: NodeResult(verdict=Verdict.PASS) for node in nodes}
        details = {"run": entry.run}
        return Document(verb=verb, site=site.cluster, verdict=Verdict.PASS, nodes=nodes, details=details)

    def connect(*arguments: Any, **more: Any) -> None:
        raise RemoteError("h1: Connection refused", "is the node up?")

    monkeypatch.setattr(bringup, "converge", converge)
    monkeypatch.setattr(bringup, "connect", connect)
    monkeypatch.setattr(bringup.headstate, "keep", lambda *_, **__: None)
    shown: list[dict[str, Any]] = []
    document = bringup.bring_up(
        site,
        list(site.nodes.values()),
        minutes=None,
        burnin_all=False,
        sudo_password=None,
        show=shown.append,
    )
    assert document.verdict is Verdict.UNKNOWN
    [finding] = document.findings
    assert (finding.check, finding.action) == ("head-answers", "is the node up?")
    journal = Journal(state_directory(site))
    runs = {run["verb"]: run for run in journal.runs()}
    assert {verb: run["verdict"] for verb, run in runs.items()} == {"up": "unknown", "apply": "pass"}
    assert document.details["run"] == runs["up"]["run"]
    assert document.details["steps"][0]["run"] == runs["apply"]["run"]
    rows = sqlite3.connect(journal.path).execute("SELECT run, content FROM events").fetchall()
    assert [(run, json.loads(content)) for run, content in rows] == [(runs["up"]["run"], shown[0])]


class Head:
    """A head's shell that somebody else holds."""

    name = "h1"

    def hold_lock(self, path: str, note: str) -> str:
        return "ann@ctl, run r0"

    def close(self) -> None:
        pass


def after_apply(site: Site, monkeypatch: pytest.MonkeyPatch, connect: Callable[..., Any]) -> Document:
    """What a bring-up comes to whose apply has passed and whose session on the head is `connect`'s."""
    nodes = {name: NodeResult(verdict=Verdict.PASS) for name in site.nodes}
    applied = Document(verb="apply", site="tiny", verdict=Verdict.PASS, nodes=nodes)
    monkeypatch.setattr(bringup, "converge", lambda *_, **__: applied)
    monkeypatch.setattr(bringup, "connect", connect)
    monkeypatch.setattr(bringup.headstate, "keep", lambda *_, **__: None)
    return bringup.bring_up(
        site,
        list(site.nodes.values()),
        minutes=None,
        burnin_all=False,
        sudo_password=None,
        show=lambda event: None,
    )


def test_another_run_that_holds_the_head_is_not_written_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = after_apply(site, monkeypatch, lambda *_, **__: Head())
    [finding] = document.findings
    assert (document.verdict, finding.verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
    assert "h1 is being provisioned by ann@ctl, run r0" in str(finding.why)


def test_a_node_that_passed_and_is_not_opened_is_no_pass() -> None:
    refused = bringup._not_admitted(
        Site(SiteFile.model_validate({"cluster": "tiny", "groups": {}}), Path("/tiny.yml"), {}),
        {"g1": "idle+drain: bad fan"},
    )
    assert refused.verdict is Verdict.UNKNOWN
    assert refused.nodes["g1"].reason == refused.findings[0].why == "idle+drain: bad fan"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bring_up_that_is_interrupted_is_no_pass(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def connect(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    document = after_apply(site, monkeypatch, connect)
    assert document.details["interrupted"]
    assert document.verdict is Verdict.UNKNOWN
    assert [finding.why for finding in document.findings] == ["interrupted"]


def test_a_node_that_verify_cannot_tell_of_is_not_burned_in_whatever_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    groups = {"head": {"hosts": "h1", "roles": ["head"]}, "gpu": {"hosts": "g[1-2]", "roles": ["worker"]}}
    file = SiteFile.model_validate({"cluster": "tiny", "groups": groups, "scheduler": {"slurm": {}}})
    site = Site.from_file(file, tmp_path / "tiny.yml")
    known = {name: Acceptance(state="verified", since="2026-01-01T00:00:00+00:00") for name in ("g1", "g2")}
    verdicts = {"h1": Verdict.PASS, "g1": Verdict.PASS, "g2": Verdict.UNKNOWN}
    verified = Document(
        verb="verify",
        verdict=Verdict.UNKNOWN,
        nodes={name: NodeResult(verdict=verdict) for name, verdict in verdicts.items()},
    )
    burned: list[str] = []

    def run_burnin(site: Site, nodes: list[Node], *_: Any, **__: Any) -> Document:
        burned.extend(node.name for node in nodes)
        return Document(verb="burnin", verdict=Verdict.PASS)

    monkeypatch.setattr(bringup.preflight, "take_lock", lambda *_: None)
    monkeypatch.setattr(bringup.headstate, "read_acceptance", lambda shell: dict(known))
    monkeypatch.setattr(bringup.headstate, "write_acceptance", lambda shell, states: None)
    monkeypatch.setattr(bringup, "burnin_closed", lambda run: {})
    monkeypatch.setattr(bringup, "_verify", lambda *_: verified)
    monkeypatch.setattr(bringup, "run_burnin", run_burnin)
    monkeypatch.setattr(Head, "run", None, raising=False)
    after_apply(site, monkeypatch, lambda *_, **__: Head())
    assert burned == ["g1"]


def test_a_node_that_is_not_content_yet_is_looked_at_again_alone_though_nothing_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose munge was mended by the run before registers again within a minute."""
    groups = {"head": {"hosts": "h1", "roles": ["head"]}, "gpu": {"hosts": "g1", "roles": ["worker"]}}
    site = Site.from_file(
        SiteFile.model_validate({"cluster": "tiny", "groups": groups}), tmp_path / "tiny.yml"
    )
    looked: list[list[str]] = []

    def look(site: Site, lock: object, nodes: list[Node], **_: Any) -> list[Finding]:
        looked.append([node.name for node in nodes])
        verdict = Verdict.FAIL if len(looked) == 1 else Verdict.PASS
        return [
            Finding(verdict=verdict if node.name == "g1" else Verdict.PASS, check="c", subject=node.name)
            for node in nodes
        ]

    monkeypatch.setattr(bringup, "verify", look)
    monkeypatch.setattr(bringup, "PAUSE", 0.0)
    document = bringup._verify(site, list(site.nodes.values()), None, lambda event: None)
    assert looked == [["h1", "g1"], ["g1"]]
    assert document.verdict is Verdict.PASS
