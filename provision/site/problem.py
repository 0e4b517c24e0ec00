"""What is wrong in a site file, and where."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from provision.report.model import Finding, Verdict

Key = tuple[str | int, ...]  # ("groups", "gpu", "hosts"): where something stands in the document


@dataclass(frozen=True)
class Problem:
    """One mistake, or one warning, in a site file.

    Checks say the key it is about; the reader of the file adds file, line and column.
    """

    rule: str  # kebab-case name of what was looked at: "duplicate-address"
    key: Key
    read: str | None = None  # the value found, as it stands in the file
    expected: str | None = None
    nearest: str | None = None  # the right spelling, where one is close
    why: str | None = None  # what it leads to, or what exactly is wrong
    action: str | None = None
    warning: bool = False
    at_key: bool = False  # the mistake is the key itself, not its value
    file: str | None = None
    line: int | None = None
    column: int | None = None

    @property
    def subject(self) -> str:
        """The dotted key, "groups.gpu.hosts"; the file where it is about all of it."""
        return dotted(self.key) or "the file"

    @property
    def message(self) -> str:
        """What was found, what was expected, what to do: one line."""
        parts = []
        if self.read is not None:
            parts.append(f"found {self.read}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        said = ", ".join(parts)
        for more in (self.why, self.nearest and f"did you mean {shown(self.nearest)}?", self.action):
            if more:
                said = f"{said}; {more}" if said else more
        return said

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        kind = "warning" if self.warning else "error"
        return f"{place or 'site file'}: {kind}: {self.subject}: {self.message}"

    def at(self, file: str, line: int | None = None, column: int | None = None) -> Problem:
        return replace(self, file=file, line=line, column=column)

    def finding(self) -> Finding:
        """The same in the one result model."""
        advice = [self.action] if self.action else []
        if self.nearest is not None:
            advice.insert(0, f"did you mean {shown(self.nearest)}?")
        return Finding(
            verdict=Verdict.WARN if self.warning else Verdict.FAIL,
            check=f"site-{self.rule}",
            subject=self.subject,
            read=self.read,
            expected=self.expected,
            action="; ".join(advice) or None,
            why=self.why,
            source=self.file,
            line=self.line,
        )


class SiteError(Exception):
    """A site file that cannot be used, with every problem found in it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)

    @property
    def findings(self) -> list[Finding]:
        return [problem.finding() for problem in self.problems]


def dotted(key: Key) -> str:
    """ "groups.gpu.hosts", "hooks[0].playbook"."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isprintable() and part else json.dumps(part)
            text += f".{name}" if text else name
    return text


def shown(value: object) -> str:
    """`value` as a message shows it: quoted, on one line, no control characters, not endless."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=not value.isprintable())
    elif isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    elif isinstance(value, list):
        return "a list" if value else "an empty list"
    elif value is None:
        return "nothing"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:96]}..."


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that `word` was probably meant to be."""
    by_folded = {known.lower().replace("_", "-"): known for known in words}
    found = get_close_matches(word.lower().replace("_", "-"), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def instead(word: str, words: Iterable[str]) -> str:
    """What to write instead of `word`: the one that was probably meant, or all there are."""
    known = list(words)
    close = nearest(word, known)
    return f"did you mean {close}?" if close else f"there are {', '.join(known)}"


def one_of(words: Iterable[str]) -> str:
    """ "one of head, worker" """
    known = list(words)
    return f"one of {', '.join(known)}" if len(known) != 1 else known[0]
