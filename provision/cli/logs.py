"""`provision logs SITE`: the journals of all nodes, asked at once where they are gathered."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from provision.cli.common import (
    JsonOption,
    SiteArgument,
    answer,
    ask_sudo_password,
    limited,
    open_site,
    refuse,
)
from provision.components.logs.ask import ask
from provision.components.logs.elastic import kibana_url
from provision.components.logs.exports import (
    Entry,
    Query,
    by_elasticsearch,
    by_loki,
    collector,
    elsewhere,
    printable,
)
from provision.report.model import Verdict

_WARNING = 4  # syslog's priority

NodesOption = Annotated[
    str | None,
    typer.Option(
        "--limit",
        "--node",
        "-l",
        metavar="NODES",
        help="Of these: a host list, names of groups or roles; gpu-[1-4],head.",
    ),
]


def logs(
    site: SiteArgument,
    limit: NodesOption = None,
    unit: Annotated[
        list[str] | None, typer.Option("--unit", "-u", metavar="UNIT", help="Of this unit; repeatable.")
    ] = None,
    kernel: Annotated[bool, typer.Option("--kernel", "-k", help="Of the kernel.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", "-S", metavar="TIME", help='"2026-03-01 12:00", "-2h", "yesterday".'),
    ] = None,
    until: Annotated[str | None, typer.Option("--until", "-U", metavar="TIME", help="As --since.")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", "-g", metavar="REGEX", help="Whose message matches (PCRE2).")
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", "-p", metavar="LEVEL", help="This bad or worse: err, warning.")
    ] = None,
    job: Annotated[
        int | None,
        typer.Option(
            "--job", "-j", metavar="ID", help="Of a Slurm job: its nodes, from its start to its end."
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, max=100000, help="At most the newest N.")
    ] = 1000,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up on a question after this long."),
    ] = 60,
    as_json: JsonOption = False,
) -> None:
    """Show what nodes have logged, oldest first, also of nodes that are down.

    Example: provision logs lab --node gpu --kernel --since -1h --grep Xid
    """
    cluster = open_site(site)
    if not cluster.enabled("logs"):
        refuse(f"{cluster.path}: journals are not gathered: add `logs: {{}}` and run `provision apply`")
    if elsewhere(cluster) is not None:
        refuse(f"{cluster.path}: logs are in the site's own Elasticsearch (`logs.elasticsearch`): ask Kibana")
    gathers = collector(cluster)
    if gathers is not None and by_elasticsearch(cluster):
        refuse(f"{cluster.path}: logs are in Elasticsearch (`logs.elasticsearch`): ask {kibana_url(gathers)}")
    if by_loki(cluster):
        refuse(f"{cluster.path}: logs are in Loki (`logs.loki`): ask Grafana there, Explore, or logcli")
    nodes = [node.name for node in limited(cluster, limit)] if limit else []
    password = ask_sudo_password(cluster, list(cluster.nodes.values()))
    query = Query(nodes, unit or (), kernel, since, until, grep, priority, lines)
    found = ask(cluster, query, job=job, sudo_password=password, timeout=timeout)
    if found.document.verdict is Verdict.PASS and not as_json:
        _show(found.entries, Console())
        if not found.entries:
            typer.echo("nothing that fits was logged", err=True)
        raise typer.Exit(0)
    answer(found.document, as_json)


def _show(entries: list[Entry], console: Console) -> None:
    """One line an entry, as journalctl writes them; what is worse than a notice stands out in a terminal."""
    for entry in entries:
        line = Text(f"{entry.at.astimezone():%b %d %H:%M:%S} {entry.node} {entry.source}: ", style="dim")
        bad = entry.priority is not None and entry.priority <= _WARNING
        line.append(printable(entry.message), style="bold red" if bad else "default")
        console.print(line, soft_wrap=True, highlight=False)
