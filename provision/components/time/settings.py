"""Settings of time."""

from __future__ import annotations

from provision.site.base import Settings


class TimeSettings(Settings):
    """The part of a site file that describes time."""
