"""From findings to what is done with the node. Pure.

Unknown never admits and never resumes. It drains only after NVML or PCI could not be read three times running. What a
person drained stays drained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from provision.health.finding import ACTIONS, FAIL, PASS, SKIP, UNKNOWN, WARN, Finding, sternest, worst

MARK = "provision: health:"  # what this agent writes before its reasons, and alone takes back
OURS = "provision:"
UNREADABLE = frozenset(
    {"nvml", "gpu-count"}
)  # unknown of these means that nobody knows whether there are GPUs
PATIENCE = 3
REASON_LENGTH = 120  # what sinfo -R shows in a row, and scontrol takes


@dataclass(frozen=True)
class Decision:
    """What is to be done with one node."""

    verdict: str
    action: str | None  # one of ACTIONS; from "drain" on the node gets no new jobs
    reason: str  # for the scheduler, with what to do
    drain: bool
    resume: bool
    unreadable: int  # readings in a row without NVML or PCI

    @property
    def reason_marked(self) -> str:
        return f"{MARK} {self.reason}"[:REASON_LENGTH]


def decide(findings: Sequence[Finding], unreadable: int, state: str, reason: str | None) -> Decision:
    """What to do with a node that the scheduler has in `state` ("IDLE+DRAIN") for `reason`.

    unreadable: how often in a row NVML or PCI could not be read before this time.
    """
    verdict = worst(finding.verdict for finding in findings)
    blind = any(finding.verdict == UNKNOWN and finding.check in UNREADABLE for finding in findings)
    count = unreadable + 1 if blind else 0
    bad = [finding for finding in findings if finding.verdict == FAIL]
    action = sternest(finding.action for finding in [*bad, *(f for f in findings if f.verdict == WARN)])
    drained = "DRAIN" in state or "FAIL" in state
    grave = [finding for finding in bad if _rank(finding.action) >= _rank("drain")]
    drain = bool(grave) or count >= PATIENCE
    if not grave and count >= PATIENCE:
        action = "drain"
    told = (
        grave
        or bad
        or [f for f in findings if f.verdict == UNKNOWN]
        or [f for f in findings if f.verdict == WARN]
    )
    resume = drained and (reason or "").startswith(MARK) and verdict in (PASS, WARN, SKIP)
    return Decision(verdict, action, summary(told), drain and not drained, resume, count)


def summary(findings: Sequence[Finding]) -> str:
    """The gravest finding in one line, with what to do and how many others there are."""
    if not findings:
        return "well"
    first = max(findings, key=lambda finding: _rank(finding.action))
    what = first.read or first.why or ""
    action = f"; {first.action}" if first.action else ""
    more = f" (+{len(findings) - 1})" if len(findings) > 1 else ""
    room = REASON_LENGTH - len(MARK) - 1 - len(action) - len(more)
    return f"{first.check} {first.subject}: {what}"[:room].rstrip() + action + more


def _rank(action: str | None) -> int:
    return ACTIONS.index(action) if action in ACTIONS else -1


def drained_by_agents(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(node, moment) of nodes that agents drained, from lines `NODE|REASON|MOMENT` of `sinfo -N -o '%N|%E|%H'`."""
    found = []
    for line in lines:
        fields = line.strip().split("|")
        if len(fields) == 3 and fields[1].startswith(MARK):
            found.append((fields[0], fields[2]))
    return sorted(set(found))
