"""How a plan is shown: changes node by node, what is skipped once for all nodes that skip it."""

from __future__ import annotations

import io

from rich.console import Console

from provision.cli.apply import _print_operations
from provision.report.model import Document, NodeResult, Verdict


def operation(node: str, title: str, outcome: str, **more: str) -> dict[str, str]:
    return {"node": node, "step": "base:*", "title": title, "outcome": outcome, **more}


def shown(*operations: dict[str, str]) -> list[str]:
    nodes = {name: NodeResult(verdict=Verdict.PASS) for name in ("h1", "g1", "g2")}
    document = Document(
        verb="plan", site="tiny", verdict=Verdict.PASS, nodes=nodes, details={"operations": list(operations)}
    )
    console = Console(file=io.StringIO(), width=60)
    _print_operations(document, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_changes_stand_below_their_node_in_the_order_of_the_site_file() -> None:
    assert shown(
        operation("g1", "unit chrony.service", "later"),
        operation("h1", "file /etc/hosts", "changed", diff="-old\n+new"),
        operation("g1", "directory [/data]", "failed", detail="no space"),
    ) == [
        "h1",
        "  ~ base:*: file /etc/hosts",
        "      -old",
        "      +new",
        "g1",
        "  ? base:*: unit chrony.service",
        "  ! base:*: directory [/data] (no space)",
    ]


def test_what_is_skipped_buries_no_change() -> None:
    skipped = [
        operation(node, "sysctl vm.swappiness", "skipped", detail="read-only") for node in ("h1", "g1", "g2")
    ]
    assert shown(*skipped, operation("g2", "file /etc/hosts", "changed")) == [
        "g2",
        "  ~ base:*: file /etc/hosts",
        "skip g[1-2],h1: base:*: sysctl vm.swappiness (read-only)",
    ]
