"""What a lab is made of: names, addresses, paths. What runs is read from the system, never from here."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from provision.lab import host
from provision.lab.command import InputError, LabError

NETWORK = "10.77.0"
NETWORK6 = "fd77:"
HEAD_NUMBER = 10
MAX_WORKERS = 200
DEFAULT_MODEL = "h100-sxm"
PROXY_PORT = 3128


@dataclass(frozen=True)
class Node:
    """One machine of the lab. `number` is the last part of both of its addresses."""

    name: str
    role: str  # head or worker
    number: int
    gpus: int
    model: str = DEFAULT_MODEL  # of its GPUs
    layers: tuple[str, ...] = ()  # folders below the layer cache, lowest first

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def address6(self) -> str:
        return f"{NETWORK6}:{self.number}"


@dataclass(frozen=True)
class Spec:
    """What `up` was asked for: kept in lab.json so that a later `up` can complete or mend it."""

    suite: str
    mirror: str
    security: str | None
    layers: tuple[str, ...]
    nodes: tuple[Node, ...] = field(default_factory=tuple)


def plan_nodes(workers: int, gpus: int, model: str = DEFAULT_MODEL) -> tuple[Node, ...]:
    """A head and `workers` workers with `gpus` simulated GPUs of `model` each, without layers yet."""
    if not 0 <= workers <= MAX_WORKERS:
        raise InputError(f"--workers {workers}: expected 0 to {MAX_WORKERS}")
    if not 0 <= gpus <= 16:
        raise InputError(f"--gpus {gpus}: expected 0 to 16")
    head = Node("lab-head", "head", HEAD_NUMBER, 0)
    return (
        head,
        *(Node(f"lab-gpu-{i}", "worker", HEAD_NUMBER + i, gpus, model) for i in range(1, workers + 1)),
    )


class Paths:
    """Where the parts of one lab are: files below its state folder, groups and namespaces by its id."""

    def __init__(self, state: Path) -> None:
        self.state = state.absolute()
        if set(str(self.state)) & set(':,"\\ \n'):
            raise InputError(
                f"{self.state}: a lab cannot live in a path with blanks, colons, commas or quotes"
            )
        self.id = hashlib.sha256(str(self.state.resolve()).encode()).hexdigest()[:8]
        self.hub = f"plab-{self.id}"
        self.key = self.state / "id_ed25519"
        self.known_hosts = self.state / "known_hosts"
        self.ssh_config = self.state / "ssh_config"
        self.sudo_password = self.state / "sudo-password"
        self.spec = self.state / "lab.json"
        self.log = self.state / "log"
        self.snapshots = self.state / "snapshots"
        root, self.hybrid = host.cgroup_root(Path("/proc/self/mountinfo").read_text())
        self.cgroup = root / self.hub
        self.proxy_cgroup = self.cgroup / "proxy"

    def node(self, name: str) -> Path:
        return self.state / "nodes" / name

    def namespace(self, name: str) -> str:
        return f"{self.hub}-{name}"

    def node_cgroup(self, name: str) -> Path:
        return self.cgroup / name

    def machine_cgroup(self, name: str) -> Path:
        """The processes of the node itself: ending them all is a power loss."""
        return self.cgroup / name / "machine"


def default_state() -> Path:
    """The state folder: PROVISION_LAB_DIR, else .lab in the checkout, else .lab in the current folder."""
    given = os.environ.get("PROVISION_LAB_DIR")
    if given:
        return Path(given)
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").exists() else Path.cwd()) / ".lab"


def default_cache() -> Path:
    """The cache that all labs of this machine share: PROVISION_CACHE_DIR, else /var/cache/gpu-provision."""
    return Path(os.environ.get("PROVISION_CACHE_DIR", "/var/cache/gpu-provision"))


def python_environment() -> dict[str, str]:
    """The environment in which `python -m provision...` finds this very package."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def load(paths: Paths) -> Spec | None:
    """The lab's spec; None when there is no lab. Raises LabError for a file that is not one."""
    try:
        return decode(json.loads(paths.spec.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        advice = "take the lab down with `provision lab down` and make it anew"
        raise LabError(f"{paths.spec}: not what `lab up` wrote ({error!r}): {advice}") from error


def save(paths: Paths, spec: Spec) -> None:
    """Remember what the lab should be."""
    write_json(paths.spec, asdict(spec))


def decode(data: dict[str, Any]) -> Spec:
    """The inverse of dataclasses.asdict followed by JSON."""
    nodes = tuple(Node(**{**node, "layers": tuple(node["layers"])}) for node in data["nodes"])
    return Spec(**{**data, "layers": tuple(data["layers"]), "nodes": nodes})


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write `data` whole or not at all."""
    write_file(path, json.dumps(data, indent=2) + "\n")


def write_file(path: Path, content: str | bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
    """Write a file whole or not at all; never readable by others on the way. Missing folders get mode 755."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        os.fchown(file.fileno(), *owner)
        os.fchmod(file.fileno(), mode)
    temporary.rename(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; waits for another one that holds it. Creates it when missing."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(descriptor), os.stat(folder))
            except FileNotFoundError:
                same = False
            if same:
                yield
                return
        finally:
            os.close(descriptor)
