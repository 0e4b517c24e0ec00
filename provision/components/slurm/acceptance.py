"""Admission of nodes: what slurmctld knows of them, and the only changes this tool makes to their state.

`run` is the root shell on the head (`provision.engine.remote.RootShell.run`). Unknown never admits: what cannot be
read raises, and a reason that somebody else set is left alone.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Protocol

from provision.components.slurm.exports import MARK, ours, slurm_fold
from provision.engine.remote import Output

_TIMEOUT = 30.0  # seconds for one question to slurmctld
ANSWER_SECONDS = 60.0  # for the slurmd of a node that was just resumed

BASES = frozenset({"UNKNOWN", "DOWN", "IDLE", "ALLOCATED", "ERROR", "MIXED", "FUTURE"})
FLAGS = frozenset(
    {
        "BLOCKED",
        "CLOUD",
        "COMPLETING",
        "DRAIN",
        "DYNAMIC_FUTURE",
        "DYNAMIC_NORM",
        "EXTERNAL",
        "FAIL",
        "INVALID",
        "INVALID_REG",
        "MAINTENANCE",
        "NOT_RESPONDING",
        "PERFCTRS",
        "PLANNED",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "POWERING_UP",
        "POWER_DOWN",
        "POWER_DRAIN",
        "POWER_UP",
        "REBOOT_CANCELED",
        "REBOOT_ISSUED",
        "REBOOT_REQUESTED",
        "RES",
        "RESERVED",
        "UNDRAIN",
    }
)
# sinfo's words -> base and flags; its suffixes -> flags
_WORDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "alloc": ("ALLOCATED", ()),
    "allocated": ("ALLOCATED", ()),
    "blocked": ("IDLE", ("BLOCKED",)),
    "boot": ("IDLE", ("REBOOT_ISSUED",)),
    "comp": ("ALLOCATED", ("COMPLETING",)),
    "completing": ("ALLOCATED", ("COMPLETING",)),
    "down": ("DOWN", ()),
    "drain": ("IDLE", ("DRAIN",)),
    "drained": ("IDLE", ("DRAIN",)),
    "draining": ("ALLOCATED", ("DRAIN",)),
    "drng": ("ALLOCATED", ("DRAIN",)),
    "fail": ("IDLE", ("FAIL",)),
    "failg": ("ALLOCATED", ("FAIL",)),
    "failing": ("ALLOCATED", ("FAIL",)),
    "futr": ("FUTURE", ()),
    "future": ("FUTURE", ()),
    "idle": ("IDLE", ()),
    "inval": ("DOWN", ("INVALID_REG",)),
    "maint": ("IDLE", ("MAINTENANCE",)),
    "mix": ("MIXED", ()),
    "mixed": ("MIXED", ()),
    "no_respond": ("UNKNOWN", ("NOT_RESPONDING",)),
    "npc": ("IDLE", ("PERFCTRS",)),
    "perfctrs": ("IDLE", ("PERFCTRS",)),
    "plnd": ("IDLE", ("PLANNED",)),
    "planned": ("IDLE", ("PLANNED",)),
    "pow_dn": ("IDLE", ("POWERING_DOWN",)),
    "pow_up": ("IDLE", ("POWERING_UP",)),
    "powered_down": ("IDLE", ("POWERED_DOWN",)),
    "powering_down": ("IDLE", ("POWERING_DOWN",)),
    "powering_up": ("IDLE", ("POWERING_UP",)),
    "reboot": ("IDLE", ("REBOOT_REQUESTED",)),
    "reboot_issued": ("IDLE", ("REBOOT_ISSUED",)),
    "resv": ("IDLE", ("RESERVED",)),
    "reserved": ("IDLE", ("RESERVED",)),
    "unk": ("UNKNOWN", ()),
    "unknown": ("UNKNOWN", ()),
}
_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}


class Run(Protocol):
    """Runs a command as root on the head."""

    def __call__(self, command: str, stdin: bytes | None = None, timeout: float = ...) -> Output: ...


class SlurmError(Exception):
    """slurmctld could not be asked, or refused; the message holds its words."""


@dataclass(frozen=True)
class NodeState:
    """One node as slurmctld has it."""

    name: str
    base: str  # one of BASES, or a word that is not known here
    flags: frozenset[str] = frozenset()
    reason: str | None = None
    cpus: int = 0
    memory: int = 0  # MiB
    gres: str = ""
    version: str | None = None  # of its slurmd, None before the first registration
    boot: int | None = None  # seconds since 1970

    @property
    def known(self) -> bool:
        """Whether every word of the state is one that is understood here."""
        return self.base in BASES and self.flags <= FLAGS

    @property
    def registered(self) -> bool:
        """Whether its slurmd has told slurmctld what it has, and still answers."""
        return self.version is not None and self.base != "UNKNOWN" and "NOT_RESPONDING" not in self.flags

    @property
    def silent(self) -> bool:
        """Whether nothing but an answer of its slurmd is missing."""
        closed = self.drained or self.invalid or self.base == "DOWN"
        return "NOT_RESPONDING" in self.flags and not closed

    @property
    def drained(self) -> bool:
        return bool(self.flags & {"DRAIN", "FAIL"})

    @property
    def invalid(self) -> bool:
        """Whether slurmctld refused what the node registered with."""
        return bool(self.flags & {"INVALID", "INVALID_REG"})

    @property
    def usable(self) -> bool:
        """Whether slurmctld would give it to a job."""
        stopped = {
            "DRAIN",
            "FAIL",
            "INVALID",
            "INVALID_REG",
            "NOT_RESPONDING",
            "POWERED_DOWN",
            "POWERING_DOWN",
        }
        return self.known and self.base in ("IDLE", "ALLOCATED", "MIXED") and not self.flags & stopped

    @property
    def word(self) -> str:
        """As a person reads it: "idle+drain"."""
        return "+".join([self.base.lower(), *sorted(flag.lower() for flag in self.flags)])


def parse_state(words: Sequence[str]) -> tuple[str, frozenset[str]]:
    """Base state and flags of `scontrol --json`'s list, of "IDLE+DRAIN", or of one word of sinfo ("drain*").

    Words that are not known are kept as they are, so that the caller can report them.
    """
    base, flags = "", set()
    for word in words:
        for part in word.split("+"):
            bare = part.strip()
            while bare and bare[-1] in _SUFFIXES:
                flags.add(_SUFFIXES[bare[-1]])
                bare = bare[:-1]
            upper, lower = bare.upper(), bare.lower()
            if upper in BASES:
                base = base or upper
            elif upper in FLAGS and (len(words) > 1 or "+" in word):
                flags.add(upper)
            elif lower in _WORDS:
                implied, more = _WORDS[lower]
                base = base or implied
                flags.update(more)
            elif upper in FLAGS:
                flags.add(upper)
            elif not base:
                base = bare or "UNKNOWN"
            else:
                flags.add(upper)
    return base or "UNKNOWN", frozenset(flags)


def parse_nodes(text: str) -> dict[str, NodeState]:
    """From `scontrol show nodes --json`. Raises SlurmError where that is not what it is."""
    try:
        found = json.loads(text)["nodes"]
        states = [_node(each) for each in found]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlurmError(f"scontrol show nodes --json: not understood: {error!r}") from error
    return {state.name: state for state in states}


def _node(entry: Mapping[str, object]) -> NodeState:
    state = entry["state"]
    base, flags = parse_state([str(word) for word in state] if isinstance(state, list) else [str(state)])
    return NodeState(
        name=str(entry["name"]),
        base=base,
        flags=flags,
        reason=str(entry.get("reason") or "") or None,
        cpus=_number(entry.get("cpus")) or 0,
        memory=_number(entry.get("real_memory")) or 0,
        gres=str(entry.get("gres") or ""),
        version=str(entry.get("version") or "") or None,
        boot=_number(entry.get("boot_time")) or None,
    )


def _number(value: object) -> int | None:
    """A number as any data parser writes it: plain, or {"set": true, "number": 5}."""
    if isinstance(value, Mapping):
        return int(str(value["number"])) if value.get("set") else None
    return int(str(value)) if value is not None else None


def states(run: Run) -> dict[str, NodeState]:
    """All nodes of slurmctld, by name. Raises SlurmError."""
    return parse_nodes(asked(run, "scontrol show nodes --json"))


def admit(run: Run, nodes: Collection[str], *, pause: Callable[[float], None] = time.sleep) -> dict[str, str]:
    """Open `nodes` to jobs, those that only this tool's mark keeps closed.

    Returns node -> why it was not opened, for the others: a person's drain, not registered, refused by slurmctld.
    A resumed node counts as not responding until slurmctld has asked its slurmd once more: that is waited for,
    ANSWER_SECONDS at most, by `pause`.
    """
    now = states(run)
    refused: dict[str, str] = {}
    opened = []
    for name in nodes:
        state = now.get(name)
        if why := _closed(state):
            refused[name] = why
        elif state is not None and not state.usable:
            opened.append(name)
    if opened:
        asked(run, f"scontrol update nodename={quote(slurm_fold(opened))} state=resume")
        refused |= _await_usable(run, opened, pause)
    return refused


def _await_usable(run: Run, names: Collection[str], pause: Callable[[float], None]) -> dict[str, str]:
    """Wait for resumed nodes that only have to answer yet; node -> why, for those that are not usable then."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        now = states(run)
        closed = {name: now.get(name) for name in names if name not in now or not now[name].usable}
        silent = any(state is not None and state.silent for state in closed.values())
        if not silent or time.monotonic() >= deadline:
            return {
                name: f"still {state.word if state is not None else 'unknown'} after resume"
                for name, state in closed.items()
            }
        pause(1.0)


def _closed(state: NodeState | None) -> str | None:
    """Why this tool must not open the node; None: it may."""
    if state is None:
        return "slurmctld does not know it"
    if not state.known:
        return f"its state {state.word} is not understood"
    if not state.registered:
        return f"its slurmd has not registered ({state.word})"
    if state.invalid:
        return f"slurmctld refuses it: {state.reason or state.word}"
    if (state.drained or state.base == "DOWN") and not ours(state.reason):
        return f"{state.word}: {state.reason or 'no reason given'}"
    return None


def quarantine(run: Run, nodes: Collection[str], reason: str) -> list[str]:
    """Close `nodes` with `provision: REASON`; returns those that were closed now.

    A node that a person drained keeps its own reason: it is closed already.
    """
    text = mark(reason)
    now = states(run)
    closing = []
    for name in nodes:
        state = now.get(name)
        if state is None:
            raise SlurmError(f"slurmctld does not know {name}")
        if state.drained and (not ours(state.reason) or state.reason == text):
            continue
        closing.append(name)
    if closing:
        asked(run, f"scontrol update nodename={quote(slurm_fold(closing))} state=drain reason={quote(text)}")
    return closing


def mark(reason: str) -> str:
    """A reason as slurmctld keeps it: one line that carries this tool's mark."""
    text = re.sub(r"\s+", " ", reason).strip().replace('"', "'")
    return text if ours(text) else f"{MARK} {text}"


def asked(run: Run, command: str) -> str:
    """What a command of Slurm's answers. Raises SlurmError with its words."""
    answer = run(command, timeout=_TIMEOUT)
    if answer.rc != 0:
        said = (answer.stderr or answer.stdout).strip() or f"exit {answer.rc}"
        raise SlurmError(f"{command.split(' reason=')[0]}: {said}")
    return answer.stdout
