"""Which state each node goes to. Pure: what was known and what was found in, transitions out.

Unknown never admits. A node that this tool quarantined comes back by passing everything again; what a person drained
in the scheduler is not looked at here and stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from provision.engine.headstate import Acceptance, State
from provision.report.model import NodeResult, Verdict

ORDER: tuple[State, ...] = ("new", "configured", "verified", "burned-in", "admitted")


@dataclass(frozen=True)
class Transition:
    """A node's new state, and what the scheduler must be told."""

    node: str
    state: State
    reason: str | None
    admit: bool = False  # may take work from now on
    withdraw: bool = False  # was trusted with work and is not any more


def after_apply(before: Mapping[str, Acceptance], results: Mapping[str, NodeResult]) -> dict[str, Transition]:
    """Converged nodes are configured; ones that were further keep their state, failed ones keep theirs."""
    moved = {}
    for node, result in results.items():
        state = before[node].state if node in before else "new"
        if result.verdict.good and state in ("new", "quarantined"):
            moved[node] = Transition(node, "configured", None)
    return moved


def after_verify(
    states: Mapping[str, State],
    results: Mapping[str, NodeResult],
    workers: Collection[str],
    closed: Mapping[str, str],
) -> dict[str, Transition]:
    """Nodes that pass are verified; ones without work to take are admitted; failing ones are quarantined.

    An admitted node that this tool itself has closed since (`closed`: why) has lost its admission, by a burn-in that
    was interrupted or failed, and earns it again. No more than `withdrawals` admitted nodes are withdrawn in one go:
    a broken check must not empty a cluster.
    """
    moved = {
        node: Transition(node, "configured", closed[node])
        for node in results
        if states[node] == "admitted" and node in closed
    }
    states = {**states, **{node: move.state for node, move in moved.items()}}
    failing = [
        node
        for node, result in results.items()
        if result.verdict is Verdict.FAIL and states[node] == "admitted"
    ]
    allowed = set(failing[: withdrawals(len(workers))])
    for node, result in results.items():
        state = states[node]
        if result.verdict.good:
            if state == "configured":
                moved[node] = (
                    Transition(node, "verified", None)
                    if node in workers
                    else Transition(node, "admitted", None)
                )
        elif result.verdict is Verdict.FAIL and state != "new" and (state != "admitted" or node in allowed):
            moved[node] = Transition(
                node, "quarantined", result.reason, withdraw=state == "admitted" and node in workers
            )
    return moved


def to_burn_in(
    states: Mapping[str, State], results: Mapping[str, NodeResult], workers: Collection[str], *, again: bool
) -> list[str]:
    """The workers that are burned in now: those that verify has found good and that are not admitted yet (`again`:
    these, too). Unknown never admits, however far the node had come before."""
    waiting = ("verified", "burned-in", *(["admitted"] if again else []))
    return [
        node
        for node, result in results.items()
        if node in workers and result.verdict.good and states[node] in waiting
    ]


def after_burnin(results: Mapping[str, NodeResult]) -> dict[str, Transition]:
    """Nodes that passed are admitted, ones that failed are quarantined, others stay verified."""
    moved: dict[str, Transition] = {}
    for node, result in results.items():
        if result.verdict in (Verdict.PASS, Verdict.WARN):
            moved[node] = Transition(node, "admitted", None, admit=True)
        elif result.verdict is Verdict.FAIL:
            moved[node] = Transition(node, "quarantined", result.reason)
    return moved


def withdrawals(workers: int) -> int:
    """How many nodes may be withdrawn by one run: two, or 5 % of a larger cluster."""
    return max(2, math.floor(workers * 0.05))
