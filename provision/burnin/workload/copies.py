"""Memory: copies and sums on the device, copies between it and each NUMA node of the host. Every element is checked."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

import torch

from . import pattern
from .device import Marks, release, synchronise
from .document import RankLog
from .group import Group
from .system import numa_nodes

DEVICE_BYTES = {"cpu": 1 << 22, "cuda": 4 << 30}
HOST_BYTES = {"cpu": 1 << 20, "cuda": 1 << 30}
TIMES = 10
PCI = Path("/sys/bus/pci/devices")


def measure(group: Group, log: RankLog, device: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for `Copy` and for `Skipped`. All GPUs at once on the device, one after another from and to the host."""
    rank = group.placement.rank
    group.step("device copies")
    own = _on_device(device)
    release(device)
    near, nodes = gpu_node(device), numa_nodes()
    for turn in range(group.placement.local_world_size):
        group.barrier(f"host copies, GPU {turn} of each node")
        if turn == group.placement.local_rank:
            for node, place in places(near, sorted(nodes)):
                with bound_to(nodes.get(node) if node is not None else None):
                    own += _with_host(device, node, place)
    for row in own:
        row["rank"] = rank
    log.event("copies", rows=own)
    answers = group.gather("copies", {"rows": own, "near": near, "nodes": len(nodes)})
    rows = [row for answer in answers for row in answer["rows"]]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        rates = [row["gbs"] for row in rows if row["kind"] == kind]
        log.progress(f"{kind.replace('_', ' '):15s} {min(rates):.1f} to {max(rates):.1f} GB/s")
    skipped = []
    if not any(row["place"] == "far" for row in rows):
        why = (
            "no node has a second NUMA node"
            if all(answer["nodes"] < 2 for answer in answers)
            else "the kernel does not say which NUMA node a GPU is on"
        )
        skipped.append({"what": "host copies from the far NUMA node", "why": why, "host": None})
    return rows, skipped


def places(near: int | None, nodes: list[int]) -> list[tuple[int | None, str | None]]:
    """The host memory to try, as (NUMA node, "near" or "far"), for a GPU at node `near`."""
    if near is None or near not in nodes:
        return [(None, None)]
    far: list[tuple[int | None, str | None]] = [(node, "far") for node in nodes if node != near]
    return [(near, "near"), *far[:1]]


def _on_device(device: Any) -> list[dict[str, Any]]:
    size = DEVICE_BYTES[device.type]
    count = size // 4
    source = torch.empty(count, device=device)
    for index, start, stop in pattern.blocks(count):
        source[start:stop] = pattern.words("copy", 0, index, stop - start, device).float()
    target = torch.zeros(count, device=device)
    second = _median(lambda: target.copy_(source), device)
    rows = [_row("device_copy", None, None, 2 * size, second, _differing(target, source))]
    third = torch.empty(count, device=device)
    second = _median(lambda: torch.add(source, target, alpha=2.0, out=third), device)
    rows.append(_row("triad", None, None, 3 * size, second, _differing(third, source, factor=3.0)))
    return rows


def _with_host(device: Any, node: int | None, place: str | None) -> list[dict[str, Any]]:
    """Pinned memory of the calling thread's NUMA node, to the device and back."""
    size = HOST_BYTES[device.type]
    cuda = device.type == "cuda"
    if cuda and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()  # else memory of the other node is given out again
    count = size // 4
    host, back = (torch.empty(count, pin_memory=cuda) for _ in range(2))
    host.copy_(torch.arange(count, dtype=torch.int32).view(torch.float32))
    back.zero_()
    there = torch.empty(count, device=device)
    down = _median(lambda: there.copy_(host, non_blocking=True), device)
    up = _median(lambda: back.copy_(there, non_blocking=True), device)
    expected = torch.arange(count, dtype=torch.int32, device=device)
    wrong_down = int((there.view(torch.int32) != expected).sum())
    wrong_up = int((back.view(torch.int32) != there.view(torch.int32).cpu()).sum())
    return [
        _row("host_to_device", node, place, size, down, wrong_down),
        _row("device_to_host", node, place, size, up, wrong_up),
    ]


def _row(
    kind: str, node: int | None, place: str | None, size: int, second: float, wrong: int
) -> dict[str, Any]:
    return {
        "kind": kind,
        "place": place,
        "numa_node": node,
        "bytes": size,
        "seconds": second,
        "gbs": size / second / 1e9,
        "wrong": wrong,
    }


def _median(once: Callable[[], Any], device: Any) -> float:
    once()
    marks = Marks(device)
    marks.set()
    for _ in range(TIMES):
        once()
        marks.set()
    synchronise(device)
    return statistics.median(marks.seconds())


def _differing(got: Any, source: Any, factor: float = 1.0) -> int:
    """Elements that are not `factor` times the source's, in pieces that fit beside them."""
    wrong = 0
    for _, start, stop in pattern.blocks(got.numel()):
        wrong += int((got[start:stop] != source[start:stop] + (factor - 1) * source[start:stop]).sum())
    return wrong


@contextmanager
def bound_to(processors: set[int] | None) -> Iterator[None]:
    """This thread on the given processors (None: as it is): memory that it touches first is then theirs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def gpu_node(device: Any, root: Path = PCI) -> int | None:
    """The NUMA node that the GPU hangs on; None where the kernel does not say."""
    bus = pci_address(device)
    if bus is None or not (root / bus / "numa_node").exists():
        return None
    number = int((root / bus / "numa_node").read_text())
    return number if number >= 0 else None


def pci_address(device: Any) -> str | None:
    """ "0000:06:00.0", as sysfs spells it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
