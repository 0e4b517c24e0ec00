"""Settings of base."""

from __future__ import annotations

from provision.site.base import Settings


class BaseSettings(Settings):
    """The part of a site file that describes base."""
