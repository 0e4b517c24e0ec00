"""systemctl's answers differ between releases (TLS-05)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from provision.report.model import Verdict
from provision.verify.systemd import is_enabled, unit_runs


@pytest.mark.parametrize(
    ("rc", "stdout", "stderr", "enabled"),
    [
        (0, "enabled\n", "", True),
        (0, "alias\n", "", True),
        (1, "disabled\n", "", False),
        (4, "not-found\n", "", False),
        (1, "", "Failed to get unit file state for x.service: No such file or directory\n", False),
        (0, "static\n", "", None),
        (0, "generated\n", "", None),
        (1, "masked\n", "", False),
    ],
)
def test_enabled_disabled_or_neither(rc: int, stdout: str, stderr: str, enabled: bool | None) -> None:
    assert is_enabled(rc, stdout, stderr) is enabled


@pytest.mark.parametrize(
    ("rc", "stdout", "stderr"),
    [(127, "", "sh: systemctl: not found\n"), (1, "", "Failed to connect to bus\n"), (0, "", "")],
)
def test_anything_else_is_an_error_with_its_text(rc: int, stdout: str, stderr: str) -> None:
    with pytest.raises(ValueError, match=stderr.strip() or "no output"):
        is_enabled(rc, stdout, stderr)


def test_a_systemctl_that_says_nothing_tells_nothing() -> None:
    """Whether systemd runs at all is told in one place for all checks: tests/unit/test_verify_missing.py."""
    host = SimpleNamespace(run=lambda command: SimpleNamespace(rc=127, stdout="", stderr="not found\n"))
    found = unit_runs(SimpleNamespace(host=host), "ssh")  # type: ignore[arg-type]
    assert (found.verdict, found.why) == (Verdict.UNKNOWN, "not found")


@pytest.mark.parametrize(
    ("enabled", "triggers", "verdict"),
    [
        ({"ssh": "enabled"}, "", Verdict.PASS),
        ({"ssh": "disabled"}, "", Verdict.FAIL),
        ({"ssh": "disabled", "ssh.socket": "enabled"}, "ssh.socket", Verdict.PASS),  # Ubuntu 24.04
        ({"ssh": "disabled", "ssh.socket": "disabled"}, "ssh.socket", Verdict.FAIL),
        ({"ssh": "disabled", "ssh.socket": ""}, "ssh.socket", Verdict.UNKNOWN),
    ],
)
def test_a_unit_comes_back_where_it_or_its_socket_is_enabled(
    enabled: dict[str, str], triggers: str, verdict: Verdict
) -> None:
    def run(command: str) -> SimpleNamespace:
        verb, unit = command.split()[1], command.split()[-1]
        said = {"is-active": "active", "show": triggers}.get(verb) if verb != "is-enabled" else enabled[unit]
        return SimpleNamespace(rc=0 if said not in ("disabled", "") else 1, stdout=f"{said}\n", stderr="")

    at = SimpleNamespace(host=SimpleNamespace(run=run))
    assert unit_runs(at, "ssh").verdict is verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sub", "verdict"),
    [("start", Verdict.UNKNOWN), ("auto-restart", Verdict.FAIL), ("auto-restart-queued", Verdict.FAIL)],
)
def test_a_unit_that_dies_again_and_again_is_not_being_started(sub: str, verdict: Verdict) -> None:
    def run(command: str) -> SimpleNamespace:
        said = {"is-active": "activating", "is-enabled": "enabled", "show": sub}[command.split()[1]]
        return SimpleNamespace(rc=3 if said == "activating" else 0, stdout=f"{said}\n", stderr="")

    found = unit_runs(SimpleNamespace(host=SimpleNamespace(run=run)), "ssh")  # type: ignore[arg-type]
    assert found.verdict is verdict
