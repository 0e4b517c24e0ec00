"""All components, in the order in which a person reads about them; what depends on what is in their edges."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from provision.engine.deploy import Secret, Step
from provision.verify.check import Check

if TYPE_CHECKING:
    from provision.site.models import Node, Site

# component -> stage of the bring-up it belongs to
COMPONENTS: dict[str, str] = {
    "base": "base",
    "ssh": "base",
    "firewall": "base",
    "time": "base",
    "certificates": "base",
    "nvidia": "gpu",
    "fabric": "fabric",
    "containers": "runtime",
    "storage": "storage",
    "munge": "scheduler",
    "slurm": "scheduler",
    "prometheus": "monitoring",
    "health": "monitoring",
    "slurm_exporter": "monitoring",
    "dcgm_exporter": "monitoring",
    "ipmi_exporter": "monitoring",
    "grafana": "monitoring",
    "logs": "monitoring",
}
STAGES = (
    "preflight",
    "base",
    "gpu",
    "fabric",
    "runtime",
    "storage",
    "scheduler",
    "monitoring",
    "tools",
    "acceptance",
)


@cache
def steps(component: str) -> tuple[Step, ...]:
    """The steps that a component's deploy.py defines."""
    module = import_module(f"provision.components.{component}.deploy")
    return tuple(value for value in vars(module).values() if isinstance(value, Step))


@cache
def checks(component: str) -> tuple[Check, ...]:
    """The checks that a component's checks.py defines, in the order written."""
    module = import_module(f"provision.components.{component}.checks")
    return tuple(value for value in vars(module).values() if isinstance(value, Check))


def secrets(site: Site) -> dict[str, Secret]:
    """Every secret that the named components of `site` want, by name."""
    wanted: dict[str, Secret] = {}
    for component in COMPONENTS:
        if site.enabled(component):
            module = import_module(f"provision.components.{component}.exports")
            found = getattr(module, "SECRETS", ())
            for secret in found(site) if callable(found) else found:
                wanted[secret.name] = secret
    return wanted


def steps_for(site: Site, node: Node) -> list[Step]:
    """The steps of all named components that apply to `node`, by stage; edges are not looked at here."""
    found = [
        step
        for component in COMPONENTS
        if site.enabled(component)
        for step in steps(component)
        if node.has(step.role)
    ]
    return sorted(found, key=lambda step: STAGES.index(COMPONENTS[step.component]))
