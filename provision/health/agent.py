"""The agent on the node: reads, judges, remembers, writes metrics, and, where it may, acts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, Callable

from provision.health import decide, memory, metrics
from provision.health.catalogue import judge
from provision.health.decide import Decision
from provision.health.finding import FAIL, Finding
from provision.health.kubernetes import Settings as Kubernetes
from provision.health.limits import Limits, load
from provision.health.readings import Absent, Device
from provision.health.sources import Source, collect, machine, programs
from provision.health.sources.nvml import Nvml

CONFIG = Path("/etc/provision/health.json")
LIMITS = Path("/etc/provision/limits.json")
OFF = Path("/etc/provision/health.off")  # while it is there nothing is drained, resumed or mended
STATE = Path("/var/lib/provision/health")
QUICK_SECONDS, FULL_SECONDS = 10.0, 40.0  # Slurm ends its health check program after 60


@dataclass
class Config:
    """What the site says of this node; without a file everything is read and nothing is expected."""

    node: str
    expect: Mapping[str, Any]
    textfile: Path | None = None
    act: bool = False
    slurm: bool = False
    kubernetes: Kubernetes | None = None
    mounts: tuple[str, ...] = ("/",)

    @property
    def units(self) -> list[str]:
        found = [str(unit) for unit in self.expect.get("services", ())]
        return [*found, *({"nvidia-fabricmanager"} - set(found))]


class ConfigError(Exception):
    """The configuration cannot be read; the message names it."""


class BusyError(Exception):
    """Another agent on this node has held the state for longer than this one may wait."""


def configured(path: Path = CONFIG) -> Config:
    """The configuration at `path`. Raises ConfigError."""
    try:
        told = json.loads(path.read_text())
        return Config(
            node=told["node"],
            expect=told.get("expect", {}),
            textfile=Path(told["textfile"]) if told.get("textfile") else None,
            act=bool(told.get("act", False)),
            slurm=bool(told.get("slurm", False)),
            kubernetes=_kubernetes(told.get("kubernetes")),
            mounts=tuple(told.get("mounts", ["/"])),
        )
    except FileNotFoundError:
        return Config(socket.gethostname().partition(".")[0], {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a configuration: {error!r}; run `provision apply -c health`"
        ) from error


def _kubernetes(told: Any) -> Kubernetes | None:
    return Kubernetes(Path(told["kubeconfig"]), told["node"], told.get("taint")) if told else None


def cannot(path: Path = LIMITS) -> dict[str, str]:
    """What this node cannot do -> why, as whoever made it declared. Raises ConfigError."""
    try:
        return {str(each["what"]): str(each["reason"]) for each in json.loads(path.read_text())["limits"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a list of limits: {error!r}") from error


def kernel_messages(device: Path = Path("/dev/kmsg"), path: Path = LIMITS) -> Path:
    """Where kernel messages are: the device, or the file that stands for it where whoever made the node says so."""
    if not device.exists():
        try:
            return Path(json.loads(path.read_text())["kernel_messages"])
        except (OSError, ValueError, KeyError, TypeError):
            return device  # reading it says that it is not there
    return device


def sources(config: Config, *, full: bool, scheduler: bool) -> list[Source]:
    """All sources of a reading. scheduler: slurmctld may be asked (never by a prolog)."""
    gpus = bool(config.expect.get("gpus", 0)) or Path("/proc/driver/nvidia").exists()
    found: list[Source] = [
        machine.Machine(),
        machine.Pci(),
        machine.Clock(),
        machine.Filesystems(config.mounts),
        machine.Processes(),
        machine.Holders(),
        machine.Kernel(kernel_messages()),
        machine.Nvme(),
        machine.Libraries(gpus),
        machine.Network(),
        programs.Systemd(config.units),
    ]
    if gpus:
        found.append(Nvml(_pynvml, machine.about, full=full))
    if full:
        found += [programs.Bmc(), programs.Container(), programs.Cuda(gpus)]
    if scheduler and config.slurm:
        found.append(programs.Slurm(config.node))
    return found


def _pynvml() -> Any:
    import pynvml

    return pynvml


_NO_GPU = {name: Absent("no GPU is expected here, none answers") for name in Nvml.tells}


def read(config: Config, *, full: bool, scheduler: bool) -> Device:
    """Everything that can be read of this node now."""
    wanted = sources(config, full=full, scheduler=scheduler)
    node = collect(config.node, wanted, seconds=FULL_SECONDS if full else QUICK_SECONDS)
    told = {name for source in wanted for name in source.tells}
    if "nvml" not in told:
        node.values.update(_NO_GPU)
    if "slurm" not in told:
        node.values["slurm"] = Absent("no Slurm here" if not config.slurm else "not asked")
    node.values.setdefault("fabricmanager.version", Absent("told by its own words alone"))
    return node


@contextmanager
def remembered(directory: Path = STATE) -> Iterator[dict[str, Any]]:
    """The state within the block, kept afterwards; a second agent on the node waits no longer than it may.

    Raises OSError, BusyError. A state that cannot be understood is put aside and begun anew.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        _lock(lock)
        path = directory / "state.json"
        state = _loaded(path)
        yield state
        beside = path.with_suffix(".new")
        with open(beside, "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


def _lock(lock: Any) -> None:
    deadline = time.monotonic() + QUICK_SECONDS
    while True:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BusyError(f"{lock.name}: held by another agent for {QUICK_SECONDS:.0f} s") from None
            time.sleep(0.05)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        return memory.empty()
    except ValueError:
        os.replace(path, path.with_suffix(".broken"))
        return memory.empty()
    if not isinstance(state, dict) or state.get("version") != memory.VERSION:
        return memory.empty()
    return state


@dataclass
class Outcome:
    """One reading, judged."""

    node: Device
    findings: list[Finding]
    decision: Decision
    seconds: float


def examine(
    config: Config,
    state: dict[str, Any],
    *,
    full: bool = False,
    scheduler: bool = False,
    only: list[str] | None = None,
    reading: Callable[..., Device] = read,
) -> Outcome:
    """Read and judge this node; `state` is brought up to date."""
    began, now = time.monotonic(), time.time()
    limits: Limits = load({**config.expect, "cannot": cannot()})
    new, node = memory.complete(state, reading(config, full=full, scheduler=scheduler), limits, now)
    findings = judge(node, limits, quick=not full, only=only)
    slurm = node.get("slurm")
    told = slurm.get("reason") if slurm else None
    if state.get("refused") and told in ("Prolog error", "Epilog error"):
        told = decide.MARK  # what Slurm says of a node whose prolog or epilog this agent ended with a failure
    decision = decide.decide(findings, new["unreadable"], slurm.get("state", "") if slurm else "", told)
    new["unreadable"] = decision.unreadable
    new["asked"] = _asked(findings, node)
    new["history"] = list(state.get("history", []))[-200:]
    if only is None:  # a prolog looks at a part alone: what it says is no verdict of the node
        new["history"].append([round(now), decision.verdict, decision.reason])
    state.clear()
    state.update(new)
    return Outcome(node, findings, decision, time.monotonic() - began)


def _asked(findings: list[Finding], node: Device) -> list[str]:
    """ "device number" of XIDs that ask for a reset or more, so that a later boot knows what was tried."""
    grave = {finding.subject for finding in findings if finding.check == "xid" and finding.verdict == FAIL}
    return sorted(
        {
            f"{event.device} {event.number}"
            for event in node.get("kernel.events", ())
            if event.kind == "xid" and f"{node.subject} {event.device}" in grave
        }
    )


def schedulers(config: Config, state: Mapping[str, Any]) -> dict[str, bool]:
    """Scheduler -> whether it knows what was decided last."""
    named = {"slurm": config.slurm, "kubernetes": config.kubernetes is not None}
    return {name: name not in state.get("untold", {}) for name, here in named.items() if here}


def write_metrics(path: Path, outcome: Outcome, told: Mapping[str, bool]) -> None:
    """Replace the exporter's file, whole or not at all; told: of `schedulers`. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(metrics.text(outcome.node, outcome.findings, outcome.seconds, time.time(), told))
    beside.chmod(0o644)
    os.replace(beside, path)
