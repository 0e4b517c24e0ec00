"""`provision report SITE`: shows what a verb found out last, again or in another form."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from provision import __version__
from provision.cli.common import JsonOption, SiteArgument, answer, open_site, refuse
from provision.report import store
from provision.report.model import Document, Finding, Verdict


def _has_folder(path: Path | None) -> Path | None:
    """Refuse a report's path before anything is done, not after."""
    if path is not None:
        folder = path.absolute().parent
        if not folder.is_dir():
            raise typer.BadParameter(f"the folder {folder} does not exist")
        if not os.access(folder, os.W_OK):
            raise typer.BadParameter(f"you may not write in the folder {folder}")
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
    """Write the files that were asked for; one that cannot be written is a finding, and the answer is not lost."""
    if html is not None:
        from provision.report.html import render as as_html  # loads matplotlib

        _write(document, html, as_html(document, at=at, version=__version__))
    if junit is not None:
        from provision.report.junit import render as as_junit

        _write(document, junit, as_junit(document, at))


def _write(document: Document, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        document.findings.append(
            Finding(
                verdict=Verdict.FAIL,
                check="report-written",
                subject=str(path),
                why=error.strerror,
                action="mend that, then `provision report` writes it",
            )
        )
        document.verdict = Verdict.FAIL


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
    cluster = open_site(site)
    stored = store.latest(cluster, verb)
    if stored is None:
        what = f"{verb} has no stored answer" if verb else "there is no stored answer"
        refuse(f"{what} about {cluster.cluster}: run it first")
    write_reports(stored.document, stored.at, html, junit)
    if not as_json:
        typer.echo(f"{stored.document.verb} of {stored.at.astimezone():%Y-%m-%d %H:%M:%S %Z}", err=True)
    answer(stored.document, as_json)
