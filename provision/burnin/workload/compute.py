"""Matrix products on every rank at the same time: how fast, and whether the product is right."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .document import RankLog
from .group import Group

WARM_UP = 3
SIZES = {"cpu": (256, torch.float32, 1e-4), "cuda": (8192, torch.bfloat16, 2e-2)}  # and tolerance


def measure(group: Group, log: RankLog, device: Any, seconds: float) -> list[dict[str, Any]]:
    """One row for each rank: TFLOP/s (median over single products) and relative error of the last product.

    The product A B is checked as Freivalds does: A (B x) must equal (A B) x for a random vector x, which
    costs little beside the product itself.
    """
    size, dtype, tolerance = SIZES[device.type]
    label = f"matrix product {size} {dtype}".replace("torch.", "")
    group.step(label)
    generator = torch.Generator(device=device).manual_seed(1 + group.placement.rank)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    for _ in range(WARM_UP):
        product = a @ b
    _synchronise(device)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product = a @ b
        _synchronise(device)
        times.append(time.perf_counter() - start)
    x = torch.randn(size, 1, generator=generator, device=device, dtype=torch.float64)
    want = a.double() @ (b.double() @ x)
    error = float((product.double() @ x - want).norm() / want.norm())
    row = {
        "rank": group.placement.rank,
        "dtype": str(dtype).replace("torch.", ""),
        "size": size,
        "products": len(times),
        "tflops": 2 * size**3 / statistics.median(times) / 1e12,
        "relative_error": error,
        "tolerance": tolerance,
    }
    log.event("compute", **row)
    rows = group.gather("matrix product results", row)
    rates = [float(entry["tflops"]) for entry in rows]
    log.progress(f"{label}: {min(rates):.3f} to {max(rates):.3f} TFLOP/s a rank")
    return rows


def _synchronise(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
