"""Recordings of the burn-in on real GPUs, judged as on the day they were made. tests/gpu makes new ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provision.burnin.judge import Expected, judge
from provision.burnin.result import BurninResult
from provision.report.model import Verdict

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
