"""What systemctl answers, as values: its words and exit statuses differ between releases."""

from __future__ import annotations

from provision.verify.check import Found, Target, expect, unknown

_ENABLED = {"enabled", "enabled-runtime", "alias", "linked", "linked-runtime"}
_DISABLED = {"disabled", "masked", "masked-runtime", "not-found", "bad"}
_NEITHER = {"static", "indirect", "generated", "transient"}  # started by others, cannot be enabled
_ABSENT = ("No such file or directory", "does not exist", "not be found")


def is_enabled(rc: int, stdout: str, stderr: str = "") -> bool | None:
    """From the answer of `systemctl is-enabled UNIT`; None: a unit that can be neither, started by another.

    A unit that does not exist is not enabled: newer releases print "not-found" and exit with 4, older
    ones say so on `stderr`. Raises ValueError, with the text, when the answer is neither.
    """
    word = stdout.strip()
    if word in _ENABLED:
        return True
    if word in _NEITHER:
        return None
    if word in _DISABLED or (not word and rc in (1, 4) and any(text in stderr for text in _ABSENT)):
        return False
    raise ValueError(f"systemctl is-enabled: exit {rc}: {(word or stderr.strip()) or 'no output'}")


def unit_runs(at: Target, unit: str) -> Found:
    """A unit is active, and will be after a reboot."""
    command = f"systemctl is-active {unit}"
    active = at.host.run(command)
    if active.stdout.strip() not in (
        "active",
        "inactive",
        "failed",
        "activating",
        "deactivating",
        "reloading",
    ):
        return unknown(active.stderr.strip() or f"exit {active.rc}", source=command)
    try:
        enabled = _enabled(at, unit)
    except ValueError as error:
        return unknown(str(error), source=f"systemctl is-enabled {unit}")
    state = active.stdout.strip()
    if state == "activating":
        if not _died(at, unit):
            return unknown("is being started", source=command)
        state = "died, tried again in a while"
    read = f"{state}, {'not enabled' if enabled is False else 'enabled'}"
    return expect(
        read, "active, enabled", action=f"journalctl -u {unit}; then `provision apply`", source=command
    )


def _died(at: Target, unit: str) -> bool:
    """Whether a unit that is "activating" has ended by a mistake, and systemd waits before it starts it again."""
    state = at.host.run(f"systemctl show --property=SubState --value {unit}").stdout
    return str(state).startswith("auto-restart")


def _enabled(at: Target, unit: str) -> bool | None:
    """Whether the unit, or a socket or timer that starts it, is enabled (sshd from Ubuntu 22.10 on). ValueError."""
    boots = at.host.run(f"systemctl is-enabled {unit}")
    enabled = is_enabled(boots.rc, boots.stdout, boots.stderr)
    if enabled is False:
        for trigger in at.host.run(f"systemctl show --property=TriggeredBy --value {unit}").stdout.split():
            boots = at.host.run(f"systemctl is-enabled {trigger}")
            enabled = enabled or is_enabled(boots.rc, boots.stdout, boots.stderr)
    return enabled
