"""`provision tune nccl` on real nodes through a real Slurm: where nothing can be measured, nothing is chosen.

GPUs of lab nodes are simulated: PyTorch sees none, so each job ends by saying so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.admitted import HEAD, OTHER, WORKER, Admitted, bad
from tests.lab.command import provision


@pytest.fixture
def site(admitted: Admitted) -> Path:
    """The admitted cluster as one whose GPUs are real and whose fabric is told of."""
    text = Path(admitted.site).read_text()
    for old, new in (
        ("burnin: {device: cpu}", "burnin: {device: gpu}\nfabric: {}"),
        ("  management: 10.77.0.0/24\n", "  management: 10.77.0.0/24\n  fabric: {kind: ethernet}\n"),
    ):
        assert old in text
        text = text.replace(old, new)
    path = Path(admitted.site).with_name("tuned.yml")
    path.write_text(text)
    return path


def test_what_cannot_be_measured_is_unknown_and_leaves_no_trace(admitted: Admitted, site: Path) -> None:
    before = site.read_text()
    found = provision("tune", "nccl", str(site), "--accept")
    assert found.rc == 1, found.stderr
    assert found.document is not None
    assert site.read_text() == before
    about = {finding["subject"]: finding for finding in found.document["findings"]}
    assert "fabric.interfaces" in about, bad(found)
    assert about["fabric.interfaces"]["verdict"] == "unknown"
    assert "could not be measured" in about["fabric.interfaces"]["why"]
    assert about["fabric.hcas"]["verdict"] == "skip"
    tried = [each["value"] for each in found.document["details"]["measured"]]
    assert tried == [None, ["host0"]]
    assert {name: node["verdict"] for name, node in found.nodes.items()} == {WORKER: "pass", OTHER: "pass"}
    assert "No reservations" in admitted.on(HEAD, "scontrol show reservation")
    assert admitted.on(HEAD, "sinfo -h -o '%T %D'").split() == ["idle", "2"]
    admitted.whole = True  # nothing was changed
