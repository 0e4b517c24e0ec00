"""`provision inspect FILE...`: judges recordings from a node, without the node."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from provision.cli.common import JsonOption, print_json, refuse
from provision.health.finding import PASS, SKIP, Finding, worst
from provision.inspect.judge import Judged, details, expectations
from provision.inspect.judge import inspect as judge_files
from provision.inspect.text import Damaged, decode
from provision.report.model import Document, Verdict
from provision.report.model import Finding as Told
from provision.report.text import printable

MOST_BYTES = 64 << 20  # of one file; a kernel log of a month has less


def inspect(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Recordings; - is the standard input.")
    ],
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect", metavar="KEY=VALUE,...", help="What the site would know: gpus=8,model=H100."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge what somebody recorded on a node: nvidia-smi, kernel messages, ibstat, dcgmi, nccl-tests, Slurm's files.

    Each file is recognised by its content. One line a finding: VERDICT check subject: what was read, what was
    expected, what to do. Exit status 1 when something is wrong or cannot be told; 2 when a file cannot be opened.

    Example: provision inspect --expect gpus=8,model=H100 smi.xml dmesg.txt
    """
    began = time.monotonic()
    try:
        wanted = expectations(expect)
    except ValueError as error:
        refuse(f"--expect {error}")
    judged = judge_files([(str(path), _content(path)) for path in files], wanted)
    findings = [finding for each in judged for finding in each.findings]
    verdict = worst(finding.verdict for finding in findings)
    document = Document(
        verb="inspect",
        verdict=Verdict(verdict),
        seconds=round(time.monotonic() - began, 3),
        findings=[Told.model_validate(finding.document()) for finding in findings],
        details={"files": details(judged)},
    )
    if as_json:
        print_json(document)
    else:
        for each in judged:
            _show(each)
    raise typer.Exit(document.exit_status)


def _content(path: Path) -> str:
    """The text of a file, unpacked where it is compressed."""
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
    except OSError as error:
        refuse(f"{path}: {error.strerror}")
    if len(content) > MOST_BYTES:
        refuse(f"{path}: larger than {MOST_BYTES >> 20} MiB; cut the time span, journalctl -k --since")
    try:
        return decode(content, MOST_BYTES)
    except Damaged as error:
        refuse(f"{path}: {error}")


def _show(judged: Judged) -> None:
    about = "; ".join(f"{part.kind}: {part.about}" if part.about else part.kind for part in judged.parts)
    typer.echo(printable(f"# {judged.name}: {about or judged.kind}"))
    for finding in grouped(judged.findings):
        typer.echo(printable(finding.line()))


def grouped(findings: list[Finding]) -> list[Finding]:
    """Findings that differ in their subject alone as one, those that are not well first."""
    together: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (
            finding.verdict,
            finding.check,
            finding.read,
            finding.expected,
            finding.action,
            finding.advice,
            finding.why,
        )
        together.setdefault(key, []).append(finding)
    shown = []
    for same in together.values():
        subjects = list(dict.fromkeys(finding.subject for finding in same))
        some = ", ".join(subjects[:3]) + (f" and {len(subjects) - 3} more" if len(subjects) > 3 else "")
        shown.append(Finding(**{**vars(same[0]), "subject": some}))
    return sorted(shown, key=lambda finding: finding.verdict in (PASS, SKIP))
