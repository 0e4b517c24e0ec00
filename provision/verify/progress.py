"""Shows a verification while it is under way: a live bar in a terminal, a line for each node elsewhere.

On standard error, so that standard output holds the answer alone.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from provision.report.model import Finding
from provision.report.text import tally
from provision.site.hostlist import fold
from provision.verify.run import Progress as Callback


@contextmanager
def watching(nodes: Sequence[str], verb: str = "verify") -> Iterator[Callback]:
    """A callback for `verb` that shows how far `nodes` have come."""
    if sys.stderr.isatty():
        with _bar(nodes, verb) as callback:
            yield callback
    else:
        yield _lines()


@contextmanager
def _bar(nodes: Sequence[str], verb: str) -> Iterator[Callback]:
    columns = (
        TextColumn(verb),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("nodes"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    waiting = list(nodes)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"waiting for {fold(waiting)}", total=len(nodes))

        def show(node: str, finding: Finding | None) -> None:
            if finding is None:
                waiting.remove(node)
                description = f"waiting for {fold(waiting)}" if waiting else ""
                progress.update(task, advance=1, description=description)

        yield show


def _lines() -> Callback:
    told: defaultdict[str, list[Finding]] = defaultdict(list)

    def show(node: str, finding: Finding | None) -> None:
        if finding is not None:
            told[node].append(finding)
        else:
            sys.stderr.write(f"{node}: {tally(told[node]) if told[node] else 'asked'}\n")
            sys.stderr.flush()

    return show
