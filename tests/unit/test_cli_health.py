"""`provision health SITE`: a table of all nodes, again and again, and what they have said before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from provision.cli import health as cli
from provision.engine.journal import Journal
from provision.report import store
from provision.report.model import Document, Verdict
from provision.site.models import Site, SiteFile
from provision.verify.health import Answer


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g[1-2]", "roles": ["worker"]},
        },
        "health": {},
    }
    made = Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")
    monkeypatch.setattr(cli, "open_site", lambda name: made)
    return made


def said(**verdicts: Verdict) -> list[Answer]:
    reasons = {Verdict.FAIL: "xid GPU 3: 79; reboot", Verdict.UNKNOWN: "the agent does not answer"}
    actions = {Verdict.FAIL: "reboot"}
    return [
        Answer(node, verdict, reasons.get(verdict), actions.get(verdict))
        for node, verdict in verdicts.items()
    ]


def answers(monkeypatch: pytest.MonkeyPatch, *readings: list[Answer]) -> None:
    """What nodes say, reading after reading; after the last one somebody presses Ctrl-C."""
    left: Iterator[list[Answer]] = iter(readings)

    def ask(*_: object, **__: object) -> list[Answer]:
        reading = next(left, None)
        if reading is None:
            raise KeyboardInterrupt
        return reading

    monkeypatch.setattr(cli.agents, "ask", ask)
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)


def run(**options: Any) -> int:
    with pytest.raises(typer.Exit) as ended:
        cli.health("tiny", **options)
    return ended.value.exit_code


def rows(text: str) -> list[Sequence[str]]:
    return [line.split() for line in text.splitlines()]


def test_nodes_that_are_not_well_come_first_with_reason_and_action(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, said(h1=Verdict.PASS, g1=Verdict.FAIL, g2=Verdict.UNKNOWN))
    assert run() == 1
    found = rows(capsys.readouterr().out)
    assert found[0] == ["node", "verdict", "first", "reason", "action"]
    assert [row[:2] for row in found[1:4]] == [["g1", "fail"], ["g2", "unknown"], ["h1", "pass"]]
    assert found[1][2:] == ["xid", "GPU", "3:", "79;", "reboot", "reboot"]
    assert found[4][:3] == ["fail:", "3", "nodes;"]


@pytest.mark.parametrize(
    ("verdict", "status"), [(Verdict.PASS, 0), (Verdict.WARN, 0), (Verdict.UNKNOWN, 1), (Verdict.FAIL, 1)]
)
def test_the_exit_status_is_that_of_the_worst_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, status: int
) -> None:
    answers(monkeypatch, said(h1=Verdict.PASS, g1=verdict))
    assert run(as_json=True) == status


def test_watching_shows_each_reading_until_somebody_ends_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, said(g1=Verdict.PASS), said(g1=Verdict.FAIL), said(g1=Verdict.FAIL))
    with pytest.raises(KeyboardInterrupt):
        cli.health("tiny", watch=True)
    assert [row[1] for row in rows(capsys.readouterr().out) if row and row[0] == "g1"] == [
        "pass",
        "fail",
        "fail",
    ]
    journal = Journal(store.state_directory(site))
    (entry,) = journal.runs()
    assert (entry["verb"], entry["verdict"]) == ("health", "fail")
    assert [event["verdict"] for _, event in journal.told("health")] == ["pass", "fail"], "changes alone"


def test_watching_for_days_costs_no_other_verb_what_it_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(Document(verb="burnin", site="tiny", verdict=Verdict.PASS), site)
    answers(monkeypatch, *[said(g1=Verdict.PASS)] * (store.KEEP + 5))
    with pytest.raises(KeyboardInterrupt):
        cli.health("tiny", watch=True)
    assert store.latest(site, "burnin") is not None


def test_what_nodes_said_before_is_told_without_asking_them(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verdict in (Verdict.PASS, Verdict.FAIL, Verdict.FAIL, Verdict.PASS, Verdict.FAIL):
        answers(monkeypatch, said(h1=Verdict.PASS, g1=verdict))
        run()
    capsys.readouterr()
    answers(monkeypatch)  # who asks is interrupted
    assert run(history=True, limit="gpu") == 1
    shown = capsys.readouterr().out
    changes = [row for row in rows(shown) if len(row) > 3 and row[2] == "g1"]
    assert [row[3] for row in changes] == ["pass", "fail", "pass", "fail"]
    assert "h1" not in shown
    assert "warn health-flapping g1: 3 changes of verdict within a day" in shown
    assert run(history=True, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)["details"]["history"]
    assert [each["node"] for each in told] == ["h1", "g1", "g1", "g1", "g1"]
    assert told[1]["at"].endswith("+00:00")


def test_a_cluster_that_nobody_has_asked_has_no_history(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(history=True) == 1, "nothing is unknown"
    assert "nothing yet: provision health SITE" in capsys.readouterr().out


def test_what_is_wrong_on_the_command_line_is_refused(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(acting="maybe") == 2
    assert "--acting maybe: expected on or off" in capsys.readouterr().err
