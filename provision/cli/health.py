"""`provision health SITE`: what the agents of all nodes say, now."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
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
from provision.engine.journal import journaled
from provision.report import store
from provision.report.model import Document, Verdict, worst
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

    Also compared: drivers, firmware and clocks among nodes, and how often a node's verdict changed. A node that
    does not answer is unknown, never healthy: exit status 1.

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
    password = ask_sudo_password(cluster, nodes)
    if acting is not None:
        answer(_switched(cluster, nodes, acting, password), as_json)
    while True:
        document = _asked(cluster, nodes, full, password, timeout)
        keep(document, cluster)
        if as_json or not watch:
            break
        Console().clear()
        show(document)
        time.sleep(PAUSE)
    if as_json:
        answer(document, as_json)
    show(document)
    raise typer.Exit(document.exit_status)


def _asked(site: Site, nodes: Sequence[Node], full: bool, password: str | None, timeout: float) -> Document:
    began = time.monotonic()
    with journaled(site, "health", looking=True) as entry:
        with Console(stderr=True).status(f"asking {len(nodes)} nodes"):
            answers = agents.ask(site, nodes, full=full, sudo_password=password, timeout=timeout)
        document = agents.document(site, answers, store.recent(site, "health", 10), began)
        entry.add(
            (
                time.time(),
                {"event": "health", "node": each.node, "verdict": each.verdict, "reason": each.reason},
            )
            for each in answers
        )
        entry.conclude(document)
    return document


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
