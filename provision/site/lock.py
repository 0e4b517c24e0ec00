"""The lock file beside a site file: what was read once from the nodes and holds from then on.

`inventories/atlas.yml` has `inventories/atlas.lock.yml`. Files that list all nodes are rendered from site and
lock alone, so a node that is down today stays in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from provision import atomic
from provision.errors import InputError
from provision.site.base import Settings
from provision.site.models import Hardware, Node, Site


class NvidiaLock(Settings):
    """One consistent set of NVIDIA's software: what the nodes of one group have, to the patch level."""

    gpus: str  # "8 x h100-sxm": what it was resolved for
    distribution: str  # "ubuntu 24.04"
    kernel: str  # flavour, whose headers are kept: "generic"; "own": not the distribution's, its headers are there
    source: Literal["nvidia", "distribution"]
    branch: int
    driver: str
    modules: Literal["open", "proprietary"]
    build: Literal["dkms", "precompiled"]
    fabric_manager: str | None = None  # its version, the driver's; None: no NVSwitch
    nvlsm: bool = False  # the NVLink subnet manager of fourth generation NVSwitches
    imex: str | None = None
    cuda: str | None = None
    compat: str | None = None
    nccl: str | None = None
    doca: str | None = None  # release of DOCA-Host; None: the kernel's own RDMA stack
    also: list[str] = Field(default_factory=list)  # "dcgm", "gdrcopy", "slurm-nvml"


class Lock(Settings):
    """What is locked for one cluster."""

    hardware: dict[str, Hardware] = Field(default_factory=dict)  # node -> CPUs and memory
    release: dict[str, str] = Field(default_factory=dict)  # software -> version, "slurm": "24.11.5"
    nvidia: dict[str, NvidiaLock] = Field(default_factory=dict)  # group -> its set

    def hardware_of(self, site: Site, node: Node) -> Hardware | None:
        """The node's hardware: from the site file, else as locked, else that of another node of its group."""
        if node.hardware is not None:
            return node.hardware
        if node.name in self.hardware:
            return self.hardware[node.name]
        for other in site.nodes.values():
            if other.group == node.group and other.name in self.hardware:
                return self.hardware[other.name]
        return None


def lock_path(site: Site) -> Path:
    return site.path.with_name(f"{site.path.stem}.lock.yml")


class LockError(InputError):
    """The lock file cannot be read or written; says which file, what is wrong, and what to do."""


def load_lock(site: Site) -> Lock:
    """The lock of `site`; an empty one where there is no file yet. Raises LockError."""
    path = lock_path(site)
    advice = "take it back from version control, or move it away: what it holds is read from the nodes again"
    try:
        return Lock.model_validate(yaml.safe_load(path.read_text()) or {})
    except FileNotFoundError:
        return Lock()
    except OSError as error:
        raise LockError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise LockError(f"{path}: not a lock file: {key}: {first['msg']}; {advice}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise LockError(f"{path}{line}: not YAML; {advice}") from error


def save_lock(site: Site, lock: Lock) -> None:
    """Write the lock beside the site file, atomically. Raises LockError."""
    path = lock_path(site)
    text = yaml.safe_dump(lock.model_dump(mode="json"), sort_keys=True)
    header = "# Written by `provision`: what was read from the nodes once. Commit it with the site file.\n"
    try:
        atomic.write(path, f"{header}{text}".encode(), mode=0o644)
    except OSError as error:
        raise LockError(f"{path}: cannot be written: {error.strerror}") from error
