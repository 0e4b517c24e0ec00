"""From a site and what its machines have: lines for the site file, and what is unlike its group. Pure.

Most nodes of a group are taken for what the group is: a node that has less is not described, but told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from provision.hardware.machine import Machine
from provision.hardware.pci import gpu_model_name
from provision.hardware.smi import Topology
from provision.report.model import Finding, Verdict
from provision.site.hostlist import fold
from provision.site.models import Site

T = TypeVar("T")
SAME_MEMORY = 0.03  # of memory: kernels keep a little for themselves, never the same
FABRIC_RATE = 100  # Gbit/s: slower ports are no rails of a fabric


@dataclass(frozen=True)
class Proposal:
    """A key of the site file with the value that the machines have; `now` is what stands there."""

    key: tuple[str, ...]
    value: Mapping[str, Any]
    now: Mapping[str, Any] | None
    machines: tuple[str, ...]  # that were read for it

    def finding(self, *, accepted: bool) -> Finding:
        """What the machines have and what the file says, or said before it was `accepted`."""
        return Finding(
            verdict=Verdict.PASS if accepted else Verdict.WARN,
            check="site-file-differs" if self.now else "site-file-lacks",
            subject=".".join(self.key),
            read=f"{flow(self.value)} on {fold(self.machines)}",
            expected=flow(self.now) if self.now else None,
            action=None if accepted else "`provision discover SITE --accept` writes it into the site file",
        )


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    text = str(value)
    return f'"{text}"' if set(text) & set(",:{}[]# ") else text


def proposals(site: Site, machines: Mapping[str, Machine]) -> list[Proposal]:
    """What the site file should say and does not."""
    found: list[Proposal] = []
    for name, group in site.file.groups.items():
        members = {node.name: machines[node.name] for node in site.in_group(name) if node.name in machines}
        names = tuple(members)
        for key, value in (("gpu", _gpu(members)), ("hardware", _hardware(members))):
            said = getattr(group, key)
            now = said.model_dump(exclude_unset=True) if said else None
            if value and not _says(now, value):
                found.append(Proposal(("groups", name, key), value, now, names))
    fabric = _fabric(machines)
    if fabric:
        said = site.file.networks.fabric
        now = said.model_dump(exclude_unset=True) if said else None
        if not _says(now, fabric):
            found.append(Proposal(("networks", "fabric"), fabric, now, tuple(machines)))
    return found


def _says(now: Mapping[str, Any] | None, value: Mapping[str, Any]) -> bool:
    """Whether the site file says it already. Less memory than there is may be meant so; cores may be left out."""
    if now is None:
        return False
    same = {key: now.get(key) for key in value if key not in ("memory", "cores")}
    if same != {key: each for key, each in value.items() if key in same}:
        return False
    if isinstance(value.get("cores"), list) and now.get("cores", value["cores"]) != value["cores"]:
        return False
    if isinstance(value.get("cores"), int) and now.get("cores") != value["cores"]:
        return False
    return (
        "memory" not in value or 0 <= value["memory"] - now.get("memory", 0) <= SAME_MEMORY * value["memory"]
    )


def _usual(values: Sequence[T]) -> T | None:
    """What most have; of as many each, what comes first."""
    return Counter(values).most_common(1)[0][0] if values else None


def _gpu(members: Mapping[str, Machine]) -> dict[str, Any] | None:
    """Model and number of most machines, and the cores next to their GPUs where that is more than one NUMA node."""
    seen = {name: _gpus(machine) for name, machine in members.items() if "functions" not in machine.unread}
    model = _usual(list(seen.values()))
    if not model or len(set(model)) != 1:
        return None  # none, or several models: nothing that `gpu` can say
    value: dict[str, Any] = {"model": model[0], "count": len(model)}
    near = _usual([cores_near(members[name]) for name, gpus in seen.items() if gpus == model])
    return {**value, "cores": list(near)} if near else value


def _gpus(machine: Machine) -> tuple[str, ...]:
    return tuple(gpu_model_name(gpu) for gpu in machine.gpus)


def cores_near(machine: Machine) -> tuple[str, ...]:
    """The cores next to equal shares of the GPUs, as Slurm counts cores; nothing where all are equally near.

    Kernels number the first threads of all cores first, so a core's number is that of its first CPU.
    """
    nodes = [gpu.numa for gpu in machine.gpus]
    order = sorted(set(nodes), key=nodes.index)
    if machine.cpus is None or len(order) < 2 or None in order or len(nodes) % len(order):
        return ()
    share = len(nodes) // len(order)
    if nodes != [node for node in order for _ in range(share)]:
        return ()
    cores = machine.cpus.sockets * machine.cpus.cores
    ranges = {node.number: _below(node.cpus, cores) for node in machine.numa}
    near = tuple(ranges.get(node or 0, "") for node in order)
    return near if all(near) else ()


def _below(cpus: str, cores: int) -> str:
    """The ranges of a CPU list that lie below `cores`: "0-31,64-95" with 64 cores is "0-31"."""
    kept = []
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and int(first) < cores:
            end = min(int(last or first), cores - 1)
            kept.append(first if end == int(first) else f"{first}-{end}")
    return ",".join(kept)


def _hardware(members: Mapping[str, Machine]) -> dict[str, Any] | None:
    """CPUs of most machines, and the least memory of those that have as much as most."""
    read = [machine.cpus for machine in members.values() if machine.cpus]
    shape = _usual([(cpus.sockets, cpus.cores, cpus.threads) for cpus in read])
    if shape is None:
        return None
    usual = median(cpus.memory for cpus in read)
    least = min((cpus.memory for cpus in read if _near(cpus.memory, usual)), default=int(usual))
    return dict(zip(("sockets", "cores", "threads", "memory"), (*shape, least), strict=True))


def _near(memory: int, usual: float) -> bool:
    return abs(memory - usual) <= SAME_MEMORY * usual


def _fabric(machines: Mapping[str, Machine]) -> dict[str, Any] | None:
    """The fast ports of most machines that have GPUs."""
    seen = [rails for machine in machines.values() if machine.gpus and (rails := _rails(machine))]
    usual = _usual(seen)
    return {"kind": usual[0], "rails": usual[1]} if usual else None


def _rails(machine: Machine) -> tuple[str, int] | None:
    fast = [port for port in machine.adapters if port.up and (port.rate or 0) >= FABRIC_RATE]
    layer = _usual([port.layer for port in fast])
    if layer is None:
        return None
    kind = "infiniband" if layer == "InfiniBand" else "roce"
    return kind, sum(port.layer == layer for port in fast)


# ---- machines unlike their group


def unlike(site: Site, machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Machines that have something else than most of their group, and what could not be read."""
    for name in site.file.groups:
        members = {node.name: machines[node.name] for node in site.in_group(name) if node.name in machines}
        for what, values in _compared(members):
            usual = _usual(list(values.values()))
            for node, value in values.items():
                if value != usual:
                    yield Finding(
                        verdict=Verdict.WARN,
                        check="machine-unlike-group",
                        subject=node,
                        read=f"{what} {value}",
                        expected=f"{usual}, as most of group {name}",
                        action="is something broken, missing or set differently? otherwise make a group of its own",
                    )
    for node, machine in machines.items():
        for part, why in machine.unread.items():
            yield Finding(verdict=Verdict.UNKNOWN, check="machine-read", subject=node, read=part, why=why)


def _compared(members: Mapping[str, Machine]) -> Iterator[tuple[str, dict[str, str]]]:
    read = {name: machine for name, machine in members.items() if "functions" not in machine.unread}
    gpus = {name: counted(_gpus(machine)) for name, machine in read.items()}
    yield "GPUs", gpus
    alike = {name: members[name] for name, each in gpus.items() if each == _usual(list(gpus.values()))}
    links = {name: machine.nvlinks for name, machine in alike.items() if machine.nvlinks}
    yield "NVLinks", {name: _links_up(each) for name, each in links.items()}
    maps = {name: machine.topology for name, machine in alike.items() if machine.topology}
    yield "topology", {name: _connections(each) for name, each in maps.items()}
    yield "NVSwitches", {name: str(sum(f.is_nvswitch for f in each.functions)) for name, each in read.items()}
    cpus = {name: machine.cpus for name, machine in members.items() if machine.cpus}
    yield "CPUs", {name: f"{each.sockets} x {each.cores} x {each.threads}" for name, each in cpus.items()}
    usual = median(each.memory for each in cpus.values()) if cpus else 0
    yield (
        "memory",
        {
            name: f"{int(usual) if _near(each.memory, usual) else each.memory} MiB"
            for name, each in cpus.items()
        },
    )
    ports = {name: machine for name, machine in members.items() if "ports" not in machine.unread}
    yield "adapters", {name: counted(_ports(machine)) for name, machine in ports.items()}
    boards = {name: machine.board for name, machine in members.items() if machine.board}
    yield "firmware", {name: str(board.firmware) for name, board in boards.items()}


def _links_up(links: Mapping[int, Sequence[float | None]]) -> str:
    """ "18 up" where that is so for every GPU, else each of them: "18, 17 up"."""
    up = [sum(speed is not None for speed in each) for _gpu, each in sorted(links.items())]
    return f"{', '.join(map(str, up if len(set(up)) > 1 else up[:1]))} up"


def _connections(topology: Topology) -> str:
    """How many pairs are connected in which way: "NV18: 28, PIX: 8, SYS: 32"."""
    pairs = {
        (*sorted((one, other)), kind) for one, row in topology.links.items() for other, kind in row.items()
    }
    return ", ".join(
        f"{kind}: {count}" for kind, count in sorted(Counter(kind for *_, kind in pairs).items())
    )


def _ports(machine: Machine) -> list[str]:
    return [
        f"{port.layer} {port.rate or 0:g} Gbit/s {port.state.lower()} (firmware {port.firmware})"
        for port in machine.adapters
    ]


def counted(values: Sequence[str]) -> str:
    """ "8 x h100-sxm", "none"."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).items()) or "none"
