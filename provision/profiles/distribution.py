"""What differs between distributions, as data."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Literal

from pydantic import Field

from provision import packaged
from provision.profiles.packaging import MANAGERS, PackageManager
from provision.site.base import Settings


class Distribution(Settings):
    """One release of a distribution, by `ID VERSION_ID` of /etc/os-release."""

    key: str
    family: Literal["debian", "redhat"]
    ntp_pool: str = "pool.ntp.org"
    package_sets: dict[str, list[str]] = Field(default_factory=dict, alias="packages")
    units: dict[str, str] = Field(default_factory=dict)  # purpose -> unit, "time": "chrony"
    paths: dict[str, str] = Field(
        default_factory=dict
    )  # purpose -> path, "chrony.conf": "/etc/chrony/chrony.conf"
    options: dict[str, str] = Field(default_factory=dict)  # purpose -> how this release spells an option

    @property
    def manager(self) -> PackageManager:
        """How packages are asked for, installed and mended here."""
        return MANAGERS[self.family]

    @property
    def half_installs(self) -> bool:
        """Whether a package can be left between two states: dpkg keeps such ones, rpm undoes them."""
        return self.family == "debian"

    def packages(self, purpose: str) -> list[str]:
        """Packages for a purpose ("slurm-controller"). Raises UnsupportedDistribution where none are known."""
        if purpose not in self.package_sets:
            raise UnsupportedDistribution(
                f"{self.key}: no packages known for {purpose} (profiles/distributions.yml)"
            )
        return self.package_sets[purpose]

    def unit(self, purpose: str) -> str:
        return self.units.get(purpose, purpose)

    def path(self, purpose: str) -> str:
        if purpose not in self.paths:
            raise UnsupportedDistribution(
                f"{self.key}: no path known for {purpose} (profiles/distributions.yml)"
            )
        return self.paths[purpose]

    def option(self, purpose: str) -> str:
        """How a program of this release spells an option. Raises UnsupportedDistribution."""
        if purpose not in self.options:
            raise UnsupportedDistribution(
                f"{self.key}: no option known for {purpose} (profiles/distributions.yml)"
            )
        return self.options[purpose]


class UnsupportedDistribution(Exception):
    """A node's distribution is not in the profiles, or a purpose is not known for it."""


@cache
def _all() -> dict[str, Distribution]:
    document = packaged.data("provision.profiles", "distributions.yml")
    return {key: Distribution.model_validate({"key": key, **value}) for key, value in document.items()}


def distribution(identity: str, version: str) -> Distribution:
    """The profile for `ID` and `VERSION_ID` (of Enterprise Linux only the major number counts)."""
    for key in (f"{identity} {version}", f"{identity} {version.split('.')[0]}"):
        if key in _all():
            return _all()[key]
    known = ", ".join(sorted(_all()))
    raise UnsupportedDistribution(f"{identity} {version} is not supported; supported are: {known}")


def parse_os_release(text: str) -> dict[str, str]:
    """The assignments of an os-release file, {"ID": "debian", "VERSION_ID": "13"}; what is none is left out."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if not equals or name.startswith("#"):
            continue
        try:
            values[name] = "".join(shlex.split(value))
        except ValueError:  # a quote that is not closed: as good as absent
            continue
    return values


def of_os_release(text: str) -> Distribution:
    """The profile of the system whose /etc/os-release is `text`. Raises UnsupportedDistribution."""
    release = parse_os_release(text)
    return distribution(release.get("ID", "?"), release.get("VERSION_ID", "?"))
