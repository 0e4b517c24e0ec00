"""Waits for kernel messages, and has the node read as soon as one says that something is wrong.

The timer alone would leave a GPU that has fallen off the bus unnoticed for minutes. Between messages this sleeps.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path
from typing import Callable

from provision.health.kernel import events, parse
from provision.health.sources.machine import available

PAUSE = 1.0  # seconds between two looks at a file, of which nobody tells when it grows
REST = 30.0  # seconds between two readings, however much the kernel says


def follow(path: Path, alarm: Callable[[], None], wait: Callable[[float], None] = time.sleep) -> None:
    """Call `alarm` for what is logged from now on. Does not return. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        grows = select.poll()
        grows.register(descriptor, select.POLLIN)
        while True:
            grows.poll()
            text = available(descriptor)
            if not text:
                _begun_anew(descriptor)
                wait(PAUSE)
            elif events(parse(text)):
                alarm()
                wait(REST)
    finally:
        os.close(descriptor)


def _begun_anew(descriptor: int) -> None:
    """Go to the end of a file that has become shorter."""
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_size < os.lseek(descriptor, 0, os.SEEK_CUR):
        os.lseek(descriptor, 0, os.SEEK_END)
