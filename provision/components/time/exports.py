"""What others may know of time: chrony's configuration, and how its answers are read. Pure."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.components.base import exports as base
from provision.components.exported import Port
from provision.components.time.settings import TimeSettings
from provision.engine.deploy import render
from provision.site.problem import Problem

if TYPE_CHECKING:
    from provision.profiles import Distribution
    from provision.site.models import Node, Site

PORTS = (Port(123, "head", "time", "udp"),)
OTHERS = ("systemd-timesyncd", "ntp", "ntpsec", "ntpd", "openntpd")  # units of other time daemons


def chrony_conf(site: Site, node: Node, profile: Distribution) -> str:
    """The configuration of chronyd: heads follow the site's sources, all others the heads."""
    time = site.settings("time", node, TimeSettings)
    serves = node.has("head")
    pool = time.pool or (None if time.servers else profile.ntp_pool)
    return render(
        "time",
        "chrony.conf.j2",
        serves=serves,
        servers=time.servers if serves else [],
        pool=pool if serves else None,
        heads=[where(head) for head in site.with_role("head") if head.name != node.name],
        allowed=clients(site) if serves else [],
    )


def where(node: Node) -> str:
    """The address of a node, or its name where the site file gives none."""
    return node.address or node.name


def clients(site: Site) -> list[str]:
    """Networks that heads serve: the cluster's; all where none is known."""
    return [str(network) for network in base.cluster_networks(site)] or ["all"]


@dataclass(frozen=True)
class Tracking:
    """What chronyd follows."""

    source: str  # address or name; "" where there is none
    stratum: int
    offset: float  # seconds that the system clock is behind (+) or ahead (-) of what chronyd knows
    synchronised: bool


def parse_tracking(output: str) -> Tracking:
    """From `chronyc -n -c tracking`. Raises ValueError when it is not of that form."""
    rows = list(csv.reader(output.splitlines()))
    if len(rows) != 1 or len(rows[0]) != 14:
        raise ValueError(f"expected 14 fields of chronyc, read {output.strip()!r}")
    row = rows[0]
    return Tracking(row[1], int(row[2]), float(row[4]), row[13] != "Not synchronised")


@dataclass(frozen=True)
class Source:
    """One source of chronyd."""

    name: str
    selected: bool
    reach: int  # the last eight polls, one bit each; 0: never answered
    offset: float  # measured, seconds


def parse_sources(output: str) -> list[Source]:
    """From `chronyc -n -c sources`. Raises ValueError when it is not of that form."""
    found = []
    for row in csv.reader(output.splitlines()):
        if len(row) != 10:
            raise ValueError(f"expected 10 fields of chronyc, read {','.join(row)!r}")
        found.append(Source(row[2], row[1] == "*", int(row[5], 8), float(row[8])))
    return found


def problems(site: Site) -> Iterator[Problem]:
    """Sources that are nodes of the cluster which follow the heads themselves."""
    section = site.section("time")
    assert isinstance(section, TimeSettings)
    followers = {
        name for node in site.nodes.values() if not node.has("head") for name in (node.name, node.address)
    }
    for index, server in enumerate(section.servers):
        if server in followers:
            yield Problem(
                "time-circle",
                ("time", "servers", index),
                read=server,
                expected="a server outside the cluster",
                why="this node takes its time from the heads",
            )
