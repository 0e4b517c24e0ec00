"""Runs programs on this machine; a failure says what was run and what it answered."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class LabError(Exception):
    """The lab could not do what was asked; the text says what, where and what to do next."""


class InputError(LabError):
    """What was asked for is wrong; nothing was done."""


def execute(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    name: str | None = None,
) -> str:
    """Run `argv`, return its standard output. `name` stands for the command in messages.

    Raises LabError with the command and its standard error when it fails or takes over `timeout` seconds.
    """
    words = [str(word) for word in argv]
    what = name or " ".join(words)
    try:
        done = subprocess.run(
            words, input=stdin, env=env, timeout=timeout, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise LabError(f"{words[0]}: no such program on this machine") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{what}: no answer within {timeout:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "nothing on standard error"
        raise LabError(f"{what}: exit status {done.returncode}: {said}")
    return done.stdout
