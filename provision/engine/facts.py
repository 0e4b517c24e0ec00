"""Reading the node from within a step: true at the moment of reading, remembered until something changes."""

from __future__ import annotations

import shlex
from typing import cast

from pyinfra import host

from provision.engine import questions
from provision.engine.connector import NodeConnector
from provision.engine.questions import Question
from provision.engine.remote import Output


def connector() -> NodeConnector:
    """The connector of the node whose step is running."""
    return cast(NodeConnector, host.connector)


def read(command: str) -> Output:
    """The answer of a read-only command; exit status 127 where its program is not installed (yet)."""
    return ask(questions.command(command))[0]


def ask(*wanted: Question) -> list[Output]:
    """The answers to `wanted`, in the same order; what is not known yet is asked in one execution."""
    return connector().ask(*wanted)


def text(path: str) -> str | None:
    """The content of a file, None where there is none."""
    output = read(f"cat -- {shlex.quote(path)}")
    return output.stdout if output.ok else None
