"""Drives a run from outside: starts worker processes, passes their words on, collects what came of it.

Stays unpatched and typed; everything that touches pyinfra is in the workers.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from provision.engine.job import Job
from provision.engine.journal import Journal
from provision.engine.plan import make_plan
from provision.engine.playbook import PlaybookError, find_playbook, run_playbook
from provision.engine.process import start_worker
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.report.store import state_directory
from provision.site import escrow
from provision.site.lock import Lock, load_lock, save_lock
from provision.site.models import Hardware, Node, Site

HOOK_GATHER = 1.0  # seconds in which nodes that come to a playbook are gathered into one run of it
SHARD = 64  # nodes a worker process; one process drives them from one core
Event = dict[str, Any]


@dataclass
class Outcome:
    """What a run came to, gathered from its workers' events."""

    results: dict[str, NodeResult] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    operations: list[Event] = field(default_factory=list)  # what was not "same"
    counts: dict[str, int] = field(default_factory=dict)  # outcome -> number of operations
    facts: dict[str, list[str]] = field(default_factory=dict)  # node -> fact commands read
    hardware: dict[str, Hardware] = field(default_factory=dict)
    secrets: dict[str, bytes] = field(default_factory=dict, repr=False)
    interrupted: bool = False

    def take(self, event: Event) -> None:
        """Note one event."""
        node = event.get("node", "")
        match event["event"]:
            case "op":
                outcome = event["outcome"]
                self.counts[outcome] = self.counts.get(outcome, 0) + 1
                if outcome != "same":
                    self.operations.append(event)
            case "hardware":
                self.hardware[node] = Hardware.model_validate(event["hardware"])
            case "warning":
                self.findings.append(
                    Finding(verdict=Verdict.WARN, check="node-contradicts", subject=node, read=event["text"])
                )
            case "node":
                self.facts[node] = event["facts"]
                failed = event["verdict"] != "pass"
                self.results[node] = NodeResult(
                    verdict=Verdict.FAIL if failed else Verdict.PASS,
                    changed=event["changed"],
                    failed=int(failed),
                    reason=event["reason"],
                )
                if failed:
                    self.findings.append(
                        Finding(
                            verdict=Verdict.FAIL,
                            check="node-converged",
                            subject=node,
                            read=event["reason"],
                            action=event["advice"],
                        )
                    )


def holder() -> str:
    """Who runs this: user@host, as locks and journal name it."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def new_run() -> str:
    """An identifier that sorts by time and that two controllers do not share."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(2).hex()}"


def converge(
    site: Site,
    nodes: Sequence[Node],
    *,
    verb: str,
    forecast: bool,
    components: Collection[str] | None = None,
    sudo_password: str | None = None,
    show: Callable[[Event], None] = lambda event: None,
    timeout: float | None = None,
    reboot: bool = True,
    admitted: Collection[str] = (),
) -> Document:
    """Plan (`forecast`) or apply the site on `nodes`. Raises PlanError or EscrowError before any node is touched.

    Every node converges by itself; what failed, and why, is in the document. Journaled, whatever happens.
    """
    started = time.monotonic()
    make_plan(site, nodes, components)
    journal = Journal(state_directory(site))
    run, scope = new_run(), ",".join(sorted(components)) if components is not None else "*"
    lock = load_lock(site)
    copy = escrow.load(site)
    job = Job(
        run=run,
        holder=holder(),
        site=site,
        lock=lock,
        nodes=(),
        all_nodes=[node.name for node in nodes],
        components=sorted(components) if components is not None else None,
        forecast=forecast,
        with_secrets=False,
        sudo_password=sudo_password,
        escrow=copy,
        facts=journal.facts(scope),
        timeout=timeout,
        reboot=reboot,
        admitted=frozenset(admitted),
    )
    journal.begin(run, verb, job.holder, site.digest, _now())
    outcome = Outcome()
    verdict = Verdict.UNKNOWN
    try:
        _Run(_shards(job), journal, outcome, show).drive()
        for name in job.all_nodes:
            ended = NodeResult(
                verdict=Verdict.FAIL, failed=1, reason="its worker process ended without a word"
            )
            outcome.results.setdefault(name, ended)
        journal.remember_facts(scope, {node: facts for node, facts in outcome.facts.items() if facts})
        if not forecast:
            if outcome.secrets:
                escrow.save(site, {**copy, **outcome.secrets})
            _keep_hardware(site, lock, outcome.hardware)
            if components is None:
                done = [name for name, result in outcome.results.items() if result.verdict.good]
                journal.mark_applied(done, site.digest, run)
        verdicts = [result.verdict for result in outcome.results.values()]
        verdict = worst([*verdicts, *(finding.verdict for finding in outcome.findings)])
    finally:
        journal.end(run, _now(), verdict)
    return Document(
        verb=verb,
        site=site.cluster,
        verdict=verdict,
        seconds=round(time.monotonic() - started, 2),
        nodes={name: outcome.results[name] for name in job.all_nodes},
        findings=outcome.findings,
        details={
            "run": run,
            "interrupted": outcome.interrupted,
            "counts": outcome.counts,
            "facts_only": [] if site.head in nodes else [site.head.name],
            "operations": [{key: op[key] for key in op if key != "event"} for op in outcome.operations],
        },
    )


def stale_nodes(site: Site, nodes: Collection[Node]) -> list[str]:
    """Nodes outside of `nodes` that were last brought to another state of the site file, or never."""
    applied = Journal(state_directory(site)).applied()
    chosen = {node.name for node in nodes}
    return [name for name in site.nodes if name not in chosen and applied.get(name) != site.digest]


def _shards(job: Job) -> list[Job]:
    """The job cut into shares of at most SHARD nodes; the head's share also gathers the secrets."""
    names = list(job.all_nodes)
    parts = [names[start : start + SHARD] for start in range(0, len(names), SHARD)]
    with_head = next((index for index, part in enumerate(parts) if job.site.head.name in part), 0)
    return [replace(job, nodes=part, with_secrets=index == with_head) for index, part in enumerate(parts)]


class _Run:
    """The worker processes of one run, and the words that go between them."""

    def __init__(
        self, jobs: Sequence[Job], journal: Journal, outcome: Outcome, show: Callable[[Event], None]
    ) -> None:
        self._job = jobs[0]
        self._run = self._job.run
        self._hooks: dict[int, list[tuple[int, str]]] = {}  # hook -> (worker, node) that wait for it
        self._hooks_since: float | None = None
        self._journal = journal
        self._outcome = outcome
        self._show = show
        self._pending: list[tuple[float, Event]] = []
        self._words: queue.Queue[tuple[int, Event | None]] = queue.Queue()
        self._workers = [_start(job) for job in jobs]
        for index, worker in enumerate(self._workers):
            threading.Thread(target=self._read, args=(index, worker), daemon=True).start()

    def drive(self) -> None:
        """Take in events until all workers have ended."""
        running = set(range(len(self._workers)))
        with self._interruptible():
            while running:
                try:
                    index, event = self._words.get(timeout=0.5)
                except queue.Empty:
                    self._flush()
                    self._run_hooks()
                    continue
                if event is None:
                    running.discard(index)
                elif "hook" in event.get("private", {}):
                    word = event["private"]
                    self._hooks.setdefault(word["hook"], []).append((index, word["node"]))
                    self._hooks_since = self._hooks_since or time.monotonic()
                elif "private" in event:
                    self._keep_secrets(event["private"].get("secrets"))
                    self._tell(event["private"], [w for i, w in enumerate(self._workers) if i != index])
                else:
                    self._take(event)
                if self._hooks_since and time.monotonic() - self._hooks_since > HOOK_GATHER:
                    self._run_hooks()
        self._flush()
        for worker in self._workers:
            worker.wait()

    def _take(self, event: Event) -> None:
        self._pending.append((time.time(), event))
        self._outcome.take(event)
        self._show(event)

    def _keep_secrets(self, secrets: object) -> None:
        """Take in the head's secrets, for the copy beside the site file; they are never shown or journaled."""
        if isinstance(secrets, dict):
            self._outcome.secrets = {name: base64.b64decode(value) for name, value in secrets.items()}

    def _run_hooks(self) -> None:
        """Run the playbooks that nodes have come to, each once for all nodes that wait for it; tell their workers."""
        hooks, self._hooks, self._hooks_since = self._hooks, {}, None
        site = self._job.site
        for number, waiting in hooks.items():
            hook, nodes = site.file.hooks[number], [site.nodes[name] for _, name in waiting]
            try:
                document = run_playbook(
                    site,
                    find_playbook(site, hook.playbook),
                    nodes,
                    run=self._run,
                    check=self._job.forecast,
                    sudo_password=self._job.sudo_password,
                )
            except PlaybookError as error:
                results = {node.name: NodeResult(verdict=Verdict.FAIL, reason=str(error)) for node in nodes}
            else:
                results = document.nodes
                self._outcome.interrupted |= bool(document.details["interrupted"])
            for index, name in waiting:
                result = results.get(name) or NodeResult(
                    verdict=Verdict.FAIL, reason="the playbook left it out"
                )
                failure = None if result.verdict.good else result.reason or "failed"
                self._tell({"hooked": [number, name, result.changed, failure]}, [self._workers[index]])

    def _read(self, index: int, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout
        for line in worker.stdout:
            self._words.put((index, json.loads(line)))
        self._words.put((index, None))

    def _flush(self) -> None:
        if self._pending:
            self._journal.add(self._run, self._pending)
            self._pending = []

    def _tell(self, word: Event, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        line = json.dumps(word).encode() + b"\n"
        for worker in workers:
            if worker.poll() is None and worker.stdin:
                try:
                    worker.stdin.write(line)
                    worker.stdin.flush()
                except BrokenPipeError:
                    continue  # it has just ended; its own end is told by its reader

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first Ctrl-C (or TERM) lets running operations end and begins none; the second ends the workers."""

        def stop(number: int, frame: object) -> None:
            if self._outcome.interrupted:
                for worker in self._workers:
                    worker.terminate()
                return
            self._outcome.interrupted = True
            self._show({"event": "stopping"})
            self._tell({"stop": True}, self._workers)

        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _start(job: Job) -> subprocess.Popen[bytes]:
    """A worker process with its job on standard input."""
    worker = start_worker()
    content = pickle.dumps(job)
    assert worker.stdin
    worker.stdin.write(len(content).to_bytes(8, "big") + content)
    worker.stdin.flush()
    return worker


def _keep_hardware(site: Site, lock: Lock, seen: dict[str, Hardware]) -> None:
    """Lock the hardware of nodes that were seen for the first time."""
    fresh = {
        name: hardware
        for name, hardware in seen.items()
        if name not in lock.hardware and site.nodes[name].hardware is None
    }
    if fresh:
        save_lock(site, lock.model_copy(update={"hardware": {**lock.hardware, **fresh}}))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
