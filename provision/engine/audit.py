"""What this tool did on a node, in that node's own journal: `journalctl -t provision`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from provision.engine.remote import RemoteError, RootShell

_MOST = 300  # changes told one by one; more are counted
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")


def lines(verb: str, run: str, holder: str, changes: Sequence[str]) -> list[str]:
    """One line for the run, one for each change. Titles of operations, which never hold a secret."""
    who = f"{verb} {run} by {holder}"
    told = [f"{who}: {_CONTROL.sub(' ', change)}" for change in changes[:_MOST]]
    more = [f"{who}: and {len(changes) - _MOST} more"] if len(changes) > _MOST else []
    return [f"{who}: {len(changes)} changes", *told, *more]


def write(shell: RootShell, verb: str, run: str, holder: str, changes: Sequence[str]) -> None:
    """Nothing is written where nothing was changed. Raises RemoteError."""
    if not changes:
        return
    text = "".join(f"{line}\n" for line in lines(verb, run, holder, changes))
    output = shell.run("logger --tag provision --priority user.notice", stdin=text.encode())
    if not output.ok:
        raise RemoteError(f"{shell.name}: cannot write to its journal: {output.stderr.strip()}")
