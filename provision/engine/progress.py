"""Shows a run while it is under way: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from provision.report.text import printable

Event = dict[str, Any]
_MOST_ROWS = 24  # of nodes at work, so that the table fits on a screen


@dataclass
class _Row:
    """How far one node is."""

    text: str = "waiting"
    changed: int = 0
    over: str | None = None  # verdict


@contextmanager
def progress(title: str, nodes: Sequence[str], *, quiet: bool = False) -> Iterator[Callable[[Event], None]]:
    """A function that shows events; on standard error, so that standard output holds the answer alone."""
    if quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _terminal(title, nodes) as show:
            yield show
    else:
        yield _plain


def _plain(event: Event) -> None:
    """One line for what a person would want in a log: steps, changes, ends."""
    line = describe(event)
    if line:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def describe(event: Event) -> str | None:
    """The line that tells an event, None for those that only matter in a live table. Pure."""
    node = event.get("node", "")
    match event["event"]:
        case "connect" if event.get("only") == "facts":
            return f"{node}: facts only: it is outside of this run, but holds what the others need"
        case "step" if event["outcome"] == "done":
            changed = event["changed"]
            return f"{node}: {event['step']} {changed or 'no'} change{'' if changed == 1 else 's'}"
        case "step" if event["outcome"] == "blocked":
            return f"{node}: {event['step']} {event['reason']}"
        case "op" if event["outcome"] == "failed":
            return f"{node}: {event['step']} FAILED: {event['title']}: {event.get('detail', '')}"
        case "warning":
            return f"{node}: warning: {event['text']}"
        case "reboot":
            return f"{node}: reboots: {event['text']}"
        case "secret":
            return f"{node}: secret {event['name']} {event['outcome']}"
        case "stopping":
            return "stopping: running operations are let end (Ctrl-C again ends them at once)"
        case "node":
            return f"{node}: {event['verdict']}" + (f": {event['reason']}" if event["reason"] else "")
        case "note":
            return str(event["text"])
    return None


@contextmanager
def _terminal(title: str, nodes: Sequence[str]) -> Iterator[Callable[[Event], None]]:
    console = Console(stderr=True)
    rows = {node: _Row() for node in nodes}
    started = time.monotonic()
    table = partial(_table, title, rows, started)
    with Live(console=console, get_renderable=table, refresh_per_second=8, transient=True):

        def show(event: Event) -> None:
            row = rows.get(event.get("node", ""))
            if row is not None:
                _update(row, event)
            line = describe(event)
            if (line and event["event"] in ("warning", "reboot", "secret", "stopping", "note")) or event.get(
                "only"
            ):
                console.print(line, highlight=False, markup=False)

        yield show


def _table(title: str, rows: Mapping[str, _Row], started: float) -> Table:
    """Nodes at work first. Texts are Text: what nodes answer may look like markup."""
    over = sum(row.over is not None for row in rows.values())
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    # A narrow terminal cuts this column alone: rich takes from all those that must not wrap, else from those that may.
    made.add_column()
    made.add_column(justify="right", no_wrap=True)
    done = f"{over} of {len(rows)} nodes done"
    made.add_row(Text(title, "bold"), done, f"{time.monotonic() - started:.0f} s")
    busy = sorted(rows.items(), key=lambda item: (item[1].over == "pass", item[0]))
    for node, row in busy[:_MOST_ROWS]:
        colour = {"pass": "green", "fail": "red", None: "cyan"}.get(row.over, "yellow")
        text = Text(printable(row.text), no_wrap=True, overflow="ellipsis")
        made.add_row(Text(node, colour), text, f"{row.changed} changed")
    return made


def _update(row: _Row, event: Event) -> None:
    match event["event"]:
        case "connect":
            row.text = "connecting"
        case "start":
            row.text = f"{event['step']}: {event['title']}"
        case "op" if event["outcome"] in ("changed", "later"):
            row.changed += 1
        case "step" if event["outcome"] == "blocked":
            row.text = event["reason"]
        case "node":
            row.over = event["verdict"]
            row.text = event["reason"] or f"done in {event['seconds']:.1f} s"
