"""What only other programs tell: systemd, Slurm, the BMC, CUDA, containers. Each with a time limit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from provision.health.readings import Absent, Device
from provision.health.sources import Source

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run(words: Sequence[str], seconds: float = 20.0) -> subprocess.CompletedProcess[str]:
    """A program's words and exit status. Raises OSError where there is none, TimeoutExpired."""
    return subprocess.run(
        list(words),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


class Failed(Exception):
    """A program ended with an error; the message has its words."""


def said(run_: Run, words: Sequence[str]) -> str:
    answer = run_(words)
    if answer.returncode:
        raise Failed(
            f"{words[0]} exited with {answer.returncode}: {(answer.stderr or answer.stdout).strip()[-200:]}"
        )
    return answer.stdout


class Systemd(Source):
    """States of services, one question for all of them."""

    name = "systemctl"
    tells = ("services", "services.restarts")

    def __init__(self, units: Sequence[str], run_: Run = run) -> None:
        self.units = units
        self._run = run_

    def read(self) -> dict[str, Any]:
        words = ["systemctl", "show", "--property=Id,LoadState,ActiveState,NRestarts", *self.units]
        return units(said(self._run, words)) if self.units else {"services": {}, "services.restarts": {}}


def units(text: str) -> dict[str, Any]:
    """States and restarts by unit, from `systemctl show`; units that are not loaded are left out."""
    states: dict[str, str] = {}
    restarts: dict[str, int] = {}
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        name = values.get("Id", "")
        name = name[: -len(".service")] if name.endswith(".service") else name
        if not name or values.get("LoadState") == "not-found":
            continue
        states[name] = values.get("ActiveState", "?")
        restarts[name] = int(values.get("NRestarts") or 0)
    return {"services": states, "services.restarts": restarts}


class Slurm(Source):
    """This node as slurmctld has it. Never asked by a prolog."""

    name = "scontrol"
    tells = ("slurm",)
    slow = True

    def __init__(self, node: str, run_: Run = run) -> None:
        self.node = node
        self._run = run_

    def read(self) -> dict[str, Any]:
        return {"slurm": slurm_node(said(self._run, ["scontrol", "-o", "show", "node", self.node]))}


def slurm_node(text: str) -> Device:
    """One line of `scontrol -o show node`. Raises Failed for anything else."""
    name = re.search(r"\bNodeName=(\S+)", text)
    state = re.search(r"\bState=(\S+)", text)
    if name is None or state is None:
        raise Failed(f"not a node of scontrol: {text[:80]!r}")
    reason = re.search(r"\bReason=(.*?)(?: \[([^\]]*)\])?(?=\s+\w+=|\s*$)", text)
    memory = re.search(r"\bRealMemory=(\d+)", text)
    partitions = re.search(r"\bPartitions=(\S+)", text)
    return Device(
        name[1],
        {
            "state": state[1],
            "reason": reason[1].strip() if reason else None,
            "reason.by": reason[2] if reason else None,
            "real_memory": int(memory[1]) if memory else None,
            "partitions": partitions[1].split(",") if partitions else [],
        },
        "scontrol",
    )


class Bmc(Source):
    """Critical entries of the BMC's event log."""

    name = "ipmitool"
    tells = ("bmc.events",)
    slow = True

    def __init__(self, run_: Run = run, root: Path = Path("/")) -> None:
        self._run = run_
        self.root = root

    def read(self) -> dict[str, Any]:
        if not any((self.root / "dev").glob("ipmi*")):
            return {"bmc.events": Absent("no BMC answers in this machine (/dev/ipmi0)")}
        return {"bmc.events": critical(said(self._run, ["ipmitool", "sel", "elist"]))}


_CRITICAL = re.compile(
    r"uncorrectable|critical (?:high|low)|non-recoverable|fatal|power supply .*(?:fail|lost)"
    r"|thermal trip|IERR|machine check",
    re.IGNORECASE,
)


def critical(log: str) -> list[str]:
    """The critical entries of `ipmitool sel elist` that stand (an entry "Deasserted" ends one)."""
    standing: dict[str, str] = {}
    for line in log.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 6 or not _CRITICAL.search(line):
            continue
        key = f"{fields[3]} {fields[4]}"
        if fields[5].lower().startswith("deasserted"):
            standing.pop(key, None)
        else:
            standing[key] = f"{fields[1]} {fields[2]} {fields[3]}: {fields[4]}"
    return list(standing.values())


class Container(Source):
    """The container runtime's own self-test."""

    name = "nvidia-container-cli"
    tells = ("container",)
    slow = True

    def __init__(self, run_: Run = run, find: Callable[[str], Any] = shutil.which) -> None:
        self._run = run_
        self._find = find

    def read(self) -> dict[str, Any]:
        if self._find("nvidia-container-cli") is None:
            return {"container": Absent("no container toolkit here")}
        answer = self._run(["nvidia-container-cli", "info"])
        fine = answer.returncode == 0 and "Device Index" in answer.stdout
        return {
            "container": "ok" if fine else (answer.stderr or answer.stdout).strip()[-200:] or "no GPU listed"
        }


class Cuda(Source):
    """CUDA on every GPU, in a process of its own: a driver that hangs takes only that one with it."""

    name = "CUDA"
    tells = ("cuda",)
    slow = True

    def __init__(self, gpus: bool, run_: Run = run) -> None:
        self._gpus = gpus
        self._run = run_

    def read(self) -> dict[str, Any]:
        if not self._gpus:
            return {"cuda": Absent("no GPU here")}
        answer = self._run([sys.executable, sys.argv[0], "cuda-memory"])
        found = dict(re.findall(r"^(GPU \d+|CUDA): (.*)$", answer.stdout, re.MULTILINE))
        if not found:
            raise Failed(f"the test of CUDA exited with {answer.returncode}: {answer.stderr.strip()[-200:]}")
        return {"cuda": found}
