"""`provision up SITE` and `provision status SITE`: the whole bring-up, and how far nodes have come."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from provision.acceptance.bringup import bring_up
from provision.acceptance.status import status as look
from provision.cli.common import (
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
from provision.engine.progress import progress
from provision.report.model import Verdict
from provision.site.hostlist import fold


def up(
    site: SiteArgument,
    limit: LimitOption = None,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.5, help="About how long to burn in (default: 2).")
    ] = None,
    burnin_all: Annotated[
        bool, typer.Option("--burnin-all", help="Burn in nodes that are admitted already, too.")
    ] = False,
    timeout: OperationTimeout = None,
    as_json: JsonOption = False,
) -> None:
    """From a site file to an admitted cluster: check, apply, verify, burn in, admit.

    New nodes take no work until they have passed everything; ones that fail are quarantined with the reason.
    Run again, it changes nothing that is right, and does not burn in what is admitted.

    Example: provision up inventories/lab.yml
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    password = ask_sudo_password(cluster, [*nodes, cluster.head])
    with progress(f"up {cluster.cluster}", [node.name for node in nodes], quiet=as_json) as show:
        document = bring_up(
            cluster,
            nodes,
            minutes=minutes,
            burnin_all=burnin_all,
            timeout=timeout,
            sudo_password=password,
            show=show,
        )
    keep(document, cluster)
    answer(document, as_json)


def status(
    site: SiteArgument,
    limit: LimitOption = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up on the head after this long."),
    ] = 60,
    as_json: JsonOption = False,
) -> None:
    """How far every node has come (new, configured, verified, burned-in, admitted, quarantined) and why; last runs.

    Reads the head only: acceptance, and what the runs of all admins came to, are kept there. Exit status 1 when a
    node is quarantined or cannot be told.

    Example: provision status inventories/lab.yml
    """
    started = time.monotonic()
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    password = ask_sudo_password(cluster, [cluster.head])
    document = look(cluster, nodes, sudo_password=password, timeout=timeout)
    if not as_json:
        _print_runs(document.details["runs"], Console())
    answer(document.model_copy(update={"seconds": round(time.monotonic() - started, 2)}), as_json)


def _print_runs(runs: list[dict[str, Any]], console: Console) -> None:
    """The latest runs, newest first, with the nodes on which they did not end well."""
    for run in runs:
        ended = run["verdict"] or "under way, or ended without a word"
        bad = [name for name, node in run.get("nodes", {}).items() if not Verdict(node["verdict"]).good]
        where = f" on {fold(bad)}" if bad else ""
        console.print(
            Text(f"{run['started']}  {run['verb']:8} {ended}{where}  by {run['holder']}", "dim"),
            soft_wrap=True,
        )
