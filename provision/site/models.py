"""The site file as types, and the cluster that it describes.

`SiteFile` is the YAML document as written; `Site` is what the rest of the program works with: every node
with its effective settings. Going from one to the other is pure (`Site.from_file`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from provision.burnin.settings import BurninSettings
from provision.components.base.settings import BaseSettings
from provision.components.certificates.settings import CertificatesSettings
from provision.components.containers.settings import ContainersSettings
from provision.components.fabric.settings import FabricSettings
from provision.components.firewall.settings import FirewallSettings
from provision.components.health.settings import HealthSettings
from provision.components.logs.settings import LogsSettings
from provision.components.munge.settings import MungeSettings
from provision.components.nvidia.settings import NvidiaSettings
from provision.components.prometheus.settings import MonitoringSettings
from provision.components.slurm.settings import SlurmSettings
from provision.components.ssh.settings import SshSettings
from provision.components.storage.settings import StorageSettings
from provision.components.time.settings import TimeSettings
from provision.site.base import Settings, matches
from provision.site.hostlist import expand

Role = Literal["head", "worker", "login", "storage", "monitor", "control-plane"]
S = TypeVar("S", bound=Settings)
Cores = Annotated[
    str, matches(re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*"), "cores as Slurm counts them, like 0-31")
]


class Access(Settings):
    """How the controller reaches nodes by ssh and becomes root there."""

    local: bool = False  # the node is the controller's own machine, reached without ssh
    user: str = "root"
    port: int = Field(22, ge=1, le=65535)
    key: Path | None = None  # private key file, relative to the site file
    jump: str | None = None  # one or several hops, "user@host:port,host2"; names of nodes are understood
    ssh_config: Path | None = None  # an OpenSSH configuration that knows the nodes by name
    host_keys: Literal["accept-new", "strict"] = "accept-new"
    sudo_password: bool = False  # ask for one (or read PROVISION_SUDO_PASSWORD); False: sudo needs none

    @field_validator("user", "jump")
    @classmethod
    def _no_option(cls, text: str | None) -> str | None:
        """ssh takes a word that begins with a hyphen for an option, ProxyCommand among them."""
        for word in (text or "").split(","):
            if word.strip().startswith("-") or len(word.split()) > 1:
                raise ValueError(
                    "a name cannot begin with a hyphen or have spaces: ssh would take it for options"
                )
        return text

    @field_validator("jump")
    @classmethod
    def _none_is_direct(cls, jump: str | None) -> str | None:
        """As in an OpenSSH configuration, "none" switches off what a wider setting says."""
        return None if jump is not None and jump.strip().lower() == "none" else jump


class Gpu(Settings):
    """The GPUs of one node, all of one model."""

    model: str  # name of a profile, "h100-sxm"
    count: int = Field(ge=1, le=64)
    cores: list[Cores] = Field(
        default_factory=list
    )  # next to equal shares of the GPUs, in order: ["0-31", "32-63"]

    @model_validator(mode="after")
    def _shared_out(self) -> Gpu:
        if self.cores and self.count % len(self.cores):
            raise ValueError(
                f"{self.count} GPUs cannot be shared out equally to {len(self.cores)} ranges of cores"
            )
        return self


class Hardware(Settings):
    """A node's CPUs and memory; left out, they are read from the node once and kept in the lock file."""

    sockets: int = Field(ge=1)
    cores: int = Field(ge=1)  # per socket
    threads: int = Field(ge=1)  # per core
    memory: int = Field(ge=1)  # MiB, as the kernel reports it

    @property
    def cpus(self) -> int:
        return self.sockets * self.cores * self.threads


class Group(Settings):
    """Nodes described together."""

    hosts: str  # a host list: "gpu-[001-016,020]"
    addresses: str | None = None  # a host list of as many addresses, in the same order; left out: DNS names
    roles: list[Role] = Field(min_length=1)
    gpu: Gpu | None = None
    hardware: Hardware | None = None
    access: dict[str, Any] = Field(default_factory=dict)  # keys of `access` that differ for this group
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)  # component -> keys that differ


class NodeSettings(Settings):
    """What differs for one node of a group."""

    address: str | None = None
    addresses: dict[str, str] = Field(default_factory=dict)  # network name -> address on it
    bmc: str | None = None
    gpu: Gpu | None = None
    hardware: Hardware | None = None
    access: dict[str, Any] = Field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Fabric(Settings):
    """The network that jobs use between nodes."""

    kind: Literal["infiniband", "roce", "ethernet"]
    rails: int = Field(1, ge=1)  # adapters of a node
    gbits: float | None = Field(None, gt=0)  # Gbit/s of one; left out, links are not compared with it


class Networks(Settings):
    management: list[str] | str = Field(default_factory=list)  # CIDR, either family
    fabric: Fabric | None = None
    bmc: str | None = None

    @property
    def of_nodes(self) -> list[str]:
        """The networks that nodes reach each other by, also where the file names only one."""
        return [self.management] if isinstance(self.management, str) else self.management


class Scheduler(Settings):
    slurm: SlurmSettings | None = None


class Hook(Settings):
    """A playbook run around a component, on nodes of one role or all."""

    playbook: Path
    before: str | None = None  # component
    after: str | None = None
    roles: list[Role] = Field(default_factory=list)


class SiteFile(Settings):
    """The document as written."""

    cluster: str
    access: Access = Access()
    groups: dict[str, Group]
    nodes: dict[str, NodeSettings] = Field(default_factory=dict)
    networks: Networks = Networks()
    base: BaseSettings = BaseSettings()
    ssh: SshSettings | None = None
    firewall: FirewallSettings | None = None
    time: TimeSettings = TimeSettings()
    nvidia: NvidiaSettings | None = None
    fabric: FabricSettings | None = None
    containers: ContainersSettings | None = None
    certificates: CertificatesSettings | None = None  # implied by monitoring and logs
    storage: StorageSettings | None = None
    munge: MungeSettings | None = None  # implied by Slurm
    scheduler: Scheduler = Scheduler()
    monitoring: MonitoringSettings | None = None
    health: HealthSettings | None = None
    logs: LogsSettings | None = None
    burnin: BurninSettings = BurninSettings()
    hooks: list[Hook] = Field(default_factory=list)
    variables: dict[str, Any] = Field(default_factory=dict)  # handed to playbooks


# component -> where its settings stand in the site file
SECTIONS: dict[str, tuple[str, ...]] = {
    "base": ("base",),
    "ssh": ("ssh",),
    "firewall": ("firewall",),
    "time": ("time",),
    "nvidia": ("nvidia",),
    "fabric": ("fabric",),
    "containers": ("containers",),
    "certificates": ("certificates",),
    "storage": ("storage",),
    "munge": ("munge",),
    "slurm": ("scheduler", "slurm"),
    "prometheus": ("monitoring",),
    "health": ("health",),
    "slurm_exporter": ("monitoring", "slurm"),
    "dcgm_exporter": ("monitoring", "dcgm"),
    "ipmi_exporter": ("monitoring", "ipmi"),
    "grafana": ("monitoring", "grafana"),
    "logs": ("logs",),
}


def place(component: str) -> str:
    """Where a site file names `component`, as it is written there: "scheduler: {slurm: {}}"."""
    *above, last = SECTIONS[component]
    return reduce(lambda inner, part: f"{part}: {{{inner}}}", reversed(above), f"{last}: {{}}")


@dataclass(frozen=True)
class Node:
    """One machine, with everything that was said about it by site, group and node."""

    name: str
    group: str  # the first one that lists it
    roles: frozenset[str]
    access: Access
    address: str | None = None  # None: the name is resolved by DNS or by the ssh configuration
    addresses: Mapping[str, str] = field(default_factory=dict)
    bmc: str | None = None
    gpu: Gpu | None = None
    hardware: Hardware | None = None  # None: in the lock file
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # component -> keys
    groups: tuple[str, ...] = ()  # all that list it, in the order of the site file

    def has(self, role: str) -> bool:
        """Whether this node plays `role`; "*" is played by every node."""
        return role == "*" or role in self.roles


@dataclass(frozen=True)
class Site:
    """One cluster."""

    file: SiteFile
    path: Path  # absolute, of the site file
    nodes: Mapping[str, Node]  # in the order of the site file

    @property
    def cluster(self) -> str:
        return self.file.cluster

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def digest(self) -> str:
        """Changes whenever the meaning of the site file changes: 16 hexadecimal digits."""
        document = json.dumps(self.file.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:16]

    def with_role(self, role: str) -> list[Node]:
        """Nodes that play `role`, in the order of the site file."""
        return [node for node in self.nodes.values() if node.has(role)]

    def in_group(self, group: str) -> list[Node]:
        """Nodes that `group` lists, in the order of the site file."""
        return [node for node in self.nodes.values() if group in node.groups]

    @property
    def head(self) -> Node:
        """The first head: it holds secrets, acceptance and the lease of a run."""
        return self.with_role("head")[0]

    def enabled(self, component: str) -> bool:
        """Whether `component` is named in the site file (or always part of a cluster)."""
        return self.section(component) is not None

    def section(self, component: str) -> Settings | None:
        """The site-wide settings of `component`, None where it is not named."""
        found: Any = self.file
        for part in SECTIONS[component]:
            found = getattr(found, part, None)  # below a section that is not named there is none
        assert found is None or isinstance(found, Settings)
        if found is None and component == "munge" and self.file.scheduler.slurm:
            return MungeSettings()
        if found is None and component == "certificates" and (self.file.monitoring or self.file.logs):
            return CertificatesSettings()
        if component == "slurm_exporter" and not self.file.scheduler.slurm:
            return None
        return found

    def settings(self, component: str, node: Node, kind: type[S]) -> S:
        """The settings of `component` on `node`: what the site says, overridden by group, then by node."""
        section = self.section(component)
        if section is None:
            raise KeyError(f"{component} is not named in {self.path}")
        merged = merge(section.model_dump(exclude_unset=True), node.overrides.get(component, {}))
        return kind.model_validate(merged)

    @classmethod
    def from_file(cls, file: SiteFile, path: Path) -> Site:
        """The cluster that `file` describes; `file` must have passed `provision.site.check`."""
        member_of: dict[str, list[str]] = {}
        addresses: dict[str, str] = {}
        for group_name, group in file.groups.items():
            names = expand(group.hosts)
            for name in names:
                member_of.setdefault(name, []).append(group_name)
            if group.addresses:
                addresses |= zip(names, expand(group.addresses), strict=True)
        nodes = {name: _node(file, name, groups, addresses.get(name)) for name, groups in member_of.items()}
        return cls(file, path.resolve(), nodes)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`; mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def _node(file: SiteFile, name: str, member_of: list[str], address: str | None) -> Node:
    """The node `name`; one that stands in several groups plays the roles of all of them."""
    own = file.nodes.get(name, NodeSettings())
    groups = [file.groups[group] for group in member_of]
    access: Mapping[str, Any] = file.access.model_dump(exclude_unset=True)
    overrides: Mapping[str, Any] = {}
    for part in [*((group.access, group.settings) for group in groups), (own.access, own.settings)]:
        access, overrides = merge(access, part[0]), merge(overrides, part[1])
    return Node(
        name=name,
        group=member_of[0],
        groups=tuple(member_of),
        roles=frozenset(role for group in groups for role in group.roles),
        access=Access.model_validate(access),
        address=own.address or address,
        addresses=own.addresses,
        bmc=own.bmc,
        gpu=own.gpu or next((group.gpu for group in groups if group.gpu), None),
        hardware=own.hardware or next((group.hardware for group in groups if group.hardware), None),
        overrides=overrides,
    )
