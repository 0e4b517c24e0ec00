"""The first look at a node: what it is, whether it can be provisioned, and whether somebody else is at it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from provision.engine import limits
from provision.engine.remote import Output, RootShell
from provision.hardware import machine, pci
from provision.profiles import Distribution, UnsupportedDistribution, of_os_release
from provision.profiles.gpu import gpu_model
from provision.site.models import Hardware, Node

LOCK = "/run/provision.lock"
SAME_MEMORY = 0.01  # less than what Slurm keeps in reserve by itself
MANIFEST = "/var/lib/provision/manifest.json"
_READ_MANIFEST = f"""if [ -e {MANIFEST} ]; then cat {MANIFEST}; else echo '{{"components": {{}}}}'; fi"""
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
_HARDWARE = "LC_ALL=C lscpu; grep MemTotal: /proc/meminfo"
_FIRST = "[ -d /run/systemd/system ] || cat /proc/1/comm"  # process 1, where that is not systemd


@dataclass(frozen=True)
class Facts:
    """What every node is asked before anything else."""

    profile: Distribution
    limits: Mapping[str, str]
    hardware: Hardware
    gpus: (
        Mapping[str, int] | str
    )  # model -> how many, as the PCI bus shows them; or why they could not be seen
    manifest: Mapping[str, Mapping[str, list[str]]]  # component -> {"files": [...], "units": [...]}
    first: str | None = None  # the name of process 1, where that is not systemd


class PreflightError(Exception):
    """A node that cannot be provisioned, with the reason."""

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice


def take_lock(shell: RootShell, holder: str, run: str) -> None:
    """Hold this node for as long as the session lives. Raises PreflightError naming who has it.

    The kernel releases it when the session's shell is gone: a controller that died leaves a node locked only until
    the command that was running ends.
    """
    holding = shell.hold_lock(LOCK, f"{holder}, run {run}")
    if holding is not None:
        raise PreflightError(
            f"{shell.name} is being provisioned by {holding or 'another run'}",
            "wait for that run to end; if it was killed, it may still be ending here: try again in a minute",
        )


def look(shell: RootShell) -> Facts:
    """Read the facts. Raises PreflightError or RemoteError."""
    release, limited, hardware, functions, manifest, first = shell.run_many(
        [
            "cat /etc/os-release",
            limits.command(),
            _HARDWARE,
            pci.QUERY,
            _READ_MANIFEST,
            _FIRST,
        ]
    )
    for output, what in (
        (release, "/etc/os-release"),
        (limited, limits.PATH),
        (hardware, "lscpu, /proc/meminfo"),
        (manifest, MANIFEST),
        (first, "/proc/1/comm"),
    ):
        if not output.ok:
            raise PreflightError(f"{shell.name}: cannot read {what}: {output.stderr.strip()}")
    try:
        profile = of_os_release(release.stdout)
        known = limits.parse(limited.stdout)
    except (UnsupportedDistribution, limits.LimitsError) as error:
        raise PreflightError(f"{shell.name}: {error}") from error
    return Facts(
        profile,
        known,
        parse_hardware(hardware.stdout),
        parse_gpus(functions),
        parse_manifest(manifest.stdout),
        first.stdout.strip() or None,
    )


def as_planned(facts: Facts) -> Facts:
    """What a plan can go by: without systemd nothing is known of units, and the rest is shown all the same."""
    if facts.first is None:
        return facts
    return replace(facts, limits={**facts.limits, "unit:*": f"systemd does not run here, but {facts.first}"})


def require_systemd(name: str, facts: Facts) -> None:
    """Raises PreflightError where services cannot be managed: nothing has been changed by then."""
    if facts.first is not None:
        raise PreflightError(
            f"{name}: process 1 is {facts.first}, not systemd: services cannot be managed",
            "a plan shows what would be done; to do it, boot the node with systemd",
        )


def parse_hardware(text: str) -> Hardware:
    """From `lscpu` and the MemTotal line. Raises PreflightError when a number is missing."""
    try:
        found = machine.parse_cpus(text)
    except ValueError as error:
        raise PreflightError(str(error)) from error
    return Hardware(sockets=found.sockets, cores=found.cores, threads=found.threads, memory=found.memory)


def parse_gpus(functions: Output) -> dict[str, int] | str:
    """From the answer to pci.QUERY: how many of each model, or why that cannot be told."""
    if not functions.ok:
        return functions.stderr.strip() or f"exit {functions.rc}"
    try:
        return dict(Counter(pci.gpu_model_name(each) for each in pci.parse(functions.stdout) if each.is_gpu))
    except ValueError as error:
        return str(error)


def contradictions(node: Node, known: Hardware | None, facts: Facts) -> list[str]:
    """Where a node is not what site file and lock (`known`) say; files are written from these all the same."""
    found = []
    if known is not None and not _alike(known, facts.hardware):
        found.append(f"hardware is {facts.hardware.model_dump()}, site file or lock say {known.model_dump()}")
    wanted = {node.gpu.model: node.gpu.count} if node.gpu else {}
    if isinstance(facts.gpus, str):
        if wanted:
            found.append(f"its GPUs cannot be seen on the PCI bus: {facts.gpus}")
    elif dict(facts.gpus) != wanted and not _may_be(wanted, facts.gpus):
        found.append(f"GPUs are {_counted(facts.gpus)}, the site file says {_counted(wanted)}")
    return found


def _alike(known: Hardware, seen: Hardware) -> bool:
    """The same CPUs, and as much memory but for what kernels keep for themselves, never the same."""
    same_cpus = seen.model_copy(update={"memory": known.memory}) == known
    return same_cpus and abs(seen.memory - known.memory) <= SAME_MEMORY * known.memory


def _may_be(wanted: Mapping[str, int], seen: Mapping[str, int]) -> bool:
    """Whether what is there may be a model that has no profile: as many GPUs, of one kind that has none either."""
    strange = [name for name in (*wanted, *seen) if gpu_model(name) is None]
    return len(strange) == len(wanted) + len(seen) == 2 and [*wanted.values()] == [*seen.values()]


def _counted(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {model}" for model, count in gpus.items()) or "none"


def parse_manifest(text: str) -> dict[str, dict[str, list[str]]]:
    """What earlier runs made on this node. Raises PreflightError when damaged, as an empty one is."""
    try:
        document = json.loads(text)["components"]
        return {
            name: {"files": list(own["files"]), "units": list(own["units"])} for name, own in document.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(f"{MANIFEST} is damaged ({error}): move it away and apply again") from error
