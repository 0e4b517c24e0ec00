"""What others may know of firewall: the ruleset as a pure function of the site file."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.components.base import exports as base
from provision.components.exported import Port, ports
from provision.components.firewall.settings import FirewallSettings
from provision.engine.deploy import render
from provision.site.problem import Problem, nearest, one_of

if TYPE_CHECKING:
    from provision.site.models import Node, Site

RULES = "/etc/nftables.d/provision.nft"
UNIT = "/etc/systemd/system/provision-firewall.service"
# The live table in the form in which the kernel gives it back, without counters; and a ruleset on standard
# input in the same form, loaded into a network namespace that lives no longer than the command.
LIVE = "nft -s list table inet provision"
NORMALISED = f"unshare -n sh -c 'nft -f - && {LIVE}'"


@dataclass(frozen=True)
class Opening:
    """A port, or a range, that everybody reaches."""

    ports: str  # "8443", "60000-60100"
    protocol: str
    purpose: str


def openings(site: Site, node: Node) -> list[Opening]:
    """What is open on `node` for all: ssh always, then what the site file names, in its order."""
    ssh = sorted({22, node.access.port})  # the port may be forwarded: then sshd's own is 22
    found = [Opening(str(port), "tcp", "ssh") for port in ssh]
    for text in site.settings("firewall", node, FirewallSettings).open:
        if text[0].isdigit():
            numbers, _, protocol = text.partition("/")
            found.append(Opening(numbers, protocol or "tcp", "site file"))
        else:
            found += [
                Opening(str(port.number), port.protocol, port.purpose)
                for port in _exported(site)
                if port.purpose == text and node.has(port.role)
            ]
    return list(dict.fromkeys(found))


def trusted(site: Site, node: Node) -> tuple[list[str], list[str]]:
    """The networks that reach every port of `node`, IPv4 and IPv6: the cluster's own and the site file's."""
    more = site.settings("firewall", node, FirewallSettings).trusted
    networks = [*base.cluster_networks(site), *map(ipaddress.ip_network, more)]
    v4 = ipaddress.collapse_addresses(net for net in networks if isinstance(net, ipaddress.IPv4Network))
    v6 = ipaddress.collapse_addresses(net for net in networks if isinstance(net, ipaddress.IPv6Network))
    return [str(net) for net in v4], [str(net) for net in v6]


def ruleset(site: Site, node: Node) -> str:
    """Our table and no other: loading it replaces the table in one transaction and touches nobody else's."""
    v4, v6 = trusted(site, node)
    return render("firewall", "provision.nft.j2", v4=v4, v6=v6, openings=openings(site, node))


def problems(site: Site) -> Iterator[Problem]:
    """Names of ports that no component has; a cluster whose own networks are not known."""
    section = site.section("firewall")
    assert isinstance(section, FirewallSettings)
    purposes = list(dict.fromkeys(port.purpose for port in _exported(site)))
    for index, text in enumerate(section.open):
        if not text[0].isdigit() and text not in purposes:
            yield Problem(
                "unknown-port",
                ("firewall", "open", index),
                read=text,
                expected=f"a port number, or {one_of(purposes)}" if purposes else "a port number",
                nearest=nearest(text, purposes),
            )
    for node in site.nodes.values():
        if not site.file.networks.management and (node.address is None or base.ip(node.address) is None):
            yield Problem(
                "cluster-network",
                ("networks", "management"),
                expected="the network of the nodes, like 10.1.0.0/16",
                why=f"the address of {node.name} is not known: the firewall would shut other nodes out of it",
            )
            return


def _exported(site: Site) -> list[Port]:
    return list(ports(site))
