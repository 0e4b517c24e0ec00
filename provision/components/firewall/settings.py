"""Settings of firewall: what reaches a node from outside the cluster."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from provision.site.base import Settings

_OPENING = re.compile(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?(?:/(tcp|udp))?")
_PURPOSE = re.compile(r"[a-zA-Z][a-zA-Z0-9 ._-]*")


def _network(value: str) -> str:
    """A network in its usual form; one address is a network too."""
    return str(ipaddress.ip_network(value))


def _opening(value: str) -> str:
    numbers = _OPENING.fullmatch(value)
    if numbers is None:
        if not _PURPOSE.fullmatch(value):
            raise ValueError(
                f"{value!r} is neither a port like 8443, 60000-60100/udp nor a component's purpose"
            )
        return value
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    if not first <= last <= 65535:
        raise ValueError(f"{value!r}: ports are 1 to 65535, the smaller one first")
    return value


Network = Annotated[str, AfterValidator(_network)]


class FirewallSettings(Settings):
    """The part of a site file that describes firewall."""

    # networks that reach every port, besides the cluster's
    trusted: list[Network] = Field(default_factory=list)
    # ports that everybody reaches, besides ssh: 8443, 60000-60100/udp, or what a component calls its own
    open: list[Annotated[str, AfterValidator(_opening)]] = Field(default_factory=list)
