"""The cluster of inventories/lab.yml as `provision up` left it: what tests break, and get back whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from provision.lab import Lab
from tests.lab.command import Answer, provision

HEAD, WORKER, OTHER = "lab-head", "lab-gpu-1", "lab-gpu-2"
NODES = (HEAD, WORKER, OTHER)
SNAPSHOT = "admitted"


@dataclass
class Admitted:
    """An admitted cluster. A test that ends with `converged` saves the next one the restoring of all disks."""

    lab: Lab
    site: str  # path of its site file
    whole: bool = False

    def __call__(self, verb: str, *words: str) -> Answer:
        return provision(verb, self.site, *words)

    def on(self, node: str, script: str) -> str:
        """What a script answers, run as root on the node without ssh; it must succeed."""
        return self.lab.inside(node, script)

    def give_back(self) -> None:
        """Everything as `provision up` left it; the nodes boot from that as after a power cut."""
        if not self.whole:
            self.lab.restore(SNAPSHOT)
            self.healthy()
        self.whole = False

    def healthy(self, within: float = 180) -> None:
        """Every check passes, by itself and in time; no unit has failed."""
        deadline = time.monotonic() + within
        while (found := self("verify")).rc != 0:
            assert time.monotonic() < deadline, bad(found)
        failed = {node: self.on(node, "systemctl --failed --no-legend --plain") for node in NODES}
        assert failed == dict.fromkeys(NODES, "")

    def converged(self) -> None:
        """Nothing is left to change, and the cluster is healthy."""
        again = self("apply")
        left = [op for op in again.operations if op["outcome"] != "skipped"]
        assert (again.rc, again.changed) == (0, dict.fromkeys(NODES, 0)), (bad(again), left)
        self.healthy()
        self.whole = True

    def mended(self, *nodes: str) -> Answer:
        """One apply puts right exactly `nodes`; then the cluster is converged."""
        found = self("apply")
        assert found.rc == 0, bad(found)
        assert {name for name, count in found.changed.items() if count} == set(nodes), found.operations
        self.converged()
        return found


def bad(found: Answer) -> list[str]:
    """The findings that are not good, one line each."""
    assert found.document is not None, found.stderr
    return [
        f"{f['subject']}: {f['check']}: {f['verdict']}: {f['read']} {f['why'] or ''} {f['action'] or ''}"
        for f in found.document["findings"]
        if f["verdict"] in ("fail", "unknown")
    ]


def reason(found: Answer, node: str) -> str:
    """Why a node was not brought up; the run must have failed, and say so."""
    assert found.rc == 1, found
    assert found.nodes[node]["verdict"] == "fail", found.nodes
    return str(found.nodes[node]["reason"])


def until(condition: Callable[[], Any], what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.3)
