"""Settings of Grafana."""

from __future__ import annotations

from pydantic import Field

from provision.site.base import Settings


class GrafanaSettings(Settings):
    """The part of a site file that describes Grafana; `monitoring: {grafana: {}}` installs it on the first monitor."""

    port: int = Field(3000, ge=1, le=65535)
    url: str | None = None  # as people reach it, where that is not https://NODE:PORT
