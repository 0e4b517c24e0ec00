"""The budget of drains by agents: a broken checker cannot empty a cluster.

No more nodes than the budget ever stay drained: each agent looks again after it has drained its node. Where several did
so in the same moment, those that come later in the order take theirs back, and the others wait until they have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Callable

SECONDS = 3600.0
LOOKS = 3

Drained = Mapping[str, float]  # node -> when an agent drained it, seconds since 1970


def budget(nodes: int) -> int:
    """How many nodes of a partition of `nodes` may be drained by agents in an hour."""
    return max(2, nodes * 5 // 100)


def recent(drained: Drained, now: float) -> list[str]:
    """The nodes that were drained within the last hour, the earliest first, then by name."""
    return [node for at, node in sorted((at, node) for node, at in drained.items()) if now - at < SECONDS]


def used_up(drained: Drained, nodes: int, now: float) -> bool:
    """Whether no further one of `nodes` may be drained now."""
    return len(recent(drained, now)) >= budget(nodes)


def stays(
    node: str,
    look: Callable[[], tuple[Drained, int]],
    now: Callable[[], float],
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether `node`, which this agent has just drained, may stay so. look: what is drained, of how many nodes."""
    for _ in range(LOOKS):
        drained, nodes = look()
        order = recent(drained, now())
        if len(order) <= budget(nodes):
            return True
        if node not in order[: budget(nodes)]:
            return False
        wait(1)
    return False
