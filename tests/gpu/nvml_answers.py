"""What NVML answers on this machine, call by call: the recording that the lab's simulated GPUs are held against.

    python tests/gpu/nvml_answers.py >tests/gpu/recorded/h200-x2-nvml.json

Reads only. Every call is one that the simulated library implements; identifiers are replaced. Needs nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

LINKS = (0, 17, 20)  # the last one is none of any GPU
FIELDS = (
    *(1, 2, 3, 4, 5, 6, 29, 30, 31, 82, 83, 90, 91, 94, 95),
    *(142, 143, 144, 145, 161, 162, 163, 164, 165, 166),
    *(185, 186, 187, 188, 189, 190, 192, 193, 194, 195, 196, 230),
)

# call -> arguments after the GPU's handle, as many times as it is asked
OF_GPU: dict[str, list[tuple[Any, ...]]] = {
    **{
        f"nvmlDeviceGet{name}": [()]
        for name in (
            *("Name", "UUID", "Serial", "MinorNumber", "Brand", "Architecture", "NumGpuCores", "BoardId"),
            *("BoardPartNumber", "VbiosVersion", "InforomImageVersion", "GspFirmwareVersion", "Index"),
            *("MemoryBusWidth", "PersistenceMode", "ComputeMode", "DisplayActive", "PerformanceState"),
            *("PowerState", "PowerUsage", "PowerManagementLimit", "EnforcedPowerLimit", "FanSpeed"),
            *("PowerManagementDefaultLimit", "PowerManagementLimitConstraints", "TotalEnergyConsumption"),
            *("CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "GpuMaxPcieLinkGeneration"),
            *("CurrPcieLinkWidth", "MaxPcieLinkWidth", "PcieReplayCounter", "RetiredPagesPendingStatus"),
            *("CurrentClocksEventReasons", "CurrentClocksThrottleReasons"),
            *("SupportedClocksEventReasons", "SupportedClocksThrottleReasons"),
            *(
                "MaxMigDeviceCount",
                "MigMode",
                "EccMode",
                "CudaComputeCapability",
                "PciInfo",
                "BAR1MemoryInfo",
            ),
            *("UtilizationRates", "RowRemapperHistogram", "RemappedRows", "MarginTemperature"),
            *("SupportedMemoryClocks", "ComputeRunningProcesses", "GraphicsRunningProcesses"),
            *("MPSComputeRunningProcesses", "GpuInstanceId", "ComputeInstanceId", "Attributes"),
            "RepairStatus",
        )
    },
    "nvmlDeviceValidateInforom": [()],
    "nvmlDeviceIsMigDeviceHandle": [()],
    "nvmlDeviceGetMigDeviceHandleByIndex": [(0,)],
    "nvmlDeviceGetInforomVersion": [(0,), (1,)],
    "nvmlDeviceGetMemoryInfo": [(), (pynvml.nvmlMemory_v2,)],
    "nvmlDeviceGetTemperature": [(0,)],
    "nvmlDeviceGetTemperatureV": [(0,)],
    "nvmlDeviceGetTemperatureThreshold": [(0,), (1,), (2,), (3,)],
    "nvmlDeviceGetClockInfo": [(0,), (1,), (2,), (3,)],
    "nvmlDeviceGetMaxClockInfo": [(0,), (1,), (2,), (3,)],
    "nvmlDeviceGetApplicationsClock": [(0,), (2,)],
    "nvmlDeviceGetDefaultApplicationsClock": [(0,), (2,)],
    "nvmlDeviceGetPcieThroughput": [(0,), (1,)],
    "nvmlDeviceGetTotalEccErrors": [(error, counter) for error in (0, 1) for counter in (0, 1)],
    "nvmlDeviceGetMemoryErrorCounter": [
        (error, counter, place) for error in (0, 1) for counter in (0, 1) for place in (0, 2, 3, 7)
    ],
    "nvmlDeviceGetDetailedEccErrors": [(1, 0)],
    "nvmlDeviceGetViolationStatus": [(0,), (1,)],
    "nvmlDeviceGetRetiredPages": [(0,), (1,)],
    "nvmlDeviceGetNvLinkState": [(link,) for link in LINKS],
    "nvmlDeviceGetNvLinkVersion": [(link,) for link in LINKS],
    "nvmlDeviceGetNvLinkRemoteDeviceType": [(link,) for link in LINKS],
    "nvmlDeviceGetNvLinkRemotePciInfo": [(link,) for link in LINKS],
    "nvmlDeviceGetNvLinkCapability": [(link, 0) for link in LINKS],
    "nvmlDeviceGetNvLinkErrorCounter": [(0, 0), (0, 1), (0, 2)],
    "nvmlDeviceGetCpuAffinity": [(1,)],
    "nvmlDeviceGetCpuAffinityWithinScope": [(1, 0)],
    "nvmlDeviceGetMemoryAffinity": [(1, 0)],
    "nvmlDeviceGetNumaNodeId": [()],
    "nvmlDeviceGetProcessUtilization": [(0,)],
}
OF_SYSTEM: dict[str, list[tuple[Any, ...]]] = {
    "nvmlSystemGetDriverVersion": [()],
    "nvmlSystemGetNVMLVersion": [()],
    "nvmlSystemGetCudaDriverVersion": [()],
    "nvmlDeviceGetCount": [()],
    "nvmlDeviceGetHandleByIndex": [(99,)],
    "nvmlDeviceGetHandleByUUID": [("GPU-none",)],
    "nvmlDeviceGetHandleBySerial": [("none",)],
    "nvmlDeviceGetHandleByPciBusId": [("0000:99:00.0",)],
}
_IDENTIFIERS = (
    (re.compile(r"GPU-[0-9a-f-]{36}"), "GPU-00000000-aaaa-bbbb-cccc-000000000000"),
    (re.compile(r"^\d{13}$"), "1650000000000"),
)


def fabric(handle: Any) -> Any:
    """nvmlDeviceGetGpuFabricInfoV fills in what it is given."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return info


def sram(handle: Any) -> Any:
    """nvmlDeviceGetSramEccErrorStatus likewise."""
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = pynvml.nvmlEccSramErrorStatus_v1
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return status


def asked(handle: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every question with its name, `nvmlDeviceGetClockInfo(1)`; with two GPUs also those between them."""
    for name, calls in OF_SYSTEM.items():
        for arguments in calls:
            yield f"{name}{_shown(arguments)}", lambda n=name, a=arguments: getattr(pynvml, n)(*a)
    for name, calls in OF_GPU.items():
        for arguments in calls:
            yield f"{name}{_shown(arguments)}", lambda n=name, a=arguments: getattr(pynvml, n)(handle, *a)
    yield "nvmlDeviceGetGpuFabricInfoV()", lambda: fabric(handle)
    yield "nvmlDeviceGetSramEccErrorStatus()", lambda: sram(handle)
    clocks = pynvml.nvmlDeviceGetSupportedMemoryClocks(handle)
    yield (
        "nvmlDeviceGetSupportedGraphicsClocks()",
        lambda: pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle, clocks[0]),
    )
    for field in FIELDS:
        yield f"field {field}", lambda f=field: field_value(handle, f)
    if pynvml.nvmlDeviceGetCount() > 1:
        other = pynvml.nvmlDeviceGetHandleByIndex(1)
        yield (
            "nvmlDeviceGetTopologyCommonAncestor()",
            lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other),
        )
        for what in (0, 1, 2):
            yield (
                f"nvmlDeviceGetP2PStatus({what})",
                lambda w=what: pynvml.nvmlDeviceGetP2PStatus(handle, other, w),
            )


def field_value(handle: Any, field: int) -> dict[str, int]:
    """One field: its type, and its value as a whole number. Raises NVMLError where it is not supported."""
    (found,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
    if found.nvmlReturn:
        raise pynvml.NVMLError(found.nvmlReturn)
    kind = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}[
        found.valueType
    ]
    return {"type": found.valueType, "value": int(getattr(found.value, kind))}


def _shown(arguments: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, arguments))})"


def plain(value: Any) -> Any:
    """An answer as JSON."""
    if isinstance(value, bytes):
        return plain(value.decode())
    if isinstance(value, str):
        for pattern, instead in _IDENTIFIERS:
            value = pattern.sub(instead, value)
        return value
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes.Array):
        return plain(bytes(value)) if value._type_ is ctypes.c_char else [plain(each) for each in value]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, ctypes.c_uint):
        return value.value
    return {key: plain(each) for key, each in vars(value).items()}


def shape(answer: Any) -> Any:
    """What two GPUs have in common: types, keys, errors."""
    if isinstance(answer, dict):
        if "error" in answer or set(answer) == {"type", "value"}:
            return {key: value for key, value in answer.items() if key != "value"}
        return {key: shape(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [shape(answer[0])] if answer else []
    return type(answer).__name__


def answers() -> dict[str, Any]:
    """All answers of the first GPU; an error is {"error": its number}."""
    found: dict[str, Any] = {}
    for name, ask in asked(pynvml.nvmlDeviceGetHandleByIndex(0)):
        try:
            found[name] = plain(ask())
        except pynvml.NVMLError as error:
            found[name] = {"error": error.value}
    return found


def main() -> None:
    pynvml.nvmlInit()
    print(json.dumps(answers(), indent=1))
    pynvml.nvmlShutdown()


if __name__ == "__main__":
    main()
