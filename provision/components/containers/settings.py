"""Settings of containers: which engines, what they may reach."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from provision.site.base import Settings, matches

_URL = re.compile(r"https?://[^\s'\"/]+(/[^\s'\"]*)?")
_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:[0-9]+)?")
_PATH = re.compile(r"/[A-Za-z0-9._/-]+")
_SIZE = re.compile(r"[1-9][0-9]*[kmg]")
_PLAIN = re.compile(r"[A-Za-z0-9.:/*_-]+")

Url = Annotated[str, matches(_URL, "an address like https://mirror.example.org")]
Registry = Annotated[str, matches(_REGISTRY, "a registry like docker.io or mirror.example.org:5000")]
Path = Annotated[str, matches(_PATH, "an absolute path")]


class Docker(Settings):
    """Docker's daemon; who may reach it has root's rights."""

    data_root: Path | None = None  # left out: where it is
    log_size: Annotated[str, matches(_SIZE, "a size like 100m")] = "100m"  # of one container's log file
    members: list[str] = Field(default_factory=list)  # users of the group docker


class Podman(Settings):
    """Podman needs no daemon."""


class Apptainer(Settings):
    """Apptainer needs no daemon."""


class Enroot(Settings):
    """Enroot; each user has a folder of their own below these."""

    data: Path = "/var/lib/enroot/data"  # unpacked containers: local and fast
    cache: Path = "/var/lib/enroot/cache"
    temporary: Path = "/tmp"


class Proxy(Settings):
    """The way out of daemons that fetch images."""

    http: Url | None = None
    https: Url | None = None
    none: list[Annotated[str, matches(_PLAIN, "a host, domain or network")]] = Field(default_factory=list)


class ContainersSettings(Settings):
    """The part of a site file that describes containers."""

    docker: Docker | None = None
    podman: Podman | None = None
    apptainer: Apptainer | None = None
    enroot: Enroot | None = None
    pyxis: bool = False  # srun --container-image; needs Enroot and Slurm
    toolkit: bool = True  # NVIDIA's, on nodes with GPUs
    mirrors: dict[Registry, list[Url]] = Field(default_factory=dict)  # registry -> asked before it
    insecure: list[Registry] = Field(default_factory=list)  # by HTTP, or with any certificate
    proxy: Proxy | None = None
