"""The order around a burn-in: no way out leaves a node open to users that was not. Slurm is played by a class."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from provision.burnin import run as module
from provision.burnin.run import Options, closing_reason, logged_in_to, run_burnin
from provision.cli.verbs import register
from provision.components.slurm.acceptance import NodeState
from provision.engine.journal import Journal
from provision.engine.remote import Output
from provision.report.model import NodeResult, Verdict
from provision.report.store import state_directory
from provision.site.models import Scheduler, Site, SiteFile
from tests.unit.test_burnin_judge import document
from tests.unit.test_burnin_judge_speed import transports

AWAITING = "provision: awaiting acceptance"


class Head:
    """As much of a head as the burn-in talks to; checks that a node is never open to users by mistake."""

    def __init__(
        self, reasons: dict[str, str | None], result: str | None, job_state: str = "COMPLETED"
    ) -> None:
        self.reasons = reasons  # node -> why it is drained; None: open
        self.reserved: dict[str, list[str]] = {}
        self.jobs: dict[str, str] = {}
        self.result = result
        self.job_state = job_state
        self.scripts: list[str] = []
        self.asked: list[str] = []
        self.refuse_after: int | None = None  # jobs

    def __call__(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        self.asked.append(command)
        for pattern, answer in (
            (r"scontrol show reservation", self._reservations),
            (r"scontrol show nodes --json", self._nodes),
            (r"scontrol create reservation ReservationName=(\S+) .*Nodes=(\S+) ", self._reserve),
            (r"scontrol delete ReservationName=(\S+)", self._delete),
            (r"scontrol update nodename=(\S+) state=resume", self._resume),
            (r"scontrol update nodename=(\S+) state=drain reason='(.*)'", self._drain),
            (r"scontrol show node -o", self._partitions),
            (r"scontrol show topology", lambda: "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"),
            (r"sbatch --parsable", lambda: self._submit(stdin)),
            (r"scancel (\d+)", self._cancel),
            (r"squeue -h -R (\S+)", lambda name: "\n".join(f"{n} RUNNING" for n in self.jobs if name)),
            (r"squeue -h -t all -j (\d+)", lambda number: f"{self.jobs[number]}|None\n"),
            (r"cat .*result.json", lambda: self.result),
            (r"mkdir -p|cat > ", lambda: ""),
        ):
            if match := re.search(pattern, command):
                text = answer(*match.groups())
                return Output(0, text, "") if text is not None else Output(1, "", "no such file")
        raise AssertionError(f"the head was asked something new: {command}")

    def _reservations(self) -> str:
        return "".join(
            f"ReservationName={name} Nodes={','.join(nodes)}\n" for name, nodes in self.reserved.items()
        )

    def _nodes(self) -> str:
        return json.dumps(
            {
                "nodes": [
                    {"name": name, "state": ["IDLE", *["DRAIN"] * bool(why)], "reason": why or "", "version": "24"}
                    for name, why in self.reasons.items()
                ]
            }
        )  # fmt: skip

    def _reserve(self, name: str, nodes: str) -> str:
        self.reserved[name] = [f"n{number}" for number in re.findall(r"\d", nodes.split("n", 1)[1])]
        return "created"

    def _delete(self, name: str) -> str:
        del self.reserved[name]
        return ""

    def _named(self, nodes: str) -> list[str]:
        return [
            name
            for name in self.reasons
            if re.search(rf"\b{name}\b", nodes) or re.search(rf"\[.*{name[1]}.*\]", nodes)
        ]

    def _resume(self, nodes: str) -> str:
        for name in self._named(nodes):
            assert any(name in reserved for reserved in self.reserved.values()), (
                f"{name} was open to everybody"
            )
            self.reasons[name] = None
        return ""

    def _drain(self, nodes: str, reason: str) -> str:
        for name in self._named(nodes):
            self.reasons[name] = reason
        return ""

    def _partitions(self) -> str:
        return "".join(f"NodeName={name} Partitions=all\n" for name in self.reasons)

    def _submit(self, script: bytes | None) -> str | None:
        assert script is not None
        if len(self.scripts) == self.refuse_after:
            return None
        self.scripts.append(script.decode())
        self.jobs["7"] = self.job_state
        return "7\n"

    def _cancel(self, number: str) -> str:
        self.jobs[number] = "CANCELLED"
        return ""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    text = {
        "cluster": "small",
        "groups": {
            "head": {"hosts": "h", "roles": ["head"]},
            "gpu": {"hosts": "n[1-2]", "addresses": "10.0.0.[1-2]", "roles": ["worker"]},
        },
        "scheduler": {"slurm": {}},
    }
    return Site.from_file(SiteFile.model_validate(text), tmp_path / "small.yml")


def test_without_slurm_it_logs_in_to_the_nodes_themselves(site: Site) -> None:
    nodes = site.with_role("worker")
    assert logged_in_to(site, nodes) == [site.head]
    alone = Site.from_file(site.file.model_copy(update={"scheduler": Scheduler()}), site.path)
    assert logged_in_to(alone, nodes) == [alone.head, *nodes]


def burn_in(site: Site, head: Head, *, admit: bool = False, stop: bool = False):
    flag = threading.Event()
    if stop:
        flag.set()
    lines: list[str] = []
    options = Options(admit=admit)
    return run_burnin(site, list(site.nodes.values()), head, options, progress=lines.append, stop=flag)


def drained(reason: str = AWAITING) -> dict[str, str | None]:
    return {"n1": reason, "n2": reason}


GOOD = json.dumps(document())


def test_nodes_that_pass_are_opened_when_they_may_be(site: Site):
    head = Head(drained(), GOOD)
    result = burn_in(site, head, admit=True)
    assert result.verdict is Verdict.PASS
    assert head.reasons == {"n1": None, "n2": None}
    assert {node.state for node in result.nodes.values()} == {"admitted"}
    assert head.reserved == {}
    assert "--nodelist=n[1-2]\n" in head.scripts[0]


def test_without_admission_they_wait_on(site: Site):
    head = Head(drained(), GOOD)
    result = burn_in(site, head)
    assert head.reasons == drained()
    assert {node.state for node in result.nodes.values()} == {"burned-in"}


def test_a_node_that_fails_is_kept_out_and_the_other_admitted(site: Site):
    bad = document()
    bad["collectives"][0]["wrong"] = [0, 5]
    head = Head(drained(), json.dumps(bad))
    result = burn_in(site, head, admit=True)
    assert head.reasons["n1"] is None
    assert head.reasons["n2"] == "provision: burn-in failed: all_reduce: 5 wrong elements on rank 1 (n2)"
    assert result.nodes["n2"].state == "quarantined"


def test_no_result_opens_nothing(site: Site):
    head = Head(drained(), None, job_state="TIMEOUT")
    result = burn_in(site, head, admit=True)
    assert result.verdict is Verdict.UNKNOWN
    assert all(
        str(reason).startswith("provision: burn-in could not be told: job 7 ended")
        for reason in head.reasons.values()
    )
    assert head.reserved == {}


def test_a_node_that_a_person_drained_is_left_alone(site: Site):
    head = Head({"n1": AWAITING, "n2": "bad fan"}, json.dumps(document(nodes=1)))
    result = burn_in(site, head, admit=True)
    assert head.reasons == {"n1": None, "n2": "bad fan"}
    assert result.nodes["n2"].verdict is Verdict.UNKNOWN
    assert "bad fan" in str(result.nodes["n2"].reason)
    assert "--nodelist=n1\n" in head.scripts[0]


def test_an_interrupt_cancels_the_job_and_closes_the_nodes_again(site: Site):
    head = Head(drained(), None, job_state="RUNNING")
    result = burn_in(site, head, admit=True, stop=True)
    assert result.details["interrupted"]
    assert {node.verdict for node in result.nodes.values()} == {Verdict.UNKNOWN}
    assert {node.reason for node in result.nodes.values()} == {"interrupted"}
    assert head.jobs == {"7": "CANCELLED"}
    assert head.reasons == drained()
    assert head.reserved == {}


class Interrupting(Head):
    """A head during whose job the admin presses Ctrl-C."""

    name = "h"

    def run(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        answer = self(command, stdin, timeout)
        if "sbatch" in command:
            os.kill(os.getpid(), signal.SIGINT)
        return answer

    def close(self) -> None:
        pass


def test_an_interrupted_burn_in_is_kept_as_an_answer_and_in_the_journal(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    head = Interrupting(drained(), None, job_state="RUNNING")
    monkeypatch.setattr(module, "connect", lambda *_, **__: head)
    monkeypatch.setattr(module.headstate, "keep", lambda *_, **__: None)
    text = {"cluster": "small", "groups": {}, "scheduler": {"slurm": {}}}
    text["groups"] = site.file.model_dump(mode="json", exclude_unset=True)["groups"]
    site.path.write_text(json.dumps(text))
    app = typer.Typer()
    register(app, [])
    answer = CliRunner().invoke(app, ["burnin", str(site.path)])
    assert answer.exit_code == 130, answer.output
    assert head.reasons == drained()
    again = CliRunner().invoke(app, ["report", str(site.path), "--verb", "burnin", "--json"])
    assert again.exit_code == 130
    kept = json.loads(again.stdout)
    assert kept["verdict"] == "unknown"
    assert {node["reason"] for node in kept["nodes"].values()} == {"interrupted"}
    (run,) = Journal(state_directory(site)).runs()
    assert (run["verb"], run["verdict"], run["run"]) == ("burnin", "unknown", kept["details"]["run"])


def test_a_job_that_somebody_cancels_is_told_as_that_whatever_it_left(site: Site):
    stopped = {"message": "rank 0 on n1 was stopped: SIGTERM", "missing": [], "reported_by": 0}
    whole = {**document(nodes=2), "complete": False, "failure": stopped}
    half = {"phases": [{"name": "collectives", "start": 0.1, "end": None}]}
    for left, why in ((whole, f"job 7 was cancelled; {stopped['message']}"), (half, "job 7 was cancelled")):
        head = Head(drained(), json.dumps(left), job_state="CANCELLED")
        result = burn_in(site, head, admit=True)
        assert not any(node.verdict.good for node in result.nodes.values())
        assert why in str(result.nodes["n1"].reason)
        assert "phases" not in str(result.findings)
        assert None not in head.reasons.values()


def test_what_a_crash_left_reserved_is_closed_before_anything_else(site: Site):
    head = Head({"n1": None, "n2": None}, None)
    head.reserved = {"provision-burnin-old": ["n1", "n2"]}
    burn_in(site, head, admit=True)
    first_drain = next(i for i, command in enumerate(head.asked) if "state=drain" in command)
    first_delete = next(i for i, command in enumerate(head.asked) if "scontrol delete" in command)
    assert first_drain < first_delete
    assert all(str(reason).startswith("provision: burn-in") for reason in head.reasons.values())


def test_a_burn_in_that_still_runs_is_not_disturbed(site: Site):
    head = Head({"n1": None, "n2": None}, None)
    head.reserved, head.jobs = {"provision-burnin-old": ["n1", "n2"]}, {"5": "RUNNING"}
    result = burn_in(site, head)
    assert result.verdict is Verdict.UNKNOWN
    assert "another burn-in runs on n[1-2]: job 5" in str(result.nodes["n1"].reason)
    assert head.scripts == []
    assert head.reserved == {"provision-burnin-old": ["n1", "n2"]}


SLOW = json.dumps(
    document(
        "NVIDIA H200",
        1,
        2,
        transports=transports(2, devices=["mlx5_0:1/IB", "mlx5_1:1/IB"], nvls=False),
        environment={"NCCL_NVLS_ENABLE": "0"},
    )
)  # 352 GB/s


def with_gpus(site: Site) -> Site:
    text = site.file.model_dump(exclude_unset=True)
    text["groups"]["gpu"]["gpu"] = {"model": "h200-sxm", "count": 1}
    text["burnin"] = {"limits": {"all_reduce_busbw_gbs": 400.0}}
    return Site.from_file(SiteFile.model_validate(text), site.path)


def test_slow_nodes_are_looked_at_one_rail_after_the_other_behind_the_same_reservation(site: Site):
    head = Head(drained(), SLOW)
    result = burn_in(with_gpus(site), head, admit=True)
    assert [re.findall(r"env (\S+) ", script) for script in head.scripts] == [
        [],
        ["NCCL_IB_HCA==mlx5_0"],
        ["NCCL_IB_HCA==mlx5_1"],
    ]
    assert len({re.findall(r"--reservation=(\S+)", script)[0] for script in head.scripts}) == 1
    assert result.verdict is Verdict.FAIL  # both rails are as fast as each other: nothing stands out
    assert result.details["isolation"]["faults"] == []
    assert "352.0 GB/s, expected at least 400.0" in result.details["isolation"]["unexplained"]
    assert all(str(reason).startswith("provision: burn-in failed") for reason in head.reasons.values())
    assert head.reserved == {}


def test_an_isolation_that_cannot_be_run_leaves_the_judgement_as_it_was(site: Site):
    head = Head(drained(), SLOW)
    head.refuse_after = 1
    result = burn_in(with_gpus(site), head, admit=True)
    assert {node.verdict for node in result.nodes.values()} == {Verdict.FAIL}
    (finding,) = [finding for finding in result.findings if finding.check == "isolation"]
    assert finding.verdict is Verdict.UNKNOWN
    assert "sbatch refused" in str(finding.why)
    assert head.reserved == {}


@pytest.mark.parametrize(
    ("closed", "verdict", "admit", "reason"),
    [
        (True, Verdict.PASS, True, None),
        (True, Verdict.WARN, True, None),
        (True, Verdict.PASS, False, AWAITING),
        (True, Verdict.UNKNOWN, True, "burn-in could not be told: why"),
        (True, Verdict.FAIL, True, "burn-in failed: why"),
        (False, Verdict.PASS, False, None),
        (False, Verdict.UNKNOWN, True, None),
        (False, Verdict.FAIL, False, "burn-in failed: why"),
    ],
)
def test_what_happens_to_a_node(closed: bool, verdict: Verdict, admit: bool, reason: str | None):
    before = NodeState("n1", "IDLE", frozenset({"DRAIN"} if closed else ()), AWAITING if closed else None)
    assert closing_reason(before, NodeResult(verdict=verdict, reason="why"), admit=admit) == reason
