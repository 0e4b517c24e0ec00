"""What nvidia-smi says, of any driver: XML (-q -x), lists (-L), NVLinks (nvlink -s), topology (topo -m), versions.

A value that the GPU does not have ("N/A") is None. One that could not be read ("Unknown Error", "ERR!", "GPU is lost")
is an Unread, which holds what was said instead: no number, and never a healthy one.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unread:
    """Stands for a value that could not be read."""

    said: str

    def __str__(self) -> str:
        return f"not readable: {self.said}"


class SmiError(ValueError):
    """Not an answer of nvidia-smi; the message says why there is none, as far as it was told."""


@dataclass(frozen=True)
class Slice:
    """A part of a GPU (MIG device)."""

    index: int
    gpu_instance: int
    compute_instance: int
    memory: int | Unread | None  # MiB


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in MiB, power in W, temperature in degrees Celsius."""

    bus: str  # "0000:0b:00.0"
    product: str | Unread | None
    uuid: str | Unread | None
    serial: str | Unread | None
    minor: int | Unread | None
    vbios: str | Unread | None
    pci_id: int | Unread | None  # device id of vendor 10de
    persistence: bool | Unread | None
    mig: bool | Unread | None
    mig_pending: bool | Unread | None
    slices: tuple[Slice, ...]
    memory: int | Unread | None
    ecc: bool | Unread | None
    compute_mode: str | Unread | None
    pcie_generation: int | Unread | None
    pcie_generation_max: int | Unread | None
    pcie_width: int | Unread | None
    pcie_width_max: int | Unread | None
    power_limit: float | Unread | None
    power_default: float | Unread | None
    temperature: int | Unread | None
    fabric_state: str | Unread | None
    fabric_status: str | Unread | None
    remap_pending: bool | Unread | None
    recovery: str | Unread | None  # what the driver advises: "None", "Reset", "Reboot" ...


@dataclass(frozen=True)
class Smi:
    """What `nvidia-smi -q -x` says."""

    driver: str | None
    cuda: str | None
    gpus: tuple[Gpu, ...]


# Words that nvidia-smi prints instead of an answer -> what is wrong. The first that is found counts.
_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"couldn't communicate with the NVIDIA driver"), "the driver is not loaded"),
    (
        re.compile(r"Driver/library version mismatch"),
        "the loaded kernel module and the driver's library are of different versions",
    ),
    (
        re.compile(
            r"Unable to determine the device handle for (?:GPU\d+: ?)?(?:GPU)?"
            r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d): (.+)"
        ),
        "GPU {0} cannot be opened: {1}",
    ),
    (re.compile(r"No devices were found"), "the driver finds no GPU"),
    (re.compile(r"Failed to initialize NVML: (.+)"), "NVML does not start: {0}"),
    (re.compile(r"nvidia-smi: (?:command )?not found"), "nvidia-smi is not installed"),
)
_ERRORS = re.compile(
    r"\[?(Unknown Error|ERR!|GPU is lost.*|GPU requires reset.*|Insufficient Permissions)\]?"
)
_NONE = {"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "None of the above"}


def cause(said: str) -> str | None:
    """What is wrong, where nvidia-smi says so instead of answering; None where it does not."""
    for pattern, words in _CAUSES:
        found = pattern.search(said)
        if found:
            return words.format(*(group.strip() for group in found.groups()))
    return None


def parse_q(xml: str) -> Smi:
    """From `nvidia-smi -q -x`. Raises SmiError, with what was said instead."""
    start = xml.find("<nvidia_smi_log")
    if start < 0:
        raise SmiError(cause(xml) or f"not what nvidia-smi -q -x prints: {xml.strip()[:100]!r}")
    try:
        root = ElementTree.fromstring(xml[start:])
    except ElementTree.ParseError as error:
        raise SmiError(cause(xml) or f"nvidia-smi -q -x was cut or damaged: {error}") from error
    return Smi(
        root.findtext("driver_version"),
        root.findtext("cuda_version"),
        tuple(_gpu(each) for each in root.findall("gpu")),
    )


def _gpu(gpu: ElementTree.Element) -> Gpu:
    link = "pci/pci_gpu_link_info"
    return Gpu(
        bus=bus_address(gpu.get("id", "")),
        product=_value(gpu, str, "product_name"),
        uuid=_value(gpu, str, "uuid"),
        serial=_value(gpu, str, "serial"),
        minor=_value(gpu, int, "minor_number"),
        vbios=_value(gpu, str, "vbios_version"),
        pci_id=_value(gpu, _device, "pci/pci_device_id"),
        persistence=_value(gpu, _switch, "persistence_mode"),
        mig=_value(gpu, _switch, "mig_mode/current_mig"),
        mig_pending=_value(gpu, _switch, "mig_mode/pending_mig"),
        slices=tuple(_slice(each) for each in gpu.findall("mig_devices/mig_device")),
        memory=_value(gpu, _number, "fb_memory_usage/total"),
        ecc=_value(gpu, _switch, "ecc_mode/current_ecc"),
        compute_mode=_value(gpu, str, "compute_mode"),
        pcie_generation=_value(gpu, int, f"{link}/pcie_gen/current_link_gen"),
        pcie_generation_max=_value(gpu, int, f"{link}/pcie_gen/max_link_gen"),
        pcie_width=_value(gpu, _lanes, f"{link}/link_widths/current_link_width"),
        pcie_width_max=_value(gpu, _lanes, f"{link}/link_widths/max_link_width"),
        power_limit=_value(gpu, _decimal, *_power("current_power_limit", "power_limit")),
        power_default=_value(gpu, _decimal, *_power("default_power_limit")),
        temperature=_value(gpu, _number, "temperature/gpu_temp"),
        fabric_state=_value(gpu, str, "fabric/state"),
        fabric_status=_value(gpu, str, "fabric/status"),
        remap_pending=_value(gpu, _switch, "remapped_rows/remapped_row_pending"),
        recovery=_value(gpu, _word, "gpu_recovery_action"),
    )


def _slice(element: ElementTree.Element) -> Slice:
    numbers = (element.findtext(name, "-1") for name in ("index", "gpu_instance_id", "compute_instance_id"))
    try:
        index, gpu, compute = map(int, numbers)
    except ValueError as error:
        raise SmiError(f"a MIG device without its number: {error}") from error
    return Slice(index, gpu, compute, _value(element, _number, "fb_memory_usage/total"))


def _power(*names: str) -> tuple[str, ...]:
    """Where a power limit stands: under another name since driver 535."""
    return tuple(f"{group}/{name}" for group in ("gpu_power_readings", "power_readings") for name in names)


def _value(element: ElementTree.Element, read: Callable[[str], T], *paths: str) -> T | Unread | None:
    """The first of `paths` that is there."""
    text = next((found for path in paths if (found := element.findtext(path)) is not None), "").strip()
    error = _ERRORS.fullmatch(text)
    if error:
        return Unread(error[1])
    if text in _NONE and not (read is _word and text == "None"):
        return None
    try:
        return read(text)
    except ValueError:
        return Unread(text)


def _word(text: str) -> str:
    """A word of which "None" is one."""
    return text


def _number(text: str) -> int:
    return int(text.split()[0])


def _decimal(text: str) -> float:
    return float(text.split()[0])


def _lanes(text: str) -> int:
    return int(text.removesuffix("x"))


def _device(text: str) -> int:
    """ "233510DE" and "0x233510DE" are device 0x2335."""
    return int(text, 16) >> 16


def _switch(text: str) -> bool:
    if text in ("Enabled", "Yes", "1"):
        return True
    if text in ("Disabled", "No", "0"):
        return False
    raise ValueError(text)


def bus_address(text: str) -> str:
    """A PCI address as the kernel writes it: nvidia-smi's domain has eight digits, and capitals."""
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}".lower() if rest else text.lower()


# ---- lists


_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[0-9a-fA-F-]+)\)\s*")
_MIG_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-\S+)\)\s*")


@dataclass(frozen=True)
class Listed:
    """A GPU of `nvidia-smi -L`, with the kinds of its slices: ("3g.40gb", "1g.10gb", "1g.10gb")."""

    index: int
    product: str
    uuid: str
    slices: tuple[str, ...] = ()


def parse_list(text: str) -> list[Listed]:
    """From `nvidia-smi -L`. Raises SmiError."""
    found: list[Listed] = []
    for line in text.splitlines():
        gpu, part = _GPU_LINE.fullmatch(line), _MIG_LINE.fullmatch(line)
        if gpu:
            found.append(Listed(int(gpu[1]), gpu[2], gpu[3]))
        elif part and found:
            last = found[-1]
            found[-1] = Listed(last.index, last.product, last.uuid, (*last.slices, part[1]))
        elif line.strip():
            raise SmiError(cause(line) or f"not a line of nvidia-smi -L: {line.strip()!r}")
    return found


_LINK = re.compile(r"\s+Link (\d+): (?:([\d.]+) GB/s|<?in ?active>?)\s*", re.IGNORECASE)
_NO_LINKS = re.compile(r"does not have or support|not supported|Unable to retrieve NVLink", re.IGNORECASE)


def parse_nvlinks(text: str) -> dict[int, tuple[float | None, ...]]:
    """From `nvidia-smi nvlink -s`: GPU -> GB/s of each link, None for one that is inactive. Raises SmiError.

    A GPU without NVLink, or in MIG mode, has an empty tuple.
    """
    found: dict[int, tuple[float | None, ...]] = {}
    gpu = None
    for line in text.splitlines():
        begin, link = _GPU_LINE.fullmatch(line), _LINK.fullmatch(line)
        if begin:
            gpu = int(begin[1])
            found[gpu] = ()
        elif link and gpu is not None and int(link[1]) == len(found[gpu]):
            found[gpu] = (*found[gpu], float(link[2]) if link[2] else None)
        elif line.strip() and not (gpu is not None and _NO_LINKS.search(line)):
            raise SmiError(cause(line) or f"not a line of nvidia-smi nvlink -s: {line.strip()!r}")
    return found


# ---- topology

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|mlx\S+")


@dataclass(frozen=True)
class Topology:
    """How GPUs and NICs are connected: links["GPU0"]["NIC3"] is "PIX"; NIC names where the legend gives them."""

    links: Mapping[str, Mapping[str, str]]
    cpus: Mapping[str, str]  # "GPU0" -> "0-31"
    numa: Mapping[str, int | None]
    nics: Mapping[str, str]  # "NIC0" -> "mlx5_0"

    def nearest(self, gpu: str) -> list[str]:
        """The NICs that a GPU reaches by the fewest steps."""
        order = ("PIX", "PXB", "PHB", "NODE", "SYS")
        reached = {name: kind for name, kind in self.links[gpu].items() if not name.startswith("GPU")}
        best = min((order.index(kind) for kind in reached.values() if kind in order), default=None)
        return [self.nics.get(name, name) for name, kind in reached.items() if order[best or 0] == kind]


def parse_topology(text: str) -> Topology:
    """From `nvidia-smi topo -m`, with its terminal escapes, of any driver. Raises SmiError."""
    lines = _ESCAPE.sub("", text).splitlines()
    start = next((number for number, line in enumerate(lines) if line.split()[:1] == ["GPU0"]), None)
    if start is None:
        raise SmiError(cause(text) or f"not what nvidia-smi topo -m prints: {text.strip()[:80]!r}")
    header = _cells(lines[start])
    devices = [cell for cell in header if _DEVICE.fullmatch(cell)]
    links, cpus, numa = {}, {}, {}
    for line in lines[start + 1 :]:
        name, *cells = _cells(line) or [""]
        if not _DEVICE.fullmatch(name):
            break
        if len(cells) < len(devices):
            raise SmiError(f"nvidia-smi topo -m: {name} has {len(cells)} of {len(devices)} columns")
        links[name] = {other: cell for other, cell in zip(devices, cells, strict=False) if cell != "X"}
        more = cells[len(devices) :]
        if more and more[0] != "N/A":
            cpus[name] = more[0]
        if name.startswith("GPU"):
            numa[name] = int(more[1]) if len(more) > 1 and more[1].isdigit() else None
    nics = dict(re.findall(r"^\s+(NIC\d+): (\S+)$", "\n".join(lines), re.MULTILINE))
    return Topology(links, cpus, numa, nics)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"\t+|\s{2,}", line.strip())]


def parse_version(text: str) -> dict[str, str]:
    """From `nvidia-smi --version`: "driver", "nvml", "cuda", "nvidia-smi"; other names since 610. Raises SmiError."""
    names = {"driver version": "driver", "kmd version": "driver", "nvml version": "nvml"}
    names |= {"cuda version": "cuda", "cuda umd version": "cuda", "nvidia-smi version": "nvidia-smi"}
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        name = names.get(key.lower())
        if name and re.fullmatch(r"[\d.]+", value):
            found[name] = value
    if "driver" not in found:
        raise SmiError(cause(text) or f"not what nvidia-smi --version prints: {text.strip()[:80]!r}")
    return found
