"""How a node is reached: the one definition of a connection that deploys, checks and playbooks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.site.jumps import bare, below
from provision.site.names import bracketed

if TYPE_CHECKING:
    from provision.site.models import Node, Site

CONNECT_TIMEOUT = 10  # seconds until a node that does not answer is given up
ALIVE_INTERVAL = 5  # seconds between keep-alives; three unanswered ones end a frozen connection


def ssh_options(site: Site, node: Node) -> list[str]:
    """The `-o`, `-i`, `-F`, `-J` arguments for OpenSSH to `node`, without destination and port."""
    access = node.access
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": str(ALIVE_INTERVAL),
        "ServerAliveCountMax": "3",
        "LogLevel": "INFO",  # below it, ssh does not say why it gave up a connection
        "ControlMaster": "no",
        "ControlPath": "none",
        "ForwardAgent": "no",
        "ForwardX11": "no",
    }
    if access.host_keys == "accept-new":
        options["StrictHostKeyChecking"] = "accept-new"
    arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    if access.ssh_config is not None:
        arguments += ["-F", str(below(site, access.ssh_config))]
    if access.key is not None:
        arguments += ["-i", str(below(site, access.key)), "-o", "IdentitiesOnly=yes"]
    if access.jump is not None:
        arguments += ["-J", jump_chain(site, access.jump)]
    return arguments


def destination(node: Node) -> str:
    """`user@host` for OpenSSH: the name where an OpenSSH configuration knows it, else the address."""
    host = node.name if node.access.ssh_config is not None else (node.address or node.name)
    return f"{node.access.user}@{host}"


def ssh_command(site: Site, node: Node, *remote: str) -> list[str]:
    """The whole argument vector that runs `remote` on `node`."""
    return ["ssh", *ssh_options(site, node), "-p", str(node.access.port), destination(node), *remote]


def jump_chain(site: Site, jump: str) -> str:
    """`jump` with names of the site's own nodes replaced by their addresses; several hops keep their order.

    A first hop that is a node with a jump host of its own is reached through that one.
    """
    hops = []
    first = site.nodes.get(bare(jump.partition(",")[0].strip()))
    if first is not None and first.access.jump is not None:
        hops.append(jump_chain(site, first.access.jump))
    for hop in jump.split(","):
        user, at, host = hop.strip().rpartition("@")
        name, colon, port = host.partition(":") if host.count(":") == 1 else (host, "", "")
        known = site.nodes.get(name)
        if known is not None and known.address:
            name = bracketed(known.address)
            user, at = (user, at) if user else (known.access.user, "@")
            colon, port = (colon, port) if port else (":", str(known.access.port))
        hops.append(f"{user}{at}{name}{colon}{port}")
    return ",".join(hops)
