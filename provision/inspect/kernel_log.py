"""Kernel messages in whatever form, and what daemons beside the kernel write into the same journal. Pure."""

from __future__ import annotations

import re

from provision.health.finding import FAIL, WARN
from provision.health.kernel import address, event_of, events, parse
from provision.health.readings import Device
from provision.inspect.recording import Kind, Recording


def is_it(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and len(parse(text)) * 2 >= len(lines)


def reports(text: str) -> list[str]:
    """The lines of `text` in a form of the kernel's messages that report an event, and those that continue one."""
    return [line for line in text.splitlines() if event_of(line) is not None and parse(line)]


# what daemons say in the journal: pattern -> verdict, check, advice, action
_DAEMONS = (
    (
        r"(\S+)\.service: Scheduled restart job, restart counter is at (\d+)",
        FAIL,
        "services",
        "it ends again and again: journalctl -u UNIT; changed MIG or driver under it?",
        "drain",
    ),
    (
        r"(\S+)\.service: Failed with result '([^']+)'",
        FAIL,
        "services",
        "systemctl status UNIT; journalctl -u UNIT",
        "fix",
    ),
    (
        r"(\S+)\.service: Main process exited, code=(\S+), status=(\S+)",
        WARN,
        "services",
        "journalctl -u UNIT",
        "warn",
    ),
)


def parse_log(text: str) -> Recording:
    found = Recording("kernel messages")
    messages = parse(text)
    reported = events(messages)
    found.node = Device("node", {"kernel.events": reported}, found.kind)
    for pattern, verdict, check, advice, action in _DAEMONS:
        last: dict[str, re.Match[str]] = {}
        for message in messages:
            match = re.search(pattern, message.text) if ".service:" in message.text else None
            if match:
                last[match[1]] = match
        for unit, match in last.items():
            found.find(
                verdict, check, unit, match[0], "active", action=action, advice=advice.replace("UNIT", unit)
            )
        if last:
            break
    loaded = [
        match
        for message in messages
        if "loading NVIDIA" in message.text
        and (
            match := re.search(r"loading NVIDIA UNIX (Open )?Kernel Module .*?\s([\d.]{5,})\s", message.text)
        )
    ]
    if loaded:
        found.node.values["driver_version"] = loaded[-1][2]
    lines = sum(1 for line in text.splitlines() if line.strip())
    odd = lines - len(messages)
    about = [f"{len(messages)} messages", f"{len(reported)} kinds of events"]
    if loaded:
        about.append(f"driver {loaded[-1][2]}")
    if odd:
        about.append(f"{odd} lines of another form")
    found.about = ", ".join(about)
    if not text.endswith("\n") and len(messages) > 1:
        found.find(
            WARN,
            "recording",
            found.kind,
            "ends in the middle of a line",
            "whole lines",
            why="cut off? events may be missing",
            advice="record it again",
        )
    return found


def is_systemctl(text: str) -> bool:
    return (
        re.search(r"^\S+\.service: (?:Main process|Scheduled restart|Failed with)", text, re.MULTILINE)
        is not None
    )


def parse_systemctl(text: str) -> Recording:
    prefixed = "".join(f"systemd[1]: {line}\n" for line in text.splitlines() if line.strip())
    found = parse_log(prefixed)
    found.kind = "systemd's messages"
    found.node.values.pop("kernel.events", None)
    return found


_MANAGER = re.compile(r"\[\w{3} +\d+ \d{4} [\d:]+\] \[(\w+)\] \[tid \d+\] (.*)")


def is_manager(text: str) -> bool:
    return any(_MANAGER.fullmatch(line) for line in text.splitlines()[:20])


def parse_manager(text: str) -> Recording:
    found = Recording("fabric manager's log")
    told: dict[tuple[str, str], int] = {}
    lines = 0
    for line in text.splitlines():
        match = _MANAGER.fullmatch(line)
        lines += match is not None
        if match and match[1] not in ("INFO", "DEBUG"):
            told[match[1], match[2]] = told.get((match[1], match[2]), 0) + 1
    for (level, words), count in told.items():
        mild = level.startswith("WARN") or "non-fatal" in words
        switch = re.search(r"pci bus id ([\da-fA-F:.]+)", words)
        found.find(
            WARN if mild else FAIL,
            "fabric-manager",
            f"NVSwitch {address(switch[1])}" if switch else "node",
            f"{words[:140]}{f', {count} times' if count > 1 else ''}",
            "no error",
            action="warn" if mild else "drain",
            advice="dmesg | grep SXid; nvidia-smi nvlink -s; reset all GPUs, or reboot",
        )
    if not found.findings:
        found.tell("fabric-manager", "node", f"no error in {lines} messages")
    found.about = f"{lines} messages"
    return found


KINDS = (
    Kind("fabric manager's log", is_manager, parse_manager),
    Kind("systemd's messages", is_systemctl, parse_systemctl),
    Kind("kernel messages", is_it, parse_log),
)
