"""What all parts of the judge share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from provision.burnin.result import BurninResult
from provision.report.model import Finding, Verdict
from provision.site.hostlist import fold
from provision.site.models import Fabric


@dataclass(frozen=True)
class Expected:
    """What the site says about one node."""

    gpus: int = 0  # ranks that use a GPU; 0: one rank on the CPU
    model: str | None = None  # as the site file names it, "h100-sxm"
    fabric: Fabric | None = None  # what ranks on different nodes reach each other by


@dataclass(frozen=True)
class Judged:
    """A finding and the nodes whose verdict it counts for."""

    nodes: tuple[str, ...]
    finding: Finding


def found(
    verdict: Verdict,
    check: str,
    nodes: Sequence[str],
    *,
    read: str | None = None,
    expected: str | None = None,
    why: str | None = None,
    action: str | None = None,
    source: str | None = None,
) -> Judged:
    """A finding about all of `nodes`."""
    return Judged(
        tuple(nodes),
        Finding(
            verdict=verdict,
            check=check,
            subject=fold(nodes),
            read=read,
            expected=expected,
            why=why,
            action=action,
            source=source,
        ),
    )


def hosts(result: BurninResult) -> list[str]:
    """The nodes that ranks ran on, in the ranks' order."""
    return list(dict.fromkeys(rank.host for rank in result.ranks))


def recorded_by(result: BurninResult) -> bool:
    """Whether the program was new enough to record the machine beside its numbers."""
    return bool(result.hosts)


def listed(entries: Iterable[object]) -> str:
    """ "0, 1, 5" """
    return ", ".join(map(str, entries))
