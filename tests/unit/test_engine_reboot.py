"""A reboot is proved by the boot id; a node that does not come back is lost, and only that."""

from __future__ import annotations

from dataclasses import dataclass, field

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
