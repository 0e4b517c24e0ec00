"""Speeds: limits of the model and shape, what no hardware can do, the wire, and the fleet."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from provision.burnin.judge import Expected, Judgement, judge
from provision.burnin.result import BurninResult
from provision.burnin.settings import BurninSettings
from provision.profiles.gpu import Shape, all_models, gpu_profile
from provision.report.model import Verdict
from provision.site.models import Fabric
from tests.unit.test_burnin_judge import GIB, H200, document, found, judged

H100 = "NVIDIA H100 80GB HBM3"
NEW = "NVIDIA Something New"
INFINIBAND = Fabric(kind="infiniband", rails=8, gbits=400)


def transports(ranks: int, **changes: Any) -> list[dict[str, Any]]:
    """NCCL's log on every rank: 8 adapters, NVLS."""
    good = {
        "network": "IB", "devices": [f"mlx5_{rail}:1/IB" for rail in range(8)], "nvls": True,
        "collective_channels": 24, "nvls_channels": 16, "p2p_channels": 32, "connections": [], "choices": [],
        "warnings": [],
    }  # fmt: skip
    return [{"rank": rank, **good, **changes} for rank in range(ranks)]


def all_reduce(gbs: float, ranks: int) -> list[dict[str, Any]]:
    return [
        {
            "operation": "all_reduce", "bytes": 8 * GIB, "dtype": "bfloat16", "iterations": 20, "seconds": 0.02,
            "algbw_gbs": gbs, "busbw_gbs": gbs, "wrong": [0] * ranks, "unsupported": None,
        }
    ]  # fmt: skip


def between(model: str, nodes: int, gbs: float, fabric: Fabric | None = None, **changes: Any) -> Judgement:
    """`nodes` nodes with 8 GPUs each reached `gbs`."""
    size = 8 * nodes
    run = {"collectives": all_reduce(gbs, size), "transports": transports(size), **changes}
    result = BurninResult.model_validate(document(model, 8, nodes, **run))
    return judge(result, {f"n{number + 1}": Expected(8, None, fabric) for number in range(nodes)})


def bandwidth(judgement: Judgement) -> tuple[Verdict, str]:
    (finding,) = found(judgement, "collective-bandwidth")
    return finding.verdict, finding.why or ""


def compute(rates: list[float], dtype: str = "bfloat16") -> list[dict[str, Any]]:
    return [
        {
            "rank": rank, "dtype": dtype, "size": 8192, "products": 99, "tflops": rate, "relative_error": 1e-3,
            "tolerance": 2e-2,
        }
        for rank, rate in enumerate(rates)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "nodes", "gbs", "verdict"),
    [
        (H100, 1, 476, Verdict.PASS),
        (H100, 1, 439, Verdict.FAIL),
        (H100, 2, 441, Verdict.PASS),
        (H100, 4, 331, Verdict.PASS),  # the limit of two nodes is not that of four
        (H100, 16, 270, Verdict.WARN),
        (H100, 16, 200, Verdict.FAIL),
        (H200, 1, 482, Verdict.PASS),
        ("NVIDIA A100-SXM4-80GB", 1, 230, Verdict.PASS),
        ("NVIDIA A100-SXM4-80GB", 1, 180, Verdict.FAIL),
        ("NVIDIA B200", 1, 830, Verdict.PASS),
        ("NVIDIA H100 PCIe", 1, 40, Verdict.UNKNOWN),  # no H100 SXM, whatever its name begins with
        ("NVIDIA L40S", 1, 20, Verdict.UNKNOWN),
    ],
)
def test_the_limit_is_that_of_the_model_and_the_number_of_nodes(
    model: str, nodes: int, gbs: float, verdict: Verdict
) -> None:
    assert bandwidth(between(model, nodes, gbs))[0] is verdict


def test_without_nvls_another_limit_holds() -> None:
    off = transports(8, nvls=False)
    assert bandwidth(between(H100, 1, 360, transports=off))[0] is Verdict.PASS
    verdict, why = bandwidth(between(H100, 1, 360))
    assert verdict is Verdict.FAIL
    assert why == "all-reduce: 360.00 GB/s at 8589934592 bytes: 18 % below 440"


def test_another_number_of_adapters_is_another_shape() -> None:
    four = transports(16, devices=["mlx5_0:1/IB", "mlx5_1:1/IB", "mlx5_2:1/IB", "mlx5_3:1/IB"])
    verdict, why = bandwidth(between(H100, 2, 300, transports=four))
    assert verdict is Verdict.UNKNOWN
    assert "2 x 8 NVIDIA H100 80GB HBM3 and 4 adapters a node with NVLS" in why


@pytest.mark.parametrize(("gbs", "verdict"), [(165, Verdict.PASS), (150, Verdict.WARN), (120, Verdict.FAIL)])
def test_a_shape_without_a_limit_is_judged_by_the_wire_of_the_site_file(gbs: float, verdict: Verdict) -> None:
    wire = Fabric(kind="infiniband", rails=8, gbits=200)
    judgement = between("NVIDIA A100-SXM4-80GB", 4, gbs, wire)
    assert bandwidth(judgement)[0] is verdict
    assert found(judgement, "collective-bandwidth")[0].source == (
        "0.7 and 0.8 of the wire, 8 x 200 Gbit/s by the site file"
    )


@pytest.mark.parametrize(("gbs", "verdict"), [(390, Verdict.UNKNOWN), (200, Verdict.FAIL)])
def test_the_wire_can_fail_an_unknown_model_and_not_pass_it(gbs: float, verdict: Verdict) -> None:
    assert bandwidth(between(NEW, 4, gbs, INFINIBAND))[0] is verdict


# NCL-09
def test_a_small_part_of_the_limit_is_a_suspect_setup_and_no_broken_node() -> None:
    verdict, why = bandwidth(between(H200, 1, 15.1))
    assert verdict is Verdict.UNKNOWN
    assert why == "setup suspect: 15.1 GB/s is 4 % of 431, rarely hardware"


# NCL-10
def test_bridged_cards_have_limits_of_their_own() -> None:
    def pair(model: str, gbs: float) -> Judgement:
        row = {"source": 0, "target": 1, "bytes": GIB, "seconds": 0.1, "gbs": gbs, "wrong": 0}
        return judged(document(model, 2, 1, pairs=[row]), gpus=2, nodes=1)

    assert found(pair("NVIDIA H100 NVL", 256), "peer-speed")[0].verdict is Verdict.PASS
    assert found(pair(H100, 256), "peer-speed")[0].verdict is Verdict.FAIL
    unknown = found(pair("NVIDIA H100 PCIe", 40), "peer-speed")[0]
    assert unknown.verdict is Verdict.SKIP
    assert "no limit known" in str(unknown.why)


def test_more_than_the_hardware_can_do_is_a_wrong_measurement() -> None:
    judgement = judged(document(H200, 1, 1, compute=compute([1200.0])), gpus=1, nodes=1)
    (finding,) = found(judgement, "matmul-speed")
    assert finding.verdict is Verdict.UNKNOWN
    assert finding.why == (
        "the measurement is wrong: 1200 is 21 % above 989, which NVIDIA H200 cannot exceed"
    )
    assert bandwidth(between(H100, 1, 1000))[0] is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("model", "possible", "beyond", "ceiling"),
    [
        ("NVIDIA L40S", 26, 60, "31.5"),  # PCIe: it takes no bridge
        ("NVIDIA H100 PCIe", 256, 400, "300"),
        ("NVIDIA H200 NVL", 400, 600, "450"),
    ],
)
def test_what_cards_can_do_is_known_also_where_no_limit_is(
    model: str, possible: float, beyond: float, ceiling: str
) -> None:
    def run(gbs: float) -> tuple[Judgement, Judgement]:
        row = {"source": 0, "target": 1, "bytes": GIB, "seconds": 0.1, "gbs": gbs, "wrong": 0}
        pair = judged(document(model, 2, 1, pairs=[row]), gpus=2, nodes=1)
        whole = judged(document(model, 2, 1, collectives=all_reduce(gbs, 2)), gpus=2, nodes=1)
        return pair, whole

    pair, whole = run(beyond)
    for judgement, check in ((pair, "peer-speed"), (whole, "collective-bandwidth")):
        (finding,) = found(judgement, check)
        assert finding.verdict is Verdict.UNKNOWN
        assert f"above {ceiling}, which {model} cannot exceed" in str(finding.why)
    pair, whole = run(possible)
    assert found(pair, "peer-speed")[0].verdict is Verdict.SKIP
    assert "no limit known" in str(found(whole, "collective-bandwidth")[0].why)
    assert whole.verdict is Verdict.UNKNOWN  # no measured number, no pass


def test_where_nobody_says_what_a_bridge_carries_there_is_no_ceiling() -> None:
    assert bandwidth(between("NVIDIA A30", 1, 150))[1].startswith("no limit known")


def test_a_number_of_every_kind_is_judged_where_a_limit_is_known() -> None:
    copies = [
        {"rank": 0, "kind": kind, "place": place, "numa_node": 0, "bytes": GIB, "seconds": 1.0, "gbs": gbs, "wrong": 0}
        for kind, place, gbs in (
            ("device_copy", None, 4250.0), ("host_to_device", "near", 55.0), ("device_to_host", "near", 30.0),
            ("host_to_device", "far", 20.0),
        )
    ]  # fmt: skip
    judgement = judged(document(H200, 1, 1, copies=copies), gpus=1, nodes=1)
    assert found(judgement, "device-copy-speed")[0].verdict is Verdict.PASS
    assert found(judgement, "host-to-device-speed")[0].verdict is Verdict.PASS
    (slow,) = found(judgement, "device-to-host-speed")
    assert (slow.verdict, slow.why) == (Verdict.FAIL, "device to host: 30 GB/s on rank 0: 33 % below 45")
    assert found(judgement, "host-to-device-far-speed") == []  # the fleet alone


def test_a_gpu_behind_the_fleet_fails_though_it_reaches_the_limit() -> None:
    rates = [781.0, 779.0, 780.0, 782.0, 780.0, 781.0, 779.0, 650.0]
    judgement = judged(document(H200, 4, 2, compute=compute(rates)), gpus=4)
    assert found(judgement, "matmul-speed")[1].verdict is Verdict.PASS
    slow, good = found(judgement, "matmul-speed-fleet")
    assert (slow.verdict, slow.subject) == (Verdict.FAIL, "n2")
    assert "650 TFLOP/s on rank 7: 17 % below the median of 8" in str(slow.why)
    assert (good.verdict, good.subject) == (Verdict.PASS, "n1")


def test_gpus_that_differ_as_much_as_they_do_are_one_fleet() -> None:
    judgement = judged(document(H200, 2, 2, compute=compute([669.0, 687.0, 671.0, 684.0])), gpus=2)
    assert {finding.verdict for finding in found(judgement, "matmul-speed-fleet")} == {Verdict.PASS}


def test_the_fleet_fails_an_unknown_model_and_does_not_pass_it() -> None:
    even = judged(document(NEW, 4, 1, compute=compute([400.0] * 4)), gpus=4, nodes=1)
    assert even.nodes["n1"].verdict is Verdict.UNKNOWN
    uneven = judged(document(NEW, 4, 1, compute=compute([400.0, 401.0, 399.0, 300.0])), gpus=4, nodes=1)
    assert uneven.nodes["n1"].verdict is Verdict.FAIL


def test_a_model_is_only_compared_with_its_own_kind() -> None:
    ranks = document(H200, 4, 2)["ranks"]
    for rank in ranks[4:]:
        rank["gpu"]["name"] = H100
    rates = [700.0] * 4 + [500.0] * 4
    judgement = judged(document(H200, 4, 2, ranks=ranks, compute=compute(rates)), gpus=4)
    assert {finding.verdict for finding in found(judgement, "matmul-speed-fleet")} == {Verdict.PASS}


def test_steps_that_differ_are_a_warning() -> None:
    run = {
        "strategy": "fsdp2", "mesh": {}, "dtype": "bfloat16", "parameters": 10**9, "layers": 2, "width": 64,
        "heads": 2, "vocabulary": 99, "sequence": 64, "micro_batch": 1, "accumulation": 1, "global_batch": 2,
        "activation_checkpointing": False, "compiled": False, "steps": 10, "rank_step_seconds": [1.0],
        "step_seconds": [1.0] * 8 + [2.0] * 2, "tokens_per_second": 1e4, "flops_per_token": 1e10,
        "tflops_per_gpu": 500.0, "memory_bytes": [1], "losses": [5.0, 4.0], "loss_spread": 0.0,
    }  # fmt: skip
    judgement = judged(document(H200, 1, 1, training_runs=[run]), gpus=1, nodes=1)
    assert found(judgement, "training-steps")[0].verdict is Verdict.WARN
    assert found(judgement, "training-fsdp2")[0].verdict is Verdict.PASS
    assert "0.75 of the matrix rate" in str(found(judgement, "training-speed")[0].read)
    stuck = judged(document(H200, 1, 1, training_runs=[{**run, "losses": [5.0, 5.0]}]), gpus=1, nodes=1)
    assert found(stuck, "training-fsdp2")[0].verdict is Verdict.FAIL


def test_a_limit_with_a_slip_of_the_pen_is_refused() -> None:
    assert BurninSettings(limits={"pair_gbs": 300.0}).limits == {"pair_gbs": 300.0}
    with pytest.raises(ValidationError, match="'all_reduce_busbw_gbs', "):
        BurninSettings.model_validate({"limits": {"matmul_bf16_tflop": 640}})


def test_every_limit_is_possible_and_ordered() -> None:
    for profile in (each for each in all_models() if each.limits):
        assert profile.peak is not None, profile.name
        for limit in profile.limits:
            assert limit.fail <= limit.warn, (profile.name, limit.measure)
            ceiling = {
                "matmul_bf16_tflops": profile.peak.bf16,
                "matmul_fp8_tflops": profile.peak.fp8,
                "device_copy_gbs": profile.peak.memory,
                "host_to_device_gbs": profile.peak.pcie,
            }.get(limit.measure)
            assert ceiling is None or limit.warn < ceiling, (profile.name, limit.measure)


def test_a_limit_that_is_known_to_fit_comes_first() -> None:
    profile = gpu_profile(H100)
    assert profile is not None
    with_nvls = profile.limit("all_reduce_busbw_gbs", Shape(1, 8, None, True))
    without = profile.limit("all_reduce_busbw_gbs", Shape(1, 8, None, False))
    assert with_nvls is not None
    assert without is not None
    assert (with_nvls.fail, without.fail) == (440, 333)
    assert profile.limit("all_reduce_busbw_gbs", Shape(1, 4, None, True)) is None
