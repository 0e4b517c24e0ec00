"""Faults in the middle of the work of an admitted cluster: named, survived by the others, completed by the next run."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.lab.admitted import HEAD, NODES, OTHER, WORKER, Admitted, bad, reason, until
from tests.lab.command import answer, start

EXPORTER = "prometheus-node-exporter"
NO_EXPORTER = f"DEBIAN_FRONTEND=noninteractive apt-get remove -qq {EXPORTER} >/dev/null"


def begun(admitted: Admitted, *, node: str = WORKER) -> subprocess.Popen[str]:
    """An apply in which `node` has come to a package that it cannot install yet: somebody holds dpkg's lock."""
    for each in (WORKER, OTHER):
        admitted.on(each, NO_EXPORTER)
    admitted.lab.fault("apt-lock", node, seconds=600)
    running = start("apply", admitted.site)

    def at_the_lock() -> bool:
        assert running.poll() is None, running.communicate()
        return "install" in admitted.on(node, "pgrep -a apt-get || [ $? = 1 ]")

    until(at_the_lock, f"{node} waits for dpkg's lock")
    return running


# ---- nodes lost


def test_a_node_that_is_shut_down_in_mid_apply_is_named_and_the_next_run_completes(
    admitted: Admitted,
) -> None:
    running = begun(admitted)
    admitted.lab.fault("stop-node", WORKER)
    found = answer(running)
    assert "closed by remote host" in reason(found, WORKER)
    assert (found.nodes[OTHER]["verdict"], found.nodes[HEAD]["verdict"]) == ("pass", "pass")
    assert found.changed[OTHER] >= 1
    admitted.lab.fault("stop-node", WORKER, undo=True)
    admitted.mended(WORKER)


def test_when_the_head_dies_its_workers_are_blocked_by_it_and_not_failed_by_themselves(
    admitted: Admitted,
) -> None:
    admitted.on(HEAD, NO_EXPORTER)
    admitted.on(HEAD, "echo >>/etc/slurm/slurmdbd.conf; apt-get remove -qq slurmrestd >/dev/null")
    admitted.lab.fault("apt-lock", HEAD, seconds=600)
    running = start("apply", admitted.site)
    until(lambda: admitted.on(HEAD, "pgrep -a apt-get || [ $? = 1 ]"), f"{HEAD} waits for dpkg's lock")
    admitted.lab.fault("kill-node", HEAD)
    found = answer(running)
    assert "connection" in reason(found, HEAD)
    for node in (WORKER, OTHER):
        assert reason(found, node).startswith(f"blocked by {HEAD}")
        assert found.nodes[node]["failed"] == 0
    admitted.lab.fault("kill-node", HEAD, undo=True)
    admitted.mended(HEAD)


@pytest.mark.parametrize("lost", [[WORKER], [HEAD], list(NODES)], ids=["worker", "head", "all"])
def test_after_a_power_cut_everything_comes_back(admitted: Admitted, lost: list[str]) -> None:
    """Mounts wait for their server and slurmd for the mounts; nobody has to resume a node."""
    for node in lost:
        admitted.lab.fault("kill-node", node)
    admitted.lab.up()
    admitted.healthy()
    assert sorted(admitted.on(HEAD, "srun -N2 -t1 --immediate=60 hostname").split()) == [WORKER, OTHER]
    admitted.converged()


# ---- disks, clocks, packages


@pytest.mark.parametrize(
    ("path", "damage"),
    [
        ("/etc/slurm", "rm /etc/slurm/epilog.d/00-provision"),
        ("/var/cache/apt", NO_EXPORTER + "; apt-get clean"),
    ],
)
def test_a_full_disk_is_the_reason_and_the_next_run_completes(
    admitted: Admitted, path: str, damage: str
) -> None:
    admitted.on(WORKER, damage)
    admitted.lab.fault("fill-disk", WORKER, path=path)
    try:
        found = admitted("apply")
    finally:
        admitted.lab.fault("fill-disk", WORKER, undo=True)
    assert "No space left on device" in reason(found, WORKER) or "enough free space" in reason(found, WORKER)
    assert found.nodes[OTHER]["verdict"] == "pass"
    admitted.mended(WORKER)


def test_a_clock_that_is_off_is_told_by_its_name_and_nothing_else_is_accused(admitted: Admitted) -> None:
    admitted.lab.fault("clock", WORKER)
    try:
        found = admitted("verify")
    finally:
        admitted.lab.fault("clock", WORKER, undo=True)
    assert found.rc == 1
    told = [line for line in bad(found) if line.startswith(f"{WORKER}: munge-cross")]
    assert len(told) == 1, bad(found)
    assert f"clocks of {WORKER} and {HEAD}" in told[0]
    assert not [line for line in bad(found) if line.startswith(f"{OTHER}: ")], bad(found)
    admitted.converged()


def test_a_package_that_is_half_installed_is_found_and_mended(admitted: Admitted) -> None:
    admitted.lab.fault("half-installed", WORKER, package="chrony")
    found = admitted("verify")
    assert found.rc == 1
    assert any(line.startswith(f"{WORKER}: packages-whole: fail: chrony") for line in bad(found)), bad(found)
    admitted.mended(WORKER)


# ---- runs


def test_ctrl_c_in_the_middle_of_an_up_and_again_to_the_end(admitted: Admitted) -> None:
    running = begun(admitted)
    running.send_signal(signal.SIGINT)
    until(lambda: admitted.on(OTHER, f"systemctl is-active {EXPORTER} || [ $? != 1 ]"), f"{OTHER} goes on")
    admitted.lab.fault("apt-lock", WORKER, undo=True)
    found = answer(running, timeout=120)
    assert found.rc == 130
    assert found.nodes[WORKER]["reason"] == "interrupted"
    assert admitted("apply").rc == 0
    admitted.converged()


def test_two_runs_at_once_one_works_and_the_other_names_it(admitted: Admitted) -> None:
    first = begun(admitted)
    second = admitted("apply")
    assert first.poll() is None
    for node in (HEAD, WORKER):
        assert f"{node} is being provisioned by " in reason(second, node)
    # done there already or not: who holds the head holds the cluster
    assert reason(second, OTHER).startswith((f"{OTHER} is being provisioned by ", f"blocked by {HEAD}"))
    admitted.lab.fault("apt-lock", WORKER, undo=True)
    assert answer(first).rc == 0
    admitted.converged()


def test_a_key_that_ssh_cannot_use_is_named_and_nothing_is_done(admitted: Admitted, tmp_path: Path) -> None:
    """The lab's own key is in its ssh_config: without that, by address and with another key."""
    document = yaml.safe_load(Path(admitted.site).read_text())
    key = tmp_path / "key"
    key.write_text("no key at all\n")
    key.chmod(0o600)
    config = tmp_path / "ssh_config"
    text = admitted.lab.paths.ssh_config.read_text()
    config.write_text("\n".join(line for line in text.splitlines() if "IdentityFile" not in line) + "\n")
    document["access"] |= {"key": str(key), "ssh_config": str(config)}
    site = tmp_path / "lab.yml"
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    found = answer(start("apply", str(site)))
    for node in NODES:
        assert "Permission denied" in reason(found, node)
        assert str(key) in reason(found, node)
        assert not reason(found, node).startswith(node), "said of many nodes alike, it is told once"
    assert found.document is not None
    actions = {f["action"] for f in found.document["findings"] if f["verdict"] == "fail"}
    assert all("access.key" in str(action) for action in actions)
    admitted.converged()
