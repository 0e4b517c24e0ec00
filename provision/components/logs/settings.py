"""Settings of the central journal."""

from __future__ import annotations

import re
from typing import Annotated

from provision.site.base import Settings, matches

_SPAN = re.compile(r"\d+(d|week|month|year)s?")
_SIZE = re.compile(r"\d+[KMGT]")


class LokiSettings(Settings):
    """Grafana Loki and Alloy in place of systemd's own: there is nothing to choose yet."""


class LogsSettings(Settings):
    """The part of a site file that describes where nodes' journals are gathered: the first node of role monitor."""

    retention: Annotated[str, matches(_SPAN, "a time as journald writes it: 14d, 3month")] = "1month"
    size: Annotated[str, matches(_SIZE, "a size as journald writes it: 500M, 20G")] = "10G"  # Loki knows none
    loki: LokiSettings | None = None  # left out: systemd-journal-remote
