"""testinfra's modules on a root shell; the shell is one on this machine, as the user that runs the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.engine.remote import DeadlineExceeded, RemoteError, RootShell, local_shell
from provision.verify.backend import RootShellBackend, Session, target_host


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session("here", lambda: local_shell("here"))
    yield session
    session.close()


def test_a_command_gives_its_status_and_both_streams_exactly(session: Session) -> None:
    answer = target_host(session, "here").run("printf ' a\\n\\n'; printf b >&2; exit 3")
    assert (answer.rc, answer.stdout, answer.stderr) == (3, " a\n\n", "b")
    assert answer.failed


def test_what_stays_the_same_is_asked_once_and_what_was_said_is_kept(
    session: Session, tmp_path: Path
) -> None:
    backend = target_host(session, "here").backend
    for _ in range(2):
        assert (
            backend.once(f"echo x >>{tmp_path}/asked; echo why >&2; wc -l <{tmp_path}/asked").stdout.strip()
            == "1"
        )
    assert backend.said == ["why"]


def test_arguments_are_quoted(session: Session) -> None:
    hostile = "a'; exit 9; $(false) \" %s"
    assert target_host(session, "here").run("printf %%s %s", hostile).stdout == hostile


def test_output_that_is_no_text_keeps_its_bytes(session: Session, tmp_path: Path) -> None:
    content = bytes(range(256))
    (tmp_path / "binary").write_bytes(content)
    assert target_host(session, "here").file(str(tmp_path / "binary")).content == content


def test_text_is_utf8(session: Session, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Größe ∞\n", encoding="utf-8")
    assert target_host(session, "here").file(str(tmp_path / "text")).content_string == "Größe ∞\n"


def test_file_module(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "name with 'quotes'"
    path.write_text("line one\nline two\n")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    host = target_host(session, "here")
    file = host.file(str(path))
    assert (file.exists, file.is_file, file.mode, file.size) == (True, True, 0o640, 18)
    assert file.contains("two")
    assert not file.contains("three")
    assert host.file(str(tmp_path / "link")).linked_to == str(path)
    assert host.file(str(tmp_path)).is_directory
    assert not host.file(str(tmp_path / "absent")).exists


def test_modules_that_read_the_system(session: Session) -> None:
    host = target_host(session, "here")
    assert host.user("root").uid == 0
    assert host.group("root").gid == 0
    assert host.mount_point("/proc").filesystem == "proc"
    assert host.sysctl("kernel.ostype") == "Linux"
    assert host.system_info.type == "linux"
    assert host.exists("sh")
    assert not host.exists("no-such-program")
    assert host.process.filter(pid=1)
    assert not host.service("no-such-unit").is_running


def test_a_command_over_its_deadline_ends_and_the_next_one_works(session: Session) -> None:
    host = target_host(session, "here")
    backend = host.backend
    assert isinstance(backend, RootShellBackend)
    backend.deadline = time.monotonic() + 0.2
    with pytest.raises(DeadlineExceeded, match="here: no answer"):
        host.run("sleep 5")
    with pytest.raises(DeadlineExceeded, match="no time left"):
        host.run("true")
    backend.deadline = None
    assert host.run("true").rc == 0


def test_a_session_serves_one_thread_at_a_time(session: Session) -> None:
    answers: dict[int, list[str]] = {number: [] for number in range(4)}

    def ask(number: int) -> None:
        host = target_host(session, "here")
        answers[number] = [host.check_output(f"echo {number}-{turn}") for turn in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [f"{number}-{turn}" for turn in range(20)] for number in answers}


def test_waiting_for_a_busy_session_counts_towards_the_deadline(session: Session) -> None:
    session.open()
    slow = threading.Thread(target=session.run_bytes, args=("sleep 0.5",))
    slow.start()
    time.sleep(0.1)
    with pytest.raises(DeadlineExceeded, match="busy"):
        session.run_bytes("true", timeout=0.1)
    slow.join()


def test_an_unreachable_node_is_tried_once() -> None:
    tries: list[int] = []

    def refuse() -> RootShell:
        tries.append(1)
        raise RemoteError("gpu-1: connection refused", "is it up?")

    session = Session("gpu-1", refuse)
    for _ in range(3):
        with pytest.raises(RemoteError, match="connection refused"):
            session.open()
    assert len(tries) == 1


def test_a_controller_without_ssh_says_so() -> None:
    session = Session("gpu-1", lambda: RootShell(["no-such-ssh"], "root", name="gpu-1"))
    with pytest.raises(RemoteError, match="gpu-1: ssh cannot be started here"):
        session.open()


def test_interrupting_ends_a_running_command(session: Session) -> None:
    session.open()
    raised: list[RemoteError] = []

    def run() -> None:
        try:
            session.run_bytes("sleep 30")
        except RemoteError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    session.interrupt()
    thread.join(5)
    assert raised
    assert time.monotonic() - begin < 4
    with pytest.raises(RemoteError, match="closed"):
        session.run_bytes("true")
