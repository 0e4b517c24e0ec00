"""systemctl's answers differ between releases (TLS-05)."""

from __future__ import annotations

import pytest

from provision.verify.systemd import is_enabled


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
