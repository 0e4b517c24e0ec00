"""The order of steps: edges first, one order for all nodes, and who waits for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision.components import registry
from provision.engine import plan as planning
from provision.engine.deploy import Edge, Step
from provision.site.models import Site, SiteFile

SITE = Site.from_file(
    SiteFile.model_validate(
        {
            "cluster": "t",
            "groups": {
                "head": {"hosts": "head-1", "roles": ["head"]},
                "gpu": {"hosts": "gpu-[1-2]", "roles": ["worker"]},
            },
        }
    ),
    Path("/t.yml"),
)


def steps(monkeypatch: pytest.MonkeyPatch, *made: Step) -> None:
    """Pretend that these are the steps of base and time, the components that every site has."""
    monkeypatch.setattr(
        registry, "steps", lambda component: tuple(s for s in made if s.component == component)
    )


def make(component: str, role: str, *after: tuple[str, str]) -> Step:
    return Step(component, role, lambda on: None, tuple(Edge(*edge) for edge in after))


def test_a_worker_waits_for_the_head_and_not_for_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make("time", "worker", ("time", "head"))
    steps(monkeypatch, make("base", "*"), make("time", "head"), worker)
    plan = planning.make_plan(SITE, list(SITE.nodes.values()))
    assert [step.name for step in plan.steps["gpu-1"]] == ["base:*", "time:worker"]
    assert plan.prerequisites(SITE, SITE.nodes["gpu-1"], worker) == [("head-1", "time:head", True)]
    assert plan.prerequisites(SITE, SITE.nodes["head-1"], make("base", "*")) == []


def test_of_several_heads_the_first_is_needed_and_the_others_are_only_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {
        "head": {"hosts": "head-[1-2]", "roles": ["head"]},
        "gpu": {"hosts": "gpu-1", "roles": ["worker"]},
    }
    site = Site.from_file(SiteFile.model_validate({"cluster": "t", "groups": groups}), Path("/t.yml"))
    worker = make("time", "worker", ("time", "head"))
    steps(monkeypatch, make("base", "*"), make("time", "head"), worker)
    plan = planning.make_plan(site, list(site.nodes.values()))
    found = plan.prerequisites(site, site.nodes["gpu-1"], worker)
    assert found == [("head-1", "time:head", True), ("head-2", "time:head", False)]


def test_nodes_outside_of_the_run_are_taken_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make("time", "worker", ("time", "head"))
    steps(monkeypatch, make("base", "*"), make("time", "head"), worker)
    plan = planning.make_plan(SITE, [SITE.nodes["gpu-1"]])
    assert plan.prerequisites(SITE, SITE.nodes["gpu-1"], worker) == []


def test_edges_win_over_the_order_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, make("base", "*", ("time", "*")), make("time", "*"))
    plan = planning.make_plan(SITE, list(SITE.nodes.values()))
    assert [step.name for step in plan.steps["gpu-2"]] == ["time:*", "base:*"]


def test_a_circle_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    steps(monkeypatch, make("base", "*", ("time", "*")), make("time", "*", ("base", "*")))
    with pytest.raises(planning.PlanError, match=r"base:\* -> time:\*|time:\* -> base:\*"):
        planning.make_plan(SITE, list(SITE.nodes.values()))


def test_components_that_are_not_there_are_refused_before_any_node_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps(monkeypatch, make("base", "*"))
    with pytest.raises(planning.PlanError, match=r"no component bsae; did you mean base\?$"):
        planning.make_plan(SITE, list(SITE.nodes.values()), ["bsae"])
    with pytest.raises(planning.PlanError, match=r"no component xyz; there are base, ssh, .*"):
        planning.make_plan(SITE, list(SITE.nodes.values()), ["xyz"])
    with pytest.raises(
        planning.PlanError, match=r"slurm is not named in /t.yml; .*: scheduler: \{slurm: \{\}\}$"
    ):
        planning.make_plan(SITE, list(SITE.nodes.values()), ["slurm"])


def test_what_a_run_of_some_components_was_begun_without_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site.from_file(
        SiteFile.model_validate({**SITE.file.model_dump(exclude_unset=True), "monitoring": {}}), SITE.path
    )
    node = site.nodes["gpu-1"]
    (exporter,) = (step for step in registry.steps("prometheus") if step.role == "*")
    assert planning.not_yet(site, node, exporter, [], ["prometheus"]) == ["base", "certificates"]
    assert planning.not_yet(site, node, exporter, ["base"], ["prometheus"]) == ["certificates"]
    assert planning.not_yet(site, node, exporter, ["base"], ["prometheus", "certificates"]) == []
    assert planning.not_yet(site, node, exporter, [], None) == []
    elsewhere = make("time", "worker", ("time", "head"), ("munge", "self"))  # munge is not in this site
    assert planning.not_yet(site, node, elsewhere, ["base"], ["time"]) == []


@pytest.mark.parametrize("component", ["prometheus", "logs", "grafana"])
def test_what_answers_by_tls_comes_after_its_certificate(component: str) -> None:
    assert all(Edge("certificates", "self") in step.after for step in registry.steps(component))


def test_behind_a_failed_component_only_what_needs_it_is_blocked() -> None:
    storage = {"storage": "blocked by storage:*: it failed"}
    assert planning.hindrance(make("slurm", "worker", ("slurm", "head"), ("storage", "self")), storage)
    assert planning.hindrance(make("storage", "*", ("storage", "head")), storage) == storage["storage"]
    assert planning.hindrance(make("prometheus", "*"), storage) is None


def test_everything_comes_after_base() -> None:
    assert planning.hindrance(make("time", "*"), {"base": "why"}) == "why"
    assert planning.hindrance(make("base", "*"), {"time": "why"}) is None
