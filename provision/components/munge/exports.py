"""What others may know of munge: the key, and how the answers of its programs are read. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from provision.engine import units
from provision.engine.deploy import Secret

KEY = "/etc/munge/munge.key"
KEPT = ("400 munge:munge", "600 munge:munge")  # modes and owners of a key that nobody else reads

# 1024 bytes is what mungekey makes; one key for the whole cluster
SECRETS = (Secret("munge.key", make=lambda: os.urandom(1024), adopt=(KEY,)),)


@dataclass(frozen=True)
class Daemon:
    """Since when munged runs and how old the key it should have read is; seconds since 1970."""

    key_written: float
    started: float

    @property
    def stale(self) -> bool:
        """munged reads its key once, as it starts: a younger key is not the one it uses."""
        return self.key_written > self.started


DAEMON_QUERY = (
    f"stat -c %Y {KEY} && systemctl show --timestamp=us+utc -p ActiveState -p ActiveEnterTimestamp munge"
)


def parse_daemon(text: str) -> Daemon | None:
    """What DAEMON_QUERY printed; None where munged does not run. Raises ValueError for anything else."""
    written, _, shown = text.partition("\n")
    properties = units.parse_show(shown)
    if not written.isdecimal() or "ActiveState" not in properties:
        raise ValueError(f"expected the key's time and munge's state, read {text!r}")
    if properties["ActiveState"] != "active":
        return None
    started = units.entered(properties)
    if started is None:
        raise ValueError(f"expected since when munge runs, read {text!r}")
    return Daemon(float(written), started)


def status(answer: str) -> str:
    """What munge or unmunge says in the end: of a credential that it could read, the line STATUS among many others."""
    told = re.search(r"^STATUS:\s*(.+)$", answer, re.MULTILINE)
    return told[1].strip() if told else (answer.strip().splitlines() or [""])[-1]


def cause(status: str, here: Daemon | None, there: Daemon | None, node: str, other: str) -> str:
    """Why a credential of one node was refused on the other, from unmunge's status and both daemons."""
    if re.search(r"expired|rewound", status, re.IGNORECASE):
        return f"the clocks of {node} and {other} differ by more than munge allows (5 minutes)"
    if here is not None and here.stale:
        return f"munged on {node} is older than its key"
    if there is not None and there.stale:
        return f"munged on {other} is older than its key"
    if re.search(r"invalid credential", status, re.IGNORECASE):
        return f"{node} and {other} have different keys"
    if re.search(r"replayed", status, re.IGNORECASE):
        return "the credential was used twice"
    return status or "no answer"
