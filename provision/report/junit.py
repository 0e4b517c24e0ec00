"""The document as JUnit XML, for systems that show test results: a node is a suite, a finding a case."""

from __future__ import annotations

from datetime import UTC, datetime
from xml.etree import ElementTree

from provision.report.model import Document, Finding, Verdict
from provision.report.text import by_subject, location, printable, sentence, worst_first


def render(document: Document, at: datetime) -> str:
    """JUnit XML: FAIL is a failure, UNKNOWN an error, SKIP skipped; WARN passes and is told in system-out."""
    root = ElementTree.Element("testsuites", name=_name(document), time=f"{document.seconds:.3f}")
    suites = [_suite(document, subject, findings, at) for subject, findings in by_subject(document).items()]
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in suites)))
    root.extend(suites)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _name(document: Document) -> str:
    return printable(f"{document.verb} {document.site}" if document.site else document.verb)


def _suite(document: Document, subject: str, findings: list[Finding], at: datetime) -> ElementTree.Element:
    told = [*_result(document, subject, findings), *findings]
    verdicts = [finding.verdict for finding in told]
    suite = ElementTree.Element(
        "testsuite",
        name=printable(subject),
        timestamp=at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        hostname=printable(subject),
        tests=str(len(told)),
        failures=str(verdicts.count(Verdict.FAIL)),
        errors=str(verdicts.count(Verdict.UNKNOWN)),
        skipped=str(verdicts.count(Verdict.SKIP)),
        time="0.000",
    )
    suite.extend(_case(document, finding) for finding in told)
    return suite


def _result(document: Document, subject: str, findings: list[Finding]) -> list[Finding]:
    """The node's own result as a case, where its findings do not tell it: a suite must not look better."""
    node = document.nodes.get(subject)
    if node is None:
        return []
    result = Finding(verdict=node.verdict, check=document.verb, subject=subject, why=node.reason)
    return [result] if worst_first([*findings, result])[0] is result else []


def _case(document: Document, finding: Finding) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase", classname=_name(document).replace(" ", "."), name=printable(finding.check), time="0.000"
    )
    message = sentence(finding)
    lines = [message]
    if where := location(finding):
        lines.append(f"read from: {where}")
    if finding.action:
        lines.append(f"next: {printable(finding.action)}")
    text = "\n".join(lines)
    kind = {Verdict.FAIL: "failure", Verdict.UNKNOWN: "error", Verdict.SKIP: "skipped"}.get(finding.verdict)
    if kind == "skipped":
        ElementTree.SubElement(case, kind, message=message)
    elif kind is not None:
        ElementTree.SubElement(case, kind, message=message, type=finding.verdict).text = text
    elif finding.verdict is Verdict.WARN:
        ElementTree.SubElement(case, "system-out").text = f"warning: {text}"
    return case
