"""`provision discover SITE`: what the machines have, and the lines of the site file that say it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from provision.cli.common import (
    JsonOption,
    LimitOption,
    SiteArgument,
    answer,
    ask_sudo_password,
    keep,
    limited,
    open_site,
)
from provision.discover.discover import Discovery, discover_journaled
from provision.report.text import printable
from provision.verify.progress import watching


def discover(
    site: SiteArgument,
    limit: LimitOption = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up on a machine after this long."),
    ] = 60,
    accept: Annotated[
        bool, typer.Option("--accept", help="Write the proposed lines into the site file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read GPUs, NICs, NUMA nodes, memory, disks, serial numbers and firmware; propose lines for the site file.

    Needs ssh and names of hosts alone, no driver: GPUs are known by their PCI ids. Nothing is changed on a machine,
    and nothing in the site file without --accept. Most machines of a group are taken for what the group is; one that
    has less is told, not described.

    Example: provision discover opal --limit gpu
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    password = ask_sudo_password(cluster, nodes)
    with watching([node.name for node in nodes], "discover") as progress:
        found, document = discover_journaled(
            cluster,
            nodes,
            sudo_password=password,
            timeout=timeout,
            accept=accept,
            done=lambda name: progress(name, None),
        )
    keep(document, cluster)
    if not as_json:
        _show(found, Console() if sys.stdout.isatty() else Console(width=200))
    answer(document, as_json)


def _show(found: Discovery, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("machine", "product", "serial", "firmware", "CPUs", "memory", "GPUs", "adapters", "disks"):
        table.add_column(title, overflow="fold")
    for name, row in found.table():
        table.add_row(name, *map(printable, row))
    console.print(table)
    if found.diff:
        console.print()
        console.print(Syntax(found.diff, "diff", background_color="default", word_wrap=True))
        console.print(
            f"written to {found.site.path}" if found.accepted else "`--accept` writes this into the site file"
        )
        console.print()
