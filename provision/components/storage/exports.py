"""What storage is made of, from the site file alone: mounts, units, what is served, ports."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.components.base import exports as base
from provision.components.exported import Port
from provision.components.storage.settings import Scratch, StorageSettings
from provision.engine.deploy import render
from provision.engine.limits import limit
from provision.site.problem import Problem

if TYPE_CHECKING:
    from provision.site.models import Node, Site

_NFS_OPTIONS = "hard,vers=4.2,_netdev"
_OPTIONS = {
    "nfs": _NFS_OPTIONS,
    "nfs4": "hard,_netdev",
    "lustre": "flock,_netdev",
    "glusterfs": "_netdev",
}
_CLIENTS = {"nfs": "nfs-client", "nfs4": "nfs-client", "glusterfs": "glusterfs-client"}

# A root-only folder of the server's daemon would not do for the check that all nodes see one tree: root is
# squashed by NFS, so anybody may write here.
PROBE = ".provision"
ACCESS_KEYS = "/etc/ssh/access"
ACCESS_DROP_IN = "/etc/ssh/sshd_config.d/05-provision-access.conf"
MOUNT_AGAIN = "provision-mount-again@{}.service"
EXPORTS_FILE = "/etc/exports.d/provision.exports"

# NFS version 4 needs no more than one; GlusterFS' bricks listen on any of 49152 to 60999.
PORTS = (
    Port(2049, "head", "NFS"),
    Port(2049, "storage", "NFS"),
    Port(24007, "head", "GlusterFS"),
    Port(24007, "storage", "GlusterFS"),
)


@dataclass(frozen=True)
class Mounted:
    """A file system as it is mounted on a node."""

    path: str
    source: str
    type: str
    options: str
    served: bool = False  # by a node of this cluster

    @property
    def unit(self) -> str:
        return f"{escape_path(self.path)}.mount"


def settings(site: Site, node: Node) -> StorageSettings:
    """What storage's part of the site file says for `node`."""
    return site.settings("storage", node, StorageSettings)


def server(site: Site) -> Node | None:
    """The node that serves what no mount covers; None where mounts cover everything."""
    candidates = site.with_role("storage") or site.with_role("head")
    return candidates[0] if candidates and served_paths(site) else None


def serving_unit(site: Site, node: Node) -> str | None:
    """The purpose of the unit by which `node` serves the cluster's file systems; None where it serves none."""
    serving = server(site)
    if serving is None or serving.name != node.name:
        return None
    return "nfs-server" if settings(site, node).provider == "nfs" else "glusterd"


def served_paths(site: Site) -> list[str]:
    """The shared paths that a node of this cluster serves."""
    section = _site_wide(site)
    elsewhere = {mount.path for mount in section.mounts}
    return [path for path in section.shared if path not in elsewhere]


def mounts(site: Site, node: Node) -> list[Mounted]:
    """What is mounted on `node`, parents before what lies below them."""
    section = settings(site, node)
    found = [
        Mounted(mount.path, mount.source, mount.type, mount.options or _OPTIONS.get(mount.type, "_netdev"))
        for mount in section.mounts
        if not mount.roles or any(node.has(role) for role in mount.roles)
    ]
    serving = server(site)
    if serving is not None:
        for path in served_paths(site):
            source, kind = served_source(site, serving, path), section.provider
            if node.name == serving.name and kind == "nfs":
                found.append(Mounted(path, data_path(site, path), "none", "bind", served=True))
            else:
                options = section.options or _OPTIONS[kind]
                found.append(Mounted(path, source, kind, options, served=True))
    return sorted(found, key=lambda mounted: mounted.path)


def mounted(site: Site, node: Node, limits: Mapping[str, str]) -> list[str]:
    """Every path that has to be mounted on `node` before a job runs there."""
    if not site.enabled("storage"):
        return []
    found = [each.path for each in mounts(site, node) if not limit(limits, f"mount:{each.type}")]
    local = scratch(site, node)
    return [*found, local.path] if local is not None and local.device is not None else found


def served_source(site: Site, serving: Node, path: str) -> str:
    """The `What=` of a client's mount of `path`."""
    section = _site_wide(site)
    if section.provider == "nfs":
        return f"{serving.name}:{data_path(site, path)}"
    return f"{serving.name}:/{volume(path)}"


def data_path(site: Site, path: str) -> str:
    """Where the server keeps what is seen as `path`."""
    return f"{_site_wide(site).data}/{volume(path)}"


def volume(path: str) -> str:
    """A name for `path`: "/shared/data" -> "shared-data"."""
    return path.strip("/").replace("/", "-")


def mount_unit(mounted: Mounted) -> str:
    """The text of the systemd unit that mounts it."""
    local = mounted.type == "none"
    return render("storage", "mount.j2", mounted=mounted, local=local, again=MOUNT_AGAIN.format("%p"))


def mount_again() -> str:
    """The text of the unit that tries a mount again: systemd gives up on one whose server boots later than its node."""
    return render("storage", "mount-again.j2")


def access_dropin(user: str) -> str:
    """sshd looks for the keys of `user` on the node first, and in a home that may hang or be gone only then."""
    return f"Match User {user}\n    AuthorizedKeysFile {ACCESS_KEYS}/%u .ssh/authorized_keys\n"


def client_packages(found: list[Mounted]) -> list[str]:
    """Purposes of the packages that mounting needs; a type that is not here (Lustre) is the site's to install."""
    return sorted({_CLIENTS[mounted.type] for mounted in found if mounted.type in _CLIENTS})


def nfs_exports(site: Site) -> str:
    """The kernel server's list: each served tree for each node by address or name, root squashed."""
    clients = sorted({node.address or node.name for node in site.nodes.values()})
    section = _site_wide(site)
    lines = []
    for path in served_paths(site):
        # of the path alone: what clients hold stays theirs when another path comes or goes
        identity = uuid.uuid5(uuid.NAMESPACE_URL, f"nfs://{site.cluster}{path}")
        options = f"rw,sync,no_subtree_check,fsid={identity}"
        hosts = " ".join(f"{client}({options})" for client in clients)
        lines.append(f"{section.data}/{volume(path)} {hosts}\n")
    return "".join(lines)


def gluster_clients(site: Site) -> str:
    """The value of auth.allow: every node by address, or by name where the site file leaves the address to DNS."""
    return ",".join(sorted(node.address or node.name for node in site.nodes.values()))


def homes(site: Site) -> list[tuple[str, str, str]]:
    """(user, group, home) of the site's users whose home lies on what a node of this cluster serves."""
    return [
        (user.name, user.group or user.name, user.home or f"/home/{user.name}")
        for user in base.users(site)
        if any((user.home or f"/home/{user.name}").startswith(f"{path}/") for path in served_paths(site))
    ]


def scratch(site: Site, node: Node) -> Scratch | None:
    """The local space of `node`, None where it has none."""
    found = settings(site, node).scratch
    return found if found is not None and any(node.has(role) for role in found.roles) else None


def private_tmp(site: Site, node: Node) -> str | None:
    """Where jobs' own /tmp are kept on `node`; None: jobs share the node's /tmp."""
    if not site.enabled("storage"):
        return None
    section = settings(site, node)
    if not section.private_tmp:
        return None
    if section.private_tmp_path is not None:
        return section.private_tmp_path
    local = scratch(site, node)
    return f"{local.path}/tmp" if local else "/var/tmp/slurm"


def escape_path(path: str) -> str:
    """The name of a unit for `path`, as systemd-escape --path makes it."""
    inner = path.strip("/")
    if not inner:
        return "-"
    return "".join(
        "-" if character == "/" else character if re.match(r"[A-Za-z0-9:_.]", character) and (at or character != ".")
        else "".join(f"\\x{byte:02x}" for byte in character.encode())
        for at, character in enumerate(inner)
    )  # fmt: skip


def problems(site: Site) -> Iterator[Problem]:
    """What is wrong with storage's part of the site file beyond single values."""
    section = _site_wide(site)
    for node in site.nodes.values():
        for key in ("shared", "provider", "data"):
            if key in node.overrides.get("storage", {}):
                yield Problem(
                    "storage-differs",
                    ("groups", node.group, "settings", "storage", key),
                    why="all nodes see one tree",
                    action=f"move it to storage.{key}",
                )
    for path in section.shared:
        if section.data == path or section.data.startswith(f"{path}/"):
            yield Problem(
                "storage-data-below-share",
                ("storage", "data"),
                read=section.data,
                why=f"{path} is mounted over it",
                action="keep the data outside of what is shared",
            )
    serving = server(site)
    if len(site.with_role("storage")) > 1 and serving is not None:
        yield Problem(
            "storage-one-server",
            ("storage", "shared"),
            read=", ".join(node.name for node in site.with_role("storage")),
            why=f"only {serving.name} will serve {', '.join(served_paths(site))}",
            warning=True,
        )


def _site_wide(site: Site) -> StorageSettings:
    section = site.section("storage")
    assert isinstance(section, StorageSettings)
    return section
