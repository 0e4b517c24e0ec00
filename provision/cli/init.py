"""`provision init [FILE]`: a commented site file to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from provision.cli.common import JsonOption, print_json, refuse
from provision.report.model import Document, Finding, Verdict
from provision.site.load import inventories
from provision.site.names import cluster_fault

FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="The file to write; inventories/cluster.yml if left out."),
]


def init(file: FileArgument = None, as_json: JsonOption = False) -> None:
    """Write a commented site file to start from. Never overwrites a file.

    Example: provision init inventories/atlas.yml
    """
    path = file or inventories() / "cluster.yml"
    name = path.stem if cluster_fault(path.stem) is None else "cluster"
    text = files("provision.site").joinpath("starter.yml").read_text().replace("CLUSTER", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        refuse(f"{path}: is there already and is left as it is; give another name")
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")
    if as_json:
        finding = Finding(verdict=Verdict.PASS, check="site-written", subject=name, source=str(path))
        print_json(Document(verb="init", site=name, verdict=Verdict.PASS, findings=[finding]))
    else:
        said = f"{path} is written. Describe your machines in it, then: provision check {path}"
        Console().print(said, soft_wrap=True, highlight=False, markup=False)
