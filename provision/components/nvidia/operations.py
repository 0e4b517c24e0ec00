"""What is done on a GPU node, in order, from its lock, its settings and what it says of itself. Pure.

Each phase gives a list of operations; deploy.py performs them and reads the node anew before the next phase. What
differs between distributions is data in profiles/nvidia_packages.yml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import TYPE_CHECKING

from provision.components.nvidia import exports, locking
from provision.components.nvidia.exports import Chosen
from provision.components.nvidia.machine import REBOOT, Machine
from provision.profiles.packaging import ExactSet, PackageManager

if TYPE_CHECKING:
    from provision.components.nvidia.settings import NvidiaSettings
    from provision.site.models import Node


@dataclass(frozen=True)
class Install:
    """Packages of the distribution's choice of version."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Exact:
    """Packages in exactly the locked version, and none of another."""

    title: str
    wanted: ExactSet


@dataclass(frozen=True)
class Write:
    path: str
    content: str
    mode: str = "644"


@dataclass(frozen=True)
class Remove:
    path: str


@dataclass(frozen=True)
class Ensure:
    """`test` exits 0 where it is so, 1 where it is not; `make` mends it."""

    title: str
    test: str
    make: str
    timeout: float = 300.0


@dataclass(frozen=True)
class Unit:
    name: str
    reads: tuple[str, ...] = ()
    running: bool = True


@dataclass(frozen=True)
class Skip:
    title: str
    reason: str


@dataclass(frozen=True)
class Reboot:
    reason: str


@dataclass(frozen=True)
class Stop:
    """A person has to do something before this node can go on."""

    title: str
    reason: str
    advice: str


Operation = Install | Exact | Write | Remove | Ensure | Unit | Skip | Reboot | Stop


@dataclass(frozen=True)
class Place:
    """One node."""

    node: Node
    settings: NvidiaSettings
    chosen: Chosen
    machine: Machine
    limits: Mapping[str, str]
    manager: PackageManager
    peermem: bool = False  # adapters reach the GPUs' memory by the module nvidia-peermem

    def limited(self, what: str) -> str | None:
        return next((reason for pattern, reason in self.limits.items() if fnmatchcase(what, pattern)), None)

    def fill(self, text: str) -> str:
        return self.chosen.fill(text, kernel=self.machine.kernel, arch=self.machine.arch)


# Phases


def sources(at: Place) -> Iterator[Operation]:
    """Where the packages come from: one entry, one key, known by its checksum."""
    repository = at.chosen.origin.repository
    if repository is None:
        return
    if repository.before:
        yield Install(tuple(repository.before))
    if repository.enable and repository.enabled:
        yield Ensure(
            "the distribution's repository that this one needs",
            test=f"{at.fill(repository.enabled)} || exit 1",
            make=at.fill(repository.enable),
        )
    tools = at.manager.repository
    address = exports.repository_address(at.settings, at.chosen.origin, at.machine.arch)
    keyring, checksum = repository.keyring, at.settings.keyring or repository.keyring.sha256
    assert checksum is not None  # otherwise there is no lock
    key = tools.key(checksum)
    addresses = (exports.NVIDIA, *([at.settings.mirror] if at.settings.mirror else []))
    yield Ensure(
        "no other entry for this repository",
        test=tools.others(addresses, False),
        make=tools.others(addresses, True),
    )
    yield Ensure(
        "the repository's key",
        test=f"[ -s {key} ] || exit 1",
        make=tools.fetch(f"{address}{keyring.package}", checksum, keyring.key),
    )
    yield Write(tools.path, tools.entry(address, key))
    stream = repository.streams.get(at.chosen.lock.modules)
    if stream is not None and tools.stream is not None:
        name = at.fill(stream)
        yield Ensure(f"stream nvidia-driver:{name}", *tools.stream(name))


def kernel(at: Place) -> Iterator[Operation]:
    """Headers of the kernel, and nouveau out of the way."""
    profile = at.chosen.packages.kernel
    reason = at.limited("kernel")
    if reason is not None:
        yield Skip(f"headers of kernel {at.machine.kernel}", reason)
    elif profile.flavour_of(at.machine.kernel) is None:
        headers = f"/lib/modules/{at.machine.kernel}/build"
        yield Ensure(
            f"headers of kernel {at.machine.kernel}",
            test=f"[ -e {headers} ] || exit 1",
            make=f"echo 'a kernel of your own: put its headers at {headers}' >&2; exit 1",
        )
    else:
        yield Install(tuple(map(at.fill, profile.headers)))
    if profile.follow and at.chosen.lock.kernel != locking.OWN:
        yield Install(tuple(map(at.fill, profile.follow)))
    yield Write(exports.BLACKLIST, exports.blacklist())
    image, make = at.fill(profile.initramfs.image), at.fill(profile.initramfs.make)
    yield Ensure(
        "initramfs without nouveau",
        test=f"[ ! -e {image} ] || [ {image} -nt {exports.BLACKLIST} ] || exit 1",
        make=make,
        timeout=600,
    )
    if at.machine.nouveau:
        yield Reboot("nouveau is loaded: the GPUs cannot be driven before it is gone")


def driver(at: Place) -> Iterator[Operation]:
    """The whole set in one transaction, held to its version; a module for the kernel that runs."""
    lock = at.chosen.lock
    tools = at.manager.repository
    if tools.pins is not None:
        yield Write(*tools.pins(at.chosen.driver))
    yield Exact(f"driver {lock.driver} ({lock.modules}, {lock.build})", at.chosen.driver)
    if tools.hold is not None:
        yield Ensure(f"driver {lock.driver} held", *tools.hold(at.chosen.driver))
    yield _built(at)


def _built(at: Place) -> Operation:
    """The module is there for the kernel that runs; where that is not the node's own, for every one with headers."""
    lock = at.chosen.lock
    kernels = (
        "$(ls -d /lib/modules/*/build | cut -d / -f 4)" if at.limited("kernel") else quote(at.machine.kernel)
    )
    return Ensure(
        f"modules of {lock.driver} for the kernel",
        test=f'for k in {kernels}; do [ "$(modinfo -k $k -F version {at.chosen.module} 2>/dev/null)" = {lock.driver} ] '
        "|| exit 1; done",
        make=f"for k in {kernels}; do dkms autoinstall -k $k >&2 && depmod $k || exit 1; done",
        timeout=1800,
    )


def signing(at: Place) -> Iterator[Operation]:
    """Secure Boot takes signed modules only: the distribution's, or ours with a key that a person enrols."""
    lock = at.chosen.lock
    if not at.machine.secure_boot or lock.build in at.chosen.origin.signed or at.machine.key == "enrolled":
        return
    yield Install(("mokutil", "openssl"))
    yield Ensure(
        "a key for kernel modules",
        test=f"[ -s {exports.MOK} ] || exit 1",
        make=_MAKE_KEY,
    )
    yield Ensure(
        "the key waits to be enrolled",
        test=f"mokutil --test-key {exports.MOK} 2>&1 | grep -Eq 'enrollment request|already enrolled' || exit 1",
        make=_REQUEST_KEY,
    )
    yield Stop(
        "Secure Boot",
        "modules that are built here load only once their key is enrolled, which nobody can do from afar",
        f"read the password in {PASSWORD} on {at.node.name}, reboot it and stay at its console; at the blue screen "
        'press any key, then choose "Enroll MOK", "Continue", "Yes", type the password, choose "Reboot"; then apply '
        "again. "
        "Otherwise: modules that the distribution signs (nvidia.source: distribution, where it has them), or "
        "Secure Boot off in the firmware",
    )


PASSWORD = "/var/lib/provision/mok-password"
_MAKE_KEY = f"""set -e
umask 077
mkdir -p /var/lib/dkms
openssl req -new -x509 -newkey rsa:2048 -nodes -days 36500 -subj "/CN=$(hostname) kernel modules/" -outform DER \\
  -keyout /var/lib/dkms/mok.key -out {exports.MOK} 2>/dev/null
chmod 644 {exports.MOK}"""
# The password is good for one enrolment; it never stands in an argument.
_REQUEST_KEY = f"""set -e
umask 077
mkdir -p /var/lib/provision
od -An -N 4 -t u4 /dev/urandom | tr -d ' ' >{PASSWORD}
hash=$(mktemp)
trap 'rm -f "$hash"' EXIT
openssl passwd -6 -stdin <{PASSWORD} >"$hash"
mokutil --import {exports.MOK} --hash-file "$hash" >&2"""


def loading(at: Place) -> Iterator[Operation]:
    """The locked module runs, now and after each boot."""
    lock = at.chosen.lock
    options = exports.options(at.settings)
    yield Remove(exports.OPTIONS) if options is None else Write(exports.OPTIONS, options)
    yield Write(exports.MODULES, exports.modules(lock, at.peermem))
    yield Write(exports.RULES, exports.udev_rules())
    if (reason := at.limited("module:nvidia")) is not None:
        yield Skip(f"module {lock.driver} loaded", reason)
        return
    if at.machine.nouveau:
        return  # the reboot comes first
    running = at.machine.loaded
    if running is not None and (running.version, running.modules) != (lock.driver, lock.modules):
        yield Ensure(
            f"module {lock.driver} in place of {running.version}",
            test=f"[ -e {REBOOT} ] || {_is_loaded(lock.driver)} || exit 1",
            make=_RELOAD.format(clients=" ".join(exports.CLIENTS), flag=REBOOT),
        )
    else:
        yield Ensure(
            f"module {lock.driver} loaded",
            test=f"{_is_loaded(lock.driver)} || exit 1",
            make="modprobe nvidia && modprobe nvidia-uvm",
        )


def _is_loaded(version: str) -> str:
    return f'[ "$(cat /sys/module/nvidia/version 2>/dev/null)" = {version} ]'


# Whoever holds the driver open is stopped; where a module does not let go, only a reboot helps.
_RELOAD = """running=
for unit in {clients}; do
  ! systemctl -q is-active "$unit" || running="$running $unit"
done
[ -z "$running" ] || systemctl stop $running || exit 1
gone=yes
for m in nvidia_peermem nvidia_fs gdrdrv nvidia_drm nvidia_modeset nvidia_uvm nvidia; do
  [ ! -d /sys/module/$m ] || rmmod $m >&2 || gone=no
done
if [ $gone = yes ]; then
  modprobe nvidia && modprobe nvidia-uvm || exit 1
else
  touch {flag}
fi
[ -z "$running" ] || systemctl start $running"""


def daemons(at: Place) -> Iterator[Operation]:
    """Persistence, fabric, IMEX, then the device files, before anything that wants GPUs starts."""
    lock = at.chosen.lock
    if at.machine.reboot or at.machine.nouveau:
        yield Reboot(f"driver {lock.driver} is installed and another one runs")
        return
    yield Unit("nvidia-persistenced")
    if lock.fabric_manager is not None:
        yield Unit("nvidia-fabricmanager")
    if lock.imex is not None:
        yield Unit("nvidia-imex")
    yield Write(exports.MODES, exports.modes_script(at.node, at.settings), mode="755")
    path = f"/etc/systemd/system/{exports.DEVICES}"
    yield Write(path, exports.devices_unit(at.node))
    if (reason := at.limited("module:nvidia")) is not None:
        yield Skip("device files and modes of GPUs", reason)
        return
    yield Unit(exports.DEVICES, reads=(path,))
    yield Ensure(
        "modes of GPUs",
        test=f"{exports.MODES} check",
        make=f"{exports.MODES} apply",
        timeout=600,
    )


def software(at: Place) -> Iterator[Operation]:
    """CUDA, NCCL, DCGM and the like."""
    if at.chosen.software.wanted:
        yield Exact("CUDA and what comes with it", at.chosen.software)
    if "dcgm" in at.chosen.lock.also:
        if (reason := at.limited("module:nvidia")) is not None:
            yield Skip("unit nvidia-dcgm", reason)
        else:
            yield Unit("nvidia-dcgm")


PHASES: tuple[Callable[[Place], Iterator[Operation]], ...] = (
    sources,
    kernel,
    driver,
    signing,
    loading,
    daemons,
    software,
)


_SHOWN = 90  # characters of a command that still say something at a glance


def words(operation: Operation, manager: PackageManager) -> str:
    """An operation as a person would type it, for plans of tests and documents."""
    match operation:
        case Install(names):
            return manager.command(dict.fromkeys(names, "*"))
        case Exact(_, wanted):
            return manager.command(wanted.wanted)
        case Write(path, _, _):
            return f"write {path}"
        case Remove(path):
            return f"rm {path}"
        case Ensure(title, _, make, _):
            return f"{title}: {make}" if "\n" not in make and len(make) < _SHOWN else title
        case Unit(name, _, running):
            return f"systemctl {'enable --now' if running else 'disable --now'} {name}"
        case Skip(title, reason):
            return f"skip {title}: {reason}"
        case Reboot(reason):
            return f"reboot: {reason}"
        case Stop(title, reason, _):
            return f"stop at {title}: {reason}"
