"""What is not there: never installed, which is known, or taken away, which leaves a check without its source."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.profiles import distribution
from provision.profiles.packaging import MANAGERS
from provision.report.model import Verdict
from provision.verify.check import Found, skip, unknown
from provision.verify.missing import BOOTED, files, judged, paths, programs

SAID = [  # dash, bash by itself, in a script and in eval, and what starts others
    ("sh: 1: eval: scontrol: not found", "scontrol"),
    ("sh: 12: nft: not found", "nft"),
    ("sh: 1: eval: /usr/local/lib/x/agent: not found", "/usr/local/lib/x/agent"),
    ("bash: scontrol: command not found", "scontrol"),
    ("bash: line 3: scontrol: command not found", "scontrol"),
    ("/tmp/look: line 3: scontrol: command not found", "scontrol"),
    ("bash: line 1: /usr/local/lib/x/agent: No such file or directory", "/usr/local/lib/x/agent"),
    ("timeout: failed to run command ‘chronyc’: No such file or directory", "chronyc"),
    ("timeout: failed to run command 'chronyc': No such file or directory", "chronyc"),
    ("env: ‘python3’: No such file or directory", "python3"),
    ("unshare: failed to execute nft: No such file or directory", "nft"),
]


@pytest.mark.parametrize(("said", "program"), SAID)
def test_a_program_that_does_not_exist_is_named_by_who_could_not_start_it(said: str, program: str) -> None:
    assert programs(f"before\n{said}\nafter") == [program]
    assert files(said) == []


@pytest.mark.parametrize(
    "said", ["Node gpu-1 not found", "modinfo: ERROR: Module nvidia not found.", "x: not found"]
)
def test_other_things_that_are_not_found_are_no_programs(said: str) -> None:
    assert programs(said) == []


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("cat: /etc/slurm/slurm.conf: No such file or directory", ["/etc/slurm/slurm.conf"]),
        ("stat: cannot statx '/etc/a b': No such file or directory", ["/etc/a b"]),
        ("tail: cannot open '/var/log/x' for reading: No such file or directory", ["/var/log/x"]),
        ("df: /shared: No such file or directory\ncat: /x: No such file or directory", ["/shared", "/x"]),
        ("cat: /etc/x: Is a directory", []),
        ("cat: /etc/x: Permission denied", []),
        ("cat: /home/x: Stale file handle", []),
        ("cat: /sys/module/nvidia/version: No such file or directory", []),  # the kernel's
    ],
)
def test_files_that_do_not_exist(said: str, found: list[str]) -> None:
    assert files(said) == found


@given(st.text())
def test_any_text_is_read(said: str) -> None:
    assert all(name in said for name in [*programs(said), *files(said)])


def test_where_a_package_would_have_put_a_program() -> None:
    assert paths("id") == ["/usr/sbin/id", "/usr/bin/id", "/sbin/id", "/bin/id"]
    assert paths("/bin/id") == paths("id")
    assert paths("/usr/local/lib/x/agent") == ["/usr/local/lib/x/agent"]


def node(*said: str, owner: str = "", asked: int = 0, booted: int = 0) -> Any:
    """A node whose commands said this; `owner`: what the package database answers, with status `asked`."""

    def once(command: str) -> SimpleNamespace:
        if BOOTED in command:
            return SimpleNamespace(rc=booted)
        return SimpleNamespace(rc=asked, stdout=f"{owner}\n")

    backend = SimpleNamespace(said=list(said), once=once)
    return SimpleNamespace(host=SimpleNamespace(backend=backend), profile=distribution("debian", "13"))


NOT_FOUND = "timeout: failed to run command ‘scontrol’: No such file or directory"
UNKNOWN = unknown(f"scontrol ping: {NOT_FOUND}", source="scontrol ping")


def test_a_program_of_no_package_was_never_installed() -> None:
    found = judged(UNKNOWN, node(NOT_FOUND))
    assert found == Found(
        Verdict.FAIL,
        "scontrol: not installed, or not in root's PATH",
        "installed",
        "run `provision apply`",
        source="scontrol ping",
    )


def test_a_program_of_an_installed_package_was_taken_away_and_the_check_cannot_tell() -> None:
    found = judged(UNKNOWN, node(NOT_FOUND, owner="slurm-client"))
    assert (found.verdict, found.why) == (
        Verdict.UNKNOWN,
        "scontrol is gone, though slurm-client is installed",
    )
    assert found.action == "install again: slurm-client"


def test_without_the_package_database_it_cannot_be_told() -> None:
    assert judged(UNKNOWN, node(NOT_FOUND, asked=127)) == UNKNOWN


def test_the_projects_own_programs_belong_to_no_package() -> None:
    said = "sh: 1: eval: /usr/local/lib/x/agent: not found"
    found = judged(unknown(f"{said!r}, exit 127"), node(said))
    assert (found.verdict, found.read, found.expected) == (
        Verdict.FAIL,
        "not there",
        "/usr/local/lib/x/agent",
    )


def test_a_file_that_is_not_there_fails_and_one_that_cannot_be_read_is_unknown() -> None:
    gone, unreadable = "cat: /etc/x.conf: No such file or directory", "cat: /etc/x.conf: Is a directory"
    found = judged(unknown(gone, source="/etc/x.conf"), node(gone))
    assert (found.verdict, found.read, found.expected) == (Verdict.FAIL, "not there", "/etc/x.conf")
    assert judged(unknown(unreadable), node(unreadable)).verdict is Verdict.UNKNOWN


def test_what_the_check_did_without_is_not_its_reason() -> None:
    """Another program's name within a word is none, and nor is one that is only missing on another node."""
    assert judged(unknown("no answer"), node(NOT_FOUND)).verdict is Verdict.UNKNOWN
    assert judged(unknown("invalid"), node("sh: 1: id: not found")).verdict is Verdict.UNKNOWN
    assert judged(UNKNOWN, node()).verdict is Verdict.UNKNOWN


def test_what_is_known_stays_as_it_is() -> None:
    for found in (Found(Verdict.PASS, "good"), Found(Verdict.FAIL, "scontrol"), skip("scontrol")):
        assert judged(found, node(NOT_FOUND)) is found


@pytest.mark.parametrize(
    "said",
    [
        "sh: 1: eval: systemctl: not found",
        "System has not been booted with systemd as init system (PID 1). Can't operate.\n"
        "Failed to connect to bus: Host is down",
        "Failed to connect to system scope bus via local transport: No such file or directory",
    ],
)
def test_where_systemd_is_not_process_1_every_check_says_the_same(said: str) -> None:
    found = judged(unknown(said, source="systemctl"), node(said, booted=1))
    assert (found.verdict, found.read, found.source) == (Verdict.FAIL, "systemd does not run here", BOOTED)
    for booted in (0, 127):  # it runs, or that could not be told
        broken = judged(unknown(said), node(said, owner="systemd", booted=booted))
        assert broken.verdict is Verdict.UNKNOWN


# The databases themselves


@pytest.fixture
def dpkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An administration folder of dpkg with one package, whose program is not on the disk."""
    if shutil.which("dpkg-query") is None:
        pytest.skip("no dpkg here")
    (tmp_path / "info").mkdir()
    (tmp_path / "updates").mkdir()
    (tmp_path / "status").write_text(
        "Package: tool\nStatus: install ok installed\nArchitecture: all\nVersion: 1\nMaintainer: a <a@b>\n"
        "Description: x\n"
    )
    (tmp_path / "info/tool.list").write_text("/.\n/bin\n/bin/tool-that-is-gone\n")
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path))
    return tmp_path


def owner(program: str) -> tuple[int, str]:
    """What the shell text of Debian's package manager answers on this machine."""
    command = MANAGERS["debian"].owner(paths(program))
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=20)
    return answer.returncode, answer.stdout.strip()


@pytest.mark.usefixtures("dpkg")
def test_dpkg_knows_whose_a_program_is_that_is_gone() -> None:
    assert owner("tool-that-is-gone") == (0, "tool")
    assert owner("/usr/bin/tool-that-is-gone") == (0, "tool")
    assert owner("tool-of-nobody") == (0, "")


def test_a_database_that_cannot_be_read_answers_nothing(dpkg: Path) -> None:
    (dpkg / "status").write_text("no status\n")
    assert owner("tool-that-is-gone")[0] != 0


def rpm(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rpm").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "rpm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("script", "program", "answer"),
    [
        ('case "$*" in "-q rpm") ;; *" /usr/bin/tool") echo tool;; *) exit 1;; esac', "tool", (0, "tool")),
        (
            'case "$*" in "-q rpm") ;; *) echo "file is not owned by any package"; exit 1;; esac',
            "tool",
            (0, ""),
        ),
        ("exit 1", "tool", (2, "")),
    ],
)
def test_rpm_answers_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, program: str, answer: tuple[int, str]
) -> None:
    rpm(tmp_path, script, monkeypatch)
    command = MANAGERS["redhat"].owner(paths(program))
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=20)
    assert (said.returncode, said.stdout.strip()) == answer
