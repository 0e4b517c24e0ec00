"""Files of a node are replaced whole or not at all, and nobody reads them on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.engine import manifest
from provision.engine.remote import RootShell, local_shell
from provision.engine.replace import replace


@pytest.fixture
def shell() -> Iterator[RootShell]:
    session = local_shell("n1")
    yield session
    session.close()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_comes_whole_with_its_mode_and_its_folder(shell: RootShell, tmp_path: Path) -> None:
    path = tmp_path / "it's new" / "file"
    assert shell.run(replace(str(path), mode="640"), stdin=b"\0 any\n").ok
    assert (path.read_bytes(), mode(path), mode(path.parent)) == (b"\0 any\n", 0o640, 0o755)
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_on_the_way_it_is_its_owners_alone(shell: RootShell, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    output = shell.run(
        replace(str(tmp_path / "file"), mode="644", check=f'stat -c %a "$t" >{seen}'), stdin=b"x"
    )
    assert output.ok
    assert seen.read_text() == "600\n"


@pytest.mark.parametrize(("check", "rc"), [('grep -q good "$t"', 1), ("exit 0", 0), ("exit 4", 4)])
def test_what_its_check_refuses_leaves_the_old_one(
    shell: RootShell, tmp_path: Path, check: str, rc: int
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    before = path.stat().st_ino
    assert shell.run(replace(str(path), mode="600", check=check), stdin=b"bad").rc == rc
    assert (path.read_text(), path.stat().st_ino) == ("old", before)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_of_that_name_is_no_place_for_it(shell: RootShell, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    assert not shell.run(replace(str(tmp_path / "file"), mode="600"), stdin=b"x").ok
    assert list((tmp_path / "file").iterdir()) == []


def test_a_manifest_is_written_only_where_it_differs(
    shell: RootShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lib" / "manifest.json"
    monkeypatch.setattr(manifest, "MANIFEST", str(path))
    inodes = []
    for digest in ("d1", "d1", "d2"):
        manifest.write_manifest(shell, digest, {"base": {"files": ["/etc/b"], "units": []}})
        inodes.append(path.stat().st_ino)
    assert inodes[0] == inodes[1] != inodes[2]
    assert mode(path) == 0o600
