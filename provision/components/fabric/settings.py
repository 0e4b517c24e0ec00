"""Settings of fabric: RDMA, RoCE, the subnet manager, and NCCL's system-wide configuration."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from provision.site.base import Settings, matches

_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}")
_HCA = re.compile(r"[a-z][a-z0-9_]*(:[0-9]+)?")
_VARIABLE = re.compile(r"NCCL_[A-Z0-9_]+")
_VALUE = re.compile(r"[^\s#]+")
_RELEASE = re.compile(r"[1-9][0-9]*\.[0-9]+\.[0-9]+")
_URL = re.compile(r"(https?|file)://[^\s'\"]+[^\s'\"/]")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DocaSettings(Settings):
    """NVIDIA's DOCA-Host, in exactly one release."""

    version: Annotated[str, matches(_RELEASE, "a full release like 3.2.1")]
    keyring: Annotated[str, matches(_SHA256, "a SHA-256 sum")]  # of GPG-KEY-Mellanox.pub, by a way you trust
    mirror: Annotated[str, matches(_URL, "an address like https://mirror.example.org/doca")] | None = None


class RoceSettings(Settings):
    """RoCE on the adapters; switches are to be set the same way. Defaults: NVIDIA's for lossless RoCE by DSCP."""

    priority: int = Field(3, ge=0, le=7)  # the one with flow control (PFC)
    dscp: int = Field(26, ge=0, le=63)  # of RoCE's packets
    cnp_dscp: int = Field(48, ge=0, le=63)  # of notifications of congestion
    ecn: bool | None = (
        None  # false: as the firmware has it; left out: set with DOCA, whose driver has the knobs
    )
    mtu: int | None = Field(None, ge=1280, le=9978)  # of the interface, bytes; left out: as it is
    gid_index: int | None = Field(None, ge=0, le=255)  # for NCCL; left out: looked up

    @property
    def traffic_class(self) -> int:
        """The type of service of RoCE's packets: their DSCP, and that they can be marked (ECT(0))."""
        return self.dscp * 4 + 2


class FabricSettings(Settings):
    """The part of a site file that describes the fabric."""

    interfaces: list[Annotated[str, matches(_INTERFACE, "an interface like ens1f0")]] = Field(
        default_factory=list
    )  # for NCCL's sockets, by exact name; left out: NCCL chooses
    hcas: list[Annotated[str, matches(_HCA, "an adapter like mlx5_0")]] = Field(
        default_factory=list
    )  # for NCCL, by exact name, in the order of the rails; left out: NCCL chooses
    stack: Literal["inbox", "doca"] = "inbox"  # the kernel's and distribution's own, or NVIDIA's
    doca: DocaSettings | None = None  # with stack: doca
    roce: RoceSettings | None = None  # left out: the defaults, where networks.fabric.kind is roce
    peer_memory: Literal["dma-buf", "nvidia-peermem"] = "dma-buf"  # how adapters reach the GPUs' memory
    subnet_manager: bool = False  # opensm on the first head, where no switch runs one
    iommu: Literal["keep", "passthrough", "off"] = "keep"
    acs: Literal["keep", "off"] = "keep"  # redirect of peers' traffic by PCIe bridges; off on bare metal only
    nccl: dict[
        Annotated[str, matches(_VARIABLE, "a variable like NCCL_IB_TIMEOUT")],
        Annotated[str, matches(_VALUE, "one word")] | int,
    ] = Field(default_factory=dict)
