"""The machine by procfs and sysfs: CPUs, memory, PCI, disks, clock, processes. No child process."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any

from provision.health.kernel import events, parse
from provision.health.readings import Absent, Device, Unread
from provision.health.sources import Source

NVIDIA = "0x10de"
_MOST_PARTS = 20_000  # reads of kernel messages: no buffer holds more records


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _number(path: Path) -> Any:
    """A counter file; one that holds no number ("N/A (no PMA)") is one value that cannot be read."""
    try:
        text = _read(path)
    except OSError as error:
        return Unread(f"{path}: {error.strerror}")
    return int(text) if re.fullmatch(r"-?\d+", text) else Unread(f"{path}: {text!r} is no number")


def ranges(text: str) -> int:
    """How many a list such as "0-3,8" has."""
    total = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip():
            total += int(last or first) - int(first) + 1
    return total


class Pci(Source):
    """GPUs and NVSwitches on the bus, bridges that redirect, PCIe errors."""

    name = "sysfs"
    tells = ("pci.gpus", "nvswitches", "bridges", "iommu", "virtual", "aer", "devices")

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self) -> dict[str, Any]:
        functions = sorted((self.root / "sys/bus/pci/devices").iterdir())
        gpus, switches, bridges, errors = [], 0, [], []
        for path in functions:
            kind = _read(path / "class")
            vendor = _read(path / "vendor")
            if vendor == NVIDIA and kind.startswith("0x03"):
                gpus.append(path.name)
            switches += vendor == NVIDIA and kind.startswith("0x0680")
            if kind.startswith("0x0604"):
                bridges.append(Device(path.name, {"acs.redirect": _redirects(path)}, "sysfs"))
            if kind.startswith(("0x03", "0x02", "0x0604")) and (path / "aer_dev_fatal").exists():
                errors.append(
                    Device(
                        path.name, {"aer.fatal": _aer(path, "fatal"), "aer.nonfatal": _aer(path, "nonfatal")}
                    )
                )
        return {
            "pci.gpus": gpus,
            "nvswitches": switches
            or len(list((self.root / "proc/driver/nvidia-nvswitch/devices").glob("*"))),
            "bridges": bridges,
            "iommu": _iommu(self.root),
            "virtual": _virtual(self.root),
            "aer": errors,
            "devices": len([p for p in (self.root / "dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]),
        }


def _aer(path: Path, kind: str) -> Any:
    """The total in a file of lines such as "Surprise Down 0", the last "TOTAL_ERR_FATAL 0"."""
    match = re.search(r"TOTAL_ERR_\w+ (\d+)", _read(path / f"aer_dev_{kind}"))
    return int(match[1]) if match else Unread(f"{path}/aer_dev_{kind}: no total")


def _redirects(path: Path) -> bool | None:
    """Whether a bridge's ACS control redirects requests; None where it has no ACS. Only root reads so far."""
    space = (path / "config").read_bytes()
    offset = 0x100
    for _ in range(64):
        if offset + 8 > len(space):
            return None
        header = struct.unpack_from("<I", space, offset)[0]
        if header & 0xFFFF == 0x0D:
            return bool(struct.unpack_from("<H", space, offset + 6)[0] & 0x04)
        offset = header >> 20
        if offset < 0x100:
            return None
    return None


def _iommu(root: Path) -> str:
    groups = list((root / "sys/kernel/iommu_groups").glob("[0-9]*"))
    if not groups:
        return "off"
    kinds = {_read(group / "type") for group in groups if (group / "type").exists()}
    return "passthrough" if kinds <= {"identity"} else "translating"


def _virtual(root: Path) -> str | None:
    """The hypervisor's name; None on bare metal."""
    if "hypervisor" not in (root / "proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]:
        return None
    path = root / "sys/class/dmi/id/sys_vendor"
    return _read(path) if path.exists() else "a hypervisor"


class Machine(Source):
    """CPUs, memory, swap, NUMA, modules, memory errors, crash records, own name."""

    name = "procfs"
    tells = (
        "cpus",
        "memory.total",
        "memory.available",
        "swap.total",
        "shm.used",
        "numa.nodes",
        "governors",
        "modules",
        "module.version",
        "module.license",
        "dmabuf",
        "edac",
        "pstore",
        "own_name",
        "boot",
    )

    def __init__(self, root: Path = Path("/"), resolve: Any = None) -> None:
        self.root = root
        self._resolve = resolve or (lambda: socket.gethostbyname(socket.gethostname()))

    def read(self) -> dict[str, Any]:
        return {name: tried(read, self) for name, read in _MACHINE.items()}

    def resolved(self) -> str:
        """The address that the node's own name means; nothing where it means none."""
        try:
            return str(self._resolve())
        except OSError:
            return ""


def tried(read: Callable[[Machine], Any], it: Machine) -> Any:
    """What `read` gives, or why it gives nothing: one file that is missing takes no other value with it."""
    try:
        return read(it)
    except OSError as error:
        return Unread(f"{error.filename or 'procfs'}: {error.strerror or error}")
    except (ValueError, KeyError) as error:
        return Unread(f"not of the form that is known: {error!r}")


def _memory(root: Path, name: str) -> int:
    """A line of /proc/meminfo in MiB."""
    lines = dict(re.findall(r"^(\w+):\s+(\d+)", (root / "proc/meminfo").read_text(), re.MULTILINE))
    return int(lines[name]) >> 10


def _governors(root: Path) -> list[str]:
    return sorted(
        {_read(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")}
    )


def _version(root: Path) -> Any:
    path = root / "sys/module/nvidia/version"
    return _read(path) if path.exists() else Absent("the nvidia module is not loaded")


def _edac(root: Path) -> list[Device]:
    return [
        Device(path.name, {"ue": _number(path / "ue_count"), "ce": _number(path / "ce_count")}, "EDAC")
        for path in sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
    ]


_MACHINE: dict[str, Callable[[Machine], Any]] = {
    "cpus": lambda it: ranges(_read(it.root / "sys/devices/system/cpu/online")),
    "memory.total": lambda it: _memory(it.root, "MemTotal"),
    "memory.available": lambda it: _memory(it.root, "MemAvailable"),
    "swap.total": lambda it: _memory(it.root, "SwapTotal"),
    "shm.used": lambda it: _memory(it.root, "Shmem"),
    "numa.nodes": lambda it: len(list((it.root / "sys/devices/system/node").glob("node[0-9]*"))),
    "governors": lambda it: _governors(it.root),
    "modules": lambda it: [line.split()[0] for line in (it.root / "proc/modules").read_text().splitlines()],
    "module.version": lambda it: _version(it.root),
    "module.license": lambda it: _module_license(it.root),
    "dmabuf": lambda it: "GPL" in (_module_license(it.root) or ""),
    "edac": lambda it: _edac(it.root),
    "pstore": lambda it: sorted(path.name for path in (it.root / "sys/fs/pstore").glob("dmesg-*")),
    "own_name": lambda it: it.resolved(),
    "boot": lambda it: _read(it.root / "proc/sys/kernel/random/boot_id"),
}


def _module_license(root: Path) -> str | None:
    """The driver's flavour as its own words tell it: "Dual MIT/GPL" of the open modules; None where none is loaded."""
    path = root / "proc/driver/nvidia/version"
    if not path.exists():
        return None
    return "Dual MIT/GPL" if "Open Kernel Module" in path.read_text(errors="replace") else "NVIDIA"


class Clock(Source):
    """Whether the kernel's clock is disciplined, by adjtimex."""

    name = "adjtimex"
    tells = ("clock.synchronised", "clock.offset_ms", "clocksource")

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self) -> dict[str, Any]:
        # struct timex: modes, then offset, freq, maxerror, esterror (longs), status
        buffer = ctypes.create_string_buffer(256)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.adjtimex(buffer) < 0:
            raise OSError(ctypes.get_errno(), "adjtimex")
        _, offset, _, worst, _, status = struct.unpack_from("@illlli", buffer)
        nanoseconds = status & 0x2000
        return {
            "clock.synchronised": not status & 0x40 and worst < 16_000_000,
            "clock.offset_ms": offset / (1e6 if nanoseconds else 1e3),
            "clocksource": _read(
                self.root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
            ),
        }


class Filesystems(Source):
    """The file systems that the site names (and the root), each written to where it should be writable."""

    name = "mountinfo"
    tells = ("filesystems",)

    def __init__(self, expected: Sequence[str] = ("/",), root: Path = Path("/")) -> None:
        self.expected = expected
        self.root = root

    def read(self) -> dict[str, Any]:
        mounts: dict[str, list[str]] = {}
        for line in (self.root / "proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            mounts[words[4].replace("\\040", " ")] = [words[5], words[words.index("-") + 3]]
        return {"filesystems": [self._one(path, mounts) for path in self.expected]}

    def _one(self, path: str, mounts: Mapping[str, Sequence[str]]) -> Device:
        if path not in mounts:
            return Device(path, {"mounted": False}, "mountinfo")
        options = set(",".join(mounts[path]).split(","))
        values: dict[str, Any] = {"mounted": True, "read_only": "ro" in options}
        try:
            state = os.statvfs(path)
            values["used"] = 1 - state.f_bavail / state.f_blocks if state.f_blocks else 0.0
            values["inodes"] = 1 - state.f_favail / state.f_files if state.f_files else 0.0
        except OSError as error:
            values["used"] = Unread(f"{path}: {error.strerror}")
        if not values["read_only"]:
            values["writable"] = _written(path)
        return Device(path, values, "mountinfo, statvfs")


def _written(path: str) -> str:
    """ "yes", or why nothing can be written there; nothing stays."""
    name = os.path.join(path, f".provision-health.{os.getpid()}")
    try:
        with open(name, "xb") as file:
            file.write(b"provision" * 512)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    finally:
        if os.path.lexists(name):
            os.unlink(name)
    return "yes"


class Processes(Source):
    """Processes that wait for a device, zombies, jobs that run."""

    name = "/proc"
    tells = ("processes.stuck", "jobs")

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self) -> dict[str, Any]:
        stuck, jobs = [], set()
        for path in (self.root / "proc").glob("[0-9]*"):
            try:
                text = (path / "stat").read_text(errors="replace")
                state = text.rpartition(")")[2].split()[0]
                if state in "DZ":
                    name = text[text.index("(") + 1 : text.rindex(")")]
                    start = text.rpartition(")")[2].split()[19]
                    stuck.append(
                        {"pid": int(path.name), "start": start, "name": name, "state": state, "seconds": 0.0}
                    )
                job = job_of((path / "cgroup").read_text(errors="replace"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if job:
                jobs.add(job)
        return {"processes.stuck": stuck, "jobs": len(jobs)}


def job_of(cgroup: str) -> str | None:
    """The Slurm job that a process belongs to, by its /proc/PID/cgroup."""
    match = re.search(r"/job_(\d+)(?:/|$)", cgroup, re.MULTILINE)
    return match[1] if match else None


def _own(pid: int, root: Path) -> bool:
    """Whether a process is this agent, or was started by it."""
    parent = re.search(
        r"^PPid:\s*(\d+)", (root / f"proc/{pid}/status").read_text(errors="replace"), re.MULTILINE
    )
    return os.getpid() in (pid, int(parent[1]) if parent else 0)


def about(pid: int, root: Path = Path("/")) -> dict[str, Any]:
    """Name of a process, its job, and whether it is a service of the system (or this agent itself)."""
    try:
        name = _read(root / f"proc/{pid}/comm")
        groups = (root / f"proc/{pid}/cgroup").read_text(errors="replace")
        own = _own(pid, root)
    except OSError:
        return {"name": "?", "job": None, "service": False}
    service = own or re.search(r"/system\.slice/(?!slurmd|slurmstepd|ssh)", groups) is not None
    return {"name": name, "job": job_of(groups), "service": service}


class Holders(Source):
    """Who holds device files of GPUs open without being a job or a service."""

    name = "/proc/*/fd"
    tells = ("device.holders",)

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self) -> dict[str, Any]:
        found = []
        for path in (self.root / "proc").glob("[0-9]*/fd"):
            try:
                held = {os.readlink(each.path) for each in os.scandir(path)}
            except OSError:
                continue  # it has ended meanwhile
            devices = sorted(name for name in held if re.fullmatch(r"/dev/nvidia\d+", name))
            if devices:
                pid = int(path.parent.name)
                found.append({"pid": pid, "devices": devices, **about(pid, self.root)})
        return {"device.holders": found}


class Kernel(Source):
    """Kernel messages of this boot: /dev/kmsg, or a file of the same form where a site says so."""

    name = "kernel messages"
    tells = ("kernel.events",)

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        return {"kernel.events": events(parse(self.text()))}

    def text(self) -> str:
        """All records, one a line."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return available(descriptor)
        finally:
            os.close(descriptor)


def available(descriptor: int) -> str:
    """The kernel's records from where `descriptor` stands to the last one, without waiting for more."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue  # the oldest records were overwritten meanwhile; the next read goes on behind them
        if not part or len(parts) >= _MOST_PARTS:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


class Nvme(Source):
    """NVMe drives, their SMART log by ioctl."""

    name = "NVMe"
    tells = ("nvme",)

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self) -> dict[str, Any]:
        return {
            "nvme": [self._one(path) for path in sorted((self.root / "sys/class/nvme").glob("nvme[0-9]*"))]
        }

    def _one(self, path: Path) -> Device:
        values: dict[str, Any] = {"state": _read(path / "state")}
        try:
            values.update(smart(_smart_log(self.root / "dev" / path.name)))
        except OSError as error:
            reason = Unread(f"SMART log of {path.name}: {error.strerror}")
            values.update(dict.fromkeys(("critical_warning", "available_spare", "spare_threshold"), reason))
        return Device(path.name, values, "SMART log")


def _smart_log(device: Path) -> bytes:
    """Log page 2: NVME_IOCTL_ADMIN_CMD with opcode 2 (get log page), 512 bytes, of the whole controller."""
    page = ctypes.create_string_buffer(512)
    command = struct.pack(
        "@BBHIIIQQIIIIIIIIII",
        0x02,
        0,
        0,
        0xFFFFFFFF,
        0,
        0,
        0,
        ctypes.addressof(page),
        0,
        512,
        (127 << 16) | 0x02,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    )
    descriptor = os.open(device, os.O_RDONLY)
    try:
        ioctl(descriptor, 0xC0484E41, command)
    finally:
        os.close(descriptor)
    return page.raw


def smart(page: bytes) -> dict[str, int]:
    """What a SMART log page says. Raises ValueError for one that is cut."""
    if len(page) < 6:
        raise ValueError(f"a SMART log of {len(page)} bytes")
    return {"critical_warning": page[0], "available_spare": page[3], "spare_threshold": page[4]}


class Libraries(Source):
    """The driver's libraries: there, not empty, loadable."""

    name = "dlopen"
    tells = ("libraries",)
    names = ("libcuda.so.1", "libnvidia-ml.so.1")

    def __init__(self, gpus: bool) -> None:
        self._gpus = gpus

    def read(self) -> dict[str, Any]:
        if not self._gpus:
            return {"libraries": Absent("no GPU here")}
        return {"libraries": {name: _loaded(name) for name in self.names}}


def _loaded(name: str) -> str:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error)
    return "ok"


def ports(root: Path) -> Iterator[Device]:
    """InfiniBand and RoCE ports."""
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = path.parent.parent
        rate = re.match(r"([\d.]+)", _read(path / "rate"))
        values: dict[str, Any] = {
            "device": device.name,
            "state": _read(path / "state").partition(": ")[2],
            "phys_state": _read(path / "phys_state").partition(": ")[2],
            "link_layer": _read(path / "link_layer"),
            "rate": float(rate[1]) if rate else None,
            "guid": _read(device / "node_guid"),
            "fw_ver": _read(device / "fw_ver"),
            "board_id": _read(device / "board_id") if (device / "board_id").exists() else None,
            "nvswitch": _is_nvswitch(device),
        }
        if values["link_layer"] == "InfiniBand":
            values["lid"] = int(_read(path / "lid"), 0)
        for name in (
            "symbol_error",
            "port_rcv_errors",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
            "link_error_recovery",
            "link_downed",
        ):
            if (path / "counters" / name).exists():
                values[name] = _number(path / "counters" / name)
        yield Device(f"{device.name}:{path.name}", values, "sysfs")


def _is_nvswitch(device: Path) -> bool:
    """B200's NVSwitches appear as mlx5 devices: their vital product data say so."""
    vpd = device / "device/vpd"
    try:
        return b"NVSwitch" in vpd.read_bytes() or b"NVLink" in vpd.read_bytes()
    except OSError:
        return False


class Network(Source):
    """RDMA ports and Ethernet interfaces."""

    name = "sysfs"
    tells = ("ports", "nics")

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self) -> dict[str, Any]:
        nics = []
        for path in sorted((self.root / "sys/class/net").glob("*")):
            if (
                (path / "device").exists()
                or (path / "bonding").exists()
                or not path.name.startswith(("lo", "docker", "veth"))
            ):
                nics.append(
                    Device(path.name, {"carrier_changes": _number(path / "carrier_changes")}, "sysfs")
                )
        return {"ports": list(ports(self.root)), "nics": nics}
