"""Runs the burn-in as a Slurm job on nodes that no user can get at meanwhile.

Order, so that a crash at any point leaves the nodes reserved or drained, never open by mistake:

1. a reservation without end, for the burn-in's user alone, on nodes that are still drained;
2. the drain that this tool made is taken back: only the burn-in's job can start there now;
3. the job runs and is judged;
4. nodes that must stay closed are drained again, and only then the reservation is deleted.

What a crashed run left behind is found by the reservation's name and closed before anything else.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from shlex import join, quote

from provision.components.slurm import acceptance
from provision.components.slurm.exports import ours, slurm_fold
from provision.site.hostlist import expand, fold

RESERVATION = "provision-burnin"
FINAL_STATES = frozenset(
    (
        "COMPLETED",
        "FAILED",
        "TIMEOUT",
        "CANCELLED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "PREEMPTED",
        "REVOKED",
    )
)
POLL_SECONDS = 2.0
SLURM_SILENT_SECONDS = 120.0  # slurmctld may restart meanwhile
CANNOT_START_SECONDS = (
    180.0  # that Slurm may call the job's nodes unusable: slurmd restarts, a node comes back
)
REMIND_SECONDS = 60.0  # between two lines about a job that waits, and two looks at its nodes
CANCEL_SECONDS = 90.0  # KillWait (30 s by default) and the epilog
SHOWN = 5  # nodes named in one line
_LOG_MARK = "@@ log"


class LaunchError(Exception):
    """The burn-in could not be run; the message says what the head answered, `advice` what to do."""

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice


class StillRunning(LaunchError):
    """A cancelled job has not ended: its nodes must stay reserved."""


@dataclass(frozen=True)
class Job:
    """All that decides the batch script."""

    nodes: tuple[str, ...]
    gpus_per_node: int  # ranks on each node; 0: one rank on the CPU
    minutes: int  # Slurm's time limit
    directory: str  # this run's own folder, the same on the head and all nodes
    python: str
    reservation: str
    partition: str
    run_minutes: float | None = None  # how long to run; None: as long as the level takes
    level: str = "quick"
    inject: str | None = None
    parts: tuple[str, ...] = ()  # of the program; none: all of them
    gpus: tuple[int, ...] | None = None  # of each node, one rank each; None: all of them
    environment: tuple[tuple[str, str], ...] = ()  # set for the ranks, on top of what the nodes set


@dataclass(frozen=True)
class JobState:
    """A job as the scheduler has it."""

    state: str
    reason: str = ""

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES or self == FORGOTTEN

    @property
    def waits(self) -> bool:
        """Whether it does not run: before its start, or with nodes that have not told that they are done with it."""
        return not self.final and self.state != "RUNNING"

    @property
    def started(self) -> bool:
        return self.state in ("RUNNING", "COMPLETING")

    def __str__(self) -> str:
        why = self.reason
        if why == "BeginTime":  # the burn-in asks for none
            why += ": Slurm could not start it on its nodes and tries again later"
        return self.state.lower() + (f" ({why})" if why else "")


FORGOTTEN = JobState("FORGOTTEN", "Slurm no longer knows it and keeps no accounting")


@dataclass(frozen=True)
class Outcome:
    """What a job left: its last state, the text of its result document if there is one, its folder."""

    job: str
    state: JobState
    result: str | None
    directory: str
    log: list[str]


def archive() -> bytes:
    """The burn-in program as one file for any Python with torch: the same bytes for the same program."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        sources = files("provision.burnin.workload")
        for name in sorted(entry.name for entry in sources.iterdir() if entry.name.endswith(".py")):
            target.writestr(zipfile.ZipInfo(f"workload/{name}"), sources.joinpath(name).read_bytes())
        start = 'import runpy\nrunpy.run_module("workload", run_name="__main__")\n'
        target.writestr(zipfile.ZipInfo("__main__.py"), start)
    return buffer.getvalue()


def variables(environment: Mapping[str, str]) -> list[str]:
    """The words before a command that set `environment` for it."""
    return ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []


def batch_script(job: Job) -> str:
    """The script that sbatch gets. Pure."""
    ranks = len(job.gpus) if job.gpus else max(1, job.gpus_per_node)
    environment = dict(job.environment)
    if job.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.gpus))
    # Slurm sets CUDA_VISIBLE_DEVICES for each task: what is to differ is set behind it.
    program = [*variables(environment), job.python]
    directives = [
        f"--job-name={RESERVATION}",
        f"--reservation={job.reservation}",
        f"--partition={job.partition}",
        f"--nodes={len(job.nodes)}",
        f"--nodelist={slurm_fold(job.nodes)}",
        f"--ntasks-per-node={ranks}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        "--exclusive",
        "--mem=0",
        f"--time={job.minutes}",
        "--no-requeue",
        f"--output={job.directory}/job.log",
        "--open-mode=append",
    ]
    arguments = [
        "--out",
        f"{job.directory}/result.json",
        "--raw",
        f"{job.directory}/ranks",
        "--addresses",
        f"{job.directory}/addresses.json",
        "--device",
        "cuda" if job.gpus_per_node else "cpu",
        "--level",
        job.level,
        *(["--minutes", f"{job.run_minutes:g}"] if job.run_minutes else []),
        *(["--inject", job.inject] if job.inject else []),
        *(["--parts", ",".join(job.parts)] if job.parts else []),
    ]
    lines = "".join(f"#SBATCH {directive}\n" for directive in directives)
    # A rank that dies must not take the others with it: they write down which one it was. Without
    # --cpus-per-task a step's tasks may get one CPU each.
    return (
        f"#!/bin/bash\n{lines}"
        f"cpus=$((SLURM_CPUS_ON_NODE / {ranks}))\n"
        "exec srun --kill-on-bad-exit=0 --wait=0 --distribution=block --mpi=none \\\n"
        '  --cpus-per-task="$((cpus > 0 ? cpus : 1))" \\\n'
        f"  {join(program)} {quote(f'{job.directory}/burnin.pyz')} \\\n"
        f"  {join(arguments)}\n"
    )


def parse_queue(text: str) -> JobState | None:
    """From `squeue -h -t all -o '%T|%r'`; None where it lists nothing."""
    line = next((line for line in text.splitlines() if line.strip()), None)
    if line is None:
        return None
    state, _, reason = line.partition("|")
    return JobState(state.strip(), "" if reason.strip() in ("None", "") else reason.strip())


def parse_accounting(text: str) -> JobState | None:
    """From `sacct -X -n -P -o State,ExitCode`; "CANCELLED by 0" is CANCELLED. None where it lists nothing."""
    line = next((line for line in text.splitlines() if line.strip()), None)
    if line is None:
        return None
    state, _, code = line.partition("|")
    return JobState(state.split()[0], f"exit {code}" if code not in ("", "0:0") else "")


def parse_reservations(text: str) -> dict[str, tuple[str, ...]]:
    """Reservations of this tool and their nodes, from `scontrol show reservation -o`."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        name = fields.get("ReservationName", "")
        if name.startswith(f"{RESERVATION}-"):
            nodes = fields.get("Nodes", "")
            found[name] = () if nodes in ("", "(null)") else tuple(expand(nodes))
    return found


def parse_partitions(text: str) -> dict[str, tuple[str, ...]]:
    """Node -> its partitions, from `scontrol show node -o`."""
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        name, partitions = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bPartitions=(\S+)", line)
        if name:
            found[name[1]] = tuple(partitions[1].split(",")) if partitions else ()
    return found


def obstacles(states: Mapping[str, acceptance.NodeState], nodes: Collection[str]) -> dict[str, str]:
    """Node -> its state and the reason for it, for those of `nodes` that slurmctld gives to no job. Pure."""
    found: dict[str, str] = {}
    for name in nodes:
        state = states.get(name)
        if state is None:
            found[name] = "not known to slurmctld"
        elif not state.usable:
            found[name] = f"{state.word}: {state.reason or 'no reason given'}"
    return found


def parse_topology(text: str) -> dict[str, str]:
    """Node -> leaf switch, from `scontrol show topology`: "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-8]"."""
    leaves = re.findall(r"\bSwitchName=(\S+) Level=0 .*\bNodes=(\S+)", text)
    return {node: switch for switch, nodes in leaves for node in expand(nodes)}


def closed(run: acceptance.Run) -> dict[str, str]:
    """Node -> why, for those that this tool itself keeps from users' jobs while nothing is under way on them.

    They are drained with its mark, or behind the reservation of a burn-in that has no job left. Raises SlurmError.
    """
    found: dict[str, str] = {}
    for reservation, nodes in parse_reservations(acceptance.asked(run, _RESERVATIONS)).items():
        if not acceptance.asked(run, _jobs_in(reservation)).strip():
            found |= dict.fromkeys(nodes, f"reserved by a burn-in that was interrupted: {reservation}")
    for state in acceptance.states(run).values():
        if state.drained and state.reason is not None and ours(state.reason):
            found[state.name] = state.reason
    return found


_RESERVATIONS = "scontrol show reservation -o"


def _jobs_in(reservation: str) -> str:
    return f"squeue -h -R {quote(reservation)} -o '%i %T'"


@dataclass
class _Waiting:
    """A job that does not run: for how long, and why."""

    number: str
    job: Job
    most: float  # seconds
    state: JobState = JobState("PENDING")
    seconds: float = 0.0
    unstarted: float = 0.0  # of them, seconds before it was given its nodes
    hindered: float = 0.0  # seconds since Slurm called a node of the job unusable
    obstacles: Mapping[str, str] = field(default_factory=dict)  # node -> why
    _looked: float | None = None  # `seconds` when the nodes were looked at
    _told: str = ""
    _told_at: float = 0.0

    def add(self, seconds: float, state: JobState) -> None:
        """It has waited this much longer, and does so in `state`."""
        if state != self.state:
            self._looked = None
        self.state = state
        self.seconds += seconds
        self.unstarted += 0.0 if state.started else seconds
        # One that has run may have left a result, and is ended by Slurm once that takes its node for down.
        self.hindered = self.hindered + seconds if self.obstacles and not state.started else 0.0

    @property
    def stale(self) -> bool:
        """Whether its nodes must be looked at again; soon where they are what it waits for."""
        every = POLL_SECONDS * 5 if self.obstacles else REMIND_SECONDS
        return self._looked is None or self.seconds - self._looked >= every

    def take(self, states: Mapping[str, acceptance.NodeState]) -> None:
        self._looked = self.seconds
        self.obstacles = obstacles(states, self.job.nodes)

    def tell(self, progress: Callable[[str], None], line: str) -> None:
        """Tell `line` once, and again in a while where the job still waits."""
        if line != self._told:
            progress(line)
        elif self.seconds - self._told_at >= REMIND_SECONDS:
            progress(f"{line}; for {self.seconds:.0f} s now")
        else:
            return
        self._told, self._told_at = line, self.seconds

    def end(self) -> None:
        """Raises LaunchError where it has waited long enough."""
        if self.hindered > CANNOT_START_SECONDS:
            raise LaunchError(
                f"job {self.number} gets no further: {self._why}",
                f"look there: systemctl status slurmd, journalctl -u slurmd; once {fold(self.obstacles)} "
                "is idle again, run the burn-in again",
            )
        if self.unstarted > self.most:
            raise LaunchError(
                f"job {self.number} had not started after {self.unstarted:.0f} s: {self._why}",
                "other jobs on the nodes? see squeue; or allow more time: --timeout",
            )

    def __str__(self) -> str:
        most = CANNOT_START_SECONDS if self.obstacles else self.most
        bound = "" if self.state.started else f"; waiting for {most:.0f} s at most"
        return f"job {self.number} is {self._why}{bound}"

    @property
    def _why(self) -> str:
        return "; ".join(
            [str(self.state), *(f"{name} is {why}" for name, why in list(self.obstacles.items())[:SHOWN])]
        )


class Launcher:
    """Burn-in jobs through the head's Slurm; `run` executes as root on the head."""

    def __init__(
        self,
        run: acceptance.Run,
        user: str,
        progress: Callable[[str], None],
        *,
        stop: threading.Event,
    ) -> None:
        """`stop` asks to end: a flag, because an exception in mid-command would upset the shell behind `run`."""
        self._run = run
        self._user = user
        self.progress = progress
        self._stop = stop

    def pause(self, seconds: float) -> None:
        """Sleep; raises KeyboardInterrupt when asked to end."""
        if self._stop.wait(seconds):
            raise KeyboardInterrupt

    # Nodes

    def close_leftovers(self, nodes: Collection[str]) -> None:
        """Drain what a crashed burn-in on any of `nodes` left reserved, then delete its reservation.

        Raises LaunchError while a job still runs there: that is another burn-in.
        """
        leftovers = parse_reservations(self._ask(_RESERVATIONS))
        for reservation, reserved in leftovers.items():
            if not set(reserved) & set(nodes):
                continue
            running = self._ask(_jobs_in(reservation)).split("\n")[0]
            if running.strip():
                raise LaunchError(
                    f"another burn-in runs on {slurm_fold(reserved)}: job {running} in {reservation}",
                    f"wait for it, or end it: scancel {running.split()[0]}",
                )
            self.progress(f"an earlier burn-in was interrupted on {slurm_fold(reserved)}: closing its nodes")
            acceptance.quarantine(self._run, reserved, "burn-in was interrupted")
            self._ask(f"scontrol delete ReservationName={quote(reservation)}")

    def reserve(self, nodes: Sequence[str]) -> str:
        """Keep `nodes` for the burn-in alone, without end; returns the reservation's name."""
        name = f"{RESERVATION}-{secrets.token_hex(4)}"
        self._ask(
            f"scontrol create reservation ReservationName={name} StartTime=now Duration=UNLIMITED "
            f"Users={quote(self._user)} Nodes={quote(slurm_fold(nodes))} Flags=IGNORE_JOBS"
        )
        return name

    def release(self, reservation: str) -> None:
        """Delete a reservation; its nodes are open to jobs from then on unless they are drained."""
        self._ask(f"scontrol delete ReservationName={quote(reservation)}")

    def partition(self, nodes: Sequence[str]) -> str:
        """A partition that all `nodes` are in."""
        of_node = parse_partitions(self._ask(f"scontrol show node -o {quote(slurm_fold(nodes))}"))
        common = set.intersection(*(set(of_node.get(node, ())) for node in nodes))
        if not common:
            listed = "; ".join(f"{node}: {','.join(of_node.get(node, ())) or 'none'}" for node in nodes)
            raise LaunchError(
                f"no partition has all of {slurm_fold(nodes)} ({listed})",
                "run the burn-in for the nodes of one partition at a time: --limit",
            )
        return min(common)

    def leaf_switches(self, nodes: Sequence[str]) -> dict[str, str]:
        """Node -> the switch it hangs on, where Slurm was told (topology.conf); none otherwise."""
        answer = self._run("scontrol show topology", timeout=60)
        if answer.rc != 0:
            self.progress("Slurm knows no topology: switches are told apart by measurements alone")
            return {}
        known = parse_topology(answer.stdout)
        return {node: known[node] for node in nodes if node in known}

    # Job

    def prepare(self, root: str, addresses: Mapping[str, str]) -> str:
        """Make this run's folder below `root` with the program in it; returns its path."""
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        directory = f"{root}/{name}"
        self._ask(
            f"set -e; mkdir -p {quote(root)}; "
            f"install -d -m 700 -o {quote(self._user)} {quote(directory)} {quote(f'{directory}/ranks')}"
        )
        self._put(f"{directory}/burnin.pyz", archive())
        self._put(f"{directory}/addresses.json", json.dumps(dict(addresses)).encode())
        return directory

    def submit(self, job: Job) -> str:
        """Hand the job to Slurm; returns its number."""
        command = f"cd {quote(job.directory)} && sbatch --parsable"
        if self._user != "root":
            command = f"cd {quote(job.directory)} && runuser -u {quote(self._user)} -- sbatch --parsable"
        answer = self._run(command, stdin=batch_script(job).encode(), timeout=60)
        number = answer.stdout.strip().split(";")[0]
        if answer.rc != 0 or not number.isdigit():
            said = (answer.stderr or answer.stdout).strip() or f"exit {answer.rc}"
            advice = None
            if "ccount" in said:
                advice = f"give {self._user} an account: sacctmgr add user {self._user} account=NAME"
            raise LaunchError(f"sbatch refused the burn-in: {said}", advice)
        return number

    def follow(self, number: str, job: Job, wait: float) -> Outcome:
        """Wait for the job's end, passing its lines on, and why it does not run.

        It is cancelled when interrupted, when it has not started within `wait` seconds, or within CANNOT_START_SECONDS
        where Slurm calls its nodes unusable, and when Slurm does not end it at its limit.
        """
        try:
            state, log = self._watch(number, job, wait)
        except LaunchError as error:
            try:
                self.cancel(number)
            except StillRunning as still:
                raise StillRunning(f"{error}; {still}", still.advice) from error
            raise
        except BaseException:
            self.cancel(number)
            raise
        answer = self._run(f"cat {quote(f'{job.directory}/result.json')}", timeout=60)
        return Outcome(number, state, answer.stdout if answer.rc == 0 else None, job.directory, log)

    def cancel(self, number: str) -> None:
        """Cancel the job and see it gone."""
        self.progress(f"cancelling job {number}")
        self._ask(f"scancel {number}")
        deadline = time.monotonic() + CANCEL_SECONDS
        while True:
            state = self._state(number)
            if state is not None and state.final:
                return
            if time.monotonic() > deadline:
                raise StillRunning(
                    f"job {number} is still {state.state if state else 'unknown'} {CANCEL_SECONDS:.0f} s after scancel",
                    f"look at slurmd on its nodes; the nodes stay reserved ({RESERVATION}-...)",
                )
            time.sleep(1.0)

    def _watch(self, number: str, job: Job, wait: float) -> tuple[JobState, list[str]]:
        heard = looked = time.monotonic()
        log: list[str] = []
        waiting = _Waiting(number, job, wait)
        running = 0.0
        while True:
            state = self._state(number, log, f"{job.directory}/job.log")
            now = time.monotonic()
            spent, looked = now - looked, now
            if state is None:
                if now - heard > SLURM_SILENT_SECONDS:
                    raise LaunchError(
                        f"Slurm does not tell the state of job {number}", "is slurmctld running?"
                    )
            else:
                heard = now
                if state.final:
                    self._state(number, log, f"{job.directory}/job.log")  # lines that came with the end
                    return state, log
                if state.waits:
                    waiting.add(spent, state)
                    self._look_at_wait(waiting)
                else:
                    waiting.tell(self.progress, f"job {number} is {state}")
                running += spent if state.started else 0.0
                if running > 60 * job.minutes + CANCEL_SECONDS:
                    raise LaunchError(
                        f"job {number} was still {state} after {running:.0f} s, beyond its limit of {job.minutes} min",
                        "look at slurmctld and at slurmd on its nodes",
                    )
            self.pause(POLL_SECONDS)

    def _look_at_wait(self, waiting: _Waiting) -> None:
        """Tell why a job waits; raises LaunchError once it has waited long enough."""
        if waiting.stale:
            try:
                waiting.take(acceptance.states(self._run))
            except acceptance.SlurmError as error:
                self.progress(f"the nodes' states cannot be told: {error}")
        waiting.tell(self.progress, str(waiting))
        waiting.end()

    def _state(self, number: str, log: list[str] | None = None, path: str = "") -> JobState | None:
        """The job's state, and the log's new whole lines; None when Slurm cannot tell at the moment."""
        command = f"squeue -h -t all -j {number} -o '%T|%r'"
        if log is not None:
            start = len(log) + 1
            command += (
                f"; rc=$?; echo; echo '{_LOG_MARK}'; "
                f"if [ -r {quote(path)} ]; then tail -n +{start} {quote(path)}; fi; exit $rc"
            )
        answer = self._run(command, timeout=60)
        queue, _, text = answer.stdout.partition(f"{_LOG_MARK}\n")
        if log is not None:
            for line in text.split("\n")[:-1]:
                log.append(line)
                self.progress(line)
        if answer.rc == 0 and (state := parse_queue(queue)) is not None:
            return state
        if answer.rc == 0 or "Invalid job id" in answer.stderr:
            # slurmctld forgets finished jobs after MinJobAge
            answer = self._run(f"sacct -X -n -P -j {number} -o State,ExitCode", timeout=60)
            return (parse_accounting(answer.stdout) if answer.rc == 0 else None) or FORGOTTEN
        return None

    def _put(self, path: str, content: bytes) -> None:
        self._ask(f"umask 022; cat > {quote(path)}", stdin=content)

    def _ask(self, command: str, stdin: bytes | None = None) -> str:
        answer = self._run(command, stdin=stdin, timeout=60)
        if answer.rc != 0:
            said = (answer.stderr or answer.stdout).strip() or f"exit {answer.rc}"
            raise LaunchError(f"on the head: {command}: {said}")
        return answer.stdout
