"""The burn-in job as Slurm gets it, and what is read from Slurm's answers."""

import io
import json
import re
import threading
import zipfile
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from provision.burnin import launch
from provision.burnin.launch import (
    CANNOT_START_SECONDS,
    FORGOTTEN,
    Job,
    JobState,
    Launcher,
    LaunchError,
    StillRunning,
    archive,
    batch_script,
    closed,
    parse_accounting,
    parse_partitions,
    parse_queue,
    parse_reservations,
)
from provision.components.slurm.acceptance import SlurmError
from provision.engine.remote import Output

JOB = Job(
    nodes=("gpu-2", "gpu-1"),
    gpus_per_node=8,
    minutes=15,
    directory="/shared/burnin/run-1",
    python="/opt/torch/bin/python3",
    reservation="provision-burnin-1a2b",
    partition="train",
)
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=provision-burnin
#SBATCH --reservation=provision-burnin-1a2b
#SBATCH --partition=train
#SBATCH --nodes=2
#SBATCH --nodelist=gpu-[1-2]
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=15
#SBATCH --no-requeue
#SBATCH --output=/shared/burnin/run-1/job.log
#SBATCH --open-mode=append
cpus=$((SLURM_CPUS_ON_NODE / 8))
exec srun --kill-on-bad-exit=0 --wait=0 --distribution=block --mpi=none \\
  --cpus-per-task="$((cpus > 0 ? cpus : 1))" \\
  /opt/torch/bin/python3 /shared/burnin/run-1/burnin.pyz \\
  --out /shared/burnin/run-1/result.json --raw /shared/burnin/run-1/ranks \
--addresses /shared/burnin/run-1/addresses.json --device cuda --level quick
"""


def test_the_batch_script_asks_for_whole_nodes_and_one_rank_a_gpu():
    assert batch_script(JOB) == SCRIPT


def test_without_gpus_there_is_one_rank_a_node_on_the_cpu():
    script = batch_script(
        Job(**{**vars(JOB), "gpus_per_node": 0, "run_minutes": 2.5, "inject": "flip-bit:1"})
    )
    assert "gpus-per-node" not in script
    assert "--ntasks-per-node=1\n" in script
    assert "--device cpu --level quick --minutes 2.5 --inject flip-bit:1\n" in script


def test_what_a_shell_would_take_apart_is_quoted():
    script = batch_script(Job(**{**vars(JOB), "python": "/opt/my torch/python"}))
    assert "  '/opt/my torch/python' /shared" in script


def test_the_archive_is_the_same_for_the_same_program_and_runs_by_itself():
    assert archive() == archive()
    names = zipfile.ZipFile(io.BytesIO(archive())).namelist()
    assert "__main__.py" in names
    assert "workload/strategies.py" in names


def test_squeue_gives_state_and_reason():
    assert parse_queue("PENDING|Resources\n") == JobState("PENDING", "Resources")
    assert parse_queue("\nRUNNING|None\n") == JobState("RUNNING", "")
    assert parse_queue("\n") is None


def test_states_that_a_job_never_leaves_are_final():
    assert JobState("NODE_FAIL").final
    assert FORGOTTEN.final
    assert not JobState("COMPLETING").final


def test_sacct_gives_the_state_without_who_cancelled():
    assert parse_accounting("CANCELLED by 0|0:15\n") == JobState("CANCELLED", "exit 0:15")
    assert parse_accounting("COMPLETED|0:0\n") == JobState("COMPLETED", "")
    assert parse_accounting("") is None


def test_only_our_own_reservations_are_found():
    text = (
        "ReservationName=provision-burnin-1a StartTime=2026-01-01T00:00:00 Nodes=gpu-[1-2] NodeCnt=2 Users=root\n"
        "ReservationName=class StartTime=2026-01-01T00:00:00 Nodes=gpu-3 NodeCnt=1 Users=alice\n"
        "ReservationName=provision-burnin-2b Nodes=(null) NodeCnt=0\n"
    )
    assert parse_reservations(text) == {"provision-burnin-1a": ("gpu-1", "gpu-2"), "provision-burnin-2b": ()}
    assert parse_reservations("No reservations in the system\n") == {}


def test_what_a_burn_in_left_closed_is_told_from_one_that_runs_and_from_a_persons_drain():
    def run(command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        if command.startswith("squeue"):
            return Output(0, "7 RUNNING\n" if "burnin-2b" in command else "", "")
        if "reservation" in command:
            left = "ReservationName=provision-burnin-1a Nodes=gpu-1\n"
            return Output(0, f"{left}ReservationName=provision-burnin-2b Nodes=gpu-2\n", "")
        reasons = {"gpu-3": "provision: awaiting acceptance", "gpu-4": "bad fan", "gpu-5": "provision: old"}
        nodes = [
            {"name": name, "state": ["IDLE"] if name == "gpu-5" else ["IDLE", "DRAIN"], "reason": reason}
            for name, reason in reasons.items()
        ]
        return Output(0, json.dumps({"nodes": nodes}), "")

    assert closed(run) == {
        "gpu-1": "reserved by a burn-in that was interrupted: provision-burnin-1a",
        "gpu-3": "provision: awaiting acceptance",
    }


def test_what_cannot_be_asked_is_not_taken_for_open():
    with pytest.raises(SlurmError, match="Unable to contact"):
        closed(lambda *_, **__: Output(1, "", "Unable to contact slurm controller\n"))


def test_partitions_of_each_node():
    text = (
        "NodeName=gpu-1 Arch=x86_64 State=IDLE+DRAIN Partitions=train,debug BootTime=x Reason=provision: a=b\n"
        "NodeName=gpu-2 State=DOWN Reason=x\n"
    )
    assert parse_partitions(text) == {"gpu-1": ("train", "debug"), "gpu-2": ()}


class Waiting:
    """Slurm with job 7 on a clock of its own: `queue` and `nodes` tell, by the second, what it answers."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        queue: Callable[[float], str],
        nodes: Callable[[float], dict[str, tuple[str, str]]] = lambda now: {},
    ) -> None:
        self.now = 0.0
        self.queue = queue
        self.nodes = nodes
        self.asked: list[str] = []
        self.told: list[str] = []
        self.cancelled = False
        self.ends = True  # when it is cancelled
        self.launcher = Launcher(self, "root", self.told.append, stop=threading.Event())
        monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(self.launcher, "pause", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 100_000, "it waits for ever"

    def __call__(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        self.asked.append(command)
        if command.startswith("scancel"):
            self.cancelled = True
            return Output(0, "", "")
        if command.startswith("squeue"):
            said = "CANCELLED|None" if self.cancelled and self.ends else self.queue(self.now)
            return Output(0, f"{said}\n\n@@ log\n", "")
        if command.startswith("scontrol show nodes"):
            states = dict.fromkeys(JOB.nodes, ("IDLE", "")) | self.nodes(self.now)
            entries = [
                {"name": name, "state": word.split("+"), "reason": reason, "version": "24"}
                for name, (word, reason) in states.items()
            ]
            return Output(0, json.dumps({"nodes": entries}), "")
        assert command.startswith("cat "), command
        return Output(1, "", "no such file")


DOWN = {"gpu-1": ("DOWN+NOT_RESPONDING", "Not responding")}


def test_a_job_on_a_node_that_is_down_says_so_and_is_given_up(monkeypatch: pytest.MonkeyPatch):
    reason = "PENDING|ReqNodeNotAvail, UnavailableNodes:gpu-1"
    slurm = Waiting(monkeypatch, lambda now: reason, lambda now: DOWN)
    with pytest.raises(LaunchError, match=r"job 7 gets no further: pending .*gpu-1 is down") as caught:
        slurm.launcher.follow("7", JOB, 900.0)
    assert "slurmd" in str(caught.value.advice)
    assert CANNOT_START_SECONDS < slurm.now < CANNOT_START_SECONDS + 30
    assert slurm.cancelled
    assert "gpu-1 is down+not_responding: Not responding; waiting for 180 s at most" in slurm.told[0]
    assert any(re.search(r"; for 6\d s now$", line) for line in slurm.told), (
        "a person sees that it still waits"
    )


def test_a_job_whose_node_is_lost_as_it_starts_is_given_up_once_slurm_has_taken_it_back(
    monkeypatch: pytest.MonkeyPatch,
):
    slurm = Waiting(
        monkeypatch,
        lambda now: "COMPLETING|Prolog" if now < 300 else "PENDING|BeginTime",  # 300: SlurmdTimeout
        lambda now: DOWN,
    )
    with pytest.raises(LaunchError, match=r"job 7 gets no further: pending \(BeginTime: .*gpu-1 is down"):
        slurm.launcher.follow("7", JOB, 900.0)
    assert slurm.told[0] == "job 7 is completing (Prolog); gpu-1 is down+not_responding: Not responding"
    assert slurm.now < 300 + CANNOT_START_SECONDS + 30


def test_a_job_that_does_not_end_is_told_with_why_it_was_cancelled(monkeypatch: pytest.MonkeyPatch):
    slurm = Waiting(monkeypatch, lambda now: "COMPLETING|None", lambda now: DOWN)
    slurm.ends = False
    with pytest.raises(StillRunning, match=r"beyond its limit of 15 min; job 7 is still COMPLETING"):
        slurm.launcher.follow("7", JOB, 900.0)


def test_a_node_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    def queue(now: float) -> str:
        return "PENDING|Resources" if now < 170 else "RUNNING|None" if now < 300 else "COMPLETED|None"

    slurm = Waiting(monkeypatch, queue, lambda now: DOWN if now < 150 else {})
    assert slurm.launcher.follow("7", JOB, 900.0).state == JobState("COMPLETED")
    assert not slurm.cancelled
    assert slurm.told[-1] == "job 7 is running"


def test_a_start_that_slurm_puts_off_is_explained_and_bounded(monkeypatch: pytest.MonkeyPatch):
    """A launch that fails is tried again after two minutes, each time for a moment."""
    slurm = Waiting(
        monkeypatch, lambda now: "CONFIGURING|None" if now % 120 < 4 and now else "PENDING|BeginTime"
    )
    with pytest.raises(LaunchError, match="job 7 had not started after 9") as caught:
        slurm.launcher.follow("7", JOB, 900.0)
    assert "BeginTime: Slurm could not start it on its nodes" in str(caught.value)
    assert slurm.now < 1000
    questions = sum(command.startswith("scontrol show nodes") for command in slurm.asked)
    assert questions < 40, "slurmctld is not asked for all nodes at every look"


def test_a_job_may_wait_for_its_start_and_run_to_its_limit(monkeypatch: pytest.MonkeyPatch):
    def queue(now: float) -> str:
        if now < 890:
            return "PENDING|Resources"
        return "RUNNING|None" if now < 1780 else "COMPLETING|None" if now < 1830 else "TIMEOUT|None"

    slurm = Waiting(monkeypatch, queue)
    assert slurm.launcher.follow("7", JOB, 900.0).state.state == "TIMEOUT", "an epilog takes its time, too"
    assert "job 7 is completing" in slurm.told
    overdue = Waiting(monkeypatch, lambda now: "RUNNING|None")
    with pytest.raises(LaunchError, match="beyond its limit of 15 min"):
        overdue.launcher.follow("7", JOB, 900.0)
    assert overdue.cancelled


def test_node_states_that_cannot_be_told_do_not_end_the_wait(monkeypatch: pytest.MonkeyPatch):
    def unasked(run: object) -> None:
        raise SlurmError("Unable to contact slurm controller")

    slurm = Waiting(monkeypatch, lambda now: "PENDING|Resources" if now < 100 else "COMPLETED|None")
    monkeypatch.setattr(launch.acceptance, "states", unasked)
    assert slurm.launcher.follow("7", JOB, 900.0).state.final
    assert "the nodes' states cannot be told: Unable to contact slurm controller" in slurm.told
