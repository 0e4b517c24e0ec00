"""The catalogue as a table for docs/health.md: `python -m provision.health.table docs/health.md` renews it there."""

from __future__ import annotations

import sys
from pathlib import Path

from provision.health.catalogue import catalogue
from provision.health.limits import load

BEGIN, END = "<!-- the catalogue: begin -->", "<!-- the catalogue: end -->"


def markdown() -> str:
    """The table, a row a check."""
    limits = load()
    lines = ["| # | check | what | reads | accepts | action | whose limit |", "|---|---|---|---|---|---|---|"]
    for row in catalogue():
        whose = "; ".join(dict.fromkeys(limits.source(name) for name in row.thresholds))
        action = row.action + (", slow" if row.slow else "")
        cells = (str(row.number), f"`{row.name}`", row.title, row.reads, row.accepts, action, whose)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    """`text` with the table between its marks as the catalogue is now. Raises ValueError without marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
