"""`provision plan SITE` and `provision apply SITE`: what would change, and making it so."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from provision.cli.common import (
    ComponentOption,
    JsonOption,
    LimitOption,
    OperationTimeout,
    SiteArgument,
    answer,
    ask_sudo_password,
    keep,
    limited,
    open_site,
)
from provision.engine.controller import converge, stale_nodes
from provision.engine.journal import JournalError
from provision.engine.progress import progress
from provision.report.model import Document, Finding, Verdict, worst
from provision.site.hostlist import fold
from provision.site.models import Node, Site


def plan(
    site: SiteArgument,
    limit: LimitOption = None,
    component: ComponentOption = None,
    timeout: OperationTimeout = None,
    as_json: JsonOption = False,
) -> None:
    """Show, node by node, what apply would change, with differences. Changes nothing.

    "~" marks what changes, "?" what can only be told once something before it is done. With --limit, the nodes
    outside that hold an older state are named: files that list all nodes stay old there.

    Example: provision plan inventories/lab.yml --limit lab-gpu-1
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    document = _converge(cluster, nodes, "plan", component, as_json, timeout=timeout)
    if not as_json:
        _print_operations(document, Console())
    answer(document, as_json)


def apply(
    site: SiteArgument,
    limit: LimitOption = None,
    component: ComponentOption = None,
    timeout: OperationTimeout = None,
    no_reboot: Annotated[
        bool, typer.Option("--no-reboot", help="Say which nodes must reboot instead of rebooting them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring nodes to what the site file says. Run again, it changes nothing that is right and mends what is not.

    Every node converges by itself: one that is dead, slow or failing is reported with its reason and holds up only
    those that need it. Ctrl-C lets running operations end; the next run goes on from there.

    Example: provision apply inventories/lab.yml --limit gpu --component slurm
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    document = _converge(cluster, nodes, "apply", component, as_json, timeout=timeout, reboot=not no_reboot)
    keep(document, cluster)
    answer(document, as_json)


def _converge(
    site: Site,
    nodes: list[Node],
    verb: str,
    components: list[str] | None,
    as_json: bool,
    *,
    timeout: float | None,
    reboot: bool = True,
) -> Document:
    password = ask_sudo_password(site, [*nodes, site.head])
    with progress(f"{verb} {site.cluster}", [node.name for node in nodes], quiet=as_json) as show:
        document = converge(
            site,
            nodes,
            verb=verb,
            forecast=verb == "plan",
            components=components,
            sudo_password=password,
            show=show,
            timeout=timeout,
            reboot=reboot,
        )
    try:
        outside = stale_nodes(site, nodes) if len(nodes) < len(site.nodes) else []
    except JournalError:
        outside = []  # the document has said already that there is no journal
    if outside:
        document.findings.append(
            Finding(
                verdict=Verdict.WARN,
                check="nodes-outside-limit",
                subject=site.cluster,
                read=", ".join(outside),
                expected="brought to this state of the site file",
                action="files that list all nodes are old there until apply is run without --limit",
            )
        )
        document.verdict = worst([document.verdict, Verdict.WARN])
    return document


def _print_operations(document: Document, console: Console) -> None:
    """The changes of a plan, node by node, with their differences; then what is skipped, for all nodes together."""
    last = None
    order = list(document.nodes)
    operations = sorted(document.details["operations"], key=lambda found: order.index(found["node"]))
    for operation in operations:
        if operation["outcome"] == "skipped":
            continue
        if operation["node"] != last:
            last = operation["node"]
            console.print(Text(str(last), "bold"))
        mark, style = {"changed": ("~", "yellow"), "later": ("?", "cyan")}.get(
            operation["outcome"], ("!", "bold red")
        )
        line = Text(f"  {mark} {operation['step']}: {operation['title']}", style)
        if operation.get("detail"):
            line.append(f" ({operation['detail']})", "dim")
        console.print(line, soft_wrap=True)
        for text in operation.get("diff", "").splitlines():
            colour = "green" if text.startswith("+") else "red" if text.startswith("-") else "dim"
            console.print(Text(f"      {text}", colour), soft_wrap=True)
    skipped: dict[str, list[str]] = {}
    for operation in operations:
        if operation["outcome"] == "skipped":
            told = f"{operation['step']}: {operation['title']} ({operation.get('detail', '')})"
            skipped.setdefault(told, []).append(operation["node"])
    for told, nodes in skipped.items():
        console.print(Text(f"skip {fold(nodes)}: {told}", "dim"), soft_wrap=True)
