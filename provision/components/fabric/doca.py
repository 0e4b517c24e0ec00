"""What is done for DOCA-Host on a node, in order, from the site's settings and what the node says of itself. Pure.

Before NVIDIA's driver: nvidia-peermem is built against the RDMA stack that is there. The modules that run are not taken
away from under jobs: the new ones run after a reboot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shlex import quote

from provision.components.fabric.settings import DocaSettings
from provision.components.nvidia import machine as nvidia
from provision.components.nvidia.operations import Ensure, Exact, Install, Operation, Reboot, Stop, Write
from provision.profiles.doca import DOCA, RDMA, doca
from provision.profiles.nvidia_packages import nvidia_packages
from provision.profiles.packaging import ExactSet, PackageManager

QUERY = (
    nvidia.QUERY
    + """mlx5=absent
[ ! -d /sys/module/mlx5_core ] || mlx5=$(cat /sys/module/mlx5_core/version 2>/dev/null || echo inbox)
echo "mlx5=$mlx5"
ofed=; ! command -v ofed_info >/dev/null || ofed=$(ofed_info -s)
echo "ofed=$ofed"
"""
)
LOCAL = "/usr/share/doca-host-"  # where the packages of a downloaded doca-host are: an entry of its own


@dataclass(frozen=True)
class Place:
    """One node."""

    distribution: str
    wanted: DocaSettings
    manager: PackageManager
    machine: nvidia.Machine
    running: str  # version of the module mlx5_core: "inbox" for one without, "absent" where none is loaded
    former: str = ""  # what `ofed_info -s` says: "MLNX_OFED_LINUX-24.10-1.1.4.0:"
    peermem: bool = False

    @property
    def drivers(self) -> str:
        return doca().releases[self.wanted.version].drivers

    @property
    def set(self) -> ExactSet:
        return ExactSet(doca().packages(self.wanted.version, self.distribution), "*", ["-"], ["-"])

    @property
    def changes(self) -> bool:
        """Whether another stack runs, so that nobody may be at work here while it is changed."""
        return self.running not in ("absent", self.drivers)


def place(
    text: str, distribution: str, wanted: DocaSettings, manager: PackageManager, *, peermem: bool
) -> Place:
    """From what QUERY printed. Raises ValueError naming what is missing or cannot be understood."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if missing := {"mlx5", "ofed"} - values.keys():
        raise ValueError(f"not told: {', '.join(sorted(missing))}")
    machine = nvidia.parse_machine(text)
    return Place(distribution, wanted, manager, machine, values["mlx5"], values["ofed"], peermem)


def operations(at: Place) -> Iterator[Operation]:
    """Repository, packages in exactly this release, modules for the kernel, and the reboot that makes them run."""
    kernel = quote(at.machine.kernel)
    why = doca().why_not(at.wanted.version, at.distribution, at.machine.kernel)
    if why is None and at.machine.arch not in doca().architectures:
        why = f"there is no DOCA-Host for {at.machine.arch}"
    if why is not None:
        yield Stop("DOCA", why, "change fabric.stack or fabric.doca in the site file")
        return
    if at.machine.secure_boot and at.machine.key != "enrolled":
        yield Stop(
            "Secure Boot",
            "DOCA's modules are built on the node and signed by nobody: after the next boot the adapters would be gone",
            "enrol the key that DKMS signs with (mokutil --import /var/lib/dkms/mok.pub, reboot, confirm at the "
            "console); or Secure Boot off in the firmware; or fabric.stack: inbox",
        )
        return
    if at.former.startswith("MLNX_OFED"):
        # DOCA-Host Installation and Upgrade 3.2.1, "Uninstalling Software from Host"
        yield Ensure(
            "no MLNX_OFED",
            test="! ofed_info -s 2>/dev/null | grep -q ^MLNX_OFED || exit 1",
            make="/usr/sbin/ofed_uninstall.sh --force >&2",
            timeout=900,
        )
    yield from _source(at)
    known = nvidia_packages(at.distribution).kernel
    yield Install(tuple(name.format(kernel=at.machine.kernel) for name in known.headers))
    if at.manager.doca.pins is not None:
        yield Write(*at.manager.doca.pins(at.set))
    yield Exact(f"DOCA {at.wanted.version}", at.set)
    if at.manager.doca.hold is not None:
        yield Ensure(f"DOCA {at.wanted.version} held", *at.manager.doca.hold(at.set))
    yield Ensure(
        f"modules of DOCA {at.wanted.version} for the kernel",
        test=f'[ "$(modinfo -k {kernel} -F version mlx5_core 2>/dev/null)" = {at.drivers} ] || exit 1',
        make=f"dkms autoinstall -k {kernel} >&2 && depmod {kernel}",
        timeout=1800,
    )
    image, make = (
        text.format(kernel=at.machine.kernel) for text in (known.initramfs.image, known.initramfs.make)
    )
    yield Ensure(
        "initramfs with DOCA's modules",
        test=f'm=$(modinfo -k {kernel} -n mlx5_core) || exit 1; [ ! -e {image} ] || [ {image} -nt "$m" ] || exit 1',
        make=make,
        timeout=600,
    )
    if at.peermem:
        yield Ensure(
            "nvidia-peermem built for DOCA's stack",
            test=_PEERMEM_TEST % kernel,
            make=_PEERMEM_MAKE % kernel,
            timeout=1800,
        )
    if at.changes:
        yield Reboot(f"DOCA {at.wanted.version} is installed and mlx5_core {at.running} runs")


def stopped(todo: Sequence[Operation]) -> bool:
    """Whether a person has to do something first."""
    return any(isinstance(operation, Stop) for operation in todo)


# GPUDirect RDMA: a driver that was there before the RDMA stack has a peermem without its interface. No driver yet: the
# component nvidia builds it, after this one.
_PEERMEM_TEST = """k=%s
mine=$(modinfo -k $k -n nvidia-peermem 2>/dev/null) || exit 0
stack=$(modinfo -k $k -n ib_core) || exit 1
[ "$mine" -nt "$stack" ] || exit 1"""
_PEERMEM_MAKE = """k=%s
dkms status nvidia -k $k | sed -n 's|^\\(nvidia[^/]*\\)/\\([^,:]*\\).*|\\1/\\2|p' | sort -u | {
  found=no
  while read -r module; do
    found=yes
    dkms build --force -k $k "$module" >&2 && dkms install --force -k $k "$module" >&2 || exit 1
  done
  [ $found = yes ] || { echo 'nvidia-peermem is there and no module of DKMS: reinstall the driver' >&2; exit 1; }
}"""


def _source(at: Place) -> Iterator[Operation]:
    """One entry for exactly this release, one key, known by its checksum; none of MLNX_OFED or another release."""
    known, tools = doca(), at.manager.doca
    if before := known.distributions[at.distribution].before:
        yield Install(tuple(before))
    address = known.address(at.wanted.version, at.distribution, at.machine.arch, at.wanted.mirror)
    addresses = [DOCA, RDMA, LOCAL, *([at.wanted.mirror] if at.wanted.mirror else [])]
    key = tools.key(at.wanted.keyring)
    yield Ensure(
        "no other entry for DOCA or MLNX_OFED",
        test=tools.others(addresses, False),
        make=tools.others(addresses, True),
    )
    yield Ensure(
        "the key of DOCA's repository",
        test=f"[ -s {key} ] || exit 1",
        make=tools.fetch(f"{address}{known.key}", at.wanted.keyring, None),
    )
    yield Write(tools.path, tools.entry(address, key))
