"""Slurm on real nodes: it comes up drained, is admitted, runs jobs, and is mended."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from provision.components.slurm import acceptance
from provision.components.slurm.exports import AWAITING, CONF, ETC, FETCHED, INTRODUCED, USER_ID
from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.checking import HEAD, WORKER, Case, hidden
from tests.lab.cluster import OTHER, Cluster, brought_up, changed, names, try_case

SLURMD = "/usr/sbin/slurmd"
SCONTROL = "/usr/bin/scontrol"
CGROUP, GRES = f"{FETCHED}/cgroup.conf", f"{ETC}/gres.conf"


def answering(option: str, text: str) -> str:
    """slurmd that says something else to `option`: a node whose memory or release is another one."""
    script = f'#!/bin/sh\\n[ "$1" != {option} ] || {{ echo "{text}"; exit; }}\\nexec {SLURMD}.real "$@"\\n'
    return f"mv {SLURMD} {SLURMD}.real; printf '{script}' >{SLURMD}; chmod 755 {SLURMD}"


REAL = f"mv {SLURMD}.real {SLURMD}"
SMALL = "NodeName=x CPUs=1 Boards=1 SocketsPerBoard=1 CoresPerSocket=1 ThreadsPerCore=1 RealMemory=64"
DOWN = f"scontrol update nodename={WORKER} state=down reason=broken"
CASES = [
    hidden("slurmctld-answers", "systemctl stop slurmctld", "/usr/bin/scontrol", node=HEAD),
    hidden("slurm-conf-loaded", f"echo '# mine' >>{CONF}", "/usr/bin/scontrol", node=HEAD),
    hidden("slurm-accounting", "systemctl stop slurmdbd", "/usr/bin/sacctmgr", node=HEAD),
    Case(
        "slurm-files",
        f"echo NodeName={OTHER} Name=gpu Count=7 >>{GRES}",
        f"mv {CONF} {CONF}.away; mkdir {CONF}",
        f"rmdir {CONF}; mv {CONF}.away {CONF}",
        HEAD,
    ),
    hidden("slurm-rest", "systemctl stop slurmrestd", "/usr/bin/curl", node=HEAD),
    hidden("slurm-node", DOWN, "/usr/bin/scontrol", mend=f"scontrol update nodename={WORKER} state=resume"),
    hidden("slurm-user", "usermod -u 64031 slurm", "/usr/bin/id", mend=f"usermod -u {USER_ID} slurm"),
    hidden("slurm-hardware", answering("-C", SMALL), SLURMD, mend=REAL),
    hidden("slurm-version", answering("-V", "slurm 99.05.1"), SLURMD, mend=REAL),
    hidden("slurm-conf-same", f"echo '# mine' >>{FETCHED}/slurm.conf", "/usr/bin/sha256sum"),
    hidden(
        "gpu-isolation", f"sed -i s/ConstrainDevices=yes/ConstrainDevices=no/ {CGROUP}", "/usr/bin/scontrol"
    ),
]


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Iterator[Cluster]:
    with brought_up("storage", "munge", "slurm") as made:
        yield made


def states(cluster: Cluster) -> dict[str, acceptance.NodeState]:
    return acceptance.states(lambda command, stdin=None, timeout=60: cluster.run(HEAD, command, timeout))


def admit(cluster: Cluster) -> dict[str, str]:
    return acceptance.admit(
        lambda command, stdin=None, timeout=60: cluster.run(HEAD, command, timeout), [WORKER, OTHER]
    )


def test_new_nodes_wait_for_their_acceptance(cluster: Cluster) -> None:
    found = states(cluster)
    assert set(found) == {WORKER, OTHER}
    for state in found.values():
        assert state.registered
        assert state.drained
        assert not state.usable
        assert state.reason == AWAITING
    assert cluster.must(HEAD, f"cat {INTRODUCED}").split() == [WORKER, OTHER]
    assert cluster.found("slurm-node", WORKER).verdict is Verdict.PASS


def test_a_second_apply_changes_nothing(cluster: Cluster) -> None:
    assert changed(cluster.apply()) == {}
    assert changed(cluster.plan()) == {}


def test_admitted_nodes_stay_admitted_and_a_persons_drain_stays(cluster: Cluster) -> None:
    assert admit(cluster) == {}
    cluster.must(HEAD, "systemctl restart slurmctld; scontrol reconfigure")
    deadline = time.monotonic() + 60
    while not all(state.usable for state in states(cluster).values()):
        assert time.monotonic() < deadline, states(cluster)
        time.sleep(1)
    cluster.must(HEAD, f"scontrol update nodename={OTHER} state=drain reason='fan is loud'")
    assert admit(cluster) == {OTHER: "idle+drain: fan is loud"}
    assert cluster.found("slurm-node", OTHER).verdict is Verdict.WARN
    assert changed(cluster.apply()) == {}
    assert states(cluster)[OTHER].reason == "fan is loud"
    cluster.must(HEAD, f"scontrol update nodename={OTHER} state=resume")


def test_after_a_power_cut_a_node_is_idle_by_itself_and_one_not_accepted_stays_drained(
    lab: Lab, cluster: Cluster
) -> None:
    cluster.must(HEAD, f"scontrol update nodename={OTHER} state=drain reason='{AWAITING}'")
    cut = int(cluster.must(HEAD, "date +%s"))
    for node in (WORKER, OTHER):
        lab.fault("kill-node", node)
        lab.fault("kill-node", node, undo=True)

    def back(node: str) -> bool:
        state = states(cluster)[node]
        return state.registered and state.boot is not None and state.boot >= cut

    deadline = time.monotonic() + 120
    while not (back(WORKER) and back(OTHER) and states(cluster)[WORKER].usable):
        assert time.monotonic() < deadline, states(cluster)
        time.sleep(1)
    other = states(cluster)[OTHER]
    assert (other.drained, other.reason) == (True, AWAITING)
    assert admit(cluster) == {}


def test_jobs_of_an_ordinary_user_run_and_are_accounted(cluster: Cluster) -> None:
    as_alice = "cd /home/alice && runuser -u alice -- timeout 60"
    assert set(cluster.must(HEAD, f"{as_alice} srun -N2 -t1 hostname").split()) == {WORKER, OTHER}
    look = "for i in 0 1; do head -c0 /dev/nvidia$i 2>&1; done; findmnt -n -o SOURCE --mountpoint /tmp; pwd"
    said = cluster.must(HEAD, f"{as_alice} srun -N1 -w {WORKER} -t1 --gres=gpu:1 sh -c '{look}'")
    assert said.count("Operation not permitted") == 1  # the other GPU; its own has no hardware behind it
    assert "/scratch/tmp/" in said
    assert said.endswith("/home/alice\n")
    accounted = "sacct -X -n -P -u alice -o state,account,alloctres"
    deadline = time.monotonic() + 30
    while "gres/gpu=1" not in (told := cluster.must(HEAD, accounted)) or "RUNNING" in told:
        assert time.monotonic() < deadline, told
        time.sleep(0.5)
    assert all(line.startswith("COMPLETED|default|") for line in told.splitlines())


def test_a_token_that_slurmctld_refuses_is_seen(cluster: Cluster) -> None:
    """slurmrestd itself answers whatever the token."""
    other = (
        f'#!/bin/sh\\n[ "$1" != token ] || {{ echo SLURM_JWT=a.b.c; exit; }}\\nexec {SCONTROL}.real "$@"\\n'
    )
    cluster.must(HEAD, f"mv {SCONTROL} {SCONTROL}.real; printf '{other}' >{SCONTROL}; chmod 755 {SCONTROL}")
    try:
        found = cluster.found("slurm-rest", HEAD)
    finally:
        cluster.must(HEAD, f"mv {SCONTROL}.real {SCONTROL}")
    assert found.verdict is Verdict.FAIL, found
    assert cluster.found("slurm-rest", HEAD).verdict is Verdict.PASS


def test_slurmd_finds_gpus_cores_and_links_by_nvml(cluster: Cluster) -> None:
    preload = "$(systemctl show -p Environment --value slurmd | grep -o 'LD_PRELOAD=[^ ]*')"
    told = cluster.run(WORKER, f"env {preload} timeout 30 slurmd -G --conf-server lab-head:6817")
    found = [line for line in (told.stdout + told.stderr).splitlines() if "Gres Name=gpu" in line]
    assert len(found) == 2, told
    for index, line in enumerate(found):
        assert f"Type=h100_80gb_hbm3 Count=1 Index={index} ID=" in line
        assert f"File=/dev/nvidia{index} Cores=" in line
        assert "ENV_NVML" in line
    assert "Gres=gpu:h100_80gb_hbm3:2" in cluster.must(HEAD, f"scontrol show node {WORKER}")


def test_slurmd_waits_for_the_device_files_of_its_gpus(cluster: Cluster) -> None:
    cluster.must(
        WORKER,
        "rm /dev/nvidia1; (sleep 2; mknod -m 666 /dev/nvidia1 c 195 1) >/dev/null 2>&1 & systemctl restart slurmd",
    )
    assert cluster.must(WORKER, "systemctl is-active slurmd") == "active\n"
    script = "/usr/local/lib/provision/gpu-devices"
    missing = cluster.run(WORKER, f"{script} 3 1")
    assert missing.rc == 1
    assert "only 2 of 3 GPUs have a device file (/dev/nvidia2 is missing)" in missing.stderr


def test_what_a_hand_changed_is_shown_and_mended(cluster: Cluster) -> None:
    own = "/etc/slurm/slurm.conf"
    cluster.must(
        HEAD, f"sed -i s/PriorityWeightAge=1000/PriorityWeightAge=1001/ {CONF}; systemctl disable slurmctld"
    )
    cluster.must(HEAD, "chmod 640 /etc/slurm/slurmdbd.conf; sacctmgr -iQ delete user alice >&2")
    cluster.must(WORKER, f"echo ClusterName=mine >{own}; chmod 644 /etc/slurm/prolog.d/00-provision")
    plan = {(each["node"], each["title"]) for each in cluster.plan().details["operations"]}
    assert {
        (HEAD, f"file {CONF}"),
        (HEAD, "unit slurmctld.service"),
        (HEAD, "file /etc/slurm/slurmdbd.conf"),
        (HEAD, "accounts and users"),
        (WORKER, "no configuration of its own"),
        (WORKER, "file /etc/slurm/prolog.d/00-provision"),
    } <= plan
    document = cluster.apply()
    assert document.verdict is Verdict.PASS, document.findings
    assert changed(cluster.plan()) == {}
    assert cluster.must(WORKER, f"cat {own}.before-provision") == "ClusterName=mine\n"


def test_another_clusters_state_stops_with_both_ids_and_deletes_nothing(cluster: Cluster) -> None:
    file = "/var/lib/slurm/slurmctld/clustername"
    right = cluster.must(HEAD, f"cat {file}")
    cluster.must(HEAD, f"systemctl stop slurmctld; sed -i 's/|.*/|77/' {file}")
    try:
        document = cluster.apply()
        after = cluster.must(HEAD, f"cat {file}")
    finally:
        cluster.must(HEAD, f"printf %s '{right}' >{file}")
    assert document.verdict is Verdict.FAIL
    reason = str(document.nodes[HEAD].reason)
    assert "cluster-id-mismatch" in reason
    assert "77" in reason
    assert right.strip().rpartition("|")[2] in reason
    assert after.strip() == "lab|77"
    assert cluster.apply().verdict is Verdict.PASS


@pytest.mark.parametrize("unit", ["mariadb", "slurmdbd", "slurmctld", "munge"])
def test_a_daemon_that_dies_is_started_again(cluster: Cluster, unit: str) -> None:
    cluster.must(HEAD, f"systemctl kill --signal=SEGV --kill-whom=main {unit}")
    again = f"systemctl show -p NRestarts,ActiveState {unit} | sort | paste -sd ,"
    active = f"{again} | grep -q '^ActiveState=active,NRestarts=[1-9]'"
    cluster.must(HEAD, f'timeout 90 sh -c "until {active}; do sleep 1; done"')
    cluster.must(
        HEAD, "timeout 90 sh -c 'until sacctmgr -nP show cluster && scontrol ping; do sleep 1; done'"
    )
    assert changed(cluster.apply()) == {}


def test_every_check_is_tried() -> None:
    assert {case.check for case in CASES} == names(["slurm"]) - {"slurm-login"}  # test_login has it


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fail_and_unknown_are_told_apart(cluster: Cluster, case: Case) -> None:
    try_case(cluster, case)
