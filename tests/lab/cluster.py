"""The lab brought to inventories/lab.yml for some components, and its checks one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from provision.components import registry
from provision.engine.controller import converge
from provision.engine.remote import Output, RootShell, connect
from provision.report.model import Document, Finding, Verdict
from provision.site.load import find, load
from provision.site.lock import load_lock
from provision.site.models import Site
from provision.verify.run import verify
from tests.lab.checking import Case

OTHER = "lab-gpu-2"


@dataclass
class Cluster:
    site: Site
    components: list[str]
    shells: dict[str, RootShell] = field(default_factory=dict)

    def run(self, node: str, command: str, timeout: float = 120) -> Output:
        """A command on a node as root."""
        if node not in self.shells or not self.shells[node].alive:
            self.shells[node] = connect(self.site, self.site.nodes[node])
        return self.shells[node].run(command, timeout=timeout)

    def must(self, node: str, command: str) -> str:
        """A command that has to succeed, and what it prints."""
        output = self.run(node, command)
        assert output.ok, f"{node}: {command}: {output.stderr or output.stdout}"
        return output.stdout

    def apply(self, components: list[str] | None = None) -> Document:
        nodes = list(self.site.nodes.values())
        return converge(
            self.site,
            nodes,
            verb="apply",
            forecast=False,
            components=components or self.components,
            reboot=False,
        )

    def plan(self) -> Document:
        nodes = list(self.site.nodes.values())
        return converge(self.site, nodes, verb="plan", forecast=True, components=self.components)

    def found(self, check: str, node: str) -> Finding:
        """What one check finds on one node."""
        component = next(
            each.component for name in self.components for each in registry.checks(name) if each.name == check
        )
        findings = verify(self.site, load_lock(self.site), [self.site.nodes[node]], components=[component])
        (finding,) = [finding for finding in findings if finding.check == check]
        return finding

    def close(self) -> None:
        for shell in self.shells.values():
            shell.close()


@contextmanager
def brought_up(*components: str, site: str = "inventories/lab.yml") -> Iterator[Cluster]:
    """The running lab with base and `components` of a site file applied."""
    cluster = Cluster(load(find(site)), list(components))
    try:
        document = cluster.apply(["base", *components])
        assert document.verdict is Verdict.PASS, document.findings
        yield cluster
    finally:
        cluster.close()


def changed(document: Document) -> dict[str, int]:
    """The nodes on which something was, or would be, changed."""
    return {name: result.changed for name, result in document.nodes.items() if result.changed}


def names(components: Iterable[str]) -> set[str]:
    """The names of all checks of `components`."""
    return {check.name for component in components for check in registry.checks(component)}


def try_case(cluster: Cluster, case: Case) -> None:
    """Healthy it passes; without its source it cannot tell; with its subject broken it fails; mended it passes."""
    assert cluster.found(case.check, case.node).verdict.good
    cluster.must(case.node, case.source)
    try:
        unsure = cluster.found(case.check, case.node)
    finally:
        cluster.must(case.node, case.undo)
    assert unsure.verdict is Verdict.UNKNOWN, unsure
    assert unsure.why, unsure
    cluster.must(case.node, case.subject)
    failing = cluster.found(case.check, case.node)
    if case.mend is not None:
        cluster.must(case.node, case.mend)
    else:
        document = cluster.apply()
        assert document.verdict is Verdict.PASS, document.findings
        assert set(changed(document)) == {case.node}
    assert failing.verdict is Verdict.FAIL, failing
    assert failing.read != failing.expected, failing
    assert cluster.found(case.check, case.node).verdict.good
