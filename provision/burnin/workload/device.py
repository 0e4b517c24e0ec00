"""Time and memory of the device that a rank uses, CPU or GPU."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch


class Marks:
    """Points in time on the device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._marks: list[Any] = []

    def set(self) -> None:
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each two marks that follow each other."""
        pairs = zip(self._marks, self._marks[1:])
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


def release(device: Any) -> None:
    """Hand memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronise(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
