"""The journal of a bring-up: its own entry, with every move of a node, and the verdict of the whole."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from provision.acceptance import bringup
from provision.engine.journal import Journal, journaled
from provision.engine.remote import RemoteError
from provision.report.model import Document, NodeResult, Verdict
from provision.report.store import state_directory
from provision.site.models import Site, SiteFile


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
    monkeypatch.setattr(bringup.runs, "keep", lambda *_, **__: None)
    shown: list[dict[str, Any]] = []
    document = bringup.bring_up(
        site,
        list(site.nodes.values()),
        minutes=0,
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
