"""What the controller hands to a worker process, and how both talk.

The job travels pickled on the worker's standard input, between two processes of the same program and user. After it
come lines of JSON: outcomes of other workers' nodes. The worker answers with lines of JSON on its standard output:
events, which are shown and journaled, and private words ("secrets", "admitted"), which are only passed on to other
workers.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from provision.engine.questions import Question
from provision.site.lock import Lock
from provision.site.models import Site


@dataclass(frozen=True)
class Job:
    """The share of one run that one worker process does."""

    run: str  # identifier of the run
    holder: str  # "user@host", for the lock on nodes
    site: Site
    lock: Lock
    nodes: Sequence[str]  # of this worker
    all_nodes: Sequence[str]  # of the whole run
    components: Sequence[str] | None
    forecast: bool
    with_secrets: bool  # this worker talks to the head for the secrets
    sudo_password: str | None = field(default=None, repr=False)
    escrow: Mapping[str, bytes] = field(
        default_factory=dict, repr=False
    )  # secrets of the copy beside the site file
    questions: Mapping[str, Sequence[Question]] = field(default_factory=dict)  # node -> asked by its last run
    timeout: float | None = None  # seconds at most for an operation; None: what each operation is given
    reboot: bool = True  # nodes that must reboot do so; False: they only say it


def hand_over(job: object, to: IO[bytes]) -> None:
    """Write `job` to the standard input of a worker process, which reads it by `take_over`; words may follow."""
    content = pickle.dumps(job)
    with suppress(BrokenPipeError):  # it ended at once; how it ended is told by whoever waits for it
        to.write(len(content).to_bytes(8, "big") + content)
        to.flush()


def take_over() -> Any:
    """The job that was handed over to this process; what comes behind it on standard input is left there.

    None where there is none: the process was started ahead, and is not wanted.
    """
    first = os.read(sys.stdin.fileno(), 1)
    if not first:
        return None
    return pickle.loads(_exactly(int.from_bytes(first + _exactly(7), "big")))


def own_output() -> IO[str]:
    """Standard output for this process's events alone: what a library prints goes to standard error from now on."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def events(of: IO[bytes]) -> Iterator[dict[str, Any]]:
    """What a worker process tells on its standard output, until its end; a line that was cut short is no event."""
    for line in of:
        if line.endswith(b"\n"):
            yield json.loads(line)


def _exactly(size: int) -> bytes:
    """From standard input, unbuffered."""
    content = bytearray()
    while len(content) < size:
        more = os.read(sys.stdin.fileno(), size - len(content))
        if not more:
            raise EOFError("the controller ended before it had handed over the job")
        content += more
    return bytes(content)
