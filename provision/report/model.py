"""The one result model: what was found, about which node, and what to do.

Every verb produces a `Document`; terminal, JSON, JUnit and HTML are renderings of it. The JSON shape is a
contract (docs/json.md) and is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Verdict(StrEnum):
    """What could be told about a subject. UNKNOWN (could not tell) is never healthy."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"  # does not apply, with the reason
    UNKNOWN = "unknown"

    @property
    def good(self) -> bool:
        return self in (Verdict.PASS, Verdict.WARN, Verdict.SKIP)


_SEVERITY = [Verdict.SKIP, Verdict.PASS, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a whole from those of its parts; nothing at all is UNKNOWN, never PASS."""
    found = list(verdicts)
    return max(found, key=_SEVERITY.index) if found else Verdict.UNKNOWN


class Finding(BaseModel):
    """One thing that was read and judged."""

    model_config = ConfigDict(extra="forbid")

    verdict: Verdict
    check: str  # kebab-case name of the rule: "gpu-count", "site-unknown-key"
    subject: str  # node, file or key it is about
    read: str | None = None
    expected: str | None = None
    action: str | None = None  # what to do next, for a tired person
    why: str | None = None
    source: str | None = None  # the file or command it was read from
    line: int | None = None


class NodeResult(BaseModel):
    model_config = ConfigDict(extra="forbid")

    verdict: Verdict
    state: str | None = None  # acceptance: new, configured, verified, burned-in, admitted, quarantined
    changed: int = 0
    failed: int = 0
    reason: str | None = None


class Document(BaseModel):
    """What a verb answers: `--json` prints exactly this."""

    model_config = ConfigDict(extra="forbid")

    verb: str
    site: str | None = None
    verdict: Verdict
    seconds: float = 0.0
    nodes: dict[str, NodeResult] = Field(default_factory=dict)
    findings: list[Finding] = Field(default_factory=list)
    details: dict[str, Any] = Field(default_factory=dict)  # the verb's own data: plan, burn-in numbers

    @property
    def exit_status(self) -> int:
        """0 all pass (warnings allowed), 1 something failed or could not be told."""
        return 0 if self.verdict.good else 1
