"""A playbook as the verb `run` runs it: with an entry in the journal, every event kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from provision.engine import runs
from provision.engine.journal import Entry, journaled
from provision.engine.locks import held
from provision.engine.playbook import run_playbook
from provision.engine.preflight import PreflightError
from provision.engine.remote import RemoteError
from provision.report.model import Document, Finding, NodeResult, Verdict
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
    """Run `playbook` on `nodes` as `run_playbook` does, behind the locks of an apply; journal it whatever happens.

    Where another run holds one of them nothing is done on any node. Raises PlaybookError, and JournalError before any
    node is touched.
    """
    events: list[tuple[float, Event]] = []

    def note(event: Event) -> None:
        if event["event"] not in ("start", "note"):
            events.append((time.time(), event))
        show(event)

    with journaled(site, "run") as entry:
        play = partial(
            run_playbook,
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
        try:
            if check:
                document = play()
            else:
                with held(
                    site, nodes, holder=entry.holder, run=entry.run, sudo_password=sudo_password
                ) as missing:
                    document = _refused(site, nodes, entry, missing) or play()
        finally:
            entry.add(events)
        if not check:
            runs.keep(site, entry, document, sudo_password=sudo_password)
        entry.conclude(document)
    return document


def _refused(
    site: Site, nodes: Sequence[Node], entry: Entry, missing: Mapping[str, PreflightError | RemoteError]
) -> Document | None:
    """The answer where another run holds a lock; None where none does. Nodes that are silent are Ansible's to tell."""
    taken = {name: error for name, error in missing.items() if isinstance(error, PreflightError)}
    if not taken:
        return None
    blocked = f"blocked by {next(iter(taken))}: another run holds it"
    return Document(
        verb="run",
        site=site.cluster,
        verdict=Verdict.FAIL,
        nodes={
            node.name: NodeResult(
                verdict=Verdict.FAIL,
                failed=int(node.name in taken),
                reason=str(taken[node.name]) if node.name in taken else blocked,
            )
            for node in nodes
        },
        findings=[
            Finding(
                verdict=Verdict.FAIL, check="playbook", subject=name, read=str(error), action=error.advice
            )
            for name, error in taken.items()
        ],
        details={"run": entry.run, "interrupted": False, "operations": []},
    )
