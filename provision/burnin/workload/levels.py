"""How much a level does: pure numbers, so that a run's length can be told before it starts."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LEVELS = ("quick", "standard", "soak")
MINUTES = {"quick": 2.0, "standard": 15.0, "soak": 240.0}
# Start of PyTorch and of the communicators, and the parts that take as long as they take.
FIXED_SECONDS = {"quick": 40.0, "standard": 80.0, "soak": 80.0}
# Of the rest. Soaking is for what shows only after hours of heat.
SHARES = {
    "quick": {"collectives": 0.25, "compute": 0.30, "replicas": 0.05, "strategies": 0.40},
    "standard": {"collectives": 0.15, "compute": 0.25, "replicas": 0.05, "strategies": 0.55},
    "soak": {"collectives": 0.15, "compute": 0.25, "replicas": 0.05, "strategies": 0.55},
}
CPU_SECONDS = 30.0  # the CPU tries the program, not the machine: everything once, small


@dataclass(frozen=True)
class Level:
    """Seconds of load for each part; the times of parts that run several things are for all of these together."""

    name: str
    sizes: tuple[int, ...]  # of messages
    collectives: float
    compute: float
    replicas: float  # the training that is compared bit for bit
    strategies: float
    rotations: int  # deterministic steps that are replayed on other GPUs
    thorough: bool  # every kind of product, every strategy, a checkpoint, external tools
    seconds: float  # all of it, about


def plan(level: str, minutes: float | None, device: str) -> Level:
    """What `level` means on `device` ("cpu" or "cuda") in about `minutes`; None: as long as the level takes."""
    if device == "cpu":
        load = max(0.0, (minutes or 0.0) * 60 - CPU_SECONDS)
        sizes: tuple[int, ...] = (KIB, 64 * KIB, MIB, 16 * MIB)
        fixed = CPU_SECONDS
    else:
        fixed = FIXED_SECONDS[level]
        load = max(0.0, (minutes or MINUTES[level]) * 60 - fixed)
        sizes = (KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB, 4 * GIB, 8 * GIB)
        if level != "quick":
            sizes = tuple(sorted({*(KIB << step for step in range(0, 25, 2)), 2 * GIB, 8 * GIB}))
    return Level(
        name=level,
        sizes=sizes,
        rotations=1 if level == "quick" else 3,
        thorough=level != "quick",
        seconds=fixed + load,
        **{part: share * load for part, share in SHARES[level].items()},
    )
