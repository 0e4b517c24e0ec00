"""What findings say in one line; shared by all renderings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from provision.report.model import Document, Finding, Verdict
from provision.site.hostlist import fold

# The worst first: the order in which a person wants to read.
ORDER = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN, Verdict.SKIP, Verdict.PASS)


def printable(text: str) -> str:
    r"""`text` in one line, with what a terminal or page would act on (escapes, bidi marks) shown as \x1b."""
    line = " ".join(text.split())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in line
    )


def location(finding: Finding) -> str:
    """Where it was read: "site.yml:12", "nvidia-smi -L"; empty where nothing is known."""
    if finding.source is None:
        return ""
    return printable(finding.source if finding.line is None else f"{finding.source}:{finding.line}")


def sentence(finding: Finding) -> str:
    """What was found, without check and subject: "7, expected 8: a GPU is gone"."""
    said = finding.read or ""
    judged = finding.verdict in (Verdict.FAIL, Verdict.WARN) or finding.read is not None
    if finding.read and finding.why and finding.why.startswith(finding.read):
        return printable(finding.why)  # it says what was read
    if finding.expected is not None and judged and finding.verdict is not Verdict.PASS:
        said = f"{said or 'nothing'}, expected {finding.expected}"
    if finding.why:
        said = f"{said}: {finding.why}" if said else finding.why
    return printable(said)


def counts(findings: Iterable[Finding]) -> dict[Verdict, int]:
    """How many findings have each verdict, worst first, without those that nothing has."""
    found = [finding.verdict for finding in findings]
    return {verdict: found.count(verdict) for verdict in ORDER if verdict in found}


def tally(findings: Iterable[Finding]) -> str:
    """ "1 fail, 2 skip, 30 pass"; "no findings" for none."""
    return ", ".join(f"{number} {verdict}" for verdict, number in counts(findings).items()) or "no findings"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by verdict, worst first; otherwise in the order given."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.verdict))


def grouped(document: Document) -> list[tuple[list[str], Finding]]:
    """What is not in order, worst first, each said once with all the subjects that it holds for."""
    groups: dict[str, tuple[list[str], Finding]] = {}
    for finding in worst_first(document.findings):
        if finding.verdict is not Verdict.PASS:
            same = finding.model_dump_json(exclude={"subject"})
            groups.setdefault(same, ([], finding))[0].append(finding.subject)
    return list(groups.values())


@dataclass(frozen=True)
class Step:
    """One thing to do, and what it is for."""

    verdict: Verdict  # the worst that asks for it
    action: str
    subjects: str
    checks: tuple[str, ...]


def next_steps(document: Document) -> list[Step]:
    """What findings say is to be done, each action once, that of the worst finding first."""
    actions: dict[str, list[Finding]] = {}
    for finding in worst_first(document.findings):
        if finding.action and finding.verdict is not Verdict.PASS:
            actions.setdefault(finding.action, []).append(finding)
    return [
        Step(
            asking[0].verdict,
            printable(action),
            subjects(list(dict.fromkeys(finding.subject for finding in asking))),
            tuple(dict.fromkeys(printable(finding.check) for finding in asking)),
        )
        for action, asking in actions.items()
    ]


def subjects(names: list[str]) -> str:
    """ "gpu-[001-016]" for nodes; whatever is no name of a node is listed as it is."""
    plain = [name for name in names if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name)]
    others = [printable(name) for name in names if name not in plain]
    return ", ".join([*([fold(plain)] if plain else []), *dict.fromkeys(others)])


def by_subject(document: Document) -> dict[str, list[Finding]]:
    """Findings by node in the document's order, then by the other subjects (files, keys) as they come."""
    groups: dict[str, list[Finding]] = {name: [] for name in document.nodes}
    for finding in document.findings:
        groups.setdefault(finding.subject, []).append(finding)
    return groups
