"""What is shown of a run: lines for a log, a table in a terminal that no answer of a node can break."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from provision.engine.progress import _Row, _table, _update, describe
from provision.engine.record import Recorder
from provision.engine.remote import DeadlineExceeded


def rendered(*events: dict[str, Any], width: int = 100) -> list[str]:
    rows = {"g1": _Row(), "g2": _Row()}
    for event in events:
        _update(rows[event["node"]], event)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(_table("apply tiny", rows, time.monotonic()))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def node(name: str, verdict: str = "pass", reason: str | None = None) -> dict[str, Any]:
    return {"event": "node", "node": name, "verdict": verdict, "reason": reason, "seconds": 1.0}


def test_what_a_node_answers_is_shown_as_it_is_and_never_taken_for_markup() -> None:
    title, failed, waiting = rendered(node("g1", "fail", "no [/etc/x]\x1b[2J of gpu-[1-4]"))
    assert "1 of 2 nodes done" in title
    assert r"no [/etc/x]\x1b[2J of gpu-[1-4]" in failed
    assert "waiting" in waiting


def test_a_narrow_terminal_cuts_what_a_node_does_and_never_its_name_or_its_count() -> None:
    start = {
        "event": "start",
        "node": "g2",
        "step": "prometheus:monitor",
        "title": "file /etc/" + 30 * "long",
    }
    title, waiting, busy = rendered(node("g1", "fail"), start, width=50)[:3]
    assert title.startswith("apply tiny")
    assert title.rstrip().endswith("0 s")
    assert waiting.startswith("g1 ")
    assert re.fullmatch(r"g2 +prometheus:monitor: file /\S*… +0 changed", busy.rstrip())


def test_nodes_that_are_done_well_stand_below_those_at_work() -> None:
    start = {"event": "start", "node": "g2", "step": "base:*", "title": "file /etc/hosts"}
    _, first, second = rendered(node("g1"), start)
    assert first.startswith("g2")
    assert "base:*: file /etc/hosts" in first
    assert second.startswith("g1")


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "step", "node": "g1", "step": "base:*", "outcome": "done", "changed": 1},
            "g1: base:* 1 change",
        ),
        (
            {"event": "step", "node": "g1", "step": "base:*", "outcome": "done", "changed": 0},
            "g1: base:* no changes",
        ),
        (node("g1", "fail", "lost"), "g1: fail: lost"),
        ({"event": "start", "node": "g1", "step": "base:*", "title": "x"}, None),
    ],
)
def test_a_log_has_a_line_for_what_matters(event: dict[str, Any], line: str | None) -> None:
    assert describe(event) == line


def test_an_operation_in_which_the_connection_was_lost_is_told_by_its_name() -> None:
    told: list[dict[str, Any]] = []
    recorder = Recorder("g1", told.append, forecast=False, step="slurm:worker")
    with pytest.raises(DeadlineExceeded), recorder.operation("install slurmd"):
        raise DeadlineExceeded("g1: no answer within 60 s to: apt-get")
    assert (
        describe(told[-1]) == "g1: slurm:worker FAILED: install slurmd: g1: no answer within 60 s to: apt-get"
    )
