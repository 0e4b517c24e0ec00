"""Settings of health."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from provision.site.base import Settings, matches


class Roce(Settings):
    """How RoCE ports are set up."""

    mtu: int | None = Field(None, ge=256, le=4096)  # bytes, of RDMA
    gid_index: int | None = Field(None, ge=0)
    trust: Literal["dscp", "pcp"] | None = None
    pfc: str | None = None  # priorities with pause frames: "0,0,0,1,0,0,0,0"


class Kubernetes(Settings):
    """Where nodes tell Kubernetes of their health."""

    kubeconfig: Annotated[str, matches(re.compile(r"/\S+"), "an absolute path on the node")] = (
        "/etc/kubernetes/kubelet.conf"
    )
    taint: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None  # left out: a condition alone
    node: str | None = None  # its name in Kubernetes, where that is another one


class HealthSettings(Settings):
    """The part of a site file that describes health: what the agent may do, and what this site's nodes have."""

    act: bool = True  # mend, drain, resume; false: only tell
    interval: int = Field(300, ge=60)  # seconds between two readings by the timer
    services: list[str] = Field(default_factory=list)  # besides those of the components on the node
    kubernetes: Kubernetes | None = None  # left out: it is told nothing
    thresholds: dict[str, float] = Field(default_factory=dict)  # names in profiles/health.json
    ports: dict[str, float] = Field(
        default_factory=dict
    )  # RDMA device -> Gbit/s; left out: all that are there
    nvme: int | None = Field(None, ge=0)  # number of drives
    numa: int | None = Field(None, ge=1)  # number of nodes
    governor: str | None = None  # left out: that of base
    mig: Literal["none", "enabled"] | None = None
    compute_mode: Literal["Default", "Exclusive_Process", "Prohibited"] | None = None
    power_limit: float | None = Field(None, gt=0)  # W; left out: the GPU's default
    nvlink_domain: bool = False  # GPUs of several nodes are one NVLink domain
    nic_firmware: dict[str, str] = Field(default_factory=dict)  # board id -> version
    mrrs: int | None = None  # bytes
    roce: Roce | None = None
    topology: dict[str, dict[str, str]] = Field(default_factory=dict)  # golden: GPU0 -> GPU1 -> NV18

    def expectations(self) -> dict[str, Any]:
        """What the agent compares with, without what is left out."""
        kept = self.model_dump(exclude={"act", "interval", "services", "kubernetes"}, exclude_none=True)
        return {name: value for name, value in kept.items() if value not in ({}, False)}
