"""Drives a run from outside: starts worker processes, passes their words on, collects what came of it.

Stays unpatched and typed; everything that touches pyinfra is in the workers.
"""

from __future__ import annotations

import base64
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from provision.engine import locking, runs
from provision.engine.job import Job, events, hand_over
from provision.engine.journal import Entry, Journal, holder, journaled
from provision.engine.plan import make_plan
from provision.engine.playbook import PlaybookError, find_playbook, run_playbook
from provision.engine.process import start_worker
from provision.engine.questions import Question
from provision.engine.stop import on_stop
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.report.store import state_directory
from provision.site import escrow
from provision.site.lock import Lock, LockError, load_lock, save_lock
from provision.site.models import Hardware, Hook, Node, Site

HOOK_GATHER = 1.0  # seconds in which nodes that come to a playbook are gathered into one run of it
FLUSH_SECONDS = 1.0  # events are journaled this late at most
SHARD = 64  # nodes a worker process; one process drives them from one core
Event = dict[str, Any]


@dataclass
class Outcome:
    """What a run came to, gathered from its workers' events."""

    results: dict[str, NodeResult] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    operations: list[Event] = field(default_factory=list)  # what was not "same"
    counts: dict[str, int] = field(default_factory=dict)  # outcome -> number of operations
    asked: dict[str, list[Question]] = field(default_factory=dict)  # node -> what it was asked
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
                self.asked[node] = [Question(*pair) for pair in event["asked"]]
                failed = event["verdict"] != "pass"
                self.results[node] = NodeResult(
                    verdict=Verdict.FAIL if failed else Verdict.PASS,
                    changed=event["changed"],
                    failed=int(failed and not event["blocked"]),
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
) -> Document:
    """Plan (`forecast`) or apply the site on `nodes`.

    Every node converges by itself; what failed, and why, is in the document. Journaled, whatever happens. Raises
    PlanError, EscrowError, LockError, and JournalError for an apply, before any node is touched.
    """
    started = time.monotonic()
    make_plan(site, nodes, components)
    scope = ",".join(sorted(components)) if components is not None else "*"
    lock = load_lock(site)
    if components is None or "nvidia" in components:
        lock = locking.complete(site, lock, sudo_password=sudo_password, keep=not forecast)
    copy = escrow.load(site)
    outcome = Outcome()
    with journaled(site, verb, looking=forecast) as entry:
        job = Job(
            run=entry.run,
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
            questions=entry.questions(scope),
            timeout=timeout,
            reboot=reboot,
        )
        _Run(_shards(job), entry, outcome, show).drive()
        for name in job.all_nodes:
            ended = NodeResult(
                verdict=Verdict.FAIL, failed=1, reason="its worker process ended without a word"
            )
            outcome.results.setdefault(name, ended)
        asked = {node: questions for node, questions in outcome.asked.items() if questions}
        entry.write(entry.journal.remember_questions, scope, asked)
        if not forecast:
            _keep(site, lock, copy, outcome)
            if components is None:
                done = [name for name, result in outcome.results.items() if result.verdict.good]
                entry.write(entry.journal.mark_applied, done, site.digest, entry.run)
        verdicts = [result.verdict for result in outcome.results.values()]
        document = Document(
            verb=verb,
            site=site.cluster,
            verdict=worst([*verdicts, *(finding.verdict for finding in outcome.findings)]),
            nodes={name: outcome.results[name] for name in job.all_nodes},
            findings=outcome.findings,
            details={
                "interrupted": outcome.interrupted,
                "counts": outcome.counts,
                "facts_only": [] if site.head in nodes else [site.head.name],
                "operations": [{key: op[key] for key in op if key != "event"} for op in outcome.operations],
            },
        )
        if not forecast:
            runs.keep(site, entry, document, sudo_password=sudo_password)
        entry.conclude(document)
    document.seconds = round(time.monotonic() - started, 2)
    return document


def stale_nodes(site: Site, nodes: Collection[Node]) -> list[str]:
    """Nodes outside of `nodes` that were last brought to another state of the site file, or never.

    Raises JournalError.
    """
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
        self, jobs: Sequence[Job], entry: Entry, outcome: Outcome, show: Callable[[Event], None]
    ) -> None:
        self._jobs = jobs
        self._entry = entry
        self._outcome = outcome
        self._show = show
        self._hooks: dict[int, list[tuple[int, str]]] = {}  # hook -> (worker, node) that wait for it
        self._hooks_since: float | None = None
        # One at a time: a playbook's end sweeps away whatever carries the mark of this run.
        self._hook_runner = ThreadPoolExecutor(max_workers=1)
        self._playing: list[Future[None]] = []
        self._cancel_hook: Callable[[], object] = lambda: None
        self._pending: list[tuple[float, Event]] = []
        self._flushed = time.monotonic()
        # From readers and from signal handlers, which may come in the middle of a `get`: only this kind can take it.
        self._words: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
        self._workers = [_start(job) for job in jobs]
        for index, worker in enumerate(self._workers):
            threading.Thread(target=self._read, args=(index, worker), daemon=True).start()

    def drive(self) -> None:
        """Take in events until all workers have ended."""
        running = set(range(len(self._workers)))
        with on_stop(lambda: self._words.put((-1, {"event": "stopping"}))):
            while running:
                try:
                    index, event = self._words.get(timeout=0.5)
                except queue.Empty:
                    self._run_hooks()
                else:
                    if event is None:
                        running.discard(index)
                        self._tell_gone(index)
                    else:
                        self._hear(index, event)
                if self._hooks_since and time.monotonic() - self._hooks_since > HOOK_GATHER:
                    self._run_hooks()
                if self._playing and self._playing[0].done():
                    self._playing.pop(0).result()  # raises what nobody has foreseen
                if time.monotonic() - self._flushed > FLUSH_SECONDS:
                    self._flush()
        self._flush()
        for worker in self._workers:
            worker.wait()

    def _hear(self, index: int, event: Event) -> None:
        """One word of a worker, or of a person who wants the run to stop."""
        private = event.get("private")
        if "hooked" in event:
            self._tell(event, [self._workers[index]])
        elif private is None and event["event"] == "stopping":
            self._stop()
        elif private is None:
            self._take(event)
        elif "hook" in private:
            self._hooks.setdefault(private["hook"], []).append((index, private["node"]))
            self._hooks_since = self._hooks_since or time.monotonic()
        else:
            self._keep_secrets(private.get("secrets"))
            self._tell(private, self._others(index))

    def _stop(self) -> None:
        """The first wish lets running operations end and begins none; the second ends the workers. A hook's playbook
        is cancelled by the first one already."""
        self._cancel_hook()
        if self._outcome.interrupted:
            for worker in self._workers:
                worker.terminate()
            return
        self._outcome.interrupted = True
        self._show({"event": "stopping"})
        self._tell({"stop": True}, self._workers)

    def _tell_gone(self, index: int) -> None:
        """A worker has ended: nobody must wait for what it has not told any more."""
        job = self._jobs[index]
        self._tell({"gone": list(job.nodes), "with_secrets": job.with_secrets}, self._others(index))

    def _others(self, index: int) -> list[subprocess.Popen[bytes]]:
        return [worker for number, worker in enumerate(self._workers) if number != index]

    def _take(self, event: Event) -> None:
        if event["event"] != "start":  # its end, with how long it took, tells all of it
            kept = {
                key: value for key, value in event.items() if key != "asked"
            }  # has a place of its own there
            self._pending.append((time.time(), kept))
        self._outcome.take(event)
        self._show(event)

    def _keep_secrets(self, secrets: object) -> None:
        """Take in the head's secrets, for the copy beside the site file; they are never shown or journaled."""
        if isinstance(secrets, dict):
            self._outcome.secrets = {name: base64.b64decode(value) for name, value in secrets.items()}

    def _run_hooks(self) -> None:
        """Have the playbooks that nodes have come to run, each once for all nodes that wait for it."""
        hooks, self._hooks, self._hooks_since = self._hooks, {}, None
        for number, waiting in hooks.items():
            self._playing.append(self._hook_runner.submit(self._run_hook, number, waiting))

    def _run_hook(self, number: int, waiting: Sequence[tuple[int, str]]) -> None:
        """Run hook `number` of the site file; what came of it is a word for each (worker, node) that waits."""
        site = self._jobs[0].site
        results = self._play(site.file.hooks[number], [site.nodes[name] for _, name in waiting])
        for index, name in waiting:
            result = results.get(name) or NodeResult(verdict=Verdict.FAIL, reason="the playbook left it out")
            failure = None if result.verdict.good else result.reason or "failed"
            self._words.put((index, {"hooked": [number, name, result.changed, failure]}))

    def _play(self, hook: Hook, nodes: Sequence[Node]) -> Mapping[str, NodeResult]:
        """What the playbook of `hook` came to on each of `nodes`."""
        if self._outcome.interrupted:
            return {node.name: NodeResult(verdict=Verdict.FAIL, reason="interrupted") for node in nodes}
        job = self._jobs[0]
        try:
            document = run_playbook(
                job.site,
                find_playbook(job.site, hook.playbook),
                nodes,
                run=job.run,
                check=job.forecast,
                sudo_password=job.sudo_password,
                stops=self._cancelling,
            )
        except PlaybookError as error:
            return {node.name: NodeResult(verdict=Verdict.FAIL, reason=str(error)) for node in nodes}
        return document.nodes

    @contextmanager
    def _cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Within the block a wish to stop calls `cancel`."""
        self._cancel_hook = cancel
        try:
            yield
        finally:
            self._cancel_hook = lambda: None

    def _read(self, index: int, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout
        for event in events(worker.stdout):
            self._words.put((index, event))
        self._words.put((index, None))

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._pending:
            self._entry.add(self._pending)
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


def _start(job: Job) -> subprocess.Popen[bytes]:
    """A worker process with its job on standard input."""
    worker = start_worker()
    assert worker.stdin
    hand_over(job, worker.stdin)
    return worker


def _keep(site: Site, lock: Lock, copy: Mapping[str, bytes], outcome: Outcome) -> None:
    """Write down beside the site file what was read from the nodes for the first time: secrets and hardware.

    What was done on the nodes is done: where it cannot be written down, that is a finding.
    """
    fresh = {
        name: hardware
        for name, hardware in outcome.hardware.items()
        if name not in lock.hardware and site.nodes[name].hardware is None
    }
    try:
        if outcome.secrets:
            escrow.save(site, {**copy, **outcome.secrets})
        if fresh:
            save_lock(site, lock.model_copy(update={"hardware": {**lock.hardware, **fresh}}))
    except (escrow.EscrowError, LockError) as error:
        outcome.findings.append(
            Finding(
                verdict=Verdict.FAIL,
                check="kept-beside-site-file",
                subject=site.cluster,
                why=str(error),
                action="mend that and apply again, or a reinstalled head gets no secrets back",
                source=str(site.path),
            )
        )
