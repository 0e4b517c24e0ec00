"""The encrypted copy of the secrets: round trip, unreadable without its key, rewritten only when it differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision.site import escrow
from provision.site.models import Site, SiteFile

SECRETS = {"munge.key": b"\x00\x01munge", "slurmdbd.password": b"hunter2"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = SiteFile.model_validate({"cluster": "t", "groups": {"head": {"hosts": "h1", "roles": ["head"]}}})
    return Site.from_file(file, tmp_path / "t.yml")


def test_what_was_saved_is_loaded_and_nothing_of_it_can_be_read(site: Site) -> None:
    assert escrow.load(site) == {}
    escrow.save(site, SECRETS)
    assert escrow.load(site) == SECRETS
    content = escrow.copy_path(site).read_bytes()
    assert b"munge" not in content
    assert b"hunter2" not in content
    for path in (escrow.copy_path(site), escrow.key_path(site)):
        assert path.stat().st_mode & 0o077 == 0


def test_the_same_secrets_are_not_written_again(site: Site) -> None:
    escrow.save(site, SECRETS)
    before = escrow.copy_path(site).read_bytes()
    escrow.save(site, SECRETS)
    assert escrow.copy_path(site).read_bytes() == before


def test_a_copy_without_its_key_names_the_key(site: Site) -> None:
    escrow.save(site, SECRETS)
    escrow.key_path(site).unlink()
    with pytest.raises(escrow.EscrowError, match=r"t\.key"):
        escrow.load(site)


def test_a_key_of_another_cluster_is_said_to_be_that(site: Site) -> None:
    escrow.save(site, SECRETS)
    escrow.key_path(site).write_bytes(b"A" * 43 + b"=\n")
    with pytest.raises(escrow.EscrowError, match="key of this cluster"):
        escrow.save(site, {"x": b"y"})
