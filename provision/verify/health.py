"""Asks the health agents of all nodes at once, compares nodes with each other and with what they said before.

A node whose agent does not answer is unknown, with the reason. Nothing on the nodes is changed but what the agent
remembers, and, where it is asked for, the switch that keeps agents from acting.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from shlex import quote
from typing import Any, Literal

from pydantic import ValidationError

from provision.components.health.exports import COMPILED, OFF
from provision.engine.remote import RemoteError, RootShell, connect
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.site.models import Node, Site

WORKERS = 32  # nodes at a time
SHARE = 0.95  # of the fleet's median SM clock under load
FLAPS = 3  # changes of verdict within the window, from which on a node flaps
WINDOW = 86400.0  # seconds
EVENT = "health"  # of the journal: a node says something else than before

Connect = Callable[[Site, Node, str | None], RootShell]


@dataclass(frozen=True)
class Answer:
    """What one agent said."""

    node: str
    verdict: Verdict
    reason: str | None = None
    action: str | None = None
    findings: list[Finding] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)  # driver, and name, VBIOS and clock of each GPU


@dataclass(frozen=True)
class Change:
    """A moment, in seconds since 1970, from which on a node said this."""

    at: float
    node: str
    verdict: str
    reason: str | None = None

    @property
    def what(self) -> tuple[str, str]:
        """Verdict and check: the figures of a reason change with every reading."""
        return self.verdict, (self.reason or "").partition(" ")[0]

    @classmethod
    def of(cls, at: float, event: Mapping[str, Any]) -> Change:
        """As the journal has it."""
        return cls(at, event["node"], event["verdict"], event["reason"])

    @property
    def event(self) -> dict[str, Any]:
        return {"event": EVENT, "node": self.node, "verdict": self.verdict, "reason": self.reason}


def parse(node: str, rc: int, stdout: str, stderr: str) -> Answer:
    """The answer of `provision-health check --json`; anything else is unknown with the node's words."""
    try:
        told = json.loads(stdout)
        (result,) = told["nodes"].values()
        findings = [Finding.model_validate(each) for each in told["findings"]]
        named = [each.model_copy(update={"subject": _named(node, each.subject)}) for each in findings]
        details = told["details"]
        return Answer(
            node, Verdict(told["verdict"]), result["reason"], details["action"], named, details["about"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError):
        said = (stderr or stdout).strip().splitlines()
        words = f"the agent does not answer: {said[-1][:200] if said else 'no words'}, exit {rc}"
        why = "there is no agent on it" if rc == 127 else words
        return unreachable(
            node, why, "provision apply -c health puts it there; then provision-health check on the node"
        )


def _named(node: str, subject: str) -> str:
    return subject if subject == node or subject.startswith(f"{node} ") else f"{node} {subject}"


def unreachable(node: str, why: str, action: str | None = None) -> Answer:
    """A node that could not be asked."""
    finding = Finding(verdict=Verdict.UNKNOWN, check="health-agent", subject=node, why=why, action=action)
    return Answer(node, Verdict.UNKNOWN, why, None, [finding])


def ask(
    site: Site,
    nodes: Sequence[Node],
    *,
    full: bool = False,
    sudo_password: str | None = None,
    timeout: float = 60.0,
    told: Callable[[str], None] = lambda node: None,
    reach: Connect = lambda site, node, password: connect(site, node, sudo_password=password),
) -> list[Answer]:
    """What the agents of `nodes` say, in their order; `told` is called from several threads as nodes answer."""

    def one(node: Node) -> Answer:
        try:
            shell = reach(site, node, sudo_password)
            try:
                said = shell.run(f"{COMPILED} check --json{' --full' if full else ''}", timeout=timeout)
            finally:
                shell.close()
            answer = parse(node.name, said.rc, said.stdout, said.stderr)
        except (RemoteError, OSError) as error:
            answer = unreachable(node.name, str(error))
        told(node.name)
        return answer

    with ThreadPoolExecutor(min(WORKERS, max(len(nodes), 1))) as pool:
        return list(pool.map(one, nodes))


def switch(
    site: Site,
    nodes: Sequence[Node],
    wanted: Literal["on", "off"],
    *,
    sudo_password: str | None = None,
    reach: Connect = lambda site, node, password: connect(site, node, sudo_password=password),
) -> list[Finding]:
    """Let agents act, or keep them from it, on every node that can be reached."""
    command = f"rm -f {quote(OFF)}" if wanted == "on" else f"touch {quote(OFF)}"

    def one(node: Node) -> Finding:
        try:
            shell = reach(site, node, sudo_password)
            try:
                said = shell.run(command)
            finally:
                shell.close()
            why = None if said.ok else said.stderr.strip() or f"exit {said.rc}"
        except (RemoteError, OSError) as error:
            why = str(error)
        verdict = Verdict.PASS if why is None else Verdict.UNKNOWN
        return Finding(
            verdict=verdict,
            check="health-acts",
            subject=node.name,
            read=wanted if why is None else None,
            why=why,
        )

    with ThreadPoolExecutor(min(WORKERS, max(len(nodes), 1))) as pool:
        return list(pool.map(one, nodes))


# ---- nodes among each other


def fleet(answers: Sequence[Answer]) -> list[Finding]:
    """What only the whole cluster tells: odd drivers and firmware, GPUs slower than their like."""
    found = []
    drivers = {answer.node: str(answer.about["driver"]) for answer in answers if answer.about.get("driver")}
    found += _odd("driver", drivers)
    firmware: dict[str, dict[str, str]] = {}
    clocks: dict[str, dict[str, float]] = {}
    for answer in answers:
        for gpu in answer.about.get("gpus", ()):
            place = f"{answer.node} GPU {gpu['index']}"
            if gpu.get("vbios"):
                firmware.setdefault(str(gpu["name"]), {})[place] = str(gpu["vbios"])
            if gpu.get("clock"):
                clocks.setdefault(str(gpu["name"]), {})[place] = float(gpu["clock"])
    for product, versions in firmware.items():
        found += _odd(f"VBIOS of {product}", versions)
    for product, each in clocks.items():
        if len(each) < 3:
            continue
        median = statistics.median(each.values())
        found += [
            Finding(
                verdict=Verdict.WARN,
                check="sm-clock",
                subject=place,
                read=f"{clock:.0f} MHz under load",
                expected=f">= {SHARE} of the median of all {product}, {median:.0f} MHz",
                action="warn: nvidia-smi -q -d CLOCK,PERFORMANCE there",
            )
            for place, clock in each.items()
            if clock < SHARE * median
        ]
    return found


def _odd(what: str, versions: Mapping[str, str]) -> list[Finding]:
    """Those that differ from the most frequent version."""
    if len(set(versions.values())) < 2:
        return []
    usual = statistics.mode(versions.values())
    return [
        Finding(
            verdict=Verdict.WARN,
            check="uniform",
            subject=place,
            read=f"{what} {version}",
            expected=f"{usual}, as most others",
            action="warn: bring it to the version of the others (maintenance)",
        )
        for place, version in versions.items()
        if version != usual
    ]


def changes(history: Sequence[Change], answers: Sequence[Answer], now: float) -> list[Change]:
    """Nodes that say something else than last time, or for the first time: another verdict, another check."""
    last = {each.node: each for each in history}
    new = [Change(now, answer.node, answer.verdict, answer.reason) for answer in answers]
    return [each for each in new if each.node not in last or each.what != last[each.node].what]


def flapping(history: Sequence[Change], nodes: Collection[str], now: float) -> list[Finding]:
    """Those of `nodes` whose verdict changed often within a day. history: the earliest first."""
    found = []
    for node in nodes:
        seen = [each for each in history if each.node == node]
        turns = [
            second
            for first, second in itertools.pairwise(seen)
            if first.verdict != second.verdict and now - second.at < WINDOW
        ]
        if len(turns) >= FLAPS:
            latest = ", ".join(each.verdict for each in turns[-6:])
            found.append(
                Finding(
                    verdict=Verdict.WARN,
                    check="health-flapping",
                    subject=node,
                    read=f"{len(turns)} changes of verdict within a day, to {latest}",
                    expected=f"fewer than {FLAPS}",
                    action="warn: provision health SITE --history; provision-health history on the node",
                )
            )
    return found


def document(site: Site, answers: Sequence[Answer], history: Sequence[Change], began: float) -> Document:
    """All answers as one. history: with what they changed; began: of time.monotonic()."""
    among = [*fleet(answers), *flapping(history, [answer.node for answer in answers], time.time())]
    nodes = {
        answer.node: NodeResult(
            verdict=answer.verdict,
            failed=sum(finding.verdict is Verdict.FAIL for finding in answer.findings),
            reason=answer.reason,
        )
        for answer in answers
    }
    return Document(
        verb="health",
        site=site.cluster,
        verdict=worst([*(answer.verdict for answer in answers), *(finding.verdict for finding in among)]),
        seconds=round(time.monotonic() - began, 3),
        nodes=nodes,
        findings=[*(finding for answer in answers for finding in answer.findings), *among],
        details={"actions": {answer.node: answer.action for answer in answers}},
    )
