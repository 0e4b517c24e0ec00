"""A playbook as the verb `run` runs it: with an entry in the journal, every event kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from provision.engine.controller import holder, new_run
from provision.engine.journal import Journal
from provision.engine.playbook import run_playbook
from provision.report.model import Document, Verdict
from provision.report.store import state_directory
from provision.site.models import Node, Site

Event = dict[str, Any]


def run_journaled(
    site: Site,
    playbook: Path,
    nodes: Sequence[Node],
    *,
    extra: Mapping[str, Any],
    check: bool,
    timeout: int | None,
    sudo_password: str | None,
    show: Callable[[Event], None],
) -> Document:
    """Run `playbook` on `nodes` as `run_playbook` does, and journal it whatever happens. Raises PlaybookError."""
    journal = Journal(state_directory(site))
    run = new_run()
    journal.begin(run, "run", holder(), site.digest, _now())
    events: list[tuple[float, Event]] = []
    verdict = Verdict.UNKNOWN

    def note(event: Event) -> None:
        if event["event"] not in ("start", "note"):
            events.append((time.time(), event))
        show(event)

    try:
        document = run_playbook(
            site,
            playbook,
            nodes,
            run=run,
            extra=extra,
            check=check,
            timeout=timeout,
            sudo_password=sudo_password,
            show=note,
        )
        verdict = document.verdict
    finally:
        journal.add(run, events)
        journal.end(run, _now(), verdict)
    return document


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
