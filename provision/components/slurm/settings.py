"""Settings of slurm."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from provision.site.base import Settings, matches

_TIME = re.compile(r"INFINITE|\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*", re.IGNORECASE)
_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*")


Time = Annotated[
    str, matches(_TIME, "a time as Slurm writes it: 30 (minutes), 12:00:00, 3-00:00:00, INFINITE")
]
Name = Annotated[str, matches(_NAME, "a name of letters, digits and _.-")]
Option = Annotated[str, matches(_OPTION, "a parameter of slurm.conf")]
Line = Annotated[str, Field(pattern=r"^[^\n]+$")]


class Partition(Settings):
    """A partition: the workers of some groups."""

    name: Name
    groups: list[str] = Field(default_factory=list)  # left out: all workers
    default: bool = False
    max_time: Time = "INFINITE"
    default_time: Time | None = None
    priority: int = Field(1, ge=0, le=65533)  # PriorityTier
    accounts: list[Name] = Field(default_factory=list)  # left out: all may use it
    qos: Name | None = None


class Constrain(Settings):
    """What a job's cgroup keeps it to. GPUs are always kept apart."""

    cores: bool = True
    memory: bool = True


class Account(Settings):
    """An account with its users."""

    name: Name
    fair_share: int = Field(1, ge=0)
    users: list[Name] = Field(
        default_factory=list
    )  # of base.users, or access.user; the others use `default_account`


class Qos(Settings):
    """A quality of service."""

    name: Name
    priority: int = Field(0, ge=0)
    max_wall: Time | None = None
    max_gpus_per_user: int | None = Field(None, ge=0)


class FairShare(Settings):
    """How jobs wait: weights of the multifactor priority, and how long use is remembered."""

    half_life: Time = "14-0"
    fair_share: int = Field(10000, ge=0)
    age: int = Field(1000, ge=0)
    qos: int = Field(10000, ge=0)
    job_size: int = Field(0, ge=0)


class Switch(Settings):
    """A switch of the network, with the nodes or switches below it."""

    name: Name
    nodes: str | None = None  # a host list
    switches: list[Name] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_kind(self) -> Switch:
        if (self.nodes is None) == (not self.switches):
            raise ValueError(f"switch {self.name} has either nodes or switches below it")
        return self


class Rest(Settings):
    """slurmrestd, which takes a token (`scontrol token`) from whoever asks."""

    port: int = Field(6820, ge=1024, le=65535)


class SlurmSettings(Settings):
    """The part of a site file that describes Slurm."""

    source: Literal["distribution", "repository"] = (
        "distribution"  # repository: one of the site's, set up before
    )
    partitions: list[Partition] = Field(default_factory=list)  # left out: one of all workers
    constrain: Constrain = Constrain()
    memory_reserve: int = Field(2, ge=0, le=50)  # percent of a node's memory that jobs do not get
    core_reserve: int = Field(0, ge=0)  # cores of each worker that jobs do not get
    gpu_detection: Literal["nvml", "files"] | None = (
        None  # left out: nvml, where the packages of Slurm can ask the driver
    )
    default_account: Name = "default"
    accounts: list[Account] = Field(default_factory=list)
    qos: list[Qos] = Field(default_factory=list)
    fair_share: FairShare = FairShare()
    topology: list[Switch] = Field(default_factory=list)
    rest: Rest | None = Rest()
    database_memory: int | None = Field(
        None, ge=64
    )  # MiB for MariaDB; left out: a quarter of the head's, 4096 at most
    health_check: str | None = Field(None, pattern=r"^/\S+$")  # a program on the nodes
    health_interval: int = Field(300, ge=10)  # seconds
    pam_adopt: bool = False  # who has a job on a worker may log in there, nobody else but root
    options: dict[Option, Line] = Field(default_factory=dict)  # further parameters of slurm.conf
