"""Enters network namespaces from Python (os.setns exists from Python 3.12 on). Standard library only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@contextmanager
def inside(path: str) -> Iterator[None]:
    """Sockets that this thread opens within the block belong to the network namespace at `path`."""
    with open("/proc/thread-self/ns/net") as home, open(path) as there:
        _setns(there.fileno())
        try:
            yield
        finally:
            _setns(home.fileno())
