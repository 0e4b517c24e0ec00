"""What verbs answered is kept, for the owner alone, the last fifty of it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from provision.report import store
from provision.report.model import Document, Verdict
from provision.report.store import StoreError, latest, save, state_directory
from provision.site.models import Site, SiteFile


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return make_site(tmp_path / "atlas.yml")


def make_site(path: Path) -> Site:
    groups = {"head": {"hosts": "head-1", "roles": ["head"]}}
    return Site.from_file(SiteFile.model_validate({"cluster": "atlas", "groups": groups}), path)


def document(verb: str = "verify", seconds: float = 0.0) -> Document:
    return Document(verb=verb, site="atlas", verdict=Verdict.PASS, seconds=seconds)


def test_the_latest_comes_back_with_its_time(site: Site) -> None:
    save(document(seconds=1.0), site)
    path = save(document(seconds=2.0), site)
    stored = latest(site)
    assert stored is not None
    assert stored.document == document(seconds=2.0)
    assert stored.path == path
    assert abs(stored.at.timestamp() - path.stat().st_mtime) < 5


def test_the_latest_of_a_verb(site: Site) -> None:
    save(document("apply", 1.0), site)
    save(document("verify", 2.0), site)
    stored = latest(site, "apply")
    assert stored is not None
    assert stored.document.seconds == 1.0
    assert latest(site, "burnin") is None


def test_nothing_stored_is_none(site: Site) -> None:
    assert latest(site) is None
    assert not state_directory(site).exists()


def test_only_the_owner_can_read(site: Site) -> None:
    path = save(document(), site)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_last_fifty_are_kept(site: Site) -> None:
    paths = [save(document(seconds=float(number)), site) for number in range(53)]
    assert sorted(paths[0].parent.iterdir()) == paths[3:]


def test_sites_of_one_name_in_two_places_are_apart(site: Site, tmp_path: Path) -> None:
    other = make_site(tmp_path / "elsewhere" / "atlas.yml")
    save(document(), site)
    assert latest(other) is None
    assert state_directory(other).name.startswith("atlas-")


def test_a_failed_write_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(document(), site)
    assert list((state_directory(site) / "documents").iterdir()) == []


def test_a_file_that_is_no_document_is_named(site: Site) -> None:
    path = save(document(), site)
    path.write_text('{"verb": 1')
    with pytest.raises(StoreError, match=path.name):
        latest(site)
