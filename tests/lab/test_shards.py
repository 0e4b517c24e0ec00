"""A run by several worker processes: outcomes, hardware and secrets go between them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from provision.lab import Lab

ONE_NODE_A_WORKER = (
    "from provision.engine import controller; controller.SHARD = 1; from provision.cli import main; main()"
)


def test_nodes_of_different_workers_wait_for_each_other(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """munge's key comes from the head's worker, and slurmd waits for slurmctld in another process."""
    document = yaml.safe_load((Path(__file__).parents[2] / "inventories" / "lab.yml").read_text())
    document["access"]["ssh_config"] = str(lab.paths.ssh_config)
    site = tmp_path / "lab.yml"
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for attempt in ("first", "second"):
        answer = subprocess.run(
            [sys.executable, "-c", ONE_NODE_A_WORKER, "apply", str(site), "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert answer.returncode == 0, f"{attempt}: {answer.stderr}{answer.stdout}"
    nodes = json.loads(answer.stdout)["nodes"]
    assert {name: node["changed"] for name, node in nodes.items()} == dict.fromkeys(lab.nodes, 0)
    keys = {lab.inside(name, "sha256sum </etc/munge/munge.key") for name in lab.nodes}
    assert len(keys) == 1, "all nodes have the key of the head"
