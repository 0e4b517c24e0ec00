"""Rebooting a node, proved by its boot id: a connection that was lost and came back proves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from provision.engine.preflight import BOOT_ID
from provision.engine.remote import RemoteError, RootShell

LIMIT = 600.0  # seconds for a node to come back: servers with much memory take minutes


class RebootError(RemoteError):
    """The node did not come back, or came back without having rebooted."""


def reboot(
    shell: RootShell, again: Callable[[], RootShell], limit: float = LIMIT, pause: float = 2.0
) -> RootShell:
    """Reboot and wait: a new session on the rebooted node. Raises RebootError.

    The command is detached from the session, which a jump host might hold open for ever, and the session is ended
    here at once.
    """
    name = shell.name
    before = shell.run(BOOT_ID).stdout.strip()
    if not before:
        raise RebootError(
            f"{name} does not tell its boot id: its reboot could not be proved", "reboot it by hand"
        )
    asked = shell.run(
        "systemd-run --quiet --collect --on-active=1 --timer-property=AccuracySec=100ms systemctl reboot"
    )
    shell.close()
    if not asked.ok:
        raise RebootError(
            f"{name} does not take a reboot: {asked.stderr.strip() or f'exit {asked.rc}'}",
            "reboot it by hand",
        )
    deadline = time.monotonic() + limit
    seen = "nothing"
    while time.monotonic() < deadline:
        time.sleep(pause)
        try:
            session = again()
        except RemoteError as error:
            seen = str(error)
            continue
        try:
            now = session.run(BOOT_ID, timeout=30).stdout.strip()
        except RemoteError as error:
            seen = str(error)
            session.close()
            continue
        if now and now != before:
            return session
        seen = f"boot id {now} as before"
        session.close()
    if seen.startswith("boot id"):
        raise RebootError(f"{name} did not reboot within {limit:.0f} s: {seen}", "look at its console")
    raise RebootError(
        f"{name} is lost after its reboot: not back within {limit:.0f} s: {seen}",
        "look at its console; the next run goes on from here",
    )
