"""What others may know of nvidia, and the files that it writes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.components.nvidia import locking
from provision.components.nvidia.machine import REBOOT
from provision.components.nvidia.settings import NvidiaSettings
from provision.engine.deploy import render
from provision.profiles.nvidia import rules
from provision.profiles.nvidia_packages import NvidiaPackages, Origin, nvidia_packages
from provision.profiles.packaging import ExactSet

if TYPE_CHECKING:
    from provision.site.lock import Lock, NvidiaLock
    from provision.site.models import Node, Site
    from provision.site.problem import Problem

BLACKLIST = "/etc/modprobe.d/provision-nouveau.conf"
OPTIONS = "/etc/modprobe.d/provision-nvidia.conf"
MODULES = "/etc/modules-load.d/provision-nvidia.conf"
RULES = "/etc/udev/rules.d/70-provision-nvidia.rules"
MODES = "/usr/local/lib/provision/gpu-modes"
DEVICES = "provision-gpu-devices.service"
NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos"
MOK = "/var/lib/dkms/mok.pub"

# Units that hold the driver open: stopped before it is changed, started after it
CLIENTS = (
    "slurmd",
    "kubelet",
    "nvidia-dcgm",
    "nvidia-dcgm-exporter",
    "dcgm-exporter",
    "nvidia-persistenced",
    "nvidia-fabricmanager",
    "nvidia-imex",
)


def problems(site: Site) -> Iterator[Problem]:
    """What cannot work in nvidia's part of the site file."""
    yield from locking.problems(site)


def set_of(site: Site, lock: Lock, node: Node) -> NvidiaLock | None:
    """What the lock says for `node`; None where it has no GPU, or none has been resolved."""
    return lock.nvidia.get(node.group) if node.gpu is not None else None


# Packages


@dataclass(frozen=True)
class Chosen:
    """A set with the names that it has on its distribution."""

    lock: NvidiaLock
    packages: NvidiaPackages
    origin: Origin

    @classmethod
    def of(cls, lock: NvidiaLock) -> Chosen:
        packages = nvidia_packages(lock.distribution)
        return cls(lock, packages, packages.sources[lock.source])

    @property
    def module(self) -> str:
        """The name of the kernel module's file."""
        return self.origin.module.get(self.lock.modules, "nvidia")

    def fill(self, text: str, **more: str) -> str:
        """`text` with the set's values for its placeholders."""
        lock = self.lock
        cuda = lock.cuda or lock.compat or ""
        values = {
            "branch": str(lock.branch),
            "driver": lock.driver,
            "flavour": lock.kernel,
            "cuda": cuda,
            "cuda-dashed": cuda.replace(".", "-"),
            "cuda-major": (cuda or rules().cuda_of(lock.driver) or "").partition(".")[0],
            "nccl": lock.nccl or "",
            **more,
        }
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def wanted(self, names: list[str]) -> dict[str, str]:
        """Package -> pattern of its version, of these items."""
        items = self.origin.items(self.lock.branch)
        return {
            self.fill(package): self.fill(item.version) if item.version else "*"
            for item in (items[name] for name in names)
            for package in item.packages
        }

    @property
    def driver(self) -> ExactSet:
        """All that carries the driver's number."""
        names = [name for name in locking.item_names(self.lock) if name not in SOFTWARE]
        belongs = self.packages.set
        return ExactSet(self.wanted(names), f"{self.lock.driver}-*", belongs.members, belongs.apart)

    @property
    def software(self) -> ExactSet:
        """What comes on top of the driver, each with a number of its own."""
        names = [name for name in locking.item_names(self.lock) if name in SOFTWARE]
        return ExactSet(self.wanted(names), "*", ["-"], ["-"])


SOFTWARE = ("cuda", "compat", "nccl", "dcgm", "gdrcopy", "slurm-nvml", "container-toolkit")


# Files


def blacklist() -> str:
    return "blacklist nouveau\noptions nouveau modeset=0\n"


def options(settings: NvidiaSettings) -> str | None:
    """Options of the kernel module; None where there are none."""
    if not settings.module_options:
        return None
    words = " ".join(f"{name}={value}" for name, value in settings.module_options.items())
    return f"options nvidia {words}\n"


def modules(lock: NvidiaLock, peermem: bool) -> str:
    """What is loaded at boot; fourth generation NVSwitches are managed over their InfiniBand bridge."""
    more = [*(["nvidia-peermem"] if peermem else []), *(["ib_umad"] if lock.nvlsm else [])]
    return "".join(f"{name}\n" for name in ("nvidia", "nvidia-uvm", *more))


def udev_rules() -> str:
    """Device files appear with the module, whoever loads it."""
    return (
        'ACTION=="add|bind", ATTR{vendor}=="0x10de", SUBSYSTEM=="pci", DRIVER=="nvidia", '
        'TEST=="/usr/bin/nvidia-modprobe", RUN+="/usr/bin/nvidia-modprobe -c 0 -u"\n'
    )


def repository_address(settings: NvidiaSettings, origin: Origin, arch: str) -> str:
    """Where the packages are, with a slash at the end."""
    assert origin.repository is not None
    return f"{settings.mirror or NVIDIA}/{origin.repository.folder}/{arch}/"


# Modes


@dataclass(frozen=True)
class Mode:
    """How one GPU is to be, in the words of gpu-modes."""

    index: int
    profiles: str
    compute: str
    watts: str
    ecc: str


def modes(node: Node, settings: NvidiaSettings) -> list[Mode]:
    """One entry a GPU; a GPU's own MIG layout wins over that of "all"."""
    assert node.gpu is not None
    found = []
    for index in range(node.gpu.count):
        layout = {} if settings.mig == "none" else settings.mig.get(str(index), settings.mig.get("all", {}))
        profiles = sorted(name for name, count in layout.items() for _ in range(count))
        found.append(
            Mode(
                index,
                ",".join(profiles) or "-",
                settings.compute_mode,
                str(settings.power_limit or "-"),
                {None: "-", True: "Enabled", False: "Disabled"}[settings.ecc],
            )
        )
    return found


def modes_script(node: Node, settings: NvidiaSettings) -> str:
    return render("nvidia", "gpu-modes.j2", modes=modes(node, settings), reboot=REBOOT)


def devices_unit(node: Node) -> str:
    assert node.gpu is not None
    return render("nvidia", "devices.service.j2", count=node.gpu.count, modes=MODES)
