"""The document as one HTML file: no script, nothing fetched, in light and dark, for eye and ear."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from provision.report.figures import figures
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.report.plots import plots
from provision.report.text import (
    ORDER,
    by_subject,
    counts,
    location,
    next_steps,
    printable,
    sentence,
    worst_first,
)

# A sign beside the word, so that no verdict is told by colour alone.
SIGNS = {
    Verdict.FAIL: "✕",
    Verdict.UNKNOWN: "?",
    Verdict.WARN: "!",
    Verdict.SKIP: "–",
    Verdict.PASS: "✓",
}


def render(document: Document, *, at: datetime, version: str) -> str:
    """A whole HTML page; `at` is when the document was made, `version` that of this tool. Pure."""
    groups = by_subject(document)
    ordered = sorted(groups, key=lambda subject: _rank(document.nodes.get(subject), groups[subject]))
    return _template().render(
        document=document,
        counts=counts(document.findings),
        nodes={subject: document.nodes[subject] for subject in ordered if subject in document.nodes},
        groups={subject: worst_first(groups[subject]) for subject in ordered if groups[subject]},
        verdicts={
            subject: worst(f.verdict for f in groups[subject]) for subject in ordered if groups[subject]
        },
        numbers={subject: number for number, subject in enumerate(ordered, start=1)},
        steps=next_steps(document),
        figures=figures(document.details),
        plots=[Markup(svg) for svg in plots(document.details)],
        digest=document.details.get("digest"),
        at=at,
        version=version,
    )


def _rank(node: NodeResult | None, findings: list[Finding]) -> int:
    verdicts = [finding.verdict for finding in findings] + ([node.verdict] if node else [])
    return min((ORDER.index(verdict) for verdict in verdicts), default=len(ORDER))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        printable=printable, sentence=sentence, location=location, sign=SIGNS.__getitem__
    )
    source = files("provision.report").joinpath("templates", "report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)
