"""A verification as verbs run it: with the site's lock, an entry in the journal, and one document as the answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from provision.engine.journal import journaled
from provision.report.model import Document, Finding, Verdict
from provision.site.lock import load_lock
from provision.site.models import Node, Site
from provision.verify.run import Progress, document, verify


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

    Raises LockError before any node is touched.
    """
    start = time.monotonic()
    lock = load_lock(site)
    found: list[tuple[float, Finding]] = []

    def note(node: str, finding: Finding | None) -> None:
        if finding is not None and finding.verdict not in (Verdict.PASS, Verdict.SKIP):
            found.append((time.time(), finding))
        progress(node, finding)

    with journaled(site, "verify", looking=True) as entry:
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
        finally:
            entry.add([(at, _event(finding)) for at, finding in found])
        answer = document(site, nodes, findings, time.monotonic() - start)
        entry.conclude(answer)
    return answer


def _event(finding: Finding) -> dict[str, object]:
    return {"event": "finding", "node": finding.subject, **finding.model_dump(mode="json", exclude_none=True)}
