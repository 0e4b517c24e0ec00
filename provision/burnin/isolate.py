"""Runs an isolation as jobs, and says what follows from it for the nodes' verdicts.

`provision.burnin.isolation` decides which experiments; here each becomes a short job of the burn-in's program on its
nodes. Those of one round run at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from provision.burnin.isolation import (
    Cluster,
    Conclusion,
    Experiment,
    Fault,
    Kind,
    Limits,
    Measurement,
    Path,
    isolate,
)
from provision.burnin.judge import Judgement
from provision.burnin.launch import Job, Launcher, LaunchError, Outcome, StillRunning
from provision.burnin.result import BurninResult
from provision.report.model import Finding, NodeResult, Verdict, worst
from provision.site.hostlist import expand, fold

SEED = 1  # the same burn-in pairs the same nodes
BANDWIDTH = ("collective-bandwidth", "collective-bandwidth-all-to-all")
OPERATIONS = {"all_reduce": "all_reduce_busbw_gbs", "all_to_all": "all_to_all_busbw_gbs"}
ACTIONS = {
    Kind.NODE: "look at PCIe (lspci -vv: width, speed, ACS), NUMA settings and the fabric manager of the node",
    Kind.GPU: "look at the GPU's clocks, links and PCIe width; swap it with a good one and run it again",
    Kind.NIC: "is the adapter there, and its port up: ibstat, lspci; then its cable and the switch's port",
    Kind.LINK: "clean or change the cable, then the transceiver, then the port; look at its error counters",
    Kind.SWITCH: "look at the switch: its ports' counters, firmware, temperature",
}
RunRound = Callable[[Sequence[Experiment]], Sequence[Measurement]]


def wanted(result: BurninResult, judgement: Judgement) -> bool:
    """Whether bandwidth between nodes is short, or cannot be told for want of a limit. Pure."""
    if result.device == "cpu" or len({rank.host for rank in result.ranks}) < 2 or not result.complete:
        return False
    return any(
        finding.check in BANDWIDTH
        and (
            finding.verdict is Verdict.FAIL
            or (finding.verdict is Verdict.UNKNOWN and "no limit known" in (finding.why or ""))
        )
        for finding in judgement.findings
    )


def environment(experiment: Experiment) -> dict[str, str]:
    """NCCL's variables that keep it to the way under test; empty where it may choose."""
    if experiment.rail is not None:
        return {"NCCL_IB_HCA": f"={experiment.rail}"}
    return {
        Path.ALL: {},
        Path.NVLINK: {"NCCL_P2P_LEVEL": "NVL", "NCCL_SHM_DISABLE": "1"},
        Path.HOST: {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"},
    }[experiment.path]


def parts(experiment: Experiment) -> tuple[str, ...]:
    """What of the program an experiment needs; a node by itself also shows its GPUs' matrix products."""
    return ("collectives", "compute") if len(experiment.nodes) == 1 else ("collectives",)


def measurement(experiment: Experiment, result: BurninResult | None, why: str) -> Measurement:
    """What a job says about its experiment; `why` there is no result."""
    if result is None:
        return Measurement(experiment, why=why)
    if result.failure or not result.complete:
        return Measurement(experiment, why=result.failure.message if result.failure else "it did not finish")
    rates: dict[str, float] = {}
    for row in sorted(result.collectives, key=lambda entry: entry.bytes):
        if sum(row.wrong):
            return Measurement(experiment, why=f"{row.operation}: {sum(row.wrong)} wrong elements")
        if row.operation in OPERATIONS and row.busbw_gbs is not None:
            rates[row.operation] = row.busbw_gbs
    if "all_reduce" not in rates:
        return Measurement(experiment, why="no all-reduce was measured")
    local = {rank.rank: (rank.host, rank.local_rank) for rank in result.ranks}
    tflops = {local[row.rank]: row.tflops for row in result.compute if row.dtype == "bfloat16"}
    return Measurement(experiment, rates, tflops=tflops)


def rails(result: BurninResult) -> tuple[str, ...]:
    """The adapters that every node has, "mlx5_0" first; none where NCCL went by sockets or no log tells."""
    of_host: dict[str, set[str]] = {}
    for transport in result.transports:
        if transport.network in (None, "Socket"):
            return ()
        names = {device.split(":")[0] for device in transport.devices}
        of_host.setdefault(result.host(transport.rank), set()).update(names)
    common = set.intersection(*of_host.values()) if of_host else set()
    return tuple(
        sorted(common, key=lambda name: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", name)])
    )


def cluster(result: BurninResult, switches: Mapping[str, str]) -> Cluster:
    """The nodes of a run; `switches` is the leaf switch of each node as far as it is known."""
    nodes = tuple(dict.fromkeys(rank.host for rank in result.ranks))
    names = rails(result)
    return Cluster(
        nodes,
        min(sum(rank.host == node for rank in result.ranks) for node in nodes),
        names,
        # A switch of a rail-optimised fabric has one rail of many nodes.
        {(node, rail): f"{switches[node]} {rail}" for node in nodes if node in switches for rail in names},
    )


def find(
    result: BurninResult,
    limits: Mapping[str, Mapping[str, Any]],
    switches: Mapping[str, str],
    run: RunRound,
    progress: Callable[[str], None],
) -> Conclusion:
    """Find what makes a run's nodes slow together. `limits` are those that it was judged by; `run` measures a round."""
    nodes = cluster(result, switches)
    floors = {name: limits[measure]["fail"] for name, measure in OPERATIONS.items() if measure in limits}
    whole = Experiment(nodes.nodes)
    measured = measurement(whole, result, "")
    judged = {
        name: rate for name, rate in measured.busbw_gbs.items() if name in floors or name == "all_reduce"
    }

    def answer(experiments: Sequence[Experiment]) -> Sequence[Measurement]:
        if list(experiments) == [whole]:
            return [Measurement(whole, judged, measured.why, measured.tflops)]
        progress(f"isolation: {len(experiments)} at the same time: {'; '.join(map(str, experiments[:4]))}")
        answers = run(experiments)
        return [
            Measurement(
                each.experiment,
                {name: rate for name, rate in each.busbw_gbs.items() if name in judged},
                each.why,
                each.tflops,
            )
            for each in answers
        ]

    conclusion, _ = isolate(nodes, Limits(whole=floors), SEED, answer)
    for fault in conclusion.faults:
        progress(f"isolation: {fault}: {fault.evidence[-1]}")
    return conclusion


def run_round(
    launcher: Launcher,
    jobs: Sequence[tuple[Experiment, Job]],
    wait: float,
    read: Callable[[Outcome], tuple[BurninResult | None, str]],
) -> list[Measurement]:
    """Submit all jobs, then wait for each, `wait` seconds for its start.

    `read` gives an outcome's result, or why there is none. Whatever ends the waiting cancels the jobs that are left.
    Raises StillRunning.
    """
    running: list[tuple[Experiment, Job, str]] = []
    measured = []
    try:
        for experiment, job in jobs:
            running.append((experiment, job, launcher.submit(job)))
        while running:
            experiment, job, number = running.pop(0)
            try:
                measured.append(measurement(experiment, *read(launcher.follow(number, job, wait))))
            except StillRunning:
                raise
            except LaunchError as error:
                measured.append(Measurement(experiment, why=str(error)))
    except BaseException:
        for _, _, number in running:
            launcher.cancel(number)
        raise
    return measured


def told(conclusion: Conclusion) -> dict[str, Any]:
    """The conclusion for the document's details."""
    return {**asdict(conclusion), "faults": [asdict(fault) for fault in conclusion.faults]}


def settle(judgement: Judgement, conclusion: Conclusion) -> Judgement:
    """The judgement once it is known what makes the nodes slow together. Pure.

    Nodes with a fault of their own fail; those that are good without them pass; those behind a bad path between
    switches are good themselves, and warn. Without a fault nothing changes but that it says so.
    """
    own = {node for fault in conclusion.faults if fault.own for node in fault.nodes}
    findings: list[Finding] = []
    for finding in judgement.findings:
        if finding.check in BANDWIDTH and finding.verdict is Verdict.FAIL and conclusion.faults:
            findings += _shared(finding, own, conclusion)
        else:
            findings.append(finding)
    findings += [_finding(fault) for fault in conclusion.faults]
    findings += [
        Finding(
            verdict=Verdict.WARN,
            check="isolation-path",
            subject=fold(fault.nodes),
            read=fault.name,
            why=f"good with other nodes, short with each other: {fault.name}",
            action=ACTIONS[fault.kind],
        )
        for fault in conclusion.faults
        if not fault.own
    ]
    if conclusion.unexplained:
        findings.append(
            Finding(
                verdict=Verdict.UNKNOWN,
                check="isolation",
                subject=fold(judgement.nodes),
                why=f"no node, link or switch stands out: {conclusion.unexplained}",
                action="look at what all have in common: routing, congestion, NCCL's settings, the container",
            )
        )
    about: dict[str, list[Finding]] = {name: [] for name in judgement.nodes}
    for finding in findings:
        for name in _names(finding.subject):
            about.setdefault(name, []).append(finding)
    nodes = {name: _node(before, about[name]) for name, before in judgement.nodes.items()}
    paths = [Verdict.FAIL for fault in conclusion.faults if not fault.own]
    return Judgement(worst([*(node.verdict for node in nodes.values()), *paths]), nodes, findings)


def broken_off(judgement: Judgement, error: LaunchError) -> Judgement:
    """The judgement as it was, and that it could not be found out what makes the nodes slow. Pure."""
    finding = Finding(
        verdict=Verdict.UNKNOWN,
        check="isolation",
        subject=fold(judgement.nodes),
        why=f"what makes them slow together could not be looked for: {error}",
        action=error.advice or "run the burn-in again on these nodes",
    )
    verdict = worst([judgement.verdict, Verdict.UNKNOWN])
    return Judgement(verdict, judgement.nodes, [*judgement.findings, finding])


def _shared(finding: Finding, own: set[str], conclusion: Conclusion) -> list[Finding]:
    """A speed of all nodes together, told apart: those with a fault, those that are good without them, the rest."""
    nodes = expand(finding.subject)
    split = {
        Verdict.FAIL: [node for node in nodes if node in own],
        Verdict.PASS: [node for node in nodes if node in conclusion.proven and node not in own],
        Verdict.WARN: [node for node in nodes if node not in conclusion.proven and node not in own],
    }
    why = {
        Verdict.FAIL: finding.why,
        Verdict.PASS: f"good without {fold(sorted(own))}" if own else None,
        Verdict.WARN: f"good in pairs; not proven all at once: {finding.why}",
    }
    return [
        finding.model_copy(update={"verdict": verdict, "subject": fold(names), "why": why[verdict]})
        for verdict, names in split.items()
        if names
    ]


def _finding(fault: Fault) -> Finding:
    """About the nodes where the fault is theirs, else about the link or switch itself."""
    return Finding(
        verdict=Verdict.FAIL,
        check=f"isolation-{fault.kind}",
        subject=fold(fault.nodes) if fault.own else fault.name,
        read=fault.name,
        expected="as fast as the others",
        why=f"{fault}: {'; '.join(fault.evidence[:3])}",
        action=ACTIONS[fault.kind],
    )


def _node(before: NodeResult, about: Sequence[Finding]) -> NodeResult:
    """What isolation found comes before what it explains."""
    verdict = worst(finding.verdict for finding in about)
    first = sorted(about, key=lambda finding: not finding.check.startswith("isolation"))
    reasons = [finding.why for finding in first if finding.verdict is verdict and finding.why]
    reason = None if verdict in (Verdict.PASS, Verdict.SKIP) else next(iter(reasons), before.reason)
    return before.model_copy(update={"verdict": verdict, "reason": reason})


def _names(subject: str) -> list[str]:
    """The nodes of a finding's subject; a link or switch is no node."""
    return expand(subject) if re.fullmatch(r"[\w.,\[\]-]+", subject) else []
