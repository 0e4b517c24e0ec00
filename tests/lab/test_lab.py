"""The lab itself: made, mended, broken on purpose, and gone without a trace. The labs here are its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provision.lab import InputError, Lab, cgroup, host, layers, network, state
from provision.lab.progress import Progress


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A small lab with Slurm's packages: a head and a worker."""
    cluster = Lab(tmp_path_factory.mktemp("labs") / "one")
    cluster.up(workers=1)
    yield cluster
    cluster.down()


def traces(lab: Lab) -> list[str]:
    """Everything on this machine that belongs to the lab or bears its name."""
    words = (lab.paths.hub, str(lab.paths.state))
    found = [
        f"mount {line}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if any(w in line for w in words)
    ]
    found += [f"namespace {name}" for name in network.names(lab.paths)]
    found += [
        f"group {path}"
        for hierarchy, _ in host.cgroup_hierarchies(Path("/proc/self/mountinfo").read_text())
        for path in hierarchy.glob(f"{lab.paths.hub}*")
    ]
    found += [f"nspawn {path}" for path in Path("/run/systemd/nspawn").rglob(f"*{lab.paths.hub}*")]
    found += [
        f"loop {line}" for line in output("losetup", "-a").splitlines() if any(w in line for w in words)
    ]
    found += [
        f"link {line}"
        for line in output("ip", "-o", "link").splitlines()
        if "lab0" in line or "port1" in line
    ]
    found += [f"rules {line}" for line in output("nft", "list", "ruleset").splitlines() if "10.77" in line]
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            about = [(process / name).read_text() for name in ("cmdline", "cgroup", "mountinfo")]
        except (FileNotFoundError, ProcessLookupError, OSError):
            continue  # it has ended meanwhile
        found += [f"process {process.name}" for text in about if any(w in text for w in words)]
    return found + ([f"folder {lab.paths.state}"] if lab.paths.state.exists() else [])


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def boot_id(lab: Lab, node: str) -> str:
    return lab.run(node, "cat /proc/sys/kernel/random/boot_id").stdout.strip()


def give_one_munge_key(lab: Lab) -> None:
    for name in lab.nodes:
        script = "systemctl stop munge; cat >/etc/munge/munge.key; systemctl start munge"
        lab.inside(name, script, stdin="k" * 128)


def until(condition: object, seconds: float = 20) -> None:
    """Wait for `condition()`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


def test_nodes_answer_as_ops_and_as_root_and_boot_without_failures(lab: Lab) -> None:
    for name in lab.nodes:
        assert lab.run(name, "sudo -n id -un", user="ops").stdout == "root\n"
        assert lab.run(name, "hostname; systemctl is-system-running").stdout == f"{name}\nrunning\n"
        assert lab.run(name, "systemctl --failed --no-legend").stdout == ""
        assert lab.state_of(name) == "running"


def test_nodes_reach_each_other_over_both_address_families(lab: Lab) -> None:
    worker = lab.nodes["lab-gpu-1"]
    for address in (worker.address, worker.address6):
        assert lab.run("lab-head", f"ping -c1 -W2 {address}").returncode == 0


def test_packages_that_come_with_the_lab_have_never_run(lab: Lab) -> None:
    units = "munge slurmctld mariadb prometheus chrony"
    assert lab.run("lab-head", "dpkg -s slurmctld mariadb-server munge").returncode == 0
    assert lab.run("lab-head", f"systemctl is-enabled {units}").stdout == "disabled\n" * 5
    assert lab.run("lab-head", f"systemctl is-active {units}").stdout == "inactive\n" * 5
    keys = {lab.inside(name, "sha256sum /etc/munge/munge.key") for name in lab.nodes}
    assert len(keys) == len(lab.nodes)


def test_apt_installs_through_the_package_cache(lab: Lab) -> None:
    done = lab.run("lab-gpu-1", "apt-get update && apt-get install -y tree && tree --version", timeout=120)
    assert done.returncode == 0, done.stderr
    assert list((lab.cache / "packages").rglob("tree_*.deb"))


def test_gpus_are_device_nodes_and_limits_are_declared(lab: Lab) -> None:
    assert lab.run("lab-gpu-1", "stat -c '%F %t %T %a' /dev/nvidia?").stdout == (
        "character special file c3 0 666\ncharacter special file c3 1 666\n"
    )
    assert lab.run("lab-head", "ls /dev/nvidia*").returncode != 0
    declared = json.loads(lab.run("lab-gpu-1", "cat /etc/provision/limits.json").stdout)
    what = [limit["what"].partition(":") for limit in declared["limits"]]
    units = [name for kind, _, name in what if kind == "unit"]
    assert lab.run("lab-gpu-1", f"systemctl is-enabled {' '.join(units)}").stdout == "masked\n" * len(units)
    files = " ".join(f"/proc/sys/{name.replace('.', '/')}" for kind, _, name in what if kind == "sysctl")
    assert lab.run("lab-gpu-1", f"for file in {files}; do [ -w $file ] && echo $file; done").stdout == ""


def test_up_again_changes_nothing(lab: Lab) -> None:
    before = {name: boot_id(lab, name) for name in lab.nodes}
    started = time.monotonic()
    lab.up()
    assert time.monotonic() - started < 20
    assert {name: boot_id(lab, name) for name in lab.nodes} == before


def test_a_node_really_reboots(lab: Lab) -> None:
    before = boot_id(lab, "lab-gpu-1")
    assert before != boot_id(lab, "lab-head")
    lab.run("lab-gpu-1", "touch /root/stays /run/goes; nft add table inet goes")
    lab.run("lab-gpu-1", "systemctl reboot")
    until(lambda: boot_id(lab, "lab-gpu-1") not in ("", before))
    assert lab.run("lab-gpu-1", "ls /root/stays").returncode == 0
    assert lab.run("lab-gpu-1", "ls /run/goes").returncode != 0
    assert lab.run("lab-gpu-1", "nft list ruleset").stdout == ""


def test_workers_are_added_and_taken_away_while_the_lab_runs(lab: Lab) -> None:
    before = boot_id(lab, "lab-gpu-1")
    lab.up(workers=2, gpus=2)
    assert lab.run("lab-gpu-2", "hostname").stdout == "lab-gpu-2\n"
    assert boot_id(lab, "lab-gpu-1") == before
    lab.up(workers=1)
    assert list(lab.nodes) == ["lab-head", "lab-gpu-1"]
    assert not [trace for trace in traces(lab) if "lab-gpu-2" in trace]


# ---- half-made labs


def kill_supervisor(lab: Lab) -> None:
    for pid in cgroup.pids(lab.paths.node_cgroup("lab-gpu-1") / "supervisor"):
        os.kill(pid, signal.SIGKILL)


def kill_proxy(lab: Lab) -> None:
    cgroup.kill(lab.paths.proxy_cgroup)


def remove_node_namespace(lab: Lab) -> None:
    network.remove(lab.paths.namespace("lab-gpu-1"))


def remove_hub(lab: Lab) -> None:
    network.remove(lab.paths.hub)


def unmount_a_namespace(lab: Lab) -> None:
    output("umount", str(network.RUN / lab.paths.hub))


def cut_the_cable(lab: Lab) -> None:
    output("ip", "-n", lab.paths.hub, "link", "delete", network.port_name(lab.nodes["lab-gpu-1"]))


def lose_everything_that_runs(lab: Lab) -> None:
    cgroup.remove(lab.paths.cgroup)
    for name in network.names(lab.paths):
        network.remove(name)


def lose_a_folder(lab: Lab) -> None:
    lab.paths.node("lab-gpu-1").rename(lab.paths.node(".lab-gpu-1"))


def lose_access_files(lab: Lab) -> None:
    lab.paths.known_hosts.unlink()
    lab.paths.ssh_config.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        kill_supervisor,
        kill_proxy,
        remove_node_namespace,
        remove_hub,
        unmount_a_namespace,
        cut_the_cable,
        lose_everything_that_runs,
        lose_a_folder,
        lose_access_files,
    ],
)
def test_a_half_made_lab_is_mended(lab: Lab, damage: object) -> None:
    assert callable(damage)
    damage(lab)
    lab.up()
    for name, node in lab.nodes.items():
        assert lab.run(name, "hostname").stdout == f"{name}\n"
        assert lab.run("lab-head", f"ping -c1 -W2 {node.address}").returncode == 0
    assert lab.run("lab-gpu-1", "apt-get update").returncode == 0


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.5])
def test_up_that_is_killed_is_completed_by_the_next(tmp_path: Path, seconds: float) -> None:
    half = Lab(tmp_path / "half")
    script = (
        "from pathlib import Path; from provision.lab import Lab; "
        f"Lab(Path({str(half.paths.state)!r})).up(workers=1)"
    )
    with subprocess.Popen([sys.executable, "-c", script], env=state.python_environment()) as up:
        time.sleep(seconds)
        up.kill()
    half.up(workers=1)
    assert half.run("lab-gpu-1", "hostname").stdout == "lab-gpu-1\n"
    half.down()
    assert traces(half) == []


def test_a_layer_whose_build_was_killed_is_built_by_the_next(tmp_path: Path) -> None:
    cache, root = state.default_cache(), state.Paths(tmp_path).cgroup.parent
    recipe = layers.load_recipe().select(["base"])
    mirror = host.find_mirror(None, recipe.suite)
    extra = layers.Layer(tmp_path.parent.name, ("head",), ("tree",))
    recipe = replace(recipe, layers=(*recipe.layers, extra))
    name = layers.folder_names(recipe, recipe.stack("head"))[1]
    target, scratch = cache / "layers" / name, cache / "layers" / f".build-{name}"

    def build() -> None:
        layers.ensure(recipe, "head", mirror, cache, root, Progress())

    killed = multiprocessing.get_context("fork").Process(target=build)
    killed.start()
    until((cache / "log" / f"{name}.log").exists)
    group = layers.build_group(root, scratch)
    killed.kill()
    killed.join()
    assert cgroup.populated(group), "apt goes on without the command that started it"
    assert not target.exists()
    try:
        build()
        assert (target / "usr/bin/tree").exists()
        assert not group.exists()
        assert not list(target.parent.glob(f".build-{name}*"))
        assert name not in Path("/proc/self/mountinfo").read_text()
    finally:
        shutil.rmtree(target)
        (cache / "log" / f"{name}.log").unlink()


def test_down_leaves_nothing_whatever_the_state(tmp_path: Path) -> None:
    one = Lab(tmp_path / "gone")
    assert traces(one) == []
    one.up(workers=1, layer_names=["base"])
    assert traces(one) != []
    one.fault("freeze", "lab-gpu-1")
    one.fault("fill-disk", "lab-head", path="/srv")
    one.down()
    assert traces(one) == []
    one.down()
    assert traces(one) == []


def test_two_labs_with_the_same_addresses_do_not_meet(lab: Lab, tmp_path: Path) -> None:
    other = Lab(tmp_path / "two")
    other.up(workers=1, layer_names=["base"])
    assert [node.address for node in other.nodes.values()] == [node.address for node in lab.nodes.values()]
    other.run("lab-gpu-1", "touch /root/other")
    assert lab.run("lab-gpu-1", "ls /root/other").returncode != 0
    assert boot_id(lab, "lab-gpu-1") != boot_id(other, "lab-gpu-1")
    other.down()
    assert traces(other) == []
    assert lab.run("lab-gpu-1", "hostname").stdout == "lab-gpu-1\n"


def test_a_snapshot_brings_everything_back(lab: Lab) -> None:
    lab.run(
        "lab-gpu-1",
        "echo before >/root/file; mkdir -p /data/brick",
    )
    lab.run(
        "lab-gpu-1",
        "python3 -c \"import os; os.setxattr('/data/brick', 'trusted.test', b'x')\"; rm /etc/motd",
    )
    lab.snapshot("before")
    lab.run("lab-gpu-1", "echo after >/root/file; rm -r /data/brick; touch /etc/motd")
    lab.restore("before")
    assert lab.run("lab-gpu-1", "cat /root/file").stdout == "before\n"
    assert (
        lab.run(
            "lab-gpu-1", "python3 -c \"import os; print(os.getxattr('/data/brick', 'trusted.test'))\""
        ).stdout
        == "b'x'\n"
    )
    assert lab.run("lab-gpu-1", "ls /etc/motd").returncode != 0
    with pytest.raises(InputError, match="no such snapshot; there are before"):
        lab.restore("later")


# ---- faults


@pytest.mark.parametrize("kind", ["stop-node", "kill-node", "freeze", "freeze-sshd", "unplug"])
def test_an_unreachable_node_and_back(lab: Lab, kind: str) -> None:
    lab.fault(kind, "lab-gpu-1")
    expected = {"stop-node": "off", "kill-node": "off", "freeze": "frozen"}.get(kind, "unreachable")
    assert lab.state_of("lab-gpu-1") == expected
    assert lab.state_of("lab-head") == "running"
    lab.fault(kind, "lab-gpu-1", undo=True)
    until(lambda: lab.state_of("lab-gpu-1") == "running")


def test_a_full_disk(lab: Lab) -> None:
    lab.run("lab-gpu-1", "mkdir -p /srv/data; echo kept >/srv/data/file")
    lab.fault("fill-disk", "lab-gpu-1", path="/srv")
    full = lab.run("lab-gpu-1", "cat /srv/data/file; head -c 1M /dev/zero >/srv/more")
    assert full.stdout == "kept\n"
    assert "No space left on device" in full.stderr
    lab.run("lab-gpu-1", "sync; chmod 777 /srv")
    for user in ("root", "nobody"):
        byte = f'runuser -u {user} -- python3 -c \'import os; os.write(os.open("/srv/{user}", 65), b"x")\''
        assert "No space left on device" in lab.run("lab-gpu-1", byte).stderr, "not even for one byte"
    lab.fault("fill-disk", "lab-gpu-1", undo=True)
    assert lab.run("lab-gpu-1", "head -c 1M /dev/zero >/srv/more").returncode == 0


def test_a_clock_that_is_off(lab: Lab) -> None:
    give_one_munge_key(lab)
    assert lab.run("lab-head", "unmunge", stdin=lab.run("lab-gpu-1", "munge -n").stdout).returncode == 0
    lab.fault("clock", "lab-gpu-1", by="10m")
    assert "Rewound" in lab.run("lab-head", "unmunge", stdin=lab.run("lab-gpu-1", "munge -n").stdout).stdout
    lab.fault("clock", "lab-gpu-1", undo=True)
    assert lab.run("lab-head", "unmunge", stdin=lab.run("lab-gpu-1", "munge -n").stdout).returncode == 0


def test_a_wrong_munge_key(lab: Lab) -> None:
    give_one_munge_key(lab)
    lab.fault("wrong-munge-key", "lab-gpu-1")
    assert "Invalid" in lab.run("lab-head", "unmunge", stdin=lab.run("lab-gpu-1", "munge -n").stdout).stderr
    lab.fault("wrong-munge-key", "lab-gpu-1", undo=True)
    assert lab.run("lab-head", "unmunge", stdin=lab.run("lab-gpu-1", "munge -n").stdout).returncode == 0


def test_a_held_dpkg_lock_ends_by_itself(lab: Lab) -> None:
    lab.fault("apt-lock", "lab-gpu-1", seconds=3)
    assert "Could not get lock" in lab.run("lab-gpu-1", "apt-get install -y --reinstall munge").stderr
    waited = lab.run("lab-gpu-1", "apt-get install -y -o DPkg::Lock::Timeout=30 hostname")
    assert waited.returncode == 0, waited.stderr


def test_a_package_half_installed(lab: Lab) -> None:
    lab.fault("half-installed", "lab-gpu-1", package="netcat-openbsd")
    assert (
        lab.run("lab-gpu-1", "dpkg-query -W -f '${db:Status-Status}' netcat-openbsd").stdout
        == "half-configured"
    )
    lab.fault("half-installed", "lab-gpu-1", undo=True)
    assert lab.run("lab-gpu-1", "dpkg-query -W -f '${db:Status-Status}' netcat-openbsd").stdout == "installed"


def test_a_file_edited_by_hand(lab: Lab) -> None:
    before = lab.run("lab-gpu-1", "cat /etc/hosts; stat -c '%a %U' /etc/hosts").stdout
    lab.fault("edit", "lab-gpu-1", path="/etc/hosts")
    after = lab.run("lab-gpu-1", "cat /etc/hosts; stat -c '%a %U' /etc/hosts").stdout
    assert len(after) == len(before) + 1
    lab.fault("edit", "lab-gpu-1", undo=True)
    assert lab.run("lab-gpu-1", "cat /etc/hosts; stat -c '%a %U' /etc/hosts").stdout == before
    with pytest.raises(InputError, match="nothing of the kind"):
        lab.fault("edit", "lab-gpu-1", undo=True)


def test_another_host_key_is_refused_by_ssh(lab: Lab) -> None:
    lab.fault("host-key", "lab-gpu-1")
    refused = lab.run("lab-gpu-1", "true")
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    lab.fault("host-key", "lab-gpu-1", undo=True)
    assert lab.run("lab-gpu-1", "true").returncode == 0


def test_sudo_with_a_password(lab: Lab) -> None:
    lab.fault("sudo-password", "lab-gpu-1")
    assert lab.run("lab-gpu-1", "sudo -n true", user="ops").returncode != 0
    assert lab.paths.sudo_password.stat().st_mode & 0o777 == 0o600
    password = lab.paths.sudo_password.read_text()
    assert lab.run("lab-gpu-1", "sudo -S -k id -un", user="ops", stdin=password).stdout == "root\n"
    lab.fault("sudo-password", "lab-gpu-1", undo=True)
    assert lab.run("lab-gpu-1", "sudo -n true", user="ops").returncode == 0


def test_a_kernel_message_stays_on_its_node(lab: Lab) -> None:
    lab.fault("xid", "lab-gpu-1", xid=48, gpu=1)
    assert "NVRM: Xid (PCI:0000:0c:00): 48," in lab.run("lab-gpu-1", "tail -n1 /var/log/kmsg").stdout
    assert lab.run("lab-head", "cat /var/log/kmsg").stdout == ""
    lab.fault("kill-node", "lab-gpu-1")
    lab.fault("kill-node", "lab-gpu-1", undo=True)
    assert lab.run("lab-gpu-1", "cat /var/log/kmsg").stdout == ""


def test_slurm_isolates_gpus_with_cgroups(lab: Lab) -> None:
    """The device filter (bpf) and the preload on hybrid machines do what Slurm needs of a node."""
    hosts = "127.0.0.1 localhost\n10.77.0.10 lab-head\n10.77.0.11 lab-gpu-1\n"
    slurm = (
        "ClusterName=lab\nSlurmctldHost=lab-head\nSlurmUser=slurm\nStateSaveLocation=/var/lib/slurm/slurmctld\n"
        "SlurmdSpoolDir=/var/lib/slurm/slurmd\nProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\n"
        "SelectType=select/cons_tres\nGresTypes=gpu\nReturnToService=2\nJobAcctGatherType=jobacct_gather/linux\n"
        "NodeName=lab-gpu-1 CPUs=1 Gres=gpu:2\nPartitionName=gpu Nodes=ALL Default=YES\n"
    )
    give_one_munge_key(lab)
    for name in lab.nodes:
        lab.inside(name, "cat >/etc/hosts", stdin=hosts)
        lab.inside(name, "mkdir -p /etc/slurm; cat >/etc/slurm/slurm.conf", stdin=slurm)
        lab.inside(name, "cat >/etc/slurm/gres.conf", stdin="Name=gpu File=/dev/nvidia[0-1]\n")
        lab.inside(
            name, "cat >/etc/slurm/cgroup.conf", stdin="CgroupPlugin=cgroup/v2\nConstrainDevices=yes\n"
        )
    lab.run("lab-head", "install -d -o slurm /var/lib/slurm/slurmctld; systemctl restart slurmctld")
    lab.run("lab-gpu-1", "systemctl restart slurmd")
    until(lambda: lab.run("lab-head", "sinfo -h -o %T").stdout == "idle\n", 60)
    read = "for i in 0 1; do head -c1 /dev/nvidia$i; done"
    job = lab.run("lab-head", f"timeout 30 srun -t1 --gres=gpu:1 sh -c {read!r}")
    # one device may be opened (there is no hardware behind it), the other may not
    assert job.stderr.count("No such device or address") == 1
    assert job.stderr.count("Operation not permitted") == 1


def test_a_mount_namespace_made_later_on_any_cpu_can_be_bound(lab: Lab) -> None:
    """As Slurm does for the private /tmp of a job: the node's own must count as the older one."""
    tried = lab.inside(
        "lab-gpu-1",
        """set -e
        mkdir /run/bound; mount -t tmpfs none /run/bound; mount --make-private /run/bound; touch /run/bound/ns
        for cpu in $(seq 0 $(($(nproc) - 1))); do
            taskset --cpu-list $cpu unshare --mount sleep 10 & pid=$!
            until [ "$(readlink /proc/$pid/ns/mnt)" != "$(readlink /proc/self/ns/mnt)" ]; do sleep 0.1; done
            mount --bind /proc/$pid/ns/mnt /run/bound/ns && umount /run/bound/ns && echo $cpu
            kill $pid
        done
        umount /run/bound; rmdir /run/bound""",
    )
    assert tried.split() == [str(cpu) for cpu in range(len(tried.split()))]
    assert len(tried.split()) == int(lab.inside("lab-gpu-1", "nproc"))
