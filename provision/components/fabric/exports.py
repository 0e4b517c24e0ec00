"""What the fabric consists of, from the site file alone: modules, NCCL's configuration, kernel parameters. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from provision.components.fabric.settings import FabricSettings, RoceSettings
from provision.components.nvidia.settings import NvidiaSettings
from provision.engine.deploy import render
from provision.profiles.doca import doca
from provision.site.problem import Problem, one_of

if TYPE_CHECKING:
    from provision.site.models import Node, Site

MODULES = "/etc/modules-load.d/provision-fabric.conf"
NCCL = "/etc/nccl.conf"
ACS = "/usr/local/lib/provision/acs-off"
ACS_UNIT = "provision-acs.service"


def settings(site: Site, node: Node) -> FabricSettings:
    return site.settings("fabric", node, FabricSettings)


def kind(site: Site) -> str:
    """infiniband, roce or ethernet, as `networks.fabric` says."""
    return site.file.networks.fabric.kind if site.file.networks.fabric else "ethernet"


def rdma(site: Site) -> bool:
    return kind(site) != "ethernet"


def problems(site: Site) -> Iterator[Problem]:
    """What contradicts itself in the fabric's part of the site file."""
    network = site.file.networks.fabric
    if network is None:
        yield Problem(
            "fabric-without-network",
            ("fabric",),
            expected="networks.fabric: {kind: infiniband, rails: 8}",
            why="which kind of fabric there is decides what is installed",
            at_key=True,
        )
        return
    reported: set[str] = set()
    for node in site.with_role("worker"):
        wanted = settings(site, node)
        if wanted.hcas and len(wanted.hcas) != network.rails and "rails" not in reported:
            reported.add("rails")
            yield Problem(
                "fabric-rails",
                ("fabric", "hcas"),
                f"{len(wanted.hcas)} adapters on {node.name}",
                f"{network.rails}, one for each rail (networks.fabric.rails)",
            )
        if wanted.hcas and network.kind == "ethernet" and "hcas" not in reported:
            reported.add("hcas")
            yield Problem("fabric-hcas", ("fabric", "hcas"), why="an Ethernet fabric has no RDMA adapters")
        if wanted.subnet_manager and network.kind != "infiniband" and "opensm" not in reported:
            reported.add("opensm")
            yield Problem(
                "fabric-subnet-manager", ("fabric", "subnet_manager"), "true", "false",
                why=f"{network.kind} has no subnet manager",
            )  # fmt: skip
    yield from _roce_problems(site)
    yield from _stack_problems(site)


def _workers(site: Site) -> Iterator[tuple[Node, FabricSettings]]:
    """A worker for each kind of settings that there is."""
    seen: set[str] = set()
    for node in site.with_role("worker"):
        wanted = settings(site, node)
        if (text := wanted.model_dump_json()) not in seen:
            seen.add(text)
            yield node, wanted


def _roce_problems(site: Site) -> Iterator[Problem]:
    for _, wanted in _workers(site):
        roce = wanted.roce
        if roce is None:
            continue
        if kind(site) != "roce":
            yield Problem("fabric-roce", ("fabric", "roce"), why=f"the fabric is {kind(site)}", at_key=True)
        if roce.cnp_dscp // 8 == roce.priority:
            yield Problem(
                "fabric-roce-cnp",
                ("fabric", "roce", "cnp_dscp"),
                str(roce.cnp_dscp),
                "a DSCP of another priority, as 48",
                why=f"DSCP {roce.cnp_dscp} goes in priority {roce.priority}: flow control would hold up the "
                "notifications that are to end it",
            )


def _stack_problems(site: Site) -> Iterator[Problem]:
    for node, wanted in _workers(site):
        if wanted.stack == "inbox":
            if wanted.doca is not None:
                yield Problem("fabric-doca", ("fabric", "stack"), "inbox", "doca", why="fabric.doca is named")
            continue
        if wanted.doca is None:
            yield Problem(
                "fabric-doca",
                ("fabric", "stack"),
                "doca",
                "fabric.doca: {version: 3.2.1, keyring: SHA-256 of GPG-KEY-Mellanox.pub}",
                why="which release it is decides which drivers there are",
            )
            continue
        if not rdma(site):
            yield Problem("fabric-doca", ("fabric", "stack"), "doca", "inbox", why="the fabric has no RDMA")
        known = doca()
        if wanted.doca.version not in known.releases:
            yield Problem(
                "fabric-doca-release",
                ("fabric", "doca", "version"),
                wanted.doca.version,
                one_of(known.releases),
                why="nothing is known about this release",
                action="add it to provision/profiles/doca.yml",
            )
        gpu = site.settings("nvidia", node, NvidiaSettings) if node.gpu and site.enabled("nvidia") else None
        if (
            wanted.peer_memory == "nvidia-peermem"
            and gpu is not None
            and gpu.source == "distribution"
            and gpu.build != "dkms"
        ):
            yield Problem(
                "fabric-peer-memory",
                ("fabric", "peer_memory"),
                "nvidia-peermem",
                "dma-buf, or nvidia.build: dkms",
                why="a precompiled nvidia-peermem was built for the kernel's own RDMA stack, not for DOCA's",
            )


def modules(site: Site) -> str:
    """The kernel's RDMA stack; what belongs to an adapter is loaded for it by udev."""
    names = ["ib_umad", "ib_uverbs", "rdma_ucm"] + (["ib_ipoib"] if kind(site) == "infiniband" else [])
    return "".join(f"{name}\n" for name in names)


def nccl_conf(site: Site, node: Node, gid_index: int | None = None) -> str:
    """NCCL's defaults for every program on the node; a program's own environment wins over them.

    "=" makes names exact: mlx5_1 would otherwise also stand for mlx5_10, and eth for every Ethernet interface.
    """
    values = nccl_variables(settings(site, node), kind(site), gid_index)
    return "".join(f"{name}={value}\n" for name, value in values.items())


def nccl_variables(wanted: FabricSettings, kind: str, gid_index: int | None = None) -> dict[str, str]:
    """What `wanted` means in NCCL's words, on a fabric of this kind; `gid_index`: the one that was looked up."""
    values: dict[str, str] = {}
    if wanted.interfaces:
        values["NCCL_SOCKET_IFNAME"] = f"={','.join(wanted.interfaces)}"
    if kind == "ethernet":
        values["NCCL_IB_DISABLE"] = "1"
    elif wanted.hcas:
        values["NCCL_IB_HCA"] = f"={','.join(wanted.hcas)}"
    if kind == "roce":
        roce = wanted.roce or RoceSettings()
        index = gid_index if roce.gid_index is None else roce.gid_index
        if index is not None:
            values["NCCL_IB_GID_INDEX"] = str(index)
        values["NCCL_IB_TC"] = str(roce.traffic_class)
    return values | {name: str(value) for name, value in wanted.nccl.items()}


def iommu_parameters(wanted: FabricSettings) -> list[str]:
    """Kernel parameters; those of both makers of processors, each of which ignores the other's."""
    if wanted.iommu == "passthrough":
        return ["iommu=pt"]
    return ["intel_iommu=off", "amd_iommu=off"] if wanted.iommu == "off" else []


def acs_script() -> str:
    return render("fabric", "acs-off.j2")


def acs_unit() -> str:
    return (
        "[Unit]\nDescription=GPUs and adapters reach each other without the root complex\n"
        "DefaultDependencies=no\nAfter=systemd-modules-load.service\nBefore=slurmd.service kubelet.service\n"
        "ConditionVirtualization=no\n\n"
        f"[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart={ACS} apply\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
