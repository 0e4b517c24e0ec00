"""Settings of firewall."""

from __future__ import annotations

from provision.site.base import Settings


class FirewallSettings(Settings):
    """The part of a site file that describes firewall."""
