"""Settings of storage."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from provision.site.base import Settings, matches

_PATH = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+")
_OPTIONS = re.compile(r"[^\s,]+(,[^\s,]+)*")
_TYPE = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SYSTEM = (
    "/",
    "/etc",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/var",
    "/run",
    "/proc",
    "/sys",
    "/dev",
    "/boot",
)


def _path(value: str) -> str:
    if not _PATH.fullmatch(value):
        raise ValueError(f"{value!r} is not a path from the root, of letters, digits and _.+- (like /shared)")
    if value in _SYSTEM:
        raise ValueError(f"{value} belongs to the system: mounting there would hide it")
    return value


Path = Annotated[str, AfterValidator(_path)]
Options = Annotated[str, matches(_OPTIONS, "a list of mount options like 'hard,vers=4.2'")]
MountRole = Literal["head", "worker", "login", "storage", "monitor", "control-plane"]


class Mount(Settings):
    """A file system of a server that is there already."""

    path: Path
    source: str = Field(min_length=1, pattern=r"^\S+$")  # "nas-1:/export/home", "10.1.0.5@o2ib:/lustre"
    type: str = Field("nfs", pattern=_TYPE.pattern + "$")
    options: Options | None = None  # left out: what suits the type
    roles: list[MountRole] = Field(default_factory=list)  # left out: every node


class Scratch(Settings):
    """Fast local space of a node."""

    path: Path = "/scratch"
    device: str | None = Field(None, pattern=r"^/dev/\S+$")  # left out: a directory on the root file system
    filesystem: Literal["xfs", "ext4"] = "xfs"  # made on a blank device only
    options: Options = "noatime"
    roles: tuple[MountRole, ...] = ("worker",)


class StorageSettings(Settings):
    """The part of a site file that describes storage.

    `mounts` come first. Of `shared`, what no mount covers is served by the first node of role storage, or by the
    head where there is none.
    """

    mounts: list[Mount] = Field(default_factory=list)
    shared: list[Path] = Field(default_factory=lambda: ["/home", "/shared"])
    provider: Literal["nfs", "glusterfs"] = "nfs"
    data: Path = "/srv/provision"  # where the server keeps what it serves
    options: Options | None = None  # of the mounts of `shared`; left out: what suits the provider
    scratch: Scratch | None = None
    private_tmp: bool = True  # every job has a /tmp of its own, gone when it ends
    private_tmp_path: Path | None = (
        None  # where jobs' /tmp are kept; left out: on scratch, else /var/tmp/slurm
    )
    full: int = Field(90, ge=1, le=100)  # percent of space or inodes in use from which the check fails

    @model_validator(mode="after")
    def _once(self) -> StorageSettings:
        paths = [mount.path for mount in self.mounts]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{path} stands twice in mounts")
        if len(set(self.shared)) != len(self.shared):
            raise ValueError("a path stands twice in shared")
        return self
