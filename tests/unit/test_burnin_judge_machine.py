"""What the machine said while it ran: what breaks a finding's subject, and what breaks its source."""

from __future__ import annotations

from typing import Any

import pytest

from provision.burnin.judge import Expected, Judgement, judge
from provision.burnin.result import BurninResult
from provision.report.model import Finding, Verdict
from provision.site.models import Fabric
from tests.unit.test_burnin_judge import H200, document, found
from tests.unit.test_burnin_judge_speed import transports

INFINIBAND = Fabric(kind="infiniband", rails=8, gbits=400)
XID = "6,1021,9;NVRM: Xid (PCI:0000:06:00): 79, pid=1, GPU has fallen off the bus."


def run(nodes: int = 1, fabric: Fabric | None = None, model: str | None = None, **changes: Any) -> Judgement:
    """A good run on nodes with 2 H200 each, recorded as a whole, but for `changes`."""
    hosts = [f"n{number + 1}" for number in range(nodes)]
    whole = {
        "environment": {"NCCL_NVLS_ENABLE": "0"},
        "hosts": [host(name) for name in hosts],
        "kernel": [kernel(name) for name in hosts],
        "telemetry": [series(name, "gpu 0") for name in hosts],
        "transports": transports(2 * nodes),
    }
    result = BurninResult.model_validate(document(H200, 2, nodes, **{**whole, **changes}))
    return judge(result, {name: Expected(2, model, fabric) for name in hosts})


def host(name: str, **busy: list[str]) -> dict[str, Any]:
    return {
        "host": name, "os": "Debian 13", "kernel": "6.12", "driver": "580.1", "container": None, "python": "3.12",
        "cpus": 8, "numa_nodes": 1, "busy": busy,
    }  # fmt: skip


def kernel(name: str, *during: str, **changes: Any) -> dict[str, Any]:
    return {
        "host": name, "source": "/dev/kmsg", "why": None, "before": [], "during": list(during), **changes
    }  # fmt: skip


def series(
    name: str, subject: str, unavailable: dict[str, str] | None = None, **values: Any
) -> dict[str, Any]:
    if subject.startswith("gpu"):
        values = {"slowdown_reasons": [0, 4, 4], "ecc_uncorrected": [3, 3, 3], **values}
    values = {key: value for key, value in values.items() if value is not None}
    return {
        "host": name, "subject": subject, "uuid": None, "rank": None, "source": "nvml", "seconds": [0, 60, 120],
        "values": values, "unavailable": unavailable or {},
    }  # fmt: skip


def one(judgement: Judgement, check: str) -> Finding:
    (finding,) = found(judgement, check)
    return finding


def connection(peer: int, via: str, channels: int = 2) -> dict[str, Any]:
    return {"peer": peer, "direction": "send", "via": via, "channels": channels}


def test_a_machine_that_says_nothing_bad_passes() -> None:
    judgement = run()
    assert judgement.nodes["n1"].verdict is Verdict.PASS, judgement.nodes["n1"].reason
    for check in ("burnin-kernel", "burnin-slowdown", "burnin-ecc"):
        assert one(judgement, check).verdict is Verdict.PASS
    assert run() == judgement


# NCL-05
def test_sockets_where_the_site_file_says_infiniband_fail_whatever_the_bandwidth() -> None:
    sockets = transports(2, network="Socket", devices=["ens3:10.0.0.1<0>"])
    judgement = run(2, INFINIBAND, transports=sockets + transports(4)[2:])
    bad, good = found(judgement, "burnin-network")
    assert (bad.subject, bad.verdict, bad.read) == ("n1", Verdict.FAIL, "Socket")
    assert (good.subject, good.verdict) == ("n2", Verdict.PASS)


def test_one_connection_by_sockets_to_another_node_is_enough() -> None:
    rows = transports(4)
    rows[0]["connections"] = [connection(1, "P2P/CUMEM"), connection(2, "NET/Socket/0")]
    assert found(run(2, INFINIBAND, transports=rows), "burnin-network")[0].verdict is Verdict.FAIL


def test_a_log_that_does_not_tell_the_network_is_unknown() -> None:
    judgement = run(2, INFINIBAND, transports=transports(4, network=None, devices=[], why="no log"))
    assert {finding.verdict for finding in found(judgement, "burnin-network")} == {Verdict.UNKNOWN}
    assert found(judgement, "burnin-network")[0].why == "between nodes: no log"


@pytest.mark.parametrize("fabric", [None, Fabric(kind="ethernet")])
def test_sockets_are_right_where_nothing_better_was_promised(fabric: Fabric | None) -> None:
    judgement = run(2, fabric, transports=transports(4, network="Socket", devices=["eth0:10.0.0.1<0>"]))
    assert found(judgement, "burnin-network") == []


def test_a_missing_rail_fails() -> None:
    seven = [f"mlx5_{rail}:1/IB" for rail in range(7)]
    finding = found(run(2, INFINIBAND, transports=transports(4, devices=seven)), "burnin-network")[0]
    assert (finding.verdict, finding.why) == (Verdict.FAIL, "7 of 8 adapters in use")


# NCL-08
def test_channels_without_gpudirect_are_counted() -> None:
    rows = transports(4)
    rows[0]["connections"] = [connection(2, "NET/IB/0/GDRDMA", 1), connection(2, "NET/IB/1", 1)]
    finding = found(run(2, INFINIBAND, transports=rows), "burnin-gpudirect")[0]
    assert finding.verdict is Verdict.WARN
    assert finding.read == "1 of 2 channels with GPUDirect RDMA"


# NCL-09
def test_shared_memory_between_gpus_with_nvlink_is_a_suspect_setup() -> None:
    rows = transports(2)
    rows[0]["connections"] = [connection(1, "SHM/direct/direct")]
    finding = one(run(transports=rows), "burnin-nvlink")
    assert finding.verdict is Verdict.UNKNOWN
    assert finding.why == "setup suspect: transport SHM on a node with NVLink"
    rows[0]["connections"] = [connection(1, "P2P/CUMEM")]
    assert one(run(transports=rows), "burnin-nvlink").verdict is Verdict.PASS


# NCL-04
def test_an_address_that_two_nodes_hold_fails_both() -> None:
    ranks = document(H200, 2, 2)["ranks"]
    for rank in ranks:
        rank |= {"interface": "docker0", "address": "172.17.0.1"}
    finding = one(run(2, ranks=ranks), "burnin-interface")
    assert finding.verdict is Verdict.FAIL
    assert finding.why == "172.17.0.1 on docker0 is held by n1, n2"


# NCL-01
def test_answers_that_may_leave_by_another_interface_are_told() -> None:
    """Two interfaces in one network on both nodes; the routes of one of them use the other."""

    def networks(number: int) -> dict[str, list[str]]:
        return {"eth0": [f"10.20.1.{number}/20"], "eth1": [f"10.20.2.{number}/20"], "ib0": ["10.40.0.1/24"]}

    ranks = document(H200, 2, 2)["ranks"]
    for rank in ranks:
        rank |= {"interface": "eth0", "address": f"10.20.1.1{rank['host'][1:]}"}
    rows = [
        host("n1") | {"networks": networks(11)},
        host("n2") | {"networks": networks(12), "odd_routes": {"n1": "eth1 10.20.2.12"}},
    ]
    judgement = run(2, ranks=ranks, hosts=rows)
    first, second = found(judgement, "burnin-routes")
    assert (first.subject, first.verdict, first.read) == (
        "n1",
        Verdict.WARN,
        "eth0 and eth1 overlap (10.20.0.0/20)",
    )
    assert (second.subject, second.verdict) == ("n2", Verdict.FAIL)
    assert second.read == "reaches n1 by eth1 10.20.2.12; eth0 and eth1 overlap (10.20.0.0/20)"
    assert judgement.nodes["n2"].verdict is Verdict.FAIL


def test_addresses_of_services_and_networks_apart_are_fine() -> None:
    apart = {
        "eth0": ["10.0.0.1/24", "fd00::1/64"],
        "eth1": ["10.1.0.1/24", "fd00::2/64"],
        "lo": ["10.0.0.9/32"],
    }
    judgement = run(2, hosts=[host(name) | {"networks": apart} for name in ("n1", "n2")])
    assert found(judgement, "burnin-routes") == []


# NCL-02
@pytest.mark.parametrize(
    ("value", "warned"),
    [("bond0", ["n1"]), ("=bond0", []), ("^bond1", []), ("bond0.2093", []), ("ib0,bond0", ["n1"])],
)
def test_a_name_that_stands_for_several_interfaces_is_told(value: str, warned: list[str]) -> None:
    rows = [
        host("n1") | {"networks": {"bond0": ["10.0.0.1/24"], "bond0.2093": ["10.9.0.1/24"]}},
        host("n2") | {"networks": {"bond0": ["10.0.0.2/24"]}},
    ]
    judgement = run(2, hosts=rows, environment={"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": value})
    told = found(judgement, "burnin-interface")
    assert [(finding.subject, finding.verdict) for finding in told] == [
        (name, Verdict.WARN) for name in warned
    ]


# NCL-18
def test_a_gpu_that_others_use_makes_no_hardware_verdict() -> None:
    rows = document(H200, 2, 1)["compute"]
    rows[0]["tflops"] = 100.0
    busy = [host("n1", **{"GPU-0": ["51220 python3"]})]
    judgement = run(hosts=busy, compute=rows)
    assert judgement.nodes["n1"].verdict is Verdict.UNKNOWN
    assert one(judgement, "burnin-idle").why == "busy before the burn-in began: GPU-0 by 51220 python3"
    assert one(judgement, "matmul-speed").verdict is Verdict.UNKNOWN


def test_another_model_than_the_site_file_says_fails() -> None:
    assert found(run(model="h200-sxm"), "burnin-model") == []
    finding = one(run(model="h100-sxm"), "burnin-model")
    assert finding.why == "the site file says h100-sxm, the driver NVIDIA H200"


@pytest.mark.parametrize(
    "line", [XID, "4,8,1;nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 32"]
)
def test_an_xid_during_the_burn_in_fails_the_node(line: str) -> None:
    judgement = run(kernel=[kernel("n1", line, line)])
    finding = one(judgement, "burnin-kernel")
    assert finding.verdict is Verdict.FAIL
    assert "(2 times)" in str(finding.read)
    assert judgement.nodes["n1"].verdict is Verdict.FAIL


def test_an_xid_before_the_burn_in_is_a_warning() -> None:
    assert one(run(kernel=[kernel("n1", before=[XID])]), "burnin-kernel").verdict is Verdict.WARN


@pytest.mark.parametrize("rows", [[], [kernel("n1", source=None, why="/dev/kmsg: Permission denied")]])
def test_kernel_messages_that_cannot_be_read_are_unknown(rows: list[dict[str, Any]]) -> None:
    judgement = run(kernel=rows)
    assert one(judgement, "burnin-kernel").verdict is Verdict.UNKNOWN
    assert judgement.nodes["n1"].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("bits", "verdict"),
    [
        (0x8, Verdict.FAIL),
        (0x40, Verdict.FAIL),
        (0x80, Verdict.FAIL),
        (0x20, Verdict.WARN),
        (0x4, Verdict.PASS),
    ],
)
def test_slowdown_by_hardware_fails_and_by_the_power_cap_does_not(bits: int, verdict: Verdict) -> None:
    judgement = run(telemetry=[series("n1", "gpu 1", slowdown_reasons=[0, bits, None])])
    assert one(judgement, "burnin-slowdown").verdict is verdict


def test_slowdown_reasons_that_cannot_be_read_are_unknown() -> None:
    blind = series("n1", "gpu 0", {"slowdown_reasons": "GPU is lost"}, slowdown_reasons=None)
    finding = one(run(telemetry=[blind]), "burnin-slowdown")
    assert (finding.verdict, finding.why) == (Verdict.UNKNOWN, "gpu 0: slowdown reasons: GPU is lost")
    assert one(run(telemetry=[]), "burnin-slowdown").verdict is Verdict.UNKNOWN


def test_uncorrected_memory_errors_that_come_during_the_run_fail() -> None:
    assert one(run(telemetry=[series("n1", "gpu 0", ecc_uncorrected=[3, 3, 4])]), "burnin-ecc").why == (
        "uncorrected memory errors during the burn-in, gpu 0: 1"
    )


@pytest.mark.parametrize(
    ("why", "verdict"), [("Not Supported", Verdict.SKIP), ("Unknown Error", Verdict.UNKNOWN)]
)
def test_memory_errors_that_cannot_be_read(why: str, verdict: Verdict) -> None:
    blind = series("n1", "gpu 0", {"ecc_uncorrected": why}, ecc_uncorrected=None)
    assert one(run(telemetry=[blind]), "burnin-ecc").verdict is verdict


@pytest.mark.parametrize(
    ("counter", "verdict"),
    [("link_downed", Verdict.FAIL), ("symbol_error", Verdict.WARN), ("port_xmit_wait", Verdict.PASS)],
)
def test_adapters_that_lose_their_link_or_count_errors(counter: str, verdict: Verdict) -> None:
    adapter = series("n1", "mlx5_0/1", **{counter: [7, 7, 9]})
    judgement = run(telemetry=[series("n1", "gpu 0"), adapter])
    assert one(judgement, "burnin-adapters").verdict is verdict


def test_pcie_replays_are_a_warning_by_their_rate() -> None:
    judgement = run(telemetry=[series("n1", "gpu 0", pcie_replays=[0, 40, 80])])
    assert one(judgement, "burnin-pcie").read == "gpu 0: 40 replays a minute"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"exit": 0}, Verdict.PASS),
        ({"exit": 1}, Verdict.FAIL),
        ({"skipped": "dcgmi is not installed"}, Verdict.SKIP),
        ({"tool": "ib_write_bw", "subject": "mlx5_0", "numbers": {"write_gbs": 47.0}}, Verdict.PASS),
        ({"tool": "ib_write_bw", "subject": "mlx5_0", "numbers": {"write_gbs": 45.5}}, Verdict.WARN),
        ({"tool": "ib_write_bw", "subject": "mlx5_0", "numbers": {"write_gbs": 24.0}}, Verdict.FAIL),
        ({"tool": "fio", "exit": 1}, Verdict.WARN),
    ],
)
def test_tools_are_judged_by_their_exit_and_links_by_the_site_file(
    changes: dict[str, Any], verdict: Verdict
) -> None:
    tool = {
        "host": "n1", "tool": "dcgmi diag -r 3", "subject": None, "skipped": None, "exit": 0, "seconds": 9.0,
        "numbers": {}, "raw": "n1-tool.txt",
    }  # fmt: skip
    judgement = run(fabric=INFINIBAND, tools=[{**tool, **changes}])
    (finding,) = [finding for finding in judgement.findings if finding.check.startswith("tool-")]
    assert finding.verdict is verdict


def test_a_gpu_whose_products_differ_is_named() -> None:
    rows = [{**row, "checksum": "aa"} for row in document(H200, 2, 2)["compute"]]
    rows[2]["checksum"] = "bb"
    finding = found(run(2, compute=rows), "matmul-agrees")[0]
    assert (finding.verdict, finding.subject) == (Verdict.FAIL, "n2")
    assert "rank 2 of n2 (GPU-2)" in str(finding.why)


def test_products_that_do_not_repeat_fail() -> None:
    rows = [{**row, "differing_products": 0} for row in document(H200, 2, 1)["compute"]]
    rows[1]["differing_products"] = 3
    assert one(run(compute=rows), "matmul-steady").verdict is Verdict.FAIL


def test_a_replayed_step_names_the_gpu_that_differs() -> None:
    shares = {0: "a", 1: "b", 2: "c", 3: "d"}
    rows = [
        {
            "step": 0,
            "shift": shift,
            "checksums": [
                shares[(rank + shift) % 4] + ("!" if rank == 3 else "") for rank in range(4)
            ],
        }
        for shift in range(3)
    ]  # fmt: skip
    bad, good = found(run(2, rotations=rows), "gradients-replayed")
    assert (bad.verdict, bad.subject) == (Verdict.FAIL, "n2")
    assert "rank 3 of n2 (GPU-3); other GPUs got other bits from the same data" in str(bad.why)
    assert (good.verdict, good.subject) == (Verdict.PASS, "n1")


@pytest.mark.parametrize(
    ("resumed", "verdict"), [([2.0, 1.5], Verdict.PASS), ([2.0, 1.6], Verdict.FAIL), ([], Verdict.FAIL)]
)
def test_a_resumed_job_has_the_losses_of_the_first(resumed: list[float], verdict: Verdict) -> None:
    saved = {
        "folder": "/shared", "filesystem": "nfs4", "bytes": 10**9, "save_seconds": 1.0, "load_seconds": 0.5, "step": 3,
        "killed": 1, "losses": [2.0, 1.5], "resumed_losses": resumed,
    }  # fmt: skip
    finding = one(run(checkpoint=saved), "checkpoint-resumes")
    assert finding.verdict is verdict
    assert "saved at 1.00 GB/s, loaded at 2.00 GB/s" in str(finding.read)


@pytest.mark.parametrize("part", ["pairs", "copies"])
def test_a_wrong_element_on_its_way_fails(part: str) -> None:
    rows = {
        "pairs": [{"source": 0, "target": 1, "bytes": 1, "seconds": 1.0, "gbs": 350.0, "wrong": 2}],
        "copies": [
            {
                "rank": 0, "kind": "triad", "place": None, "numa_node": None, "bytes": 1, "seconds": 1.0, "gbs": 4e3,
                "wrong": 2,
            }
        ],
    }  # fmt: skip
    assert run(**{part: rows[part]}).nodes["n1"].verdict is Verdict.FAIL
