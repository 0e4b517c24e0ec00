"""The interface that carries the job: found by the address it holds, never by a guessed name.

A wrong interface is the usual reason for a job that hangs at its start: a container bridge with the same
address on every node, or the node's own name that stands for 127.0.1.1 in /etc/hosts.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Callable

_SETTING = re.compile(r"^\s*(NCCL_[A-Z0-9_]+)\s*=\s*([^\n#]*)", re.MULTILINE)


class NetworkError(Exception):
    """No interface fits; the message says which address was looked for and what is there."""


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


# Family -> place and length of the address: sockaddr_in has port (2), address (4); sockaddr_in6 port, flow (4), address
_ADDRESS_AT = {int(socket.AF_INET): (2, 4), int(socket.AF_INET6): (6, 16)}


class _Interface(ctypes.Structure):
    pass


_Interface._fields_ = (
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.POINTER(_SocketAddress)),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def held_addresses() -> dict[str, str]:
    """Every IPv4 and IPv6 address of this node and the interface that holds it: `{"10.0.0.5": "eth0"}`."""
    return {address: interface for address, _, interface in _held()}


def held_networks() -> dict[str, list[str]]:
    """The addresses of each interface with their networks: `{"eth0": ["10.0.0.5/24"]}`. Without link-local ones."""
    networks: dict[str, list[str]] = {}
    for address, length, interface in _held():
        if not ipaddress.ip_address(address).is_link_local:
            networks.setdefault(interface, []).append(f"{address}/{length}")
    return networks


def _held() -> Iterator[tuple[str, int, str]]:
    """Address, length of its network's prefix, interface."""
    libc = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6", use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise NetworkError(f"getifaddrs: {os.strerror(number)}")
    try:
        entry = first
        while entry:
            interface = entry.contents
            family = int(interface.address.contents.family) if interface.address else 0
            start, length = _ADDRESS_AT.get(family, (0, 0))
            if length:
                address = bytes(interface.address.contents.data[start : start + length])
                mask = interface.netmask.contents.data[start : start + length] if interface.netmask else []
                bits = sum(bin(octet).count("1") for octet in mask)
                yield socket.inet_ntop(family, address), bits, interface.name.decode()
            entry = interface.next
    finally:
        libc.freeifaddrs(first)


def cluster_address(
    host: str, others: Sequence[str], given: Mapping[str, str], held: Mapping[str, str]
) -> tuple[str, str]:
    """This node's address in the job and the interface that holds it.

    `given` are the site's addresses by node name. Without one for `host` it is the address from which the
    kernel reaches another node of the job. A job on one node stays on the loopback.
    """
    if host in given:
        address = str(ipaddress.ip_address(given[host]))
    elif others:
        peer = given.get(others[0], others[0])
        address = _source_address(peer)
        if ipaddress.ip_address(address).is_loopback:
            raise NetworkError(
                f"{host}: the way to {peer} is the loopback: {peer} stands for this node in /etc/hosts "
                "or DNS; give the nodes' addresses"
            )
    else:
        address = "127.0.0.1"
    if address not in held:
        known = ", ".join(f"{name} {text}" for text, name in held.items())
        raise NetworkError(
            f"{host}: no interface holds {address}, this node's address in the cluster; it has: {known}"
        )
    return address, held[address]


def _source_address(peer: str) -> str:
    try:
        family, kind, _, _, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise NetworkError(f"the name {peer}, a node of this job, has no address here: {error}") from error
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(where)  # of a datagram socket: asks the kernel for the route, sends nothing
        except OSError as error:
            raise NetworkError(f"no way to {peer} ({where[0]}): {error}") from error
        return str(probe.getsockname()[0])


def nccl_configuration(env: Mapping[str, str], system: Path = Path("/etc/nccl.conf")) -> dict[str, str]:
    """What files tell NCCL on this node, the user's before the system's; `env` wins over both."""
    own = Path(env.get("NCCL_CONF_FILE") or Path(env.get("HOME", "/root")) / ".nccl.conf")
    found: dict[str, str] = {}
    for path in (system, own):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # NCCL says nothing of it either
            continue
        found.update((name, value.strip()) for name, value in _SETTING.findall(text))
    return found


def check_master(host: str, master: str, held: Mapping[str, str]) -> None:
    """Whether rank 0, which runs on this node, is where the others look for it: `master` is a name or address.

    Raises NetworkError where it stands for no address of this node: the others would connect to nothing.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise NetworkError(f"{host} cannot resolve {master}, where rank 0 is looked for: {error}") from error
    if not any(address in held or ipaddress.ip_address(address).is_loopback for address in found):
        known = ", ".join(f"{name} {text}" for text, name in held.items())
        raise NetworkError(
            f"{', '.join(sorted(found))} ({master}) is no address of {host}, where rank 0 runs; it has: {known}; "
            "give the job an address of its first node"
        )


def why_closed(address: str, port: int, seconds: float = 3.0) -> str | None:
    """Why no connection to `port` of `address` can be made: "timed out", "Connection refused"; None: it can."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except socket.gaierror as error:
        return f"cannot resolve {address}: {error.strerror}"
    except OSError as error:
        return error.strerror or str(error)
    return None


def odd_routes(
    address: str,
    peers: Mapping[str, str],
    held: Mapping[str, str],
    source: Callable[[str], str] = _source_address,
) -> dict[str, str]:
    """Of `peers` (node -> address), those that the kernel reaches from another address than this node's in the job.

    Their answers, or this node's, may leave by an interface that nobody listens on: `{"gpu-2": "eth1 10.0.1.5"}`.
    """
    odd = {}
    for peer, where in peers.items():
        try:
            own = source(where)
        except NetworkError as error:
            odd[peer] = str(error)
            continue
        if ipaddress.ip_address(own) != ipaddress.ip_address(address):
            odd[peer] = f"{held.get(own, '?')} {own}"
    return odd
