"""From numbers to verdicts: what passes, warns, fails, is skipped, and what cannot be told."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from provision.burnin.judge import Expected, Judgement, judge
from provision.burnin.result import BurninResult, ResultError
from provision.profiles import gpu_profile
from provision.report.model import Finding, Verdict

H200 = "NVIDIA H200"
GIB = 1 << 30


def document(
    gpu: str | None = None, ranks_per_node: int = 1, nodes: int = 2, **changes: Any
) -> dict[str, Any]:
    """A good run on n1, n2 ...; on the CPU unless a GPU model is named."""
    size = ranks_per_node * nodes
    hosts = [f"n{node + 1}" for node in range(nodes) for _ in range(ranks_per_node)]
    ranks = [
        {
            "rank": rank, "host": host, "local_rank": rank % ranks_per_node, "pid": 1, "address": f"10.0.0.{host[1:]}",
            "interface": "eth0", "gpu": gpu and {"name": gpu, "uuid": f"GPU-{rank}", "memory_bytes": 1},
        }
        for rank, host in enumerate(hosts)
    ]  # fmt: skip
    collectives = [
        {
            "operation": operation, "bytes": 8 * GIB, "dtype": "float32", "iterations": 20, "seconds": 0.02,
            "algbw_gbs": 400.0, "busbw_gbs": 352.0, "wrong": [0] * size, "unsupported": None,
        }
        for operation in ("all_reduce", "broadcast")
    ]  # fmt: skip
    compute = [
        {
            "rank": rank, "dtype": "bfloat16", "size": 8192, "products": 9, "tflops": 670.0,
            "relative_error": 1e-3, "tolerance": 2e-2,
        }
        for rank in range(size)
    ]  # fmt: skip
    training = {
        "steps": 10, "parameters": 1000, "global_batch": 8, "tokens_per_second": 1e3,
        "losses": [5.0, 4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], "loss_spread": 0.0,
        "reference_error": [1e-7] * size, "reference_tolerance": 1e-4, "disagreements": [],
    }  # fmt: skip
    good = {
        "format": 1, "complete": True, "failure": None, "started": "2026-01-01T00:00:00+00:00", "seconds": 60.0,
        "job": "7", "launcher": "slurm", "level": "quick", "world_size": size, "nodes": sorted(set(hosts)),
        "backend": "nccl" if gpu else "gloo", "device": "cuda" if gpu else "cpu", "injected": None,
        "software": {"torch": "2.6.0"}, "environment": {}, "ranks": ranks, "collectives": collectives,
        "compute": compute, "training": training,
    }  # fmt: skip
    return {**good, **changes}


def judged(document: Mapping[str, Any] | None, gpus: int = 0, nodes: int = 2, **options: Any) -> Judgement:
    result = BurninResult.model_validate(document) if document is not None else None
    return judge(result, {f"n{node + 1}": Expected(gpus) for node in range(nodes)}, **options)


def found(judgement: Judgement, check: str) -> list[Finding]:
    return [finding for finding in judgement.findings if finding.check == check]


def test_a_good_run_on_the_cpu_passes_and_its_speed_is_not_judged():
    judgement = judged(document())
    assert judgement.verdict is Verdict.PASS
    assert {node.verdict for node in judgement.nodes.values()} == {Verdict.PASS}
    for check in ("collective-bandwidth", "matmul-speed"):
        assert {finding.verdict for finding in found(judgement, check)} == {Verdict.SKIP}
        assert found(judgement, check)[0].why == "CPU run: no limit"


def test_the_same_input_gives_the_same_verdicts():
    assert judged(document(H200, 2, 1), gpus=2, nodes=1) == judged(document(H200, 2, 1), gpus=2, nodes=1)


def test_a_wrong_element_fails_the_node_that_received_it():
    rows = document()["collectives"]
    rows[1]["wrong"] = [0, 3]
    judgement = judged(document(collectives=rows))
    assert judgement.nodes["n2"].verdict is Verdict.FAIL
    assert judgement.nodes["n2"].reason == "broadcast: 3 wrong elements on rank 1 (n2)"
    assert judgement.nodes["n1"].verdict is Verdict.PASS


def test_a_flipped_gradient_bit_fails_its_node_by_name():
    training = document()["training"]
    training["disagreements"] = [{"step": 3, "first": ["aa", "ab"], "replay": ["aa", "aa"]}]
    judgement = judged(document(training=training))
    assert judgement.nodes["n2"].verdict is Verdict.FAIL
    assert "gradient bits of rank 1 on n2 differ" in str(judgement.nodes["n2"].reason)
    assert judgement.nodes["n1"].verdict is Verdict.PASS


def test_two_ranks_that_keep_differing_are_both_kept_out():
    training = document()["training"]
    training["disagreements"] = [{"step": 3, "first": ["aa", "ab"], "replay": ["aa", "ab"]}]
    judgement = judged(document(training=training))
    assert {node.verdict for node in judgement.nodes.values()} == {Verdict.FAIL}
    assert "one of rank 0 on n1, rank 1 on n2 is wrong" in str(judgement.nodes["n1"].reason)


@pytest.mark.parametrize("error", [2e-4, float("nan")])
def test_a_gradient_that_is_not_that_of_one_process_fails(error: float):
    training = {**document()["training"], "reference_error": [1e-7, error]}
    judgement = judged(document(training=training))
    assert judgement.nodes["n2"].verdict is Verdict.FAIL
    assert judgement.nodes["n1"].verdict is Verdict.PASS


@pytest.mark.parametrize("last", [4.9, float("nan")])
def test_a_loss_that_does_not_fall_fails(last: float):
    training = {**document()["training"], "losses": [5.0] * 5 + [last] * 5}
    assert found(judged(document(training=training)), "loss-falls")[0].verdict is Verdict.FAIL


def test_losses_that_differ_between_ranks_fail():
    training = {**document()["training"], "loss_spread": 1e-9}
    assert found(judged(document(training=training)), "loss-agrees")[0].verdict is Verdict.FAIL


def test_a_wrong_matrix_product_fails_whatever_the_model():
    rows = document("NVIDIA Something New", nodes=1)["compute"]
    rows[0]["relative_error"] = float("nan")
    judgement = judged(document("NVIDIA Something New", nodes=1, compute=rows), gpus=1, nodes=1)
    assert judgement.nodes["n1"].verdict is Verdict.FAIL


def test_an_unknown_model_is_unknown_and_says_what_was_read():
    judgement = judged(document("NVIDIA GH200 480GB", 2, 1), gpus=2, nodes=1)
    assert judgement.verdict is Verdict.UNKNOWN
    finding = found(judgement, "matmul-speed")[0]
    assert finding.read == "bf16 products: 670 TFLOP/s on rank 0"
    assert finding.why == "no limit known for the model 'NVIDIA GH200 480GB'"


def test_two_h200_at_their_measured_rate_pass_with_the_limits_source():
    judgement = judged(document(H200, 2, 1), gpus=2, nodes=1)
    assert judgement.verdict is Verdict.PASS
    assert "2 x H200" in str(found(judgement, "collective-bandwidth")[0].source)


@pytest.mark.parametrize(
    ("rate", "verdict"), [(334.0, Verdict.PASS), (333.0, Verdict.WARN), (316.0, Verdict.FAIL)]
)
def test_bandwidth_warns_below_one_limit_and_fails_below_the_other(rate: float, verdict: Verdict):
    rows = document(H200, 2, 1)["collectives"]
    rows[0]["busbw_gbs"] = rate
    without_nvls = {"NCCL_NVLS_ENABLE": "0"}  # as the limit was measured
    judgement = judged(document(H200, 2, 1, collectives=rows, environment=without_nvls), gpus=2, nodes=1)
    assert found(judgement, "collective-bandwidth")[0].verdict is verdict


def test_a_message_too_small_for_the_limit_cannot_fail():
    rows = document(H200, 2, 1)["collectives"]
    rows[0] |= {"busbw_gbs": 10.0, "bytes": GIB}
    finding = found(judged(document(H200, 2, 1, collectives=rows), gpus=2, nodes=1), "collective-bandwidth")[
        0
    ]
    assert finding.verdict is Verdict.UNKNOWN
    assert "the largest message was 1073741824" in str(finding.why)


def test_with_and_without_nvls_have_limits_of_their_own():
    slow = document(H200, 8, 1)  # 352 GB/s
    without = document(H200, 8, 1, environment={"NCCL_NVLS_ENABLE": "0"})
    finding = found(judged(slow, gpus=8, nodes=1), "collective-bandwidth")[0]
    assert finding.verdict is Verdict.UNKNOWN
    assert "does not say which it was" in str(finding.why)
    finding = found(judged(without, gpus=8, nodes=1), "collective-bandwidth")[0]
    assert (finding.verdict, finding.expected) == (Verdict.PASS, "at least 350")


def test_the_site_limits_win():
    rows = [{**row, "tflops": 91.0} for row in document(nodes=1)["compute"]]
    slow = document("NVIDIA L4", nodes=1, compute=rows)
    judgement = judged(slow, gpus=1, nodes=1, limits={"matmul_bf16_tflops": 90})
    finding = found(judgement, "matmul-speed")[0]
    assert (finding.verdict, finding.source) == (Verdict.PASS, "the site file: burnin.limits")


def test_no_result_is_unknown_with_the_reason():
    judgement = judged(None, why_no_result="job 7 ended as TIMEOUT")
    assert judgement.verdict is Verdict.UNKNOWN
    assert judgement.nodes["n1"].reason == "job 7 ended as TIMEOUT"


def test_a_node_that_was_left_out_is_unknown_and_the_others_are_judged():
    judgement = judged(document(nodes=1), nodes=2, left_out={"n2": "drained: a person's reason"})
    assert judgement.nodes["n1"].verdict is Verdict.PASS
    assert judgement.nodes["n2"].verdict is Verdict.UNKNOWN
    assert judgement.nodes["n2"].reason == "drained: a person's reason"


def test_a_node_without_ranks_is_unknown():
    judgement = judged(document(nodes=1), nodes=2)
    assert judgement.nodes["n2"].reason == "no rank ran on it; ranks ran on n1"


def test_a_rank_that_died_fails_its_node_and_leaves_the_others_unknown():
    failure = {
        "message": "rank 1 on n2: no sign of life since training step 3",
        "missing": [{"rank": 1, "host": "n2", "why": "no sign of life since training step 3"}],
        "reported_by": 0,
    }
    judgement = judged(document(complete=False, failure=failure, training=None))
    assert judgement.nodes["n2"].verdict is Verdict.FAIL
    assert judgement.nodes["n1"].verdict is Verdict.UNKNOWN
    assert "rank 1 on n2" in str(judgement.nodes["n1"].reason)


def test_a_rank_that_never_came_is_unknown():
    failure = {
        "message": "rank 1 on n2 did not report within 120 s",
        "missing": [{"rank": 1, "host": "n2", "why": "did not report within 120 s"}],
        "reported_by": 0,
    }
    never = document(complete=False, failure=failure, ranks=[], collectives=[], compute=[], training=None)
    judgement = judged(never)
    assert {node.verdict for node in judgement.nodes.values()} == {Verdict.UNKNOWN}
    assert judgement.nodes["n2"].reason == "rank 1: did not report within 120 s"


def test_an_operation_that_the_backend_lacks_is_skipped_with_its_words():
    rows = document()["collectives"]
    rows[1] |= {"unsupported": "gloo does not support it", "seconds": None, "wrong": []}
    finding = found(judged(document(collectives=rows)), "collective-broadcast")[0]
    assert finding.verdict is Verdict.SKIP
    assert "gloo does not support it" in str(finding.why)


def test_two_ranks_on_one_gpu_fail():
    ranks = document(H200, 2, 1)["ranks"]
    ranks[1]["gpu"]["uuid"] = "GPU-0"
    judgement = judged(document(H200, 2, 1, ranks=ranks), gpus=2, nodes=1)
    assert found(judgement, "burnin-gpus")[0].why == "2 ranks used 1 different GPUs, expected 2"


def test_a_run_on_the_cpu_says_nothing_about_gpus():
    assert judged(document(), gpus=1).verdict is Verdict.UNKNOWN


def test_a_run_with_an_injected_fault_never_passes():
    assert judged(document(injected="flip-bit:1")).verdict is Verdict.UNKNOWN


def test_a_document_that_cannot_be_used_says_where():
    broken = json.dumps({name: value for name, value in document().items() if name != "ranks"})
    with pytest.raises(ResultError, match=r"result\.json: ranks: Field required"):
        BurninResult.parse(broken, "result.json")


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_products_are_known_by_their_whole_name(product: str, name: str):
    profile = gpu_profile(product)
    assert profile is not None
    assert profile.name == name


@pytest.mark.parametrize("product", ["NVIDIA GH200 480GB", "NVIDIA L40", "H200", ""])
def test_a_name_that_only_contains_a_known_one_is_unknown(product: str):
    assert gpu_profile(product) is None
