"""The files that the lab puts on its nodes: one layer that all share, and what is each node's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from provision.lab import gpus, host
from provision.lab.command import execute
from provision.lab.host import Mirror
from provision.lab.state import NETWORK, PROXY_PORT, Node, write_file

KERNEL_MESSAGES = "/var/log/kmsg"
_CAPABILITIES = {"CAP_SYS_RESOURCE": 24}  # bits as in linux/capability.h
SHIM = "/usr/local/lib/lab/cgshim.so"
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class File:
    """A file to write; `owner` is (uid, gid), None takes the owner of the folder that it is in."""

    content: str | bytes
    mode: int = 0o644
    owner: tuple[int, int] | None = (0, 0)


_DEVICES_UNIT = f"""[Unit]
Description=What the driver of the simulated GPUs would make
Before=slurmd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={gpus.DEVICES} boot
# the simulated library comes before the real one that a package may bring
ExecStart=/sbin/ldconfig

[Install]
WantedBy=multi-user.target
"""

# A node sees the machine's boot time: with -b slurmd reports its own start instead, which a reboot changes. Only its
# first start of a boot does so, or every restart of slurmd would look like a reboot that nobody asked for.
_SLURMD = """[Service]
ExecStart=
ExecStart=/bin/sh -c 'b=-b; [ ! -e /run/lab-slurmd ] || b=; : >/run/lab-slurmd; \\
    exec /usr/sbin/slurmd --systemd $$b $$SLURMD_OPTIONS'
"""

_CHRONY = """[Unit]
ConditionCapability=

[Service]
ExecStart=
ExecStart=!/usr/sbin/chronyd -x $DAEMON_OPTS
"""


@dataclass(frozen=True)
class Limit:
    """One thing that a node cannot do; with `without`, only where the machine's root lacks that capability."""

    id: str
    what: str
    reason: str
    without: str | None = None


def load_limits(capabilities: int, path: Path = _HERE / "limits.yml") -> tuple[Limit, ...]:
    """What limits.yml says of nodes on a machine whose root has `capabilities` (a bit mask)."""
    limits = (Limit(**entry) for entry in yaml.safe_load(path.read_text())["limits"])
    return tuple(x for x in limits if x.without is None or not capabilities >> _CAPABILITIES[x.without] & 1)


def limits_json(limits: Sequence[Limit]) -> str:
    """The content of /etc/provision/limits.json."""
    listed = [{"what": limit.what, "reason": limit.reason} for limit in limits]
    return json.dumps({"limits": listed, "kernel_messages": KERNEL_MESSAGES}, indent=2) + "\n"


def masked_units(limits: Sequence[Limit]) -> list[str]:
    """The units that the limits name."""
    return [limit.what.removeprefix("unit:") for limit in limits if limit.what.startswith("unit:")]


def shared_files(limits: Sequence[Limit], hybrid: bool) -> dict[str, File]:
    """What every node has from the lab; the preload only where the machine's cgroups are hybrid."""
    preload = f"Environment=LD_PRELOAD={SHIM}\n" if hybrid else ""
    return {
        "etc/dpkg/dpkg.cfg.d/lab": File("force-unsafe-io\n"),
        "etc/ld.so.conf.d/00-lab.conf": File(f"{Path(gpus.LIBRARY).parent}\n"),
        "etc/provision/limits.json": File(limits_json(limits)),
        "etc/sudoers.d/ops": File("ops ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440),
        "etc/systemd/system/chrony.service.d/zz-lab.conf": File(_CHRONY),
        "etc/systemd/system/lab-devices.service": File(_DEVICES_UNIT),
        "etc/systemd/system/slurmd.service.d/zz-lab.conf": File(_SLURMD + preload),
        gpus.DEVICES.lstrip("/"): File(gpus.program("devices"), 0o755),
        **{path.lstrip("/"): File(text) for path, text in gpus.programs().items()},
        KERNEL_MESSAGES.lstrip("/"): File(""),
    }


def shared_links(limits: Sequence[Limit]) -> dict[str, str]:
    """Symbolic links of the shared layer: the lab's own unit, enabled, what programs load, and the masks."""
    masks = {f"etc/systemd/system/{unit}": "/dev/null" for unit in masked_units(limits)}
    library = Path(gpus.LIBRARY)
    return {
        str(library.with_name(_soname(library.name))).lstrip("/"): library.name,
        "etc/systemd/system/multi-user.target.wants/lab-devices.service": "../lab-devices.service",
        **masks,
    }


def shared_sources(hybrid: bool) -> dict[str, str]:
    """The libraries of the shared layer: path on the node -> source beside this file."""
    return {gpus.LIBRARY: "nvml/nvml.c", **({SHIM: "cgshim.c"} if hybrid else {})}


def _soname(name: str) -> str:
    """What programs load a library by: "libx.so.550.163.01" by "libx.so.1"."""
    return re.sub(r"\.so\.[0-9.]+$", ".so.1", name)


def compile_library(source: Path, target: Path) -> None:
    """Build a shared library with the machine's compiler. Raises LabError with what it said."""
    target.parent.mkdir(parents=True, exist_ok=True)
    options = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", f"-Wl,-soname,{_soname(target.name)}")
    execute(["gcc", *options, "-o", target, source, "-ldl"])


def shared_layer(cache: Path, hybrid: bool) -> str:
    """Make the layer of shared files in the cache where it is missing: the name of its folder."""
    limits = load_limits(host.capabilities())
    files, links = shared_files(limits, hybrid), shared_links(limits)
    sources = shared_sources(hybrid)
    built = [(path, (_HERE / source).read_text()) for path, source in sources.items()]
    decides = [sorted((path, repr(file)) for path, file in files.items()), sorted(links.items()), built]
    name = f"lab-{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]}"
    target = cache / "layers" / name
    if target.is_dir():
        return name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.") as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        place(root, [], files)
        for path, link in links.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(link)
        for path, source in sources.items():
            compile_library(_HERE / source, root / path.lstrip("/"))
        try:
            root.rename(target)
        except OSError:  # made by another lab meanwhile
            if not target.is_dir():
                raise
    return name


def apt_sources(mirror: Mirror, suite: str, components: Sequence[str]) -> str:
    """The node's own debian.sources."""
    stanzas = [(mirror.url, f"{suite} {suite}-updates")]
    if mirror.security:
        stanzas.append((mirror.security, f"{suite}-security"))
    return "\n".join(
        f"Types: deb\nURIs: {url}\nSuites: {suites}\nComponents: {' '.join(components)}\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        for url, suites in stanzas
    )


def gpu_files(node: Node) -> dict[str, File]:
    """What the node's simulated GPUs answer; a node without any has no driver either."""
    if not node.gpus:
        return {}
    state = gpus.state(node.name, node.model, node.gpus, os.cpu_count() or 1)
    return {gpus.STATE.lstrip("/"): File(state), gpus.SMI.lstrip("/"): File(gpus.program("smi"), 0o755)}


def node_files(
    node: Node, machine_id: str, host_key: str, authorized_key: str, sources: str, unique: Mapping[str, int]
) -> dict[str, File]:
    """What one node has of its own. `unique` gives path and size of files with random content."""
    return {
        "etc/.updated": File(""),  # the layers are up to date: no first-boot rebuild of caches
        "var/.updated": File(""),
        "etc/apt/apt.conf.d/00lab": File(f'Acquire::http::Proxy "http://{NETWORK}.1:{PROXY_PORT}/";\n'),
        "etc/apt/sources.list.d/debian.sources": File(sources),
        **gpu_files(node),
        "etc/hostname": File(f"{node.name}\n"),
        "etc/hosts": File(
            f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n::1 localhost ip6-localhost ip6-loopback\n"
        ),
        "etc/machine-id": File(f"{machine_id}\n", 0o444),
        "etc/ssh/ssh_host_ed25519_key": File(host_key, 0o600),
        "home/ops/.ssh/authorized_keys": File(authorized_key, 0o600, None),
        "root/.ssh/authorized_keys": File(authorized_key, 0o600, None),
        **{path.lstrip("/"): File(os.urandom(size), 0o600, None) for path, size in unique.items()},
    }


def place(upper: Path, lowers: Sequence[Path], files: Mapping[str, File]) -> None:
    """Write `files` below `upper`, the top of a stack of layers (highest first) that nothing has mounted.

    Folders that are missing in `upper` get mode and owner from the layer below that has them.
    """
    for path, file in files.items():
        target = upper / path
        for folder in reversed([f for f in target.parents if f != upper and f.is_relative_to(upper)]):
            if folder.is_dir():
                continue
            folder.mkdir(mode=0o755)
            below = next((b for lower in lowers if (b := lower / folder.relative_to(upper)).is_dir()), None)
            if below is not None:
                shutil.copystat(below, folder)
                status = below.stat()
                os.chown(folder, status.st_uid, status.st_gid)
        parent = target.parent.stat()
        write_file(target, file.content, file.mode, file.owner or (parent.st_uid, parent.st_gid))


def known_hosts(keys: Mapping[str, tuple[Node, str]]) -> str:
    """known_hosts of the lab: `keys` gives node and public key by name."""
    return "".join(
        f"{node.name},{node.address},{node.address6} {' '.join(public.split()[:2])}\n"
        for node, public in keys.values()
    )


def ssh_config(hub: str, key: Path, known: Path, nodes: Sequence[Node]) -> str:
    """An OpenSSH configuration that reaches the nodes from this machine, by name or address."""
    common = [
        "# Written by `provision lab up`: ssh -F THIS_FILE NODE",
        "Host *",
        "    User ops",
        f"    IdentityFile {key}",
        "    IdentitiesOnly yes",
        f"    UserKnownHostsFile {known}",
        "    GlobalKnownHostsFile /dev/null",
        "    StrictHostKeyChecking yes",
        "    UpdateHostKeys no",
        f"    ProxyCommand nsenter --net=/run/netns/{hub} nc -F %h %p",
        "    ProxyUseFdpass yes",
    ]
    hosts = [f"Host {node.name}\n    HostName {node.address}" for node in nodes]
    return "\n".join([*hosts, *common]) + "\n"
