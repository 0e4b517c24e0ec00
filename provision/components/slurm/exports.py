"""What Slurm is made of, from site file and lock alone: files, names, ports, the marks on nodes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from provision.components.base import exports as base
from provision.components.containers import exports as containers
from provision.components.exported import Port
from provision.components.health import exports as health
from provision.components.nvidia import exports as nvidia
from provision.components.nvidia.settings import NvidiaSettings
from provision.components.slurm import lint
from provision.components.slurm.settings import Account, Partition, SlurmSettings
from provision.components.storage import exports as storage
from provision.engine.deploy import Secret, render
from provision.profiles.gpu import gpu_model
from provision.site.hostlist import HostlistError, expand, fold
from provision.site.names import bracketed
from provision.site.problem import Problem, nearest

if TYPE_CHECKING:
    from provision.profiles import Distribution
    from provision.site.lock import Lock
    from provision.site.models import Hardware, Node, Site

ETC = "/etc/slurm"
CONF = f"{ETC}/slurm.conf"
DATABASE = f"{ETC}/slurmdbd.conf"
JWT_KEY = f"{ETC}/jwt_hs256.key"
PROLOG, EPILOG = f"{ETC}/prolog.d", f"{ETC}/epilog.d"
STATE = "/var/lib/slurm/slurmctld"
SPOOL = "/var/lib/slurm/slurmd"
LOGS = "/var/log/slurm"
FETCHED = "/run/slurm/conf"  # where a node keeps what it got from slurmctld
DEVICES_SCRIPT = "/usr/local/lib/provision/gpu-devices"
INTRODUCED = "/var/lib/provision/slurm-nodes"  # nodes that slurmctld has met, one a line
PAM_BEGIN, PAM_END = "# provision: begin", "# provision: end"
USER_ID = 64030  # of user and group slurm where no package brings them: the number that Debian keeps for them
DEVICES_TIMEOUT = 60  # seconds for the driver to make the device files of the GPUs

CONTROLLER_PORT, NODE_PORT, DATABASE_PORT = 6817, 6818, 6819
PORTS = (
    Port(CONTROLLER_PORT, "head", "slurmctld"),
    Port(DATABASE_PORT, "head", "slurmdbd"),
    Port(NODE_PORT, "worker", "slurmd"),
)

SECRETS = (
    Secret(
        "slurm-jwt.key",
        make=lambda: os.urandom(32),
        adopt=(JWT_KEY, f"{STATE}/jwt_hs256.key", "/var/spool/slurm/statesave/jwt_hs256.key"),
    ),
)

# Only what carries this mark is ours to undo: a node that a person drained stays drained.
MARK = "provision:"
AWAITING = f"{MARK} awaiting acceptance"


def ours(reason: str | None) -> bool:
    """Whether a node's reason was set by this tool, which may then undo it."""
    return reason is not None and reason.strip().startswith(MARK)


def settings(site: Site) -> SlurmSettings:
    """Slurm's part of the site file; it holds for the whole cluster."""
    section = site.section("slurm")
    assert isinstance(section, SlurmSettings)
    return section


def conf_server(site: Site) -> str:
    """The value of slurmd's --conf-server."""
    return f"{site.head.name}:{CONTROLLER_PORT}"


def has_commands(site: Site, node: Node) -> bool:
    """Whether Slurm's commands are on `node` anyhow: the packages of the first head and of workers bring them."""
    return node.name == site.head.name or node.has("worker")


# Nodes as Slurm writes them


def slurm_fold(names: Collection[str]) -> str:
    """A host list that Slurm reads as exactly these names.

    In Slurm a numeric range must stand at the end of a name, or be one of several of which one does: names that
    would fold to "unit[1-2]-ib" are listed one by one.
    """
    if not names:
        return ""
    words = []
    for word in _words(fold(names)):
        words += expand(word) if "[" in word and not word.endswith("]") else [word]
    return ",".join(words)


def _words(text: str) -> list[str]:
    """The words between commas outside of brackets."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)


@dataclass(frozen=True)
class Kind:
    """Nodes of equal hardware: one NodeName line."""

    names: tuple[str, ...]
    sockets: int
    cores: int  # per socket
    threads: int  # per core
    memory: int  # MiB that jobs may have
    gpu: str | None = None  # type, as in "gpu:TYPE:COUNT"
    gpus: int = 0  # whole ones
    near: tuple[str, ...] = ()  # cores next to equal shares of the GPUs
    slices: tuple[tuple[str, int], ...] = ()  # type and number of the MIG slices of the others

    @property
    def nodes(self) -> str:
        return slurm_fold(self.names)

    @property
    def gres(self) -> str | None:
        whole = [(self.gpu, self.gpus)] if self.gpu and self.gpus else []
        return ",".join(f"gpu:{kind}:{count}" for kind, count in [*whole, *self.slices]) or None

    @property
    def devices(self) -> list[tuple[str, str | None]]:
        """The device files of its GPUs, as gres.conf writes them, each share with the cores next to it."""
        share = self.gpus // max(len(self.near), 1)
        return [(_devices(first * share, share), cores) for first, cores in enumerate(self.near or (None,))]


def _devices(first: int, count: int) -> str:
    return f"/dev/nvidia{first}" if count == 1 else f"/dev/nvidia[{first}-{first + count - 1}]"


def gres_type(model: str) -> str:
    """A GPU model as a GRES type: "h100-sxm" is "h100_80gb_hbm3", "RTX PRO 6000" is "rtx_pro_6000".

    What NVML calls the product, without its maker: with AutoDetect=nvml a type must be part of that name.
    """
    profile = gpu_model(model)
    name = re.sub(r"[^a-z0-9_.-]+", "_", (profile.products[0] if profile else model).lower())
    return name.removeprefix("nvidia_").removeprefix("tesla_")


def gpu_detection(site: Site, profile: Distribution) -> Literal["nvml", "files"]:
    """Whether slurmd asks NVML for its GPUs, or looks at device files only: what the build of Slurm can."""
    section = settings(site)
    if section.gpu_detection is not None:
        return section.gpu_detection
    able = section.source == "distribution" and "slurm-nvml" in profile.package_sets
    return "nvml" if able else "files"


def slices(site: Site, node: Node) -> list[list[str]]:
    """The GRES types of each GPU's slices, as the site file lays them out; an empty list for a whole GPU.

    Slurm names a slice by its size alone: a profile's "+me" is not part of its type.
    """
    if node.gpu is None:
        return []
    if not site.enabled("nvidia"):
        return [[] for _ in range(node.gpu.count)]
    layouts = nvidia.modes(node, site.settings("nvidia", node, NvidiaSettings))
    whole = gres_type(node.gpu.model)
    return [
        [f"{whole}_{re.split('[+-]', each)[0]}" for each in mode.profiles.split(",") if each != "-"]
        for mode in layouts
    ]


def real_memory(hardware: Hardware, reserve: int) -> int:
    """MiB that Slurm may give to jobs, `reserve` percent less than there is, in steps of 64.

    What a kernel reports varies by some MiB from boot to boot; a node that has less than configured is refused.
    """
    return max(1, hardware.memory * (100 - reserve) // 100 // 64 * 64)


def kinds(site: Site, lock: Lock) -> list[Kind]:
    """The workers of known hardware, equal ones together, in the order of the site file."""
    reserve = settings(site).memory_reserve
    found: dict[tuple[Any, ...], list[str]] = {}
    for node in site.with_role("worker"):
        hardware = lock.hardware_of(site, node)
        if hardware is None:
            continue
        laid_out = slices(site, node)
        gpu, gpus = gres_type(node.gpu.model) if node.gpu else None, sum(not each for each in laid_out)
        near = tuple(node.gpu.cores) if node.gpu else ()
        split = tuple(sorted(Counter(kind for each in laid_out for kind in each).items()))
        memory = real_memory(hardware, reserve)
        key = (hardware.sockets, hardware.cores, hardware.threads, memory, gpu, gpus, near, split)
        found.setdefault(key, []).append(node.name)
    return [Kind(tuple(names), *key) for key, names in found.items()]


def unknown_hardware(site: Site, lock: Lock) -> list[str]:
    """Workers that cannot be in slurm.conf yet: nobody has said or read what they have."""
    return [node.name for node in site.with_role("worker") if lock.hardware_of(site, node) is None]


def known_nodes(site: Site, lock: Lock) -> list[str]:
    """The workers that slurm.conf names."""
    return [name for kind in kinds(site, lock) for name in kind.names]


def kind_of(site: Site, lock: Lock, name: str) -> Kind | None:
    """The hardware that Slurm expects of the node `name`."""
    return next((kind for kind in kinds(site, lock) if name in kind.names), None)


def unlike_its_group(site: Site, lock: Lock, node: Node) -> str | None:
    """The hardware kinds of the group of `node`, where it is not of the one that most have; None: it is."""
    members = {each.name for each in site.with_role("worker") if each.group == node.group}
    mixed = [kind for kind in kinds(site, lock) if members & set(kind.names)]
    usual = max(mixed, key=lambda kind: len(members & set(kind.names)), default=None)
    if usual is None or node.name in usual.names:
        return None
    table = "; ".join(
        f"{slurm_fold([name for name in kind.names if name in members])}: {kind.sockets} x {kind.cores} x "
        f"{kind.threads}, {kind.memory} MiB, {kind.gres or 'no GPU'}"
        for kind in mixed
    )
    return f"group {node.group} has {len(mixed)} hardware kinds: {table}"


# Files


def slurm_conf(site: Site, lock: Lock, *, profile: Distribution, joining: Collection[str] = ()) -> str:
    """slurm.conf for the whole cluster.

    Nodes that are `joining` are drained in it. That text is only for the moment in which slurmctld meets them: it
    keeps the state, and `State=` left in the file would drain them again at every reconfiguration.
    """
    section = settings(site)
    found = kinds(site, lock)
    parts = []
    for kind in found:
        new = tuple(name for name in kind.names if name in joining)
        old = tuple(name for name in kind.names if name not in joining)
        parts += [
            (replace(kind, names=names), state) for names, state in ((old, ""), (new, "DRAIN")) if names
        ]
    known = {name for kind in found for name in kind.names}
    return render(
        "slurm",
        "slurm.conf.j2",
        site=site,
        section=section,
        health=section.health_check or health.health_program(site),
        head=site.head,
        kinds=parts,
        unknown=slurm_fold(unknown_hardware(site, lock)),
        partitions=[
            (partition, slurm_fold(names), memory_per_cpu(found, names))
            for partition in partitions(site)
            if (names := [name for name in partition_nodes(site, partition) if name in known])
        ],
        gpus=any(kind.gres for kind in found),
        accounting="cgroup" if section.constrain.cores and section.constrain.memory else "linux",
        private_tmp=bool(container_conf(site)),
        groups_of_nodes=containers.docker_members(site),
        mpi="pmix" if "slurm.pmix" in profile.paths and section.source == "distribution" else "none",
        ipv6=any(":" in (node.address or "") for node in site.nodes.values()),
        reason=AWAITING,
        paths={
            "state": STATE,
            "spool": SPOOL,
            "logs": LOGS,
            "prolog": PROLOG,
            "epilog": EPILOG,
            "jwt": JWT_KEY,
        },
    )


def memory_per_cpu(found: Sequence[Kind], names: Collection[str]) -> int:
    """MiB that a job gets for a CPU when it asks for none: otherwise one job on one CPU takes all of a node's."""
    return min(
        max(1, kind.memory // (kind.sockets * kind.cores * kind.threads))
        for kind in found
        if set(names) & set(kind.names)
    )


def partitions(site: Site) -> list[Partition]:
    """The partitions, one of them the default: the first, where the site file names none."""
    found = settings(site).partitions or [Partition(name="batch")]
    if any(partition.default for partition in found):
        return list(found)
    return [found[0].model_copy(update={"default": True}), *found[1:]]


def partition_nodes(site: Site, partition: Partition) -> list[str]:
    """The workers of a partition, in the order of the site file."""
    return [
        node.name
        for node in site.with_role("worker")
        if not partition.groups or not set(partition.groups).isdisjoint(node.groups)
    ]


def gres_conf(site: Site, lock: Lock, profile: Distribution) -> str:
    """gres.conf: which device files are whose, and the cores next to them.

    With AutoDetect=nvml slurmd asks the driver for cores and links; the lines stay, so that a GPU that is missing is
    missed; MIG slices are left to NVML, which alone knows their files. Without it, links are left out: between GPUs
    that an NVSwitch connects all are the same.
    """
    nvml = gpu_detection(site, profile) == "nvml"
    lines = []
    for kind in kinds(site, lock):
        if kind.gpu and not kind.slices:
            shares = replace(kind, near=()).devices if nvml else kind.devices
            lines += [
                f"NodeName={kind.nodes} Name=gpu Type={kind.gpu} File={files}{f' Cores={near}' if near else ''}\n"
                for files, near in shares
            ]
    return f"AutoDetect={'nvml' if nvml else 'off'}\n" + "".join(lines)


def cgroup_conf(site: Site) -> str:
    """cgroup.conf: version 2, and GPUs always kept apart."""
    constrain = settings(site).constrain
    return (
        "CgroupPlugin=cgroup/v2\n"
        "ConstrainDevices=yes\n"
        f"ConstrainCores={'yes' if constrain.cores else 'no'}\n"
        f"ConstrainRAMSpace={'yes' if constrain.memory else 'no'}\n"
        f"ConstrainSwapSpace={'yes' if constrain.memory else 'no'}\n"
    )


def container_conf(site: Site) -> str | None:
    """job_container.conf, None where jobs share the node's /tmp. Nodes may keep it in different places."""
    places: dict[str, list[str]] = {}
    for node in site.with_role("worker"):
        base = storage.private_tmp(site, node)
        if base is not None:
            places.setdefault(base, []).append(node.name)
    if not places:
        return None
    lines = "".join(f"NodeName={slurm_fold(names)} BasePath={base}\n" for base, names in places.items())
    return f"AutoBasePath=true\nDirs=/tmp,/dev/shm\n{lines}"


def topology_conf(site: Site) -> str | None:
    """topology.conf, None where the site file describes no switches."""
    lines = []
    for switch in settings(site).topology:
        if switch.nodes is not None:
            lines.append(f"SwitchName={switch.name} Nodes={slurm_fold(expand(switch.nodes))}\n")
        else:
            lines.append(f"SwitchName={switch.name} Switches={slurm_fold(switch.switches)}\n")
    return "".join(lines) or None


def slurmdbd_conf(site: Site) -> str:
    """slurmdbd.conf. No password: MariaDB knows the user slurm by the socket it comes through."""
    return render("slurm", "slurmdbd.conf.j2", head=site.head, logs=LOGS, jwt=JWT_KEY)


def database_conf(site: Site, lock: Lock) -> str:
    """MariaDB's part for slurmdbd, which holds long transactions over large tables."""
    wanted = settings(site).database_memory
    if wanted is None:
        hardware = lock.hardware_of(site, site.head)
        wanted = max(128, min(4096, hardware.memory // 4)) if hardware else 1024
    return (
        "[mariadb]\n"
        f"innodb_buffer_pool_size={wanted}M\n"
        f"innodb_log_file_size={max(64, wanted // 4)}M\n"
        "innodb_lock_wait_timeout=900\n"
        "max_allowed_packet=16M\n"
    )


def slurmd_dropin(site: Site, node: Node, mounts: Sequence[str] = ()) -> str:
    """The systemd drop-in of slurmd: where its configuration comes from, and what it waits for (`mounts`: paths)."""
    return render(
        "slurm",
        "slurmd.conf.j2",
        server=conf_server(site),
        gpus=node.gpu.count if node.gpu else 0,
        script=DEVICES_SCRIPT,
        timeout=DEVICES_TIMEOUT,
        mounts=mounts,
    )


def sackd_dropin(site: Site) -> str:
    """The systemd drop-in of sackd, which fetches the configuration for a login node."""
    return (
        "[Unit]\n"
        "After=munge.service network-online.target\n"
        "Wants=munge.service network-online.target\n"
        "StartLimitIntervalSec=0\n\n"  # a login node that boots before its head tries again
        "[Service]\n"
        "Restart=on-failure\n"
        "RestartSec=5\n"
        "EnvironmentFile=\n"
        f'Environment="SACKD_OPTIONS=--conf-server {conf_server(site)}"\n'
    )


def pam_block(node: Node) -> str:
    """What sshd asks last: the account this tool comes in by may always, others need a job there."""
    return (
        f"{PAM_BEGIN}\n"
        f"account sufficient pam_succeed_if.so quiet user in root:{node.access.user}\n"
        "account required pam_slurm_adopt.so\n"
        f"{PAM_END}\n"
    )


def devices_script() -> str:
    """The program that waits for the device files of the GPUs before slurmd counts them."""
    return render("slurm", "gpu-devices.j2")


def rest_dropin(site: Site, binary: str) -> str:
    """The systemd drop-in of slurmrestd: a user of its own, tokens only."""
    rest = settings(site).rest
    assert rest is not None
    listen = f"{bracketed(site.head.address or '')}:{rest.port}"
    return render("slurm", "slurmrestd.conf.j2", binary=binary, listen=listen)


def rest_url(site: Site) -> str:
    """The base URL of slurmrestd as the head reaches it."""
    rest = settings(site).rest
    assert rest is not None
    return f"http://{bracketed(site.head.address or 'localhost')}:{rest.port}"


def distributed(site: Site, lock: Lock, profile: Distribution) -> dict[str, str]:
    """The files that nodes get from slurmctld, by their name in its folder."""
    files = {
        "slurm.conf": slurm_conf(site, lock, profile=profile),
        "cgroup.conf": cgroup_conf(site),
        "gres.conf": gres_conf(site, lock, profile),
    }
    for name, text in (("topology.conf", topology_conf(site)), ("job_container.conf", container_conf(site))):
        if text is not None:
            files[name] = text
    return files


# Accounting


def accounts(site: Site) -> list[Account]:
    """All accounts: the default one, then those of the site file."""
    section = settings(site)
    if any(account.name == section.default_account for account in section.accounts):
        return list(section.accounts)
    return [Account(name=section.default_account), *section.accounts]


def users(site: Site) -> list[str]:
    """Who may have jobs: the users of the site, and the admins whom nodes are reached as (root always may)."""
    admins = [node.access.user for node in site.nodes.values() if node.access.user != "root"]
    return list(dict.fromkeys([*(user.name for user in base.users(site)), *admins]))


def associations(site: Site) -> list[tuple[str, str]]:
    """(account, user) for everybody who may have jobs; the first of a user's accounts is its default."""
    section = settings(site)
    placed = [(account.name, user) for account in section.accounts for user in account.users]
    have = {user for _, user in placed}
    return placed + [(section.default_account, name) for name in users(site) if name not in have]


# Releases


def parse_version(text: str) -> tuple[int, int, int]:
    """(24, 11, 5) of "slurm-wlm 24.11.5" or "24.11.5-4+deb13u1". Raises ValueError."""
    found = re.search(r"(?:^|\s)(\d+)\.(\d+)\.(\d+)", text)
    if not found:
        raise ValueError(f"no version of Slurm in {text.strip()!r}")
    return int(found[1]), int(found[2]), int(found[3])


# Major releases in their order: Slurm counts compatibility in releases, not in months.
RELEASES = (
    (20, 11), (21, 8), (22, 5), (23, 2), (23, 11), (24, 5), (24, 11), (25, 5), (25, 11), (26, 5),
)  # fmt: skip


def skew(controller: tuple[int, int, int], node: tuple[int, int, int]) -> str | None:
    """Why a slurmd of version `node` cannot work with a slurmctld of version `controller`; None: it can.

    Never newer; up to two major releases older, three from 24.11 on.
    """
    ours_, theirs = controller[:2], node[:2]
    shown = ".".join(map(str, controller)), ".".join(map(str, node))
    if theirs > ours_:
        return (
            f"slurmd {shown[1]} is newer than slurmctld {shown[0]}: upgrade slurmdbd, slurmctld, then nodes"
        )
    if ours_ not in RELEASES or theirs not in RELEASES:
        return None if ours_ == theirs else f"slurmctld {shown[0]} with slurmd {shown[1]}: not a known pair"
    behind = RELEASES.index(ours_) - RELEASES.index(theirs)
    allowed = 3 if ours_ >= (24, 11) else 2
    if behind > allowed:
        return f"slurmd {shown[1]} is {behind} releases behind slurmctld {shown[0]}, {allowed} are allowed"
    return None


# Cross checks of the site file


def problems(site: Site) -> Iterator[Problem]:
    """What is wrong with Slurm's part of the site file beyond single values."""
    section = settings(site)
    key = ("scheduler", "slurm")
    for index, partition in enumerate(section.partitions):
        for at, group in enumerate(partition.groups):
            here = (*key, "partitions", index, "groups", at)
            if group not in site.file.groups:
                close = nearest(group, site.file.groups)
                yield Problem("unknown-group", here, group, "a group of `groups`", nearest=close)
            elif not any(group in node.groups for node in site.with_role("worker")):
                yield Problem(
                    "partition-without-workers", here, read=group, expected="a group with role worker"
                )
        qualities = ["normal", *(each.name for each in section.qos)]
        if partition.qos is not None and partition.qos.lower() not in map(str.lower, qualities):
            yield Problem(
                "unknown-qos",
                (*key, "partitions", index, "qos"),
                read=partition.qos,
                expected="a quality of service of `qos`",
                nearest=nearest(partition.qos, qualities),
                why="slurmctld does not start with a partition whose quality of service is not there",
            )
    yield from _duplicates(
        "partition-twice", (*key, "partitions"), [each.name for each in section.partitions]
    )
    yield from _duplicates("account-twice", (*key, "accounts"), [each.name for each in section.accounts])
    yield from _duplicates("qos-twice", (*key, "qos"), [each.name for each in section.qos])
    if sum(partition.default for partition in section.partitions) > 1:
        yield Problem(
            "two-default-partitions", (*key, "partitions"), expected="one partition with default: true"
        )
    if len(site.with_role("head")) > 1:
        yield Problem(
            "slurm-one-controller",
            ("groups", site.head.group, "hosts"),
            why=f"slurmctld runs on {site.head.name} alone",
            warning=True,
        )
    if section.gpu_detection == "files":
        for node in site.with_role("worker"):
            if any(slices(site, node)):
                yield Problem(
                    "mig-needs-nvml",
                    (*key, "gpu_detection"),
                    read="files",
                    expected="nvml",
                    why=f"only NVML knows the device files of the MIG slices of {node.name}",
                )
                break
    yield from _unknown_users(site, section)
    yield from _topology_problems(site, section)
    for node in site.nodes.values():
        if "slurm" in node.overrides:
            yield Problem(
                "slurm-differs",
                ("groups", node.group, "settings", "slurm"),
                why="one slurm.conf holds for all nodes",
                action="move it to scheduler.slurm",
            )
            break


def _duplicates(rule: str, key: tuple[str | int, ...], names: list[str]) -> Iterator[Problem]:
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(rule, key, read=name, expected="each name once")


def _unknown_users(site: Site, section: SlurmSettings) -> Iterator[Problem]:
    known = users(site)
    for index, account in enumerate(section.accounts):
        for at, user in enumerate(account.users):
            if user not in known:
                where = ("scheduler", "slurm", "accounts", index, "users", at)
                yield Problem(
                    "unknown-user", where, read=user, expected="a user of base.users, or access.user"
                )


def _topology_problems(site: Site, section: SlurmSettings) -> Iterator[Problem]:
    if not section.topology:
        return
    key = ("scheduler", "slurm", "topology")
    switches: dict[str, lint.Switch] = {}
    for index, switch in enumerate(section.topology):
        try:
            nodes = expand(switch.nodes) if switch.nodes is not None else []
        except HostlistError as error:
            yield Problem("host-list", (*key, index, "nodes"), read=switch.nodes, why=str(error))
            continue
        if switch.name in switches:
            yield Problem("switch-twice", (*key, index, "name"), read=switch.name)
        switches[switch.name] = lint.Switch(switch.name, tuple(nodes), tuple(switch.switches))
    workers = [node.name for node in site.with_role("worker")]
    for mistake in lint.topology_mistakes(switches, workers):
        yield Problem("topology", key, why=mistake)
