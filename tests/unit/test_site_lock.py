"""The lock file: what is wrong with a damaged one is said, with its place; writing it is all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision import atomic
from provision.site.lock import Lock, LockError, load_lock, lock_path, save_lock
from provision.site.models import Hardware, Site, SiteFile


@pytest.fixture
def site(tmp_path: Path) -> Site:
    document = {"cluster": "tiny", "groups": {"head": {"hosts": "h1", "roles": ["head"]}}}
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def test_what_is_written_is_read_again(site: Site) -> None:
    assert load_lock(site) == Lock()
    lock = Lock(hardware={"h1": Hardware(sockets=1, cores=4, threads=2, memory=2048)})
    save_lock(site, lock)
    assert load_lock(site) == lock
    assert [path.name for path in lock_path(site).parent.iterdir()] == ["tiny.lock.yml"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"hardware: {h1: {sockets: x}}\n",
            r"tiny.lock.yml: not a lock file: hardware.h1.sockets: .*integer",
        ),
        (b"colour: blue\n", r"tiny.lock.yml: not a lock file: colour: "),
        (b"hardware:\n  - [broken\n", r"tiny.lock.yml:\d: not YAML; take it back from version control"),
        (b"\xff\xfe\x00", r"tiny.lock.yml.*: not YAML"),
    ],
)
def test_a_damaged_lock_is_said_with_its_place_and_what_to_do(site: Site, content: bytes, said: str) -> None:
    lock_path(site).write_bytes(content)
    with pytest.raises(LockError, match=said):
        load_lock(site)


def test_a_lock_that_cannot_be_read_or_written_is_said(site: Site) -> None:
    lock_path(site).mkdir()
    with pytest.raises(LockError, match=r"tiny.lock.yml: cannot be read: Is a directory"):
        load_lock(site)
    with pytest.raises(LockError, match=r"tiny.lock.yml: cannot be written"):
        save_lock(site, Lock())


def test_a_file_is_replaced_whole_or_not_at_all_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    atomic.write(path, b"one")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o600)
    atomic.write(path, b"two", mode=0o644)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o644)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        atomic.write(tmp_path / "folder", b"x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "kept"]
