"""`provision report SITE`: shows what a verb found out last, again or in another form."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from provision import __version__
from provision.cli.common import JsonOption, SiteArgument, answer, open_site, refuse
from provision.report import store
from provision.report.model import Document


def _has_folder(path: Path | None) -> Path | None:
    """Refuse a report's path before anything is done, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {path.absolute().parent} does not exist")
    return path


HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_has_folder,
        help="Also write a page that needs nothing else.",
    ),
]
JunitOption = Annotated[
    Path | None,
    typer.Option(
        "--junit",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_has_folder,
        help="Also write JUnit XML.",
    ),
]


def write_reports(document: Document, at: datetime, html: Path | None, junit: Path | None) -> None:
    """Write the files that were asked for; one that cannot be written ends with exit status 2."""
    try:
        if html is not None:
            from provision.report.html import render as as_html  # loads matplotlib

            html.write_text(as_html(document, at=at, version=__version__), encoding="utf-8")
        if junit is not None:
            from provision.report.junit import render as as_junit

            junit.write_text(as_junit(document, at), encoding="utf-8")
    except OSError as error:
        refuse(f"the report cannot be written: {error}")


def report(
    site: SiteArgument,
    verb: Annotated[
        str | None, typer.Option("--verb", help="What this verb answered last: verify, apply, up, burnin ...")
    ] = None,
    html: HtmlOption = None,
    junit: JunitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the last answer about a site again; ends with the exit status that it had.

    Example: provision report lab --html lab.html
    """
    cluster = open_site(site, "report", as_json)
    try:
        stored = store.latest(cluster, verb)
    except store.StoreError as error:
        refuse(str(error))
    if stored is None:
        what = f"{verb} has no stored answer" if verb else "there is no stored answer"
        refuse(f"{what} about {cluster.cluster}: run it first")
    write_reports(stored.document, stored.at, html, junit)
    if not as_json:
        typer.echo(f"{stored.document.verb} of {stored.at.astimezone():%Y-%m-%d %H:%M:%S %Z}", err=True)
    answer(stored.document, as_json)
