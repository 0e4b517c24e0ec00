"""What `provision discover` reads of real nodes, and what a plan says of a machine that is not as the file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from provision.lab import Lab
from tests.lab.command import provision

OTHER = "lab-gpu-2"


@pytest.fixture
def site(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's site file without its GPUs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    text = re.sub(
        r"(?m)^(\s*ssh_config:).*$", rf"\1 {lab.paths.ssh_config}", Path("inventories/lab.yml").read_text()
    )
    text, found = re.subn(r"(?m)^ *gpu: \{model.*\n", "", text)
    assert found == 1
    (tmp_path / "lab.yml").write_text(text)
    return tmp_path / "lab.yml"


def test_machines_are_read_proposed_accepted_and_missed(lab: Lab, site: Path) -> None:
    before = site.read_text()
    first = provision("discover", str(site))
    assert first.rc == 0, first
    assert first.document is not None
    assert "+    gpu: {model: h100-sxm, count: 2}\n" in first.document["details"]["diff"]
    machine = first.document["details"]["machines"][OTHER]
    assert [gpu["model"] for gpu in machine["gpus"]] == ["h100-sxm", "h100-sxm"]
    assert machine["unread"] == {}
    assert site.read_text() == before

    accepted = provision("discover", str(site), "--accept")
    assert accepted.document is not None
    assert (accepted.rc, accepted.document["verdict"]) == (0, "pass"), accepted
    text = site.read_text()
    assert "    gpu: {model: h100-sxm, count: 2}\n" in text
    assert [line for line in text.splitlines() if line in before.splitlines()] == before.splitlines()
    again = provision("discover", str(site))
    assert again.document is not None
    assert (again.document["findings"], again.document["details"]["diff"]) == ([], "")

    lab.fault("gpu-gone", OTHER)
    found = provision("discover", str(site))
    assert found.document is not None
    (finding,) = found.document["findings"]
    assert (finding["check"], finding["subject"], finding["read"]) == (
        "machine-unlike-group",
        OTHER,
        "GPUs 1 x h100-sxm",
    )
    plan = provision("plan", str(site), "--limit", OTHER, "--component", "base")
    assert plan.document is not None
    told = [each for each in plan.document["findings"] if each["check"] == "node-contradicts"]
    assert [(each["subject"], each["read"]) for each in told] == [
        (OTHER, "GPUs are 1 x h100-sxm, the site file says 2 x h100-sxm")
    ]

    lab.fault("unplug", OTHER)
    silent = provision("discover", str(site))
    lab.fault("unplug", OTHER, undo=True)
    assert silent.rc == 1
    assert silent.nodes[OTHER]["verdict"] == "unknown"
    assert silent.nodes[OTHER]["reason"]
