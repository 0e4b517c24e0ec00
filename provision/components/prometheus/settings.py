"""Settings of prometheus."""

from __future__ import annotations

from provision.site.base import Settings


class MonitoringSettings(Settings):
    """The part of a site file that describes prometheus."""
