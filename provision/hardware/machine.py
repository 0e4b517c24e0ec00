"""All facts of a machine's hardware: what to ask it, and what the answers say. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from provision.hardware import pci, rdma, smi


class Answer(Protocol):
    """What a command said, as provision.engine.remote.Output has it."""

    @property
    def rc(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


@dataclass(frozen=True)
class Numa:
    """A NUMA node: its CPUs as the kernel lists them, its memory in MiB."""

    number: int
    cpus: str
    memory: int


@dataclass(frozen=True)
class Disk:
    """A disk; `size` in bytes."""

    name: str
    size: int
    model: str | None
    serial: str | None
    rotates: bool
    transport: str | None  # "nvme", "sata" ...


@dataclass(frozen=True)
class Cpus:
    model: str | None
    sockets: int
    cores: int  # per socket
    threads: int  # per core
    memory: int  # MiB


@dataclass(frozen=True)
class Board:
    """Maker, product, serial number and firmware of the machine; None for what it does not tell."""

    maker: str | None
    product: str | None
    serial: str | None
    firmware: str | None


@dataclass(frozen=True)
class Machine:
    """One machine. What could not be read is not here but in `unread`, with the reason."""

    cpus: Cpus | None = None
    numa: tuple[Numa, ...] = ()
    functions: tuple[pci.Function, ...] = ()
    ports: tuple[rdma.Port, ...] = ()
    disks: tuple[Disk, ...] = ()
    board: Board | None = None
    driver: smi.Smi | None = None  # None: there is none yet, or it does not answer
    listed: tuple[smi.Listed, ...] = ()  # GPUs with their MIG slices, as the driver counts them
    nvlinks: Mapping[int, tuple[float | None, ...]] = field(
        default_factory=dict
    )  # GPU -> GB/s; None: inactive
    topology: smi.Topology | None = None
    unread: Mapping[str, str] = field(default_factory=dict)  # part -> why

    @property
    def gpus(self) -> list[pci.Function]:
        """In the order of their addresses, which is that of the driver."""
        return sorted((f for f in self.functions if f.is_gpu), key=lambda f: f.address)

    @property
    def adapters(self) -> list[rdma.Port]:
        """The ports that lead out of the machine: those of its NVSwitches do not."""
        return [port for port in self.ports if not port.nvswitch]


_BOARD = r"""cd /sys/class/dmi/id 2>/dev/null || exit 0
for f in sys_vendor product_name product_serial bios_version; do
  v=; [ ! -r $f ] || read -r v <$f; printf '%s=%s\n' $f "$v"
done"""
_NUMA = r"""cd /sys/devices/system/node || exit 1
for n in node[0-9]*; do
  m=$(sed -n 's/.*MemTotal: *\([0-9]*\) kB/\1/p' $n/meminfo) || exit 1
  printf '%s|%s|%s\n' "${n#node}" "$(cat $n/cpulist)" "$m"
done"""
_SMI = "command -v nvidia-smi >/dev/null || exit 127; timeout 60 nvidia-smi {}"


def parse_cpus(text: str) -> Cpus:
    """From `lscpu` and the MemTotal line of /proc/meminfo. Raises ValueError when a number is missing."""
    values = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    try:
        sockets, cores, threads = (
            int(values[key]) for key in ("Socket(s)", "Core(s) per socket", "Thread(s) per core")
        )
        memory = int(values["MemTotal"].split()[0]) // 1024
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"lscpu and /proc/meminfo do not tell the hardware: {error}") from error
    return Cpus(values.get("Model name"), max(sockets, 1), cores, threads, memory)


def parse_numa(text: str) -> tuple[Numa, ...]:
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"(\d+)\|([\d,-]*)\|(\d+)", line)
        if match is None:
            raise ValueError(f"not a NUMA node: {line!r}")
        found.append(Numa(int(match[1]), match[2], int(match[3]) // 1024))
    return tuple(sorted(found, key=lambda node: node.number))


def parse_disks(text: str) -> tuple[Disk, ...]:
    """From `lsblk -J -b -d`. Raises ValueError for anything else."""
    try:
        listed: list[dict[str, Any]] = json.loads(text)["blockdevices"]
        return tuple(
            Disk(
                str(each["name"]),
                int(each["size"]),
                _said(each.get("model")),
                _said(each.get("serial")),
                each.get("rota") in (True, "1"),
                _said(each.get("tran")),
            )
            for each in listed
            if each.get("type") == "disk" and int(each["size"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not what lsblk -J prints: {error!r}") from error


def parse_board(text: str) -> Board | None:
    """None on a machine without DMI (a container has none of its own)."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    names = ("sys_vendor", "product_name", "product_serial", "bios_version")
    return Board(*(_said(values.get(name)) for name in names)) if values else None


def _said(value: object) -> str | None:
    text = str(value or "").strip()
    return text or None


@dataclass(frozen=True)
class Question:
    """A part of the facts: the shell text that asks for it, and what reads the answer (raises ValueError)."""

    part: str
    command: str
    read: Callable[[str], Any]
    of_driver: bool = False  # exit status 127: there is no driver yet, and nothing to read


QUESTIONS = (
    Question("cpus", "LC_ALL=C lscpu && grep MemTotal: /proc/meminfo", parse_cpus),
    Question("numa", _NUMA, parse_numa),
    Question("functions", pci.QUERY, lambda text: tuple(pci.parse(text))),
    Question("ports", rdma.QUERY, lambda text: tuple(rdma.parse(text))),
    Question("disks", "lsblk -J -b -d -o NAME,SIZE,MODEL,SERIAL,ROTA,TYPE,TRAN", parse_disks),
    Question("board", _BOARD, parse_board),
    Question("driver", _SMI.format("-q -x"), smi.parse_q, of_driver=True),
    Question("listed", _SMI.format("-L"), lambda text: tuple(smi.parse_list(text)), of_driver=True),
    Question("nvlinks", _SMI.format("nvlink -s"), smi.parse_nvlinks, of_driver=True),
    Question("topology", _SMI.format("topo -m"), smi.parse_topology, of_driver=True),
)


def machine(answers: Sequence[Answer]) -> Machine:
    """The facts in the answers to QUESTIONS, in their order."""
    parts: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for question, answer in zip(QUESTIONS, answers, strict=True):
        if question.of_driver and (answer.rc == 127 or "driver" in unread):
            continue  # what keeps it from answering is told once
        if answer.rc != 0:
            told = answer.stderr.strip() or answer.stdout.strip()
            unread[question.part] = smi.cause(told) or (told.splitlines() or [f"exit {answer.rc}"])[-1]
            continue
        try:
            parts[question.part] = question.read(answer.stdout)
        except ValueError as error:
            unread[question.part] = str(error)
    return Machine(**parts, unread=unread)
