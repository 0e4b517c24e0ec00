"""`provision verify SITE`: runs every component's checks on the nodes and says what they found."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from provision.cli.common import (
    ComponentOption,
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
from provision.cli.report import HtmlOption, JunitOption, write_reports
from provision.site.problem import nearest
from provision.verify.journaled import verify_journaled
from provision.verify.progress import watching
from provision.verify.run import components_of


def verify(
    site: SiteArgument,
    limit: LimitOption = None,
    component: ComponentOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up on a node after this long.")
    ] = 60,
    html: HtmlOption = None,
    junit: JunitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every layer on every node, changing nothing.

    The cluster need not have been built by this tool: a site file and ssh are enough. What could not be told
    counts as not good: exit status 1.

    Example: provision verify lab --limit lab-gpu-1 --html lab.html
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    named = components_of(cluster)
    for name in component or []:
        if name not in named:
            close = nearest(name, named)
            advice = f"did you mean {close}?" if close else f"these have: {', '.join(named)}"
            refuse(f"--component {name}: has no checks in {cluster.cluster}; {advice}")
    password = ask_sudo_password(cluster, [*nodes, cluster.head])  # which others are tried with
    with watching([node.name for node in nodes]) as progress:
        document = verify_journaled(
            cluster,
            nodes,
            components=component or None,
            sudo_password=password,
            timeout=timeout,
            progress=progress,
        )
    keep(document, cluster)
    write_reports(document, datetime.now(UTC), html, junit)
    answer(document, as_json)
