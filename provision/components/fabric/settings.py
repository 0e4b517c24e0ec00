"""Settings of fabric: RDMA, the subnet manager, and NCCL's system-wide configuration."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from provision.site.base import Settings, matches

_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}")
_HCA = re.compile(r"[a-z][a-z0-9_]*(:[0-9]+)?")
_VARIABLE = re.compile(r"NCCL_[A-Z0-9_]+")
_VALUE = re.compile(r"[^\s#]+")


class FabricSettings(Settings):
    """The part of a site file that describes the fabric."""

    interfaces: list[Annotated[str, matches(_INTERFACE, "an interface like ens1f0")]] = Field(
        default_factory=list
    )  # for NCCL's sockets, by exact name; left out: NCCL chooses
    hcas: list[Annotated[str, matches(_HCA, "an adapter like mlx5_0")]] = Field(
        default_factory=list
    )  # for NCCL, by exact name, in the order of the rails; left out: NCCL chooses
    peer_memory: Literal["dma-buf", "nvidia-peermem"] = "dma-buf"  # how adapters reach the GPUs' memory
    subnet_manager: bool = False  # opensm on the first head, where no switch runs one
    iommu: Literal["keep", "passthrough", "off"] = "keep"
    acs: Literal["keep", "off"] = "keep"  # redirect of peers' traffic by PCIe bridges; off on bare metal only
    nccl: dict[
        Annotated[str, matches(_VARIABLE, "a variable like NCCL_IB_TIMEOUT")],
        Annotated[str, matches(_VALUE, "one word")] | int,
    ] = Field(default_factory=dict)
