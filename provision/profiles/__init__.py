"""Data that differs by product, release or distribution, and its typed loaders."""

from provision.profiles.distribution import (
    Distribution,
    UnsupportedDistribution,
    distribution,
    of_os_release,
)
from provision.profiles.gpu import GpuProfile, gpu_profile

__all__ = [
    "Distribution",
    "GpuProfile",
    "UnsupportedDistribution",
    "distribution",
    "gpu_profile",
    "of_os_release",
]
