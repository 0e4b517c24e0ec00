"""`provision run SITE PLAYBOOK`: an Ansible playbook on the nodes of a site."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
import yaml

from provision.cli import complete
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
from provision.engine.playbook import find_playbook
from provision.engine.playbook_journaled import run_journaled
from provision.engine.progress import progress


def run(
    site: SiteArgument,
    playbook: Annotated[
        str,
        typer.Argument(
            metavar="PLAYBOOK",
            autocompletion=complete.playbooks,
            help="A playbook, or the name of one of this project's own.",
        ),
    ],
    limit: LimitOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what would change, as far as Ansible can.")
    ] = False,
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra-var", "-e", metavar="KEY=VALUE", help="A variable; VALUE is YAML. Repeatable."),
    ] = None,
    timeout: Annotated[
        int | None, typer.Option("--timeout", metavar="SECONDS", min=1, help="For the whole playbook.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an Ansible playbook; inventory, variables and connections are the site file's.

    Groups are the site file's groups and roles. Ctrl-C cancels: nothing that was started is left running, here or
    on the nodes. A playbook that Ansible refuses is exit status 2; a node that failed, was unreachable or is held by
    another run 1.

    Example: provision run lab rolling-maintenance --limit gpu -e maintenance_serial=2
    """
    cluster = open_site(site)
    nodes = limited(cluster, limit)
    variables = dict(map(_variable, extra or []))
    path = find_playbook(cluster, playbook)
    password = ask_sudo_password(cluster, [*nodes, cluster.head])
    with progress(f"run {path.stem}", [node.name for node in nodes], quiet=as_json) as show:
        document = run_journaled(
            cluster,
            path,
            nodes,
            extra=variables,
            check=check,
            timeout=timeout,
            sudo_password=password,
            show=show,
        )
    keep(document, cluster)
    answer(document, as_json)


def _variable(text: str) -> tuple[str, Any]:
    """KEY=VALUE as Ansible's variable; a wrong one ends with exit status 2."""
    name, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_]\w*", name):
        refuse(f"-e {text}: expected KEY=VALUE, KEY of letters, digits and _")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        refuse(f"-e {text}: the value is not YAML; quote it: -e {name}='\"...\"'")
