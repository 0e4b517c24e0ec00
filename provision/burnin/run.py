"""A burn-in from site to document: reserve, run, judge, then open or close the nodes."""

from __future__ import annotations

import ipaddress
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from provision.burnin import history, isolate
from provision.burnin.direct import AT_ONCE, Direct
from provision.burnin.isolation import Experiment, Measurement
from provision.burnin.judge import Expected, Judgement, judge, limits_used
from provision.burnin.launch import Job, Launcher, LaunchError, Outcome, StillRunning
from provision.burnin.result import BurninResult, ResultError
from provision.burnin.settings import BurninSettings
from provision.burnin.workload.levels import plan
from provision.components.slurm import acceptance
from provision.components.slurm.exports import AWAITING, ours
from provision.engine import headstate, runs
from provision.engine.journal import journaled
from provision.engine.remote import RemoteError, RootShell, connect
from provision.engine.stop import on_stop
from provision.report.model import Document, NodeResult, Verdict, worst
from provision.site.hostlist import fold
from provision.site.models import Fabric, Node, Site

SPARE_MINUTES = 15  # of Slurm's limit, beyond what the level should take: slow nodes must come to an end, too
TOOLS_MINUTES = 45  # dcgmi diag -r 3 and others, beyond the level
EXPERIMENT_MINUTES = 10  # Slurm's limit for one experiment of an isolation, which takes one or two
WAIT_SECONDS = 900.0


@dataclass(frozen=True)
class Options:
    """How to burn in."""

    level: str = "quick"
    minutes: float | None = None  # about how long to run; None: as long as the level takes
    admit: bool = False  # open the nodes that waited for acceptance and pass
    inject: str | None = None  # a fault made on purpose, to see it found: "flip-bit:1"
    wait: float = WAIT_SECONDS  # seconds for other jobs to leave the nodes


def run_burnin(
    site: Site,
    nodes: Sequence[Node],
    run: acceptance.Run,
    options: Options,
    *,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> Document:
    """Burn in the workers among `nodes` through the Slurm of the head that `run` speaks to as root.

    Nodes that fail are drained with the reason. Nodes that waited for acceptance are opened when they pass and
    `options.admit` is set, else they wait on; nodes that were open before stay so unless they fail. Setting
    `stop` cancels the job and puts the nodes back as they were: they are UNKNOWN then, interrupted.
    """
    start = time.monotonic()
    settings = site.file.burnin
    launcher = Launcher(run, settings.user, progress, stop=stop)
    workers = [node for node in nodes if node.has("worker")]
    burnin = _Burnin(workers, settings, options, site.file.networks.fabric, run=run, launcher=launcher)
    try:
        judgement = burnin.behind_reservation()
    except (LaunchError, acceptance.SlurmError) as error:
        judgement = _could_not_run(burnin.expected, error)
    except KeyboardInterrupt:
        judgement = burnin.interrupted()
    return _document(site, burnin, judgement, start)


def burn_in(
    site: Site,
    nodes: Sequence[Node],
    options: Options,
    *,
    sudo_password: str | None,
    progress: Callable[[str], None],
) -> Document:
    """`run_burnin` as the verb runs it: through a shell of its own on the head, with an entry in the journal.

    Without Slurm the nodes are spoken to themselves, and nothing but the verdict tells whether they may be used.
    A head that cannot be talked to makes every node UNKNOWN, and so does an interrupt, once what was begun has been
    taken back. Raises JournalError before anything is done.
    """
    start = time.monotonic()
    stop = threading.Event()
    with journaled(site, "burnin") as entry:
        try:
            with on_stop(stop.set):
                document = (
                    _through_head(site, nodes, options, sudo_password, progress, stop)
                    if site.enabled("slurm")
                    else _directly(site, nodes, options, sudo_password, progress, stop)
                )
        except RemoteError as error:
            unknown = NodeResult(verdict=Verdict.UNKNOWN, reason=str(error))
            document = Document(
                verb="burnin",
                site=site.cluster,
                verdict=Verdict.UNKNOWN,
                seconds=round(time.monotonic() - start, 3),
                nodes={node.name: unknown for node in nodes if node.has("worker")},
                findings=[headstate.silent(site, error)],
                details={"interrupted": stop.is_set()},
            )
        kept = [*history.kept(document), runs.kept(site, entry, document)]
        headstate.keep(site, document, kept, sudo_password=sudo_password)
        entry.conclude(document)
    return document


def logged_in_to(site: Site, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that a burn-in of `nodes` logs in to: without Slurm on the head, all of them."""
    return [site.head] if site.enabled("slurm") else [site.head, *nodes]


def _through_head(
    site: Site,
    nodes: Sequence[Node],
    options: Options,
    sudo_password: str | None,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> Document:
    shell = connect(site, site.head, sudo_password=sudo_password)
    try:
        return run_burnin(site, nodes, shell.run, options, progress=progress, stop=stop)
    finally:
        shell.close()


def _directly(
    site: Site,
    nodes: Sequence[Node],
    options: Options,
    sudo_password: str | None,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> Document:
    """Over ssh to every worker. Nodes that cannot be reached are left out: unknown."""
    start = time.monotonic()
    settings = site.file.burnin
    workers = [node for node in nodes if node.has("worker")]
    burnin = _Judging(workers, settings, options, site.file.networks.fabric)
    shells: dict[str, RootShell] = {}
    left_out: dict[str, str] = {}

    def reach(node: Node) -> None:
        try:
            shells[node.name] = connect(site, node, sudo_password=sudo_password)
        except RemoteError as error:
            left_out[node.name] = str(error)

    try:
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            for done in [pool.submit(reach, node) for node in workers]:
                done.result()
        usable = [node for node in workers if node.name in shells]
        judgement = burnin.judge(_direct_jobs(usable, shells, settings, options, progress, stop), left_out)
    except KeyboardInterrupt:
        judgement = burnin.interrupted()
    finally:
        for shell in shells.values():
            shell.close()
    return _document(site, burnin, judgement, start)


def _document(site: Site, burnin: _Judging, judgement: Judgement, start: float) -> Document:
    """The answer of a burn-in that was begun at `start`, of time.monotonic()."""
    return Document(
        verb="burnin",
        site=site.cluster,
        verdict=judgement.verdict,
        seconds=round(time.monotonic() - start, 3),
        nodes=judgement.nodes,
        findings=judgement.findings,
        details=burnin.details,
    )


def _direct_jobs(
    nodes: Sequence[Node],
    shells: Mapping[str, RootShell],
    settings: BurninSettings,
    options: Options,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> Iterable[tuple[list[str], Outcome | LaunchError]]:
    """One job for all nodes with the same number of GPUs."""
    for gpus in sorted({gpus_used(node, settings) for node in nodes}, reverse=True):
        members = [node for node in nodes if gpus_used(node, settings) == gpus]
        names = [node.name for node in members]
        job = Direct({name: shells[name].run for name in names}, settings.user, progress, stop=stop)
        arguments = [
            *("--device", "cuda" if gpus else "cpu", "--level", options.level),
            *(["--minutes", f"{options.minutes:g}"] if options.minutes else []),
            *(["--inject", options.inject] if options.inject else []),
        ]
        seconds = 60.0 * limit_minutes(options.level, options.minutes)
        root = str(settings.directory)
        try:
            yield names, job.run(root, addresses(members), max(1, gpus), settings.python, arguments, seconds)
        except LaunchError as error:
            yield names, error


def limit_minutes(level: str, minutes: float | None) -> int:
    """Slurm's time limit for a run of `level` in `minutes`."""
    expected = plan(level, minutes, "cuda")
    return math.ceil(expected.seconds / 60) + SPARE_MINUTES + (TOOLS_MINUTES if expected.thorough else 0)


def gpus_used(node: Node, settings: BurninSettings) -> int:
    """How many GPUs of the node the burn-in uses, one rank each; 0: one rank on the CPU."""
    return node.gpu.count if node.gpu and settings.device == "gpu" else 0


def closing_reason(before: acceptance.NodeState, result: NodeResult, *, admit: bool) -> str | None:
    """Why a node is drained after its burn-in; None: it is left as it is. Pure.

    Unknown never opens a node, and never closes one that was open.
    """
    if result.verdict is Verdict.FAIL:
        return f"burn-in failed: {result.reason}"
    if not _closed_by_us(before):
        return None
    if not result.verdict.good:
        return f"burn-in could not be told: {result.reason}"
    return None if admit else AWAITING


def _closed_by_us(state: acceptance.NodeState) -> bool:
    return state.drained and ours(state.reason)


@dataclass
class _Judging:
    """What is known of the nodes before, and what the runs came to."""

    workers: Sequence[Node]
    settings: BurninSettings
    options: Options
    fabric: Fabric | None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> dict[str, Expected]:
        return {
            node.name: Expected(
                gpus_used(node, self.settings), node.gpu.model if node.gpu else None, self.fabric
            )
            for node in self.workers
        }

    def judge(
        self, jobs: Iterable[tuple[list[str], Outcome | LaunchError]], left_out: Mapping[str, str]
    ) -> Judgement:
        expected = self.expected
        parts = [judge(None, {name: expected[name] for name in left_out}, left_out=left_out)]
        runs = self.details.setdefault("runs", [])
        ran: set[str] = set()
        measured: dict[str, dict[str, float]] = {}
        for names, outcome in jobs:
            part = {name: expected[name] for name in names}
            if isinstance(outcome, LaunchError):
                parts.append(_could_not_run(part, outcome))
                continue
            runs.append({"job": outcome.job, "nodes": fold(names), "directory": outcome.directory})
            ran |= set(names)
            result, why = read_result(outcome)
            used: dict[str, dict[str, Any]] = {}
            if result is not None and outcome.result is not None:
                used = limits_used(result, part, self.settings.limits)
                measured |= history.figures(result)
                self.details.setdefault("burnin", json.loads(outcome.result))
                self.details.setdefault("limits", used)
            source = f"{outcome.directory}/result.json"
            judgement = judge(result, part, limits=self.settings.limits, why_no_result=why, source=source)
            if result is not None and isolate.wanted(result, judgement):
                judgement = self.isolated(result, judgement, used)
            parts.append(judgement)
        nodes = {name: part.nodes[name] for name in expected for part in parts if name in part.nodes}
        findings = [finding for part in parts for finding in part.findings]
        self.details[history.DETAIL] = history.records(nodes, ran, measured)
        return Judgement(worst(part.verdict for part in parts if part.nodes), nodes, findings)

    def interrupted(self) -> Judgement:
        """Nothing is told of any node by a burn-in that a person has ended."""
        self.details["interrupted"] = True
        judgement = judge(None, self.expected, why_no_result="interrupted")
        for finding in judgement.findings:
            finding.action = "run it again"
        return judgement

    def isolated(
        self, result: BurninResult, judgement: Judgement, used: Mapping[str, Mapping[str, Any]]
    ) -> Judgement:
        """More runs, to find what makes the nodes slow together; none where no scheduler keeps others off."""
        return judgement


@dataclass
class _Burnin(_Judging):
    """The same behind a reservation of Slurm's."""

    run: acceptance.Run = field(kw_only=True)
    launcher: Launcher = field(kw_only=True)
    reservation: str = ""

    def behind_reservation(self) -> Judgement:
        """The order of `provision.burnin.launch`: no way out of here leaves a node open that was not."""
        names = [node.name for node in self.workers]
        self.launcher.close_leftovers(names)
        before = acceptance.states(self.run)
        known = [name for name in names if name in before]
        left_out = {name: "slurmctld does not know it" for name in names if name not in before}
        if not known:
            return judge(None, self.expected, left_out=left_out)
        reservation = self.launcher.reserve(known)
        try:
            left_out |= acceptance.admit(self.run, known, pause=self.launcher.pause)
            usable = [node for node in self.workers if node.name not in left_out]
            self.reservation = reservation
            judgement = self.judge(self._jobs(usable, reservation), left_out)
        except StillRunning:
            raise  # the nodes stay reserved; the next burn-in or a person looks after them
        except BaseException:
            self._quarantine(
                {name: before[name].reason or AWAITING for name in known if _closed_by_us(before[name])}
            )
            self.launcher.release(reservation)
            raise
        closing: dict[str, str] = {}
        for name in known:
            result = judgement.nodes[name]
            reason = closing_reason(before[name], result, admit=self.options.admit)
            if reason is not None:
                closing[name] = reason
            result.state = _state(result.verdict, opened=reason is None)
        self._quarantine(closing)
        self.launcher.release(reservation)
        return judgement

    def _quarantine(self, reasons: Mapping[str, str]) -> None:
        for reason in dict.fromkeys(reasons.values()):
            acceptance.quarantine(self.run, [name for name in reasons if reasons[name] == reason], reason)

    def _jobs(
        self, nodes: Sequence[Node], reservation: str
    ) -> Iterable[tuple[list[str], Outcome | LaunchError]]:
        """One job for all nodes with the same number of GPUs: every node of a job runs as many ranks."""
        for gpus in sorted({gpus_used(node, self.settings) for node in nodes}, reverse=True):
            members = [node for node in nodes if gpus_used(node, self.settings) == gpus]
            names = [node.name for node in members]
            try:
                yield names, self._job(members, gpus, reservation)
            except StillRunning:
                raise
            except LaunchError as error:
                yield names, error

    def _job(self, nodes: Sequence[Node], gpus: int, reservation: str) -> Outcome:
        names = tuple(node.name for node in nodes)
        job = Job(
            nodes=names,
            gpus_per_node=gpus,
            minutes=limit_minutes(self.options.level, self.options.minutes),
            directory=self.launcher.prepare(str(self.settings.directory), addresses(nodes)),
            python=self.settings.python,
            reservation=reservation,
            partition=self.launcher.partition(names),
            run_minutes=self.options.minutes,
            level=self.options.level,
            inject=self.options.inject,
        )
        number = self.launcher.submit(job)
        return self.launcher.follow(number, job, self.options.wait)

    def isolated(
        self, result: BurninResult, judgement: Judgement, used: Mapping[str, Mapping[str, Any]]
    ) -> Judgement:
        """Find what makes the nodes of a run slow together, still behind the reservation."""
        names = list(judgement.nodes)

        def run(experiments: Sequence[Experiment]) -> list[Measurement]:
            jobs = [(each, self._experiment(each, self.reservation, partition)) for each in experiments]
            return isolate.run_round(self.launcher, jobs, self.options.wait, read_result)

        try:
            partition = self.launcher.partition(names)
            switches = self.launcher.leaf_switches(names)
            conclusion = isolate.find(result, used, switches, run, self.launcher.progress)
        except StillRunning:
            raise
        except LaunchError as error:
            return isolate.broken_off(judgement, error)
        self.details.setdefault("isolation", isolate.told(conclusion))
        return isolate.settle(judgement, conclusion)

    def _experiment(self, experiment: Experiment, reservation: str, partition: str) -> Job:
        nodes = [node for node in self.workers if node.name in experiment.nodes]
        return Job(
            nodes=experiment.nodes,
            gpus_per_node=gpus_used(nodes[0], self.settings),
            minutes=EXPERIMENT_MINUTES,
            directory=self.launcher.prepare(str(self.settings.directory), addresses(nodes)),
            python=self.settings.python,
            reservation=reservation,
            partition=partition,
            run_minutes=1.0,
            parts=isolate.parts(experiment),
            gpus=experiment.gpus,
            environment=tuple(isolate.environment(experiment).items()),
        )


def _state(verdict: Verdict, *, opened: bool) -> str | None:
    """The acceptance state that follows from a burn-in."""
    if verdict is Verdict.FAIL:
        return "quarantined"
    if not verdict.good:
        return None
    return "admitted" if opened else "burned-in"


def read_result(outcome: Outcome) -> tuple[BurninResult | None, str]:
    """The job's result, or why there is none."""
    cancelled = outcome.state.state == "CANCELLED"
    ended = f"job {outcome.job} " + ("was cancelled" if cancelled else f"ended as {outcome.state.state}")
    if outcome.state.reason:
        ended += f" ({outcome.state.reason})"
    if outcome.result is not None:
        try:
            result = BurninResult.parse(outcome.result, f"{outcome.directory}/result.json")
        except ResultError as error:
            return (
                None,
                ended if cancelled else f"{ended}; {error}",
            )  # what was cut short is no fault of its own
        if cancelled and result.failure:
            failure = result.failure.model_copy(update={"message": f"{ended}; {result.failure.message}"})
            result = result.model_copy(update={"failure": failure})
        return result, ""
    if outcome.log:
        return None, f"{ended} without a result; its last line: {outcome.log[-1]}"
    return None, (
        f"{ended} and wrote nothing to {outcome.directory}/job.log: is it the same folder on all nodes, and may "
        "burnin.user write there? (NFS takes root's rights away)"
    )


def _could_not_run(expected: Mapping[str, Expected], error: Exception) -> Judgement:
    judgement = judge(None, expected, why_no_result=str(error))
    if isinstance(error, LaunchError):
        for finding in judgement.findings:
            finding.action = error.advice
    return judgement


def addresses(nodes: Iterable[Node]) -> dict[str, str]:
    """The nodes' addresses as far as the site file has them; names are left to the nodes' own resolver."""
    found: dict[str, str] = {}
    for node in nodes:
        try:
            found[node.name] = str(ipaddress.ip_address(node.address or ""))
        except ValueError:
            continue
    return found
