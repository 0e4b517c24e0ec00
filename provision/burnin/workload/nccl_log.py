"""What NCCL's own log (NCCL_DEBUG=INFO) says of the way its data takes. Pure, without torch.

A job that fell back to sockets, to host memory, or off NVLink SHARP still gives right results and passes for slow
hardware: the log tells them apart. The lines are those of NCCL 2.4 to 2.28; what is not understood is left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

# Of all ranks' logs the calls of one run are thousands; this many kinds are more than the levels measure.
MOST_CHOICES = 200
MOST_WARNINGS = 20

_MESSAGE = re.compile(r"NCCL (INFO|WARN) (.*)$")
_INIT = re.compile(r"\bcomm 0x[0-9a-f]+ rank (\d+) nranks (\d+) .*- Init START", re.IGNORECASE)
_NETWORK = re.compile(r"Using network (\S+)")
_DEVICES = re.compile(r"NET/(\S+) ?: Using (.*)")
_DEVICE = re.compile(r"\[\d+\]\s*(\S+)")
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_CHANNELS = re.compile(
    r"(\d+) coll channels(?:, \d+ collnet channels)?(?:, (\d+) nvls channels)?, (\d+) p2p channels"
)
_CONNECTION = re.compile(
    r"(?:Channel|Ring|Tree) \d+(?:/\d+)? : (\d+)\[[0-9a-f]+\] -> (\d+)\[[0-9a-f]+\] (?:\[(send|receive)\] )?via (\S+)"
)
_CHOICE = re.compile(
    r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}", re.IGNORECASE
)
_NVLS_OFF = re.compile(r"NCCL_NVLS_ENABLE set by environment to 0\b")


def transport(text: str, rank: int, world_size: int) -> dict[str, Any]:
    """The shape of `provision.burnin.result.Transport`, from one process's log, for the communicator of all ranks.

    Devices of the network (an "IB" that was found but is not used, say) are those of the one in use. A line that
    has no direction tells of sending.
    """
    network: str | None = None
    devices: dict[str, list[str]] = {}
    nvls: bool | None = None
    channels: tuple[str | None, ...] = (None, None, None)
    connections: Counter[tuple[int, str, str]] = Counter()
    choices: dict[tuple[str, int, str, str, int], None] = {}
    warnings: dict[str, None] = {}
    ours, heard = True, False  # before the first communicator starts, the lines are everybody's
    for line in text.splitlines():
        found = _MESSAGE.search(line)
        if not found:
            continue
        heard = True
        kind, message = found.groups()
        if kind == "WARN":
            warnings[message] = None
            continue
        if match := _INIT.search(message):
            ours = int(match[2]) == world_size and int(match[1]) == rank
        if match := _DEVICES.match(message):
            devices[match[1]] = _DEVICE.findall(match[2].split("; OOB")[0])
        if _NVLS_OFF.search(message):
            nvls = False
        if not ours:
            continue
        if match := _NETWORK.search(message):
            network = match[1]
        elif match := _NVLS.search(message):
            nvls = match[1] is None and nvls is not False
        elif match := _CHANNELS.search(message):
            channels = match.groups()
        elif match := _CONNECTION.search(message):
            source, target, direction, via = int(match[1]), int(match[2]), match[3], match[4]
            direction = direction or "send"
            connections[target if direction == "send" else source, direction, via] += 1
        elif match := _CHOICE.search(message):
            width = int(match[6]) - int(match[5]) + 1
            choices[match[1], int(match[2]), match[3].upper(), match[4].upper(), width] = None
    if channels[1] is not None and int(channels[1]) == 0:
        nvls = False
    return {
        "rank": rank,
        "network": network,
        "devices": devices.get(network or "", []),
        "nvls": nvls,
        "collective_channels": _number(channels[0]),
        "nvls_channels": _number(channels[1]),
        "p2p_channels": _number(channels[2]),
        "connections": [
            {"peer": peer, "direction": direction, "via": via, "channels": count}
            for (peer, direction, via), count in sorted(connections.items())
        ],
        "choices": [
            dict(zip(("operation", "bytes", "algorithm", "protocol", "channels"), choice))
            for choice in list(choices)[:MOST_CHOICES]
        ],
        "warnings": list(warnings)[:MOST_WARNINGS],
        "why": None if heard else "the log has no line of NCCL",
    }


def unread(rank: int, why: str) -> dict[str, Any]:
    """The same shape where there is no log."""
    return {**transport("", rank, 1), "why": why}


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
