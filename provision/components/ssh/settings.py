"""Settings of ssh: the server on every node."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from provision.site.base import Settings


class SshSettings(Settings):
    """The part of a site file that describes ssh."""

    root_login: Literal["no", "prohibit-password", "yes"] = "prohibit-password"
    password_authentication: bool = False
    x11_forwarding: bool = False
    # A connection whose other end is gone ends after interval x count seconds, and a run's lock with it.
    client_alive_interval: int = Field(15, ge=1, le=3600)  # seconds
    client_alive_count: int = Field(4, ge=1, le=100)
    max_startups: str = Field(
        "100:30:500", pattern=r"^[1-9][0-9]*:[0-9]{1,3}:[1-9][0-9]*$"
    )  # start:rate:full
    max_sessions: int = Field(64, ge=1)  # in one connection
