"""What a node is asked. Questions of one kind, about many files or units, become one command.

A run asks after hundreds of files and units: a process or two for each would be most of what a run without changes
takes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from provision.engine import units
from provision.engine.remote import Output


class Question(NamedTuple):
    """A question about `subject`: a path, the name of a unit, or the text of a read-only command."""

    kind: str  # "command", or a key of _KINDS
    subject: str


def command(text: str) -> Question:
    """What a read-only command answers; exit status 127 where its program is not installed (yet)."""
    return Question("command", text)


def content(path: str) -> Question:
    """Type, mode, owner and SHA-256 of a file: "regular file|644|root:root|<digest>"; exit status 1: there is none."""
    return Question("content", path)


def directory(path: str) -> Question:
    """Type, mode and owner of what `path` leads to: "directory|755|root:root"; exit status 1: there is none."""
    return Question("directory", path)


def written(path: str) -> Question:
    """When the file was last written, seconds since the epoch; exit status 1: there is none."""
    return Question("written", path)


def unit(name: str) -> Question:
    """The state of a systemd unit: units.PROPERTIES, "Key=value" a line."""
    return Question("unit", name)


class Batch(NamedTuple):
    """A command, and the questions that it answers."""

    text: str
    questions: Sequence[Question]

    def refused(self, output: Output) -> bool:
        """Whether one of several questions spoilt the answers to all: systemctl refuses a name that is none."""
        return len(self.questions) > 1 and self.questions[0].kind == "unit" and not output.ok

    def one_by_one(self) -> list[Batch]:
        """The same questions, each asked alone."""
        return [batch for question in self.questions for batch in batches([question])]

    def answers(self, output: Output) -> dict[Question, Output]:
        """The part of `output` that is the answer to each question."""
        kind = _KINDS.get(self.questions[0].kind)
        if kind is None:
            return {self.questions[0]: output}
        parts = kind.parts(output, [question.subject for question in self.questions])
        return {question: parts[question.subject] for question in self.questions}


def batches(questions: Iterable[Question]) -> list[Batch]:
    """The commands that answer all of `questions`."""
    alike: dict[str, list[Question]] = {}
    found: list[Batch] = []
    for question in questions:
        if question.kind in _KINDS:
            alike.setdefault(question.kind, []).append(question)
        else:
            found.append(Batch(question.subject, [question]))
    for kind, asked in alike.items():
        subjects = shlex.join(question.subject for question in asked)
        found.append(Batch(_KINDS[kind].text.format(subjects), asked))
    return found


class _Kind(NamedTuple):
    text: str  # a command, with {} for all subjects
    parts: Callable[
        [Output, Sequence[str]], Mapping[str, Output]
    ]  # output and subjects -> subject -> its part


def _of_paths(output: Output, paths: Sequence[str]) -> dict[str, Output]:
    """From records "value  path" (two blanks), ended by NUL; a path with several has their values joined by "|"."""
    told: dict[str, list[str]] = {path: [] for path in paths}
    for record in filter(None, output.stdout.split("\0")):
        value, _, path = record.partition("  ")
        told[path].append(value)
    return {
        path: Output(0, "|".join(values), "") if values else Output(1, "", output.stderr)
        for path, values in told.items()
    }


def _of_units(output: Output, names: Sequence[str]) -> dict[str, Output]:
    """From what `systemctl show` prints: a block a unit in the order of `names`, empty lines between them."""
    blocks = output.stdout.rstrip("\n").split("\n\n")
    if not output.ok or len(blocks) != len(names):
        why = output.stderr or f"systemctl tells of {len(blocks)} units, {len(names)} were asked after"
        return dict.fromkeys(names, Output(output.rc or 1, "", why))
    return {name: Output(0, block, "") for name, block in zip(names, blocks, strict=True)}


_KINDS = {
    "content": _Kind("stat --printf '%F|%a|%U:%G  %n\\0' -- {0}; sha256sum -z -- {0}", _of_paths),
    "directory": _Kind("stat -L --printf '%F|%a|%U:%G  %n\\0' -- {}", _of_paths),
    "written": _Kind("stat --printf '%.Y  %n\\0' -- {}", _of_paths),
    "unit": _Kind(f"systemctl show --timestamp=us+utc -p {units.PROPERTIES} -- {{}}", _of_units),
}
