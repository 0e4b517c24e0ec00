"""Containers of an ordinary user inside a job: Docker and Apptainer for real, with the job's GPU and no other.

The image is made of the node's own programs: there is no registry. What NVIDIA's toolkit would write of the GPUs stands
here, because it asks a driver: the device files of the lab's simulated GPUs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from provision.components.containers.exports import CDI, DAEMON
from provision.components.fabric.exports import NCCL
from provision.components.slurm import acceptance
from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.checking import HEAD, WORKER, Case, hidden
from tests.lab.cluster import OTHER, Cluster, brought_up, changed, names, try_case

CONTAINERS = {"docker": {"data_root": "/data/docker", "members": ["alice"]}, "apptainer": {}}
# Apptainer is in no release of Debian: this is the repository that the site configures, below all others
SOURCE = """Types: deb
URIs: {mirror}
Suites: sid
Components: main
Check-Valid-Until: no
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
PIN = "Package: *\nPin: release n=sid\nPin-Priority: 100\n"
ROOT, SIF, LOOK = "/data/image", "/data/image.sif", "/data/look"
IMAGE = f"""set -e
mkdir -p {ROOT}/bin {ROOT}/dev {ROOT}/etc {ROOT}/proc {ROOT}/sys {ROOT}/tmp {ROOT}/home {ROOT}/data {ROOT}/var/tmp
for program in sh ls head mknod id cat sleep grep; do
  file=$(readlink -f $(command -v $program))
  cp -L $file {ROOT}/bin/$program
  cp -L --parents $(ldd $file | grep -o '/[^ ]*') {ROOT}/
done
echo 'made of the node' >{ROOT}/etc/inside
touch {ROOT}/etc/passwd {ROOT}/etc/group
tar -C {ROOT} -c . | docker import - site/image:1
apptainer -q build --force {SIF} {ROOT}
chmod -R a+rX /data/image*"""
# systemd-nspawn keeps kernel keyrings from a node of the lab: there containers share their daemon's
RUNTIME = """#!/bin/sh
for word; do
  shift
  set -- "$@" "$word"
  [ "$word" != create ] || set -- "$@" --no-new-keyring
done
exec runc "$@"
"""
THEIRS = {"default-runtime": "lab", "runtimes": {"lab": {"path": "/usr/local/bin/runc-lab"}}}
# What a container sees of GPUs: their files, and which of the node's two may be opened. A simulated GPU has nothing
# behind its file: the kernel says so once it has let one through.
LOOKING = """echo "job $SLURM_STEP_GPUS"; id -u; cat /etc/inside; ls /dev | grep "^nvidia[0-9]$"
for gpu in 0 1; do
  file=/dev/nvidia$gpu
  [ -e $file ] || { file=/tmp/nvidia$gpu; mknod $file c 195 $gpu; }
  head -c0 $file
done 2>&1
echo looked
"""
OPEN, CLOSED = "No such device or address", "Operation not permitted"
NAMESPACES = "/proc/sys/user/max_user_namespaces"
CASES = [
    hidden("nccl-in-containers", f"apptainer config global --unset 'bind path' {NCCL}", "/usr/bin/apptainer"),
    hidden("docker-answers", "systemctl stop docker.socket docker", "/usr/bin/docker"),
    hidden(
        "docker-one",
        "printf '[Service]\\nExecStart=/bin/true\\n' >/etc/systemd/system/snap.docker.dockerd.service",
        "/usr/bin/systemctl",
        mend="rm /etc/systemd/system/snap.docker.dockerd.service",
    ),
    Case(
        "user-namespaces",
        f"echo 0 >/run/none; mount --bind /run/none {NAMESPACES}",
        f"echo many >/run/odd; mount --bind /run/odd {NAMESPACES}",
        f"umount {NAMESPACES}",
        mend=f"umount {NAMESPACES}",
    ),
]
SKIPPED = {
    "enroot-paths",
    "gpus-in-containers",
}  # Enroot is in no distribution; no driver tells of simulated GPUs


@dataclass(frozen=True)
class Seen:
    """What a container said of itself."""

    gpu: int  # that Slurm gave to the job
    user: int
    files: list[str]
    verdicts: list[str]  # of opening GPU 0 and 1


def seen(text: str) -> Seen:
    lines = text.splitlines()
    assert {"made of the node", "looked"} <= set(lines), text
    return Seen(
        next(int(line.split()[1]) for line in lines if re.fullmatch(r"job \d+", line)),
        next(int(line) for line in lines if line.isdigit()),
        [line for line in lines if re.fullmatch(r"nvidia\d", line)],
        [line.rpartition(": ")[2] for line in lines if line.startswith("head:")],
    )


def only(gpu: int) -> list[str]:
    """What opening GPU 0 and 1 says where `gpu` alone is allowed."""
    return [OPEN if number == gpu else CLOSED for number in (0, 1)]


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The lab's cluster, with container engines on one of its workers."""
    document = yaml.safe_load(Path("inventories/lab.yml").read_text())
    document["access"]["ssh_config"] = str(lab.paths.ssh_config)
    document["networks"]["fabric"] = {"kind": "ethernet"}
    document["fabric"] = {}
    document["containers"] = {"toolkit": True}
    document["nodes"] = {WORKER: {"settings": {"containers": CONTAINERS}}}
    path = tmp_path_factory.mktemp("containers") / "lab.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    mirror = lab.inside(WORKER, "sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources").split()[0]
    lab.inside(WORKER, "cat >/etc/apt/sources.list.d/sid.sources", stdin=SOURCE.format(mirror=mirror))
    lab.inside(WORKER, "cat >/etc/apt/preferences.d/sid; apt-get -qq update", stdin=PIN)
    lab.inside(WORKER, "cat >/usr/local/bin/runc-lab; chmod 755 /usr/local/bin/runc-lab", stdin=RUNTIME)
    lab.inside(
        WORKER, f"mkdir /etc/docker; cat >{DAEMON}", stdin=json.dumps(THEIRS)
    )  # not ours: it must stay
    with brought_up("fabric", "containers", "storage", "munge", "slurm", site=str(path)) as made:
        yield made


@pytest.fixture(scope="module")
def ready(cluster: Cluster, lab: Lab) -> Cluster:
    """Nodes that take jobs, an image, and the node's GPUs by name."""
    left = acceptance.admit(
        lambda command, stdin=None, timeout=60: cluster.run(HEAD, command, timeout), [WORKER, OTHER]
    )
    assert left == {}
    cluster.must(WORKER, IMAGE)
    lab.inside(WORKER, f"cat >{LOOK}; chmod 644 {LOOK}", stdin=LOOKING)
    devices = [
        {"name": str(gpu), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{gpu}"}]}}
        for gpu in (0, 1)
    ]
    specification = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    lab.inside(WORKER, f"mkdir -p /etc/cdi; cat >{CDI}", stdin=json.dumps(specification))
    deadline = time.monotonic() + 60
    while "IDLE" not in cluster.must(HEAD, f"scontrol show node {WORKER} | grep State="):
        assert time.monotonic() < deadline
        time.sleep(1)
    return cluster


def in_a_job(command: str) -> str:
    """Shell text for the head: `command`, which has no single quote, as alice in a job with a GPU on the worker."""
    return f"runuser -u alice -- timeout 90 srun -N1 -w {WORKER} -D /tmp -t2 --gres=gpu:1 sh -c '{command}'"


def test_a_second_apply_changes_nothing_and_gpus_are_skipped_with_the_reason(cluster: Cluster) -> None:
    assert changed(cluster.apply()) == {}
    assert changed(cluster.plan()) == {}
    for name in SKIPPED:
        assert cluster.found(name, WORKER).verdict is Verdict.SKIP
    assert {case.check for case in CASES} | SKIPPED == names(["containers"])


def test_docker_gives_a_job_its_gpu_and_no_other(ready: Cluster) -> None:
    """By CDI, which the daemon's configuration turns on; even the container's root has no way to the other one."""
    docker = "docker run --rm --network none -e SLURM_STEP_GPUS --device nvidia.com/gpu=$SLURM_STEP_GPUS"
    found = seen(ready.must(HEAD, in_a_job(f'{docker} site/image:1 sh -c "$(cat {LOOK})"')))
    assert found.user == 0
    assert found.files == [f"nvidia{found.gpu}"]
    assert found.verdicts == only(found.gpu)


def test_apptainer_shows_containers_what_nccl_is_told(ready: Cluster) -> None:
    told = ready.must(WORKER, f"cat {NCCL}")
    assert "NCCL_" in told
    assert ready.must(HEAD, in_a_job(f"apptainer -q exec {SIF} cat {NCCL}")) == told


@pytest.mark.parametrize("image", [ROOT, SIF])
def test_apptainer_gives_a_job_its_gpu_and_no_other(ready: Cluster, image: str) -> None:
    """As the user's own process: what keeps the other GPU away is the job's control group."""
    found = seen(ready.must(HEAD, in_a_job(f'apptainer -q exec {image} sh -c "$(cat {LOOK})"')))
    assert found.user == 2001
    assert found.verdicts == only(found.gpu)


def test_two_jobs_at_a_time_get_one_each(ready: Cluster) -> None:
    one = in_a_job(f'apptainer -q exec {SIF} sh -c "$(cat {LOOK}); sleep 5"')
    said = ready.must(
        HEAD, f"{one} >/run/first & {one} >/run/second; wait; cat /run/first; echo ---; cat /run/second"
    )
    first, second = map(seen, said.split("---\n"))
    assert sorted((first.gpu, second.gpu)) == [0, 1]
    assert (first.verdicts, second.verdicts) == (only(first.gpu), only(second.gpu))


def test_who_is_not_a_member_does_not_reach_docker(ready: Cluster) -> None:
    ready.must(WORKER, "useradd -M bob")
    denied = ready.run(WORKER, "runuser -u bob -- docker ps")
    assert denied.rc != 0
    assert "permission denied" in denied.stderr


def test_a_running_container_outlives_an_apply_that_changes_the_daemon(ready: Cluster) -> None:
    ready.must(WORKER, "docker run -d --name stays --network none site/image:1 sleep 600")
    ready.must(WORKER, f"sed -i s/100m/99m/ {DAEMON}")
    assert set(changed(ready.apply(["containers"]))) == {WORKER}
    assert ready.must(WORKER, "docker ps --format '{{.Names}}'").split() == ["stays"]
    ready.must(WORKER, "docker rm -f stays")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_check_that_fails_and_one_that_cannot_tell(ready: Cluster, case: Case) -> None:
    try_case(ready, case)
