"""The simulated GPUs of a node: the state file that nvml/nvml.c answers from, and what faults put into it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from provision import packaged
from provision.lab.command import InputError
from provision.profiles.gpu import GpuProfile, gpu_model

STATE = "/var/lib/lab-gpu/state"
FOLDER = "/usr/local/lib/lab"
DEVICES = "/usr/local/sbin/lab-devices"
SMI = "/usr/local/bin/nvidia-smi"  # before one that a package brings
DRIVER, NVML, CUDA = "550.163.01", "12.550.163.01", 12040  # what Debian 13 has
LIBRARY = f"{FOLDER}/nvml/libnvidia-ml.so.{DRIVER}"  # by the name of its file programs know its version
_HERE = Path(__file__).parent / "nvml"
_NVML = "provision.lab.nvml"
_CLOCKS = range(4)  # graphics, SM, memory, video
_MiB = 1 << 20


@cache
def _recipe() -> dict[str, Any]:
    recipe = packaged.data(_NVML, "models.yml")
    assert isinstance(recipe, dict)
    return recipe


def models() -> list[str]:
    """The models that can be simulated, as a site file names them."""
    return list(_recipe()["models"])


def require(model: str) -> None:
    """Raises InputError, with the models there are, for one that cannot be simulated."""
    if model not in models():
        raise InputError(f"--model {model}: cannot be simulated; there are {', '.join(models())}")


def bus(gpu: int) -> int:
    """The PCI bus of a GPU."""
    return 0x0B + gpu


def gpu_uuid(node: str, gpu: int) -> str:
    """The same each time: what a health baseline knows a GPU by."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{gpu}.{node}')}"


def state(node: str, model: str, count: int, cpus: int) -> str:
    """The state file of a node with `count` GPUs of `model` on a machine with `cpus` CPUs."""
    profile = gpu_model(model)
    assert profile is not None, model
    values: dict[str, Any] = {"driver": DRIVER, "module": DRIVER, "nvml": NVML, "cuda": CUDA}
    values |= {f"gpu*.{key}": value for key, value in _of_model(profile, cpus)}
    for gpu in range(count):
        values |= {f"gpu{gpu}.{key}": value for key, value in _of_gpu(node, gpu)}
    lines = "".join(f"{key} = {value}\n" for key, value in values.items())
    return f"# Answers of the simulated GPUs; the last line that matches counts\n{lines}"


def _of_model(profile: GpuProfile, cpus: int) -> Iterator[tuple[str, Any]]:
    """What all GPUs of a model answer; later ones win."""
    own: Mapping[str, Any] = _recipe()["models"][profile.name]
    yield from ((key, value) for key, value in _recipe()["all"].items())
    yield from {
        "name": profile.products[0],
        "pci.id": f"0x{profile.pci[0]:04x}10de",
        "memory.total": profile.memory * _MiB,
        "cpus": cpus,
    }.items()
    if profile.nvlinks and profile.nvlink_gbs:
        yield from _recipe()["fabric"].items()
        yield "nvlink.count", profile.nvlinks
        yield from _links(profile.nvlinks, round(profile.nvlink_gbs * 1000), own)
    for key, value in own.items():
        if key == "clocks":
            yield from _clocks(value)
        elif key == "temperature.tlimit":
            names = ("gpu", "slowdown", "shutdown", "memory")
            yield from ((f"{key}.{name}", each) for name, each in zip(names, value, strict=True))
        elif key == "temperature.threshold":
            yield from ((f"{key}.{number}", each) for number, each in enumerate(value))
        elif not key.startswith("nvlink."):
            yield key, value


def _links(count: int, speed: int, own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for link in range(count):
        yield f"nvlink.{link}.speed", speed
        yield f"nvlink.{link}.remote.bus_id", f"00000000:{0xF0 + link % 4:02X}:00.0"
        each = {**_recipe()["nvlink"], **{k[7:]: v for k, v in own.items() if k.startswith("nvlink.")}}
        yield from ((f"nvlink.{link}.{key}", value) for key, value in each.items())


def _clocks(clocks: Sequence[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    for number, (now, most) in zip(_CLOCKS, clocks, strict=True):
        yield f"clocks.{number}", now
        yield f"clocks.max.{number}", most
        yield f"clocks.applications.{number}", most
    yield "clocks.memory.0", clocks[2][1]
    graphics = clocks[0][1]
    yield from ((f"clocks.graphics.{n}", graphics - 15 * n) for n in range(8))


def _of_gpu(node: str, gpu: int) -> Iterator[tuple[str, Any]]:
    yield "present", 1
    yield "uuid", gpu_uuid(node, gpu)
    yield "serial", 1650000000000 + int(gpu_uuid(node, gpu)[-6:], 16)
    yield "minor", gpu
    yield "board_id", bus(gpu) << 8
    yield "pci.bus_id", f"00000000:{bus(gpu):02X}:00.0"


def programs() -> dict[str, str]:
    """The Python files of the programs on a node: path -> text."""
    return {
        f"{FOLDER}/provision/lab/nvml/{name}": (_HERE / name).read_text()
        for name in ("__init__.py", "devices.py", "smi.py")
    }


def program(module: str) -> str:
    """The text of a command that runs one of them."""
    return f'#!/bin/sh\nPYTHONPATH={FOLDER} exec python3 -m provision.lab.nvml.{module} "$@"\n'


@dataclass(frozen=True)
class GpuFault:
    """What is wrong with one GPU (`whole_node`: with all): lines for the state file, key -> value."""

    name: str
    doc: str
    lines: Mapping[str, Any]
    whole_node: bool

    @property
    def of_link(self) -> bool:
        """Whether it is about one NVLink."""
        return any("{link}" in key for key in self.lines)

    def text(self, gpu: int = 0, link: int = 0) -> str:
        """The lines, each with the fault's name behind it, by which they are found again."""
        prefix = "" if self.whole_node else f"gpu{gpu}."
        return "".join(
            f"{prefix}{key.format(link=link)} = {str(value).format(gpu=gpu)} # {self.name}\n"
            for key, value in self.lines.items()
        )


def faults() -> list[GpuFault]:
    """What faults.yml lists."""
    recipe = packaged.data(_NVML, "faults.yml")
    return [
        GpuFault(name, each["doc"], each["lines"], kind == "node")
        for kind, entries in recipe.items()
        for name, each in entries.items()
    ]
