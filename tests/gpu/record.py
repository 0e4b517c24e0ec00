"""Records what this machine says to every question that the project asks of a GPU node; identifiers replaced.

    python -m tests.gpu.record FOLDER

writes FOLDER/machine.json (the answers to provision.hardware.machine.QUESTIONS), FOLDER/nvidia-smi.json (views of
nvidia-smi) and FOLDER/nvml.json (see nvml_answers). Reads only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pynvml

from provision.hardware.machine import QUESTIONS
from tests.gpu import nvml_answers

SMI = ("-L", "--version", "topo -m", "nvlink -s")
_IDENTIFIERS = (
    (re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), r"\1-00000000-aaaa-bbbb-cccc-000000000000"),
    (re.compile(r"(<serial>|Serial Number\s+: )\d+"), r"\g<1>1650000000000"),
    (re.compile(r"(<pdi>|PDI\s+: )0x[0-9a-f]+"), r"\g<1>0x0000000000000000"),
    (re.compile(r"(product_serial=)\S+"), r"\1SERIAL"),
    (re.compile(r"(\"serial\":\s*)\"[^\"]*\""), r'\1"SERIAL"'),
)  # fmt: skip


def without_identifiers(text: str) -> str:
    for pattern, instead in _IDENTIFIERS:
        text = pattern.sub(instead, text)
    return text


def ask(command: str) -> dict[str, object]:
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    out, err = without_identifiers(answer.stdout), without_identifiers(answer.stderr)
    return {"rc": answer.returncode, "stdout": out, "stderr": err}


def main() -> None:
    folder = Path(sys.argv[1])
    machine = {question.part: ask(question.command) for question in QUESTIONS}
    views = {f"nvidia-smi {words}": ask(f"nvidia-smi {words}") for words in SMI}
    pynvml.nvmlInit()
    for name, content in (("machine", machine), ("nvidia-smi", views), ("nvml", nvml_answers.answers())):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
