"""The root shell: commands in subshells, content on standard input, deadlines, and why sessions end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provision.engine import preflight, remote
from provision.engine.inventory import host_variables
from provision.engine.remote import DeadlineExceeded, RemoteError, RootShell, explain_loss, local_shell
from provision.site.models import Site, SiteFile


@pytest.fixture
def shell() -> Iterator[RootShell]:
    session = local_shell("node-1")
    yield session
    session.close()


def test_both_streams_and_the_exit_status_come_back(shell: RootShell) -> None:
    output = shell.run("echo out; echo err >&2; exit 3")
    assert (output.rc, output.stdout, output.stderr) == (3, "out\n", "err\n")


def test_a_command_that_exits_or_is_wrong_syntax_leaves_the_session_alive(shell: RootShell) -> None:
    assert shell.run("if then").rc != 0
    assert shell.run("exit 9").rc == 9
    assert shell.run("echo still here").stdout == "still here\n"


def test_output_without_a_last_newline_stays_as_it_is(shell: RootShell) -> None:
    assert shell.run("printf 'a\\nb'").stdout == "a\nb"


def test_content_travels_on_standard_input_and_never_in_arguments(shell: RootShell) -> None:
    output = shell.run(
        "cat; tr '\\0' ' ' </proc/$$/cmdline; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", b"hunter2"
    )
    assert output.stdout.startswith("hunter2")
    assert "hunter2" not in output.stdout.removeprefix("hunter2")


def test_large_content_both_ways_does_not_block(shell: RootShell) -> None:
    content = os.urandom(3_000_000).hex().encode()
    assert shell.run("cat", content).stdout.encode() == content


def test_many_commands_are_answered_in_order_in_one_round_trip(shell: RootShell) -> None:
    outputs = shell.run_many(["echo 1", "exit 4", "echo 3 >&2"])
    assert [(o.rc, o.stdout, o.stderr) for o in outputs] == [(0, "1\n", ""), (4, "", ""), (0, "", "3\n")]


def test_a_session_with_a_bound_waits_for_nothing_beyond_it() -> None:
    session = RootShell(["sh", "-c"], "root", name="node-1", within=1.0)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"node-1: no answer within [01] s to: sleep 30"):
        session.run("sleep 30", timeout=60)
    assert time.monotonic() - began < 5
    with pytest.raises(RemoteError, match=r"node-1: no answer from ssh or sudo"):
        RootShell(["sh", "-c", "sleep 30"], "root", name="node-1", within=0.2)


def test_a_command_that_does_not_end_raises_with_its_text_and_closes_the_session(shell: RootShell) -> None:
    with pytest.raises(DeadlineExceeded, match=r"node-1: no answer within 0 s to: sleep 30"):
        shell.run("sleep 30", timeout=0.3)
    assert not shell.alive


def test_of_many_commands_the_one_that_does_not_end_is_named(shell: RootShell) -> None:
    with pytest.raises(DeadlineExceeded, match=r"to: sleep 30$"):
        shell.run_many(["true", "echo x\necho y", "sleep 30", "echo never"], timeout=0.5)


def test_of_many_commands_each_has_the_whole_time(shell: RootShell) -> None:
    answers = shell.run_many(["sleep 0.4; echo 1", "sleep 0.4; echo 2", "sleep 0.4; echo 3"], timeout=0.9)
    assert [answer.stdout for answer in answers] == ["1\n", "2\n", "3\n"]


def test_what_a_command_prints_is_never_taken_for_the_end_of_its_output(shell: RootShell) -> None:
    """What other users can see of the session (the nonce in arguments) does not help them to forge an answer."""
    visible = shell._nonce
    output = shell.run(f"cat; printf '\\n%s\\n' {visible} >&2; exit 5", f"\n{visible} 0\n".encode())
    assert (output.rc, output.stdout, output.stderr) == (5, f"\n{visible} 0\n", f"\n{visible}\n")
    assert shell.run("echo in step").stdout == "in step\n"


def test_output_without_end_ends_the_session_and_not_the_memory(
    shell: RootShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MOST_OUTPUT", 1 << 20)
    with pytest.raises(RemoteError, match=r"node-1: more than 1 MiB of output of: yes"):
        shell.run("yes", timeout=30)
    assert not shell.alive


def test_a_shell_that_dies_between_two_commands_is_said(shell: RootShell) -> None:
    with pytest.raises(RemoteError, match=r"node-1: connection lost: killed by an admin"):
        shell.run_many(["echo one", "echo killed by an admin >&2; kill -9 $$"], timeout=30)


def test_a_nul_byte_in_a_command_is_refused_before_anything_is_sent(shell: RootShell) -> None:
    with pytest.raises(ValueError, match=r"NUL"):
        shell.run("echo \0")


@settings(max_examples=25, deadline=None)
@given(
    content=st.binary(max_size=2000),
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=80),
)
def test_any_content_and_any_text_come_back_as_they_were(content: bytes, text: str) -> None:
    session = local_shell()
    try:
        assert session.run("base64 -w0", content).stdout.encode() == __import__("base64").b64encode(content)
        quoted = text.replace("'", "'\\''")
        assert session.run(f"printf %s '{quoted}'").stdout == text
    finally:
        session.close()


def test_a_lock_is_held_by_one_session_and_freed_by_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/lock"
    first, second = local_shell("n"), local_shell("n")
    try:
        assert first.hold_lock(path, "ann@one, run 1") is None
        assert os.stat(path).st_mode & 0o077 == 0, "who can open it can hold it"
        with monkeypatch.context() as patch:
            patch.setattr(remote, "LOCK_WAIT", 0)
            assert second.hold_lock(path, "bob@two, run 2") == "ann@one, run 1"
        first.run("sleep 5 >/dev/null 2>&1 &")  # what a command leaves behind does not keep the lock
        threading.Timer(0.2, first.kill).start()  # it is just ending: that is waited for
        assert second.hold_lock(path, "bob@two, run 2") is None
    finally:
        first.close()
        second.close()


def test_who_holds_a_node_is_told_and_that_a_run_that_was_killed_may_still_be_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LOCK", f"{tmp_path}/lock")
    first, second = local_shell("n"), local_shell("n")
    try:
        preflight.take_lock(first, "ann@one", "r1")
        monkeypatch.setattr(remote, "LOCK_WAIT", 0)
        with pytest.raises(
            preflight.PreflightError, match="n is being provisioned by ann@one, run r1"
        ) as held:
            preflight.take_lock(second, "bob@two", "r2")
        assert "may still be ending here: try again in a minute" in str(held.value.advice)
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("user", "wanted", "become"),
    [("root", False, "root"), ("ops", False, "sudo"), ("ops", True, "sudo-password")],
)
def test_the_sudo_password_goes_only_where_the_site_file_wants_it(
    user: str, wanted: bool, become: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(remote, "RootShell", lambda argv, become, **more: opened.append(become))
    document = {
        "cluster": "test",
        "access": {"user": user, "sudo_password": wanted},
        "groups": {"head": {"hosts": "h", "roles": ["head"]}},
    }
    site = Site.from_file(SiteFile.model_validate(document), tmp_path / "test.yml")
    remote.connect(site, site.head, sudo_password="hunter2")
    assert opened == [become]


def local_site(name: str, path: Path) -> Site:
    document = {
        "cluster": "test",
        "groups": {"head": {"hosts": name, "roles": ["head"], "access": {"local": True}}},
    }
    return Site.from_file(SiteFile.model_validate(document), path)


def test_the_controllers_own_machine_is_a_node_without_ssh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote.socket, "gethostname", lambda: "h1.example.org")
    monkeypatch.setattr(remote, "arrives_as_root", lambda node: True)
    site = local_site("h1", tmp_path / "test.yml")
    shell = remote.connect(site, site.head)
    try:
        assert shell.name == "h1"
        assert shell.run("echo $PPID").stdout.strip() == str(os.getpid())  # nothing stands in between
    finally:
        shell.close()


def test_a_site_file_that_calls_another_machine_local_is_refused_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote.socket, "gethostname", lambda: "desk")
    site = local_site("h1", tmp_path / "test.yml")
    with pytest.raises(RemoteError, match="is this machine, which is called desk") as refused:
        remote.connect(site, site.head)
    assert "hostnamectl hostname h1" in str(refused.value.advice)


def test_who_is_not_root_on_the_own_machine_becomes_it_by_sudo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[tuple[str, ...], str]] = []
    monkeypatch.setattr(remote, "RootShell", lambda argv, become, **more: opened.append((argv, become)))
    monkeypatch.setattr(remote.socket, "gethostname", lambda: "h1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    site = local_site("h1", tmp_path / "test.yml")
    remote.connect(site, site.head)
    assert opened == [(("sh", "-c"), "sudo")]
    assert host_variables(site, site.head)["ansible_connection"] == "local"
    assert host_variables(site, site.head)["ansible_become"] is True


@pytest.mark.parametrize(
    ("said", "message", "advice"),
    [
        (
            "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed.",
            "host key",
            "ssh-keygen -R",
        ),
        ("Host key verification failed.", "is not known here", "access.host_keys: accept-new"),
        ("ops@n: Permission denied (publickey).", "Permission denied", "access.key"),
        ("ops@n: Permission denied (publickey,password).", "Permission denied", "ssh-copy-id"),
        (
            'Load key "/k": error in libcrypto\nops@n: Permission denied (publickey).',
            '"/k": error',
            "access.key",
        ),
        (
            "Warning: Identity file /k not accessible: No such file or directory.\nops@n: Permission denied.",
            "/k not accessible: No such file or directory.; ops@n: Permission denied.",
            "access.key",
        ),
        ("sudo: a password is required", "password is required", "access.sudo_password"),
        ("ssh: connect to host n port 22: Connection refused", "Connection refused", "sshd"),
        ("Timeout, server n not responding.", "not responding", "is the node up"),
        ("", "without a word", "by hand"),
        ("sh: 1: exec: sudo: not found\n", "sudo: not found", "install sudo"),
        ("bash: line 1: exec: sudo: command not found\n", "command not found", "install sudo"),
        ("ops is not in the sudoers file.\n", "not in the sudoers file", "visudo"),
    ],
)
def test_why_a_session_ended_says_what_to_do_next(said: str, message: str, advice: str) -> None:
    error = explain_loss("gpu-7", said)
    assert isinstance(error, RemoteError)
    assert str(error).startswith("gpu-7: ")
    assert message in str(error)
    assert error.advice is not None
    assert advice in error.advice
