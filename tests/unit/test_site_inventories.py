"""The site files that come with the project say what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision.engine.ssh import jump_chain
from provision.site.load import examine, load
from provision.site.models import Gpu

INVENTORIES = Path(__file__).parents[2] / "inventories"
FILES = sorted(
    path
    for path in INVENTORIES.rglob("*.yml")
    if not path.name.endswith(".lock.yml") and ".lab" not in path.parts
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_passes(file: Path) -> None:
    problems = examine(file).problems
    assert [str(problem) for problem in problems if problem.rule != "access-file"] == []


def test_the_lab_is_one_head_and_two_workers_with_an_ordinary_user() -> None:
    site = load(INVENTORIES / "lab.yml")
    assert [node.name for node in site.nodes.values()] == ["lab-head", "lab-gpu-1", "lab-gpu-2"]
    assert [node.address for node in site.nodes.values()] == ["10.77.0.10", "10.77.0.11", "10.77.0.12"]
    assert site.nodes["lab-gpu-2"].gpu == Gpu(model="h100-sxm", count=2)
    assert site.head.access.user == "ops"
    assert site.file.base.users["alice"].uid == 2001


def test_atlas_is_eighteen_machines_behind_a_gate() -> None:
    site = load(INVENTORIES / "examples" / "atlas.yml")
    assert len(site.nodes) == 18
    assert site.nodes["atlas-gpu-016"].address == "10.1.1.16"
    assert jump_chain(site, str(site.head.access.jump)) == "admin@gate.atlas.example.com"


def test_comet_has_ipv6_alone_and_jumps_over_its_head() -> None:
    site = load(INVENTORIES / "examples" / "comet.yml")
    node = site.nodes["comet-gpu-2"]
    assert (node.address, node.access.port) == ("2001:db8:7::22", 22)
    assert jump_chain(site, str(node.access.jump)) == "ops@[2001:db8:7::10]:2222"
    assert site.head.access.jump is None
