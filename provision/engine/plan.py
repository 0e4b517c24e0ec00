"""What is to be done where, and what waits for what. Pure: from a site to ordered steps a node."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from provision.components import registry
from provision.engine.deploy import Step
from provision.errors import InputError
from provision.site.models import Node, Site, place
from provision.site.problem import instead

BASE = "base"  # the component that all others stand on


class PlanError(InputError):
    """The components' edges contradict each other, or a wish names a component that is not there."""


class Prerequisite(NamedTuple):
    """A step of another node that comes first. Where it fails, only the first node of a role is `needed`: the others
    stand by for it."""

    node: str
    step: str
    needed: bool = True


@dataclass(frozen=True)
class Plan:
    """Steps of every node, each in one order that all nodes share, so that no two nodes can wait for each other."""

    steps: Mapping[str, tuple[Step, ...]]  # node -> steps in order

    def prerequisites(self, site: Site, node: Node, step: Step) -> list[Prerequisite]:
        """The steps on other nodes that come before `step` may run on `node`.

        Nodes that are not part of this run are taken as done: they were brought up by an earlier one.
        """
        found = []
        for edge in step.after:
            if edge.role == "self":
                continue
            wanted = f"{edge.component}:{edge.role}"
            for index, other in enumerate(site.with_role(edge.role)):
                if other.name != node.name and any(s.name == wanted for s in self.steps.get(other.name, ())):
                    found.append(Prerequisite(other.name, wanted, needed=index == 0))
        return found


def hindrance(step: Step, undone: Mapping[str, str]) -> str | None:
    """Why `step` cannot run on a node that could not do `undone` (component -> why); None: it can.

    It comes after the steps before it of its own component, the components of its edges, and base.
    """
    needed = (step.component, BASE, *(edge.component for edge in step.after))
    return next((undone[component] for component in needed if component in undone), None)


def not_yet(
    site: Site, node: Node, step: Step, brought: Collection[str], running: Collection[str] | None
) -> list[str]:
    """The components that `step` comes after on its own node and that nobody has brought there.

    `brought` are those of earlier runs, `running` those of this one (None: all).
    """
    if running is None:
        return []
    here = {each.component for each in registry.steps_for(site, node)}
    before = dict.fromkeys([BASE, *(edge.component for edge in step.after if edge.role == "self")])
    return [name for name in before if name in here and name not in {step.component, *brought, *running}]


def make_plan(site: Site, nodes: Collection[Node], components: Collection[str] | None = None) -> Plan:
    """The plan for `nodes`, of all named components or of `components` alone. Raises PlanError."""
    for name in components or ():
        if name not in registry.COMPONENTS:
            raise PlanError(f"there is no component {name}; {instead(name, registry.COMPONENTS)}")
        if not site.enabled(name):
            raise PlanError(f"{name} is not named in {site.path}; what installs it there: {place(name)}")
    order = _order(site)
    return Plan(
        {
            node.name: tuple(
                sorted(
                    (
                        step
                        for step in registry.steps_for(site, node)
                        if components is None or step.component in components
                    ),
                    key=lambda step: order[step.name],
                )
            )
            for node in nodes
        }
    )


def _order(site: Site) -> dict[str, int]:
    """One place for each step of the site: by edges first, then by stage, then as components are listed."""
    steps = [
        step
        for component in registry.COMPONENTS
        if site.enabled(component)
        for step in registry.steps(component)
    ]
    names = {step.name for step in steps}
    graph = TopologicalSorter[str]()
    for step in steps:
        graph.add(step.name)
        for edge in step.after:
            before = (
                [s.name for s in steps if s.component == edge.component]
                if edge.role == "self"
                else [f"{edge.component}:{edge.role}"]
            )
            graph.add(step.name, *(name for name in before if name in names and name != step.name))
    try:
        graph.prepare()
    except CycleError as error:
        raise PlanError(f"steps wait for each other: {' -> '.join(error.args[1])}") from error
    rank = {
        step.name: (registry.STAGES.index(registry.COMPONENTS[step.component]), index)
        for index, step in enumerate(steps)
    }
    ready: list[str] = []
    order: dict[str, int] = {}
    while graph.is_active():
        ready += graph.get_ready()
        ready.sort(key=lambda name: rank[name])
        first = ready.pop(0)
        order[first] = len(order)
        graph.done(first)
    return order
