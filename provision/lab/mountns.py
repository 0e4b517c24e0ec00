"""On which CPU a node's mount namespace has to be made, so that later ones count as younger.

A process may only bind the file of a mount namespace that is younger than its own; Slurm does that for the private
/tmp of each job. Linux since 6.18 hands out the numbers that it compares in blocks, one block to a CPU: a namespace
made later on another CPU may have a lower number, and jobs fail there with "Invalid argument". One that is made on the
CPU with the lowest block is older than everything that follows.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

CLONE_NEWNS = 0x20000
NS_GET_MNTNS_ID = 0x8008B705  # Linux 6.11 and later; before, the numbers follow time


def oldest_cpu() -> int | None:
    """The CPU whose next mount namespace has the lowest number; None where the kernel does not tell."""
    numbers = {cpu: number for cpu in os.sched_getaffinity(0) if (number := _number(cpu)) is not None}
    return min(numbers, key=lambda cpu: numbers[cpu], default=None)


def _number(cpu: int) -> int | None:
    """The number of a mount namespace that is made on `cpu`, and gone again."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.sched_setaffinity(0, {cpu})
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0:
                with open("/proc/self/ns/mnt") as own:
                    os.write(writing, fcntl.ioctl(own, NS_GET_MNTNS_ID, b"\0" * 8))
                status = 0
        except OSError:
            status = 1  # the parent reads nothing
        finally:
            os._exit(status)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    return int(struct.unpack("=Q", answer)[0]) if answer else None
