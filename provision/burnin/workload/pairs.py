"""The peer-to-peer matrix: every GPU of a node sends to every other, alone, both ways."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from . import pattern
from .device import Marks, synchronise
from .document import RankLog
from .group import Group

BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}
TIMES = 10


def measure(group: Group, log: RankLog, device: Any) -> list[dict[str, Any]]:
    """Rows for `Pair`, of all ordered pairs of ranks on one node; nodes work at the same time."""
    place = group.placement
    hosts = [member["host"] for member in group.members]
    own = []
    for source, target in schedule(place.local_world_size):
        pair = tuple(_ranks(hosts, place.host)[each] for each in (source, target))
        label = f"pair {source} to {target} of each node"
        with group.collective(label):
            if place.rank in pair:
                row = _one(pair, place.rank, device)
                if row is not None:
                    own.append(row)
        group.barrier(label)
    log.event("pairs", rows=own)
    rows = [row for answer in group.gather("pairs", own) for row in answer]
    if rows:
        rates = [row["gbs"] for row in rows]
        log.progress(f"{len(rows)} pairs of GPUs: {min(rates):.2f} to {max(rates):.2f} GB/s")
    return rows


def schedule(ranks: int) -> list[tuple[int, int]]:
    """All ordered pairs of a node's ranks."""
    return [(source, target) for source in range(ranks) for target in range(ranks) if source != target]


def _ranks(hosts: list[str], host: str) -> list[int]:
    return [rank for rank, name in enumerate(hosts) if name == host]


def _one(pair: tuple[int, ...], rank: int, device: Any) -> dict[str, Any] | None:
    """Send from the first to the second; the receiver has the row."""
    source, target = pair
    count = BYTES[device.type] // 4
    data = pattern.bits(f"pair/{source}", 0, 0, min(count, pattern.BLOCK), torch.float32, device)
    data = data.repeat(-(-count // data.numel()))[:count]
    buffer = data if rank == source else torch.empty_like(data)
    marks = Marks(device)
    for turn in range(TIMES + 2):
        if turn >= 1:
            marks.set()
        if rank == source:
            dist.send(buffer, target)
        else:
            dist.recv(buffer, source)
    marks.set()
    synchronise(device)
    if rank == source:
        return None
    second = statistics.median(marks.seconds()[1:])
    return {
        "source": source,
        "target": target,
        "bytes": count * 4,
        "seconds": second,
        "gbs": count * 4 / second / 1e9,
        "wrong": pattern.wrong_elements(buffer, data),
    }
