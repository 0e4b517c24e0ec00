"""Isolation: what is planted in a simulated cluster is named. benchmarks/isolation.py measures how often."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import isolation as benchmark
from benchmarks.simulated_cluster import Faults, SimulatedCluster
from provision.burnin.isolation import (
    Cluster,
    Conclusion,
    Experiment,
    Kind,
    Limits,
    Measurement,
    Path,
    decide,
    disjoint,
    isolate,
    reference,
)

KINDS = [kind for kind in benchmark.KINDS if "0.8 to 0.95" not in kind and "0.45 to 0.8" not in kind]
SEEDS = 200


def simulated(size: int, **faults: Any) -> SimulatedCluster:
    return SimulatedCluster(Faults(**faults), random.Random(1), size=size)


def isolated(size: int, **faults: Any) -> Conclusion:
    cluster = simulated(size, **faults)
    return isolate(cluster.cluster, cluster.limits, 1, cluster.run)[0]


def named(conclusion: Conclusion) -> list[str]:
    return [str(fault) for fault in conclusion.faults]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_in_64_nodes_is_named_and_nothing_else(kind: str) -> None:
    """200 seeds over all kinds; a failure shows its seed."""
    for seed in range(KINDS.index(kind), SEEDS, len(KINDS)):
        tried = benchmark.attempt(benchmark.KINDS[kind], seed)
        print(f"seed {seed}: planted {sorted(tried.planted)}, named {sorted(tried.named)}")
        assert tried.named == tried.planted, seed


def test_without_a_fault_all_at_once_is_all_that_is_run() -> None:
    cluster = simulated(64)
    assert isolate(cluster.cluster, cluster.limits, 1, cluster.run)[0] == Conclusion(proven=cluster.nodes)
    assert (cluster.rounds, cluster.experiments) == (1, 1)


def test_the_same_answers_give_the_same_plan_and_the_same_conclusion() -> None:
    cluster = simulated(16, links={("n05", 2): 0.4})
    conclusion, measured = isolate(cluster.cluster, cluster.limits, 7, cluster.run)
    assert decide(cluster.cluster, cluster.limits, 7, measured) == conclusion
    known: list[Measurement] = []
    answers = {measurement.experiment: measurement for measurement in measured}
    while not isinstance(wanted := decide(cluster.cluster, cluster.limits, 7, known), Conclusion):
        known += [answers[experiment] for experiment in wanted]
    assert wanted == conclusion
    assert {each.experiment for each in known} == set(answers)


def test_another_seed_pairs_other_nodes() -> None:
    cluster = simulated(64, links={("n05", 2): 0.4})
    whole = cluster.run([Experiment(cluster.nodes)])
    pairs = [decide(cluster.cluster, cluster.limits, seed, whole) for seed in (1, 2, 1)]
    assert pairs[0] == pairs[2] != pairs[1]


def test_experiments_of_one_round_share_no_node() -> None:
    a, b, c = (Experiment(nodes) for nodes in (("n1", "n2"), ("n2", "n3"), ("n3", "n4")))
    assert list(disjoint([a, b, c, a])) == [(a, c), (b,)]


def test_the_reference_is_what_the_best_tenth_reaches() -> None:
    assert reference([10.0]) == 10.0
    assert reference([5.0] * 8 + [10.0] * 2) == 10.0
    assert reference([5.0] * 19 + [10.0]) == 5.0  # one that is too good is no reference for twenty


def test_of_two_nodes_the_link_between_them_is_named() -> None:
    conclusion = isolated(2, links={("n02", 3): 0.5})
    assert named(conclusion) == ["link: n01 to n02, rail mlx5_3"]
    assert set(conclusion.faults[0].nodes) == {"n01", "n02"}


def test_of_one_node_the_gpu_is_named() -> None:
    assert named(isolated(1, nvlink={("n01", 3): 0.5})) == ["gpu: n01 GPU 3"]


def test_the_leftover_of_an_odd_number_of_nodes_is_tried_too() -> None:
    for node in ("n01", "n02", "n03"):
        assert named(isolated(3, links={(node, 0): 0.5})) == [f"link: {node} rail mlx5_0"]


def test_what_all_have_in_common_is_seen_rail_by_rail() -> None:
    conclusion = isolated(64, switches={(0, 3): 0.5, (1, 3): 0.5})
    assert named(conclusion) == ["switch: leaf-0-3", "switch: leaf-1-3"]


def test_nodes_that_are_all_slow_alike_are_blamed_for_nothing() -> None:
    conclusion = isolated(8, hosts={f"n{number:02d}": 0.5 for number in range(1, 9)})
    assert conclusion.faults == ()
    assert conclusion.unexplained is not None
    assert "all_reduce" in conclusion.unexplained
    assert "expected at least 345.6" in conclusion.unexplained


def test_without_a_limit_pairs_are_compared_with_each_other() -> None:
    cluster = simulated(16, links={("n05", 2): 0.4})
    conclusion, _ = isolate(cluster.cluster, Limits(), 1, cluster.run)
    assert "link: n05 rail mlx5_2" in named(conclusion)


def test_a_gpu_that_was_slow_once_is_noted_and_not_named() -> None:
    cluster = simulated(4)

    def run(experiments: tuple[Experiment, ...]) -> list[Measurement]:
        measured = cluster.run(experiments)
        if len(experiments[0].nodes) == 4:
            slow = {**measured[0].tflops, ("n02", 5): 400.0}
            measured[0] = Measurement(measured[0].experiment, measured[0].busbw_gbs, tflops=slow)
        return measured

    conclusion, _ = isolate(cluster.cluster, cluster.limits, 1, run)
    assert conclusion.faults == ()
    assert len(conclusion.notes) == 1
    assert "n02 GPU 5: 400 TFLOP/s" in conclusion.notes[0]


def test_a_node_that_no_experiment_runs_on_is_named_with_the_reason() -> None:
    cluster = simulated(8)

    def run(experiments: tuple[Experiment, ...]) -> list[Measurement]:
        return [
            Measurement(each, why="n03: no route to host")
            if "n03" in each.nodes and len(each.nodes) > 1
            else cluster.run([each])[0]
            for each in experiments
        ]

    conclusion, _ = isolate(cluster.cluster, cluster.limits, 1, run)
    assert named(conclusion) == ["node: n03"]
    assert all("did not run: n03: no route to host" in line for line in conclusion.faults[0].evidence)


def test_without_rails_the_network_of_the_node_is_named() -> None:
    cluster = simulated(8, links={("n03", 0): 0.5})
    plain = Cluster(cluster.nodes, gpus=1)
    conclusion, _ = isolate(plain, cluster.limits, 1, cluster.run)
    assert named(conclusion) == ["link: n03 network"]


def test_an_experiment_says_what_it_is() -> None:
    assert str(Experiment(("n1", "n2"), rail="mlx5_3", attempt=2)) == "n1 with n2, rail mlx5_3, again"
    assert str(Experiment(("n1",), Path.HOST, gpus=(0, 3))) == "n1, P2P off, GPUs 0 and 3"
    assert str(Experiment(("n1", "n2", "n3"))) == "3 nodes at once"


def test_faults_bring_their_evidence() -> None:
    (fault,) = isolated(16, links={("n05", 2): 0.4}).faults
    assert fault.kind is Kind.LINK
    assert fault.nodes == ("n05",)
    assert any("rail mlx5_2: 19" in line and "alike at least 4" in line for line in fault.evidence)
