"""Settings of time: one clock for the whole cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from provision.site.base import Settings

Source = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*$")]  # name or address


class TimeSettings(Settings):
    """The part of a site file that describes time."""

    servers: list[Source] = Field(default_factory=list)  # the heads' sources
    pool: Source | None = None  # left out: the distribution's, where no servers are given
    max_offset: float = Field(0.1, gt=0)  # seconds between a node and its head before a check fails
