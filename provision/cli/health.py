"""`provision health SITE`: what the agents of all nodes say, now."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from provision.cli.common import (
    JsonOption,
    LimitOption,
    SiteArgument,
    answer,
    ask_sudo_password,
    keep,
    limited,
    open_site,
    refuse,
)
from provision.engine.journal import Journal, journaled
from provision.report.model import Document, Verdict, worst
from provision.report.store import state_directory
from provision.report.terminal import STYLES
from provision.report.text import printable
from provision.site.models import Node, Site
from provision.verify import health as agents

PAUSE = 30  # seconds between two readings of --watch


def health(
    site: SiteArgument,
    limit: LimitOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also what starts other programs or uses the GPUs.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help=f"Again every {PAUSE} seconds, until Ctrl-C.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Only what nodes have said before: each change, with its time.")
    ] = False,
    acting: Annotated[
        str | None,
        typer.Option(
            "--acting", metavar="on|off", help="Let the agents act, or keep them from it; then end."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up on a node after this long.")
    ] = 60,
    as_json: JsonOption = False,
) -> None:
    """Ask the health agents of all nodes at once: node, verdict, first reason, what to do.

    Also compared: drivers, firmware and clocks among nodes, and how often a node's verdict changed within a day. A node
    that does not answer is unknown, never healthy: exit status 1.

    Example: provision health atlas --limit gpu --watch
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    if not cluster.enabled("health"):
        refuse(
            f"{cluster.cluster} has no agents: name `health: {{}}` in {cluster.path}, then provision apply"
        )
    if acting not in (None, "on", "off"):
        refuse(f"--acting {acting}: expected on or off")
    password = None if history else ask_sudo_password(cluster, nodes)
    if acting is not None:
        answer(_switched(cluster, nodes, acting, password), as_json)
    if history:
        document = _history(cluster, {node.name for node in nodes})
        if as_json:
            answer(document, as_json)
        show_history(document)
        raise typer.Exit(document.exit_status)
    with journaled(cluster, "health", looking=True) as entry:
        known = [agents.Change.of(at, event) for at, event in entry.told(agents.EVENT)]
        while True:
            began = time.monotonic()
            with Console(stderr=True).status(f"asking {len(nodes)} nodes"):
                answers = agents.ask(cluster, nodes, full=full, sudo_password=password, timeout=timeout)
            new = agents.changes(known, answers, time.time())
            known += new
            document = agents.document(cluster, answers, known, began)
            entry.add([(each.at, each.event) for each in new])
            entry.verdict = document.verdict
            if as_json or not watch:
                break
            keep(document, cluster)
            Console().clear()
            show(document)
            time.sleep(PAUSE)
        entry.conclude(document)
    keep(document, cluster)
    if as_json:
        answer(document, as_json)
    show(document)
    raise typer.Exit(document.exit_status)


def _history(site: Site, nodes: Collection[str]) -> Document:
    """What nodes have said so far, as this machine's journal has it; their last verdicts are the whole's."""
    began = time.monotonic()
    told = Journal(state_directory(site)).told(agents.EVENT)
    changes = [each for each in (agents.Change.of(at, event) for at, event in told) if each.node in nodes]
    last = {each.node: Verdict(each.verdict) for each in changes}
    return Document(
        verb="health",
        site=site.cluster,
        verdict=worst(last.values()),
        seconds=round(time.monotonic() - began, 3),
        findings=agents.flapping(changes, sorted(last), time.time()),
        details={
            "history": [
                asdict(each) | {"at": datetime.fromtimestamp(each.at, UTC).isoformat(timespec="seconds")}
                for each in changes
            ]
        },
    )


def _switched(site: Site, nodes: Sequence[Node], acting: str, password: str | None) -> Document:
    began = time.monotonic()
    with journaled(site, "health") as entry:
        findings = agents.switch(site, nodes, "on" if acting == "on" else "off", sudo_password=password)
        document = Document(
            verb="health",
            site=site.cluster,
            verdict=worst(finding.verdict for finding in findings),
            seconds=round(time.monotonic() - began, 3),
            findings=findings,
        )
        entry.conclude(document)
    return document


def show_history(document: Document) -> None:
    """A row a change, the latest last."""
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("since", "node", "verdict", "first reason"):
        table.add_column(column, overflow="fold", no_wrap=column != "first reason")
    for each in document.details["history"]:
        at = datetime.fromisoformat(each["at"]).astimezone()
        table.add_row(
            f"{at:%Y-%m-%d %H:%M:%S}",
            Text(printable(each["node"])),
            Text(each["verdict"], STYLES[Verdict(each["verdict"])]),
            Text(printable(each["reason"] or "")),
        )
    if document.details["history"]:
        console.print(table)
    else:
        console.print("nothing yet: provision health SITE")
    for finding in document.findings:
        line = f"{finding.verdict} {finding.check} {finding.subject}: {finding.read}, expected {finding.expected}"
        console.print(Text(printable(line), STYLES[finding.verdict]))


def show(document: Document) -> None:
    """A row a node, those that are not well first, and what the cluster as a whole tells."""
    console = Console() if sys.stdout.isatty() else Console(width=1000)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("node", "verdict", "first reason", "action"):
        table.add_column(column, overflow="fold", no_wrap=column in ("node", "verdict"))
    actions = document.details.get("actions", {})
    rows = sorted(document.nodes.items(), key=lambda row: row[1].verdict is Verdict.PASS)
    for name, node in rows:
        table.add_row(
            Text(printable(name)),
            Text(node.verdict, STYLES[node.verdict]),
            Text(printable(node.reason or "")),
            Text(actions.get(name) or "", "cyan"),
        )
    console.print(table)
    for finding in document.findings:
        if finding.source is None and finding.verdict is Verdict.WARN:  # what no agent alone could tell
            line = f"{finding.verdict} {finding.check} {finding.subject}: {finding.read}, expected {finding.expected}"
            console.print(Text(printable(line), STYLES[finding.verdict]))
    console.print(
        Text(
            f"{document.verdict}: {len(document.nodes)} nodes; {document.seconds:.1f} s",
            STYLES[document.verdict],
        )
    )
