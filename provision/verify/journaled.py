"""A verification as verbs run it: with the site's lock, an entry in the journal, and one document as the answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from provision.engine.journal import journaled
from provision.engine.stop import interrupt, on_stop
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

    Where a person ends it (Ctrl-C, TERM), what it did not come to is UNKNOWN. Raises LockError before any node is
    touched.
    """
    start = time.monotonic()
    lock = load_lock(site)
    found: list[tuple[float, str, Finding | None]] = []  # moment, node, finding; None: the node is done

    def note(node: str, finding: Finding | None) -> None:
        found.append((time.time(), node, finding))
        progress(node, finding)

    with journaled(site, "verify", looking=True) as entry:
        interrupted = False
        try:
            with on_stop(interrupt):
                findings = verify(
                    site,
                    lock,
                    nodes,
                    components=components,
                    sudo_password=sudo_password,
                    timeout=timeout,
                    progress=note,
                )
        except KeyboardInterrupt:
            interrupted = True
            findings = cut_short(nodes, [(node, finding) for _, node, finding in found])
        finally:
            entry.add(
                [
                    (at, _event(finding))
                    for at, _, finding in list(found)
                    if finding is not None and finding.verdict not in (Verdict.PASS, Verdict.SKIP)
                ]
            )
        answer = document(site, nodes, findings, time.monotonic() - start)
        answer.details["interrupted"] = interrupted
        entry.conclude(answer)
    return answer


def cut_short(nodes: Sequence[Node], told: Sequence[tuple[str, Finding | None]]) -> list[Finding]:
    """The findings of a verification that a person has ended, from what was `told` of each node, with None at its end.

    A node that was not done is UNKNOWN: what its checks said as they were cut off is nothing to go by. Pure.
    """
    done = {name for name, finding in told if finding is None}
    findings = []
    for node in nodes:
        if node.name in done:
            findings += [finding for name, finding in told if name == node.name and finding is not None]
        else:
            findings.append(
                Finding(
                    verdict=Verdict.UNKNOWN,
                    check="verify-ended",
                    subject=node.name,
                    why="interrupted",
                    action="run it again",
                )
            )
    return findings


def _event(finding: Finding) -> dict[str, object]:
    return {"event": "finding", "node": finding.subject, **finding.model_dump(mode="json", exclude_none=True)}
