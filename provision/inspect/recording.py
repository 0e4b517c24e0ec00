"""One recording: what kind it is, what it tells, what is wrong with it as a recording."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from provision.health.finding import PASS, UNKNOWN, Finding
from provision.health.readings import Device


@dataclass
class Recording:
    """What a parser makes of a text. `node` goes through the catalogue's checks, `findings` are the parser's own."""

    kind: str  # "nvidia-smi -q -x", for a person
    node: Device = field(default_factory=lambda: Device("node"))
    findings: list[Finding] = field(default_factory=list)
    about: str = ""  # what it holds: "2 GPUs, driver 580.159.04"
    data: Any = None  # what rules over several recordings need
    host: str | None = None  # where each line of the file names it

    def cut(self, why: str) -> None:
        """Say that the recording is not whole: nothing that it seems to say is a reason to call a node well."""
        self.findings.append(
            Finding(
                UNKNOWN,
                "recording",
                self.kind,
                expected="a whole recording",
                why=why,
                advice="record it again",
            )
        )

    def find(
        self,
        verdict: str,
        check: str,
        subject: str,
        read: str | None = None,
        expected: str | None = None,
        *,
        action: str | None = None,
        advice: str | None = None,
        why: str | None = None,
    ) -> None:
        """Add a finding."""
        self.findings.append(Finding(verdict, check, subject, read, expected, action, advice, why))

    def tell(self, check: str, subject: str, read: str, why: str | None = None) -> None:
        """Add what was read, where there is nothing against it."""
        self.findings.append(Finding(PASS, check, subject, read, why=why))


Parser = Callable[[str], Recording]


@dataclass(frozen=True)
class Kind:
    """A kind of recording: `is_it` looks for what only this kind has."""

    name: str
    is_it: Callable[[str], bool]
    parse: Parser


def ends_with_border(text: str) -> bool:
    """Whether a table in `text` ends with a border as wide as its first one: otherwise something is missing."""
    borders = re.findall(r"^\s*(\+[-+=]+\+)\s*$", text, re.MULTILINE)
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return bool(borders) and last == borders[-1] and len(last) == len(borders[0])
