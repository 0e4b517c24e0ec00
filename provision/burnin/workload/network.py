"""The interface that carries the job: found by the address it holds, never by a guessed name.

A wrong interface is the usual reason for a job that hangs at its start: a container bridge with the same
address on every node, or the node's own name that stands for 127.0.1.1 in /etc/hosts.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence


class NetworkError(Exception):
    """No interface fits; the message says which address was looked for and what is there."""


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Interface(ctypes.Structure):
    pass


_Interface._fields_ = (
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def held_addresses() -> dict[str, str]:
    """Every IPv4 and IPv6 address of this node and the interface that holds it: `{"10.0.0.5": "eth0"}`."""
    libc = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6", use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise NetworkError(f"getifaddrs: {os.strerror(number)}")
    held: dict[str, str] = {}
    try:
        entry = first
        while entry:
            interface = entry.contents
            if interface.address:
                address = interface.address.contents
                # sockaddr_in: port (2), address (4); sockaddr_in6: port (2), flow (4), address (16)
                start, length = {socket.AF_INET: (2, 4), socket.AF_INET6: (6, 16)}.get(address.family, (0, 0))
                if length:
                    text = socket.inet_ntop(address.family, bytes(address.data[start : start + length]))
                    held[text] = interface.name.decode()
            entry = interface.next
    finally:
        libc.freeifaddrs(first)
    return held


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
