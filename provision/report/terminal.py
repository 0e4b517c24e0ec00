"""The document for a person at a terminal; plain text without colours where there is none."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from provision.report.figures import Table as Figures
from provision.report.figures import figures
from provision.report.model import Document, Finding, Verdict
from provision.report.text import grouped, location, printable, sentence, subjects, tally

STYLES = {
    Verdict.PASS: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIP: "dim",
    Verdict.UNKNOWN: "bold magenta",
}
_PLAIN_WIDTH = 1000  # columns where there is no terminal: a finding is one line, for grep
_MOST_ROWS = 40  # nodes; of more, those that pass without a change are only counted
_NARROW = 100  # columns; below, reasons that no finding tells stand below the table


def show(document: Document, console: Console | None = None) -> None:
    """Print nodes, what is not in order, and one line of summary."""
    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    if document.nodes:
        wide = console.is_terminal and console.width >= _NARROW
        console.print(_nodes(document, reasons=wide))
        if not wide:
            telling = {item.subject for item in document.findings if item.verdict is not Verdict.PASS}
            for name, node in document.nodes.items():
                if node.reason and name not in telling:
                    _print_line(console, f"{printable(name)}:", Text(printable(node.reason)))
    for table in figures(document.details):
        console.print(_figures(table))
    for names, finding in grouped(document):
        text = Text(f"{subjects(names)}: ", "bold")
        text.append_text(_finding_text(finding))
        _print_line(console, Text(f"{finding.verdict:7}", STYLES[finding.verdict]), text)
        if finding.action:
            _print_line(console, " " * 7, Text(f"-> {printable(finding.action)}", "cyan"))
    console.print(_summary(document), soft_wrap=True)


def _nodes(document: Document, *, reasons: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("node", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    states = any(node.state for node in document.nodes.values())
    if states:
        table.add_column("state", no_wrap=True)
    table.add_column("changed", justify="right")
    table.add_column("failed", justify="right")
    if reasons:
        table.add_column("reason", overflow="fold")
    quiet = [
        name for name, node in document.nodes.items() if node.verdict is Verdict.PASS and not node.changed
    ]
    hidden = set(quiet) if len(document.nodes) > _MOST_ROWS else set()
    for name, node in document.nodes.items():
        if name in hidden:
            continue
        table.add_row(
            Text(printable(name)),
            Text(node.verdict, STYLES[node.verdict]),
            *([Text(printable(node.state or "-"))] if states else []),
            str(node.changed),
            str(node.failed),
            *([Text(printable(node.reason or ""))] if reasons else []),
        )
    if hidden:
        table.add_row(Text(f"{len(hidden)} more", "dim"), Text(Verdict.PASS, STYLES[Verdict.PASS]))
    return table


def _figures(figures: Figures) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
        title=figures.title,
        title_style="bold",
    )
    table.title_justify = "left"
    for number, column in enumerate(figures.columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in figures.rows:
        table.add_row(*map(Text, row))
    return table


def _print_line(console: Console, head: str | Text, text: Text) -> None:
    """`head text`, wrapped below the text where the line is too long."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(head, text)
    console.print(grid)


def _finding_text(finding: Finding) -> Text:
    text = Text(printable(finding.check), style="")
    if said := sentence(finding):
        text.append(f": {said}")
    if where := location(finding):
        text.append(f" [{where}]", "dim")
    return text


def _summary(document: Document) -> Text:
    text = Text()
    text.append(document.verdict, STYLES[document.verdict])
    parts = [document.verb]
    if document.site:
        parts.append(printable(document.site))
    if document.nodes:
        parts.append(f"{len(document.nodes)} node{'s' if len(document.nodes) != 1 else ''}")
    if document.findings:
        parts.append(tally(document.findings))
    parts.append(f"{document.seconds:.1f} s")
    return text.append(": " + "; ".join(parts))
