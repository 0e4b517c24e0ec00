"""The network of a lab: a bridge in a namespace of its own, a namespace a node, a cable (veth pair) between.

Nothing of it is in the machine's own namespace: no link, no route, no firewall rule. All labs use the same
addresses.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provision.lab import netns
from provision.lab.command import LabError, execute
from provision.lab.state import NETWORK, NETWORK6, Node, Paths

RUN = Path("/run/netns")
BRIDGE = "lab0"
CABLE = "host0"  # the node's end; systemd calls the link of a container so
SSH_PORT = 22


def exists(namespace: str) -> bool:
    """Whether the namespace is really there: a name without a mount behind it is what a crash left."""
    target = f"{RUN / namespace}"
    return any(line.split()[4] == target for line in Path("/proc/self/mountinfo").read_text().splitlines())


def names(paths: Paths) -> list[str]:
    """All namespaces of this lab, half-made ones included."""
    return sorted(p.name for p in RUN.glob(f"{paths.hub}*")) if RUN.exists() else []


def links(namespace: str) -> dict[str, dict[str, Any]]:
    """The links of a namespace by name, as `ip -json link` tells them."""
    return {link["ifname"]: link for link in json.loads(execute(["ip", "-n", namespace, "-json", "link"]))}


def ensure_hub(paths: Paths) -> bool:
    """Make or complete the lab's bridge; whether the namespace had to be made."""
    made = _ensure_namespace(paths.hub)
    if BRIDGE not in links(paths.hub):
        execute(["ip", "-n", paths.hub, "link", "add", BRIDGE, "type", "bridge", "forward_delay", "0"])
    _batch(
        paths.hub,
        "link set lo up",
        f"link set {BRIDGE} up",
        f"address replace {NETWORK}.1/24 dev {BRIDGE}",
        f"address replace {NETWORK6}:1/64 dev {BRIDGE} nodad",
    )
    return made


def ensure_node(paths: Paths, node: Node) -> None:
    """Make or complete the node's namespace and plug its cable in."""
    namespace, port = paths.namespace(node.name), port_name(node)
    _ensure_namespace(namespace)
    hub = links(paths.hub)
    if CABLE not in links(namespace) or hub.get(port, {}).get("master") != BRIDGE:
        if port in hub:
            execute(["ip", "-n", paths.hub, "link", "delete", port])
        if CABLE in links(namespace):
            execute(["ip", "-n", namespace, "link", "delete", CABLE])
        peer = ["peer", "name", CABLE, "address", hardware_address(node), "netns", namespace]
        execute(["ip", "-n", paths.hub, "link", "add", port, "type", "veth", *peer])
        execute(["ip", "-n", paths.hub, "link", "set", port, "master", BRIDGE])
    _batch(paths.hub, f"link set {port} up")
    _batch(
        namespace,
        "link set lo up",
        f"link set {CABLE} up",
        f"address replace {node.address}/24 dev {CABLE}",
        f"address replace {node.address6}/64 dev {CABLE} nodad",
        f"route replace default via {NETWORK}.1",
    )


def plug(paths: Paths, node: Node, plugged: bool) -> None:
    """Pull the node's cable out of the bridge, or put it back."""
    _batch(paths.hub, f"link set {port_name(node)} {'up' if plugged else 'down'}")


def hardware_address(node: Node) -> str:
    """The node's MAC address: the same for good, so that a new cable is no new neighbour to the others."""
    return f"02:77:00:00:00:{node.number:02x}"


def port_name(node: Node) -> str:
    """The bridge's end of the node's cable."""
    return f"port{node.number}"


def is_in(namespace: str, pid: int) -> bool:
    """Whether process `pid` is in the namespace of that name."""
    try:
        return (
            exists(namespace) and Path(f"/proc/{pid}/ns/net").stat().st_ino == (RUN / namespace).stat().st_ino
        )
    except FileNotFoundError:
        return False


def remove(namespace: str) -> None:
    """Remove a namespace (half-made ones too); its links go with it."""
    execute(["ip", "netns", "delete", namespace])


def answers(paths: Paths, address: str, port: int, timeout: float = 2.0) -> bytes:
    """The first bytes that a server says on its own to a client inside the lab; b"" when it only accepts.

    Raises OSError where nobody answers within `timeout` seconds.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with netns.inside(str(RUN / paths.hub)):
        client = socket.socket(family, socket.SOCK_STREAM)
    with client:
        client.settimeout(timeout)
        client.connect((address, port))
        if port != SSH_PORT:
            return b""
        return client.recv(64)


def wait_ssh(paths: Paths, node: Node, timeout: float, alive: Callable[[], bool]) -> None:
    """Wait until the node's sshd says its version.

    Raises LabError after `timeout` seconds, or as soon as the node is not `alive` any more.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            if answers(paths, node.address, SSH_PORT).startswith(b"SSH-"):
                return
            why = "it answers, but not as an ssh server"
        except OSError as error:
            why = str(error)
        if not alive():
            raise LabError(f"{node.name}: does not run any more: see {paths.log / node.name}.console")
        if time.monotonic() > deadline:
            raise LabError(f"{node.name} ({node.address}): no ssh within {timeout:g} s: {why}")
        time.sleep(0.05)


def _ensure_namespace(namespace: str) -> bool:
    if exists(namespace):
        return False
    if (RUN / namespace).exists():
        remove(namespace)
    execute(["ip", "netns", "add", namespace])
    return True


def _batch(namespace: str, *commands: str) -> None:
    execute(["ip", "-n", namespace, "-batch", "-"], stdin="\n".join(commands) + "\n")
