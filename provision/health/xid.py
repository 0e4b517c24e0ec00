"""What an XID asks for: NVIDIA's table and the workflows behind some of its numbers. Pure.

The table (profiles/health.json, "xids") is NVIDIA's (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) and
gives a number's action; 45, 48, 63, 64, 74, 94, 119, 120, 144 to 150, 154, 171 and 172 depend on what stands around
them. `before` tells how often the same was acted upon already, so that a reset that did not help becomes a reboot, and
a reboot that did not help a replacement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from provision.health.finding import FAIL, PASS, UNKNOWN, WARN
from provision.health.kernel import Event
from provision.health.limits import DATA

_RECOVERY = re.compile(r"to (?:0x(?P<number>[0-9a-f]+) )?\(?(?P<words>[A-Za-z][\w /-]+?)\)?\.?$")
# the driver's own words, in messages and in GPU Recovery Action; they change from release to release
RECOVERY = {
    "none": (PASS, None),
    "reset": (FAIL, "reset"),
    "gpu reset required": (FAIL, "reset"),
    "reboot": (FAIL, "reboot"),
    "node reboot required": (FAIL, "reboot"),
    "drain p2p": (FAIL, "drain"),
    "drain and reset": (FAIL, "reset"),
    "gpu drain p2p": (FAIL, "drain"),
    "pf flr": (FAIL, "reset"),
    "bus reset": (FAIL, "reset"),
    "os reboot": (FAIL, "reboot"),
    "system reboot": (FAIL, "reboot"),
    "recover imex domain": (FAIL, "drain"),
}
# nvmlDeviceGpuRecoveryAction_t
RECOVERY_NAMES = {
    0: "None",
    1: "Reset",
    2: "Reboot",
    3: "Drain P2P",
    4: "Drain and Reset",
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}
AFTER_RESET = "the same came back after a reset"
AFTER_REBOOT = "the same came back after a reboot"
ADVICE = {
    "reset": "drain, end its jobs, `nvidia-smi -r -i GPU` (all GPUs where NVSwitch connects them)",
    "reboot": "drain, reboot; if it comes back: reseat, check power and cooling",
    "rma": "drain, run the field diagnostic, replace the GPU",
    "drain": "drain it",
    "warn": "look at it when its jobs have ended",
    "fix": "",
}


@dataclass(frozen=True)
class Judged:
    """One XID on one GPU, judged."""

    verdict: str
    action: str | None
    why: str


@cache
def table() -> dict[int, str]:
    """XID -> "application", "ignore", "reset", "reboot", "support", "update", "mechanics", "smoothing" or "uvm"."""
    groups = json.loads(__loader__.get_data(DATA).decode())["xids"]  # type: ignore[name-defined]
    return {number: action for action, numbers in groups.items() for number in numbers}


def recovery(words: str) -> tuple[str, str | None] | None:
    """Verdict and action of a GPU Recovery Action in the driver's words; None for words that are not known."""
    return RECOVERY.get(words.strip().lower())


def judge(event: Event, others: Iterable[Event], before: Mapping[str, int], jobs: int = 3) -> Judged:
    """What the XID `event` asks for among all `others`.

    before: action -> how often it was taken for this number on this GPU since the GPU was last known good.
    jobs: so many different processes with application errors on one GPU are the GPU's fault.
    """
    assert event.number is not None
    same = [
        other
        for other in others
        if other.kind == "xid" and other.device == event.device and other is not event
    ]
    judged = _workflow(event, same, jobs)
    return _escalated(judged, before)


def _workflow(event: Event, same: list[Event], jobs: int) -> Judged:
    number = event.number
    numbers = {other.number for other in same}
    if number == 45:
        if numbers - {45}:
            return Judged(
                PASS,
                None,
                f"follows XID {min(n for n in numbers - {45} if n is not None)}: not one of its own",
            )
        return Judged(
            WARN,
            "warn",
            "a process was ended and no other XID tells why: restart it; the fabric manager if it repeats",
        )
    if number == 48:
        if 64 in numbers:
            return Judged(FAIL, "rma", "double bit error, and its row could not be remapped (XID 64)")
        if numbers & {63, 94}:
            return Judged(FAIL, "reset", "double bit error, its row is remapped at the next reset")
        return Judged(
            FAIL, "reset", "double bit error and no word of remapping: field diagnostic after the reset"
        )
    if number == 63:
        return Judged(WARN, "warn", "a row will be remapped at the next reset")
    if number == 64:
        return Judged(
            FAIL, "reset", "a row could not be remapped: a second time is a reason for a replacement"
        )
    if number == 74:
        if 79 in numbers:
            return Judged(PASS, None, "follows XID 79: the link went with the GPU")
        return Judged(
            FAIL, "reset", "NVLink failed: after a second time check seating, then the GPU and its peer"
        )
    if number == 94:
        return Judged(
            WARN, "warn", "contained memory error: one process ended; reset the GPU when its jobs have ended"
        )
    if number == 95:
        return Judged(FAIL, "reset", "uncontained memory error: all that runs on this GPU is suspect")
    if number in (119, 120):
        return Judged(
            FAIL,
            "reset",
            "the GPU's system processor does not answer: reboot if the reset does not help, then its firmware",
        )
    if number is not None and 144 <= number <= 150:
        if re.search(r"\bNon-?fatal\b", event.text, re.IGNORECASE):
            return Judged(WARN, "warn", "NVLink recovered by itself")
        if re.search(r"\bFatal\b", event.text):
            return Judged(
                FAIL,
                "reset",
                "NVLink failed for good: XID 154 or the GPU's recovery action has the last word",
            )
        return Judged(FAIL, "reset", "NVLink error of unknown severity")
    if number == 154:
        if any(other.number == 154 and _later(other, event) for other in same):
            return Judged(PASS, None, "a later one has the last word")
        asked = _RECOVERY.search(event.text.strip())
        known = recovery(asked["words"]) if asked else None
        if known is None and asked and asked["number"]:
            known = recovery(RECOVERY_NAMES.get(int(asked["number"], 16), ""))
        if known is None:
            return Judged(UNKNOWN, "drain", f"recovery action in words that are not known: {event.text[:80]}")
        return Judged(known[0], known[1], f"the driver asks for: {asked['words'] if asked else ''}")
    if number in (171, 172):
        if 48 in numbers:
            return Judged(PASS, None, "tells more of XID 48")
        return Judged(FAIL, "reset", f"uncorrectable error in {'DRAM' if number == 171 else 'SRAM'}")
    return _tabled(event, jobs)


def _later(other: Event, event: Event) -> bool:
    """Whether the last message of `other` came after the last one of `event`."""
    if other.sequence is not None and event.sequence is not None:
        return other.sequence > event.sequence
    return other.sequence is None and event.sequence is None and other.final > event.final


def _tabled(event: Event, jobs: int) -> Judged:
    action = table().get(event.number or 0)
    if action == "ignore":
        return Judged(PASS, None, "to be ignored")
    if action == "application":
        if len(set(event.pids)) >= jobs:
            return Judged(
                WARN, "warn", f"an application's error, but of {len(set(event.pids))} processes on one GPU"
            )
        return Judged(PASS, None, "an application's error")
    if action == "reset":
        return Judged(FAIL, "reset", "needs a reset")
    if action == "reboot":
        return Judged(FAIL, "reboot", "needs a reboot")
    if action == "mechanics":
        return Judged(FAIL, "drain", "power or seating: check the GPU's power cables and its seat")
    if action == "update":
        return Judged(WARN, "warn", "update driver and firmware")
    if action == "smoothing":
        return Judged(
            WARN, "warn", "the circuit that smooths the GPU's power is off or worn: temperature, or its life"
        )
    if action == "uvm":
        return Judged(WARN, "warn", "unified memory error: look for another XID, report it if there is none")
    if action == "support":
        return Judged(FAIL, "drain", "for NVIDIA's support")
    if event.number is not None and 0 < event.number < 162:
        return Judged(FAIL, "drain", "not in use in current drivers: for NVIDIA's support")
    return Judged(UNKNOWN, "drain", "no action is known for this number: look it up in NVIDIA's catalogue")


def _escalated(judged: Judged, before: Mapping[str, int]) -> Judged:
    """`judged`, or the next step where its action was taken before and did not help."""
    if judged.action == "reset" and before.get("reset", 0) >= 1:
        step = "rma" if before.get("reboot", 0) >= 1 else "reboot"
        return Judged(judged.verdict, step, f"{judged.why}; {AFTER_RESET}")
    if judged.action == "reboot" and before.get("reboot", 0) >= 2:
        return Judged(judged.verdict, "rma", f"{judged.why}; {AFTER_REBOOT}")
    return judged
