"""An isolation as jobs, and what follows from it for the verdicts. Slurm is played by a simulated cluster."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from benchmarks.simulated_cluster import Faults, SimulatedCluster
from provision.burnin import isolate
from provision.burnin.isolation import Conclusion, Experiment, Fault, Kind, Measurement, Path
from provision.burnin.judge import Expected, Judgement, judge
from provision.burnin.launch import Job, Launcher, LaunchError, Outcome, batch_script, parse_topology
from provision.burnin.result import BurninResult
from provision.profiles.gpu import Measure
from provision.report.model import Finding, Verdict
from provision.site.models import Fabric
from tests.unit.test_burnin_judge import document
from tests.unit.test_burnin_judge_speed import all_reduce, transports

MODEL = "NVIDIA H100 80GB HBM3"
LIMITS: dict[Measure, float] = {"all_reduce_busbw_gbs": 345.0, "matmul_bf16_tflops": 500.0}
EXPECTED = Expected(8, "h100-sxm", Fabric(kind="infiniband", rails=8))


def result_of(measured: Measurement) -> BurninResult:
    """What the burn-in's program would have written."""
    nodes = measured.experiment.nodes
    gpus = 8 if measured.experiment.gpus is None else len(measured.experiment.gpus)
    size = gpus * len(nodes)
    run = document(MODEL, gpus, len(nodes), transports=transports(size))
    names = dict(zip(dict.fromkeys(rank["host"] for rank in run["ranks"]), nodes, strict=True))
    for rank in run["ranks"]:
        rank["host"] = names[rank["host"]]
    places = [(rank["host"], rank["local_rank"]) for rank in run["ranks"]]
    for row in run["compute"]:
        row["tflops"] = measured.tflops.get(places[row["rank"]], 700.0)
    run["collectives"] = [
        *all_reduce(measured.rate or 0.0, size),
        {**all_reduce(1.0, size)[0], "bytes": 1024},
    ]
    return BurninResult.model_validate({**run, "nodes": list(nodes)})


def experiment_of(job: Job) -> Experiment:
    """The other way of `environment`."""
    variables = dict(job.environment)
    rail = variables.get("NCCL_IB_HCA", "").removeprefix("=") or None
    path = next(
        (path for path in Path if isolate.environment(Experiment(("n",), path)) == variables), Path.ALL
    )
    return Experiment(job.nodes, path, rail, job.gpus)


@dataclass
class Slurm:
    """Runs jobs on the simulated cluster."""

    cluster: SimulatedCluster
    running: dict[str, Job] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    most: int = 0
    stop_at: int | None = None
    started: int = 0

    def submit(self, job: Job) -> str:
        self.started += 1
        busy = {node for other in self.running.values() for node in other.nodes}
        assert busy.isdisjoint(job.nodes), "two experiments on one node"
        self.running[str(self.started)] = job
        self.most = max(self.most, len(self.running))
        return str(self.started)

    def follow(self, number: str, job: Job, wait: float) -> Outcome:
        assert wait > 0
        if self.stop_at is not None and int(number) >= self.stop_at:
            raise KeyboardInterrupt
        del self.running[number]
        (measured,) = self.cluster.run([experiment_of(job)])
        if measured.rate is None:
            raise LaunchError(f"{measured.why}")
        return cast("Outcome", result_of(measured))

    def cancel(self, number: str) -> None:
        del self.running[number]
        self.cancelled.append(number)


def job(experiment: Experiment) -> Job:
    return Job(
        nodes=experiment.nodes,
        gpus_per_node=8,
        minutes=10,
        directory="/shared/burnin/1",
        python="python3",
        reservation="r",
        partition="p",
        parts=isolate.parts(experiment),
        gpus=experiment.gpus,
        environment=tuple(isolate.environment(experiment).items()),
    )


def read(outcome: Any) -> tuple[BurninResult | None, str]:
    return outcome, ""


def isolated(slurm: Slurm) -> tuple[Judgement, Judgement, Conclusion]:
    """The judgement of all nodes at once, the one after the isolation, and what it found."""
    (measured,) = slurm.cluster.run([Experiment(slurm.cluster.nodes)])
    whole = result_of(measured)
    before = judge(whole, dict.fromkeys(slurm.cluster.nodes, EXPECTED), limits=LIMITS)
    assert isolate.wanted(whole, before)

    def run(experiments: Any) -> list[Measurement]:
        jobs = [(each, job(each)) for each in experiments]
        return isolate.run_round(cast("Launcher", slurm), jobs, 60.0, read)

    limits = {"all_reduce_busbw_gbs": {"fail": LIMITS["all_reduce_busbw_gbs"]}}
    lines: list[str] = []
    found = isolate.find(whole, limits, {}, run, lines.append)
    assert any("at the same time" in line for line in lines)
    return before, isolate.settle(before, found), found


def test_the_node_at_fault_fails_alone_and_the_others_pass() -> None:
    slurm = Slurm(SimulatedCluster(Faults(links={("n03", 2): 0.4}), random.Random(1), size=8))
    before, after, found = isolated(slurm)
    assert {node.verdict for node in before.nodes.values()} == {Verdict.FAIL}  # all at once names nobody
    assert [str(fault) for fault in found.faults] == ["link: n03 rail mlx5_2"]
    assert [name for name, node in after.nodes.items() if node.verdict is Verdict.FAIL] == ["n03"]
    assert {node.verdict for name, node in after.nodes.items() if name != "n03"} == {Verdict.PASS}
    assert str(after.nodes["n03"].reason).startswith("link: n03 rail mlx5_2: ")
    assert slurm.most == 4  # pairs ran at the same time
    assert not slurm.running


def test_a_gpu_is_named_by_jobs_on_pairs_of_gpus() -> None:
    slurm = Slurm(SimulatedCluster(Faults(nvlink={("n02", 5): 0.5}), random.Random(1), size=4))
    _, after, found = isolated(slurm)
    assert [str(fault) for fault in found.faults] == ["gpu: n02 GPU 5"]
    assert after.nodes["n02"].verdict is Verdict.FAIL
    assert after.nodes["n01"].verdict is Verdict.PASS


def test_nodes_that_are_slow_alike_stay_failed_and_it_is_said_that_nothing_stands_out() -> None:
    hosts = {f"n{number:02d}": 0.5 for number in range(1, 5)}
    _, after, found = isolated(Slurm(SimulatedCluster(Faults(hosts=hosts), random.Random(1), size=4)))
    assert found.faults == ()
    assert {node.verdict for node in after.nodes.values()} == {Verdict.FAIL}
    assert any(
        finding.check == "isolation" and finding.verdict is Verdict.UNKNOWN for finding in after.findings
    )


def test_a_path_between_switches_fails_no_node() -> None:
    (measured,) = SimulatedCluster(Faults(), random.Random(1), size=4).run(
        [Experiment(("n01", "n02", "n03", "n04"))]
    )
    slow = result_of(Measurement(measured.experiment, {"all_reduce": 300.0}))
    before = judge(slow, dict.fromkeys(measured.experiment.nodes, EXPECTED), limits=LIMITS)
    path = Fault(Kind.LINK, "leaf1 mlx5_0 to leaf2 mlx5_0", ("n01", "n03"), ("short",), own=False)
    after = isolate.settle(before, Conclusion((path,)))
    assert {node.verdict for node in after.nodes.values()} == {Verdict.WARN}
    assert after.verdict is Verdict.FAIL  # the run is not in order, though no node is at fault
    (found,) = [finding for finding in after.findings if finding.check == "isolation-link"]
    assert (found.verdict, found.subject) == (Verdict.FAIL, "leaf1 mlx5_0 to leaf2 mlx5_0")


def test_ctrl_c_cancels_every_job_of_the_round() -> None:
    slurm = Slurm(SimulatedCluster(Faults(), random.Random(1), size=8), stop_at=2)
    pairs = [Experiment((f"n0{number}", f"n0{number + 1}")) for number in (1, 3, 5, 7)]
    with pytest.raises(KeyboardInterrupt):
        isolate.run_round(cast("Launcher", slurm), [(each, job(each)) for each in pairs], 60.0, read)
    assert slurm.cancelled == ["3", "4"]  # 2 is cancelled by follow itself


def test_an_isolation_is_wanted_where_bandwidth_is_short_or_has_no_limit() -> None:
    size = 4 * 8
    fine = BurninResult.model_validate(document(MODEL, 8, 4, collectives=all_reduce(350.0, size)))
    nodes = dict.fromkeys(("n1", "n2", "n3", "n4"), EXPECTED)
    assert not isolate.wanted(fine, judge(fine, nodes, limits=LIMITS))
    assert isolate.wanted(fine, judge(fine, nodes, limits={"all_reduce_busbw_gbs": 400.0}))
    new = BurninResult.model_validate(document("NVIDIA New", 8, 4, collectives=all_reduce(350.0, size)))
    assert isolate.wanted(new, judge(new, nodes))
    alone = BurninResult.model_validate(document(MODEL, 8, 1, collectives=all_reduce(100.0, 8)))
    assert not isolate.wanted(alone, judge(alone, {"n1": EXPECTED}))


def test_what_did_not_end_well_is_no_measurement() -> None:
    pair = Experiment(("n1", "n2"))
    assert isolate.measurement(pair, None, "job 7 ended as TIMEOUT").why == "job 7 ended as TIMEOUT"
    wrong = document(MODEL, 1, 2, collectives=[{**all_reduce(300.0, 2)[0], "wrong": [0, 3]}])
    measured = isolate.measurement(pair, BurninResult.model_validate(wrong), "")
    assert (measured.rate, measured.why) == (None, "all_reduce: 3 wrong elements")
    failed = document(
        MODEL, 1, 2, complete=False, failure={"message": "rank 1 hung", "missing": [], "reported_by": 0}
    )
    assert isolate.measurement(pair, BurninResult.model_validate(failed), "").why == "rank 1 hung"


def test_rails_are_what_all_nodes_have_in_their_own_order() -> None:
    rows = transports(2, devices=[f"mlx5_{rail}:1/IB" for rail in (10, 2, 0)])
    rows[1]["devices"] = ["mlx5_0:1/IB", "mlx5_10:1/IB"]
    two = BurninResult.model_validate(document(MODEL, 1, 2, transports=rows))
    assert isolate.rails(two) == ("mlx5_0", "mlx5_10")
    sockets = document(MODEL, 1, 2, transports=transports(2, network="Socket"))
    assert isolate.rails(BurninResult.model_validate(sockets)) == ()


def test_a_leaf_switch_is_told_apart_by_rail() -> None:
    two = BurninResult.model_validate(document(MODEL, 1, 2, transports=transports(2)))
    known = isolate.cluster(two, {"n1": "leaf1"})
    assert known.switches["n1", "mlx5_3"] == "leaf1 mlx5_3"
    assert ("n2", "mlx5_3") not in known.switches


def test_the_script_sets_what_an_experiment_needs_behind_slurm() -> None:
    text = batch_script(job(Experiment(("n1",), Path.HOST, gpus=(0, 3))))
    assert "#SBATCH --ntasks-per-node=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "env NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0 CUDA_VISIBLE_DEVICES=0,3 python3 " in text
    assert "--parts collectives,compute" in text
    assert "env NCCL_IB_HCA==mlx5_3 python3 " in batch_script(job(Experiment(("n1", "n2"), rail="mlx5_3")))


def test_slurms_topology_names_leaf_switches() -> None:
    text = (
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n3\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=leaf[1-2]\n"
    )
    assert parse_topology(text) == {"n1": "leaf1", "n2": "leaf1", "n3": "leaf2"}
    assert parse_topology("No topology information available\n") == {}


def test_what_was_found_can_be_kept_as_json() -> None:
    fault = Fault(Kind.NIC, "n1 rail mlx5_0", ("n1",), ("gone",))
    assert isolate.told(Conclusion((fault,), None, ("n2",)))["faults"][0]["kind"] == "nic"
    finding = isolate.settle(Judgement(Verdict.PASS, {}, []), Conclusion((fault,))).findings[0]
    assert isinstance(finding, Finding)
    assert finding.check == "isolation-nic"
