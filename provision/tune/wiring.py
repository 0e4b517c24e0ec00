"""What a node has that NCCL could be told of: interfaces, adapters, GIDs, traffic classes. Pure."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from provision.components.fabric.exports import NCCL
from provision.hardware import rdma
from provision.hardware.machine import Answer

GIDS = r"""for p in /sys/class/infiniband/*/ports/*; do
  [ -d "$p/gids" ] || continue
  d=${p%/ports/*}
  for f in "$p"/gids/*; do
    i=${f##*/}; g=; t=; n=
    read -r g <"$f" || continue
    [ "$g" != 0000:0000:0000:0000:0000:0000:0000:0000 ] || continue
    read -r t <"$p/gid_attrs/types/$i" 2>/dev/null || t=
    read -r n <"$p/gid_attrs/ndevs/$i" 2>/dev/null || n=
    printf '%s|%s|%s|%s|%s|%s\n' "${d##*/}" "${p##*/}" "$i" "$g" "$t" "$n"
  done
done"""
# mlx5's own file holds "Global tclass=106"; the connection manager's default is a type of service.
TRAFFIC_CLASSES = r"""for d in /sys/class/infiniband/*; do
  n=${d##*/}
  for f in "$d"/tc/*/traffic_class /sys/kernel/config/rdma_cm/"$n"/ports/*/default_roce_tos; do
    [ ! -r "$f" ] || printf '%s|%s\n' "$n" "$(tr '\n' ' ' <"$f")"
  done
done"""


@dataclass(frozen=True)
class Gid:
    """An entry of a port's table of global identifiers."""

    device: str
    port: int
    index: int
    address: ipaddress.IPv6Address
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str | None

    @property
    def routable(self) -> bool:
        """RoCE v2 with an IPv4 address: what a routed fabric carries."""
        return self.kind == "RoCE v2" and self.address.ipv4_mapped is not None


@dataclass(frozen=True)
class Wiring:
    """One node's. What could not be read is not here but in `unread`, with the reason."""

    interfaces: Mapping[str, tuple[ipaddress.IPv4Interface, ...]] = field(default_factory=dict)  # that are up
    ports: tuple[rdma.Port, ...] = ()
    gids: tuple[Gid, ...] = ()
    traffic_classes: Mapping[str, int] = field(default_factory=dict)  # adapter -> 0 to 255
    configuration: Mapping[str, str] = field(
        default_factory=dict
    )  # variable -> value in NCCL's configuration
    environment: Mapping[str, str] = field(default_factory=dict)  # the same of a login shell
    unread: Mapping[str, str] = field(default_factory=dict)  # part -> why


def parse_interfaces(text: str) -> dict[str, tuple[ipaddress.IPv4Interface, ...]]:
    """From `ip -j address show up`: IPv4 alone, which is what NCCL takes first. Raises ValueError."""
    try:
        found: list[dict[str, Any]] = json.loads(text or "[]")
        return {
            str(each["ifname"]): tuple(
                ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}")
                for address in each["addr_info"]
                if address["family"] == "inet"
            )
            for each in found
            if each and "LOOPBACK" not in each["flags"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"not what `ip -j address` prints: {error!r}") from error


def parse_gids(text: str) -> tuple[Gid, ...]:
    """What GIDS printed. Raises ValueError naming a line that is not of its form."""
    found = []
    for line in text.splitlines():
        words = line.split("|")
        if len(words) != 6:
            raise ValueError(f"not a GID: {line!r}")
        device, port, index, gid, kind, interface = words
        try:
            address = ipaddress.IPv6Address(gid)
            found.append(Gid(device, int(port), int(index), address, kind, interface or None))
        except ValueError as error:
            raise ValueError(f"not a GID: {line!r}: {error}") from error
    return tuple(found)


def parse_traffic_classes(text: str) -> dict[str, int]:
    """What TRAFFIC_CLASSES printed; adapters that were given none are left out. Raises ValueError."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        device, bar, value = line.partition("|")
        match = re.fullmatch(r"(?:Global tclass=)?(\d+)\s*", value)
        if not bar or (match is None and value.strip()):
            raise ValueError(f"not a traffic class: {line!r}")
        if match and 0 < int(match[1]) < 256:
            found.setdefault(device, int(match[1]))
    return found


def parse_variables(text: str) -> dict[str, str]:
    """NCCL's variables in lines NAME=VALUE; the last of a name counts, as NCCL reads them."""
    found = re.findall(r"^\s*(NCCL_[A-Z0-9_]+)\s*=\s*([^\n#]*)", text, re.MULTILINE)
    return {name: value.strip() for name, value in found}


QUESTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "interfaces": ("ip -j address show up", parse_interfaces),
    "ports": (rdma.QUERY, lambda text: tuple(rdma.parse(text))),
    "gids": (GIDS, parse_gids),
    "traffic_classes": (TRAFFIC_CLASSES, parse_traffic_classes),
    "configuration": (f"if [ -e {NCCL} ]; then cat {NCCL}; fi", parse_variables),
    "environment": ("bash -lc env </dev/null", parse_variables),
}
COMMANDS = [command for command, _ in QUESTIONS.values()]


def wiring(answers: Sequence[Answer]) -> Wiring:
    """The answers to COMMANDS, in their order."""
    parts: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for (part, (_, read)), answer in zip(QUESTIONS.items(), answers, strict=True):
        try:
            if answer.rc == 0:
                parts[part] = read(answer.stdout)
            else:
                unread[part] = answer.stderr.strip() or f"exit {answer.rc}"
        except ValueError as error:
            unread[part] = str(error)
    return Wiring(**parts, unread=unread)
