"""NVIDIA's DOCA-Host: releases, and where each distribution finds them, as data."""

from __future__ import annotations

import re
from functools import cache

from pydantic import Field

from provision import packaged
from provision.site.base import Settings

DOCA = "https://linux.mellanox.com/public/repo/doca"
RDMA = "https://linux.mellanox.com/public/repo/mlnx_ofed"  # what went before


class Release(Settings):
    drivers: str  # "25.10-1.7.1"
    source: str


class Unbuildable(Settings):
    release: str
    kernel: str  # a regular expression for `uname -r`
    source: str


class Doca(Settings):
    """One distribution."""

    folder: str
    before: list[str] = Field(default_factory=list)  # packages that it needs
    set: dict[str, str] = Field(min_length=1)  # package -> pattern of its version
    source: str


class DocaRules(Settings):
    releases: dict[str, Release]
    unbuildable: list[Unbuildable]
    architectures: dict[str, str]  # `uname -m` -> folder
    key: str
    distributions: dict[str, Doca]
    refused: dict[str, str]

    def why_not(self, release: str, distribution: str, kernel: str | None) -> str | None:
        """Why this release cannot be installed there; None: it can. `kernel`: `uname -r`, None: not known."""
        if release not in self.releases:
            return f"nothing is known about DOCA {release}, only about {', '.join(self.releases)} (profiles/doca.yml)"
        if distribution not in self.distributions:
            why = self.refused.get(distribution, "no document names it")
            return f"DOCA {release} on {distribution}: {why}; fabric.stack: inbox"
        for entry in self.unbuildable:
            if kernel is not None and entry.release == release and re.match(entry.kernel, kernel):
                return f"the modules of DOCA {release} do not build for kernel {kernel} ({entry.source})"
        return None

    def packages(self, release: str, distribution: str) -> dict[str, str]:
        """Package -> pattern of its version."""
        values = {"release": release, "drivers": self.releases[release].drivers.replace("-", ".")}
        return {name: text.format(**values) for name, text in self.distributions[distribution].set.items()}

    def address(self, release: str, distribution: str, machine: str, mirror: str | None = None) -> str:
        """Where the packages are, with a slash at the end. Raises KeyError for a machine that it has none for."""
        folder = self.distributions[distribution].folder
        return f"{mirror or DOCA}/{release}/{folder}/{self.architectures[machine]}/"


@cache
def doca() -> DocaRules:
    return DocaRules.model_validate(packaged.data("provision.profiles", "doca.yml"))
