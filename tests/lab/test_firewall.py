"""The packet filter on real nodes: who gets through, and what happens to other tables."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from provision.lab import Lab, netns
from provision.report.model import Verdict
from tests.lab.checking import HEAD, WORKER, Bench, bench, break_and_mend, hidden, tell_apart

CASES = [
    hidden("firewall-rules", "nft add rule inet provision input tcp dport 23 accept", "/usr/sbin/nft"),
    hidden("firewall-at-boot", "systemctl -q disable provision-firewall", "/usr/bin/systemctl"),
]


@pytest.fixture(scope="module")
def on(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(
        lab,
        tmp_path_factory.mktemp("firewall"),
        "firewall",
        firewall={"open": ["8443"]},
        networks={"management": [f"{lab.node(name).address}/32" for name in (HEAD, WORKER)]},
    ) as made:
        yield made


def test_every_check_is_tried(on: Bench) -> None:
    assert {case.check for case in CASES} == on.names


def test_a_check_without_its_source_cannot_tell(on: Bench) -> None:
    tell_apart(on, CASES)


def test_what_is_changed_by_hand_fails_and_is_mended(on: Bench) -> None:
    break_and_mend(on, CASES)


def test_a_lost_table_is_seen_and_loaded_again_and_other_tables_stay(on: Bench) -> None:
    on.lab.inside(
        WORKER, "nft add table ip another; nft add chain ip another kept; nft delete table inet provision"
    )
    assert on.plan() == {HEAD: 0, WORKER: 1}
    assert on.apply() == {HEAD: 0, WORKER: 1}
    tables = on.lab.inside(WORKER, "nft list tables")
    assert "table inet provision" in tables
    assert "chain kept" in on.lab.inside(WORKER, "nft list table ip another; nft delete table ip another")


def test_the_cluster_reaches_every_port_and_others_only_the_named_ones(on: Bench) -> None:
    """From the lab's own side of the bridge, which is not one of the cluster's addresses."""
    serve = "import socket,time; l=[socket.create_server(('',p)) for p in (8443,9999)]; time.sleep(600)"
    on.lab.inside(
        WORKER,
        f'systemd-run -q --unit=listen /usr/bin/python3 -c "{serve}"; '
        "for i in 1 2 3 4 5 6 7 8 9; do ss -Hltn | grep -q :9999 && break; sleep 1; done",
    )
    address = on.lab.node(WORKER).address
    try:
        inside = {port: _from_head(on, address, port) for port in (8443, 9999, 22)}
        outside = {port: _from_outside(on, address, port) for port in (8443, 9999, 22)}
    finally:
        on.lab.inside(WORKER, "systemctl stop listen")
    assert inside == {8443: True, 9999: True, 22: True}
    assert outside == {8443: True, 9999: False, 22: True}


@pytest.mark.parametrize("order", ["restart", "reload", "stop nftables; systemctl start"])
def test_rules_hold_when_the_distributions_own_filter_flushes_all_tables(on: Bench, order: str) -> None:
    on.lab.inside(WORKER, "systemctl start nftables")
    on.apply()
    on.lab.inside(WORKER, f"systemctl {order} nftables")
    try:
        assert on.found("firewall-rules").verdict is Verdict.PASS
    finally:
        on.lab.inside(WORKER, "systemctl stop nftables")
        on.apply()


def test_rules_hold_after_a_reboot(on: Bench) -> None:
    on.lab.power_off(WORKER)
    on.lab.start(WORKER)
    assert on.plan() == {HEAD: 0, WORKER: 0}
    assert "policy drop" in on.lab.inside(WORKER, "nft list table inet provision")


def _from_head(on: Bench, address: str, port: int) -> bool:
    return on.lab.run(HEAD, f"timeout 3 bash -c 'exec 3<>/dev/tcp/{address}/{port}'").returncode == 0


def _from_outside(on: Bench, address: str, port: int) -> bool:
    with netns.inside(f"/run/netns/{on.lab.paths.hub}"):
        try:
            socket.create_connection((address, port), timeout=3).close()
        except TimeoutError:
            return False
    return True
