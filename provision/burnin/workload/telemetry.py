"""Readings once a second through all of a run, by a process on each node: GPUs, network adapters.

They come from NVML, else from nvidia-smi, and from sysfs. What cannot be read is missing with a reason. Every
reading goes into the node's own file as it is made; the document gets a thinned series.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable

from . import child
from .nvml import Nvml, NvmlError

PERIOD_SECONDS = 1.0
MOST_POINTS = 300  # of a series in the document
INFINIBAND = Path("/sys/class/infiniband")
NETWORK = Path("/sys/class/net")
SMI_SECONDS = 20
# Counters of adapters: traffic, and what should not happen.
PORT_COUNTERS = (
    "port_xmit_data", "port_rcv_data", "port_xmit_wait", "port_rcv_errors", "port_xmit_discards",
    "symbol_error", "link_downed", "link_error_recovery", "local_link_integrity_errors",
)  # fmt: skip
INTERFACE_COUNTERS = ("tx_bytes", "rx_bytes", "tx_errors", "rx_errors", "tx_dropped", "rx_dropped")
# Our name -> nvidia-smi's, and the name it had before driver 535.
SMI_FIELDS = {
    "sm_clock_mhz": ("clocks.sm",),
    "memory_clock_mhz": ("clocks.mem",),
    "power_watts": ("power.draw",),
    "temperature_c": ("temperature.gpu",),
    "memory_temperature_c": ("temperature.memory",),
    "slowdown_reasons": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    "busy_percent": ("utilization.gpu",),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total",),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total",),
}
COUNTERS = frozenset(
    (*PORT_COUNTERS, *INTERFACE_COUNTERS, "ecc_corrected", "ecc_uncorrected", "pcie_replays",
     "nvlink_sent_bytes", "nvlink_received_bytes")
)  # fmt: skip
MASKS = frozenset(("slowdown_reasons",))


@dataclass
class Device:
    """One thing that can be read."""

    subject: str
    source: str
    read: Callable[[], tuple[dict[str, float], dict[str, str]]]
    uuid: str | None = None


@dataclass
class History:
    """What one device said."""

    about: dict[str, Any]  # subject, source and uuid
    seconds: list[float] = field(default_factory=list)
    readings: list[dict[str, float]] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


class Telemetry:
    """Reads all devices of this node once a second until `stop`.

    A process of its own does it: it takes no time from a rank, and a driver that crashes takes no rank with it.
    """

    def __init__(self, path: Path, start: float, interface: str, gpus: bool) -> None:
        """`start` is the job's, by the monotonic clock; `path` becomes this node's file."""
        self._path = path
        self._process = subprocess.Popen(
            child.command("telemetry", "record", [str(path), start, interface, gpus]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.skipped: str | None = None  # why readings are missing

    def stop(self) -> None:
        """No more readings."""
        status = self._process.poll()
        self._process.terminate()
        try:
            self._process.wait(timeout=SMI_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        text = self._path.read_text() if self._path.exists() else ""
        self._histories, self.skipped = parse(text)
        if status is not None:
            self.skipped = f"the process that read them ended too early, with status {status}"

    def series(self, host: str, ranks: Mapping[str, int]) -> list[dict[str, Any]]:
        """Rows for `Series`, after `stop`; `ranks` tells which rank uses the GPU with an identifier."""
        return [
            {
                "host": host,
                **history.about,
                "rank": ranks.get(bare(history.about["uuid"])) if history.about["uuid"] else None,
                **thin(history.seconds, history.readings, MOST_POINTS),
                "unavailable": history.unavailable,
            }
            for history in self._histories
        ]


def parse(text: str) -> tuple[list[History], str | None]:
    """What `record` wrote, and why it has no GPUs. The last line may be cut short. Pure."""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if not lines:
        return [], "nothing was read"
    histories = [History(about) for about in lines[0]["devices"]]
    for line in lines[1:]:
        history = histories[line["device"]]
        history.seconds.append(line["seconds"])
        history.readings.append(line["values"])
        history.unavailable.update(line["missing"])
    return histories, lines[0]["skipped"]


def record(order: list[Any]) -> None:
    """Write every reading to a file, one JSON object a line, until this process is ended."""
    path, start, interface, gpus = order
    child.end_with_parent()
    found, skipped = graphics() if gpus else ([], None)
    devices = [*found, *adapters(interface)]
    with Path(path).open("w", encoding="utf-8", buffering=1) as file:
        about = [{"subject": each.subject, "source": each.source, "uuid": each.uuid} for each in devices]
        file.write(json.dumps({"devices": about, "skipped": skipped}) + "\n")
        following = time.monotonic()
        while True:
            for number, device in enumerate(devices):
                seconds = round(time.monotonic() - start, 3)
                try:
                    values, missing = device.read()
                except (OSError, ValueError, subprocess.SubprocessError) as error:
                    values, missing = {}, {"all": str(error)}
                line = {"seconds": seconds, "device": number, "values": values, "missing": missing}
                file.write(json.dumps(line) + "\n")
            following += PERIOD_SECONDS
            time.sleep(max(0.0, following - time.monotonic()))


def graphics() -> tuple[list[Device], str | None]:
    """The GPUs of this node, or why there are none."""
    try:
        nvml = Nvml()
        found = [
            Device(f"gpu {index}", "nvml", partial(nvml.read, handle), nvml.uuid(handle))
            for index, handle in enumerate(nvml.handles)
        ]
        return found, None
    except NvmlError as error:
        why = str(error)
    if shutil.which("nvidia-smi") is None:
        return [], f"{why}; and there is no nvidia-smi"
    try:
        smi = Smi()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [], f"{why}; nvidia-smi: {error}"
    return [
        Device(f"gpu {index}", "nvidia-smi", partial(smi.read, uuid), uuid)
        for index, uuid in enumerate(smi.uuids)
    ], None


class Smi:
    """nvidia-smi's table, asked anew when it is older than half a second."""

    def __init__(self) -> None:
        self._fields = {name: names[0] for name, names in SMI_FIELDS.items()}
        try:
            self._ask()
        except subprocess.CalledProcessError:
            self._fields = {name: names[-1] for name, names in SMI_FIELDS.items()}
            self._ask()
        self.uuids = list(self._rows)

    def read(self, uuid: str) -> tuple[dict[str, float], dict[str, str]]:
        if time.monotonic() - self._when > PERIOD_SECONDS / 2:
            self._ask()
        if uuid not in self._rows:
            return {}, {"all": "nvidia-smi no longer lists it"}
        return self._rows[uuid]

    def _ask(self) -> None:
        query = ",".join(("uuid", *self._fields.values()))
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=SMI_SECONDS, check=True,
        )  # fmt: skip
        self._rows = smi_rows(answer.stdout, list(self._fields))
        self._when = time.monotonic()


def smi_rows(text: str, names: Sequence[str]) -> dict[str, tuple[dict[str, float], dict[str, str]]]:
    """GPU -> readings and what is missing, from nvidia-smi's lines "uuid, value, value". Pure."""
    rows = {}
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(cells) != len(names) + 1:
            raise ValueError(f"expected {len(names) + 1} columns: {cells}")
        values: dict[str, float] = {}
        missing: dict[str, str] = {}
        for name, cell in zip(names, cells[1:]):
            try:
                values[name] = float(int(cell, 16)) if cell.lower().startswith("0x") else float(cell)
            except ValueError:
                missing[name] = cell
        rows[cells[0]] = (values, missing)
    return rows


def adapters(interface: str, infiniband: Path = INFINIBAND, network: Path = NETWORK) -> list[Device]:
    """InfiniBand and RoCE ports of this node, and the job's own interface."""
    found = []
    for port in sorted(infiniband.glob("*/ports/*")):
        name = f"{port.parent.parent.name}/{port.name}"
        found.append(Device(name, "sysfs", partial(counters, port / "counters", PORT_COUNTERS)))
    statistics = network / interface / "statistics"
    if statistics.is_dir():
        found.append(Device(interface, "sysfs", partial(counters, statistics, INTERFACE_COUNTERS)))
    return found


def counters(folder: Path, names: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """One number a file."""
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            values[name] = float((folder / name).read_text())
        except (OSError, ValueError) as error:
            missing[name] = str(error)
    return values, missing


def thin(seconds: Sequence[float], readings: Sequence[Mapping[str, float]], most: int) -> dict[str, Any]:
    """At most `most` points of a series: `seconds` and `values` of `provision.burnin.result.Series`. Pure.

    Of the readings that become one, counters give the last, bit masks every bit that was set, others the mean.
    """
    step = max(1, -(-len(seconds) // most))
    groups = [readings[start : start + step] for start in range(0, len(readings), step)]
    names = list(dict.fromkeys(name for reading in readings for name in reading))
    return {
        "seconds": [
            round(seconds[min(start + step, len(seconds)) - 1], 2) for start in range(0, len(seconds), step)
        ],
        "values": {
            name: [_one(name, [reading[name] for reading in group if name in reading]) for group in groups]
            for name in names
        },
    }


def _one(name: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    if name in COUNTERS:
        return values[-1]
    if name in MASKS:
        mask = 0
        for value in values:
            mask |= int(value)
        return float(mask)
    return round(sum(values) / len(values), 2)


def bare(uuid: str | None) -> str:
    """A GPU's identifier as both NVML ("GPU-1a...") and PyTorch ("1a...") give it."""
    return (uuid or "").lower().replace("gpu-", "", 1)
