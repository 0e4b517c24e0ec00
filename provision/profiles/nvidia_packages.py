"""Where NVIDIA's software comes from and what it is called, by distribution and source, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from pydantic import Field

from provision import packaged
from provision.profiles.distribution import UnsupportedDistribution
from provision.site.base import Settings

Source = Literal["nvidia", "distribution"]
Build = Literal["dkms", "precompiled"]


class Initramfs(Settings):
    image: str
    make: str


class Kernel(Settings):
    """How this distribution's kernels are called."""

    flavour: str  # a regular expression for `uname -r`
    default: str  # where that does not tell
    headers: list[str]  # of the kernel that runs
    follow: list[str]  # of every later one
    initramfs: Initramfs
    ga: str | None = None  # the release's first kernel; later ones are of the hardware enablement stack
    hwe: str | None = None

    def flavour_of(self, release: str) -> str | None:
        """ "generic-hwe-24.04" of "6.14.0-37-generic"; None for a kernel that is not this distribution's."""
        found = re.search(self.flavour, release)
        if found is None:
            return None
        flavour = found["flavour"]
        if self.ga and self.hwe and not release.startswith(f"{self.ga}.") and flavour == self.default:
            return self.hwe.format(flavour=flavour)
        return flavour


class Keyring(Settings):
    """A file of the repository that holds its key, known by its checksum."""

    package: str
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")  # None: the site has to name it
    key: str | None = None  # the key within the package; None: the file is the key


class Repository(Settings):
    folder: str  # below NVIDIA's address, or below the mirror's
    keyring: Keyring
    before: list[str] = Field(default_factory=list)  # packages that it needs
    enable: str | None = None  # shell text: a repository of the distribution that it needs
    enabled: str | None = None  # shell text: exits 0 where that is so
    streams: dict[str, str] = Field(default_factory=dict)  # kind of modules -> stream of the dnf module


class Item(Settings):
    packages: list[str] = Field(min_length=1)
    version: str | None = None


class Variant(Settings):
    """The names up to a branch."""

    items: dict[str, Item]
    until: int | None = None


class Origin(Settings):
    """A source on one distribution."""

    variants: list[Variant] = Field(min_length=1)
    repository: Repository | None = None  # None: the distribution's own
    signed: list[Build] = Field(default_factory=list)  # modules that Secure Boot takes as they come
    module: dict[str, str] = Field(
        default_factory=dict
    )  # kind -> name of the module's file; left out: nvidia

    def items(self, branch: int) -> Mapping[str, Item]:
        """item -> its packages, for `branch`."""
        return next(v.items for v in self.variants if v.until is None or branch <= v.until)


class Members(Settings):
    """Which installed packages belong to the driver's set, by pattern."""

    members: list[str]
    apart: list[str]


class NvidiaPackages(Settings):
    """One distribution."""

    kernel: Kernel
    set: Members
    sources: dict[Source, Origin]


@cache
def _all() -> dict[str, NvidiaPackages]:
    document = packaged.data("provision.profiles", "nvidia_packages.yml")
    return {key: NvidiaPackages.model_validate(value) for key, value in document["distributions"].items()}


def nvidia_distributions() -> list[str]:
    return list(_all())


def nvidia_packages(distribution: str) -> NvidiaPackages:
    """NVIDIA's software on `distribution` ("ubuntu 24.04"). Raises UnsupportedDistribution."""
    if distribution not in _all():
        raise UnsupportedDistribution(
            f"{distribution}: no packages of NVIDIA's are known (profiles/nvidia_packages.yml)"
        )
    return _all()[distribution]
