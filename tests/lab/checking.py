"""Breaking what a check looks at, and what it looks with, on a real node: fail and unknown must be told apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.components import registry
from provision.engine import limits
from provision.engine.remote import RemoteError, connect
from provision.lab import Lab
from provision.profiles import distribution
from provision.report.model import Verdict
from provision.site.load import load
from provision.site.lock import load_lock
from provision.site.models import Site
from provision.verify.backend import Session, target_host
from provision.verify.check import Found, Target
from provision.verify.missing import judged
from tests.lab.command import provision

HEAD, WORKER = "lab-head", "lab-gpu-1"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA ada@desk"


@dataclass(frozen=True)
class Case:
    """How a check's subject and its source are broken on `node`, and mended: shell text, run as root.

    Where `mend` is None the subject is mended by apply.
    """

    check: str
    subject: str
    source: str
    undo: str  # of `source`
    node: str = WORKER
    mend: str | None = None

    def __str__(self) -> str:
        return self.check


def hidden(check: str, subject: str, program: str, node: str = WORKER, mend: str | None = None) -> Case:
    """A case whose source is a program that is not there."""
    return Case(check, subject, f"mv {program} {program}.away", f"mv {program}.away {program}", node, mend)


@dataclass
class Bench:
    """The lab, brought to a site file, and its checks one at a time."""

    lab: Lab
    path: Path
    site: Site
    component: str
    sessions: dict[str, Session]
    timeout: float = 900  # seconds for one apply

    @property
    def names(self) -> set[str]:
        return {check.name for check in registry.checks(self.component)}

    def found(self, name: str, node: str = WORKER) -> Found:
        """What one check finds on one node."""
        (check,) = (check for check in registry.checks(self.component) if check.name == name)
        host = self._host(node)
        assert host is not None, f"{node} is out of reach"
        cannot = limits.parse(host.run("cat %s", limits.PATH).stdout)
        if check.limit is not None and (reason := limits.limit(cannot, check.limit)):
            return Found(Verdict.SKIP, why=reason)
        at = Target(
            self.site,
            self.site.nodes[node],
            self.component,
            load_lock(self.site),
            distribution("debian", "13"),
            host,
            cannot,
            self._host,
        )
        return judged(check.run(at), at)

    def apply(self) -> dict[str, int]:
        """Bring this component's part of the site to all nodes; how much changed on each."""
        answer = provision("apply", str(self.path), "--component", self.component, timeout=self.timeout)
        assert answer.rc == 0, answer
        return answer.changed

    def plan(self) -> dict[str, int]:
        answer = provision("plan", str(self.path), "--component", self.component)
        assert answer.rc == 0, answer
        return answer.changed

    def _host(self, node: str) -> Any:
        try:
            self.sessions[node].open()
        except RemoteError:
            return None
        return target_host(self.sessions[node], node)


@contextmanager
def bench(lab: Lab, folder: Path, component: str, timeout: float = 900, **sections: Any) -> Iterator[Bench]:
    """The lab with base, `component` and `sections` of the site file applied."""
    document = {
        "cluster": "lab",
        "access": {"user": "ops", "ssh_config": str(lab.paths.ssh_config), "host_keys": "strict"},
        "groups": {
            "head": {"hosts": HEAD, "addresses": lab.node(HEAD).address, "roles": ["head"]},
            "gpu": {
                "hosts": WORKER,
                "addresses": lab.node(WORKER).address,
                "roles": ["monitor"],
            },  # any role but head
        },
        "networks": {"management": "10.77.0.0/24"},
        "monitoring": {},
        component: {},
        **sections,
    }
    path = folder / "lab.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        site = load(path)
        sessions = {
            name: Session(name, lambda node=node: connect(site, node)) for name, node in site.nodes.items()
        }
        made = Bench(lab, path, site, component, sessions, timeout)
        try:
            made.apply()
            yield made
        finally:
            for session in sessions.values():
                session.close()


def tell_apart(on: Bench, cases: Sequence[Case]) -> None:
    """Every case: healthy passes, without its source the check cannot tell, and healthy again it passes."""
    for case in cases:
        assert (case.check, on.found(case.check, case.node).verdict) == (case.check, Verdict.PASS)
        on.lab.inside(case.node, case.source)
        try:
            found = on.found(case.check, case.node)
        finally:
            on.lab.inside(case.node, case.undo)
        assert (case.check, found.verdict) == (case.check, Verdict.UNKNOWN), found
        assert found.why, case.check


def break_and_mend(on: Bench, cases: Sequence[Case]) -> None:
    """All cases at once: each check fails and says what it read, a plan shows it, apply mends it and then rests."""
    for case in cases:
        on.lab.inside(case.node, case.subject)
    for case in cases:
        found = on.found(case.check, case.node)
        assert (case.check, found.verdict) == (case.check, Verdict.FAIL), found
        assert found.read != found.expected, case.check
    broken = {case.node for case in cases}
    assert {node for node, changes in on.plan().items() if changes} == broken
    assert {node for node, changes in on.apply().items() if changes} == broken
    for case in cases:
        found = on.found(case.check, case.node)
        assert (case.check, found.verdict) == (case.check, Verdict.PASS), found
    assert on.apply() == dict.fromkeys(on.site.nodes, 0)
