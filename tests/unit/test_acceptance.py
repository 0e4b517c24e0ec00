"""Who is admitted, who is put away: unknown never admits, and a broken check must not empty a cluster."""

from __future__ import annotations

import pytest

from provision.acceptance.decide import after_apply, after_burnin, after_verify, to_burn_in, withdrawals
from provision.engine.headstate import Acceptance, State
from provision.report.model import NodeResult, Verdict


def result(verdict: str, reason: str | None = None) -> NodeResult:
    return NodeResult(verdict=Verdict(verdict), reason=reason)


def known(state: State) -> Acceptance:
    return Acceptance(state=state, since="2026-01-01T00:00:00+00:00")


def test_converged_nodes_are_configured_and_others_stay_where_they_are() -> None:
    before = {"old": known("admitted"), "bad": known("quarantined")}
    results = {"old": result("pass"), "bad": result("pass"), "new": result("pass"), "dead": result("fail")}
    assert {name: move.state for name, move in after_apply(before, results).items()} == {
        "bad": "configured",
        "new": "configured",
    }


@pytest.mark.parametrize(
    ("state", "verdict", "worker", "expected"),
    [
        ("configured", "pass", True, "verified"),
        ("configured", "warn", True, "verified"),
        ("configured", "pass", False, "admitted"),
        ("configured", "unknown", True, None),
        ("configured", "fail", True, "quarantined"),
        ("admitted", "pass", True, None),
        ("admitted", "unknown", True, None),
        ("admitted", "fail", True, "quarantined"),
        ("new", "fail", True, None),
    ],
)
def test_verify_moves_a_node(state: State, verdict: str, worker: bool, expected: str | None) -> None:
    moved = after_verify({"n": state}, {"n": result(verdict, "why")}, {"n"} if worker else set(), {})
    assert (moved["n"].state if "n" in moved else None) == expected


def test_an_admitted_node_that_fails_is_withdrawn_from_the_scheduler() -> None:
    assert after_verify({"n": "admitted"}, {"n": result("fail", "why")}, {"n"}, {})["n"].withdraw


@pytest.mark.parametrize(
    ("state", "verdict", "expected"),
    [
        ("admitted", "pass", "verified"),
        ("admitted", "unknown", "configured"),
        ("admitted", "fail", "quarantined"),
        ("verified", "pass", None),
    ],
)
def test_an_admitted_node_that_this_tool_closed_since_earns_its_admission_again(
    state: State, verdict: str, expected: str | None
) -> None:
    moved = after_verify(
        {"n": state}, {"n": result(verdict, "why")}, {"n"}, {"n": "provision: burn-in was interrupted"}
    )
    assert (moved["n"].state if "n" in moved else None) == expected


def test_no_more_than_two_nodes_or_five_percent_are_withdrawn_at_once() -> None:
    nodes = [f"n{i}" for i in range(100)]
    moved = after_verify(
        dict.fromkeys(nodes, "admitted"), {n: result("fail", "why") for n in nodes}, set(nodes), {}
    )
    assert len(moved) == 5
    assert [withdrawals(count) for count in (1, 10, 40, 41, 2000)] == [2, 2, 2, 2, 100]


@pytest.mark.parametrize(
    ("state", "verdict", "again", "expected"),
    [
        ("verified", "pass", False, True),
        ("burned-in", "warn", False, True),
        ("verified", "unknown", False, False),  # as an earlier run left it
        ("burned-in", "unknown", False, False),
        ("configured", "unknown", False, False),
        ("admitted", "pass", False, False),
        ("admitted", "pass", True, True),
        ("admitted", "fail", True, False),
    ],
)
def test_only_what_verify_finds_good_is_burned_in(
    state: State, verdict: str, again: bool, expected: bool
) -> None:
    chosen = to_burn_in({"n": state, "h": "verified"}, {"n": result(verdict)}, {"n"}, again=again)
    assert chosen == (["n"] if expected else [])


def test_only_workers_are_burned_in() -> None:
    assert to_burn_in({"h": "verified"}, {"h": result("pass")}, {"n"}, again=True) == []


def test_only_a_passed_burnin_admits() -> None:
    moved = after_burnin(
        {"a": result("pass"), "b": result("unknown"), "c": result("fail", "slow"), "d": result("skip")}
    )
    assert {name: (move.state, move.admit) for name, move in moved.items()} == {
        "a": ("admitted", True),
        "c": ("quarantined", False),
    }
