"""The burn-in on this machine alone: no site file, no scheduler, one process for each rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.burnin.judge import Expected, judge, limits_used
from provision.burnin.launch import archive
from provision.burnin.result import BurninResult, ResultError
from provision.profiles.gpu import Measure
from provision.report.model import Document

CPU_RANKS = 2  # the fewest that exchange anything
PROBE_SECONDS = 120  # for a Python to import torch
_PROBE = (
    "import json, torch; c = torch.cuda.is_available(); "
    "print(json.dumps({'torch': torch.__version__, 'gpus': torch.cuda.device_count() if c else 0}))"
)


class NoTorchError(Exception):
    """No Python here can import torch; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Interpreter:
    """A Python with torch."""

    path: str
    torch: str
    gpus: int


def find_interpreter(candidates: list[str]) -> Interpreter:
    """The first of `candidates` that can import torch."""
    tried = []
    for candidate in candidates:
        try:
            answer = subprocess.run(
                [candidate, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except OSError as error:
            tried.append(f"{candidate}: {error.strerror}")
            continue
        except subprocess.TimeoutExpired:
            tried.append(f"{candidate}: no answer within {PROBE_SECONDS} s")
            continue
        if answer.returncode == 0:
            found = json.loads(answer.stdout.splitlines()[-1])
            return Interpreter(candidate, found["torch"], found["gpus"])
        said = answer.stderr.strip().splitlines()
        tried.append(f"{candidate}: {said[-1] if said else f'exit {answer.returncode}'}")
    raise NoTorchError(
        f"no Python with PyTorch here ({'; '.join(tried)}); install it (Debian, Ubuntu: python3-torch) or name "
        "a Python that has it: --python PATH"
    )


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What tells one process its place, as torchrun would."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_local(
    interpreter: Interpreter,
    directory: Path,
    *,
    minutes: float | None,
    level: str,
    limits: Mapping[Measure, float] | None = None,
    arguments: tuple[str, ...] = (),
    progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Document:
    """Run one rank a GPU (two on the CPU without any) and judge it. The ranks' own files stay in `directory`.

    Ctrl-C ends the ranks before it is passed on.
    """
    start = time.monotonic()
    ranks = interpreter.gpus or CPU_RANKS
    directory.mkdir(parents=True, exist_ok=True)
    out = directory / "result.json"
    out.unlink(missing_ok=True)
    program = directory / "burnin.pyz"
    program.write_bytes(archive())
    command = [
        interpreter.path, str(program), "--out", str(out), "--raw", str(directory / "ranks"),
        "--device", "cuda" if interpreter.gpus else "cpu", "--level", level,
        *(["--minutes", f"{minutes:g}"] if minutes else []), *arguments,
    ]  # fmt: skip
    last = _spawn(command, ranks, progress)
    host = socket.gethostname()
    expected = {host: Expected(interpreter.gpus)}
    result, why = None, f"the ranks left no result; last line: {last}"
    details: dict[str, Any] = {"runs": [{"nodes": host, "directory": str(directory)}]}
    if out.exists():
        try:
            text = out.read_text()
            result = BurninResult.parse(text, out)
            details["burnin"] = json.loads(text)
            details["limits"] = limits_used(result, expected, limits or {})
        except ResultError as error:
            why = str(error)
    judgement = judge(
        result,
        expected,
        limits=limits,
        why_no_result=why,
        source=str(out),
    )
    return Document(
        verb="burnin",
        verdict=judgement.verdict,
        seconds=round(time.monotonic() - start, 3),
        nodes=judgement.nodes,
        findings=judgement.findings,
        details=details,
    )


def _spawn(command: list[str], ranks: int, progress: Callable[[str], None]) -> str:
    """Run all ranks to their end, passing their lines on; the last one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    reader, writer = os.pipe()
    processes: list[subprocess.Popen[bytes]] = []
    last = "none"
    try:
        for rank in range(ranks):
            environment = {**os.environ, **rank_environment(rank, ranks, port)}
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
                )
            )
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                last = line.rstrip("\n")
                progress(last)
        for process in processes:
            process.wait()
    except BaseException:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        raise
    return last
