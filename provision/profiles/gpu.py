"""What a GPU model is, and what it should reach, as data."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import yaml
from pydantic import Field

from provision.site.base import Settings

Architecture = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell"]
Measure = Literal["all_reduce_busbw_gbs", "matmul_bf16_tflops"]


class Limit(Settings):
    """The lowest acceptable number of one measure."""

    measure: Measure
    fail: float = Field(gt=0)  # below it a node fails
    warn: float = Field(gt=0)  # below it a node warns
    source: str = Field(min_length=10)  # where the numbers are from
    nodes: int | None = Field(None, ge=1)  # None: any number
    gpus: int | None = Field(None, ge=1)  # a node; None: any number
    bytes: int = Field(0, ge=0)  # the smallest message that counts
    nvls: bool | None = None  # whether the numbers hold with NVLink SHARP; None: does not matter


class GpuProfile(Settings):
    """One GPU model."""

    name: str  # as a site file says it: "h100-sxm"
    products: list[str] = Field(min_length=1)  # as the driver says it
    architecture: Architecture
    pci: list[int] = Field(min_length=1)  # device ids of vendor 10de
    memory: int = Field(gt=0)  # MiB, as the driver counts it
    nvlinks: int = Field(0, ge=0)  # of one GPU; 0: none, or only those of a bridge
    nvlink_gbs: float | None = Field(None, gt=0)  # GB/s of one link
    mig: dict[str, int] = Field(default_factory=dict)  # kind of slice, "1g.10gb" -> how many one GPU holds
    limits: list[Limit] = Field(default_factory=list)

    def limit(self, measure: Measure, nodes: int, gpus: int) -> Limit | None:
        """The limit of `measure` on `nodes` nodes with `gpus` GPUs each, None if no number is known."""
        for limit in self.limits:
            if limit.measure == measure and limit.nodes in (None, nodes) and limit.gpus in (None, gpus):
                return limit
        return None


@cache
def all_models() -> list[GpuProfile]:
    """All models, in the order of gpus.yml."""
    document = yaml.safe_load(files("provision.profiles").joinpath("gpus.yml").read_text())
    return [GpuProfile.model_validate({"name": name, **value}) for name, value in document.items()]


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
