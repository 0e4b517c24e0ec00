"""`provision tune nccl`: asks the nodes what they have, measures each choice by the burn-in's collectives, proposes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

from provision import atomic
from provision.burnin import isolate
from provision.burnin.direct import AT_ONCE, Direct
from provision.burnin.isolation import Experiment
from provision.burnin.launch import Job, Launcher, LaunchError, Outcome, StillRunning
from provision.burnin.result import BurninResult
from provision.burnin.run import EXPERIMENT_MINUTES, addresses, gpus_used, read_result
from provision.components.fabric.exports import NCCL, nccl_variables
from provision.components.fabric.settings import FabricSettings
from provision.components.slurm import acceptance
from provision.discover.ask import ask
from provision.discover.discover import difference, node_results, proposed, silent
from provision.discover.propose import flow
from provision.engine import headstate
from provision.engine.journal import journaled
from provision.engine.remote import RemoteError, RootShell, connect
from provision.engine.stop import on_stop
from provision.errors import InputError
from provision.report.model import Document, Finding, Verdict, worst
from provision.site.hostlist import fold
from provision.site.models import Fabric, Node, Site
from provision.tune import decide
from provision.tune.decide import DEBUGGING, GID, HCAS, INTERFACES, REPEATS, TRAFFIC_CLASS, Decision, Trial
from provision.tune.wiring import COMMANDS, Wiring, wiring

RUN_MINUTES = 1.0  # of one measurement
READ_SECONDS = 60.0
ARGUMENTS = ("--device", "cuda", "--minutes", f"{RUN_MINUTES:g}", "--parts", "collectives")
# Of `fabric.nccl`, which wins over `fabric.interfaces` and `fabric.hcas`: two places that say one thing.
ELSEWHERE = {"NCCL_SOCKET_IFNAME": INTERFACES, "NCCL_IB_HCA": HCAS}


class RunOnce(Protocol):
    """Runs the collectives once on all nodes with these variables. Raises LaunchError."""

    def __call__(self, environment: Mapping[str, str]) -> Outcome: ...


@dataclass(frozen=True)
class Tuning:
    """What was read, measured and decided; `before` is the text of the site file."""

    site: Site
    before: str
    nodes: Sequence[Node]
    answers: Mapping[str, Wiring | RemoteError]
    decisions: Sequence[Decision] = ()
    accepted: bool = False
    trouble: Finding | None = None  # why nothing was measured

    @property
    def read(self) -> dict[str, Wiring]:
        return {name: found for name, found in self.answers.items() if isinstance(found, Wiring)}

    @cached_property
    def place(self) -> tuple[str, ...]:
        return place(self.site, self.nodes)

    @property
    def values(self) -> dict[tuple[str, ...], Any]:
        """Key -> value for the site file: nothing but interface, adapters, GID index and traffic class."""
        return {
            (*self.place, *each.key): decide.value(each.chosen.wanted, each.key)
            for each in self.decisions
            if each.chosen
        }

    @cached_property
    def text(self) -> str:
        """The site file with what proved better. Raises InputError where it does not fit into it."""
        return proposed(self.site, self.before, self.values)[0]

    def document(self, seconds: float) -> Document:
        """The answer of the verb."""
        findings = [
            each
            for decision in self.decisions
            for each in _findings(decision, ".".join((*self.place, *decision.key)), self.accepted)
        ]
        findings += _debugging(self.site, self.nodes, self.read)
        findings += [self.trouble] if self.trouble else []
        findings += silent(self.answers)
        findings += [
            Finding(verdict=Verdict.UNKNOWN, check="nccl-wiring-read", subject=name, read=part, why=why)
            for name, found in self.read.items()
            for part, why in found.unread.items()
        ]
        return Document(
            verb="tune",
            site=self.site.cluster,
            verdict=worst([Verdict.PASS, *(each.verdict for each in findings)]),
            seconds=seconds,
            nodes=node_results(self.answers, findings),
            findings=findings,
            details={
                "diff": difference(self.site, self.before, self.text),
                "measured": [
                    {
                        "key": ".".join((*self.place, *decision.key)),
                        "value": decide.value(trial.wanted, decision.key),
                        "chosen": trial is decision.chosen,
                        **{name: part for name, part in asdict(trial).items() if name in ("rates", "why")},
                    }
                    for decision in self.decisions
                    for trial in ([decision.now] if decision.now else []) + list(decision.others)
                ],
            },
        )


def settings(site: Site, node: Node) -> FabricSettings:
    return site.settings("fabric", node, FabricSettings)


def place(site: Site, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Where the fabric's settings of `nodes` stand: those of their group, where others are not meant, or the site's.

    Raises InputError where neither says it for all of them.
    """
    for node in nodes:
        own = site.file.nodes.get(node.name)
        if own and own.settings.get("fabric"):
            raise InputError(
                f"{node.name} has fabric settings of its own, which win: take them out, or leave it out"
            )
    everybody = {node.name for node in site.with_role("worker") if node.gpu}
    if everybody <= {node.name for node in nodes} and not any(node.overrides.get("fabric") for node in nodes):
        return ("fabric",)
    groups = {node.groups for node in nodes}
    if len(groups) != 1 or len(next(iter(groups))) != 1:
        raise InputError("the nodes are some of several groups, whose settings may differ: --limit GROUP")
    return ("groups", nodes[0].group, "settings", "fabric")


def _findings(decision: Decision, subject: str, accepted: bool) -> Iterator[Finding]:
    key, now = decision.key, decision.now
    if now is None:
        yield Finding(verdict=Verdict.SKIP, check="nccl-setting", subject=subject, why=decision.why)
        return
    stands = _told(now, key)
    if now.why:
        yield Finding(
            verdict=Verdict.UNKNOWN,
            check="nccl-setting",
            subject=subject,
            read=stands,
            why=f"what the site file says could not be measured, so nothing is better: {now.why}",
        )
    elif decision.chosen:
        yield Finding(
            verdict=Verdict.PASS if accepted else Verdict.WARN,
            check="site-file-lacks" if decide.value(now.wanted, key) is None else "site-file-differs",
            subject=subject,
            read=_told(decision.chosen, key),
            expected=stands,
            why=f"{100 * (decision.chosen.rate / now.rate - 1):.0f} % faster than what the site file says",
            action=None if accepted else "`provision tune nccl SITE --accept` writes it into the site file",
        )
    else:
        yield Finding(
            verdict=Verdict.PASS,
            check="nccl-setting",
            subject=subject,
            read=stands,
            expected="; ".join(_told(each, key) for each in decision.others),
            why="nothing else was faster beyond noise",
        )
    for each in decision.others:
        if each.why and not now.why:
            yield Finding(
                verdict=Verdict.UNKNOWN,
                check="nccl-setting",
                subject=subject,
                read=_told(each, key),
                why=each.why,
            )


def _told(trial: Trial, key: tuple[str, ...]) -> str:
    found = decide.value(trial.wanted, key)
    return f"{'left to NCCL' if found is None else flow(found)}: {trial}"


def _debugging(site: Site, nodes: Sequence[Node], read: Mapping[str, Wiring]) -> Iterator[Finding]:
    """Variables for looking for faults that somebody left set; they are told, never measured or written."""
    places: dict[str, Mapping[str, str]] = {}
    for node in nodes:
        if node.name in read:
            places[f"{node.name}: {NCCL}"] = read[node.name].configuration
            places[f"{node.name}: environment of a login"] = read[node.name].environment
        places[f"{node.name}: fabric.nccl of the site file"] = {
            name: str(value) for name, value in settings(site, node).nccl.items()
        }
    for place, variables in decide.debugging(places).items():
        name, _, where = place.partition(": ")
        yield Finding(
            verdict=Verdict.WARN,
            check="nccl-debugging-variable",
            subject=name,
            read=" ".join(f"{variable}={text}" for variable, text in variables.items()),
            expected="left to NCCL",
            why=f"{', '.join(sorted({DEBUGGING[each] for each in variables}))} are fixed for every size and topology",
            action="for finding faults only: take it out",
            source=where,
        )


def trial(
    wanted: FabricSettings, fabric: Fabric | None, runs: Sequence[tuple[BurninResult | None, str]]
) -> Trial:
    """What the runs of one setting come to: one that failed, was wrong or went another way makes all unknown."""
    rates = []
    for result, why in runs:
        nodes = tuple(dict.fromkeys(rank.host for rank in result.ranks)) if result else ()
        measured = isolate.measurement(Experiment(nodes), result, why)
        if measured.why:
            return Trial(wanted, why=measured.why)
        networks = {each.network for each in result.transports} if result else set()
        if fabric and fabric.kind != "ethernet" and networks & {None, "Socket"}:
            return Trial(
                wanted, why=f"NCCL went by sockets, or its log does not say; {fabric.kind} was expected"
            )
        rates.append(measured.busbw_gbs["all_reduce"])
    return Trial(wanted, tuple(rates))


def measuring(
    site: Site, run: RunOnce, progress: Callable[[str], None]
) -> Callable[[Sequence[FabricSettings]], list[Trial]]:
    """`measure` of `decide.search`: the settings in turn, REPEATS times, all of a setting's runs together a trial."""
    fabric = site.file.networks.fabric
    kind = fabric.kind if fabric else "ethernet"

    def measure(wanted: Sequence[FabricSettings]) -> list[Trial]:
        runs: list[list[tuple[BurninResult | None, str]]] = [[] for _ in wanted]
        minutes = len(wanted) * REPEATS * RUN_MINUTES
        progress(f"{len(wanted)} settings, {REPEATS} times each: about {minutes:g} minutes")
        for repeat in range(REPEATS):
            for setting, found in zip(wanted, runs, strict=True):
                environment = nccl_variables(setting, kind)
                progress(f"measuring {repeat + 1} of {REPEATS}: {_words(environment)}")
                try:
                    found.append(read_result(run(environment)))
                except StillRunning:
                    raise
                except LaunchError as error:
                    found.append((None, str(error)))
        trials = [trial(setting, fabric, found) for setting, found in zip(wanted, runs, strict=True)]
        for each in trials:
            progress(f"{_words(nccl_variables(each.wanted, kind))}: {each}")
        return trials

    return measure


def _words(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={text}" for name, text in environment.items()) or "as NCCL chooses"


@dataclass
class _Slurm:
    """Jobs on nodes that a reservation keeps for them; the nodes' state is not touched."""

    site: Site
    nodes: Sequence[Node]
    run: acceptance.Run
    launcher: Launcher
    wait: float
    reservation: str = ""
    partition: str = ""

    @contextmanager
    def reserved(self) -> Iterator[None]:
        names = [node.name for node in self.nodes]
        states = acceptance.states(self.run)
        for name in names:  # one that only has not answered yet is waited for by the job
            state = states.get(name)
            if state is None or state.drained:
                why = f"drained: {state.reason}" if state else "slurmctld does not know it"
                raise LaunchError(f"{name} takes no jobs: {why}", "leave it out: --limit")
        self.launcher.close_leftovers(names)
        self.partition = self.launcher.partition(names)
        self.reservation = self.launcher.reserve(names)
        try:
            yield
        except StillRunning:
            raise  # its nodes stay reserved; the next burn-in or a person looks after them
        except BaseException:
            self.launcher.release(self.reservation)
            raise
        self.launcher.release(self.reservation)

    def __call__(self, environment: Mapping[str, str]) -> Outcome:
        burnin = self.site.file.burnin
        job = Job(
            nodes=tuple(node.name for node in self.nodes),
            gpus_per_node=gpus_used(self.nodes[0], burnin),
            minutes=EXPERIMENT_MINUTES,
            directory=self.launcher.prepare(str(burnin.directory), addresses(self.nodes)),
            python=burnin.python,
            reservation=self.reservation,
            partition=self.partition,
            run_minutes=RUN_MINUTES,
            parts=("collectives",),
            environment=tuple(environment.items()),
        )
        return self.launcher.follow(self.launcher.submit(job), job, self.wait)


@dataclass
class _Direct:
    """The same over ssh, where there is no scheduler."""

    site: Site
    nodes: Sequence[Node]
    shells: Mapping[str, RootShell]
    progress: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)

    def __call__(self, environment: Mapping[str, str]) -> Outcome:
        burnin = self.site.file.burnin
        job = Direct(
            {node.name: self.shells[node.name].run for node in self.nodes},
            burnin.user,
            self.progress,
            stop=self.stop,
        )
        ranks, seconds = gpus_used(self.nodes[0], burnin), 60.0 * EXPERIMENT_MINUTES
        where = str(burnin.directory), addresses(self.nodes)
        return job.run(*where, ranks, burnin.python, ARGUMENTS, seconds, environment)


def workers(site: Site, nodes: Sequence[Node]) -> list[Node]:
    """The nodes of `nodes` to measure on. Raises InputError where NCCL's way between them cannot be tuned."""
    if not site.enabled("fabric"):
        raise InputError(f"{site.path.name} has no `fabric: {{}}`: that component writes {NCCL}")
    found = [node for node in nodes if node.has("worker") and gpus_used(node, site.file.burnin)]
    if len(found) < 2:
        raise InputError(
            f"{len(found)} workers with GPUs (burnin.device {site.file.burnin.device}): it takes two to measure the "
            "way between them"
        )
    shapes = {gpus_used(node, site.file.burnin) for node in found}
    if len(shapes) > 1:
        raise InputError(
            f"nodes of {', '.join(map(str, sorted(shapes)))} GPUs: one kind at a time, --limit GROUP"
        )
    told = {fold([node.name]): settings(site, node) for node in found}
    for name, each in told.items():
        for variable, key in ELSEWHERE.items():
            if variable in each.nccl:
                raise InputError(f"{name}: fabric.nccl.{variable} wins over fabric.{key[0]}: say it there")
        for key in (GID, TRAFFIC_CLASS):
            if not str(decide.value(each, key) or 0).isdigit():
                raise InputError(f"{name}: fabric.{'.'.join(key)}: {decide.value(each, key)} is no number")
    first = next(iter(told.values()))
    other = next((name for name, each in told.items() if each != first), None)
    if other is not None:
        raise InputError(f"{found[0].name} and {other} have other fabric settings: --limit one kind")
    place(site, found)
    return found


def tune(
    site: Site,
    nodes: Sequence[Node],
    *,
    sudo_password: str | None,
    accept: bool,
    wait: float,
    progress: Callable[[str], None],
) -> tuple[Tuning, Document]:
    """Read, measure, decide; with `accept` write what proved better into the site file.

    Raises InputError before anything is done, JournalError, and KeyboardInterrupt once all jobs have ended.
    """
    start, before = time.monotonic(), site.path.read_text()
    members = workers(site, nodes)
    stop = threading.Event()
    with journaled(site, "tune") as entry:
        answers = ask(site, members, COMMANDS, wiring, sudo_password=sudo_password, timeout=READ_SECONDS)
        usable = [node for node in members if isinstance(answers[node.name], Wiring)]
        found = Tuning(site, before, members, answers)
        try:
            with on_stop(stop.set):
                decisions = _decided(site, usable, found.read, sudo_password, wait, progress, stop)
            found = Tuning(site, before, members, answers, decisions, accepted=accept)
        except RemoteError as error:
            found = Tuning(site, before, members, answers, trouble=headstate.silent(site, error))
        except (LaunchError, acceptance.SlurmError) as error:
            found = Tuning(site, before, members, answers, trouble=_not_run(error))
        text = found.text
        document = found.document(round(time.monotonic() - start, 2))
        if accept and text != before:
            atomic.write(site.path, text.encode(), mode=site.path.stat().st_mode & 0o777)
        entry.conclude(document)
    return found, document


def _decided(
    site: Site,
    nodes: Sequence[Node],
    read: Mapping[str, Wiring],
    sudo_password: str | None,
    wait: float,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> list[Decision]:
    if len(nodes) < 2:
        raise LaunchError(f"{len(nodes)} nodes answered: it takes two to measure the way between them")
    fabric, now = site.file.networks.fabric, settings(site, nodes[0])

    def searched(run: RunOnce) -> list[Decision]:
        return decide.search(
            now, lambda key, wanted: decide.choices(read, fabric, key, wanted), measuring(site, run, progress)
        )

    if site.enabled("slurm"):
        shell = connect(site, site.head, sudo_password=sudo_password)
        try:
            launcher = Launcher(shell.run, site.file.burnin.user, progress, stop=stop)
            jobs = _Slurm(site, nodes, shell.run, launcher, wait)
            with jobs.reserved():
                return searched(jobs)
        finally:
            shell.close()
    shells: dict[str, RootShell] = {}

    def reach(node: Node) -> None:
        shells[node.name] = connect(site, node, sudo_password=sudo_password)

    try:
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            for done in [pool.submit(reach, node) for node in nodes]:
                done.result()
        return searched(_Direct(site, nodes, shells, progress, stop))
    finally:
        for opened in shells.values():
            opened.close()


def _not_run(error: Exception) -> Finding:
    advice = error.advice if isinstance(error, LaunchError) else None
    return Finding(
        verdict=Verdict.UNKNOWN, check="nccl-measured", subject="all nodes", why=str(error), action=advice
    )
