"""InfiniBand and RoCE ports: from /sys, `ibstat`, `ibstatus` and `ibdev2netdev`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# A line a port. Ethernet ports of the same card have no entry here unless RoCE is on. NVSwitches of B200 systems appear
# as devices too: their vital product data say what they are.
QUERY = r"""for p in /sys/class/infiniband/*/ports/*; do
  [ -e "$p/state" ] || continue
  d=${p%/ports/*}
  s=no; ! grep -qa -e NVSwitch -e NVLink "$d/device/vpd" 2>/dev/null || s=yes
  printf '%s|%s|%s|%s' "${d##*/}" "${p##*/}" "$s" "$(basename "$(readlink -f "$d/device")")"
  for f in "$p/state" "$p/phys_state" "$p/rate" "$p/link_layer" \
      "$d/node_guid" "$d/fw_ver" "$d/board_id" "$d/device/numa_node"; do
    v=; [ ! -r "$f" ] || read -r v <"$f"
    printf '|%s' "$v"
  done
  printf '|%s\n' "$(ls "$d/device/net" 2>/dev/null | tr '\n' ' ')"
done"""


@dataclass(frozen=True)
class Port:
    """One port. `rate` in Gbit/s; `state` and `physical` in the kernel's words without their number."""

    device: str
    number: int
    state: str  # "ACTIVE", "DOWN", "INIT" ...
    physical: str  # "LinkUp", "Disabled", "Polling" ...
    rate: float | None
    layer: str  # "InfiniBand" or "Ethernet"
    guid: str | None = None
    firmware: str | None = None
    board: str | None = None
    numa: int | None = None
    address: str | None = None  # of its PCI function
    interfaces: tuple[str, ...] = ()  # network interfaces of the same function
    nvswitch: bool = False

    @property
    def up(self) -> bool:
        return self.state == "ACTIVE" and self.physical == "LinkUp"


def parse(text: str) -> list[Port]:
    """What QUERY printed. Raises ValueError naming a line that is not of its form."""
    return [_port(line) for line in text.splitlines() if line.strip()]


def _port(line: str) -> Port:
    words = line.split("|")
    if len(words) != 13:
        raise ValueError(f"not an RDMA port: {line!r}")
    device, number, nvswitch, address, state, physical, rate, layer, guid, firmware, board, numa, names = (
        words
    )
    try:
        node = int(numa or -1)
        return Port(
            device,
            int(number),
            _word(state),
            _word(physical),
            _rate(rate),
            layer,
            guid or None,
            firmware or None,
            board or None,
            None if node < 0 else node,
            address or None,
            tuple(names.split()),
            nvswitch == "yes",
        )
    except ValueError as error:
        raise ValueError(f"not an RDMA port: {line!r}: {error}") from error


def _word(text: str) -> str:
    """ "4: ACTIVE" is "ACTIVE"."""
    return text.partition(":")[2].strip() or text.strip()


def _rate(text: str) -> float | None:
    """ "400 Gb/sec (4X NDR)" is 400.0; "100", as ibstat has it, too."""
    found = re.match(r"\s*([\d.]+)", text)
    return float(found[1]) if found else None


def parse_ibstat(text: str) -> list[Port]:
    """From `ibstat`. Raises ValueError for another program's words."""
    found: list[Port] = []
    card: dict[str, str] = {}
    port: dict[str, str] | None = None
    for line in text.splitlines():
        begin = re.match(r"CA '(.+)'", line.strip())
        key, _, value = (part.strip() for part in line.partition(":"))
        if begin:
            card, port = {"device": begin[1]}, None
        elif re.fullmatch(r"Port \d+", key) and not value:
            port = {"Port": key.split()[1]}
        elif port is not None:
            port[key] = value
            if key == "Link layer":
                found.append(_of_ibstat(card, port))
                port = None
        elif card and value:
            card[key] = value
        elif line.strip():
            raise ValueError(f"not a line of ibstat: {line!r}")
    if not found:
        raise ValueError(f"ibstat tells of no port: {text.strip()[:80]!r}")
    return found


_STATES = {"Initializing": "INIT"}  # ibstat's words for the kernel's


def _of_ibstat(card: dict[str, str], port: dict[str, str]) -> Port:
    state = port.get("State", "")
    return Port(
        card["device"],
        int(port["Port"]),
        _STATES.get(state, state.upper()),
        port.get("Physical state", ""),
        _rate(port.get("Rate", "")),
        port["Link layer"],
        port.get("Port GUID"),
        card.get("Firmware version"),
        card.get("CA type"),
    )


def parse_ibstatus(text: str) -> list[Port]:
    """From `ibstatus`. Raises ValueError for another program's words."""
    found = []
    for block in re.split(r"(?m)^(?=Infiniband device )", text):
        begin = re.match(r"Infiniband device '(.+)' port (\d+) status:", block)
        if begin is None:
            continue
        values = {
            key.strip(): value.strip() for key, _, value in (x.partition(":") for x in block.splitlines()[1:])
        }
        found.append(
            Port(
                begin[1],
                int(begin[2]),
                _word(values.get("state", "")),
                _word(values.get("phys state", "")),
                _rate(values.get("rate", "")),
                values.get("link_layer", ""),
            )
        )
    if not found:
        raise ValueError(f"ibstatus tells of no port: {text.strip()[:80]!r}")
    return found


def parse_interfaces(text: str) -> dict[tuple[str, int], tuple[str, bool]]:
    """From `ibdev2netdev`: (device, port) -> (interface, up). Raises ValueError naming a line of another form."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+) port (\d+) ==> (\S+) \((Up|Down)\)", line.strip())
        if match is None:
            raise ValueError(f"not a line of ibdev2netdev: {line!r}")
        found[match[1], int(match[2])] = (match[3], match[4] == "Up")
    return found


def with_interfaces(ports: list[Port], interfaces: dict[tuple[str, int], tuple[str, bool]]) -> list[Port]:
    """`ports` of ibstat, each with the interface that ibdev2netdev gives it."""
    return [
        replace(port, interfaces=(interfaces[port.device, port.number][0],))
        if (port.device, port.number) in interfaces
        else port
        for port in ports
    ]
