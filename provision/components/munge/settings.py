"""Settings of munge."""

from __future__ import annotations

from provision.site.base import Settings


class MungeSettings(Settings):
    """The part of a site file that describes munge: it has nothing to choose."""
