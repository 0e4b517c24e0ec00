"""Settings of storage."""

from __future__ import annotations

from provision.site.base import Settings


class StorageSettings(Settings):
    """The part of a site file that describes storage."""
