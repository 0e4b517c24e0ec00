"""GPUs by NVML. Names are those of `nvidia-smi --query-gpu` where it has one."""

from __future__ import annotations

import threading
from ctypes import ArgumentError, byref
from typing import Any, Callable

from provision.health.kernel import address
from provision.health.readings import Absent, Device, Unread
from provision.health.sources import Source
from provision.health.xid import RECOVERY_NAMES

Read = Callable[[Any, Any], Any]  # (the nvml module, a device handle) -> value

_ENABLED = {0: "Disabled", 1: "Enabled"}
_FABRIC = {0: "Not Supported", 1: "Not Started", 2: "In Progress", 3: "Completed"}
_COMPUTE = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_ANCESTOR = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "Disabled by regkey", 5: "NS", 6: "U"}
_P2P_INDEX = {"READ": 0, "WRITE": 1, "NVLINK": 2}  # the Python library has tuples there
_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _ecc(corrected: bool, aggregate: bool, location: str) -> Read:
    def read(nvml: Any, gpu: Any) -> Any:
        kind = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED if corrected else nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        life = nvml.NVML_AGGREGATE_ECC if aggregate else nvml.NVML_VOLATILE_ECC
        if location == "total":
            return nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, life)
        return nvml.nvmlDeviceGetMemoryErrorCounter(
            gpu, kind, life, getattr(nvml, f"NVML_MEMORY_LOCATION_{location}")
        )

    return read


def _field(name: str) -> Read:
    """A field value; one that this release of the library or the driver does not know does not exist here."""

    def read(nvml: Any, gpu: Any) -> Any:
        number = getattr(nvml, f"NVML_FI_DEV_{name}", None)
        if number is None:
            return Absent(f"the library does not know {name}")
        value = nvml.nvmlDeviceGetFieldValues(gpu, [number])[0]
        if value.nvmlReturn:
            raise nvml.NVMLError(value.nvmlReturn)
        types = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
        return getattr(value.value, types[value.valueType])

    return read


def _threshold(name: str) -> Read:
    def read(nvml: Any, gpu: Any) -> Any:
        return nvml.nvmlDeviceGetTemperatureThreshold(
            gpu, getattr(nvml, f"NVML_TEMPERATURE_THRESHOLD_{name}")
        )

    return read


# single calls: name -> how it is read
FIELDS: dict[str, Read] = {
    "name": lambda nvml, gpu: _text(nvml.nvmlDeviceGetName(gpu)),
    "uuid": lambda nvml, gpu: _text(nvml.nvmlDeviceGetUUID(gpu)),
    "minor_number": lambda nvml, gpu: nvml.nvmlDeviceGetMinorNumber(gpu),
    "vbios_version": lambda nvml, gpu: _text(nvml.nvmlDeviceGetVbiosVersion(gpu)),
    "persistence_mode": lambda nvml, gpu: _ENABLED[nvml.nvmlDeviceGetPersistenceMode(gpu)],
    "compute_mode": lambda nvml, gpu: _COMPUTE[nvml.nvmlDeviceGetComputeMode(gpu)],
    "ecc.errors.uncorrected.volatile.total": _ecc(False, False, "total"),
    "ecc.errors.uncorrected.aggregate.sram": _ecc(False, True, "SRAM"),
    "ecc.errors.corrected.aggregate.sram": _ecc(True, True, "SRAM"),
    "ecc.errors.corrected.aggregate.dram": _ecc(True, True, "DRAM"),
    "clocks.sm": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "utilization.gpu": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "temperature.gpu": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "temperature.gpu.tlimit": lambda nvml, gpu: nvml.nvmlDeviceGetMarginTemperature(gpu),
    "temperature.memory": _field("MEMORY_TEMP"),
    "temperature.slowdown": _threshold("SLOWDOWN"),
    "temperature.memory.max_operating": _threshold("MEM_MAX"),
    "temperature.tlimit.slowdown": _field("TEMPERATURE_SLOWDOWN_TLIMIT"),
    "power.limit": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000,
    "enforced.power.limit": lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "power.default_limit": lambda nvml, gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
    "power.draw": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "pcie.link.gen.current": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    "pcie.link.gen.max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
    "pcie.link.width.current": lambda nvml, gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "pcie.link.width.max": lambda nvml, gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    "pcie.replays": lambda nvml, gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu),
    "gpu_recovery_action": lambda nvml, gpu: _recovery(_field("GET_GPU_RECOVERY_ACTION")(nvml, gpu)),
}


def _inforom(nvml: Any, gpu: Any) -> str:
    try:
        nvml.nvmlDeviceValidateInforom(gpu)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == nvml.NVML_ERROR_CORRUPTED_INFOROM:
            return "corrupted"
        raise
    return "valid"


SLOW: dict[str, Read] = {"inforom.checksum_validation": _inforom}  # takes 70 ms a GPU

# calls that tell several values: names -> how they are read
GROUPS: dict[tuple[str, ...], Callable[[Any, Any], tuple[Any, ...]]] = {
    ("ecc.mode.current", "ecc.mode.pending"): lambda nvml, gpu: tuple(
        _ENABLED[mode] for mode in nvml.nvmlDeviceGetEccMode(gpu)
    ),
    ("mig.mode.current", "mig.mode.pending"): lambda nvml, gpu: tuple(
        _ENABLED[mode] for mode in nvml.nvmlDeviceGetMigMode(gpu)
    ),
    (
        "remapped_rows.correctable",
        "remapped_rows.uncorrectable",
        "remapped_rows.pending",
        "remapped_rows.failure",
    ): (lambda nvml, gpu: _remapped(nvml.nvmlDeviceGetRemappedRows(gpu))),
    ("remapped_rows.histogram.none",): lambda nvml, gpu: (nvml.nvmlDeviceGetRowRemapperHistogram(gpu).none,),
    ("memory.total", "memory.used"): lambda nvml, gpu: _memory(nvml.nvmlDeviceGetMemoryInfo(gpu)),
    ("retired_pages.single_bit_ecc.count", "retired_pages.double_bit.count", "retired_pages.pending"): (
        lambda nvml, gpu: _retired(nvml, gpu)
    ),
    ("ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",): lambda nvml, gpu: _sram(nvml, gpu),
    ("channel_repair_pending", "tpc_repair_pending", "unrepairable_memory"): lambda nvml, gpu: _repair(
        nvml, gpu
    ),
    tuple(f"clocks_event_reasons.{name}" for name in _REASONS): lambda nvml, gpu: _reasons(nvml, gpu),
    ("fabric.state", "fabric.status", "fabric.cliqueId", "fabric.clusterUuid"): lambda nvml, gpu: _fabric(
        nvml, gpu
    ),
}


def _of_driver(version: str) -> str:
    """The driver's version in NVML's, which begins with that of CUDA: 13.580.95.05."""
    first, _, rest = version.partition(".")
    return rest if len(first) < 3 and rest.count(".") >= 1 else version


def _recovery(number: Any) -> Any:
    return number if isinstance(number, Absent) else RECOVERY_NAMES.get(number, f"action {number}")


def _remapped(told: Any) -> tuple[Any, ...]:
    corrected, uncorrected, pending, failure = told[:4]
    return corrected, uncorrected, bool(pending), bool(failure)


def _memory(info: Any) -> tuple[int, int]:
    return info.total >> 20, info.used >> 20


def _retired(nvml: Any, gpu: Any) -> tuple[Any, ...]:
    single = nvml.nvmlDeviceGetRetiredPages(
        gpu, nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
    )
    double = nvml.nvmlDeviceGetRetiredPages(gpu, nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    return len(single), len(double), bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu))


def _sram(nvml: Any, gpu: Any) -> tuple[Any, ...]:
    if not hasattr(nvml, "c_nvmlEccSramErrorStatus_v1_t"):
        return (Absent("the library does not tell it"),)
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = nvml.nvmlEccSramErrorStatus_v1
    nvml.nvmlDeviceGetSramEccErrorStatus(gpu, byref(status))
    return (bool(status.bThresholdExceeded),)


def _repair(nvml: Any, gpu: Any) -> tuple[Any, ...]:
    if not hasattr(nvml, "nvmlDeviceGetRepairStatus"):
        return tuple(Absent("the library does not tell it") for _ in range(3))
    channel, tpc = nvml.nvmlDeviceGetRepairStatus(gpu)
    return bool(channel), bool(tpc), Absent("told by nvidia-smi alone")


def _reasons(nvml: Any, gpu: Any) -> tuple[str, ...]:
    read = (
        getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    )
    mask = read(gpu)
    return tuple("Active" if mask & bit else "Not Active" for bit in _REASONS.values())


def _fabric(nvml: Any, gpu: Any) -> tuple[Any, ...]:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    info.version = nvml.nvmlGpuFabricInfo_v2
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, byref(info))
    if info.state == 0:
        return tuple(Absent("no NVLink fabric on this GPU") for _ in range(4))
    status = "Success" if info.status == 0 else _text(nvml.nvmlErrorString(info.status))
    return (
        _FABRIC.get(info.state, f"state {info.state}"),
        status,
        info.cliqueId,
        bytes(info.clusterUuid).hex(),
    )


class Nvml(Source):
    """All GPUs, and NVML itself. `module` is pynvml, or something that answers as it does."""

    name = "NVML"
    tells = ("nvml", "gpus", "lost", "attached_gpus", "driver_version", "library.version", "p2p", "topology")

    def __init__(
        self, load: Callable[[], Any], processes: Callable[[int], dict[str, Any]], *, full: bool = True
    ) -> None:
        self._load = load
        self._fields = {**FIELDS, **SLOW} if full else FIELDS
        self._about = processes  # pid -> name, job, service

    def read(self) -> dict[str, Any]:
        try:
            nvml = self._load()
        except ImportError as error:
            return self._unreadable(str(error))
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return self._unreadable(str(error))
        try:
            return self._all(nvml)
        finally:
            nvml.nvmlShutdown()

    def _unreadable(self, words: str) -> dict[str, Any]:
        told: dict[str, Any] = {name: Unread(f"NVML: {words}") for name in self.tells}
        return {**told, "nvml": words}

    def _all(self, nvml: Any) -> dict[str, Any]:
        count = nvml.nvmlDeviceGetCount()
        read: list[Any] = [None] * count  # (handle, device) of each GPU, or the error that stands for it

        def work(index: int) -> None:
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                read[index] = handle, self._gpu(nvml, handle, index)
            except nvml.NVMLError as error:
                read[index] = error

        # all at once: the driver answers for each GPU by itself
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handles: list[Any] = [each[0] for each in read if isinstance(each, tuple)]
        gpus: list[Device] = [each[1] for each in read if isinstance(each, tuple)]
        lost = [f"GPU {index} ({each})" for index, each in enumerate(read) if not isinstance(each, tuple)]
        return {
            "nvml": "ok",
            "gpus": gpus,
            "lost": lost,
            "attached_gpus": Absent("NVML counts those it sees"),
            "driver_version": _text(nvml.nvmlSystemGetDriverVersion()),
            "library.version": _of_driver(_text(nvml.nvmlSystemGetNVMLVersion())),
            "p2p": self._p2p(nvml, handles),
            "topology": self._topology(nvml, handles, gpus),
        }

    def _gpu(self, nvml: Any, handle: Any, index: int) -> Device:
        gpu = Device(f"GPU {index}", {"index": index}, "NVML")
        gpu.values["pci.bus_id"] = address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        for name, read in self._fields.items():
            gpu.values[name] = _tried(nvml, read, handle)
        for names, read_all in GROUPS.items():
            told = _tried(nvml, read_all, handle)
            values = [told] * len(names) if isinstance(told, (Absent, Unread)) else told
            gpu.values.update(zip(names, values))
        gpu.values["nvlink.links"], gpu.values["nvlink.errors"] = _nvlinks(nvml, handle)
        gpu.values["processes"] = _tried(nvml, self._processes, handle)
        return gpu

    def _processes(self, nvml: Any, handle: Any) -> list[dict[str, Any]]:
        return [
            {"pid": each.pid, "memory": (each.usedGpuMemory or 0) >> 20, **self._about(each.pid)}
            for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]

    def _p2p(self, nvml: Any, handles: list[Any]) -> Any:
        found = {}
        for a, one in enumerate(handles):
            for b, other in enumerate(handles):
                if a == b:
                    continue
                for kind in ("READ", "WRITE"):
                    capability = _P2P_INDEX[kind]
                    told = _tried(nvml, _call("nvmlDeviceGetP2PStatus", other, capability), one)
                    if isinstance(told, (Absent, Unread)):
                        return told
                    found[f"GPU{a}-GPU{b} {kind.lower()}"] = _P2P.get(told, f"status {told}")
        return found

    def _topology(self, nvml: Any, handles: list[Any], gpus: list[Device]) -> Any:
        matrix: dict[str, dict[str, str]] = {f"GPU{place}": {} for place in range(len(handles))}
        for a, one in enumerate(handles):
            for b, other in enumerate(handles):
                if a == b:
                    continue
                up = min(_links_up(gpus[a]), _links_up(gpus[b]))
                nvlink = _tried(
                    nvml,
                    _call("nvmlDeviceGetP2PStatus", other, _P2P_INDEX["NVLINK"]),
                    one,
                )
                links = [gpus[place].values.get("nvlink.links") for place in (a, b)]
                unread = [told for told in (nvlink, *links) if isinstance(told, Unread)]
                if unread:  # which is no pair without NVLink
                    return unread[0]
                if nvlink == 0 and up:
                    matrix[f"GPU{a}"][f"GPU{b}"] = f"NV{up}"
                    continue
                ancestor = _tried(nvml, _call("nvmlDeviceGetTopologyCommonAncestor", other), one)
                if isinstance(ancestor, (Absent, Unread)):
                    return ancestor
                matrix[f"GPU{a}"][f"GPU{b}"] = _ANCESTOR.get(ancestor, f"level {ancestor}")
        return matrix


def _links_up(gpu: Device) -> int:
    return sum(1 for link in gpu.get("nvlink.links") or [] if link["up"])


def _call(name: str, *arguments: Any) -> Read:
    """A call of NVML that takes more than the device."""
    return lambda nvml, gpu: getattr(nvml, name)(gpu, *arguments)


def _tried(nvml: Any, read: Callable[[Any, Any], Any], handle: Any) -> Any:
    """What `read` gives, or why it gives nothing."""
    try:
        return read(nvml, handle)
    except nvml.NVMLError as error:
        words = str(error)
        absent = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
        )
        value = getattr(error, "value", None)
        return Absent(f"NVML: {words}") if value in absent else Unread(f"NVML: {words}")
    except (TypeError, ValueError, ArgumentError) as error:
        return Unread(f"NVML's Python library: {error}")
    except (AttributeError, KeyError) as error:
        return Absent(f"NVML's Python library does not know it: {error}")


def _nvlinks(nvml: Any, handle: Any) -> tuple[Any, Any]:
    """Links and their errors; (Absent, Absent) where the GPU has none."""
    links: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    for number in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = _tried(nvml, _call("nvmlDeviceGetNvLinkState", number), handle)
        if isinstance(state, Absent):
            break
        if isinstance(state, Unread):
            return state, state
        link: dict[str, Any] = {"link": number, "up": bool(state)}
        errors.append({"link": number})
        for name, counter in (("replay", "REPLAY"), ("recovery", "RECOVERY"), ("crc", "CRC_FLIT")):
            kind = getattr(nvml, f"NVML_NVLINK_ERROR_DL_{counter}")
            told = _tried(nvml, _call("nvmlDeviceGetNvLinkErrorCounter", number, kind), handle)
            if isinstance(told, int):
                errors[-1][name] = told
        links.append(link)
    if not links:
        absent = Absent("no NVLink on this GPU")
        return absent, absent
    speed = _tried(nvml, _field("NVLINK_GET_SPEED"), handle)
    for link in links:
        if link["up"] and isinstance(speed, (int, float)):
            link["speed"] = speed / 1000
    return links, errors if any(len(each) > 1 for each in errors) else Absent("no NVLink error counters")
