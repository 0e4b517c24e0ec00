"""What a check says, in the words of the project's result model, as plain Python for nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

PASS, WARN, FAIL, SKIP, UNKNOWN = "pass", "warn", "fail", "skip", "unknown"
_SEVERITY = (SKIP, PASS, WARN, UNKNOWN, FAIL)

# What to do about a node, the mildest first. `fix` disturbs nobody; from `drain` on no new job comes; what resets,
# reboots or replaces is maintenance, done on a drained node by a person or a rolling change.
ACTIONS = ("fix", "warn", "drain", "reset", "reboot", "rma")


def worst(verdicts: Iterable[str]) -> str:
    """The verdict of a whole from those of its parts; nothing at all is unknown, never pass."""
    return max(verdicts, key=_SEVERITY.index, default=UNKNOWN)


def sternest(actions: Iterable[str | None]) -> str | None:
    """The action that includes all of `actions`; None where there is none."""
    return max((action for action in actions if action), key=ACTIONS.index, default=None)


@dataclass(frozen=True)
class Finding:
    """One thing that was read and judged."""

    verdict: str
    check: str  # kebab-case name in the catalogue
    subject: str  # the node, GPU, port, disk or file that it is about
    read: str | None = None
    expected: str | None = None
    action: str | None = None  # one of ACTIONS
    advice: str | None = None  # what to do next, for a tired person
    why: str | None = None  # always there for skip and unknown
    source: str | None = None

    def document(self) -> dict[str, Any]:
        """The finding as JSON's `FINDING`: action and advice are one text there."""
        found = asdict(self)
        advice = found.pop("advice")
        told = [part for part in (self.action, advice) if part]
        return {**found, "action": ": ".join(told) or None, "line": None}

    def line(self) -> str:
        """`VERDICT check subject: what was read, what was expected, what to do`."""
        parts = [self.read]
        if self.expected is not None and self.verdict != SKIP:
            parts.append(f"expected {self.expected}")
        parts.append(self.why)
        if self.verdict not in (PASS, SKIP):
            parts.append(": ".join(part for part in (self.action, self.advice) if part) or None)
        return f"{self.verdict.upper()} {self.check} {self.subject}: " + ", ".join(
            part for part in parts if part
        )
