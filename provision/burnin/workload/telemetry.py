"""Readings once a second through all of a run, by one process of each node: GPUs, network adapters.

They come from NVML, else from nvidia-smi, and from sysfs. What cannot be read is missing with a reason. Every
reading goes into the node's own file as it is made; the document gets a thinned series.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable

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
    """One thing that is read, and what it said so far."""

    subject: str
    source: str
    read: Callable[[], tuple[dict[str, float], dict[str, str]]]
    uuid: str | None = None
    seconds: list[float] = field(default_factory=list)
    readings: list[dict[str, float]] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


class Telemetry:
    """Reads all devices of this node once a second, in a thread, until `stop`."""

    def __init__(self, path: Path, clock: Callable[[], float], interface: str, gpus: bool) -> None:
        """`clock` tells the seconds since the job's start; `path` is this node's file."""
        self._clock = clock
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._ended = threading.Event()
        self._nvml: Nvml | None = None
        self.skipped: str | None = None  # why there are no GPUs
        self.devices = [*self._gpus(gpus), *adapters(interface)]
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more readings."""
        self._ended.set()
        self._thread.join(timeout=SMI_SECONDS)
        self._file.close()

    def series(self, host: str, ranks: Mapping[str, int]) -> list[dict[str, Any]]:
        """Rows for `Series`; `ranks` tells which rank uses the GPU with an identifier."""
        return [
            {
                "host": host,
                "subject": device.subject,
                "uuid": device.uuid,
                "rank": ranks.get(bare(device.uuid)) if device.uuid else None,
                "source": device.source,
                **thin(device.seconds, device.readings, MOST_POINTS),
                "unavailable": device.unavailable,
            }
            for device in self.devices
        ]

    def _gpus(self, wanted: bool) -> list[Device]:
        if not wanted:
            return []
        try:
            nvml = self._nvml = Nvml()
            return [
                Device(f"gpu {index}", "nvml", partial(nvml.read, handle), nvml.uuid(handle))
                for index, handle in enumerate(nvml.handles)
            ]
        except NvmlError as error:
            why = str(error)
        if shutil.which("nvidia-smi") is None:
            self.skipped = f"{why}; and there is no nvidia-smi"
            return []
        try:
            smi = Smi()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.skipped = f"{why}; nvidia-smi: {error}"
            return []
        return [
            Device(f"gpu {index}", "nvidia-smi", partial(smi.read, uuid), uuid)
            for index, uuid in enumerate(smi.uuids)
        ]

    def _loop(self) -> None:
        following = time.monotonic()
        while not self._ended.is_set():
            for device in self.devices:
                now = self._clock()
                try:
                    values, missing = device.read()
                except OSError as error:
                    values, missing = {}, {"all": str(error)}
                device.seconds.append(now)
                device.readings.append(values)
                device.unavailable.update(missing)
                self._file.write(
                    json.dumps({"seconds": round(now, 3), "subject": device.subject, **values}) + "\n"
                )
            following += PERIOD_SECONDS
            self._ended.wait(max(0.0, following - time.monotonic()))


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
