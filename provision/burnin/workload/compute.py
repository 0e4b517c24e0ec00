"""Matrix products on every rank at the same time: how fast, and whether the products are right.

The rate that counts is the sustained one: an H200 does 20 % more in the first second than after ten, when power
limits its clocks, and a tenth more on zeros than on random data.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Callable

import torch

from . import pattern
from .device import Marks, release, synchronise
from .document import RankLog
from .group import Group

BATCH_SECONDS = 0.25  # between two looks at the clock
BURST_BATCHES = 2
SUSTAINED_SHARE = 0.5  # the rate is that of the last half of the load
LEAST_SECONDS = 12.0  # of the product that is judged: power and heat settle within some seconds
BRIEF_SECONDS = 1.0


@dataclass(frozen=True)
class Product:
    """A kind of matrix product: `multiply(a, b)` of float32 inputs made ready by `prepare`."""

    dtype: str
    size: int
    tolerance: float
    prepare: Callable[[Any, Any], tuple[Any, ...]]
    multiply: Callable[..., Any]


def _to(dtype: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    return lambda a, b: (a.to(dtype), b.to(dtype))


def _plain(a: Any, b: Any) -> Any:
    return a @ b


def _tf32(a: Any, b: Any) -> Any:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _to_fp8(a: Any, b: Any) -> tuple[Any, ...]:
    one = torch.ones((), device=a.device)
    # The second factor of this product must lie column by column.
    return a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t(), one


def _fp8(a: Any, b: Any, one: Any) -> Any:
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


# The tolerance is of the last rounding, of the result: 2^-9 for bfloat16, less on average. A wrong bit that
# matters shows as more.
CUDA = (
    Product("bfloat16", 8192, 2e-2, _to(torch.bfloat16), _plain),
    Product("float16", 8192, 5e-3, _to(torch.float16), _plain),
    Product("tf32", 8192, 5e-3, _to(torch.float32), _tf32),
    Product("float8_e4m3fn", 8192, 2e-2, _to_fp8, _fp8),
)
CPU = (
    Product("float32", 256, 1e-4, _to(torch.float32), _plain),
    Product("bfloat16", 256, 2e-2, _to(torch.bfloat16), _plain),
)


def measure(
    group: Group, log: RankLog, device: Any, seconds: float, thorough: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for `Compute`, one for each rank and kind of product, and for `Skipped`.

    The first kind, which is judged, gets the time that the others leave of `seconds`.
    """
    cuda = device.type == "cuda"
    products = CUDA if cuda else CPU if thorough else CPU[:1]
    others = seconds / 2 / len(products) if thorough else BRIEF_SECONDS
    first = max(LEAST_SECONDS if cuda else BRIEF_SECONDS, seconds - others * len(products))
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for product in products:
        load = first if product is products[0] else max(BRIEF_SECONDS, others)
        label = f"matrix product {product.dtype}"
        group.step(label)
        try:
            own, why = _one(log, product, device, load, group.placement.rank), None
        except (RuntimeError, AttributeError) as error:
            if "out of memory" in str(error):
                raise
            own, why = None, str(error).splitlines()[0]
        answers = group.gather(f"{label} results", {"row": own, "why": why})
        refused = [answer["why"] for answer in answers if answer["why"]]
        if refused:
            skipped.append({"what": f"matrix products in {product.dtype}", "why": refused[0], "host": None})
            log.progress(f"{label}: skipped, {refused[0]}")
            continue
        rows += [answer["row"] for answer in answers]
        rates = [answer["row"]["tflops"] for answer in answers]
        log.progress(f"{label}: {min(rates):.3f} to {max(rates):.3f} TFLOP/s a rank, sustained")
        release(device)
    return rows, skipped


def _one(log: RankLog, product: Product, device: Any, seconds: float, rank: int) -> dict[str, Any]:
    """Products of random matrices for `seconds`, one after another without a pause.

    The product A B is checked as Freivalds does: A (B x) must equal (A B) x for a random vector x, which costs
    little beside the product itself. Then the last product of every batch must have the bits of the first.
    """
    size = product.size
    a, b = (_normal(f"{product.dtype}/{name}", size, device) for name in "ab")
    factors = product.prepare(a, b)
    first = product.multiply(*factors)
    x = _normal("x", size, device, columns=1).double()
    exact = [factor.double() for factor in factors[:2]]
    want = exact[0] @ (exact[1] @ x)
    error = float((first.double() @ x - want).norm() / want.norm())
    del a, b, exact
    checksum = pattern.checksum([first])
    batch = _batch(product, factors, device)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    times: list[list[float]] = []
    total = 0.0
    while total < seconds:
        marks = Marks(device)
        for _ in range(batch):
            marks.set()
            result = product.multiply(*factors)
        marks.set()
        differing += (result.view(-1).view(_integer(result)) != first.view(-1).view(_integer(first))).any()
        synchronise(device)
        times.append(marks.seconds())
        total += sum(times[-1])
    sustained = [second for each in times[int(len(times) * SUSTAINED_SHARE) :] for second in each]
    burst = [second for each in times[:BURST_BATCHES] for second in each]
    row = {
        "rank": rank,
        "dtype": product.dtype,
        "size": size,
        "products": sum(map(len, times)),
        "tflops": 2 * size**3 / statistics.median(sustained) / 1e12,
        "relative_error": error,
        "tolerance": product.tolerance,
        "seconds": total,
        "burst_tflops": 2 * size**3 / statistics.median(burst) / 1e12,
        "differing_products": int(differing),
        "checksum": checksum,
    }
    log.event("compute", **row, batches=[sum(each) / len(each) for each in times])
    return row


def _batch(product: Product, factors: tuple[Any, ...], device: Any) -> int:
    """How many products take BATCH_SECONDS."""
    marks = Marks(device)
    marks.set()
    for _ in range(3):
        product.multiply(*factors)
    marks.set()
    synchronise(device)
    return max(3, int(BATCH_SECONDS / (marks.seconds()[0] / 3)))


def _normal(purpose: str, rows: int, device: Any, columns: int | None = None) -> Any:
    """The same random matrix on every rank: float32 (rows, columns), mean 0, variance 1, nearly normal."""
    count = rows * (columns or rows)
    matrix = torch.zeros(count, device=device)
    for index, start, stop in pattern.blocks(count):
        for part in range(3):  # a sum of three even ones has the spread of a normal one
            words = pattern.words(f"{purpose}/{part}", 0, index, stop - start, device)
            matrix[start:stop] += words.float().mul_(1 / (1 << 31))
    return matrix.view(rows, -1)


def _integer(tensor: Any) -> Any:
    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]
