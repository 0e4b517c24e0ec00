"""What the agent remembers, and what it decides from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.health import budget, decide, memory
from provision.health.catalogue import judge
from provision.health.finding import FAIL, PASS, UNKNOWN, WARN, Finding
from provision.health.kernel import Event
from provision.health.limits import load
from provision.health.readings import Device

LIMITS = load()


def reading(boot: str = "b1", **values: Any) -> Device:
    return Device("gpu-1", {"boot": boot, **values})


def port(symbol: int = 0, downed: int = 0, guid: str = "0x1") -> Device:
    return Device(
        "mlx5_0:1", {"guid": guid, "symbol_error": symbol, "link_downed": downed, "state": "ACTIVE"}
    )


def over(readings: list[Device], step: float = 60.0) -> Device:
    """The last of `readings`, completed by the memory of those before it; the state is stored between as JSON."""
    state = memory.empty()
    for count, each in enumerate(readings):
        state, node = memory.complete(json.loads(json.dumps(state)), each, LIMITS, count * step)
    return node


def grown(*counts: int, guid: str = "0x1") -> int:
    return over([reading(ports=[port(count, guid=guid)]) for count in counts])["ports"][0][
        "symbol_error.delta"
    ]


def test_what_a_counter_had_before_the_first_reading_is_not_new() -> None:
    assert grown(70_000) == 0
    assert grown(70_000, 70_003) == 3


def test_a_counter_that_was_reset_has_grown_by_all_that_it_has() -> None:
    assert grown(100, 110, 4) == 14


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12))
def test_growth_is_the_sum_of_all_steps_up_whatever_the_resets(counts: list[int]) -> None:
    pairs = [counts[place : place + 2] for place in range(len(counts) - 1)]
    steps = [after - before if after >= before else after for before, after in pairs]
    assert grown(*counts) == sum(steps)


def test_a_new_boot_and_another_adapter_begin_anew() -> None:
    assert (
        over([reading("b1", ports=[port(5)]), reading("b2", ports=[port(9)])])["ports"][0][
            "symbol_error.delta"
        ]
        == 0
    )
    moved = [reading(ports=[port(5, guid="0x1")]), reading(ports=[port(900, guid="0x2")])]
    assert over(moved)["ports"][0]["symbol_error.delta"] == 0


def test_flaps_are_counted_over_their_window() -> None:
    hours = [reading(ports=[port(downed=count)]) for count in (0, 1, 2, 3)]
    assert over(hours, step=3600)["ports"][0]["flaps"] == 3
    assert over(hours, step=7 * 3600)["ports"][0]["flaps"] == 2  # the first one is more than 12 hours old


def test_carrier_changes_are_two_for_each_flap() -> None:
    nics = [reading(nics=[Device("eth0", {"carrier_changes": count})]) for count in (2, 8)]
    assert over(nics)["nics"][0]["flaps"] == 3


def xid_event(sequence: int, count: int = 1, number: int = 79) -> Event:
    return Event("xid", "0000:1b:00.0", number, "text", count, sequence=sequence)


def test_an_event_stays_known_when_the_kernel_has_forgotten_it_and_is_not_counted_twice() -> None:
    seen = [[xid_event(10, 3)], [xid_event(10, 3)], []]
    node = over([reading(**{"kernel.events": events}) for events in seen])
    (event,) = node["kernel.events"]
    assert (event.number, event.count) == (79, 3)


def test_an_acknowledged_event_is_gone_and_a_later_one_is_new() -> None:
    state, _ = memory.complete(memory.empty(), reading(**{"kernel.events": [xid_event(10)]}), LIMITS, 0)
    state = memory.acknowledge(state, "look")
    state, node = memory.complete(state, reading(**{"kernel.events": [xid_event(10)]}), LIMITS, 60)
    assert node["kernel.events"] == []
    _, node = memory.complete(state, reading(**{"kernel.events": [xid_event(11)]}), LIMITS, 120)
    assert len(node["kernel.events"]) == 1


def test_what_asked_for_a_reset_and_came_back_after_a_reboot_asks_for_more() -> None:
    state, _ = memory.complete(
        memory.empty(), reading("b1", **{"kernel.events": [xid_event(10, number=79)]}), LIMITS, 0
    )
    for boot, expected in (("b2", "reboot"), ("b3", "rma")):
        state["asked"] = ["0000:1b:00.0 79"]
        state, node = memory.complete(state, reading(boot, **{"kernel.events": [xid_event(5)]}), LIMITS, 100)
        (found,) = [each for each in judge(node, LIMITS, partial=True) if each.check == "xid"]
        assert found.action == expected


def test_a_process_is_stuck_when_it_has_been_seen_so_for_long() -> None:
    waiting = {"pid": 7, "start": "99", "name": "rsync", "state": "D", "seconds": 0.0}
    assert (
        over([reading(**{"processes.stuck": [waiting]})] * 3, step=200)["processes.stuck"][0]["seconds"]
        == 400
    )
    other = {**waiting, "start": "100"}  # the pid was given to another
    assert (
        over([reading(**{"processes.stuck": [each]}) for each in (waiting, other)])["processes.stuck"][0][
            "seconds"
        ]
        == 0
    )


def test_memory_used_at_idle_is_the_least_ever_seen() -> None:
    gpus = [
        Device("GPU 0", {"uuid": "GPU-0", "processes": [], "memory.used": used}) for used in (600, 4, 500)
    ]
    assert over([reading(gpus=[gpu]) for gpu in gpus])["gpus"][0]["memory.idle"] == 4


# ---- decisions


def bad(verdict: str = FAIL, action: str | None = "drain", check: str = "nvlink-count") -> Finding:
    return Finding(verdict, check, "GPU 3", "17 of 18 up", "18", action)


def test_a_failure_drains_and_says_what_to_do_in_a_reason_that_fits() -> None:
    decision = decide.decide([bad(action="reset"), bad()], 0, "IDLE", None)
    assert (decision.drain, decision.action) == (True, "reset")
    assert decision.reason_marked == "provision: health: nvlink-count GPU 3: 17 of 18 up; reset (+1)"


@given(st.text(max_size=500), st.text(max_size=500))
def test_a_reason_fits_and_keeps_its_action(read: str, subject: str) -> None:
    decision = decide.decide([Finding(FAIL, "xid", subject, read, "none", "reboot")], 0, "IDLE", None)
    assert len(decision.reason_marked) <= decide.REASON_LENGTH
    assert decision.reason_marked.startswith(decide.MARK)
    assert decision.reason_marked.endswith("; reboot")


@pytest.mark.parametrize("action", ["warn", "fix"])
def test_what_is_mended_or_looked_at_drains_nobody(action: str) -> None:
    assert not decide.decide([bad(WARN, action)], 0, "IDLE", None).drain


def test_unknown_drains_after_three_readings_without_nvml_and_never_for_anything_else() -> None:
    blind = Finding(UNKNOWN, "nvml", "gpu-1", why="did not answer")
    seen = 0
    drains = []
    for _ in range(3):
        decision = decide.decide([blind], seen, "IDLE", None)
        seen = decision.unreadable
        drains.append(decision.drain)
    assert drains == [False, False, True]
    assert not decide.decide([Finding(UNKNOWN, "clock", "gpu-1", why="?")], 9, "IDLE", None).drain
    assert decide.decide([bad(PASS, None)], 2, "IDLE", None).unreadable == 0


@pytest.mark.parametrize(
    ("reason", "verdict", "resumed"),
    [
        ("provision: health: xid GPU 0: XID 79; reboot", PASS, True),
        ("provision: health: xid GPU 0: XID 79; reboot", UNKNOWN, False),
        ("provision: health: xid GPU 0: XID 79; reboot", FAIL, False),
        ("provision: awaiting acceptance", PASS, False),
        ("swap PSU", PASS, False),
        ("", PASS, False),
        (None, PASS, False),
    ],
)
def test_only_what_an_agent_drained_is_resumed_and_only_when_all_is_well(
    reason: str | None, verdict: str, resumed: bool
) -> None:
    assert decide.decide([bad(verdict, None)], 0, "IDLE+DRAIN", reason).resume is resumed


def test_a_node_that_is_drained_is_not_drained_again() -> None:
    assert not decide.decide([bad()], 0, "IDLE+DRAIN", "swap PSU").drain


@pytest.mark.parametrize(("nodes", "most"), [(1, 2), (40, 2), (60, 3), (1000, 50)])
def test_the_budget_is_two_or_five_percent(nodes: int, most: int) -> None:
    assert budget.budget(nodes) == most


def test_the_budget_is_of_the_last_hour() -> None:
    drained = {"gpu-1": 1000.0, "gpu-2": 2000.0}
    assert budget.used_up(drained, 8, 4599.0)
    assert not budget.used_up(drained, 8, 4601.0)
    assert budget.recent({**drained, "gpu-0": 2000.0}, 4601.0) == ["gpu-0", "gpu-2"]


@given(st.data())
def test_of_agents_that_drain_in_one_moment_never_more_than_the_budget_stay(data: st.DataObject) -> None:
    """Their steps interleave in any way; their clocks differ."""
    clocks = data.draw(st.lists(st.sampled_from([999.0, 1000.0, 1001.0]), min_size=3, max_size=7))
    drained: dict[str, float] = {}

    def agent(name: str, clock: float) -> Iterator[None]:
        if budget.used_up(drained, 8, 1000.0):
            return
        yield
        drained[name] = clock
        looks: list[tuple[dict[str, float], int]] = []
        while True:
            yield
            looks.append((dict(drained), 8))
            try:
                stays = budget.stays(name, iter(looks).__next__, lambda: 1000.0, lambda _: None)
            except StopIteration:
                continue  # it waits, and looks again
            break
        if not stays:
            yield
            del drained[name]

    running = [agent(f"gpu-{number}", clock) for number, clock in enumerate(clocks)]
    while running:
        step = data.draw(st.integers(0, len(running) - 1))
        if next(running[step], "ended") == "ended":
            del running[step]
    assert len(drained) <= 2


def test_drains_of_agents_are_told_from_those_of_people() -> None:
    lines = [
        "gpu-1|provision: health: xid; reset|2025-03-03T10:00:00",
        "gpu-2|swap PSU|2025-03-03T10:00:00",
        "gpu-3|none|Unknown",
    ]
    assert decide.drained_by_agents(lines) == [("gpu-1", "2025-03-03T10:00:00")]
