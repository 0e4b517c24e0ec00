"""The burn-in's ranks for real, as processes of this machine over the loopback. Needs a Python with PyTorch.

PROVISION_TORCH_PYTHON names one; otherwise this Python and python3 are tried.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from provision.burnin.launch import archive
from provision.burnin.local import Interpreter, NoTorchError, find_interpreter, run_local
from provision.report.model import Document, Verdict


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    named = os.environ.get("PROVISION_TORCH_PYTHON")
    try:
        found = find_interpreter([named] if named else [sys.executable, "python3"])
    except NoTorchError as error:
        pytest.skip(str(error))
    return Interpreter(found.path, found.torch, gpus=0)  # two ranks on the CPU, on any machine


def burn_in(interpreter: Interpreter, folder: Path, *arguments: str, level: str = "quick") -> Document:
    return run_local(interpreter, folder, minutes=None, level=level, arguments=arguments)


def reasons(document: Document, check: str) -> list[str]:
    return [str(finding.why) for finding in document.findings if finding.check == check]


def test_a_good_machine_passes_and_its_speed_is_only_reported(interpreter: Interpreter, tmp_path: Path):
    document = burn_in(interpreter, tmp_path)
    assert document.verdict is Verdict.PASS
    result = document.details["burnin"]
    assert result["complete"]
    assert result["training"]["losses"][-1] < 0.5 * result["training"]["losses"][0]
    assert {row["operation"] for row in result["collectives"]} >= {"all_reduce", "broadcast", "send_recv"}
    assert reasons(document, "collective-bandwidth") == ["CPU run: no limit"]
    lines = [json.loads(line) for line in (tmp_path / "ranks" / "rank-0001.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "step" for line in lines) == result["training"]["steps"]


def test_a_flipped_gradient_bit_is_found_and_its_rank_named(interpreter: Interpreter, tmp_path: Path):
    document = burn_in(interpreter, tmp_path, "--inject", "flip-bit:1")
    assert document.verdict is Verdict.FAIL
    (reason,) = reasons(document, "gradients-agree")
    assert reason.startswith("step 3: the gradient bits of rank 1 on ")


def test_a_wrong_element_is_found_in_every_collective(interpreter: Interpreter, tmp_path: Path):
    document = burn_in(interpreter, tmp_path, "--inject", "wrong-element:0")
    rows = document.details["burnin"]["collectives"]
    assert [row["wrong"] for row in rows if not row["unsupported"]] == [[1, 0]] * sum(
        not row["unsupported"] for row in rows
    )
    assert document.verdict is Verdict.FAIL


def test_a_gpu_that_computes_other_bits_than_its_twin_is_found(interpreter: Interpreter, tmp_path: Path):
    document = burn_in(interpreter, tmp_path, "--parts", "rotation", "--inject", "wrong-gpu:1")
    assert document.verdict is Verdict.FAIL
    first, moved = document.details["burnin"]["rotations"]
    assert first["checksums"] != moved["checksums"][::-1]
    assert reasons(document, "gradients-replayed") != ["None"]


def test_every_strategy_learns_and_a_killed_job_goes_on(interpreter: Interpreter, tmp_path: Path):
    parts = "strategies,checkpoint,tools"
    document = burn_in(interpreter, tmp_path, "--parts", parts, level="standard")
    result = document.details["burnin"]
    assert result["complete"]
    assert all(run["losses"][-1] < run["losses"][0] for run in result["training_runs"])
    assert all(run["loss_spread"] == 0 for run in result["training_runs"])
    left_out = [row["what"] for row in result["skipped"]]
    for name in ("ddp", "fsdp2", "tp", "pp"):
        assert (
            any(run["strategy"] == name for run in result["training_runs"])
            or f"training by {name}" in left_out
        )
    checkpoint = result["checkpoint"]
    assert checkpoint["killed"] == 1
    assert checkpoint["losses"] == checkpoint["resumed_losses"]
    assert not (tmp_path / "checkpoint-result").exists()


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_is_gone_is_named_by_those_that_are_left(
    interpreter: Interpreter, tmp_path: Path, rank: int, number: signal.Signals
):
    hurt: list[int] = []

    def progress(line: str) -> None:
        if "all_gather" in line and not hurt:
            start = json.loads((tmp_path / "ranks" / f"rank-{rank:04d}.jsonl").read_text().splitlines()[0])
            hurt.append(start["pid"])
            os.kill(start["pid"], number)
        if "TROUBLE" in line and number is signal.SIGSTOP:
            os.kill(hurt[0], signal.SIGKILL)

    document = run_local(
        interpreter, tmp_path, minutes=None, level="quick", arguments=("--timeout", "20"), progress=progress
    )
    assert hurt
    assert document.verdict is Verdict.FAIL
    failure = document.details["burnin"]["failure"]
    assert [missing["rank"] for missing in failure["missing"]] == [rank]
    assert failure["reported_by"] == 1 - rank
    assert not document.details["burnin"]["complete"]


# TRN-04
def test_a_rank_that_cannot_reach_the_first_is_named_with_the_reason(
    interpreter: Interpreter, tmp_path: Path
):
    """Two nodes played by two processes; the second one is given a port that nobody listens on."""
    program, out = tmp_path / "burnin.pyz", tmp_path / "result.json"
    program.write_bytes(archive())
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        interpreter.path,
        program,
        "--out",
        out,
        "--raw",
        tmp_path,
        "--device",
        "cpu",
        "--join-timeout",
        "3",
    ]
    ranks = [
        subprocess.Popen(
            [*map(str, command)],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(its), "NODE_NAME": f"n{rank + 1}"},
            stderr=subprocess.DEVNULL,
        )
        for rank, its in enumerate((port, closed))
    ]  # fmt: skip
    assert [process.wait(timeout=90) for process in ranks] == [1, 1]
    failure = json.loads(out.read_text())["failure"]
    assert failure["reported_by"] == 0
    (missing,) = failure["missing"]
    assert missing["rank"] == 1
    assert missing["why"] == (
        f"rank 1: n2 -> 127.0.0.1 (127.0.0.1 port {closed}) closed for 3 s: Connection refused"
    )
