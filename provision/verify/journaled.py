"""A verification as verbs run it: with the site's lock, an entry in the journal, and one document as the answer."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from provision.engine.controller import holder, new_run
from provision.engine.journal import Journal
from provision.report.model import Document, Finding, Verdict
from provision.report.store import state_directory
from provision.site.lock import load_lock
from provision.site.models import Node, Site
from provision.verify.run import Progress, document, verify


class JournalError(Exception):
    """The journal cannot be written; the message says where it is and what to do."""


def verify_journaled(
    site: Site,
    nodes: Sequence[Node],
    *,
    components: Collection[str] | None = None,
    sudo_password: str | None = None,
    timeout: float = 60.0,
    progress: Progress = lambda node, finding: None,
) -> Document:
    """Run the checks on `nodes` and journal what was not in order; `timeout` is for each node, in seconds.

    Raises JournalError, before any node is touched, where there can be no journal.
    """
    start = time.monotonic()
    lock = load_lock(site)
    run = new_run()
    journal = _begin(site, run)
    verdict = Verdict.UNKNOWN
    found: list[tuple[float, Finding]] = []

    def note(node: str, finding: Finding | None) -> None:
        if finding is not None and finding.verdict not in (Verdict.PASS, Verdict.SKIP):
            found.append((time.time(), finding))
        progress(node, finding)

    try:
        findings = verify(
            site,
            lock,
            nodes,
            components=components,
            sudo_password=sudo_password,
            timeout=timeout,
            progress=note,
        )
        answer = document(site, nodes, findings, time.monotonic() - start)
        answer.details["run"] = run
        verdict = answer.verdict
    finally:
        journal.add(run, [(at, _event(finding)) for at, finding in found])
        journal.end(run, _now(), verdict)
    return answer


def _begin(site: Site, run: str) -> Journal:
    directory = state_directory(site)
    try:
        journal = Journal(directory)
        journal.begin(run, "verify", holder(), site.digest, _now())
    except (OSError, sqlite3.Error) as error:
        raise JournalError(
            f"{directory} cannot be written: {error}; XDG_STATE_HOME names another place"
        ) from error
    return journal


def _event(finding: Finding) -> dict[str, object]:
    return {"event": "finding", "node": finding.subject, **finding.model_dump(mode="json", exclude_none=True)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
