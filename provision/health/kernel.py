"""Kernel messages: lines of any form to messages, messages to events. Pure.

Understood are /dev/kmsg (`6,3973,227996636,-;text`), dmesg (`[  12.345678] text`, also -H, -T, -x, --time-format iso),
journalctl (short, short-full, short-iso, json), rsyslog, pstore (`<6>[  12.345678] text`), Talos and bare text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from re import Pattern
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message. `sequence` and `seconds` (since boot) are known of /dev/kmsg alone."""

    text: str
    moment: str = ""  # as it was written
    sequence: int | None = None
    seconds: float | None = None
    tag: str = "kernel"  # who wrote it: "kernel", "systemd-networkd"


@dataclass(frozen=True)
class Event:
    """Something that the kernel (or a daemon beside it) reported; equal reports are one event with a count."""

    kind: str  # "xid", "sxid", "off-bus", or one of PATTERNS
    device: str = ""  # PCI address, interface, process
    number: int | None = None  # of an XID or SXID
    text: str = ""
    count: int = 1
    first: str = ""  # moment of the first and of the last one
    last: str = ""
    sequence: int | None = None  # the last one's
    pids: tuple[str, ...] = ()
    order: int = 0  # place of the first one among all messages
    final: int = 0  # place of the last one


_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_KMSG = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)")
_BRACKET = re.compile(
    rf"(?:<\d+>|kernel: )?"
    rf"\[\s*(\+?\d+\.\d+|\.\.\.|{_MONTH}\s*\d+ \d\d:\d\d|(?:\w{{3}} )?{_MONTH}\s+\d+ [\d:]+ ?\d*|{_ISO})"
    r"\s*\] ?(.*)"
)
_DECODED = re.compile(rf"[a-z]+\s*:[a-z]+\s*: ?(?:\[\s*([^\]]+)\]|({_ISO}))\s(.*)")
_SYSLOG = re.compile(
    rf"((?:\d{{4}} )?{_MONTH}\s+\d+ \d\d:\d\d:\d\d(?:\.\d+)?|{_ISO}"
    r"|\w{3} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \w+)"
    r"\s+[\w.:-]+\s+([\w.@/-]+)(?:\[\d+\])?:\s?(.*)"
)
_TALOS = re.compile(rf"[\w.:-]+: kern:\s+\w+: \[({_ISO})\]: (.*)")
_TAGGED = re.compile(r"(?:<\d+>|kernel: )(?!\[)(.*)")
_PLAIN_ISO = re.compile(rf"({_ISO})\s(.*)")
_DAEMON = re.compile(
    r"(nv-fabricmanager|nvidia-persistenced|nv-hostengine|slurmd|systemd(?:-\w+)?)(?:\[\d+\])?:\s(.*)"
)
_BARE = re.compile(
    r"\s*(?:NVRM:|nvidia-nvswitch\d*:|nvidia[-_]peermem\b|mlx5_core |pcieport |EXT4-fs |XFS |nvme nvme\d)"
)
_CONTINUED = re.compile(r"\s+NVRM: (.*)")


def parse(text: str) -> list[Message]:
    """The messages of `text`; what is no line of a known form is left out. Never raises."""
    found: list[Message] = []
    for line in text.splitlines():
        message = _message(line)
        if message is None:
            continue
        continued = _CONTINUED.fullmatch(line)
        if continued and found:
            message = replace(message, moment=found[-1].moment)
        found.append(message)
    return found


def _message(line: str) -> Message | None:
    if line.startswith("{"):
        return _journal_json(line)
    kmsg = _KMSG.fullmatch(line)
    if kmsg and len(kmsg[2]) < 19 and len(kmsg[3]) < 19:
        seconds = int(kmsg[3]) / 1e6
        return Message(kmsg[4], f"{seconds:.6f}", int(kmsg[2]), seconds)
    decoded = _DECODED.fullmatch(line)
    if decoded:
        return Message(decoded[3], decoded[1] or decoded[2])
    syslog = _SYSLOG.fullmatch(line)
    if syslog:
        return Message(re.sub(r"^\[\s*\d+\.\d+\] ", "", syslog[3]), syslog[1], tag=syslog[2])
    bracket = _BRACKET.fullmatch(line)
    if bracket:
        return Message(bracket[2], bracket[1])
    daemon = _DAEMON.fullmatch(line)
    if daemon:
        return Message(daemon[2], tag=daemon[1])
    plain = _PLAIN_ISO.fullmatch(line)
    if plain:
        return Message(re.sub(r"^\S+ kernel: ", "", plain[2]), plain[1])
    talos = _TALOS.fullmatch(line)
    if talos:
        return Message(talos[2], talos[1])
    tagged = _TAGGED.fullmatch(line)
    if tagged:
        return Message(tagged[1])
    return Message(line.strip()) if _BARE.match(line) else None


def _journal_json(line: str) -> Message | None:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    told = entry.get("MESSAGE")
    if isinstance(told, list):  # how the journal writes a message with a byte that is no text
        try:
            told = bytes(told).decode(errors="replace")
        except (TypeError, ValueError):
            return None
    if not isinstance(told, str):
        return None
    moment = str(entry.get("__REALTIME_TIMESTAMP", ""))
    return Message(told, moment, tag=str(entry.get("SYSLOG_IDENTIFIER", "kernel")))


# ---- messages to events

_ADDRESS = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_SHORT = rf"(?:{_ADDRESS}|[0-9a-fA-F]{{2}}:[0-9a-fA-F]{{2}}\.[0-7])"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({_ADDRESS})[^)]*\): (\d+)(?:, (.*))?")
_SXID = re.compile(rf"SXid \((?:PCI:)?({_ADDRESS})\): (\d+), (.*)")
_PID = re.compile(r"pid='?(\d+)")
_OFF_BUS = re.compile(
    rf"NVRM: GPU ({_SHORT}): GPU has fallen off the bus|NVRM: GPU at ({_SHORT}).*fallen off the bus"
)
_OFF_BUS_BEGIN = re.compile(rf"NVRM: The NVIDIA GPU ({_SHORT})(.*)")
_OFF_BUS_END = "fallen off the bus and is not responding"

# kind -> what the kernel says; group 1, where there is one, is the device. Who reads them is in the catalogue.
PATTERNS: dict[str, Pattern[str]] = {
    "garbled": re.compile(rf"NVRM: Xid \((?:PCI:)?({_ADDRESS})"),  # an XID without its number
    "rm-init": re.compile(
        rf"NVRM: GPU ({_SHORT}): RmInitAdapter failed|NVRM: (?:GPU\d+ )?RmInitAdapter(?: failed|: Cannot init)"
    ),
    "uvm-fatal": re.compile(r"NVRM: .*uvm encountered global fatal error"),
    "slot-down": re.compile(rf"({_ADDRESS}): pciehp: Slot\([^)]*\): (?:Link Down|Card not present)"),
    "nothing-driven": re.compile(
        r"NVRM: (?:None of the NVIDIA devices were initialized|No NVIDIA GPU found)"
    ),
    "nvlink": re.compile(r"NVRM: knvlink\w+: .*(?:[Ff]ailed|[Ee]rror)"),
    "open-module-wanted": re.compile(
        rf"NVRM: .*(?:GPU ({_SHORT}))?.*requires use of the NVIDIA open kernel modules"
    ),
    "api-mismatch": re.compile(r"NVRM: API mismatch"),
    "inforom": re.compile(
        r"infoROM is corrupted at gpu ([0-9a-fA-F:.]+)|infoROM is corrupted", re.IGNORECASE
    ),
    "fabric-version": re.compile(
        r"(?:fabric manager )?NVIDIA GPU driver interface version ([\d.]+) don't match with driver version ([\d.]+)"
    ),
    "peermem": re.compile(r"nvidia-peermem .*detected invalid context"),
    "peermem-symbol": re.compile(
        r"nvidia_peermem: (?:Unknown symbol|disagrees about version of symbol) (\w+)"
    ),
    "aer-fatal": re.compile(
        rf"({_ADDRESS}): AER: .*Uncorrect(?:ed|able) \(Fatal\)"
        rf"|({_ADDRESS}): PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)|({_ADDRESS}): DPC: containment event"
    ),
    "aer-nonfatal": re.compile(
        rf"({_ADDRESS}): AER: .*Uncorrect(?:ed|able) \(Non-Fatal\)"
        rf"|({_ADDRESS}): PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)"
    ),
    "aer-corrected": re.compile(rf"({_ADDRESS}): AER: (?:Multiple )?Correct(?:ed|able) error"),
    "downtrain": re.compile(rf"({_ADDRESS}): [\d.]+ Gb/s available PCIe bandwidth, limited by"),
    "module-power": re.compile(
        rf"mlx5_core ({_ADDRESS}).*(?:[Ii]nsufficient power|[Pp]ower budget exceeded)"
    ),
    "module-temperature": re.compile(rf"mlx5_core ({_ADDRESS}).*High [Tt]emperature"),
    "module-error": re.compile(
        rf"mlx5_core ({_ADDRESS}).*Port module event(?:\[error\]|: module \d+, Cable error)"
    ),
    "nic-health": re.compile(
        rf"mlx5_core ({_ADDRESS}).*(?:device's health compromised|health recovery failed|firmware internal error"
        r"|mlx5_init_one failed|enable hca failed|Failed to load firmware)"
    ),
    "carrier-lost": re.compile(
        r"(?:mlx5_core \S+ )?([\w.-]+): (?:Port: \d+ )?"
        r"(?:[Ll]ost carrier|[Ll]ink (?:[Dd]own|DOWN)|NIC Link is Down)"
    ),
    "oom": re.compile(
        r"Out of memory: Kill(?:ed)? process (\d+)|[Mm]emory cgroup out of memory: Kill(?:ed)? process (\d+)"
    ),
    "panic": re.compile(
        r"Kernel panic - not syncing|BUG: unable to handle|Oops: \d{4}|general protection fault: 0"
    ),
    "lockup": re.compile(
        r"watchdog: BUG: soft lockup - CPU#(\d+)|Watchdog detected hard LOCKUP on cpu (\d+)"
        r"|rcu: INFO: \w+ (?:self-)?detected (?:expedited )?stall"
    ),
    "hung-task": re.compile(r"INFO: task (\S+?):\d+ blocked for more than \d+ seconds"),
    "machine-check": re.compile(
        r"mce: \[Hardware Error\]: Machine check|Machine check events logged|EDAC .*\bUE\b"
        r"|Memory failure: 0x[0-9a-f]+: recovery action|\[Hardware Error\]: event severity: (?:fatal|recoverable)"
    ),
    "hardware-corrected": re.compile(r"EDAC (\w+): \d+ CE\b|\[Hardware Error\]: event severity: corrected"),
    "cpu-throttled": re.compile(r"CPU\d+: (?:Core|Package) temperature (?:is )?above threshold"),
    "io-error": re.compile(
        r"(?:blk_update_request: )?(?:critical \w+|I/O) error, dev (\w+)|Buffer I/O error on dev(?:ice)? (\S+),"
        r"|EXT4-fs error \(device ([^)]+)\)|EXT4-fs \(([^)]+)\): (?:I/O error while|failed to convert)"
        r"|md/\w+:(\w+): Disk failure on"
    ),
    "file-limit": re.compile(r"VFS: file-max limit \d+ reached"),
    "server-silent": re.compile(r"nfs: server (\S+) not responding|Lustre: .*Connection to (\S+) .*was lost"),
    "iommu-fault": re.compile(
        rf"DMAR: \[.*Request device \[({_SHORT})\] fault|AMD-Vi: Event logged \[IO_PAGE_FAULT .*device=({_SHORT})"
    ),
    "read-only": re.compile(
        r"(?:EXT4-fs \(([^)]+)\): )?Remounting filesystem read-only"
        r"|XFS \(([^)]+)\): (?:.*Shutting down filesystem|.*shut down)"
    ),
    "nvme": re.compile(
        r"nvme (nvme\d+): (?:I/O .* timeout, (?:reset|disable)|controller is down|Device not ready"
        r"|Removing after probe failure|Disabling device)"
    ),
    "nvme-slow": re.compile(r"nvme (nvme\d+): I/O .* timeout, aborting"),
    "segfault": re.compile(r"([\w.-]+)\[\d+\]: segfault at .*? in ([\w.+-]+)\["),
    "userns-denied": re.compile(
        r'apparmor="DENIED".*(?:profile="unprivileged_userns"|operation="userns_create").*comm="([^"]+)"'
    ),
}


# every event has one of these in its text: most messages have none, and are passed over quickly
_WORDS = (
    "NVRM",
    "SXid",
    "AER",
    "PCIe",
    "nvidia",
    "NVIDIA",
    "mlx5",
    "carrier",
    "ink Down",
    "ink down",
    "ink is Down",
    "emory",
    "panic",
    "BUG",
    "Oops",
    "protection fault",
    "LOCKUP",
    "blocked for",
    "achine check",
    "EDAC",
    "rror",
    "filesystem",
    "nvme",
    "segfault",
    "apparmor",
    "nfoROM",
    "driver interface version",
    "stall",
    "file-max",
    "DPC",
    "pciehp",
    "Hardware Error",
    "ower budget",
    "emperature",
    "Disk failure",
    "not responding",
    "was lost",
    "DMAR",
    "AMD-Vi",
    "Link DOWN",
)


def events(messages: Iterable[Message]) -> list[Event]:
    """What the messages report, in the order of first appearance; equal reports counted."""
    found: dict[tuple[Any, ...], Event] = {}
    counts: dict[tuple[Any, ...], int] = {}
    latest: dict[tuple[Any, ...], tuple[int, Message]] = {}
    pids: dict[tuple[Any, ...], dict[str, None]] = {}
    for order, (message, event) in enumerate(_each(_joined(messages))):
        key = (event.kind, event.device, event.number, _essence(event))
        if key not in found:
            found[key] = replace(event, first=message.moment, order=order)
        counts[key] = counts.get(key, 0) + 1
        latest[key] = (order, message)
        pids.setdefault(key, {}).update(dict.fromkeys(event.pids))
    return [
        replace(
            event,
            count=counts[key],
            last=latest[key][1].moment,
            sequence=latest[key][1].sequence,
            final=latest[key][0],
            pids=tuple(pids[key])[:64],
        )
        for key, event in found.items()
    ]


def _essence(event: Event) -> str:
    """What makes two reports of a kind, device and number different ones."""
    if event.kind == "sxid":
        return "non-fatal" if "Non-fatal" in event.text else "fatal" if "Fatal" in event.text else "data"
    if event.kind == "xid" and event.number is not None and 144 <= event.number <= 150:
        return "fatal" if _fatal(event.text) else "nonfatal"
    if event.kind == "xid" and event.number == 154:
        return event.text
    return ""


def _fatal(text: str) -> bool:
    return re.search(r"(?<!-)\bFatal\b", text) is not None


def _joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Messages with the one about a GPU off the bus, which comes in up to three parts, made one."""
    begun: Message | None = None
    for message in messages:
        if begun is not None and message.text.lstrip().startswith("NVRM: "):
            begun = replace(begun, text=f"{begun.text} {message.text.strip()[6:]}")
            if _OFF_BUS_END in begun.text or len(begun.text) > 400:
                yield begun
                begun = None
            continue
        if begun is not None:
            yield begun
            begun = None
        if _OFF_BUS_BEGIN.search(message.text) and _OFF_BUS_END not in message.text:
            begun = message
        else:
            yield message
    if begun is not None:
        yield begun


def _each(messages: Iterable[Message]) -> Iterator[tuple[Message, Event]]:
    for message in messages:
        event = event_of(message.text)
        if event is not None:
            yield message, event


def event_of(text: str) -> Event | None:
    """The event that one message reports; None for all others."""
    if not any(word in text for word in _WORDS):
        return None
    xid = _XID.search(text)
    if xid:
        detail = xid[3] or ""
        return Event("xid", address(xid[1]), int(xid[2][:9]), detail, pids=tuple(_PID.findall(detail)))
    sxid = _SXID.search(text)
    if sxid:
        return Event("sxid", address(sxid[1]), int(sxid[2][:9]), sxid[3])
    off = _OFF_BUS.search(text) or (_OFF_BUS_BEGIN.search(text) if _OFF_BUS_END in text else None)
    if off:
        return Event("off-bus", address(next(group for group in off.groups() if group)), text=text)
    for kind, pattern in PATTERNS.items():
        match = pattern.search(text)
        if match:
            device = next((group for group in match.groups() if group), "")
            return Event(kind, device, text=text)
    return None


def address(text: str) -> str:
    """A PCI address as the kernel writes it: "00000000:1B:00.0" and "1b:00.0" become "0000:1b:00.0"."""
    bare = text.lower()
    if bare.count(":") == 1:
        bare = f"0000:{bare}"
    domain, _, rest = bare.partition(":")
    if len(domain) > 4 and domain[:-4].strip("0") == "":
        domain = domain[-4:]
    return f"{domain}:{rest}" if "." in rest else f"{domain}:{rest}.0"
