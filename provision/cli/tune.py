"""`provision tune nccl SITE`: what NCCL is better told of the network, by measurement."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.syntax import Syntax

from provision.burnin.run import WAIT_SECONDS
from provision.cli.common import (
    INTERRUPTED,
    JsonOption,
    LimitOption,
    SiteArgument,
    answer,
    answering,
    ask_sudo_password,
    keep,
    limited,
    open_site,
)
from provision.tune.nccl import tune, workers

app = typer.Typer(no_args_is_help=True)


@app.callback()
def subjects() -> None:
    """Measure settings and propose what proved better.

    Example: provision tune nccl atlas
    """


def nccl(
    site_name: SiteArgument,
    limit: LimitOption = None,
    wait: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Wait this long for other jobs.")
    ] = WAIT_SECONDS,
    accept: Annotated[
        bool, typer.Option("--accept", help="Write what proved better into the site file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure interface, adapters, GID index and traffic class; propose what is faster beyond noise.

    Runs the collectives of the burn-in on all nodes at once, three times for each choice, about a minute each, where
    no other jobs can start meanwhile. Algorithm, protocol, channels and buffers are never chosen; where somebody set
    them it is told. Nothing is changed in the site file without --accept, and on the nodes only by `provision apply`.

    Example: provision tune nccl atlas --limit gpu
    """
    site = open_site(site_name)
    nodes = limited(site, limit)
    workers(site, nodes)
    password = ask_sudo_password(site, [site.head, *nodes])
    try:
        found, document = tune(
            site, nodes, sudo_password=password, accept=accept, wait=wait, progress=_progress
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    keep(document, site)
    diff = document.details["diff"]
    if diff and not as_json:
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(Syntax(diff, "diff", background_color="default", word_wrap=True))
        console.print(
            f"written to {site.path}" if found.accepted else "`--accept` writes this into the site file"
        )
    answer(document, as_json)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


app.command("nccl")(answering("tune", nccl))
