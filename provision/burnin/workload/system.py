"""What Linux says of a node: processors and memory, file systems, containers. Pure but for the files it reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

NODES = Path("/sys/devices/system/node")
CONTAINER_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}
CONTAINER_NAMES = (
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
    "ENROOT_IMAGE",
    "NVIDIA_PYTORCH_VERSION",
    "container",
)


def numa_nodes(root: Path = NODES) -> dict[int, set[int]]:
    """NUMA node -> its processors that this process may use; nodes without any are left out."""
    found = {}
    for folder in root.glob("node[0-9]*"):
        processors = cpu_list((folder / "cpulist").read_text()) & os.sched_getaffinity(0)
        if processors:
            found[int(folder.name[4:])] = processors
    return found


def cpu_list(text: str) -> set[int]:
    """The kernel's "0-3,8" as numbers."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def filesystem(folder: Path, mounts: str = "/proc/self/mounts") -> str | None:
    """The type of the file system that holds `folder`."""
    real = str(folder.resolve())
    best: tuple[str, str | None] = ("", None)
    for line in Path(mounts).read_text().splitlines():
        _, where, kind, *_ = line.split()
        where = where.replace("\\040", " ")
        inside = real == where or real.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]


def os_name(path: Path) -> str | None:
    """PRETTY_NAME of os-release."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip().strip("\"'")
    return None


def container(environment: Mapping[str, str], root: Path) -> str | None:
    """The image, or at least the kind of container, that this process is in; None where nothing shows one."""
    named = [f"{name}={environment[name]}" for name in CONTAINER_NAMES if environment.get(name)]
    marked = [kind for mark, kind in CONTAINER_MARKS.items() if (root / mark.lstrip("/")).exists()]
    return ", ".join(named + marked) or None
