"""What others may know of base: accounts, rendered files, identities. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zoneinfo import available_timezones

from provision.components.base.settings import BaseSettings
from provision.engine import accounts
from provision.engine.deploy import render
from provision.report.model import Finding, Verdict
from provision.site.problem import Problem, nearest, shown

if TYPE_CHECKING:
    from provision.profiles import Distribution
    from provision.site.models import Node, Site

HOSTS = "/etc/hosts"
CLOUD = "/etc/cloud/cloud.cfg.d/99-provision.cfg"
SUDOERS = "/etc/sudoers.d/provision"
KEYS = "/etc/ssh/authorized_keys.d"  # a file a user, root's: works while no home is mounted
KEYS_FILES = f".ssh/authorized_keys .ssh/authorized_keys2 {KEYS}/%u"
KEYS_DROP_IN = "/etc/ssh/sshd_config.d/00-provision-keys.conf"
LIMITS = "/etc/security/limits.d/90-provision.conf"
MANAGER = "/etc/systemd/system.conf.d/90-provision.conf"
JOURNAL = "/etc/systemd/journald.conf.d/90-provision.conf"
GOVERNOR = "/etc/tmpfiles.d/90-provision-governor.conf"

# One of a set that moves alone breaks the rest: the whole set, by pattern, of driver, CUDA, DOCA and scheduler. Few
# patterns, because apt tries each on every package it knows, each time it runs.
HELD = (
    "*nvidia*",
    "cuda*",
    "libcuda*",
    "libcudnn*",
    "libnccl*",
    "datacenter-gpu-manager*",
    "doca*",
    "mlnx*",
    "*slurm*",
    "*munge*",
)
HELD_KERNEL = ("linux-image*", "linux-headers*", "linux-modules*", "linux-generic*")

SYSCTL: dict[str, int | str] = {
    # long fat networks between nodes, storage and the outside
    "net.core.rmem_max": 134217728,
    "net.core.wmem_max": 134217728,
    "net.ipv4.tcp_rmem": "4096 131072 134217728",
    "net.ipv4.tcp_wmem": "4096 65536 134217728",
    # hundreds of ranks connect at the same moment
    "net.core.somaxconn": 4096,
    "net.ipv4.tcp_max_syn_backlog": 8192,
    # every node talks to every other: the neighbour tables of a few hundred nodes overflow with the defaults
    "net.ipv4.neigh.default.gc_thresh1": 4096,
    "net.ipv4.neigh.default.gc_thresh2": 8192,
    "net.ipv4.neigh.default.gc_thresh3": 16384,
    "net.ipv6.neigh.default.gc_thresh1": 4096,
    "net.ipv6.neigh.default.gc_thresh2": 8192,
    "net.ipv6.neigh.default.gc_thresh3": 16384,
    # jobs pin memory and map many files; reclaiming remote memory first costs more than it saves
    "vm.max_map_count": 1048576,
    "vm.swappiness": 10,
    "vm.zone_reclaim_mode": 0,
    # ranks are bound to their NUMA node; moving their pages stalls them
    "kernel.numa_balancing": 0,
    "fs.inotify.max_user_instances": 8192,
    "fs.inotify.max_user_watches": 1048576,
}


def settings(site: Site, node: Node) -> BaseSettings:
    """What base's part of the site file says for `node`."""
    return site.settings("base", node, BaseSettings)


# Accounts


def groups(site: Site) -> list[accounts.Group]:
    """The groups of the site, equal on all nodes: `base.groups`, then one for each user without another."""
    base = site_wide(site)
    own = {name: user.uid for name, user in base.users.items() if user.group is None}
    return [accounts.Group(name, gid) for name, gid in {**base.groups, **own}.items()]


def users(site: Site) -> list[accounts.User]:
    """The users of the site, equal on all nodes; `group` and `home` are always given."""
    return [
        accounts.User(
            name=name,
            uid=user.uid,
            group=user.group or name,
            groups=tuple(user.groups),
            home=user.home or f"/home/{name}",
            shell=user.shell,
            comment=user.comment,
        )
        for name, user in site_wide(site).users.items()
    ]


def keys(site: Site) -> dict[str, str]:
    """User -> content of the file of public keys that may log in as that user."""
    return {
        name: "".join(f"{key}\n" for key in user.keys)
        for name, user in site_wide(site).users.items()
        if user.keys
    }


def sudoers(base: BaseSettings) -> str | None:
    """The sudoers drop-in, None where nobody gets rights by it."""
    lines = [
        f"{name} ALL=(ALL:ALL) {'NOPASSWD: ' if user.sudo == 'nopasswd' else ''}ALL\n"
        for name, user in base.users.items()
        if user.sudo
    ]
    return "".join(lines) or None


# Files


def hosts(site: Site, node: Node) -> str:
    """The whole of /etc/hosts, the same on all nodes: every node of the site by each of its addresses.

    Nodes without an address in the site file are left to DNS. `gpu-1` with `addresses: {fabric: ...}` is also
    known as `gpu-1-fabric`.
    """
    lines = []
    for each in site.nodes.values():
        short = each.name.partition(".")[0]
        names = [each.name] + ([short] if short != each.name else [])
        if each.address is not None and (address := ip(each.address)):
            lines.append((address, names))
        lines += [
            (address, [f"{short}-{network}"])
            for network, text in each.addresses.items()
            if (address := ip(text))
        ]
    lines += [(address, [name]) for name, address in settings(site, node).hosts.items()]
    return render("base", "hosts.j2", lines=lines)


def limits(base: BaseSettings) -> str:
    """The drop-in of pam_limits; root is named on its own, `*` does not stand for it."""
    return "".join(
        f"{who} - {what} {value}\n"
        for who in ("*", "root")
        for what, value in (("memlock", base.limits.memlock), ("nofile", base.limits.nofile))
    )


def manager_limits(base: BaseSettings) -> dict[str, str]:
    """Properties of systemd's manager: the limits that services get."""
    memlock = base.limits.memlock
    return {
        "DefaultLimitMEMLOCK": "infinity" if memlock == "unlimited" else str(memlock * 1024),
        "DefaultLimitNOFILE": str(base.limits.nofile),
    }


def journal(base: BaseSettings) -> str:
    """The drop-in of journald."""
    return (
        "[Journal]\nStorage=persistent\n"
        f"SystemMaxUse={base.journal.size}\n"
        f"SystemKeepFree={base.journal.keep_free}\n"
        f"MaxRetentionSec={base.journal.retention}\n"
    )


def sysctl(base: BaseSettings) -> dict[str, int | str]:
    """Kernel parameters: those that suit a cluster, and over them those of the site file."""
    own = {key.replace("/", "."): value for key, value in base.sysctl.items()}
    return {**SYSCTL, **own}


def unasked(base: BaseSettings) -> list[str]:
    """The kernel parameters that the site file does not name: a kernel without IPv6 or NUMA has not all of them."""
    return [key for key in SYSCTL if key not in {own.replace("/", ".") for own in base.sysctl}]


def held(base: BaseSettings) -> tuple[str, ...]:
    """Patterns of the packages that do not move by themselves."""
    return (*HELD, *(HELD_KERNEL if base.hold.kernel else ()), *base.hold.also)


def apt_preferences(base: BaseSettings) -> str:
    """A pin: what is installed of the held packages stays, what is not yet installed can be, also in this run.

    A version that is asked for (`apt-get install slurmd=24.11.5-4`) is above every pin.
    """
    return render("base", "preferences.j2", patterns=" ".join(held(base)))


def unattended_upgrades(base: BaseSettings) -> str:
    """The list of packages that unattended-upgrades leaves alone, as its regular expressions."""
    return render("base", "unattended-upgrades.j2", expressions=[expression(glob) for glob in held(base)])


def expression(glob: str) -> str:
    """The regular expression, matched from a name's beginning, that says the same as `glob`."""
    escaped = re.sub(r"[.+]", r"\\\g<0>", glob).replace("*", ".*")
    return f"^{escaped[:-2]}" if glob.endswith("*") else f"^{escaped}$"


# Identity of nodes


@dataclass(frozen=True)
class Identity:
    """What a machine says of itself."""

    hostname: str
    machine_id: str | None  # None where it has none
    product_uuid: str | None = None


IDENTITY_QUERY = (
    'hostname && { id=$(cat /etc/machine-id) || [ ! -e /etc/machine-id ]; } && echo "$id" && '
    "if [ -r /sys/class/dmi/id/product_uuid ]; then "
    "cat /sys/class/dmi/id/product_uuid; fi"
)


def parse_identity(output: str) -> Identity:
    """What IDENTITY_QUERY printed; the machine-id is empty where there is none. Raises ValueError for anything else."""
    lines = output.split("\n")
    if len(lines) < 3 or not lines[0]:
        raise ValueError(f"expected host name and machine-id, read {output!r}")
    return Identity(lines[0], lines[1] or None, lines[2] or None)


def identity_findings(identities: Mapping[str, Identity]) -> list[Finding]:
    """Machines taken for one another: nodes with equal host names, machine-ids or product UUIDs."""
    advice = {
        "hostname": "`provision apply` gives each its own, once the addresses in the site file are right",
        "machine_id": "on all but one: rm /etc/machine-id; systemd-machine-id-setup; reboot",
        "product_uuid": "virtual machines cloned with their UUID: give each its own in the hypervisor",
    }
    findings = []
    for what, action in advice.items():
        having: dict[str, list[str]] = defaultdict(list)
        for node, identity in identities.items():
            value = getattr(identity, what)
            if value is not None:
                having[value.lower()].append(node)
        findings += [
            Finding(
                verdict=Verdict.FAIL,
                check=f"equal-{what.replace('_', '-')}",
                subject=", ".join(nodes),
                read=value,
                expected="different ones",
                action=action,
                why="cloned from one image?",
            )
            for value, nodes in having.items()
            if len(nodes) > 1
        ]
    return findings


def same_host(read: str, name: str) -> bool:
    """Whether a machine that calls itself `read` is the node `name`: domains count where both give one."""
    if "." in read and "." in name:
        return read.lower() == name.lower()
    return read.partition(".")[0].lower() == name.partition(".")[0].lower()


# Cross checks of the site file


def problems(site: Site) -> Iterator[Problem]:
    """What is wrong with base's part of the site file beyond single values."""
    base = site_wide(site)
    yield from _unknown_zone(base)
    yield from _equal_ids(base)
    yield from _missing_groups(base)
    yield from _overridden_accounts(site)
    for name in base.absent_users:
        key = ("base", "absent_users", base.absent_users.index(name))
        if name in base.users:
            yield Problem("user-absent-and-present", key, read=name, expected="a user not in base.users")
        if any(node.access.user == name for node in site.nodes.values()):
            yield Problem(
                "access-user-absent",
                key,
                read=name,
                why="nodes are reached as this user: it would lock you out",
            )
    for name, user in base.users.items():
        reached = [node for node in site.nodes.values() if node.access.user == name]
        if user.sudo == "password" and any(not node.access.sudo_password for node in reached):
            yield Problem(
                "access-user-sudo",
                ("base", "users", name, "sudo"),
                read="password",
                expected="nopasswd, or access.sudo_password: true",
                why="nodes are reached as this user, and no password would be given",
            )
    for name in base.hosts:
        if name in site.nodes:
            yield Problem(
                "host-twice", ("base", "hosts", name), read=name, why="is a node of the site already"
            )


def _unknown_zone(base: BaseSettings) -> Iterator[Problem]:
    """A time zone that this machine's list does not have; nothing where it has no list."""
    zones = available_timezones()
    if zones and base.timezone not in zones:
        yield Problem(
            "time-zone",
            ("base", "timezone"),
            read=shown(base.timezone),
            expected="a time zone like Europe/Zurich",
            nearest=nearest(base.timezone, zones),
        )


def _equal_ids(base: BaseSettings) -> Iterator[Problem]:
    seen: dict[int, str] = {}
    for name, user in base.users.items():
        if user.uid in seen:
            yield Problem(
                "equal-uid",
                ("base", "users", name, "uid"),
                read=str(user.uid),
                why=f"is that of {seen[user.uid]}",
            )
        seen.setdefault(user.uid, name)
    gids: dict[int, str] = {}
    for name, gid in base.groups.items():
        if gid in gids:
            yield Problem("equal-gid", ("base", "groups", name), read=str(gid), why=f"is that of {gids[gid]}")
        gids.setdefault(gid, name)
    for name, user in base.users.items():
        if user.group is not None:
            continue
        if name in base.groups and base.groups[name] != user.uid:
            yield Problem(
                "equal-gid",
                ("base", "users", name),
                read=str(base.groups[name]),
                expected=str(user.uid),
                why=f"the user's own group {name} stands in base.groups with another gid",
                action=f"name the group: {{uid: {user.uid}, group: {name}}}",
            )
        elif gids.get(user.uid, name) != name:
            yield Problem(
                "equal-gid",
                ("base", "users", name, "uid"),
                read=str(user.uid),
                why=f"the user's own group would have the gid of {gids[user.uid]}",
                action="give the user a `group`, or another uid",
            )


def _missing_groups(base: BaseSettings) -> Iterator[Problem]:
    for name, user in base.users.items():
        if user.group is not None and user.group not in base.groups:
            yield Problem(
                "unknown-group",
                ("base", "users", name, "group"),
                read=user.group,
                expected="a group of base.groups" + (f": {', '.join(base.groups)}" if base.groups else ""),
            )


def _overridden_accounts(site: Site) -> Iterator[Problem]:
    """Accounts are the same on all nodes: files are shared by number."""
    reported: set[tuple[str, str]] = set()
    for node in site.nodes.values():
        for what in ("users", "groups", "absent_users"):
            if what in node.overrides.get("base", {}) and (node.group, what) not in reported:
                reported.add((node.group, what))
                yield Problem(
                    "accounts-differ",
                    ("groups", node.group, "settings", "base", what),
                    why="accounts are equal on all nodes",
                    action=f"move it to base.{what}",
                )


def site_wide(site: Site) -> BaseSettings:
    """What base's part of the site file says for the whole cluster."""
    section = site.section("base")
    assert isinstance(section, BaseSettings)
    return section


def ip(text: str) -> str | None:
    """`text` as an IP address in its usual form, None where it is a name."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def node_addresses(nodes: Iterable[Node]) -> list[str]:
    """All IP addresses that the site file gives for `nodes`, each once."""
    found = (ip(text) for node in nodes for text in (node.address or "", *node.addresses.values()))
    return list(dict.fromkeys(address for address in found if address))


def cluster_networks(site: Site) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Where nodes are: `networks.management`, and the address of each node that lies outside of them."""
    networks = [ipaddress.ip_network(text, strict=False) for text in site.file.networks.of_nodes]
    addresses = map(ipaddress.ip_address, node_addresses(site.nodes.values()))
    outside = [a for a in addresses if not any(a in network for network in networks)]
    return [*networks, *map(ipaddress.ip_network, outside)]


def hold_paths(profile: Distribution) -> tuple[str, str] | None:
    """Where pins and the list of unattended-upgrades go; None where there are no such folders."""
    paths = profile.paths
    return (paths["hold"], paths["unattended"]) if "hold" in paths else None
