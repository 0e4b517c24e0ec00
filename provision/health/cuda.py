"""Allocates, writes and reads back memory on each GPU by the CUDA driver library; prints `GPU 0: ok`, a line each."""

from __future__ import annotations

import ctypes
from typing import Any

BYTES = 64 << 20
PATTERN = 0xA5C3F00D


def memory() -> dict[str, str]:
    """GPU -> "ok" or what failed; the one entry "CUDA" where CUDA does not start."""
    try:
        cuda: Any = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"CUDA": str(error)}
    status = cuda.cuInit(0)
    if status:
        return {"CUDA": f"cuInit: error {status}"}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        return {"CUDA": "no device"}
    return {f"GPU {number}": _one(cuda, number) for number in range(count.value)}


def _one(cuda: Any, number: int) -> str:
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number) or cuda.cuCtxSetCurrent(context)
    if status:
        return f"context: error {status}"
    try:
        status = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(BYTES))
        if status:
            return f"allocation of {BYTES >> 20} MiB: error {status}"
        read = ctypes.create_string_buffer(BYTES)
        status = cuda.cuMemsetD32_v2(address, ctypes.c_uint(PATTERN), ctypes.c_size_t(BYTES // 4))
        status = status or cuda.cuMemcpyDtoH_v2(read, address, ctypes.c_size_t(BYTES))
        cuda.cuMemFree_v2(address)
        if status:
            return f"write or read back: error {status}"
        return (
            "ok" if read.raw == PATTERN.to_bytes(4, "little") * (BYTES // 4) else "read back something else"
        )
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(number)
