"""Settings of ssh."""

from __future__ import annotations

from provision.site.base import Settings


class SshSettings(Settings):
    """The part of a site file that describes ssh."""
