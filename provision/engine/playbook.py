"""Runs Ansible playbooks on a site: finds them, starts their worker process, collects what came of each node."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from provision.engine.inventory import variables
from provision.engine.job import events, hand_over
from provision.engine.leftovers import end_marked, end_on_nodes, remove_directory
from provision.engine.playbook_job import PlaybookJob
from provision.engine.stop import on_stop
from provision.errors import InputError
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.site.hidden import SecretMissing
from provision.site.models import Hook, Node, Site

Event = dict[str, Any]
PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
FORKS = 32  # nodes at a time; one costs a process on the controller


class PlaybookError(InputError):
    """The playbook cannot be run: not found, not valid, a secret missing. Nothing was done on any node."""


def find_playbook(site: Site, name: str | Path) -> Path:
    """A playbook by its path (from here or beside the site file), or by its name among this project's own."""
    path = Path(name).expanduser()
    places = [Path.cwd() / path, site.directory / path, PLAYBOOKS / path]
    if not path.suffix:
        places.append(PLAYBOOKS / f"{path}.yml")
    for place in places:
        if place.is_file():
            return place.resolve()
    raise PlaybookError(
        f"{name}: no such playbook, here or beside {site.path}; "
        f"this project's own are: {', '.join(playbook_names())}"
    )


def playbook_names() -> list[str]:
    """This project's own playbooks, by the names that stand for them."""
    return sorted(each.stem for each in PLAYBOOKS.glob("*.yml"))


def hook_nodes(site: Site, hook: Hook, nodes: Sequence[Node]) -> list[Node]:
    """Those of `nodes` that `hook` is meant for: of one of its roles, all where it names none."""
    return [node for node in nodes if not hook.roles or any(node.has(role) for role in hook.roles)]


@dataclass
class _Outcome:
    results: dict[str, NodeResult] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    operations: list[Event] = field(default_factory=list)
    end: Event | None = None
    stops: int = 0  # how often the person has asked to stop

    def take(self, event: Event) -> None:
        match event["event"]:
            case "op" if event["outcome"] not in ("same", "skipped"):
                self.operations.append(event)
            case "warning":
                self.findings.append(
                    Finding(verdict=Verdict.WARN, check="playbook", subject=event["node"], read=event["text"])
                )
            case "node":
                reason = event["reason"]
                self.results[event["node"]] = NodeResult(
                    verdict=Verdict.FAIL if reason else Verdict.PASS,
                    changed=event["changed"],
                    failed=1 if reason else 0,
                    reason=reason,
                )
                if reason:
                    self.findings.append(
                        Finding(verdict=Verdict.FAIL, check="playbook", subject=event["node"], read=reason)
                    )
            case "end":
                self.end = event


def run_playbook(
    site: Site,
    playbook: Path,
    nodes: Sequence[Node],
    *,
    run: str,
    extra: Mapping[str, Any] | None = None,
    check: bool = False,
    timeout: int | None = None,
    sudo_password: str | None = None,
    show: Callable[[Event], None] = lambda event: None,
    stops: Callable[[Callable[[], object]], AbstractContextManager[None]] = on_stop,
) -> Document:
    """Run `playbook` on `nodes`, all the others of the site being known to it.

    `extra` variables win over the site file's; `timeout` (seconds) is for the whole run. Ctrl-C cancels: nothing is
    left running here or on the nodes. `stops` says how to hear of it: `on_stop` can only in the main thread. Raises
    PlaybookError where the playbook or its variables are not right.
    """
    started = time.monotonic()
    try:
        variables(site)
    except SecretMissing as error:
        raise PlaybookError(str(error)) from None
    job = PlaybookJob(
        run=run,
        site=site,
        playbook=playbook,
        nodes=[node.name for node in nodes],
        variables=dict(extra or {}),
        check=check,
        timeout=timeout,
        forks=max(1, min(len(nodes), FORKS)),
        sudo_password=sudo_password,
    )
    outcome = _Outcome()
    with tempfile.TemporaryFile("w+") as words:
        _drive(job, outcome, show, words, stops)
        words.seek(0)
        last_words = words.read()[-2000:].strip()
    left = end_marked(run)
    if outcome.end is None:  # it was killed, and could not tidy up
        remove_directory(run)
        for event in end_on_nodes(site, job.nodes, run, sudo_password):
            outcome.take(event)
            show(event)
    _conclude(job, outcome, left, last_words)
    verdicts = [*(r.verdict for r in outcome.results.values()), *(f.verdict for f in outcome.findings)]
    return Document(
        verb="run",
        site=site.cluster,
        verdict=worst(verdicts),
        seconds=round(time.monotonic() - started, 2),
        nodes=outcome.results,
        findings=outcome.findings,
        details={
            "run": run,
            "playbook": str(playbook),
            "interrupted": outcome.stops > 0,
            "operations": [{key: op[key] for key in op if key != "event"} for op in outcome.operations],
        },
    )


def _drive(
    job: PlaybookJob,
    outcome: _Outcome,
    show: Callable[[Event], None],
    words: IO[str],
    stops: Callable[[Callable[[], object]], AbstractContextManager[None]],
) -> None:
    """Start the worker and take in its events until it has ended."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "provision.engine.playbook_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        start_new_session=True,  # Ctrl-C reaches the controller only
    )
    assert worker.stdin
    assert worker.stdout
    with stops(partial(_cancel, worker, outcome, show)):
        hand_over(job, worker.stdin)
        for event in events(worker.stdout):
            outcome.take(event)
            if event["event"] != "end":
                show(event)
        worker.wait()
    with suppress(BrokenPipeError):
        worker.stdin.close()


def _cancel(worker: subprocess.Popen[bytes], outcome: _Outcome, show: Callable[[Event], None]) -> None:
    """The first wish to stop cancels the playbook in order; the third ends the worker, too."""
    outcome.stops += 1
    if outcome.stops > 2:
        worker.kill()
        return
    show({"event": "note", "text": "cancelling: what was started is being ended, here and on the nodes"})
    assert worker.stdin
    with suppress(BrokenPipeError):
        os.write(worker.stdin.fileno(), b"stop\n")  # not through its buffer, which may be in use right now


def _conclude(job: PlaybookJob, outcome: _Outcome, left: Sequence[int], last_words: str) -> None:
    """Turn how the worker ended into results. Raises PlaybookError where Ansible refused the playbook."""
    end = outcome.end
    if end is None:
        for name in job.nodes:
            outcome.results.setdefault(
                name,
                NodeResult(
                    verdict=Verdict.FAIL, failed=1, reason="the playbook's process ended without a word"
                ),
            )
        outcome.findings.append(
            Finding(
                verdict=Verdict.FAIL,
                check="playbook",
                subject=job.playbook.name,
                read=last_words or "its process was killed",
            )
        )
    elif not end["began"] and end["status"] == "failed":
        said = "\n".join(end["said"]) or last_words
        raise PlaybookError(f"{job.playbook}: Ansible refuses it (exit status {end['rc']}):\n{said}")
    elif end["rc"] != 0 and not any(not result.verdict.good for result in outcome.results.values()):
        outcome.findings.append(
            Finding(
                verdict=Verdict.FAIL,
                check="playbook",
                subject=job.playbook.name,
                read=f"{end['status']}, exit status {end['rc']}: {' '.join(end['said'][-3:])}".strip(": "),
            )
        )
    still = sorted({*left, *(end["left"] if end else [])})
    if still:
        outcome.findings.append(
            Finding(
                verdict=Verdict.FAIL,
                check="playbook",
                subject="this machine",
                read=f"processes {', '.join(map(str, still))} of the run could not be ended",
                action="look at them and end them by hand",
            )
        )
