"""From what a burn-in measured to a verdict for each node. Pure: the same input gives the same verdicts.

A wrong bit fails a node whatever its model; a speed is only judged where a limit is known, and where none is
the verdict is unknown, never pass. On the CPU no speed is judged at all (skip).

`bits`: right or wrong; `speed`: limits and the fleet; `machine`: who took part, over what, what it said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from provision.burnin.judge.bits import bits
from provision.burnin.judge.machine import attendance, machine
from provision.burnin.judge.parts import Expected, Judged, found
from provision.burnin.judge.speed import limits_used, speed
from provision.burnin.result import BurninResult
from provision.profiles.gpu import Measure
from provision.report.model import Finding, NodeResult, Verdict, worst

__all__ = ["Expected", "Judgement", "judge", "limits_used"]


@dataclass(frozen=True)
class Judgement:
    """Findings, and the verdict of each expected node with the reason for anything but a pass."""

    verdict: Verdict
    nodes: dict[str, NodeResult]
    findings: list[Finding]


def judge(
    result: BurninResult | None,
    expected: Mapping[str, Expected],
    *,
    limits: Mapping[Measure, float] | None = None,
    left_out: Mapping[str, str] | None = None,
    why_no_result: str | None = None,
    source: str | None = None,
) -> Judgement:
    """Judge a run on the nodes `expected`.

    `limits` are the site's own (measure -> lowest number that passes); `left_out` are nodes that could not
    take part, with the reason; `why_no_result` explains a missing `result`; `source` is the document's path.
    """
    left_out = left_out or {}
    took_part = [node for node in expected if node not in left_out]
    judged = [
        found(Verdict.UNKNOWN, "burnin-ran", [node], why=left_out[node])
        for node in expected
        if node in left_out
    ]
    if result is None:
        why = why_no_result or "there is no result"
        judged += [found(Verdict.UNKNOWN, "burnin-ran", [node], why=why) for node in took_part]
    else:
        judged += attendance(result, took_part, expected)
        if result.ranks:
            judged += bits(result)
            judged += _idle(result, speed(result, expected, limits or {}))
            judged += machine(result, expected)
    for entry in judged:
        entry.finding.source = entry.finding.source or source
    nodes = {node: _node_result(node, judged) for node in expected}
    return Judgement(worst(node.verdict for node in nodes.values()), nodes, [j.finding for j in judged])


def _idle(result: BurninResult, speeds: Iterable[Judged]) -> Iterable[Judged]:
    """Speeds of nodes that were busy with something else are not the hardware's: nothing is told by them."""
    busy = {host.host for host in result.hosts if host.busy}
    for entry in speeds:
        if busy.intersection(entry.nodes) and entry.finding.verdict is not Verdict.SKIP:
            finding = entry.finding
            why = f"{finding.why or finding.read}: not judged, GPUs of {', '.join(sorted(busy))} were busy"
            yield found(Verdict.UNKNOWN, finding.check, entry.nodes, read=finding.read, why=why)
        else:
            yield entry


def _node_result(node: str, judged: Iterable[Judged]) -> NodeResult:
    about = [entry.finding for entry in judged if node in entry.nodes]
    verdict = worst(finding.verdict for finding in about)
    reasons = [finding.why for finding in about if finding.verdict is verdict and finding.why]
    reason = None if verdict in (Verdict.PASS, Verdict.SKIP) else (reasons or ["nothing was measured"])[0]
    return NodeResult(verdict=verdict, reason=reason)
