"""One node on disk and in boot: its own folder, and what its supervisor is told."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from provision.lab import files, gpus, network
from provision.lab.command import execute
from provision.lab.state import Node, Paths

# `bpf` lets Slurm filter devices, `open_by_handle_at` a user-space NFS server find files
_NSPAWN = (
    "systemd-nspawn",
    "--quiet",
    "--boot",
    "--register=no",
    "--keep-unit",
    "--resolv-conf=off",
    "--timezone=off",
    "--link-journal=no",
    "--console=pipe",
    "--bind=/dev/fuse",
    "--capability=CAP_BPF,CAP_NET_ADMIN,CAP_PERFMON",
    "--system-call-filter=bpf open_by_handle_at",
)
_ENVIRONMENT = {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}


def make_key(path: Path, comment: str) -> None:
    """Make an ed25519 key pair for OpenSSH."""
    execute(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])


def make(paths: Paths, node: Node, lowers: Sequence[Path], sources: str, unique: Mapping[str, int]) -> None:
    """Make the node's folder: whole under another name first, so that no half-made one is ever used.

    `lowers` are its layers, highest first; `sources` and `unique` as files.node_files takes them.
    """
    folder = paths.node(node.name)
    scratch = folder.with_name(f".{node.name}")
    if scratch.exists():
        shutil.rmtree(scratch)
    for part in ("upper", "work", "root", "disk", "keys"):
        (scratch / part).mkdir(parents=True)
    (scratch / "upper").chmod(0o755)
    (scratch / "kmsg").touch()
    host_key = scratch / "keys/ssh_host_ed25519_key"
    make_key(host_key, node.name)
    authorized = paths.key.with_suffix(".pub").read_text()
    own = files.node_files(node, uuid.uuid4().hex, host_key.read_text(), authorized, sources, unique)
    files.place(scratch / "upper", lowers, own)
    scratch.rename(folder)


def set_gpus(paths: Paths, node: Node, lowers: Sequence[Path]) -> None:
    """Give a node that is off its GPUs, whole ones."""
    upper = paths.node(node.name) / "upper"
    for path in (gpus.STATE, gpus.SMI):
        (upper / path.lstrip("/")).unlink(missing_ok=True)
    files.place(upper, lowers, files.gpu_files(node))


def boot_record(paths: Paths, node: Node, lowers: Sequence[Path]) -> dict[str, Any]:
    """What the supervisor needs to mount and start the node."""
    folder, machine = paths.node(node.name), paths.namespace(node.name)
    namespace = str(network.RUN / machine)
    command = [
        *_NSPAWN,
        f"--directory={folder / 'root'}",
        f"--machine={machine}",
        f"--hostname={node.name}",
        f"--network-namespace-path={namespace}",
        f"--bind={folder / 'disk'}:/data",
        f"--bind={folder / 'kmsg'}:{files.KERNEL_MESSAGES}",
    ]
    return {
        "name": node.name,
        "lowers": [str(lower) for lower in lowers],
        **{part: str(folder / part) for part in ("upper", "work", "root", "kmsg")},
        "cgroup": str(paths.machine_cgroup(node.name)),
        "netns": namespace,
        "environment": _ENVIRONMENT,
        "command": command,
    }
