"""The lease on the head is held by one worker process: what the others do when that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def told(when: str) -> list[dict[str, Any]]:
    """The events of a node's worker whose fellow ends `when` (see tests.unit.losing)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.losing", when],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [event for event in map(json.loads, done.stdout.splitlines()) if "event" in event]


def operations(events: list[dict[str, Any]]) -> list[str]:
    return [event["title"] for event in events if event["event"] == "op"]


def end(events: list[dict[str, Any]]) -> dict[str, Any]:
    (node,) = [event for event in events if event["event"] == "node"]
    return node


def test_without_the_lease_what_runs_is_let_end_and_nothing_more_is_begun() -> None:
    events = told("early")
    assert operations(events) == ["the first operation"]
    assert end(events)["verdict"] == "fail"
    assert end(events)["reason"] == "the lease on h1 ended with its worker process"
    assert "provision status" in end(events)["advice"]


def test_the_end_of_the_last_process_stops_nobody() -> None:
    events = told("last")
    assert operations(events) == ["the first operation", "the second operation", "what is switched off"]
    assert end(events)["verdict"] == "pass"


def test_a_plan_needs_no_lease() -> None:
    assert operations(told("plan")) == ["the first operation", "the second operation"]


def test_a_journal_that_takes_nothing_hides_no_reason() -> None:
    node = end(told("full"))
    assert (node["verdict"], node["advice"]) == ("fail", "make room")
    assert "No space left on device" in node["reason"]
    assert "journal" not in node["reason"]
