"""`provision check FILE`: every mistake in a site file at once."""

from __future__ import annotations

import time
from pathlib import Path

import typer
from rich.console import Console

from provision.cli.common import WRONG_INPUT, JsonOption, SiteArgument, print_json, print_problems
from provision.report.model import Document, Verdict, worst
from provision.site.load import Examined, examine, find
from provision.site.problem import SiteError


def check(file: SiteArgument, as_json: JsonOption = False) -> None:
    """Check a site file: every mistake at once, with its place, what was expected and the right spelling.

    Connects to nothing. Exit status 2 when there are errors; warnings are allowed.

    Example: provision check inventories/lab.yml
    """
    start = time.monotonic()
    try:
        examined = examine(find(file))
    except SiteError as error:
        examined = Examined(Path(file), None, error.problems)
    document = Document(
        verb="check",
        site=examined.site.cluster if examined.site else file,
        verdict=worst([Verdict.PASS, *(problem.finding().verdict for problem in examined.problems)]),
        seconds=round(time.monotonic() - start, 3),
        findings=[problem.finding() for problem in examined.problems],
    )
    if as_json:
        print_json(document)
    else:
        print_problems(examined.problems, Console())
        Console().print(_summary(examined), soft_wrap=True, highlight=False)
    if examined.errors:
        raise typer.Exit(WRONG_INPUT)


def _summary(examined: Examined) -> str:
    errors = len(examined.errors)
    warnings = len(examined.problems) - errors
    counted = f"{_count(errors, 'error')}, {_count(warnings, 'warning')}"
    if examined.site is None:
        return counted
    site = examined.site
    size = f"{_count(len(site.nodes), 'node')} in {_count(len(site.file.groups), 'group')}"
    return f"{site.cluster}: {size}; {counted}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
