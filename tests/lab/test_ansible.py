"""Playbooks on real nodes: rolling maintenance while jobs run, and cancelled runs that leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from provision.engine.controller import converge
from provision.engine.journal import new_run
from provision.engine.leftovers import end_on_node, marked
from provision.engine.playbook import find_playbook, run_playbook
from provision.engine.remote import Output, connect
from provision.lab import Lab
from provision.report.model import Document, Verdict
from provision.site.load import find, load
from provision.site.models import Site
from tests.lab.command import provision

HEAD, FIRST, SECOND = "lab-head", "lab-gpu-1", "lab-gpu-2"
SITE = "inventories/lab.yml"
# Open for jobs. Slurm may go on to call a node mixed for minutes after its last job has ended.
OPEN = ("idle none", "mixed none", "allocated none")
QUICK: dict[str, Any] = {
    "slurm_node_poll": 2,
    "maintenance_packages": ["curl"],
    "maintenance_verify": ["true"],
}


def on_node(site: Site, node: str, command: str) -> Output:
    shell = connect(site, site.nodes[node])
    try:
        return shell.run(command)
    finally:
        shell.close()


def slurm(site: Site, command: str) -> str:
    output = on_node(site, HEAD, command)
    assert output.ok, f"{command}: {output.stderr}"
    return output.stdout.strip()


def state(site: Site, node: str) -> str:
    return slurm(site, f"sinfo -h -N -n {node} -o '%T %E' | sort -u")


def wait_for(said: Callable[[], bool], what: str, within: float = 60) -> None:
    deadline = time.monotonic() + within
    while not said():
        assert time.monotonic() < deadline, f"not within {within:.0f} s: {what}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def brought_up(lab: Lab) -> Site:
    site = load(find(SITE))
    document = converge(site, list(site.nodes.values()), verb="apply", forecast=False)
    assert document.verdict.good, document.findings
    return site


@pytest.fixture
def site(brought_up: Site) -> Iterator[Site]:
    """The lab with both workers idle, before and after."""
    idle(brought_up)
    yield brought_up
    idle(brought_up)


def idle(site: Site) -> None:
    slurm(site, "scancel --user=root")
    wait_for(lambda: slurm(site, "squeue -h") == "", "all jobs have ended")
    for node in (FIRST, SECOND):
        if state(site, node) not in OPEN:
            slurm(site, f"scontrol update nodename={node} state=resume")
        wait_for(partial(is_open, site, node), f"{node} is open")


def is_open(site: Site, node: str) -> bool:
    return state(site, node) in OPEN


def maintain(site: Site, nodes: list[str], **variables: Any) -> Document:
    return run_playbook(
        site,
        find_playbook(site, "rolling-maintenance"),
        [site.nodes[node] for node in nodes],
        run=new_run(),
        extra={**QUICK, **variables},
        timeout=500,
    )


def test_nodes_are_rebooted_one_by_one_while_a_job_runs_on_the_other(site: Site) -> None:
    boots = {
        node: on_node(site, node, "cat /proc/sys/kernel/random/boot_id").stdout for node in (FIRST, SECOND)
    }
    job = slurm(site, f"sbatch --parsable -w {SECOND} -o /dev/null --wrap 'sleep 20'")
    verification = [sys.executable, "-m", "provision", "verify", str(site.path), "--component", "prometheus"]
    document = maintain(
        site,
        [FIRST, SECOND],
        maintenance_reboot="always",
        maintenance_verify=[*verification, "--limit", "{{ inventory_hostname }}"],
    )
    assert document.verdict is Verdict.PASS, document.findings
    for node, boot in boots.items():
        assert on_node(site, node, "cat /proc/sys/kernel/random/boot_id").stdout != boot
        assert is_open(site, node)
    ended = slurm(site, f"sacct -X -n -o state -j {job}")
    assert ended == "COMPLETED", "its node was drained and waited for, not rebooted under it"


def test_a_node_that_a_person_drained_stays_drained(site: Site) -> None:
    slurm(site, f"scontrol update nodename={FIRST} state=drain reason='bad fan'")
    document = maintain(site, [FIRST], maintenance_reboot="never")
    assert document.verdict is Verdict.PASS, document.findings
    assert state(site, FIRST) == "drained bad fan"


def test_a_node_that_fails_stays_drained_and_the_next_is_not_begun(site: Site) -> None:
    document = maintain(site, [FIRST, SECOND], maintenance_reboot="never", maintenance_verify=["false"])
    assert document.nodes[FIRST].verdict is Verdict.FAIL
    assert "Verify" in str(document.nodes[FIRST].reason)
    assert f"not begun, since these have failed: {FIRST}" in str(document.nodes[SECOND].reason)
    assert state(site, FIRST) == "drained rolling maintenance failed: Verify"
    assert is_open(site, SECOND)
    again = maintain(site, [FIRST], maintenance_reboot="never")
    assert again.verdict is Verdict.PASS, again.findings
    assert is_open(site, FIRST)


def test_a_node_whose_jobs_do_not_end_is_given_back_as_it_was(site: Site) -> None:
    slurm(site, f"sbatch --parsable -w {FIRST} -o /dev/null --wrap 'sleep 300'")
    wait_for(lambda: slurm(site, "squeue -h -o %T") == "RUNNING", "the job runs")
    document = maintain(site, [FIRST], maintenance_reboot="always", maintenance_wait=6)
    assert "Wait for its jobs to end" in str(document.nodes[FIRST].reason)
    assert is_open(site, FIRST)
    assert slurm(site, "squeue -h -o %T") == "RUNNING"


LONG = """\
- name: Long
  hosts: all
  gather_facts: false
  tasks:
    - name: Sleep
      ansible.builtin.shell: sleep 611 & setsid sleep 611
"""


def sleepers(site: Site) -> dict[str, str]:
    return {node: on_node(site, node, "pgrep -x -f 'sleep 611'").stdout for node in site.nodes}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_cancelled_run_leaves_no_process_here_or_on_nodes(site: Site, tmp_path: Path, number: int) -> None:
    """Also where the controller is killed: its worker sees that it is gone."""
    (tmp_path / "long.yml").write_text(LONG)
    controller = subprocess.Popen(
        [sys.executable, "-m", "provision", "run", SITE, str(tmp_path / "long.yml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(lambda: all(sleepers(site).values()), "the task runs on all nodes", within=90)
        (run,) = runs_here()
        controller.send_signal(number)
        controller.wait(timeout=90)
        assert controller.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
        wait_for(lambda: not any(sleepers(site).values()), "the task has ended on all nodes")
        wait_for(
            lambda: marked(run) == [] and not list(Path("/dev/shm").glob(f"*{run}*")), "nothing is left here"
        )
    finally:
        controller.kill()


def test_a_playbook_and_another_run_keep_each_other_out(site: Site, tmp_path: Path) -> None:
    """The lease on the head keeps others away from all nodes, not only from those of the run."""
    (tmp_path / "long.yml").write_text(LONG)
    (tmp_path / "mark.yml").write_text(
        "- name: Mark\n  hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - name: Touch\n      ansible.builtin.command: touch /root/ran\n"
    )
    words = ["run", SITE, str(tmp_path / "long.yml"), "--limit", FIRST]
    long = subprocess.Popen([sys.executable, "-m", "provision", *words], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: bool(sleepers(site)[FIRST]), "the task runs", within=90)
        played = provision("run", SITE, str(tmp_path / "mark.yml"), "--limit", f"{FIRST},{SECOND}")
        applied = provision("apply", SITE, "--limit", SECOND)
        checked = provision("run", SITE, str(tmp_path / "mark.yml"), "--limit", SECOND, "--check")
    finally:
        long.send_signal(signal.SIGINT)
        long.wait(timeout=90)
    assert long.returncode == 130
    assert played.rc == applied.rc == 1
    assert f"{FIRST} is being provisioned by " in played.nodes[FIRST]["reason"]
    assert played.nodes[SECOND]["reason"].startswith("blocked by ")
    assert played.document
    assert all(
        finding["action"].startswith("wait for that run to end") for finding in played.document["findings"]
    )
    assert on_node(site, SECOND, "ls /root/ran").rc != 0
    assert applied.nodes[SECOND]["reason"].startswith(f"blocked by {HEAD}")
    assert checked.rc == 0
    after = provision("run", SITE, str(tmp_path / "mark.yml"), "--limit", SECOND)
    assert (after.rc, after.changed) == (0, {SECOND: 1})
    assert on_node(site, SECOND, "rm /root/ran").ok


def runs_here() -> set[str]:
    """Marks of the playbooks that are run on this machine now."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = entry.read_bytes().split(b"\0")
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        found |= {each[14:].decode() for each in variables if each.startswith(b"PROVISION_RUN=")}
    return found


def test_an_unreachable_node_is_told_from_a_failed_one(site: Site, tmp_path: Path) -> None:
    (tmp_path / "site.yml").write_text(
        site.path.read_text()
        .replace("10.77.0.[11-12]", "10.77.0.[11,99]")
        .replace("../.lab", str(site.directory.parent / ".lab"))
    )
    (tmp_path / "ssh_config").write_text(
        (site.directory.parent / ".lab" / "ssh_config").read_text().replace("10.77.0.12", "10.77.0.99")
    )
    text = (tmp_path / "site.yml").read_text()
    config = str(site.directory.parent / ".lab" / "ssh_config")
    (tmp_path / "site.yml").write_text(text.replace(config, str(tmp_path / "ssh_config")))
    (tmp_path / "fail.yml").write_text(
        "- name: Fail\n  hosts: worker\n  gather_facts: false\n  tasks:\n"
        "    - name: Refuse\n      ansible.builtin.command: 'false'\n      when: inventory_hostname == 'lab-gpu-1'\n"
        "    - name: Go on\n      ansible.builtin.command: 'true'\n      changed_when: false\n"
    )
    other = load(tmp_path / "site.yml")
    document = run_playbook(other, tmp_path / "fail.yml", list(other.nodes.values()), run=new_run())
    assert str(document.nodes[FIRST].reason).startswith("Refuse: non-zero return code")
    assert str(document.nodes[SECOND].reason).startswith("unreachable: ")
    assert document.exit_status == 1


def test_no_other_user_sees_a_secret_of_a_run(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that others can read of this machine's and a node's processes, looked at while the secret is in use."""
    monkeypatch.setenv("HUSH", secret := "v3ry-s3cret-w0rd")
    (tmp_path / "site.yml").write_text(
        site.path.read_text().replace("../.lab", str(site.directory.parent / ".lab"))
        + "\nvariables: {hush: {secret: {env: HUSH}}}\n"
    )
    (tmp_path / "use.yml").write_text(
        "- name: Use\n  hosts: worker\n  gather_facts: false\n  tasks:\n"
        "    - name: Keep\n      ansible.builtin.copy: {dest: /root/hush, content: '{{ hush }}', mode: '0600'}\n"
        "    - name: Fail loudly\n      ansible.builtin.fail: {msg: 'wrong {{ hush }}'}\n"
    )
    seen: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for line in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if secret.encode() in line.read_bytes():
                        seen.append(str(line))
                except (FileNotFoundError, ProcessLookupError):
                    continue
            time.sleep(0.05)

    other = load(tmp_path / "site.yml")
    watcher = threading.Thread(target=watch)
    watcher.start()
    events: list[dict[str, Any]] = []
    try:
        document = run_playbook(
            other, tmp_path / "use.yml", [other.nodes[FIRST]], run=new_run(), show=events.append
        )
    finally:
        over.set()
        watcher.join()
    assert seen == []
    assert document.nodes[FIRST].reason == "Fail loudly: wrong ***"
    assert secret not in document.model_dump_json() + str(events)
    assert on_node(site, FIRST, "stat -c %a /root/hush; rm /root/hush").stdout == "600\n"


def test_the_sweep_of_nodes_ends_what_hides(site: Site) -> None:
    mark = f"hidden-{os.getpid()}"
    start = f"PROVISION_RUN={mark} setsid sleep 612 >/dev/null 2>&1 & sleep 0.2; pgrep -x -f 'sleep 612'"
    assert on_node(site, FIRST, start).stdout
    assert on_node(site, FIRST, end_on_node(mark)).ok
    assert on_node(site, FIRST, "pgrep -x -f 'sleep 612'").stdout == ""
