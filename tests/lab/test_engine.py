"""The engine against nodes that die, freeze, hang or are held by somebody else: each is named, none holds up others."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from provision.components.ssh import exports as ssh
from provision.engine.preflight import BOOT_ID
from provision.engine.reboot import reboot
from provision.engine.remote import connect
from provision.lab import Lab
from provision.site.load import load
from tests.lab.command import PROVISION, Answer, answer, provision, start

WORKER, OTHER, HEAD = "lab-gpu-1", "lab-gpu-2", "lab-head"


@pytest.fixture
def site(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small site: base, time and ssh on the lab's nodes, with a state of its own."""
    document = {
        "cluster": "lab",
        "access": {"user": "ops", "ssh_config": str(lab.paths.ssh_config), "host_keys": "strict"},
        "groups": {
            "head": {"hosts": HEAD, "addresses": "10.77.0.10", "roles": ["head"]},
            "more": {"hosts": "lab-gpu-[1-2]", "addresses": "10.77.0.[11-12]", "roles": ["head"]},
        },
        "networks": {"management": "10.77.0.0/24"},
        "ssh": {},
        "time": {},
    }
    path = tmp_path / "lab.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for node in (HEAD, WORKER, OTHER):
        wait_for_what_runs_there(lab, node)
    first = provision("apply", str(path))
    assert first.rc == 0, first
    return path


@pytest.fixture
def undo(lab: Lab) -> Iterator[Callable[..., None]]:
    """Inject a fault that is undone after the test."""
    injected: list[tuple[str, str]] = []

    def inject(kind: str, node: str, **options: object) -> None:
        lab.fault(kind, node, **options)
        injected.append((kind, node))

    yield inject
    for kind, node in reversed(injected):
        lab.fault(kind, node, undo=True)


def wait_for_what_runs_there(lab: Lab, node: str) -> None:
    """Until nothing holds the node: an operation whose session was cut off still ends, and keeps others out."""
    lab.inside(node, "timeout 120 flock /run/provision.lock true")


def reason(found: Answer, node: str) -> str:
    """Why a node was not brought up; it must say so."""
    assert found.rc == 1, found
    assert found.nodes[node]["verdict"] == "fail"
    return str(found.nodes[node]["reason"])


def test_a_second_apply_changes_nothing(site: Path) -> None:
    again = provision("apply", str(site))
    assert again.rc == 0
    assert again.changed == dict.fromkeys((HEAD, WORKER, OTHER), 0)
    assert [op for op in again.operations if op["outcome"] != "skipped"] == []


def test_a_plan_changes_nothing_and_shows_the_difference(lab: Lab, site: Path) -> None:
    lab.inside(WORKER, "echo '# by hand' >>/etc/hosts")
    before = lab.inside(WORKER, "sha256sum /etc/hosts; stat -c %Y /etc/hosts")
    plan = provision("plan", str(site))
    assert lab.inside(WORKER, "sha256sum /etc/hosts; stat -c %Y /etc/hosts") == before
    [change] = [op for op in plan.operations if op["outcome"] == "changed"]
    assert (change["node"], change["title"]) == (WORKER, "file /etc/hosts")
    assert "-# by hand" in change["diff"]
    assert provision("apply", str(site)).changed == {HEAD: 0, WORKER: 1, OTHER: 0}


def test_a_node_that_is_off_is_named_and_the_others_finish(
    lab: Lab, site: Path, undo: Callable[..., None]
) -> None:
    lab.inside(OTHER, "echo x >>/etc/hosts")
    undo("stop-node", WORKER)
    found = provision("apply", str(site))
    assert reason(found, WORKER)
    assert found.changed[OTHER] == 1
    assert found.nodes[OTHER]["verdict"] == "pass"


def test_a_frozen_node_costs_a_bounded_time(site: Path, undo: Callable[..., None]) -> None:
    undo("freeze", WORKER)
    began = time.monotonic()
    found = provision("apply", str(site))
    assert time.monotonic() - began < 60, "a frozen node must not hold up the run"
    assert reason(found, WORKER)
    assert found.nodes[OTHER]["verdict"] == "pass"


def wait_at_the_package_lock(lab: Lab, site: Path, seconds: float) -> subprocess.Popen[str]:
    """An apply that waits, on WORKER, for a package lock held for `seconds`: a run in the middle of an operation."""
    remove_chrony(lab)
    lab.fault("apt-lock", WORKER, seconds=seconds)
    running = start("apply", str(site))
    deadline = time.monotonic() + 60
    while "install" not in lab.run(WORKER, "pgrep -a apt-get").stdout:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline, "apply did not reach the package operation"
        time.sleep(0.2)
    return running


def remove_chrony(lab: Lab) -> None:
    lab.inside(WORKER, "dpkg --remove --force-depends chrony >/dev/null; ! [ -e /usr/sbin/chronyd ]")


def test_a_session_that_freezes_in_the_middle_is_given_up(lab: Lab, site: Path) -> None:
    running = wait_at_the_package_lock(lab, site, seconds=60)
    lab.fault("freeze-sshd", WORKER)
    try:
        found = answer(running, timeout=60)
    finally:
        lab.fault("freeze-sshd", WORKER, undo=True)
        lab.fault("apt-lock", WORKER, undo=True)
    assert "not responding" in reason(found, WORKER)
    assert found.nodes[OTHER]["verdict"] == "pass"
    wait_for_what_runs_there(lab, WORKER)
    assert provision("apply", str(site)).rc == 0


def test_a_held_package_lock_is_waited_for(lab: Lab, site: Path) -> None:
    found = answer(wait_at_the_package_lock(lab, site, seconds=60))
    assert found.rc == 0, found
    assert any(op["title"].startswith("install chrony") for op in found.operations)


def test_two_runs_at_once_do_not_collide(site: Path, lab: Lab) -> None:
    holder = subprocess.Popen(
        [
            *lab.ssh(WORKER),
            "sudo flock /run/provision.lock sh -c 'echo ann@elsewhere, run 7 >/run/provision.lock; echo held; cat'",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    try:
        found = provision("apply", str(site))
    finally:
        holder.communicate("", timeout=20)
    assert "ann@elsewhere, run 7" in reason(found, WORKER)
    assert found.nodes[OTHER]["verdict"] == "pass"


def test_ctrl_c_lets_operations_end_and_the_next_run_goes_on(lab: Lab, site: Path) -> None:
    running = wait_at_the_package_lock(lab, site, seconds=10)
    running.send_signal(signal.SIGINT)
    found = answer(running, timeout=60)
    assert found.rc == 130, found
    assert found.nodes[WORKER]["reason"] == "interrupted"
    assert lab.run(WORKER, "dpkg -s chrony").stdout.count("install ok installed") == 1, "what ran was let end"
    assert provision("apply", str(site)).rc == 0
    assert sum(provision("apply", str(site)).changed.values()) == 0


def test_ctrl_c_twice_ends_at_once(lab: Lab, site: Path) -> None:
    running = wait_at_the_package_lock(lab, site, seconds=120)
    running.send_signal(signal.SIGINT)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    assert answer(running, timeout=10).rc == 130
    assert "is being provisioned by" in reason(provision("apply", str(site)), WORKER), "its apt still waits"
    lab.fault("apt-lock", WORKER, undo=True)
    wait_for_what_runs_there(lab, WORKER)
    assert provision("apply", str(site)).rc == 0


def test_a_changed_host_key_is_refused_with_advice(site: Path, undo: Callable[..., None]) -> None:
    undo("host-key", WORKER)
    found = provision("apply", str(site))
    assert "host key" in reason(found, WORKER)
    assert found.document is not None
    [finding] = [f for f in found.document["findings"] if f["subject"] == WORKER and f["verdict"] == "fail"]
    assert "ssh-keygen -R" in finding["action"]


def test_a_sudo_password_comes_from_the_environment_and_a_wrong_one_is_said(
    site: Path, undo: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    undo("sudo-password", WORKER)
    assert "sudo" in reason(provision("apply", str(site)), WORKER)
    document = yaml.safe_load(site.read_text())
    document["access"]["sudo_password"] = True
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.setenv("PROVISION_SUDO_PASSWORD", "wrong")
    assert "sudo refused the password" in reason(provision("apply", str(site)), WORKER)


def test_after_a_reboot_in_the_middle_of_a_run_sudo_gets_its_password_again(
    lab: Lab, site: Path, undo: Callable[..., None]
) -> None:
    undo("sudo-password", WORKER)
    document = yaml.safe_load(site.read_text())
    document["access"]["sudo_password"] = True
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    cluster = load(site)
    password = lab.paths.sudo_password.read_text().strip()
    again = partial(connect, cluster, cluster.nodes[WORKER], sudo_password=password)
    before = again()
    boot = before.run(BOOT_ID).stdout.strip()
    after = reboot(before, again, limit=120, pause=1)
    try:
        assert not before.alive
        assert after.run(BOOT_ID).stdout.strip() != boot
        assert after.run("id -u").stdout == "0\n"
        assert after.run("grep -rlF -f /dev/stdin /tmp /run /var/tmp", stdin=password.encode()).stdout == ""
    finally:
        after.close()


def test_nodes_outside_of_the_limit_that_became_old_are_named(site: Path) -> None:
    document = yaml.safe_load(site.read_text())
    document["base"] = {"timezone": "Europe/Berlin"}
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    plan = provision("plan", str(site), "--limit", WORKER)
    assert plan.document is not None
    [finding] = [f for f in plan.document["findings"] if f["check"] == "nodes-outside-limit"]
    assert finding["read"] == f"{HEAD}, {OTHER}"


def test_a_head_outside_of_the_limit_is_read_for_what_it_holds_and_told(site: Path) -> None:
    told = subprocess.run(
        [*PROVISION, "apply", str(site), "--limit", WORKER], capture_output=True, text=True, check=True
    )
    assert f"{HEAD}: facts only: it is outside of this run" in told.stdout + told.stderr


HOOK = """\
- name: Around a component
  hosts: all
  gather_facts: false
  tasks:
    - name: Refuse
      ansible.builtin.fail: {msg: the switch has no such port}
      when: inventory_hostname in refused
    - name: Note which time service runs
      ansible.builtin.command: sh -c 'systemctl is-active chrony >/root/hook || [ $? = 3 ]'
      args: {creates: /root/hook}
"""


def test_a_hook_runs_before_its_component_on_nodes_of_its_roles(lab: Lab, site: Path) -> None:
    document = yaml.safe_load(site.read_text())
    document["groups"]["more"]["roles"] = ["monitor"]
    document["monitoring"] = {}  # what the role is a part of; not applied here
    document["hooks"] = [{"playbook": "hook.yml", "before": "time", "roles": ["monitor"]}]
    document["variables"] = {"refused": [WORKER]}
    (site.parent / "hook.yml").write_text(HOOK)
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    limited = (str(site), "--component", "time")
    for node in (WORKER, OTHER):
        lab.inside(node, "rm -f /root/hook; systemctl stop chrony")
    plan = provision("plan", *limited)
    assert plan.document, plan
    assert lab.inside(OTHER, "ls /root/hook || [ $? = 2 ]") == "", "a plan runs it in check mode"
    assert plan.nodes[WORKER]["reason"]
    found = provision("apply", *limited)
    title = "playbook hook.yml before time"
    assert reason(found, WORKER) == f"{title}: Refuse: the switch has no such port"
    assert lab.run(WORKER, "systemctl is-active chrony").stdout == "inactive\n", "its component is not begun"
    assert found.nodes[OTHER]["verdict"] == "pass", found.nodes
    assert lab.inside(OTHER, "cat /root/hook") == "inactive\n", "it ran before the component"
    assert {op["node"] for op in found.operations if op["title"] == title} == {WORKER, OTHER}
    document["variables"] = {"refused": []}
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    mended = provision("apply", *limited)
    assert mended.rc == 0, mended
    assert lab.inside(WORKER, "cat /root/hook; systemctl is-active chrony") == "inactive\nactive\n"
    assert provision("apply", *limited).changed == dict.fromkeys((HEAD, WORKER, OTHER), 0)
    for node in (WORKER, OTHER):
        lab.inside(node, "rm /root/hook")


def test_one_component_that_fails_holds_up_only_what_needs_it(lab: Lab, site: Path) -> None:
    document = yaml.safe_load(site.read_text())
    document["groups"]["more"]["roles"] = ["monitor"]
    document["monitoring"] = {}
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    in_the_way = {WORKER: ssh.DROP_IN, OTHER: "/etc/hosts"}
    for node, path in in_the_way.items():
        lab.inside(node, f"echo '# by hand' >>/etc/chrony/chrony.conf; rm {path}; mkdir {path}")
    try:
        found = provision("apply", str(site))
    finally:
        for node, path in in_the_way.items():
            lab.inside(node, f"rmdir {path}")
    for node, path in in_the_way.items():
        assert reason(found, node).startswith(f"file {path}: there is a directory of this name")
    outcomes = {(op["node"], op["title"]): op["outcome"] for op in found.operations}
    clock = "file /etc/chrony/chrony.conf"
    assert outcomes[WORKER, clock] == "changed", "the clock needs no sshd"
    assert (OTHER, clock) not in outcomes, "everything needs base"
    mended = provision("apply", str(site))
    assert mended.rc == 0, mended
    assert all(mended.changed[node] for node in in_the_way)
    assert sum(provision("apply", str(site)).changed.values()) == 0
