"""What components tell each other through their exports.py, besides files and secrets.

    # provision/components/prometheus/exports.py
    PORTS = (Port(9100, "*", "node exporter"),)
    SCRAPE = (Scrape("node", "*", 9100),)

The firewall reads `PORTS`, Prometheus reads `SCRAPE`, of every component that the site file names; what depends on the
site is a function of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from provision.components.registry import COMPONENTS

if TYPE_CHECKING:
    from provision.site.models import Site


@dataclass(frozen=True)
class Port:
    """A port on which nodes of `role` ("*": all) are served by a component."""

    number: int
    role: str
    purpose: str  # for the comment in the firewall's rules
    protocol: Literal["tcp", "udp"] = "tcp"


@dataclass(frozen=True)
class Scrape:
    """Metrics that nodes of `role` ("*": all) offer to Prometheus by HTTP on their management address."""

    job: str  # kebab-case; also the name of the targets' file
    role: str
    port: int
    path: str = "/metrics"


def ports(site: Site) -> Iterator[Port]:
    """The ports of all named components of `site`."""
    yield from _exported(site, "PORTS")


def scrapes(site: Site) -> Iterator[Scrape]:
    """What all named components of `site` offer to Prometheus."""
    yield from _exported(site, "SCRAPE")


def _exported(site: Site, name: str) -> Iterator[Any]:
    for component in COMPONENTS:
        if site.enabled(component):
            found = getattr(import_module(f"provision.components.{component}.exports"), name, ())
            yield from found(site) if callable(found) else found
