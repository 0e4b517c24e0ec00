"""`provision import ansible INVENTORY`: an Ansible inventory as a site file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from provision.cli.common import WRONG_INPUT, JsonOption, answering, print_json, refuse
from provision.report.model import Document, Finding, Verdict, worst
from provision.site.ansible import InventoryError, read_inventory
from provision.site.importer import site_text
from provision.site.load import examine_text

app = typer.Typer(no_args_is_help=True)

STYLES = {
    Verdict.FAIL: ("fill in", "bold red"),
    Verdict.WARN: ("warning", "bold yellow"),
    Verdict.SKIP: ("note", "dim"),
}


@app.callback()
def sources() -> None:
    """Turn what you have into a site file.

    Example: provision import ansible hosts.ini -o inventories/atlas.yml
    """


def ansible(
    inventory: Annotated[
        Path, typer.Argument(help="An inventory (INI, YAML), or its folder.", metavar="INVENTORY")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the site file there; never overwrites."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn an Ansible inventory into a site file, and say everything that was left out.

    Exit status 1 where something must be filled in before `provision check` passes, 2 where the inventory
    cannot be read.

    Example: provision import ansible hosts.ini -o inventories/atlas.yml
    """
    start = time.monotonic()
    if output is not None and output.exists():
        refuse(f"{output}: is there already and is left as it is; give another name")
    try:
        imported = site_text(read_inventory(inventory))
    except InventoryError as error:
        if as_json:
            print_json(Document(verb="import", site=None, verdict=Verdict.FAIL, findings=error.findings))
        else:
            _show(error.findings, {Verdict.FAIL: ("error", "bold red")})
        raise typer.Exit(WRONG_INPUT) from error
    checked = examine_text(imported.text, output or Path("site.yml"))
    findings = imported.findings + [problem.finding() for problem in checked.problems]
    document = Document(
        verb="import",
        site=imported.cluster,
        verdict=worst([Verdict.PASS, *(finding.verdict for finding in findings)]),
        seconds=round(time.monotonic() - start, 3),
        findings=findings,
        details={"file": None if output is None else str(output), "text": imported.text},
    )
    if output is not None:
        _write(output, imported.text)
    if as_json:
        print_json(document)
    else:
        _show(findings, STYLES)
        if output is None:
            typer.echo(imported.text, nl=False)
        else:
            Console(stderr=True).print(f"{output} is written", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(document.exit_status)


app.command("ansible")(answering("import", ansible))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as opened:
            opened.write(text)
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")


def _show(findings: list[Finding], styles: dict[Verdict, tuple[str, str]]) -> None:
    """One line a finding on the standard error: the site file itself goes to the standard output."""
    console = Console(stderr=True)
    for finding in findings:
        kind, style = styles[finding.verdict]
        place = f"{finding.source}:{finding.line}" if finding.line else str(finding.source)
        found = finding.read and f"found {finding.read}"
        wanted = finding.expected and f"expected {finding.expected}"
        said = "; ".join(part for part in (found, wanted, finding.why, finding.action) if part)
        about = "" if finding.subject == place else f"{finding.subject}: "
        line = Text(f"{place}: ").append(kind, style=style).append(f": {about}{said}")
        console.print(line, soft_wrap=True)
