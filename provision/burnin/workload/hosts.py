"""What a node runs the job with: system, driver, container, and who else is on its GPUs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .nvml import Nvml, NvmlError
from .system import container, numa_nodes, os_name
from .telemetry import bare


def row(host: str, gpus: bool) -> dict[str, Any]:
    """For `Host`."""
    driver, busy = gpu_facts() if gpus else (None, {})
    return {
        "host": host,
        "os": os_name(Path("/etc/os-release")),
        "kernel": platform.release(),
        "driver": driver,
        "container": container(os.environ, Path("/")),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(numa_nodes()),
        "busy": busy,
    }


def others(row: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Of what is busy on a node, the GPUs that the job uses and the processes that are not its own. Pure."""
    here = [member for member in members if member["host"] == row["host"]]
    own = {str(member["pid"]) for member in here}
    used = {bare(member["gpu"]["uuid"]) for member in here if member["gpu"]}
    foreign = {
        gpu: [each for each in found if each.split()[0] not in own] for gpu, found in row["busy"].items()
    }
    return {gpu: found for gpu, found in foreign.items() if found and bare(gpu) in used}


def gpu_facts() -> tuple[str | None, dict[str, list[str]]]:
    """The driver's version, and by GPU the processes that compute on it already (call before CUDA starts)."""
    try:
        nvml = Nvml()
    except NvmlError:
        return None, {}
    try:
        busy = {}
        for handle in nvml.handles:
            try:
                others = [f"{pid} {command(pid)}" for pid in nvml.processes(handle) if pid != os.getpid()]
            except NvmlError:
                continue
            if others:
                busy[nvml.uuid(handle)] = others
        return nvml.driver(), busy
    finally:
        nvml.close()


def command(pid: int) -> str:
    """The name of a process; "?" if it is none of this namespace."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"
