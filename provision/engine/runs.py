"""What the runs of all admins came to, kept on the head: /var/lib/provision/runs.jsonl, a line each, only added to.

Each controller has a journal of its own with every event; this is what a second one is told by `provision status`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from provision.engine import headstate
from provision.engine.headstate import HeadError, Kept
from provision.engine.journal import Entry, now
from provision.engine.remote import RootShell
from provision.report.model import Document, NodeResult, Verdict

if TYPE_CHECKING:
    from provision.site.models import Site

# A line that a power cut has cut short is ended first, so that it costs no other.
_ADD = """set -e; umask 077; install -d -m 755 {directory}
exec 8>>{path}; flock 8
[ ! -s {path} ] || [ -z "$(tail -c 1 {path})" ] || echo >&8
cat >&8; sync {path}"""


class Run(BaseModel):
    """Who did what when, and what it came to, node by node."""

    run: str
    verb: str
    holder: str  # "user@host"
    site: str  # digest of the site file
    started: str  # ISO 8601, UTC
    ended: str
    verdict: Verdict
    nodes: dict[str, NodeResult]


def path() -> str:
    """Where the head keeps them."""
    return f"{headstate.DIRECTORY}/runs.jsonl"


def add(shell: RootShell, run: Run) -> None:
    """Add `run` to the head's list, readable to root alone. Raises HeadError."""
    script = _ADD.format(directory=headstate.DIRECTORY, path=path())
    output = shell.run(script, stdin=f"{run.model_dump_json(exclude_defaults=True)}\n".encode())
    if not output.ok:
        raise HeadError(f"{shell.name}: cannot write {path()}: {output.stderr.strip()}")


def latest(shell: RootShell, most: int) -> tuple[list[Run], int]:
    """The latest runs, newest first, and how many lines among them cannot be read. Raises HeadError."""
    output = shell.run(f"[ ! -e {path()} ] || tail -n {most} {path()}")
    if not output.ok:
        raise HeadError(f"{shell.name}: cannot read {path()}: {output.stderr.strip()}")
    return parse(output.stdout)


def parse(text: str) -> tuple[list[Run], int]:
    """The runs of some lines, newest first, and the number of lines that are none."""
    found, damaged = [], 0
    for line in filter(None, text.splitlines()):
        try:
            found.append(Run.model_validate_json(line))
        except ValidationError:
            damaged += 1
    return found[::-1], damaged


def kept(site: Site, entry: Entry, document: Document) -> Kept:
    """What the run of `entry` came to, as `document` says at the moment in which it is written."""

    def write(shell: RootShell) -> None:
        run = Run(
            run=entry.run,
            verb=document.verb,
            holder=entry.holder,
            site=site.digest,
            started=entry.started,
            ended=now(),
            verdict=document.verdict,
            nodes=document.nodes,
        )
        add(shell, run)

    return Kept(write, "kept-on-head", "other admins do not see this run: tell them", path())


def keep(site: Site, entry: Entry, document: Document, *, sudo_password: str | None) -> None:
    """Tell the head what the run of `entry` came to; where that cannot be done, `document` says so."""
    headstate.keep(site, document, [kept(site, entry, document)], sudo_password=sudo_password)
