"""Asks the node that gathers the journals."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from shlex import quote

from provision.components.logs import exports
from provision.components.logs.exports import Entry, Query
from provision.engine.remote import RemoteError, connect
from provision.report.model import Document, Finding, Verdict
from provision.site.hostlist import HostlistError, expand
from provision.site.models import Site

_NOT_YET = "Unknown"  # sacct: of a job that has not started, or not ended


class LogsError(Exception):
    """The journals could not be asked; the reason, and what to do."""


@dataclass(frozen=True)
class Answer:
    """Entries oldest first, and the document that tells of them."""

    entries: list[Entry]
    document: Document


def ask(
    site: Site, query: Query, *, job: int | None = None, sudo_password: str | None = None, timeout: float = 60
) -> Answer:
    """What the gathered journals hold; UNKNOWN, with the reason, where they cannot be asked."""
    started = time.monotonic()
    try:
        if job is not None:
            query = _during(site, query, job, sudo_password, timeout)
        entries = _entries(site, query, sudo_password, timeout)
    except (RemoteError, LogsError) as error:
        gathers = exports.collector(site)
        finding = Finding(
            verdict=Verdict.UNKNOWN,
            check="logs",
            subject=gathers.name if gathers else site.cluster,
            why=str(error),
            action=getattr(error, "advice", None),
        )
        return Answer([], _document(site, [], [finding], started))
    return Answer(entries, _document(site, entries, [], started))


def _document(site: Site, entries: list[Entry], findings: list[Finding], started: float) -> Document:
    return Document(
        verb="logs",
        site=site.cluster,
        verdict=findings[0].verdict if findings else Verdict.PASS,
        seconds=round(time.monotonic() - started, 1),
        findings=findings,
        details={
            "entries": [
                {
                    "at": entry.at.isoformat(),
                    "node": entry.node,
                    "source": entry.source,
                    "job": entry.job,
                    "priority": entry.priority,
                    "message": entry.message,
                }
                for entry in entries
            ]
        },
    )


def _entries(site: Site, query: Query, password: str | None, timeout: float) -> list[Entry]:
    gathers = exports.collector(site)
    assert gathers is not None, "checked with the site file"
    with closing(connect(site, gathers, sudo_password=password)) as shell:
        output = shell.run(exports.command(query), timeout=timeout)
    if output.rc not in (0, 1) or (output.rc == 1 and output.stderr.strip()):
        raise LogsError(f"{gathers.name}: journalctl: {output.stderr.strip() or f'exit status {output.rc}'}")
    try:
        return exports.parse(output.stdout)
    except ValueError as error:
        raise LogsError(f"{gathers.name}: {error}") from error


def _during(site: Site, query: Query, job: int, password: str | None, timeout: float) -> Query:
    """`query` narrowed to the nodes and the time of a job, as Slurm's accounting has them."""
    ask = f"sacct -j {quote(str(job))} --allocations --noheader --parsable2 --format=NodeList,Start,End"
    with closing(connect(site, site.head, sudo_password=password)) as shell:
        output = shell.run(ask, timeout=timeout)
    if not output.ok:
        raise LogsError(f"{site.head.name}: sacct: {output.stderr.strip() or f'exit status {output.rc}'}")
    if not output.lines:
        raise LogsError(f"job {job}: Slurm's accounting on {site.head.name} does not know it")
    nodes, start, end = output.lines[0].split("|")
    if start == _NOT_YET:
        raise LogsError(f"job {job} has not started")
    try:
        ran_on = expand(nodes)
    except HostlistError as error:
        raise LogsError(f"job {job}: {error}") from error
    wanted = [name for name in ran_on if not query.nodes or name in query.nodes]
    if not wanted:
        raise LogsError(f"job {job} ran on {nodes}, not on the nodes of --limit")
    return replace(
        query,
        nodes=wanted,
        since=query.since or _moment(start),
        until=query.until or (None if end == _NOT_YET else _moment(end)),
    )


def _moment(slurms: str) -> str:
    """Slurm writes 2026-03-01T12:00:00 in the node's own time; journalctl wants a blank for the T."""
    return slurms.replace("T", " ", 1)
