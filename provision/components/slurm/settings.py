"""Settings of slurm."""

from __future__ import annotations

from provision.site.base import Settings


class SlurmSettings(Settings):
    """The part of a site file that describes slurm."""
