"""The ssh server on real nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provision.lab import Lab
from tests.lab.checking import HEAD, WORKER, Bench, Case, bench, break_and_mend, hidden, tell_apart
from tests.lab.command import provision

DROP_IN = "/etc/ssh/sshd_config.d/00-provision.conf"
BROKEN = "/etc/ssh/sshd_config.d/99-broken.conf"
CASES = [
    hidden("sshd-runs", "systemctl -q disable ssh", "/usr/bin/systemctl"),
    Case(
        "sshd-settings",
        f"sed -i 's/^X11Forwarding no/X11Forwarding yes/' {DROP_IN}",
        f"echo NoSuchKeyword yes >{BROKEN}",
        f"rm {BROKEN}",
    ),
]


@pytest.fixture(scope="module")
def on(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(lab, tmp_path_factory.mktemp("ssh"), "ssh") as made:
        yield made


def test_every_check_is_tried(on: Bench) -> None:
    assert {case.check for case in CASES} == on.names


def test_a_check_without_its_source_cannot_tell(on: Bench) -> None:
    tell_apart(on, CASES)


def test_what_is_changed_by_hand_fails_and_is_mended(on: Bench) -> None:
    break_and_mend(on, CASES)


def test_sessions_go_on_and_the_server_is_never_restarted(on: Bench) -> None:
    pid = on.lab.inside(WORKER, "systemctl show -P MainPID ssh")
    on.lab.inside(WORKER, f"echo '# by hand' >>{DROP_IN}")
    assert on.apply() == {HEAD: 0, WORKER: 2}  # the file, and the server that reads it
    assert on.lab.inside(WORKER, "systemctl show -P MainPID ssh") == pid


def test_a_configuration_that_would_not_start_is_not_loaded(on: Bench) -> None:
    """What another wrote beside ours is wrong: the server goes on with what it has, the node is named."""
    on.lab.inside(WORKER, f"echo NoSuchKeyword yes >{BROKEN}; echo '# by hand' >>{DROP_IN}")
    try:
        answer = provision("apply", str(on.path), "--component", "ssh")
        assert answer.rc == 1
        assert "NoSuchKeyword" in answer.nodes[WORKER]["reason"]
        assert on.lab.run(WORKER, "true").returncode == 0
    finally:
        on.lab.inside(WORKER, f"rm {BROKEN}")
    assert on.apply()[WORKER] == 1  # the file is right already, the server has not read it
    assert on.apply() == {HEAD: 0, WORKER: 0}
