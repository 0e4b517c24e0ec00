"""What a component's deploy is made of: steps by role, the edges between them, and what a step is given.

    @step("head", after=[("munge", "head"), ("storage", "head")])
    def controller(on: Context) -> None:
        ops.packages(*on.profile.packages("slurm-controller"))
        ops.file("/etc/slurm/slurm.conf", exports.slurm_conf(on.site, on.lock), user="slurm")
        ops.unit("slurmctld", reads=["/etc/slurm/slurm.conf"])

A step runs top to bottom on one node, each operation taking effect before the next line; it must come out the
same when it is run again. Operations are in `provision.engine.ops`, facts are read with `provision.engine.facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

from provision.engine.limits import limit

if TYPE_CHECKING:
    from provision.profiles import Distribution
    from provision.site.base import Settings
    from provision.site.lock import Lock
    from provision.site.models import Node, Site

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Edge:
    """ "Comes after `component` on every node that plays `role`", or on this node alone where role is "self"."""

    component: str
    role: str


@dataclass(frozen=True)
class Step:
    """What a component does on nodes of one role ("*" for every node)."""

    component: str
    role: str
    run: Callable[[Context], None]
    after: tuple[Edge, ...] = ()

    @property
    def name(self) -> str:
        """`slurm:head`, as plans, progress and journal show it."""
        return f"{self.component}:{self.role}"


def step(role: str, after: Iterable[tuple[str, str]] = ()) -> Callable[[Callable[[Context], None]], Step]:
    """Make a function of a component's deploy.py its step for `role`, after the given (component, role) pairs.

    An edge to a component that the site file does not name is no edge. An edge whose role is "self" waits for
    nothing on other nodes: it only orders steps on the same node.
    """

    def decorate(run: Callable[[Context], None]) -> Step:
        component = run.__module__.split(".")[-2]
        return Step(component, role, run, tuple(Edge(*edge) for edge in after))

    return decorate


@dataclass
class Context:
    """What a step is given: the site, the node it runs on, and what is known about both."""

    site: Site
    node: Node
    component: str
    lock: Lock
    profile: Distribution  # names of packages, units and files on this node's distribution
    secrets: Mapping[str, bytes]  # declared by components' exports; never written to a log or an event
    limits: Mapping[str, str]  # what this node cannot do -> why, as whoever made the node declared it
    reboot_reasons: list[str] = field(default_factory=list)

    def settings(self, kind: type[S]) -> S:
        """This component's settings as they hold on this node."""
        return self.site.settings(self.component, self.node, kind)

    def limited(self, what: str) -> str | None:
        """Why this node cannot do `what` ("swap", "mount:nfs"); None: it can."""
        return limit(self.limits, what)

    def render(self, template: str, **values: Any) -> str:
        """The text of templates/`template` of this component; a missing value is an error."""
        return render(self.component, template, **values)

    def reboot(self, reason: str) -> None:
        """Declare that this node must reboot; the engine does it once, at the end of the stage."""
        self.reboot_reasons.append(reason)

    @cached_property
    def first_head(self) -> bool:
        """Whether this node is the one that holds what exists once in a cluster."""
        return self.node.name == self.site.head.name


def render(component: str, template: str, **values: Any) -> str:
    """The text of a component's template. Pure; StrictUndefined."""
    return _template(component, template).render(**values)


@cache
def _template(component: str, template: str) -> jinja2.Template:
    """Compiled once a process: many nodes are rendered from it."""
    source = files(f"provision.components.{component}").joinpath("templates", template).read_text()
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(source)


@dataclass(frozen=True)
class Secret:
    """A secret that a component needs: adopted from where it already is, made only when it is nowhere.

    `adopt` are files on the first head that may already hold it (the whole content, or the first match of
    `pattern`'s group 1); `make` returns a new one.
    """

    name: str  # "munge.key": also its file name below /var/lib/provision/secrets on the head
    make: Callable[[], bytes]
    adopt: tuple[str, ...] = ()
    pattern: str | None = None
