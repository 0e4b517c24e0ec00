"""The steps of one node that asks for a reboot, by a real worker; in a process of its own, which the worker patches.

    python -m tests.unit.rebooting <scenario.json >what-happened.json

The scenario: {"ask": {"ssh": "once" | "always" | "fail" | "block"}, "reboot": true, "admitted": [],
"components": null}. The node is a session that answers every command and has another boot id each time it is
connected to.
"""

from __future__ import annotations

import provision.engine.worker as engine  # isort: skip - it patches what comes after it

import io
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from pyinfra.context import ctx_host, ctx_state

from provision.engine import preflight, reboot
from provision.engine.board import Blocked
from provision.engine.deploy import Context, Step
from provision.engine.job import Job
from provision.engine.plan import Plan
from provision.engine.record import OperationFailed, Recorder
from provision.engine.remote import Output
from provision.profiles.distribution import distribution
from provision.site.lock import Lock
from provision.site.models import Hardware, Site, SiteFile

NODE = "g1"
COMPONENTS = ("base", "ssh", "nvidia")  # two of one stage, one of the next


@dataclass
class Session:
    """A root shell of one boot."""

    boot: int
    name: str = NODE
    alive: bool = True
    ran: list[str] = field(default_factory=list)
    holder: str | None = None

    def run(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        self.ran.append(command)
        return Output(0, f"boot-{self.boot}\n" if command == preflight.BOOT_ID else "", "")

    def hold_lock(self, path: str, holder: str) -> str | None:
        self.holder = holder
        return None

    def close(self) -> None:
        self.alive = False


def site() -> Site:
    document = {
        "cluster": "tiny",
        "groups": {"head": {"hosts": "h1", "roles": ["head"]}, "gpu": {"hosts": NODE, "roles": ["worker"]}},
        "ssh": {},
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


def happen(scenario: dict[str, Any]) -> dict[str, Any]:
    """Run the scenario; what ran in which boot, what was told, and how it ended."""
    boots, ran = count(2), []
    told = io.StringIO()

    def again(*_: object, **__: object) -> Session:
        return Session(next(boots))

    def step(component: str) -> Step:
        how = scenario["ask"].get(component)

        def run(on: Context) -> None:
            boot = host.connector.shell.boot
            ran.append(f"{component} in boot {boot}")
            if how == "fail" and boot > 1:
                raise OperationFailed(component, "the module does not load")
            if how == "block" and boot > 1:
                raise Blocked("blocked by h1: it is gone")
            if how is not None and (boot == 1 or how == "always"):
                on.reboot(f"{component} needs it")

        return Step(component, "worker", run)

    job = Job(
        "r1",
        "ops@desk",
        site(),
        Lock(),
        [NODE],
        [NODE],
        scenario["components"],
        False,
        False,
        reboot=scenario["reboot"],
    )
    worker = engine.Worker(job, told)
    worker.plan = Plan({NODE: tuple(step(component) for component in COMPONENTS)})
    worker.board.give_admitted(frozenset(scenario["admitted"]))
    engine.connect = again  # type: ignore[assignment]
    reboot.reboot = partial(reboot.reboot, pause=0)  # type: ignore[assignment]
    (host,) = worker.state.inventory
    host.connector.shell = Session(1)
    debian = distribution("debian", "13")
    recorder = Recorder(NODE, worker.emit, False)
    host.connector.attach(recorder, debian, {})
    facts = preflight.Facts(debian, {}, Hardware(sockets=1, cores=2, threads=1, memory=2048), {}, {})
    failure, advice, blocked = None, None, None
    with ctx_state.use(worker.state), ctx_host.use(host):
        try:
            blocked = worker._steps(host, recorder, facts)
        except OperationFailed as error:
            failure, advice = str(error), error.advice
    worker._tell()
    events = [json.loads(line) for line in told.getvalue().splitlines()]
    return {
        "ran": ran,
        "failure": failure,
        "advice": advice,
        "blocked": blocked,
        "holder": host.connector.shell.holder,
        "told": [e["text"] for e in events if e.get("event") in ("reboot", "warning")],
        "outcomes": {e["step"]: e["outcome"] for e in events if e.get("event") == "step"},
    }


if __name__ == "__main__":
    print(json.dumps(happen(json.load(sys.stdin))))
