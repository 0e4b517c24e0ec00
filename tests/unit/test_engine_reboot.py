"""A reboot is proved by the boot id; a node that does not come back is lost, and only that."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from provision.engine.preflight import BOOT_ID
from provision.engine.reboot import RebootError, reboot
from provision.engine.remote import Output, RemoteError


@dataclass
class Session:
    """A root shell that answers with one boot id."""

    boot_id: str
    name: str = "gpu-1"
    closed: bool = False
    ran: list[str] = field(default_factory=list)

    def run(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        self.ran.append(command)
        return Output(0, f"{self.boot_id}\n", "")

    def close(self) -> None:
        self.closed = True


def test_a_new_boot_id_ends_the_wait() -> None:
    old, new = Session("a"), Session("b")
    answers = iter([None, Session("a"), new])

    def again() -> Session:
        found = next(answers)
        if found is None:
            raise RemoteError("gpu-1: Connection refused")
        return found

    assert reboot(old, again, limit=5, pause=0) is new  # type: ignore[arg-type, comparison-overlap]
    assert old.closed
    assert any("systemd-run" in command for command in old.ran), (
        "the reboot must be detached from the session"
    )


def test_a_connection_that_was_lost_and_came_back_is_no_reboot() -> None:
    with pytest.raises(RebootError, match=r"gpu-1 did not reboot within 0 s: boot id a as before"):
        reboot(Session("a"), lambda: Session("a"), limit=0.05, pause=0.01)  # type: ignore[arg-type, return-value]


def test_a_node_that_stays_away_is_lost_with_the_last_words_heard() -> None:
    def refused() -> Session:
        raise RemoteError("gpu-1: Connection refused")

    with pytest.raises(RebootError, match=r"gpu-1 is lost after its reboot.*Connection refused") as caught:
        reboot(Session("a"), refused, limit=0.05, pause=0.01)  # type: ignore[arg-type]
    assert caught.value.advice is not None


def test_a_node_that_refuses_to_reboot_is_not_waited_for() -> None:
    class Refusing(Session):
        def run(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
            if command == BOOT_ID:
                return Output(0, "a\n", "")
            return Output(1, "", "Failed to connect to bus: No such file or directory\n")

    with pytest.raises(RebootError, match=r"gpu-1 does not take a reboot: Failed to connect to bus"):
        reboot(Refusing("a"), lambda: Session("b"), limit=600)  # type: ignore[arg-type, return-value]


def test_a_node_whose_boot_id_cannot_be_read_is_not_rebooted() -> None:
    old = Session("")
    with pytest.raises(RebootError, match=r"gpu-1 does not tell its boot id"):
        reboot(old, lambda: Session("b"), limit=600)  # type: ignore[arg-type, return-value]
    assert old.ran == [BOOT_ID]


# What a worker does around it


def happened(
    *,
    reboot: bool = True,
    admitted: tuple[str, ...] = (),
    components: list[str] | None = None,
    **ask: str,
) -> dict[str, Any]:
    """What came of a node of base and ssh (one stage), then nvidia, where some ask for a reboot."""
    scenario = {"ask": ask, "reboot": reboot, "admitted": admitted, "components": components}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.rebooting"],
        input=json.dumps(scenario),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_one_reboot_at_a_stages_end_then_the_steps_that_asked_for_it_run_again() -> None:
    found = happened(base="once", ssh="once")
    assert found["told"] == ["base needs it; ssh needs it"]
    assert found["ran"] == [
        "base in boot 1",
        "ssh in boot 1",
        "base in boot 2",
        "ssh in boot 2",
        "nvidia in boot 2",
    ]
    assert (found["failure"], found["blocked"]) == (None, None)
    assert found["holder"] == "ops@desk, run r1"  # the new session holds the node as the old one did


def test_a_step_that_did_not_ask_is_not_run_again() -> None:
    assert happened(ssh="once")["ran"][2:] == ["ssh in boot 2", "nvidia in boot 2"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("always", "ssh:worker: asks for another reboot after the first: ssh needs it"),
        ("fail", "ssh: the module does not load"),
    ],
)
def test_what_the_reboot_did_not_bring_is_a_failure_of_that_step_alone(how: str, why: str) -> None:
    found = happened(ssh=how)
    assert found["failure"] == why
    assert found["ran"][-1] == "nvidia in boot 2"  # it does not need ssh; no third boot


def test_what_stands_on_a_step_that_failed_after_the_reboot_is_blocked() -> None:
    found = happened(base="fail")
    assert found["ran"] == ["base in boot 1", "ssh in boot 1", "base in boot 2"]
    assert found["outcomes"]["nvidia:worker"] == "blocked"


@pytest.mark.parametrize(
    ("keep", "why"),
    [({"reboot": False}, "--no-reboot"), ({"admitted": ("g1",)}, "it is admitted: drain it first")],
)
def test_a_node_that_must_not_reboot_is_told_of_it_and_goes_on(keep: dict[str, Any], why: str) -> None:
    found = happened(ssh="once", **keep)
    assert found["told"] == [f"must be rebooted ({why}): ssh needs it"]
    assert found["ran"] == ["base in boot 1", "ssh in boot 1", "nvidia in boot 1"]


# and around a failure


def test_a_run_of_one_component_that_fails_names_what_it_was_begun_without() -> None:
    """Here on a node that base has never been brought to."""
    found = happened(components=["ssh"], ssh="fail")
    assert found["advice"] == "ssh comes after base, not brought to this node yet: add --component base"
    assert happened(ssh="fail")["advice"] is None


def test_what_is_blocked_after_the_reboot_is_told_as_blocked() -> None:
    found = happened(ssh="block")
    assert (found["failure"], found["blocked"]) == (None, "blocked by h1: it is gone")
    assert found["outcomes"]["ssh:worker"] == "blocked"
    assert found["ran"][-1] == "nvidia in boot 2"
