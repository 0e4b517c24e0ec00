"""Settings of nvidia: which driver, from where, and what mode GPUs are in."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from provision.profiles.nvidia import Modules
from provision.profiles.nvidia_packages import Build, Source
from provision.site.base import Settings, matches

_DRIVER = re.compile(r"[1-9][0-9]{2}\.[0-9]{2,3}(\.[0-9]{2})?")
_CUDA = re.compile(r"[1-9][0-9]\.[0-9]")
_NCCL = re.compile(r"2\.[0-9]{1,2}\.[0-9]{1,2}")
_URL = re.compile(r"(https?|file)://[^\s'\"]+[^\s'\"/]")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PROFILE = re.compile(r"[1-9]g\.[0-9]{1,3}gb(\+(me|gfx|me\.all)|-me)?")
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@#+-]*")

DriverVersion = Annotated[str, matches(_DRIVER, "a driver's full version like 580.126.20")]
CudaVersion = Annotated[str, matches(_CUDA, "a CUDA release like 13.0")]
MigProfile = Annotated[str, matches(_PROFILE, "a MIG profile like 1g.10gb")]
Layout = dict[MigProfile, Annotated[int, Field(ge=1, le=7)]]  # MIG profile -> how many of it


class NvidiaSettings(Settings):
    """The part of a site file that describes nvidia."""

    source: Source = "nvidia"
    mirror: Annotated[str, matches(_URL, "an address like https://mirror.example.org/cuda/repos")] | None = (
        None
    )
    keyring: Annotated[str, matches(_SHA256, "a SHA-256 sum")] | None = None  # of the source's keyring file
    branch: int | None = None  # left out: the newest long-term one that drives the GPU
    driver: DriverVersion | None = None
    modules: Modules | None = None  # left out: open, where the GPU can be driven by them
    build: Build | None = None  # left out: precompiled where the distribution signs them, else DKMS
    fabric_manager: bool | DriverVersion | None = None  # left out: where there are NVSwitches
    cuda: CudaVersion | None = None  # the toolkit on the node
    compat: CudaVersion | None = None  # cuda-compat of this release, for programs newer than the driver
    nccl: Annotated[str, matches(_NCCL, "an NCCL version like 2.28.9")] | None = None
    also: list[Literal["dcgm", "gdrcopy", "slurm-nvml", "container-toolkit"]] = Field(default_factory=list)
    images: list[Annotated[str, matches(_IMAGE, "a container image with its tag")]] = Field(
        default_factory=list
    )  # what jobs run in, checked against the driver
    module_options: dict[Annotated[str, matches(_OPTION, "an option of the module")], str | int] = Field(
        default_factory=dict
    )
    mig: Literal["none"] | dict[str, Layout] = "none"  # GPU number, or "all" -> layout
    compute_mode: Literal["default", "exclusive-process", "prohibited"] = "default"
    power_limit: int | None = Field(None, ge=50, le=2000)  # watts; left out: as the GPU came
    ecc: bool | None = None  # left out: as it is

    @field_validator("mig")
    @classmethod
    def _gpus(cls, mig: str | dict[str, Layout]) -> str | dict[str, Layout]:
        """Every key is a GPU's number or "all"."""
        if isinstance(mig, dict):
            wrong = [key for key in mig if key != "all" and not re.fullmatch(r"[0-9]|[1-5][0-9]", key)]
            if wrong:
                raise ValueError(f'{wrong[0]!r} is neither "all" nor the number of a GPU')
        return mig
