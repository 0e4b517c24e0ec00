"""All alerts as a table: `python -m provision.components.prometheus.runbooks docs/runbooks/README.md` renews it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from provision.components.prometheus.exports import alerts, rule_groups

BEGIN, END = "<!-- the alerts: begin -->", "<!-- the alerts: end -->"


def markdown() -> str:
    """The table, a row an alert, in the order of the rules."""
    lines = ["| alert | severity | what it says |", "|---|---|---|"]
    for name, groups in rule_groups().items():
        for rule in alerts(groups):
            link = f"[{rule['alert']}]({name}.md#{rule['alert'].lower()})"
            summary = _readable(rule["annotations"]["summary"])
            lines.append(f"| {link} | {rule['labels']['severity']} | {summary} |")
    return "\n".join(lines) + "\n"


def _readable(template: str) -> str:
    """A summary with the names of its values: "{{ $labels.node }} has booted" -> "*node* has booted"."""
    return re.sub(r"{{ \$(?:labels\.)?(\w+)[^}]*}}", r"*\1*", template)


def renewed(text: str) -> str:
    """`text` with the table between its marks as the rules are now. Raises ValueError without marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text()))
