"""What a check is: a function of one node, by testinfra, that returns what it found.

    @check("slurmd-registered", role="worker")
    def registered(at: Target) -> Found:
        state = at.run("scontrol show node ...")
        if state.rc: return unknown(...)
        return expect(read=..., expected=...)

Checks also run against a cluster that this tool did not build: they read the node, never this tool's memory.
Every check has a test that breaks its subject (fail) and one that breaks its source (unknown).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from provision.engine.limits import limit as limited
from provision.report.model import Finding, Verdict

if TYPE_CHECKING:
    from provision.profiles import Distribution
    from provision.site.base import Settings
    from provision.site.lock import Lock
    from provision.site.models import Node, Site

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Target:
    """A node to check. `host` is a testinfra host with root's rights, `limits` what the node cannot do."""

    site: Site
    node: Node
    component: str
    lock: Lock
    profile: Distribution
    host: Any  # testinfra.host.Host
    limits: Mapping[str, str] = field(default_factory=dict)
    reach: Callable[[str], Any] = field(default=lambda name: None)

    def limited(self, what: str) -> str | None:
        """Why this node cannot do `what` ("sysctl:vm.swappiness", "clock"); None: it can."""
        return limited(self.limits, what)

    def on(self, name: str) -> Any:
        """Another node of the site as a testinfra host with root's rights; None where it is unreachable."""
        return self.reach(name)

    def settings(self, kind: type[S]) -> S:
        return self.site.settings(self.component, self.node, kind)


@dataclass(frozen=True)
class Found:
    """What a check says; the runner adds the check's name and the node."""

    verdict: Verdict
    read: str | None = None
    expected: str | None = None
    action: str | None = None
    why: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Check:
    name: str  # kebab-case
    role: str  # "*": every node
    run: Callable[[Target], Found]
    component: str
    limit: str | None = None  # skipped, with the reason, where the node's limits name this

    def finding(self, subject: str, found: Found) -> Finding:
        return Finding(
            verdict=found.verdict,
            check=self.name,
            subject=subject,
            read=found.read,
            expected=found.expected,
            action=found.action,
            why=found.why,
            source=found.source,
        )


def check(
    name: str, role: str = "*", limit: str | None = None
) -> Callable[[Callable[[Target], Found]], Check]:
    """Make a function of a component's checks.py its check `name` for nodes of `role`."""

    def decorate(run: Callable[[Target], Found]) -> Check:
        return Check(name, role, run, run.__module__.split(".")[-2], limit)

    return decorate


def expect(read: object, expected: object, *, action: str | None = None, source: str | None = None) -> Found:
    """PASS when `read` equals `expected`, FAIL otherwise; both are shown."""
    verdict = Verdict.PASS if read == expected else Verdict.FAIL
    return Found(
        verdict, str(read), str(expected), action if verdict is Verdict.FAIL else None, source=source
    )


def unknown(why: str, *, source: str | None = None, action: str | None = None) -> Found:
    """Could not be told: the source could not be read, with the reason."""
    return Found(Verdict.UNKNOWN, why=why, source=source, action=action)


def skip(why: str) -> Found:
    """Does not apply here, with the reason."""
    return Found(Verdict.SKIP, why=why)
