"""`provision lock`: what it answers without asking any node."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from provision.cli import verbs
from provision.components.nvidia import locking
from provision.engine import locking as engine
from provision.site.load import load
from provision.site.lock import Lock, LockError, load_lock, save_lock

SITE = """cluster: tiny
groups:
  head: {hosts: h1, roles: [head]}
  gpu: {hosts: g1, roles: [worker], gpu: {model: h100-sxm, count: 8}}
scheduler: {slurm: {}}
"""
UBUNTU = locking.Offer("g1", "ubuntu 24.04", "6.8.0-90-generic", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yml"
    path.write_text(f"{SITE}nvidia: {{cuda: '13.0'}}\n")
    return path


def locked(path: Path) -> None:
    site = load(path)
    save_lock(site, Lock(nvidia={"gpu": locking.resolve(site, "gpu", date(2026, 1, 15), UBUNTU)}))


def call(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    verbs.register(app, [])
    result = CliRunner().invoke(app, ["lock", *words])
    return result.exit_code, result.output


def test_nothing_to_lock(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yml"
    path.write_text(SITE)
    rc, output = call(str(path))
    assert rc == 2
    assert "`nvidia` is not named in it" in " ".join(output.split())


def test_no_lock_yet(path: Path) -> None:
    rc, output = call(str(path), "--check", "--json")
    document = json.loads(output)
    assert (rc, document["verdict"]) == (1, "fail")
    (finding,) = document["findings"]
    assert (finding["subject"], finding["read"]) == ("gpu", "group gpu has no set yet")
    assert str(path) in finding["action"]


def test_a_lock_that_fits_is_one_line_a_group(path: Path) -> None:
    locked(path)
    rc, output = call(str(path), "--check")
    assert rc == 0
    assert (
        "gpu: 580.126.20 open dkms from nvidia for 8 x h100-sxm on ubuntu 24.04 (generic), fabric manager, CUDA 13.0"
        in output
    )


def test_a_lock_of_an_older_site_file(path: Path) -> None:
    locked(path)
    path.write_text(path.read_text().replace("13.0", "12.8"))
    rc, output = call(str(path), "--check", "--json")
    assert rc == 1
    assert "cuda is 13.0 in the lock, 12.8 in the site file" in json.loads(output)["findings"][0]["read"]


def test_a_set_that_cannot_work_asks_no_node(path: Path) -> None:
    path.write_text(path.read_text().replace("cuda: '13.0'", "cuda: '13.0', branch: 570"))
    rc, output = call(str(path), "--json")
    assert rc == 2
    assert "CUDA 13.0 needs driver 580.65.06" in output


def test_apply_resolves_what_is_missing_and_refuses_what_contradicts(path: Path) -> None:
    site = load(path)
    assert engine.missing(site, load_lock(site)) == ["gpu"]
    locked(path)
    assert engine.missing(site, load_lock(site)) == []
    broken = load_lock(site).nvidia["gpu"].model_copy(update={"fabric_manager": "580.95.05"})
    with pytest.raises(LockError, match="must be of one patch level: look at it, then run `provision lock"):
        engine.missing(site, Lock(nvidia={"gpu": broken}))


def test_a_silent_group_holds_up_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes fail by themselves; `provision lock` itself says so and ends."""

    def silent(*arguments: object) -> locking.Offer:
        raise engine.SilentGroup("group gpu: no node of it can be asked: g1 is off")

    monkeypatch.setattr(engine, "_first_offer", silent)
    site = load(path)
    assert engine.complete(site, Lock(), sudo_password=None, keep=True) == Lock()
    with pytest.raises(LockError, match="g1 is off"):
        engine.resolve(site, Lock(), ["gpu"])


def test_what_is_resolved_on_the_way_is_written_down(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_first_offer", lambda *arguments: UBUNTU)
    site = load(path)
    planned = engine.complete(site, Lock(), sudo_password=None, keep=False)
    assert load_lock(site) == Lock()
    assert engine.complete(site, Lock(), sudo_password=None, keep=True) == planned == load_lock(site)
