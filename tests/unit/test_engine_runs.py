"""What runs came to, kept on the head: told to every admin, damaged by no power cut, never a reason to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provision.acceptance.status import merged
from provision.engine import headstate, runs
from provision.engine.headstate import HeadError
from provision.engine.journal import Journal, journaled
from provision.engine.remote import RemoteError, RootShell, local_shell
from provision.report.model import Document, NodeResult, Verdict
from provision.report.store import state_directory
from provision.site.models import Site, SiteFile


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RootShell]:
    """A shell on this machine whose records are in a folder of the test."""
    monkeypatch.setattr(headstate, "DIRECTORY", str(tmp_path / "provision"))
    session = local_shell("head-1")
    yield session
    session.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    document = {"cluster": "tiny", "groups": {"head": {"hosts": "h1", "roles": ["head"]}}}
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def run(number: int, verdict: Verdict = Verdict.PASS) -> runs.Run:
    return runs.Run(
        run=f"r{number}",
        verb="apply",
        holder="ann@desk",
        site="0123",
        started=f"2026-01-0{number}T00:00:00+00:00",
        ended=f"2026-01-0{number}T00:01:00+00:00",
        verdict=verdict,
        nodes={"n1": NodeResult(verdict=verdict, changed=3, reason="the disk is full")},
    )


def test_runs_are_added_for_root_alone_and_the_latest_come_first(shell: RootShell, tmp_path: Path) -> None:
    assert runs.latest(shell, 5) == ([], 0)
    for number in (1, 2, 3):
        runs.add(shell, run(number))
    assert runs.latest(shell, 2) == ([run(3), run(2)], 0)
    assert (tmp_path / "provision/runs.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_short_costs_no_other(shell: RootShell, tmp_path: Path) -> None:
    runs.add(shell, run(1))
    with (tmp_path / "provision/runs.jsonl").open("a") as file:
        file.write('{"run": "r2", "ve')
    runs.add(shell, run(3))
    assert runs.latest(shell, 5) == ([run(3), run(1)], 1)


def test_a_list_that_cannot_be_read_or_written_is_no_empty_one(shell: RootShell, tmp_path: Path) -> None:
    (tmp_path / "provision/runs.jsonl").mkdir(parents=True)
    with pytest.raises(HeadError, match=r"head-1: cannot read .*/runs\.jsonl"):
        runs.latest(shell, 5)
    with pytest.raises(HeadError, match=r"head-1: cannot write .*/runs\.jsonl"):
        runs.add(shell, run(1))


def test_a_head_that_does_not_answer_is_a_warning_and_the_answer_is_not_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*arguments: Any, **more: Any) -> None:
        raise RemoteError("h1: Connection refused")

    monkeypatch.setattr(headstate, "connect", connect)
    document = Document(verb="apply", verdict=Verdict.PASS)
    with journaled(site, "apply") as entry:
        runs.keep(site, entry, document, sudo_password=None)
    assert document.verdict is Verdict.WARN
    [finding] = document.findings
    assert (finding.check, finding.why) == ("kept-on-head", "h1: Connection refused")


def test_what_is_kept_is_the_entry_of_the_journal_with_its_nodes(
    site: Site, shell: RootShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headstate, "connect", lambda *_, **__: local_shell("head-1"))
    failed = NodeResult(verdict=Verdict.FAIL, failed=1, reason="no route")
    with journaled(site, "apply") as entry:
        entry.verdict = Verdict.FAIL
        document = Document(verb="apply", verdict=Verdict.FAIL, nodes={"h1": failed})
        runs.keep(site, entry, document, sudo_password=None)
    [own] = Journal(state_directory(site)).runs()
    [told], _ = runs.latest(shell, 5)
    assert document.findings == []
    assert told.nodes == {"h1": failed}
    shared = ("run", "verb", "holder", "site", "started", "verdict")
    assert {key: told.model_dump(mode="json")[key] for key in shared} == {key: own[key] for key in shared}


def test_status_tells_the_runs_of_all_controllers_and_what_only_this_one_knows() -> None:
    own: list[dict[str, Any]] = [
        {"run": "r3", "verb": "plan", "started": "2026-01-03T12:00:00+00:00", "verdict": None},
        {"run": "r1", "verb": "apply", "started": "2026-01-01T00:00:00+00:00", "verdict": "pass"},
    ]
    told = [run(4, Verdict.FAIL), run(1)]
    assert [each["run"] for each in merged(own, told)] == ["r4", "r3", "r1"]
    assert merged(own, told)[2]["nodes"]["n1"]["changed"] == 3
