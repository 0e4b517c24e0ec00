"""Settings of the IPMI exporter."""

from __future__ import annotations

from provision.site.base import Settings


class IpmiExporterSettings(Settings):
    """The part of a site file that describes the IPMI exporter; `monitoring: {ipmi: {}}` installs it."""
