"""Nodes that should be alike and are not: what facts say about the hardware of one group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from provision.report.model import Finding, Verdict
from provision.site.hostlist import fold
from provision.site.models import Gpu, Hardware


@dataclass(frozen=True)
class Machine:
    """What a node's CPUs, memory and GPUs were found to be."""

    hardware: Hardware
    gpu: Gpu | None = None

    def __str__(self) -> str:
        cpu = self.hardware
        gpus = f"{self.gpu.count} {self.gpu.model}" if self.gpu else "no GPU"
        return f"{cpu.sockets} x {cpu.cores} x {cpu.threads} CPUs, {cpu.memory} MiB, {gpus}"


def kinds(machines: Mapping[str, Machine], tolerance: int = 64) -> dict[Machine, list[str]]:
    """The nodes by kind of hardware, most frequent kind first.

    Memory that differs by no more than `tolerance` MiB is the same: kernels reserve a little more or less.
    """
    found: dict[Machine, list[str]] = defaultdict(list)
    for name, machine in machines.items():
        same = (kind for kind in found if _alike(kind, machine, tolerance))
        found[next(same, machine)].append(name)
    return dict(sorted(found.items(), key=lambda kind: -len(kind[1])))


def mixed_group(group: str, machines: Mapping[str, Machine]) -> Finding | None:
    """A warning with a table of the kinds where the nodes of `group` differ; None where they are alike."""
    found = kinds(machines)
    if len(found) < 2:
        return None
    table = "\n".join(f"{fold(names)}: {machine}" for machine, names in found.items())
    return Finding(
        verdict=Verdict.WARN,
        check="group-hardware",
        subject=group,
        read=f"{len(found)} hardware kinds",
        expected="1",
        why=table,
        action="look for missing memory or GPUs; nodes meant to differ belong in groups of their own",
    )


def _alike(one: Machine, other: Machine, tolerance: int) -> bool:
    close = abs(one.hardware.memory - other.hardware.memory) <= tolerance
    return close and one.gpu == other.gpu and _cpus(one) == _cpus(other)


def _cpus(machine: Machine) -> tuple[int, int, int]:
    return machine.hardware.sockets, machine.hardware.cores, machine.hardware.threads
