"""The burn-in's quick level on the GPUs of this machine. Needs PyTorch with CUDA; makes recordings.

python -m pytest tests/gpu
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GPUS = "import torch; print(torch.cuda.device_count())"


def gpus() -> int:
    answer = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, check=False)
    return int(answer.stdout) if answer.returncode == 0 else 0


@pytest.mark.skipif(gpus() < 1, reason="no PyTorch that sees a GPU here")
def test_every_result_is_right_on_all_gpus(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus()}"]
    program = ["-m", "provision.burnin.workload", "--out", str(out)]
    subprocess.run([sys.executable, *launch, *program], check=True, timeout=600)
    document = json.loads(out.read_text())
    assert document["complete"]
    assert document["backend"] == "nccl"
    assert len(document["ranks"]) == gpus()
    assert all(sum(each["wrong"]) == 0 for each in document["collectives"] if not each["unsupported"])
