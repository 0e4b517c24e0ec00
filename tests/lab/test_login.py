"""A login node, and a partition with a quality of service: what people meet before their first job."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import yaml

from provision.components.slurm import acceptance
from provision.components.slurm.exports import AWAITING, FETCHED
from provision.engine.remote import Output
from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.checking import HEAD, WORKER, hidden
from tests.lab.cluster import OTHER, Cluster, brought_up, changed, try_case

CASE = hidden("slurm-login", f"echo '# mine' >>{FETCHED}/slurm.conf", "/usr/bin/scontrol", node=OTHER)
AS_ALICE = "cd /home/alice && runuser -u alice -- timeout 60"


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    address = {name: lab.node(name).address for name in (HEAD, WORKER, OTHER)}
    gpu = {"model": "h100-sxm", "count": 2}
    train = {"name": "train", "groups": ["gpu"], "qos": "gold"}
    document = {
        "cluster": "lab",
        "access": {"user": "ops", "ssh_config": str(lab.paths.ssh_config), "host_keys": "strict"},
        "groups": {
            "head": {"hosts": HEAD, "addresses": address[HEAD], "roles": ["head"]},
            "gpu": {"hosts": WORKER, "addresses": address[WORKER], "roles": ["worker"], "gpu": gpu},
            "login": {"hosts": OTHER, "addresses": address[OTHER], "roles": ["login"], "gpu": gpu},
        },
        "networks": {"management": "10.77.0.0/24"},
        "base": {"users": {"alice": {"uid": 2001}}},
        "storage": {"provider": "glusterfs", "data": "/data/gluster", "scratch": {}},
        "scheduler": {
            "slurm": {
                "partitions": [train, {"name": "long", "groups": ["gpu"]}],
                "qos": [{"name": "gold", "priority": 5, "max_gpus_per_user": 1}],
                "constrain": {"cores": False, "memory": False},
            }
        },
    }
    path = tmp_path_factory.mktemp("login") / "lab.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with brought_up("storage", "munge", "slurm", site=str(path)) as made:
        yield made


def on_head(cluster: Cluster) -> acceptance.Run:
    def run(command: str, stdin: bytes | None = None, timeout: float = 60) -> Output:
        return cluster.run(HEAD, command, timeout)

    return run


def test_the_first_slurmctld_meets_a_quality_that_is_there_and_nodes_that_are_drained(
    cluster: Cluster,
) -> None:
    state = acceptance.states(on_head(cluster))
    assert set(state) == {WORKER}
    assert state[WORKER].reason == AWAITING
    assert not state[WORKER].usable
    assert changed(cluster.apply()) == {}


def test_people_run_jobs_from_the_login_node(cluster: Cluster) -> None:
    assert acceptance.admit(on_head(cluster), [WORKER]) == {}
    assert cluster.must(OTHER, f"{AS_ALICE} srun -t1 hostname") == f"{WORKER}\n"
    cluster.must(OTHER, f"{AS_ALICE} sbatch -W -t1 -o out.txt --wrap hostname")
    assert cluster.must(OTHER, "cat /home/alice/out.txt") == f"{WORKER}\n"
    ranks = "echo $PMIX_RANK ${PMIX_NAMESPACE:+in} ${PMIX_SERVER_URI41:+reachable}"
    said = cluster.must(OTHER, f"{AS_ALICE} srun -t1 -n2 sh -c '{ranks}'")
    assert sorted(said.splitlines()) == ["0 in reachable", "1 in reachable"]
    deadline = time.monotonic() + 30
    accounted = "sacct -X -n -P -u alice -o state"
    while set(told := cluster.must(OTHER, accounted).split()) != {"COMPLETED"}:
        assert time.monotonic() < deadline, told
        time.sleep(0.5)


def test_a_quality_can_be_asked_for_and_its_limit_holds(cluster: Cluster) -> None:
    assert cluster.must(OTHER, f"{AS_ALICE} srun -t1 -p long --qos=gold -G1 hostname") == f"{WORKER}\n"
    cluster.must(OTHER, f"{AS_ALICE} sbatch -t1 -p long --qos=gold -G2 -o /dev/null --wrap hostname")
    reason = f"{AS_ALICE} squeue -h -o %r"
    deadline = time.monotonic() + 30
    while (why := cluster.must(OTHER, reason).strip()) != "QOSMaxGRESPerUser":
        assert time.monotonic() < deadline, why
        time.sleep(0.5)
    cluster.must(OTHER, f"{AS_ALICE} scancel -u alice")


def test_fail_and_unknown_are_told_apart(cluster: Cluster) -> None:
    try_case(cluster, CASE)


def test_a_login_node_without_its_head_says_so(cluster: Cluster) -> None:
    cluster.must(HEAD, "systemctl stop slurmctld")
    try:
        found = cluster.found("slurm-login", OTHER)
    finally:
        cluster.must(HEAD, "systemctl start slurmctld")
    assert (found.verdict, found.read) == (Verdict.FAIL, f"{HEAD} DOWN")
