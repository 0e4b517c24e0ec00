"""What a GPU model is, and what it should reach, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import Field

from provision import packaged
from provision.site.base import Settings

Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]
Measure = Literal[
    "all_reduce_busbw_gbs",  # of the largest message, all ranks
    "all_to_all_busbw_gbs",
    "matmul_bf16_tflops",  # sustained, of one GPU
    "matmul_fp16_tflops",
    "matmul_tf32_tflops",
    "matmul_fp8_tflops",
    "device_copy_gbs",  # read and written
    "host_to_device_gbs",  # from the near NUMA node
    "device_to_host_gbs",
    "pair_gbs",  # one GPU to another of the same node, one way
    "training_of_matmul",  # share of the sustained bf16 rate that training reaches
]


class Limit(Settings):
    """The lowest acceptable number of one measure."""

    measure: Measure
    fail: float = Field(gt=0)  # below it a node fails
    warn: float = Field(gt=0)  # below it a node warns
    source: str = Field(min_length=10)  # where the numbers are from
    nodes: int | None = Field(None, ge=1)  # None: any number
    nodes_from: int | None = Field(None, ge=1)  # so many or more
    gpus: int | None = Field(None, ge=1)  # a node; None: any number
    nics: int | None = Field(None, ge=1)  # a node; None: does not matter
    bytes: int = Field(0, ge=0)  # the smallest message that counts
    nvls: bool | None = None  # whether the numbers hold with NVLink SHARP; None: does not matter


@dataclass(frozen=True)
class Shape:
    """What a number was measured on; what is not known is None."""

    nodes: int
    gpus: int  # of each node
    nics: int | None = None  # of each node
    nvls: bool | None = None


class Peak(Settings):
    """What a GPU cannot exceed: dense rates in TFLOP/s, bytes in GB/s. A number above it was measured wrongly."""

    bf16: float | None = Field(None, gt=0)
    fp16: float | None = Field(None, gt=0)
    tf32: float | None = Field(None, gt=0)
    fp8: float | None = Field(None, gt=0)
    memory: float = Field(gt=0)
    pcie: float = Field(gt=0)  # one way
    bridge: float | None = Field(
        None, ge=0
    )  # NVLink bridge, one way; 0: this model takes none; None: not known
    source: str = Field(min_length=10)


class GpuProfile(Settings):
    """One GPU model."""

    name: str  # as a site file says it: "h100-sxm"
    products: list[str] = Field(min_length=1)  # as the driver says it
    architecture: Architecture
    pci: list[int] = Field(min_length=1)  # device ids of vendor 10de
    memory: int = Field(gt=0)  # MiB, as the driver counts it
    hbm: bool = True  # its memory, which tells its temperature
    nvlinks: int = Field(0, ge=0)  # of one GPU; 0: none, or only those of a bridge
    nvlink_gbs: float | None = Field(None, gt=0)  # GB/s of one link, as `nvidia-smi nvlink -s` says it
    mig: dict[str, int] = Field(default_factory=dict)  # kind of slice, "1g.10gb" -> how many one GPU holds
    peak: Peak | None = None
    limits: list[Limit] = Field(default_factory=list)

    def limit(self, measure: Measure, shape: Shape) -> Limit | None:
        """The limit of `measure` for `shape`, None if no number is known.

        What the shape does not know does not rule a limit out; one that is known to fit comes first.
        """
        fitting = [
            limit
            for limit in self.limits
            if limit.measure == measure
            and limit.nodes in (None, shape.nodes)
            and (limit.nodes_from is None or limit.nodes_from <= shape.nodes)
            and limit.gpus in (None, shape.gpus)
            and (shape.nics is None or limit.nics in (None, shape.nics))
            and (shape.nvls is None or limit.nvls in (None, shape.nvls))
        ]
        known = [limit for limit in fitting if limit.nvls in (None, shape.nvls)]
        return next(iter(known or fitting), None)


@cache
def all_models() -> list[GpuProfile]:
    """All models, in the order of gpus.yml; their NVLinks are the node agent's data, which is JSON."""
    document = packaged.data("provision.profiles", "gpus.yml")
    links = packaged.data("provision.profiles", "health.json")["products"]
    return [
        GpuProfile.model_validate({"name": name, **value, **_nvlinks(links.get(value["products"][0], {}))})
        for name, value in document.items()
    ]


def _nvlinks(known: Mapping[str, Any]) -> dict[str, Any]:
    """Of all numbers of links that a sound GPU may have, the one without a bridge."""
    count = min(known.get("nvlinks", (0,)))
    return {"nvlinks": count, "nvlink_gbs": known["nvlink_gbs"] if count else None}


def measured_models() -> list[str]:
    """The models that numbers are known of, as a site file names them."""
    return [profile.name for profile in all_models() if profile.limits]


def gpu_model(name: str) -> GpuProfile | None:
    """The profile of the model that a site file calls `name`."""
    return next((profile for profile in all_models() if profile.name == name), None)


def pci_model(device: int) -> GpuProfile | None:
    """The profile of the GPU with the PCI device id `device` (vendor 10de), which shows before any driver is there."""
    return next((profile for profile in all_models() if device in profile.pci), None)


def gpu_profile(product_name: str) -> GpuProfile | None:
    """The profile of the GPU that the driver calls `product_name`; None for a model that is not known."""
    return next((profile for profile in all_models() if product_name in profile.products), None)
