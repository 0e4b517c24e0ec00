"""The clock on real nodes. chrony's own `offset` stands for a clock that is off: a container cannot set one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provision.lab import Lab
from tests.lab.checking import HEAD, WORKER, Bench, Case, bench, break_and_mend, hidden, tell_apart

CONF = "/etc/chrony/chrony.conf"
OTHER = "/etc/systemd/system/ntpd.service"
STOP, START = "systemctl stop chrony", "systemctl start chrony"
RUNS = hidden("time-daemon-runs", "systemctl -q disable --now chrony", "/usr/bin/systemctl")
SYNCHRONISED = Case(
    "time-synchronised",
    f"sed -i 's/^server .*/server 192.0.2.9/' {CONF}; systemctl restart chrony",
    STOP,
    START,
)
OFFSET = Case(
    "time-offset", f"sed -i 's/^server .*/& offset 600/' {CONF}; systemctl restart chrony", STOP, START
)
ONE_DAEMON = hidden(
    "time-one-daemon",
    f"printf '[Service]\\nExecStart=sleep infinity\\n' >{OTHER}; systemctl daemon-reload; systemctl start ntpd",
    "/usr/bin/systemctl",
)
CASES = [RUNS, SYNCHRONISED, OFFSET, ONE_DAEMON]


@pytest.fixture(scope="module")
def on(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(lab, tmp_path_factory.mktemp("time"), "time") as made:
        yield made
        lab.inside(WORKER, f"rm -f {OTHER}; systemctl daemon-reload")


def test_every_check_is_tried(on: Bench) -> None:
    assert {case.check for case in CASES} == on.names


def test_a_check_without_its_source_cannot_tell(on: Bench) -> None:
    tell_apart(on, CASES)


@pytest.mark.parametrize(
    "cases", [[RUNS], [SYNCHRONISED, ONE_DAEMON], [OFFSET]], ids=["stopped", "alone", "off"]
)
def test_what_is_changed_by_hand_fails_and_is_mended(on: Bench, cases: list[Case]) -> None:
    break_and_mend(on, cases)


def test_a_chronyd_that_dies_is_started_again(on: Bench) -> None:
    on.lab.inside(WORKER, "systemctl kill --signal=SEGV chrony")
    again = "systemctl show -p NRestarts,ActiveState chrony | sort | paste -sd ,"
    on.lab.inside(
        WORKER,
        f"timeout 60 sh -c 'until {again} | grep -qx ActiveState=active,NRestarts=1; do sleep 1; done'",
    )


def test_workers_follow_the_head_that_has_no_way_out(on: Bench) -> None:
    found = on.found("time-synchronised", WORKER)
    assert found.read == f"follows {on.lab.node(HEAD).address}, stratum 11"
    assert on.found("time-offset", HEAD).read == "leads by itself"
