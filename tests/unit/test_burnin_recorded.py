"""Recordings of the burn-in on real GPUs, judged as on the day they were made. tests/gpu makes new ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provision.burnin.judge import Expected, judge
from provision.burnin.result import BurninResult
from provision.report.model import Verdict
from provision.site.models import Fabric

RECORDED = Path(__file__).parents[1] / "gpu" / "recorded"


def recorded(name: str, **changes: object) -> BurninResult:
    document = json.loads((RECORDED / name).read_text()) | changes
    return BurninResult.parse(json.dumps(document), name)


def test_two_h200_without_nvls_pass() -> None:
    judgement = judge(recorded("h200-x2-quick.json"), {"node-1": Expected(gpus=2)})
    assert judgement.verdict is Verdict.PASS
    bandwidth = next(f for f in judgement.findings if f.check == "collective-bandwidth")
    assert bandwidth.read is not None
    assert "350" in bandwidth.read or "351" in bandwidth.read


def test_a_gpu_that_did_not_take_part_is_no_pass() -> None:
    judgement = judge(recorded("h200-x2-quick.json"), {"node-1": Expected(gpus=8)})
    assert not judgement.verdict.good


@pytest.mark.parametrize("factor", [0.8, 0.5])
def test_the_same_run_on_a_slower_link_fails(factor: float) -> None:
    document = json.loads((RECORDED / "h200-x2-quick.json").read_text())
    for collective in document["collectives"]:
        for key in ("algbw_gbs", "busbw_gbs"):
            collective[key] *= factor
    slow = recorded("h200-x2-quick.json", collectives=document["collectives"])
    judgement = judge(slow, {"node-1": Expected(gpus=2)})
    assert judgement.nodes["node-1"].verdict is Verdict.FAIL


def test_one_wrong_element_fails_whatever_the_speed() -> None:
    document = json.loads((RECORDED / "h200-x2-quick.json").read_text())
    document["collectives"][0]["wrong"] = [0, 1]
    wrong = recorded("h200-x2-quick.json", collectives=document["collectives"])
    assert judge(wrong, {"node-1": Expected(gpus=2)}).verdict is Verdict.FAIL


RUNS = {
    "h200-x1-quick.json": 1,
    "h200-x1-slurm-quick.json": 1,
    "h200-x2-slurm-quick.json": 2,
    "h200-x2-standard.json": 2,
}


@pytest.mark.parametrize(("name", "gpus"), RUNS.items())
def test_good_gpus_pass(name: str, gpus: int) -> None:
    judgement = judge(recorded(name), {"node-1": Expected(gpus=gpus)})
    assert judgement.verdict is Verdict.PASS, judgement.nodes["node-1"].reason


@pytest.mark.parametrize("name", RUNS)
def test_training_reaches_most_of_the_matrix_rate(name: str) -> None:
    result = recorded(name)
    products = min(row.tflops for row in result.compute if row.dtype == "bfloat16")
    sharded = next(run for run in result.training_runs if run.strategy == "fsdp2")
    assert products > 650
    assert sharded.tflops_per_gpu > 0.7 * products
    assert min(row.gbs for row in result.copies if row.kind == "device_copy") > 4200


def test_every_strategy_learns_the_same() -> None:
    runs = recorded("h200-x2-standard.json").training_runs
    assert [run.strategy for run in runs] == ["fsdp2", "ddp", "fsdp2", "tp", "pp"]
    assert all(run.losses[-1] < 0.2 * run.losses[0] and run.loss_spread == 0 for run in runs)
    # The same shares of the batch give the same loss, whatever strategy; tensor and pipeline have another share.
    for ones in (runs[:3], runs[3:]):
        assert max(run.losses[5] for run in ones) - min(run.losses[5] for run in ones) < 0.01


def test_a_killed_job_went_on_as_if_nothing_had_happened() -> None:
    checkpoint = recorded("h200-x2-standard.json").checkpoint
    assert checkpoint is not None
    assert checkpoint.losses == checkpoint.resumed_losses


def test_the_log_tells_how_two_gpus_speak() -> None:
    first, second = recorded("h200-x2-slurm-quick.json").transports
    assert [way.via for way in (*first.connections, *second.connections)] == ["P2P/CUMEM"] * 2
    assert (first.nvls, first.collective_channels) == (False, 24)
    large = {choice.protocol for choice in first.choices if choice.bytes > 1 << 30}
    assert large == {"SIMPLE"}


def test_power_was_what_limited_the_clocks() -> None:
    series = [each for each in recorded("h200-x2-standard.json").telemetry if each.subject.startswith("gpu")]
    for gpu in series:
        assert max(value for value in gpu.values["power_watts"] if value) > 650
        reasons = {int(value) for value in gpu.values["slowdown_reasons"] if value is not None}
        assert 4 in reasons  # SW power cap
        assert not any(reason & (0x8 | 0x40 | 0x80) for reason in reasons)


def test_two_nodes_that_went_by_sockets_and_were_one_machine() -> None:
    """Slurm on one host played two nodes with a GPU each, but gave both the same GPU."""
    result = recorded("h200-2x1-sockets.json")
    nodes = {node: Expected(1, None, Fabric(kind="infiniband", rails=8)) for node in ("node-1", "node-2")}
    judgement = judge(result, nodes)
    assert {each.verdict for each in judgement.nodes.values()} == {Verdict.FAIL}
    reasons = {
        finding.check: str(finding.why) for finding in judgement.findings if finding.verdict is Verdict.FAIL
    }
    assert "as well" in reasons["burnin-gpus"]
    assert "sockets" in reasons["burnin-network"]
    assert "OutOfMemoryError" in reasons["burnin-ran"]
    assert any("would take" in left_out.why for left_out in result.skipped)
