"""The agent on real nodes: every fault is found by its check and nothing else moves; Slurm drains, resumes, refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.cluster import Cluster, brought_up
from tests.lab.health_faults import AGENT, CASES, COMPONENTS, STATE, TIMER, Case, attempt, site_file

HEAD, WORKER = "lab-head", "lab-gpu-1"
SLURM = "/usr/local/lib/provision/health-slurm || [ $? = 1 ]"


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with brought_up(*COMPONENTS, site=str(site_file(lab, tmp_path_factory.mktemp("health")))) as cluster:
        lab.inside(WORKER, f"systemctl stop {TIMER}")
        yield cluster
        lab.inside(WORKER, f"systemctl start {TIMER}")


@pytest.fixture
def open_node(cluster: Cluster, lab: Lab) -> Lab:
    """The worker takes jobs, and the agent remembers nothing."""
    lab.inside(WORKER, f"rm -f {STATE} /etc/provision/health.off")
    if "idle" not in state(lab):
        lab.inside(HEAD, f"scontrol update nodename={WORKER} state=resume")
    deadline = (
        time.monotonic() + 240
    )  # "*" is not responding: faults before this left that until slurmctld asks again
    while not state(lab).startswith("idle "):
        assert time.monotonic() < deadline, state(lab)
        time.sleep(2)
    return lab


def state(lab: Lab) -> str:
    return lab.inside(HEAD, f"sinfo -h -N -n {WORKER} -o '%T %E'").strip()


def called(lab: Lab) -> str:
    """What Slurm's health check program says."""
    return lab.inside(WORKER, f"{SLURM} 2>&1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_found_by_its_check_in_time_and_nothing_else_moves(
    cluster: Cluster, lab: Lab, case: Case
) -> None:
    result = attempt(lab, WORKER, case)
    assert result.found, result
    assert not result.false, result
    assert result.good, result


def test_the_component_changes_nothing_when_it_is_applied_again(cluster: Cluster) -> None:
    cluster.must(WORKER, f"systemctl start {TIMER}")
    document = cluster.apply(["health"])
    assert document.verdict is Verdict.PASS
    assert not any(node.changed for node in document.nodes.values())
    assert cluster.found("node-health", WORKER).verdict is Verdict.PASS
    assert cluster.found("health-timer", WORKER).verdict is Verdict.PASS
    cluster.must(WORKER, f"systemctl stop {TIMER}")


def test_a_failing_node_is_drained_with_what_to_do_and_resumed_when_it_is_well(open_node: Lab) -> None:
    open_node.fault("gpu-nvlink-down", WORKER)
    try:
        called(open_node)  # or slurmd a moment before: either way it is drained now
        drained = state(open_node)
    finally:
        open_node.fault("gpu-nvlink-down", WORKER, undo=True)
    assert drained == "drained provision: health: nvlink-count GPU 0: 17 of 18 up, down: 0; drain"
    called(open_node)
    assert state(open_node).startswith("idle")


def test_what_a_person_drained_stays_drained(open_node: Lab) -> None:
    open_node.inside(HEAD, f"scontrol update nodename={WORKER} state=drain reason='swap PSU'")
    assert "WARN scheduler" in called(open_node)
    assert state(open_node) == "drained swap PSU"


def test_unknown_neither_drains_at_once_nor_resumes(open_node: Lab) -> None:
    open_node.fault("empty-library", WORKER)
    try:
        open_node.inside(WORKER, f"rm -f {STATE}")
        open_node.fault("gpu-hang", WORKER)
        open_node.fault("empty-library", WORKER, undo=True)
        for _ in range(2):
            called(open_node)
            assert state(open_node).startswith("idle")
        called(open_node)
        assert state(open_node).startswith("drained provision: health:")
        called(open_node)
        assert state(open_node).startswith("drained")
    finally:
        open_node.fault("gpu-hang", WORKER, undo=True)
    called(open_node)
    assert state(open_node).startswith("idle")


def test_nothing_is_done_while_the_switch_is_pulled(open_node: Lab) -> None:
    open_node.inside(WORKER, "touch /etc/provision/health.off")
    open_node.fault("gpu-nvlink-down", WORKER)
    try:
        assert "FAIL nvlink-count" in called(open_node)
        assert state(open_node).startswith("idle")
    finally:
        open_node.fault("gpu-nvlink-down", WORKER, undo=True)


def test_a_stopped_service_is_started_and_the_node_is_well_at_once(open_node: Lab) -> None:
    open_node.inside(WORKER, "systemctl stop munge")
    said = open_node.inside(WORKER, f"{AGENT} watch 2>&1")
    assert "services: started munge" in said
    assert open_node.inside(WORKER, "systemctl is-active munge").strip() == "active"
    assert "pass: " in said


def test_a_prolog_refuses_a_node_that_fails_and_never_asks_slurmctld(open_node: Lab) -> None:
    assert open_node.inside(WORKER, "/etc/slurm/prolog.d/50-health && echo fine").strip().endswith("fine")
    open_node.fault("gpu-remap-failed", WORKER)
    try:
        refused = open_node.inside(
            WORKER, "PATH=/nowhere:/usr/bin; /etc/slurm/prolog.d/50-health || echo status $?"
        )
    finally:
        open_node.fault("gpu-remap-failed", WORKER, undo=True)
    assert refused.strip().endswith("status 1")
