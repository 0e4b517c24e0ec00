"""`provision status`: acceptance from the head, the scheduler beside it; what cannot be asked is unknown, alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provision.acceptance import status as module
from provision.acceptance.status import last_look, status
from provision.engine.remote import Output, RemoteError
from provision.report.model import Document, Finding, Verdict
from provision.site.models import Site, SiteFile

SINCE = "2026-01-01T00:00:00+00:00"
STATES = {"h1": "admitted", "g1": "admitted", "g2": "quarantined"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g[1-3]", "roles": ["worker"]},
        },
        "scheduler": {"slurm": {}},
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


class Head:
    """A head's shell: the acceptance of nodes, and what scontrol answers."""

    name = "h1"

    def __init__(self, acceptance: str, scontrol: Output) -> None:
        self.acceptance = acceptance
        self.scontrol = scontrol

    def run(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        if "runs.jsonl" in command:
            return Output(0, "", "")
        return self.scontrol if command.startswith("scontrol") else Output(0, self.acceptance, "")

    def close(self) -> None:
        pass


def look(site: Site, monkeypatch: pytest.MonkeyPatch, scontrol: Output, acceptance: str = "") -> Document:
    kept = acceptance or json.dumps(
        {name: {"state": state, "since": SINCE} for name, state in STATES.items()}
    )
    monkeypatch.setattr(module, "connect", lambda *_, **__: Head(kept, scontrol))
    return status(site, list(site.nodes.values()))


def slurm(**states: list[str]) -> Output:
    nodes = [{"name": name, "state": state, "version": "24.11.5"} for name, state in states.items()]
    return Output(0, json.dumps({"nodes": nodes}), "")


def of(document: Document, subject: str) -> Finding:
    [finding] = [finding for finding in document.findings if finding.subject == subject]
    return finding


def test_every_node_has_its_state_and_the_schedulers_word(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = look(site, monkeypatch, slurm(g1=["IDLE"], g2=["IDLE", "DRAIN"], g3=["IDLE", "DRAIN"]))
    assert {name: (node.state, node.verdict.value) for name, node in document.nodes.items()} == {
        "h1": ("admitted", "pass"),
        "g1": ("admitted", "pass"),
        "g2": ("quarantined", "fail"),
        "g3": ("new", "warn"),
    }
    scheduler = [finding for finding in document.findings if finding.check == "scheduler-state"]
    assert {finding.subject: finding.verdict for finding in scheduler} == dict.fromkeys(
        ("g1", "g2", "g3"), Verdict.PASS
    )


def test_a_quarantined_node_is_told_with_the_way_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    document = look(site, monkeypatch, slurm(g2=["IDLE", "DRAIN"]))
    [finding] = [finding for finding in document.findings if finding.check == "accepted"]
    assert (finding.subject, finding.verdict) == ("g2", Verdict.FAIL)
    assert "`provision up`" in str(finding.action)


@pytest.mark.parametrize(
    ("runs", "read"),
    [
        ([("apply", "pass"), ("verify", "fail"), ("up", "pass")], "verify of 3: fail"),
        ([("verify", None), ("up", "unknown")], "up of 2: unknown"),
        ([("verify", "pass"), ("up", "fail")], None),
        ([("plan", "fail")], None),
        ([], None),
    ],
)
def test_a_last_look_that_was_not_content_is_told(
    site: Site, runs: list[tuple[str, str | None]], read: str | None
) -> None:
    latest = [
        {"verb": verb, "verdict": verdict, "started": str(4 - number)}
        for number, (verb, verdict) in enumerate(runs, start=0 if len(runs) == 3 else 1)
    ]
    assert [finding.read for finding in last_look(site, latest)] == ([] if read is None else [read])


@pytest.mark.parametrize(
    ("states", "read"), [({"g1": ["IDLE", "DRAIN"]}, "idle+drain"), ({}, "not known to Slurm")]
)
def test_an_admitted_node_that_takes_no_work_is_worth_a_word(
    site: Site, monkeypatch: pytest.MonkeyPatch, states: Any, read: str
) -> None:
    finding = of(look(site, monkeypatch, slurm(**states)), "g1")
    assert (finding.verdict, finding.read, finding.expected) == (Verdict.WARN, read, "takes jobs")


def test_the_head_is_given_a_time_for_all_its_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def connect(*arguments: Any, within: float, **more: Any) -> None:
        given.append(within)
        raise RemoteError("h1: no answer from ssh or sudo")

    monkeypatch.setattr(module, "connect", connect)
    document = status(site, list(site.nodes.values()), timeout=3.0)
    assert given == [3.0]
    assert {node.verdict for node in document.nodes.values()} == {Verdict.UNKNOWN}


def test_an_admitted_node_that_an_interrupted_burn_in_left_reserved_is_told_with_what_to_do(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "reserved by a burn-in that was interrupted: provision-burnin-1a"
    monkeypatch.setattr(module, "burnin_closed", lambda run: {"g1": why})
    finding = of(look(site, monkeypatch, slurm(g1=["IDLE", "RESERVED"])), "g1")
    assert (finding.verdict, finding.why) == (Verdict.WARN, why)
    assert "provision up" in str(finding.action)


def test_without_a_journal_the_head_is_asked_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("not a folder")
    document = look(site, monkeypatch, slurm(g1=["IDLE"]))
    assert document.nodes["g1"].state == "admitted"
    finding = of(document, "tiny")
    assert (finding.verdict, finding.check) == (Verdict.WARN, "journaled")
    assert str(tmp_path / "state") in str(finding.why)


def test_a_scheduler_that_cannot_be_asked_leaves_the_acceptance_as_it_is(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = look(site, monkeypatch, Output(1, "", "Unable to contact slurm controller\n"))
    assert document.nodes["g1"].state == "admitted"
    assert of(document, "h1").verdict is Verdict.UNKNOWN
    assert "Unable to contact slurm controller" in str(of(document, "h1").why)


def test_a_head_that_cannot_be_read_makes_every_node_unknown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = look(site, monkeypatch, slurm(), acceptance="{")
    assert {node.verdict for node in damaged.nodes.values()} == {Verdict.UNKNOWN}

    def refuse(*_: Any, **__: Any) -> Head:
        raise RemoteError("h1: no route to host", "is the node up, and its sshd running?")

    monkeypatch.setattr(module, "connect", refuse)
    silent = status(site, list(site.nodes.values()))
    assert {node.verdict for node in silent.nodes.values()} == {Verdict.UNKNOWN}
    assert of(silent, "h1").action == "is the node up, and its sshd running?"
