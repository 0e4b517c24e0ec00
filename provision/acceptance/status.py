"""How far every node has come: acceptance from the head, the scheduler's own view beside it, the last runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from provision.burnin.launch import closed as burnin_closed
from provision.components.slurm import acceptance as slurm
from provision.engine import headstate, runs
from provision.engine.journal import Journal, JournalError
from provision.engine.remote import RemoteError, connect
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.report.store import state_directory
from provision.site.models import Node, Site

RUNS = 5  # that are told
SOURCE = "scontrol show nodes"


def status(
    site: Site, nodes: Sequence[Node], *, sudo_password: str | None = None, timeout: float | None = None
) -> Document:
    """The document of `provision status`. A head that cannot be read makes every node UNKNOWN.

    It is given `timeout` seconds for all its answers.
    """
    journal = Journal(state_directory(site))
    own: list[dict[str, Any]] = []
    told: list[runs.Run] = []
    unread: list[Finding] = []
    try:
        own = journal.runs(RUNS)
    except JournalError as error:
        unread.append(
            Finding(
                verdict=Verdict.WARN,
                check="journaled",
                subject=site.cluster,
                why=f"runs that only this controller knows are not told: {error}",
                source=str(journal.path),
            )
        )
    try:
        shell = connect(site, site.head, sudo_password=sudo_password, within=timeout)
        try:
            known = headstate.read_acceptance(shell)
            told, damaged = runs.latest(shell, RUNS)
            results = {node.name: _result(node.name, known) for node in nodes}
            findings = _scheduler_findings(site, nodes, results, shell.run) if site.enabled("slurm") else []
            if damaged:
                findings.append(
                    Finding(
                        verdict=Verdict.WARN,
                        check="runs-on-head",
                        subject=site.head.name,
                        read=f"{damaged} of the latest {damaged + len(told)} lines cannot be read",
                        source=runs.path(),
                    )
                )
        finally:
            shell.close()
    except (RemoteError, headstate.HeadError) as error:
        findings = [headstate.silent(site, error)]
        results = {node.name: NodeResult(verdict=Verdict.UNKNOWN, reason=str(error)) for node in nodes}
    findings += _put_away(results)
    latest = merged(own, told)
    findings += [*last_look(site, latest), *unread]
    return Document(
        verb="status",
        site=site.cluster,
        verdict=worst([*(r.verdict for r in results.values()), *(f.verdict for f in findings)]),
        nodes=results,
        findings=findings,
        details={"runs": latest},
    )


def merged(own: Sequence[dict[str, Any]], told: Sequence[runs.Run]) -> list[dict[str, Any]]:
    """The latest runs, newest first: those of all controllers, as the head has them, and what only this one knows
    (a plan, a verify, what is under way)."""
    by_run = {run["run"]: run for run in own}
    by_run |= {run.run: run.model_dump(mode="json") for run in told}
    return sorted(by_run.values(), key=lambda run: (run["started"], run["run"]), reverse=True)[:RUNS]


def last_look(site: Site, latest: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A word on the last run that looked at nodes, of `latest` (newest first), where it was not content."""
    looked = next((run for run in latest if run["verb"] in ("verify", "up") and run["verdict"]), None)
    if looked is None or Verdict(looked["verdict"]) not in (Verdict.FAIL, Verdict.UNKNOWN):
        return []
    return [
        Finding(
            verdict=Verdict.WARN,
            check="last-look",
            subject=site.cluster,
            read=f"{looked['verb']} of {looked['started']}: {looked['verdict']}",
            expected="pass",
            action="`provision verify` looks again and says what is wrong",
        )
    ]


def _put_away(results: Mapping[str, NodeResult]) -> list[Finding]:
    """What to do about nodes that are quarantined."""
    return [
        Finding(
            verdict=Verdict.FAIL,
            check="accepted",
            subject=name,
            read="quarantined",
            expected="admitted",
            why=result.reason,
            action="mend that, then `provision up`: it verifies the node, burns it in and opens it",
        )
        for name, result in results.items()
        if result.state == "quarantined"
    ]


def _scheduler_findings(
    site: Site, nodes: Sequence[Node], results: Mapping[str, NodeResult], run: slurm.Run
) -> list[Finding]:
    """What the scheduler says of workers, beside what we say; one finding where it cannot be asked."""
    try:
        states = slurm.states(run)
        closed = burnin_closed(run)
    except slurm.SlurmError as error:
        return [
            Finding(
                verdict=Verdict.UNKNOWN,
                check="scheduler-state",
                subject=site.head.name,
                why=str(error),
                action=f"look at slurmctld on {site.head.name}: systemctl status slurmctld",
                source=SOURCE,
            )
        ]
    return [
        _scheduler_finding(node.name, states.get(node.name), results[node.name], closed.get(node.name))
        for node in nodes
        if node.name in states or (node.has("worker") and results[node.name].state == "admitted")
    ]


def _scheduler_finding(
    name: str, node: slurm.NodeState | None, result: NodeResult, closed: str | None
) -> Finding:
    """An admitted node that takes no work is worth a word; `closed`: why this tool itself keeps it from jobs."""
    admitted = result.state == "admitted"
    usable = node is not None and node.usable and closed is None
    read = (
        "not known to Slurm" if node is None else f"{node.word}: {node.reason}" if node.reason else node.word
    )
    return Finding(
        verdict=Verdict.WARN if admitted and not usable else Verdict.PASS,
        check="scheduler-state",
        subject=name,
        read=read,
        expected="takes jobs" if admitted else None,
        why=closed if admitted else None,
        action="run `provision up`: it burns the node in again, then opens it"
        if admitted and closed
        else None,
        source=SOURCE,
    )


def _result(name: str, known: dict[str, headstate.Acceptance]) -> NodeResult:
    """A node that is on its way is no failure, one that was put away is."""
    if name not in known:
        return NodeResult(verdict=Verdict.WARN, state="new", reason="never brought up: run `provision up`")
    entry = known[name]
    verdict = {"admitted": Verdict.PASS, "quarantined": Verdict.FAIL}.get(entry.state, Verdict.WARN)
    return NodeResult(verdict=verdict, state=entry.state, reason=entry.reason)
