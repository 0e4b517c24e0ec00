"""Settings of Slurm's exporter."""

from __future__ import annotations

from pydantic import Field

from provision.site.base import Settings


class SlurmExporterSettings(Settings):
    """The part of a site file that describes Slurm's exporter; comes with `monitoring` where there is Slurm."""

    interval: int = Field(30, ge=5, le=600)  # seconds between two questions
