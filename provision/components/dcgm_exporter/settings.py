"""Settings of DCGM's exporter."""

from __future__ import annotations

from provision.site.base import Settings


class DcgmExporterSettings(Settings):
    """The part of a site file that describes DCGM's exporter; `monitoring: {dcgm: {}}` installs it."""

    profiling: bool = True  # counters of the profiling module, where the GPU has them
