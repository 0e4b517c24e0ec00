"""Settings of the burn-in."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field

from provision.profiles.gpu import Measure
from provision.site.base import Settings


class BurninSettings(Settings):
    """The part of a site file that describes the burn-in."""

    device: Literal["gpu", "cpu"] = "gpu"  # gpu: nodes with GPUs must use them; cpu: torch without CUDA
    python: str = "python3"  # a Python >= 3.9 on the nodes that can import torch
    directory: PurePosixPath = PurePosixPath("/shared/burnin")  # the same folder on the head and all nodes
    user: str = "root"  # whose jobs these are; may use the reservation and write to `directory`
    limits: dict[Measure, float] = Field(default_factory=dict)  # lowest numbers that pass
