"""Each collective over a range of sizes: how fast, and whether every single element came out right."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Callable

import torch
import torch.distributed as dist

from . import pattern
from .device import Marks, synchronise
from .document import RankLog
from .group import Group
from .levels import GIB, KIB, MIB

WARM_UP = 3
LEAST_ITERATIONS, MOST_ITERATIONS = 3, 200
LEAST_CALLS = 1 + WARM_UP + LEAST_ITERATIONS
PATIENCE = 8  # a size may take so many times its share of the time before the next is left out
LEAST_PATIENCE_SECONDS = 4.0
# torch >= 2.13 renamed these two and warns about the old names.
_all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
BUFFERS = 4  # of the collective's size: input, output, and what the check needs


@dataclass(frozen=True)
class Operation:
    """One collective: `make` gives its buffers, `run` does it once, `expect` what the output must be.

    `bus_factor` turns the rate of the algorithm (bytes / time) into that of the wire, as nccl-tests counts
    it.
    """

    name: str
    bus_factor: Callable[[int], float]
    make: Callable[[_Job], tuple[Any, Any]]
    run: Callable[[_Job, Any, Any], None]
    expect: Callable[[_Job, int, int, int], Any]
    parts: Callable[[_Job], int]  # how many ranks' data the output has side by side


@dataclass(frozen=True)
class _Job:
    """One operation at one size."""

    purpose: str
    rank: int
    ranks: int
    count: int  # elements in one rank's share, or in the whole buffer where there are no shares
    dtype: Any
    device: Any

    def to(self, receiver: int) -> _Job:
        """The same for data that is meant for one receiver."""
        return replace(self, purpose=f"{self.purpose}/to/{receiver}")

    def bits(self, rank: int, index: int, count: int) -> Any:
        """Block `index` of the data that `rank` sends unchanged."""
        return pattern.bits(self.purpose, rank, index, count, self.dtype, self.device)

    def summands(self, rank: int, index: int, count: int) -> Any:
        """Block `index` of what `rank` adds to a sum."""
        return pattern.summands(self.purpose, rank, index, count, self.dtype, self.device, self.ranks)

    def total(self, index: int, count: int) -> Any:
        """Block `index` of the sum over all ranks, by plain additions on this device."""
        total = self.summands(0, index, count)
        for rank in range(1, self.ranks):
            total += self.summands(rank, index, count)
        return total

    def own(self, block: Callable[[int, int, int], Any]) -> Any:
        """This rank's whole share, made of `block(rank, index, count)`."""
        buffer = self.empty()
        for index, start, stop in pattern.blocks(self.count):
            buffer[start:stop] = block(self.rank, index, stop - start)
        return buffer

    def empty(self, parts: int = 1) -> Any:
        return torch.empty(self.count * parts, dtype=self.dtype, device=self.device)


def _all_reduce_make(job: _Job) -> tuple[Any, Any]:
    return job.own(job.summands), job.empty()


def _all_reduce(job: _Job, source: Any, target: Any) -> None:
    dist.all_reduce(target)


def _all_gather_make(job: _Job) -> tuple[Any, Any]:
    return job.own(job.bits), job.empty(job.ranks)


def _all_gather(job: _Job, source: Any, target: Any) -> None:
    _all_gather_tensor(target, source)


def _reduce_scatter_make(job: _Job) -> tuple[Any, Any]:
    shares = [share.own(share.summands) for share in map(job.to, range(job.ranks))]
    return torch.cat(shares), job.empty()


def _reduce_scatter(job: _Job, source: Any, target: Any) -> None:
    _reduce_scatter_tensor(target, source)


def _broadcast_make(job: _Job) -> tuple[Any, Any]:
    source = job.own(job.bits)
    return source, source if job.rank == 0 else job.empty()


def _broadcast(job: _Job, source: Any, target: Any) -> None:
    dist.broadcast(target, src=0)


def _send_recv_make(job: _Job) -> tuple[Any, Any]:
    return job.own(job.bits), job.empty()


def _send_recv(job: _Job, source: Any, target: Any) -> None:
    after, before = (job.rank + 1) % job.ranks, (job.rank - 1) % job.ranks
    transfers = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, target, before)]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()


def _all_to_all_make(job: _Job) -> tuple[Any, Any]:
    shares = [share.own(share.bits) for share in map(job.to, range(job.ranks))]
    return torch.cat(shares), job.empty(job.ranks)


def _all_to_all(job: _Job, source: Any, target: Any) -> None:
    dist.all_to_all_single(target, source)


OPERATIONS = (
    Operation(
        "all_reduce",
        lambda n: 2 * (n - 1) / n,
        _all_reduce_make,
        _all_reduce,
        lambda job, part, index, count: job.total(index, count),
        lambda job: 1,
    ),
    Operation(
        "all_gather",
        lambda n: (n - 1) / n,
        _all_gather_make,
        _all_gather,
        lambda job, part, index, count: job.bits(part, index, count),
        lambda job: job.ranks,
    ),
    Operation(
        "reduce_scatter",
        lambda n: (n - 1) / n,
        _reduce_scatter_make,
        _reduce_scatter,
        lambda job, part, index, count: job.to(job.rank).total(index, count),
        lambda job: 1,
    ),
    Operation(
        "broadcast",
        lambda n: 1.0,
        _broadcast_make,
        _broadcast,
        lambda job, part, index, count: job.bits(0, index, count),
        lambda job: 1,
    ),
    Operation(
        "send_recv",
        lambda n: 1.0,
        _send_recv_make,
        _send_recv,
        lambda job, part, index, count: job.bits((job.rank - 1) % job.ranks, index, count),
        lambda job: 1,
    ),
    Operation(
        "all_to_all",
        lambda n: (n - 1) / n,
        _all_to_all_make,
        _all_to_all,
        lambda job, part, index, count: job.to(job.rank).bits(part, index, count),
        lambda job: job.ranks,
    ),
)
SHARED = ("all_gather", "reduce_scatter", "all_to_all")  # the size is that of all ranks' shares together


def measure(
    group: Group, log: RankLog, device: Any, sizes: tuple[int, ...], seconds: float, wrong_rank: int | None
) -> Iterator[dict[str, Any]]:
    """One row for each operation and size, in the same order on every rank, timed for about `seconds` altogether.

    Sizes that would take too long are not tried: a row for `Skipped` says so.

    `wrong_rank` flips one bit of what that rank received, to show that the check finds it.
    """
    ranks = group.placement.world_size
    # bfloat16 has 8 bits of significand: sums over more ranks than that holds are not exact.
    dtype = torch.bfloat16 if device.type == "cuda" and ranks <= 128 else torch.float32
    each = seconds / len(OPERATIONS) / len(sizes)
    for operation in OPERATIONS:
        for size in sizes:
            row = _measure_one(group, log, operation, size, dtype, device, each, wrong_rank)
            yield row
            if row["unsupported"]:
                break
            following = next((other for other in sizes if other > size), size)
            expected = LEAST_CALLS * row["seconds"] * following / size
            if following > size and expected > max(LEAST_PATIENCE_SECONDS, PATIENCE * each):
                why = f"at {row['algbw_gbs']:.2g} GB/s {human(following)} would take {expected:.0f} s"
                yield {"what": f"{operation.name} above {human(size)}", "why": why, "host": None}
                break


def _measure_one(
    group: Group,
    log: RankLog,
    operation: Operation,
    size: int,
    dtype: Any,
    device: Any,
    seconds: float,
    wrong_rank: int | None,
) -> dict[str, Any]:
    place = group.placement
    shares = place.world_size if operation.name in SHARED else 1
    count = max(1, size // dtype.itemsize // shares)
    label = f"{operation.name} {human(size)}"
    job = _Job(f"{operation.name}/{size}", place.rank, place.world_size, count, dtype, device)
    row: dict[str, Any] = {
        "operation": operation.name,
        "bytes": count * shares * dtype.itemsize,
        "dtype": str(dtype).replace("torch.", ""),
        "iterations": 0,
        "seconds": None,
        "algbw_gbs": None,
        "busbw_gbs": None,
        "wrong": [],
        "unsupported": None,
        "rank_seconds": [],
    }
    source, target = operation.make(job)

    def once() -> None:
        if operation.name == "all_reduce":  # works in place: start each time from the same numbers
            target.copy_(source)
        operation.run(job, source, target)

    with group.collective(label):
        try:
            once()
        except (RuntimeError, NotImplementedError) as error:
            # A backend refuses on all ranks alike, before anything is sent.
            if not any(text in str(error) for text in ("not support", "not implemented")):
                raise
            row["unsupported"] = str(error).splitlines()[0]
        synchronise(device)
    refused = [text for text in group.gather(f"{label} supported", row["unsupported"]) if text]
    if refused:
        row["unsupported"] = refused[0]
        log.progress(f"{operation.name:14s} not available with this backend")
        return row

    # The first run's output is checked: later ones would overwrite a wrong element.
    if wrong_rank == place.rank:
        pattern.flip_bit(target, target.numel() // 2, 3)
    wrong = _count_wrong(operation, job, target)
    if operation.name == "all_reduce":
        measured = lambda: operation.run(job, source, target)  # noqa: E731 - its values no longer matter
        target.zero_()
    else:
        measured = once
    times = _time(group, label, measured, device, seconds)
    row["iterations"] = len(times)
    mine = {"seconds": statistics.median(times), "wrong": wrong}
    log.event("collective", operation=operation.name, bytes=row["bytes"], seconds=times, wrong=wrong)
    results = group.gather(f"{label} results", mine)
    row["rank_seconds"] = [result["seconds"] for result in results]
    row["seconds"] = max(row["rank_seconds"])
    row["wrong"] = [result["wrong"] for result in results]
    row["algbw_gbs"] = row["bytes"] / row["seconds"] / 1e9
    row["busbw_gbs"] = row["algbw_gbs"] * operation.bus_factor(place.world_size)
    log.progress(
        f"{operation.name:14s} {human(size):>7s} {row['seconds'] * 1e6:10.1f} us "
        f"{row['busbw_gbs']:8.3f} GB/s bus  {sum(row['wrong'])} wrong"
    )
    return row


def _time(group: Group, label: str, once: Callable[[], None], device: Any, seconds: float) -> list[float]:
    """Seconds of each run, after a warm-up; every rank does the same number of them."""
    with group.collective(f"{label} warm-up"):
        start = time.perf_counter()
        for _ in range(WARM_UP):
            once()
        synchronise(device)
        each = (time.perf_counter() - start) / WARM_UP
    slowest = max(group.gather(f"{label} iterations", each))
    iterations = max(LEAST_ITERATIONS, min(MOST_ITERATIONS, int(seconds / slowest)))
    marks = Marks(device)
    with group.collective(f"{label} timed"):
        marks.set()
        for _ in range(iterations):
            once()
            marks.set()
        synchronise(device)
    return marks.seconds()


def _count_wrong(operation: Operation, job: _Job, target: Any) -> int:
    wrong = 0
    for part in range(operation.parts(job)):
        base = part * job.count
        for index, start, stop in pattern.blocks(job.count):
            want = operation.expect(job, part, index, stop - start)
            wrong += pattern.wrong_elements(target[base + start : base + stop], want)
    return wrong


def sizes_that_fit(device: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of `sizes` whose buffers fit this device's free memory."""
    if device.type != "cuda":
        return sizes
    free, _ = torch.cuda.mem_get_info(device)
    return tuple(size for size in sizes if BUFFERS * size < free)


def human(size: int) -> str:
    """1048576 -> "1 MiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
