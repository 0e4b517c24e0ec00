"""A playbook as the verb `run` runs it: with an entry in the journal, every event kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from provision.engine import runs
from provision.engine.journal import journaled
from provision.engine.playbook import run_playbook
from provision.report.model import Document
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
    """Run `playbook` on `nodes` as `run_playbook` does, and journal it whatever happens.

    Raises PlaybookError, and JournalError before any node is touched.
    """
    events: list[tuple[float, Event]] = []

    def note(event: Event) -> None:
        if event["event"] not in ("start", "note"):
            events.append((time.time(), event))
        show(event)

    with journaled(site, "run") as entry:
        try:
            document = run_playbook(
                site,
                playbook,
                nodes,
                run=entry.run,
                extra=extra,
                check=check,
                timeout=timeout,
                sudo_password=sudo_password,
                show=note,
            )
        finally:
            entry.add(events)
        if not check:
            runs.keep(site, entry, document, sudo_password=sudo_password)
        entry.conclude(document)
    return document
