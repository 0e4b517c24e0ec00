"""One node's worker whose fellow, which holds the lease, ends; in a process of its own, which the worker patches.

    python -m tests.unit.losing early|last|plan|full >events

"early": the fellow ends between two operations of this node; "last": once every step of the run is done; "plan": early,
where nothing is changed and no lease is held; "full": it does not end, but the node's disk is full: an operation fails,
and what was done cannot be written into its journal.
"""

from __future__ import annotations

import provision.engine.worker as engine  # isort: skip - it patches what comes after it

import sys
from pathlib import Path

from pyinfra.context import ctx_state

from provision.engine import preflight
from provision.engine.board import Done
from provision.engine.deploy import Context, Step
from provision.engine.job import Job
from provision.engine.plan import Plan
from provision.engine.record import OperationFailed
from provision.engine.remote import Output
from provision.profiles.distribution import distribution
from provision.site.lock import Lock
from provision.site.models import Hardware, Site, SiteFile

HEAD, NODE = "h1", "g1"
HARDWARE = Hardware(sockets=1, cores=2, threads=1, memory=2048)


class Session:
    """A root shell that answers every command."""

    name = NODE
    alive = True
    full = False

    def run(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        if self.full and command.startswith("logger"):
            return Output(1, "", "No space left on device")
        return Output(0, "", "")

    def hold_lock(self, path: str, holder: str) -> str | None:
        return None

    def close(self) -> None:
        self.alive = False


def site() -> Site:
    document = {
        "cluster": "tiny",
        "groups": {"head": {"hosts": HEAD, "roles": ["head"]}, "gpu": {"hosts": NODE, "roles": ["worker"]}},
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


def main(when: str) -> None:
    def first(on: Context) -> None:
        with host.connector.recorder.operation("the first operation"):
            if when in ("early", "plan"):
                worker._lose([HEAD], with_secrets=True)
            host.connector.recorder.finish(True)
        if when == "full":
            Session.full = True
            raise OperationFailed("the second operation", "No space left on device", "make room")

    def second(on: Context) -> None:
        with host.connector.recorder.operation("the second operation"):
            host.connector.recorder.finish(True)

    def at_last(*_: object) -> None:
        """What is still done on a node when all its steps are told as done."""
        worker.board.settle(HEAD, "base:head", Done(True))
        worker._lose([HEAD], with_secrets=True)
        with host.connector.recorder.operation("what is switched off"):
            host.connector.recorder.finish(True)

    lock = Lock(hardware={HEAD: HARDWARE, NODE: HARDWARE})
    job = Job("r1", "ops@desk", site(), lock, [NODE], [HEAD, NODE], None, when == "plan", False)
    worker = engine.Worker(job, sys.stdout)
    worker.plan = Plan(
        {
            HEAD: (Step("base", "head", lambda on: None),),
            NODE: (Step("base", "worker", first), Step("time", "worker", second)),
        }
    )
    facts = preflight.Facts(distribution("debian", "13"), {}, HARDWARE, {}, {})
    engine.connect = lambda *_, **__: Session()  # type: ignore[assignment, return-value]
    preflight.look = lambda shell: facts
    engine.remove_stale = at_last if when == "last" else lambda *_: None  # type: ignore[assignment]
    (host,) = worker.state.inventory
    with ctx_state.use(worker.state):
        worker._node(host)
    worker._tell()


if __name__ == "__main__":
    main(sys.argv[1])
