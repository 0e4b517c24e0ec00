"""From a site file to an admitted cluster: apply, verify, burn in, admit. One document for all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from provision.acceptance import decide
from provision.burnin import history
from provision.burnin.launch import closed as burnin_closed
from provision.burnin.run import Options, run_burnin
from provision.components.slurm import acceptance as slurm
from provision.engine import headstate, preflight, runs
from provision.engine.controller import converge
from provision.engine.journal import holder, journaled, now
from provision.engine.remote import RemoteError, RootShell, connect
from provision.engine.stop import interrupt, on_stop
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.site.hostlist import fold
from provision.site.lock import load_lock
from provision.site.models import Node, Site
from provision.verify.run import document as verify_document
from provision.verify.run import verify

Show = Callable[[dict[str, Any]], None]

SETTLE = 60.0  # seconds until checks must be content: a server's first scrape, a node that registers again; this run
# need not have changed anything, the one before it may have
PAUSE = 3.0  # seconds between two looks


def bring_up(
    site: Site,
    nodes: Sequence[Node],
    *,
    minutes: float | None,
    burnin_all: bool,
    sudo_password: str | None,
    show: Show,
    timeout: float | None = None,
) -> Document:
    """Bring `nodes` as far as they come. Nodes that were admitted before are not burned in again (`burnin_all`: they
    are). What a step found about a node keeps it from the next one; the others go on. No operation of the apply takes
    longer than `timeout` seconds.

    Journaled with every move of a node; the apply has an entry of its own. Raises InputError before any node is
    touched.
    """
    with journaled(site, "up") as entry:

        def told(event: dict[str, Any]) -> None:
            if event["event"] == "note":
                entry.add([(time.time(), event)])
            show(event)

        document = _bring_up(site, nodes, entry.run, minutes, burnin_all, sudo_password, told, timeout)
        kept = [*history.kept(document), runs.kept(site, entry, document)]
        headstate.keep(site, document, kept, sudo_password=sudo_password)
        entry.conclude(document)
    return document


def _bring_up(
    site: Site,
    nodes: Sequence[Node],
    run: str,
    minutes: float | None,
    burnin_all: bool,
    sudo_password: str | None,
    show: Show,
    timeout: float | None,
) -> Document:
    started = time.monotonic()
    names = [node.name for node in nodes]
    show(_note(f"apply: {len(nodes)} nodes"))
    applied = converge(
        site, nodes, verb="apply", forecast=False, sudo_password=sudo_password, show=show, timeout=timeout
    )
    parts = [applied]
    known: dict[str, headstate.Acceptance] = {}
    if applied.details.get("interrupted"):
        return _together(site, names, parts, known, started)
    try:
        with on_stop(interrupt), closing(connect(site, site.head, sudo_password=sudo_password)) as shell:
            # The lease again: who reads the acceptance of all nodes and writes it back must be alone with it.
            preflight.take_lock(shell, holder(), run)
            states = _Ladder(site, shell, show)
            known = states.known
            _climb(site, nodes, states, parts, minutes, burnin_all, sudo_password, show)
    except KeyboardInterrupt:
        parts.append(_cut_short(site))
    except (RemoteError, preflight.PreflightError, headstate.HeadError, slurm.SlurmError) as error:
        finding = headstate.silent(site, error)
        parts.append(Document(verb="up", site=site.cluster, verdict=Verdict.UNKNOWN, findings=[finding]))
    return _together(site, names, parts, known, started)


def _climb(
    site: Site,
    nodes: Sequence[Node],
    states: _Ladder,
    parts: list[Document],
    minutes: float | None,
    burnin_all: bool,
    sudo_password: str | None,
    show: Show,
) -> None:
    """Verify, burn in and admit what was applied; what each step found is added to `parts`."""
    applied = parts[0]
    states.move(decide.after_apply(states.known, applied.nodes))
    converged = [node for node in nodes if applied.nodes[node.name].verdict.good]
    if not converged:
        return
    show(_note(f"verify: {len(converged)} nodes"))
    verified = _verify(site, converged, sudo_password, show)
    parts.append(verified)
    workers = {node.name for node in site.with_role("worker")}
    closed = burnin_closed(states.shell.run) if site.enabled("slurm") else {}
    names = [node.name for node in converged]
    states.move(decide.after_verify(states.states(names), verified.nodes, workers, closed))
    chosen = decide.to_burn_in(states.states(names), verified.nodes, workers, again=burnin_all)
    waiting = [node for node in converged if node.name in chosen]
    if not waiting or not site.enabled("slurm"):
        return
    show(_note(f"burn-in: {fold(node.name for node in waiting)}"))
    stop = threading.Event()
    with on_stop(stop.set):
        burned = run_burnin(
            site,
            waiting,
            states.shell.run,
            Options(minutes=minutes, admit=True),
            progress=lambda line: show(_note(line)),
            stop=stop,
        )
    parts.append(burned)
    refused = states.move(decide.after_burnin(burned.nodes))
    if refused:
        parts.append(_not_admitted(site, refused))


class _Ladder:
    """The acceptance of all nodes, kept on the head; every move is written down before the next step."""

    def __init__(self, site: Site, shell: RootShell, show: Show) -> None:
        self._site = site
        self.shell = shell
        self._show = show
        self.known = headstate.read_acceptance(shell)

    def state(self, node: str) -> headstate.State:
        return self.known[node].state if node in self.known else "new"

    def states(self, nodes: Collection[str]) -> dict[str, headstate.State]:
        return {node: self.state(node) for node in nodes}

    def move(self, transitions: Mapping[str, decide.Transition]) -> dict[str, str]:
        """Tell the scheduler, then write down: a node is never called admitted before it is.

        Returns node -> why it was not opened, for those that were to be admitted.
        """
        refused: dict[str, str] = {}
        if not transitions:
            return refused
        if self._site.enabled("slurm"):
            admitted = [move.node for move in transitions.values() if move.admit]
            if admitted:
                refused = slurm.admit(self.shell.run, admitted)
            for move in transitions.values():
                if move.withdraw:
                    slurm.quarantine(self.shell.run, [move.node], move.reason or "failed a check")
        for move in transitions.values():
            if move.node in refused:
                move = replace(move, state="burned-in", reason=refused[move.node])
            self.known[move.node] = headstate.Acceptance(state=move.state, since=now(), reason=move.reason)
            told = f"{move.node}: {move.state}" + (f": {move.reason}" if move.reason else "")
            self._show(_note(told))
        headstate.write_acceptance(self.shell, self.known)
        return refused


def _cut_short(site: Site) -> Document:
    """What it means that a person has ended the run between two steps."""
    finding = Finding(
        verdict=Verdict.UNKNOWN,
        check="run-ended",
        subject=site.cluster,
        why="interrupted",
        action="run it again: it goes on from here",
    )
    return Document(
        verb="up",
        site=site.cluster,
        verdict=Verdict.UNKNOWN,
        findings=[finding],
        details={"interrupted": True},
    )


def _not_admitted(site: Site, refused: Mapping[str, str]) -> Document:
    """What it means that the scheduler does not open nodes which have passed everything."""
    return Document(
        verb="admit",
        site=site.cluster,
        verdict=Verdict.UNKNOWN,
        nodes={name: NodeResult(verdict=Verdict.UNKNOWN, reason=why) for name, why in refused.items()},
        findings=[
            Finding(verdict=Verdict.UNKNOWN, check="node-admitted", subject=name, why=why)
            for name, why in refused.items()
        ],
    )


def _verify(site: Site, nodes: Sequence[Node], sudo_password: str | None, show: Show) -> Document:
    """Verify `nodes`; those that are not good are looked at again for SETTLE seconds, as their services start."""
    started = time.monotonic()
    lock = load_lock(site)
    waiting: set[str] = set()
    findings = verify(site, lock, nodes, sudo_password=sudo_password)
    while True:
        document = verify_document(site, nodes, findings, time.monotonic() - started)
        again = [node for node in nodes if not document.nodes[node.name].verdict.good]
        if not again or time.monotonic() - started > SETTLE:
            return document
        names = {node.name for node in again}
        if names != waiting:
            waiting = names
            show(_note(f"verify: {fold(names)}: not content yet, looked at again for {SETTLE:.0f} s"))
        time.sleep(PAUSE)
        findings = [finding for finding in findings if finding.subject not in names]
        findings += verify(site, lock, again, sudo_password=sudo_password)


def _together(
    site: Site,
    names: Sequence[str],
    parts: Sequence[Document],
    known: Mapping[str, headstate.Acceptance],
    started: float,
) -> Document:
    """One document: a node's verdict is its worst one, its reason that of the first step that failed it."""
    nodes: dict[str, NodeResult] = {}
    for name in names:
        found = [part.nodes[name] for part in parts if name in part.nodes]
        bad = [result for result in found if not result.verdict.good]
        state = known.get(name)
        nodes[name] = NodeResult(
            verdict=worst(result.verdict for result in found),
            state=state.state if state else None,
            changed=sum(result.changed for result in found),
            failed=sum(result.failed for result in found),
            reason=bad[0].reason if bad else state.reason if state else None,
        )
    findings = [finding for part in parts for finding in part.findings]
    return Document(
        verb="up",
        site=site.cluster,
        verdict=worst([*(part.verdict for part in parts), *(result.verdict for result in nodes.values())]),
        seconds=round(time.monotonic() - started, 2),
        nodes=nodes,
        findings=findings,
        details={key: value for part in parts for key, value in part.details.items()}
        | {
            "steps": [
                {
                    "verb": part.verb,
                    "verdict": part.verdict,
                    "seconds": part.seconds,
                    "run": part.details.get("run"),
                }
                for part in parts
            ]
        },
    )


def _note(text: str) -> dict[str, Any]:
    return {"event": "note", "text": text}
