"""`provision burnin SITE`: prove nodes under load; nodes that fail are kept out."""

from __future__ import annotations

import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from provision.burnin.local import NoTorchError, find_interpreter, run_local
from provision.burnin.run import WAIT_SECONDS, Options, burn_in, logged_in_to
from provision.burnin.workload.levels import LEVELS, MINUTES
from provision.cli.common import (
    INTERRUPTED,
    JsonOption,
    LimitOption,
    answer,
    ask_sudo_password,
    keep,
    limited,
    open_site,
    refuse,
)
from provision.cli.report import HtmlOption, JunitOption, write_reports
from provision.report.model import Document
from provision.site.hostlist import fold

LEVEL_HELP = ", ".join(f"{level} ({MINUTES[level]:g} min)" for level in LEVELS)


def burnin(
    site_name: Annotated[
        str | None, typer.Argument(metavar="SITE", help="A site file, or the name of one in inventories/.")
    ] = None,
    limit: LimitOption = None,
    level: Annotated[str, typer.Option(help=f"How much: {LEVEL_HELP}.")] = "quick",
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="About how long, instead of what the level takes.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="This machine alone, without a site file.")] = False,
    python: Annotated[str | None, typer.Option(help="With --local: a Python that has PyTorch.")] = None,
    wait: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Wait this long for other jobs.")
    ] = WAIT_SECONDS,
    html: HtmlOption = None,
    junit: JunitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run collectives, compute, memory and training under load, check every result, judge every node.

    Nodes that fail are drained with the reason; users' jobs cannot start on a node while it is tried. Ctrl-C
    cancels the job and puts the nodes back as they were.

    Example: provision burnin inventories/atlas.yml --limit atlas-gpu-[001-004]
    """
    if level not in LEVELS:
        refuse(f"--level {level}: known are {', '.join(LEVELS)}")
    if local == (site_name is not None):
        refuse("name a SITE, or give --local for this machine alone")
    if local:
        document = _local(python, minutes, level)
        write_reports(document, datetime.now(UTC), html, junit)
        answer(document, as_json)
    assert site_name is not None
    site = open_site(site_name)
    nodes = limited(site, limit)
    if not any(node.has("worker") for node in nodes):
        among = f"--limit {limit}" if limit else str(site.path)
        refuse(
            f"{among}: no node is of role worker, which is what is burned in: {fold(node.name for node in nodes)}"
        )
    password = ask_sudo_password(site, logged_in_to(site, nodes))
    options = Options(level=level, minutes=minutes, wait=wait)
    try:
        document = burn_in(site, nodes, options, sudo_password=password, progress=_progress)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    keep(document, site)
    write_reports(document, datetime.now(UTC), html, junit)
    answer(document, as_json)


def _local(python: str | None, minutes: float | None, level: str) -> Document:
    try:
        interpreter = find_interpreter([python] if python else [sys.executable, "python3"])
    except NoTorchError as error:
        refuse(str(error))
    directory = Path(tempfile.mkdtemp(prefix="provision-burnin-"))
    _progress(
        f"PyTorch {interpreter.torch}, {interpreter.gpus} GPUs, by {interpreter.path}; files in {directory}"
    )
    try:
        return run_local(interpreter, directory, minutes=minutes, level=level, progress=_progress)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
