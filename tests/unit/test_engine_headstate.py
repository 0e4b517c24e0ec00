"""What the head holds: secrets are adopted before any is made, and what cannot be read is never taken for missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.engine import headstate, limits, preflight
from provision.engine.deploy import Secret
from provision.engine.headstate import Acceptance, HeadError
from provision.engine.remote import RemoteError, RootShell, local_shell
from provision.report.model import Document, Verdict
from provision.site.models import Site, SiteFile


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RootShell]:
    """A shell on this machine whose records are in a folder of the test."""
    monkeypatch.setattr(headstate, "DIRECTORY", str(tmp_path / "provision"))
    session = local_shell("head-1")
    yield session
    session.close()


def wanted(**fields: object) -> dict[str, Secret]:
    return {"key": Secret("key", lambda: b"new", **fields)}  # type: ignore[arg-type]


def test_a_stored_secret_comes_back_and_only_root_can_read_it(shell: RootShell, tmp_path: Path) -> None:
    assert headstate.read_secrets(shell, wanted()) == ({}, {})
    headstate.write_secret(shell, "key", b"\0any bytes\n")
    assert headstate.read_secrets(shell, wanted()) == ({"key": b"\0any bytes\n"}, {})
    path = tmp_path / "provision" / "secrets" / "key"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_secret_of_a_service_is_adopted_out_of_its_configuration(
    shell: RootShell, tmp_path: Path
) -> None:
    (tmp_path / "dbd.conf").write_text("Host=h\nPass=old\n")
    secrets = wanted(adopt=(str(tmp_path / "none"), str(tmp_path / "dbd.conf")), pattern=r"^Pass=(.+)$")
    assert headstate.read_secrets(shell, secrets) == ({}, {"key": b"old"})


@pytest.mark.parametrize("place", ["provision/secrets/key", "service.key"])
def test_a_secret_that_cannot_be_read_is_not_made_anew(shell: RootShell, tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)  # what root cannot read either
    with pytest.raises(HeadError, match=rf"head-1: cannot read .*{place}"):
        headstate.read_secrets(shell, wanted(adopt=(str(tmp_path / "service.key"),)))


def test_acceptance_is_kept_whole(shell: RootShell) -> None:
    assert headstate.read_acceptance(shell) == {}
    states = {"g1": Acceptance(state="quarantined", since="2026-01-01T00:00:00+00:00", reason="slow")}
    headstate.write_acceptance(shell, states)
    assert headstate.read_acceptance(shell) == states


@pytest.mark.parametrize("content", ["", "[]", '{"g1": {"state": "fine"}}'])
def test_a_damaged_acceptance_is_an_error_and_not_a_cluster_of_new_nodes(
    shell: RootShell, tmp_path: Path, content: str
) -> None:
    (tmp_path / "provision").mkdir()
    (tmp_path / "provision" / "acceptance.json").write_text(content)
    with pytest.raises(HeadError, match=r"acceptance.json is damaged"):
        headstate.read_acceptance(shell)


def kept(name: str, error: Exception | None = None) -> headstate.Kept:
    def write(shell: RootShell) -> None:
        if error is not None:
            raise error
        assert shell.run(f"touch {headstate.DIRECTORY}.{name}").ok

    return headstate.Kept(write, name, "do it by hand", "/there")


def test_what_cannot_be_kept_hides_nothing_else_and_all_of_it_is_one_session(
    shell: RootShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[RootShell] = []

    def connect(*_: object, **__: object) -> RootShell:
        sessions.append(local_shell("h1"))
        return sessions[-1]

    monkeypatch.setattr(headstate, "connect", connect)
    groups = {"head": {"hosts": "h1", "roles": ["head"]}}
    file = SiteFile.model_validate({"cluster": "tiny", "groups": groups})
    site = Site.from_file(file, tmp_path / "tiny.yml")
    document = Document(verb="burnin", verdict=Verdict.PASS)
    things = [
        kept("full", HeadError("no space left")),
        kept("whole"),
        kept("lost", RemoteError("h1: gone")),
        kept("after"),
    ]
    headstate.keep(site, document, things, sudo_password=None)
    assert [path.name for path in tmp_path.glob("provision.*")] == ["provision.whole"]
    said = [(finding.check, finding.verdict, finding.why) for finding in document.findings]
    assert said == [
        ("full", Verdict.WARN, "no space left"),
        ("lost", Verdict.WARN, "h1: gone"),
        ("after", Verdict.WARN, "h1: gone"),
    ]
    assert document.verdict is Verdict.WARN
    assert [session.alive for session in sessions] == [False]


def test_a_bare_machine_has_no_limits_and_no_manifest(shell: RootShell) -> None:
    for command, path, parse in (
        (limits.command(), limits.PATH, limits.parse),
        (preflight._READ_MANIFEST, preflight.MANIFEST, preflight.parse_manifest),
    ):
        output = shell.run(command.replace(path, "/nowhere/at/all"))
        assert output.ok
        assert parse(output.stdout) == {}
