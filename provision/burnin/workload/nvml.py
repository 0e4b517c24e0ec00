"""The GPUs' own readings through NVIDIA's management library, without any Python package."""

from __future__ import annotations

import ctypes
from typing import Any, Callable

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
UUID_BYTES = 96
FIELD_BYTES_PER_KIB = 1024


class NvmlError(Exception):
    """NVML could not be used; the message is its own."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Value(ctypes.Union):
    _fields_ = (
        ("double", ctypes.c_double),
        ("uint", ctypes.c_uint),
        ("ulong", ctypes.c_ulong),
        ("ulonglong", ctypes.c_ulonglong),
        ("longlong", ctypes.c_longlong),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", _Value),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


# Numbers of NVML's header.
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_GPU = 0
ECC_CORRECTED, ECC_UNCORRECTED, ECC_VOLATILE = 0, 1, 0
FIELD_MEMORY_TEMPERATURE, FIELD_NVLINK_SENT, FIELD_NVLINK_RECEIVED = 82, 138, 139
ALL_LINKS = 0xFFFFFFFF
VALUE_TYPES = ("double", "uint", "ulong", "ulonglong", "longlong")
MOST_PROCESSES = 64


class Nvml:
    """All GPUs that this process may see."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(f"{LIBRARY}: {error}") from error
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self.handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            self.handles.append(handle)

    def close(self) -> None:
        self._call("nvmlShutdown")

    def uuid(self, handle: Any) -> str:
        """ "GPU-..." """
        text = ctypes.create_string_buffer(UUID_BYTES)
        self._call("nvmlDeviceGetUUID", handle, text, UUID_BYTES)
        return text.value.decode()

    def driver(self) -> str:
        text = ctypes.create_string_buffer(UUID_BYTES)
        self._call("nvmlSystemGetDriverVersion", text, UUID_BYTES)
        return text.value.decode()

    def processes(self, handle: Any) -> list[int]:
        """Process numbers that compute on the GPU; of another process namespace they may mean nothing here."""
        count = ctypes.c_uint(MOST_PROCESSES)
        found = (_Process * MOST_PROCESSES)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), found)
        return [found[index].pid for index in range(count.value)]

    def read(self, handle: Any) -> tuple[dict[str, float], dict[str, str]]:
        """All readings of one GPU, and why the others could not be had."""
        values: dict[str, float] = {}
        missing: dict[str, str] = {}
        for name, get in self._readings().items():
            try:
                values[name] = get(handle)
            except NvmlError as error:
                missing[name] = str(error)
        return values, missing

    def _readings(self) -> dict[str, Callable[[Any], float]]:
        number, long = ctypes.c_uint, ctypes.c_ulonglong
        return {
            "sm_clock_mhz": lambda gpu: self._get(number, "nvmlDeviceGetClockInfo", gpu, CLOCK_SM),
            "memory_clock_mhz": lambda gpu: self._get(number, "nvmlDeviceGetClockInfo", gpu, CLOCK_MEMORY),
            "power_watts": lambda gpu: self._get(number, "nvmlDeviceGetPowerUsage", gpu) / 1e3,
            "temperature_c": lambda gpu: self._get(number, "nvmlDeviceGetTemperature", gpu, TEMPERATURE_GPU),
            "memory_temperature_c": lambda gpu: self._field(gpu, FIELD_MEMORY_TEMPERATURE),
            "slowdown_reasons": self._slowdown,
            "busy_percent": self._busy,
            "ecc_corrected": lambda gpu: self._get(
                long, "nvmlDeviceGetTotalEccErrors", gpu, ECC_CORRECTED, ECC_VOLATILE
            ),
            "ecc_uncorrected": lambda gpu: self._get(
                long, "nvmlDeviceGetTotalEccErrors", gpu, ECC_UNCORRECTED, ECC_VOLATILE
            ),
            "pcie_replays": lambda gpu: self._get(number, "nvmlDeviceGetPcieReplayCounter", gpu),
            "nvlink_sent_bytes": lambda gpu: (
                FIELD_BYTES_PER_KIB * self._field(gpu, FIELD_NVLINK_SENT, ALL_LINKS)
            ),
            "nvlink_received_bytes": lambda gpu: (
                FIELD_BYTES_PER_KIB * self._field(gpu, FIELD_NVLINK_RECEIVED, ALL_LINKS)
            ),
        }

    def _slowdown(self, gpu: Any) -> float:
        # Renamed with driver 535; the bits stayed.
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(self._library, name):
            name = "nvmlDeviceGetCurrentClocksThrottleReasons"
        return self._get(ctypes.c_ulonglong, name, gpu)

    def _busy(self, gpu: Any) -> float:
        answer = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", gpu, ctypes.byref(answer))
        return float(answer.gpu)

    def _get(self, kind: Any, function: str, *arguments: Any) -> float:
        answer = kind()
        self._call(function, *arguments, ctypes.byref(answer))
        return float(answer.value)

    def _field(self, gpu: Any, number: int, scope: int = 0) -> float:
        field = _Field(id=number, scope=scope)
        self._call("nvmlDeviceGetFieldValues", gpu, 1, ctypes.byref(field))
        if field.status != SUCCESS:
            raise NvmlError(f"field {number}: {self._error(field.status)}")
        if field.type >= len(VALUE_TYPES):
            raise NvmlError(f"field {number}: a value of unknown type {field.type}")
        return float(getattr(field.value, VALUE_TYPES[field.type]))

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            call = getattr(self._library, function)
        except AttributeError as error:
            raise NvmlError(f"this driver has no {function}") from error
        code = call(*arguments)
        if code != SUCCESS:
            raise NvmlError(f"{function}: {self._error(code)}")

    def _error(self, code: int) -> str:
        text = self._library.nvmlErrorString(code)
        return text.decode() if text else f"error {code}"
