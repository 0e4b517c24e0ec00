"""The burn-in over ssh on nodes without a scheduler: bare nodes of the lab, two ranks on the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from provision.lab import Lab
from tests.lab.command import answer, provision, start

RANK = "[w]orkload.program import main"  # of its command line, and of no other
SITE = """
cluster: bare
access: {{user: ops, ssh_config: {ssh_config}, host_keys: strict}}
groups:
  head: {{hosts: lab-head, addresses: 10.77.0.10, roles: [head]}}
  gpu: {{hosts: "lab-gpu-[1-2]", addresses: "10.77.0.[11-12]", roles: [worker]}}
networks: {{management: 10.77.0.0/24}}
burnin: {{device: cpu, directory: /var/tmp/burnin}}
"""


@pytest.fixture
def site(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "bare.yml"
    path.write_text(SITE.format(ssh_config=lab.paths.ssh_config))
    return str(path)


def test_nodes_pass_without_a_shared_folder_or_a_scheduler(site: str) -> None:
    done = provision("burnin", site)
    assert done.rc == 0, done
    assert {node: each["verdict"] for node, each in done.nodes.items()} == {
        "lab-gpu-1": "pass",
        "lab-gpu-2": "pass",
    }
    assert done.document is not None
    ranks = done.document["details"]["burnin"]["ranks"]
    assert [(rank["host"], rank["address"]) for rank in ranks] == [
        ("lab-gpu-1", "10.77.0.11"),
        ("lab-gpu-2", "10.77.0.12"),
    ]


def runs(lab: Lab) -> set[str]:
    """The folders of all burn-ins so far."""
    return set(lab.run("lab-gpu-1", "ls /var/tmp/burnin").stdout.split())


def at_work(lab: Lab, run: str) -> bool:
    """Whether its ranks have found each other."""
    return "all_reduce" in lab.run("lab-gpu-1", f"cat /var/tmp/burnin/{run}/job-lab-gpu-1.log").stdout


def test_a_rank_that_is_killed_is_named_and_a_second_burn_in_is_refused(lab: Lab, site: str) -> None:
    earlier = runs(lab)
    first = start("burnin", site)
    deadline = time.monotonic() + 240
    while not any(at_work(lab, run) for run in runs(lab) - earlier):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    second = provision("burnin", site)
    assert "another burn-in runs" in str(second.document)
    lab.run("lab-gpu-2", f"pkill -9 -f '{RANK}'")
    done = answer(first, 600)
    assert done.rc == 1
    assert done.nodes["lab-gpu-2"]["verdict"] == "fail"
    assert "rank 1" in done.nodes["lab-gpu-2"]["reason"]
