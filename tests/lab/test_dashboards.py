"""Every expression of every dashboard, asked of the lab's Prometheus: each has an answer. With pictures to look at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import matplotlib.pyplot as plt
import pytest

from provision.components.grafana.dashboards import DASHBOARDS, Dashboard, Panel
from tests.lab.admitted import HEAD, Admitted, bad
from tests.lab.command import provision

CURL = "curl -sS --fail-with-body --config /etc/provision/monitoring.curl"
API = f"https://{HEAD}:9090/api/v1"


@pytest.fixture
def watched(admitted: Admitted, tmp_path: Path) -> Admitted:
    """The cluster with the health agent, which tells of its simulated GPUs."""
    site = tmp_path / "lab.yml"
    site.write_text(Path(admitted.site).read_text() + "health: {act: false}\n")
    applied = provision("apply", str(site), "--component", "health")
    assert applied.rc == 0, bad(applied)
    return admitted


@pytest.fixture
def ask(admitted: Admitted) -> Callable[[str, dict[str, str]], list[dict[str, Any]]]:
    def found(kind: str, values: dict[str, str]) -> list[dict[str, Any]]:
        data = " ".join(f"--data-urlencode {quote(f'{key}={value}')}" for key, value in values.items())
        answer = json.loads(admitted.on(HEAD, f"{CURL} {data} {API}/{kind}"))
        assert answer["status"] == "success", answer
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    return found


def expression(expr: str) -> str:
    """An expression as it is when all nodes are chosen."""
    return expr.replace("$node", ".+")


def test_every_expression_has_an_answer(
    watched: Admitted, ask: Callable[[str, dict[str, str]], list[dict[str, Any]]], tmp_path: Path
) -> None:
    queries = [
        (page, panel, expr) for page in DASHBOARDS for panel in page.panels for expr, _ in panel.queries
    ]
    deadline = time.monotonic() + 400  # rates need some scrapes, the rule's range of 5 minutes has begun
    missing = list(queries)
    while missing:
        missing = [each for each in missing if not ask("query", {"query": expression(each[2])})]
        assert not missing or time.monotonic() < deadline, "\n".join(
            f"{page.uid}, {panel.title}: no data: {expr}" for page, panel, expr in missing
        )
        if missing:
            time.sleep(5)
    folder = Path(os.environ.get("DASHBOARD_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for page in DASHBOARDS:
        picture = draw(page, ask)
        picture.savefig(folder / f"{page.uid}.png", dpi=70)
        plt.close(picture)
    assert {each.name for each in folder.glob("provision-*.png")} == {
        f"{page.uid}.png" for page in DASHBOARDS
    }


def draw(page: Dashboard, ask: Callable[[str, dict[str, str]], list[dict[str, Any]]]) -> plt.Figure:
    """The dashboard as Grafana would show it, roughly, from what Prometheus answers."""
    rows = (len(page.panels) + 2) // 3
    figure, axes = plt.subplots(rows, 3, figsize=(18, 3.2 * rows), squeeze=False, layout="constrained")
    figure.suptitle(page.title)
    for axis, panel in zip(axes.flat, page.panels, strict=False):
        axis.set_title(f"{panel.title} [{panel.unit}]", fontsize=9)
        (graph if panel.kind == "graph" else words)(axis, panel, ask)
    for axis in axes.flat[len(page.panels) :]:
        axis.set_axis_off()
    return figure


def graph(axis: Any, panel: Panel, ask: Callable[[str, dict[str, str]], list[dict[str, Any]]]) -> None:
    now = time.time()
    times = {"start": str(now - 600), "end": str(now), "step": "15"}
    for expr, _ in panel.queries:
        for series in ask("query_range", {"query": expression(expr), **times}):
            points = [(float(at) - now, float(value)) for at, value in series["values"]]
            name = " ".join(value for key, value in series["metric"].items() if key in LABELS)
            axis.plot(*zip(*points, strict=True), label=name or None)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=5, loc="upper left")


LABELS = ("node", "state", "mode", "device", "mountpoint", "gpu", "account", "user", "verdict")


def words(axis: Any, panel: Panel, ask: Callable[[str, dict[str, str]], list[dict[str, Any]]]) -> None:
    lines = [
        f"{' '.join(series['metric'].values())} {float(series['value'][1]):g}"
        for expr, _ in panel.queries
        for series in ask("query", {"query": expression(expr)})
    ]
    axis.text(
        0.5, 0.5, "\n".join(lines[:12]), ha="center", va="center", fontsize=16 if len(lines) == 1 else 7
    )
    axis.set_axis_off()
