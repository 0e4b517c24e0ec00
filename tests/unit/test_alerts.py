"""Alerts: each has a runbook section and is tried, firing and not firing, and asks for what nodes really tell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.components.prometheus import runbooks
from provision.components.prometheus.exports import alerts, rule_groups
from provision.health.catalogue import catalogue
from provision.health.finding import ACTIONS
from provision.health.metrics import VERDICTS

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
TESTS = ROOT / "tests" / "rules"
PARTS = ("- **Look:**", "- **Do:**", "- **Till morning:**")

FILES = [name for name, groups in rule_groups().items() if alerts(groups)]


def names(file: str) -> list[str]:
    return [rule["alert"] for rule in alerts(rule_groups()[file])]


def sections(file: str) -> dict[str, list[str]]:
    """Heading -> lines of each section of a runbook that are not empty."""
    parts = re.split(r"^## (.+)$", (RUNBOOKS / f"{file}.md").read_text(), flags=re.M)[1:]
    return {
        heading: [line for line in text.splitlines() if line]
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def tried(file: str) -> list[dict[str, Any]]:
    """What is expected of alerts, of all tests of a file of rules."""
    groups = yaml.safe_load((TESTS / f"{file}.yml").read_text())["tests"]
    return [expected for group in groups for expected in group["alert_rule_test"]]


@pytest.mark.parametrize("file", FILES)
def test_every_alert_has_a_section_and_every_section_an_alert(file: str) -> None:
    assert list(sections(file)) == names(file)


@pytest.mark.parametrize("file", FILES)
def test_a_section_is_short_and_says_what_to_look_at_and_do_and_whether_it_can_wait(file: str) -> None:
    for alert, lines in sections(file).items():
        assert 4 <= len(lines) <= 10, alert
        starts = [line for line in lines if line.startswith("- ")]
        assert len(starts) == len(PARTS), alert
        assert all(line.startswith(part) for line, part in zip(starts, PARTS, strict=True)), alert


def test_there_is_no_runbook_of_something_else() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {"README", *FILES}
    assert {path.stem for path in TESTS.glob("*.yml")} == set(rule_groups())


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings}


def test_links_lead_to_a_section() -> None:
    links = [
        (path, target, anchor)
        for path in RUNBOOKS.glob("*.md")
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text())
    ]
    links += [
        (ROOT / "x", *rule["annotations"]["runbook"].split("#"))
        for file in FILES
        for rule in alerts(rule_groups()[file])
    ]
    assert len(links) > 2 * sum(len(names(file)) for file in FILES)
    for path, target, anchor in links:
        page = path.parent / target if target else path
        assert not anchor or anchor in anchors(page), f"{path}: {target}#{anchor}"


def test_the_table_of_alerts_is_current() -> None:
    text = (RUNBOOKS / "README.md").read_text()
    assert runbooks.renewed(text) == text, (
        "run python -m provision.components.prometheus.runbooks docs/runbooks/README.md"
    )
    assert runbooks.markdown().count("\n| [") == sum(len(names(file)) for file in FILES)


@pytest.mark.parametrize("file", FILES)
def test_every_alert_is_tried_firing_and_not_firing(file: str) -> None:
    expected = tried(file)
    firing = {each["alertname"] for each in expected if each.get("exp_alerts")}
    quiet = {each["alertname"] for each in expected if not each.get("exp_alerts")}
    assert firing == set(names(file))
    assert quiet == set(names(file))


def test_every_recording_is_tried() -> None:
    recorded = {
        rule["record"]
        for groups in rule_groups().values()
        for group in groups
        for rule in group["rules"]
        if "record" in rule
    }
    (tests,) = yaml.safe_load((TESTS / "recording.yml").read_text())["tests"]
    assert {each["expr"] for each in tests["promql_expr_test"]} == recorded


@pytest.mark.parametrize("file", sorted(rule_groups()))
def test_rules_do_what_their_tests_say(file: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: the lab has it")
    done = subprocess.run(
        [promtool, "test", "rules", TESTS / f"{file}.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def expressions() -> list[str]:
    return [rule["expr"] for groups in rule_groups().values() for group in groups for rule in group["rules"]]


def values_of(label: str) -> set[str]:
    """The patterns that expressions compare a label of findings with, alternatives by themselves."""
    selectors = [
        selector
        for expr in expressions()
        for selector in re.findall(r"provision_health_finding{([^}]*)}", expr)
    ]
    assert selectors
    found = [re.findall(rf'\b{label}=~?"([^"]*)"', selector) for selector in selectors]
    return {each for patterns in found for pattern in patterns for each in pattern.split("|")}


def test_rules_ask_for_findings_that_the_health_agent_can_make() -> None:
    checks = {check.name for check in catalogue()}
    unknown = {name for name in values_of("check") if not any(re.fullmatch(name, each) for each in checks)}
    assert unknown == set()
    assert values_of("verdict") <= set(VERDICTS)
    assert values_of("action") <= set(ACTIONS)


def test_what_could_not_be_told_is_never_said_to_be_broken() -> None:
    """Only the alert about the driver's library takes an unknown finding: not to answer is what it is about."""
    for rule in (rule for file in FILES for rule in alerts(rule_groups()[file])):
        for selector in re.findall(r"provision_health_finding{([^}]*)}", rule["expr"]):
            if "unknown" in selector:
                assert rule["alert"] == "GpuDriverUnreadable"
            else:
                assert re.search(r"\b(verdict|action)=", selector), rule["alert"]
