"""`provision verify` on nodes of the lab, which need not have been built by this tool."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.lab import Lab
from tests.lab.command import PROVISION

Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def site(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site file that says how to reach the lab's nodes and names every component."""
    roles = {"head": ["head", "monitor"], "worker": ["worker"]}
    groups = {
        node.name: {"hosts": node.name, "addresses": node.address, "roles": roles[node.role]}
        for node in lab.nodes.values()
    }
    access = {"user": "ops", "ssh_config": str(lab.paths.ssh_config), "host_keys": "strict"}
    path = tmp_path / "lab.yml"
    components = {name: {} for name in ("ssh", "firewall", "time", "storage", "monitoring", "logs")}
    networks = {"management": "10.77.0.0/24"}
    document = {"cluster": "lab", "access": access, "groups": groups, "networks": networks, **components}
    document["scheduler"] = {"slurm": {}}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return path


@pytest.fixture
def verify(site: Path) -> Verify:
    """Runs `provision verify --json`; exit status and document."""

    def call(*options: str) -> tuple[int, dict[str, Any]]:
        command = [*PROVISION, "verify", str(site), "--json", *options]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert answer.returncode in (0, 1), answer.stderr
        return answer.returncode, json.loads(answer.stdout)

    return call


@contextmanager
def fault(lab: Lab, kind: str, node: str) -> Iterator[None]:
    lab.fault(kind, node)
    try:
        yield
    finally:
        lab.fault(kind, node, undo=True)


def findings_of(document: dict[str, Any], node: str) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in document["findings"] if finding["subject"] == node}


def test_healthy_nodes_pass(verify: Verify, lab: Lab) -> None:
    status, document = verify("--component", "verify")
    assert status == 0
    assert {name: node["verdict"] for name, node in document["nodes"].items()} == dict.fromkeys(
        lab.nodes, "pass"
    )


def test_a_failed_unit_is_named(verify: Verify, lab: Lab) -> None:
    lab.run("lab-gpu-1", "! sudo systemd-run --wait --unit=broken-on-purpose false")
    try:
        status, document = verify("--component", "verify")
    finally:
        lab.run("lab-gpu-1", "sudo systemctl reset-failed broken-on-purpose")
    assert status == 1
    found = findings_of(document, "lab-gpu-1")["units-failed"]
    assert (found["verdict"], found["read"]) == ("fail", "broken-on-purpose.service")
    assert document["nodes"]["lab-head"]["verdict"] == "pass"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("freeze-sshd", "timed out"),
        ("host-key", "host key is not the known one"),
        ("sudo-password", "a password is required"),
    ],
)
def test_a_node_out_of_reach_is_unknown_with_the_reason(
    verify: Verify, lab: Lab, kind: str, why: str
) -> None:
    with fault(lab, kind, "lab-gpu-1"):
        begin = time.monotonic()
        status, document = verify("--component", "verify")
    assert time.monotonic() - begin < 60
    assert status == 1
    (found,) = findings_of(document, "lab-gpu-1").values()
    assert (found["check"], found["verdict"]) == ("node-reachable", "unknown")
    assert why in found["why"]
    assert found["action"]
    assert document["nodes"]["lab-head"]["verdict"] == "pass"


def test_a_sudo_password_from_the_environment_is_used_and_shown_nowhere(
    verify: Verify, lab: Lab, site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with fault(lab, "sudo-password", "lab-gpu-1"):
        password = lab.paths.sudo_password.read_text().strip()
        monkeypatch.setenv("PROVISION_SUDO_PASSWORD", password)
        written = yaml.safe_load(site.read_text())
        written["groups"]["lab-gpu-1"]["access"] = {"sudo_password": True}
        site.write_text(yaml.safe_dump(written, sort_keys=False))
        status, document = verify("--component", "verify")
    assert status == 0
    assert password not in json.dumps(document)
    for stored in (tmp_path / "state").rglob("*.json"):
        assert password not in stored.read_text()


def test_on_nodes_that_nobody_built_no_check_raises(verify: Verify, lab: Lab) -> None:
    """Nothing is installed, and that is known: no check raises, and none doubts for want of a program or a file."""
    status, document = verify()
    assert status == 1
    assert set(document["nodes"]) == set(lab.nodes)
    raised = [
        f"{finding['check']} on {finding['subject']}: {finding['why']}"
        for finding in document["findings"]
        if re.match(r"\w+(Error|Exception): ", finding["why"] or "")
    ]
    assert raised == []
    doubts = [
        f"{finding['check']} on {finding['subject']}: {finding['why']}"
        for finding in document["findings"]
        if finding["verdict"] == "unknown" and re.search(r"not found|No such file", finding["why"] or "")
    ]
    assert doubts == []
    slurm = findings_of(document, "lab-head")["slurm-files"]  # its packages are there, in a layer
    assert (slurm["verdict"], slurm["read"]) == ("fail", "not there")


def test_a_program_that_was_taken_away_is_told_from_one_that_was_never_installed(
    verify: Verify, lab: Lab
) -> None:
    lab.inside("lab-gpu-1", "mv /usr/bin/systemctl /usr/bin/systemctl.away")
    try:
        _, document = verify("--component", "verify")
    finally:
        lab.inside("lab-gpu-1", "mv /usr/bin/systemctl.away /usr/bin/systemctl")
    found = findings_of(document, "lab-gpu-1")["units-failed"]
    assert (found["verdict"], found["why"]) == ("unknown", "systemctl is gone, though systemd is installed")


def test_an_interrupt_ends_at_once_and_leaves_no_connection(lab: Lab, site: Path) -> None:
    with fault(lab, "freeze-sshd", "lab-gpu-1"):
        command = [*PROVISION, "verify", str(site), "--component", "verify"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stderr is not None
        line = process.stderr.readline()  # a node that answers is done, the frozen one is being waited for
        assert "pass" in line
        children = _children(process.pid)
        assert children
        begin = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert time.monotonic() - begin < 5
        process.stderr.close()
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() - begin < 15, "ssh is still there"
            time.sleep(0.2)
    told = subprocess.run([*PROVISION, "report", str(site), "--json"], capture_output=True, text=True)
    assert told.returncode == 130, told.stderr
    nodes = json.loads(told.stdout)["nodes"]
    assert nodes["lab-gpu-1"]["reason"] == "verify-ended: interrupted"
    assert nodes[line.partition(":")[0]]["verdict"] == "pass"


def _children(pid: int) -> list[int]:
    """Processes that `pid` has started and not yet waited for."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
