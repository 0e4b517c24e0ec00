"""Services that are started again where they end by a mistake."""

from __future__ import annotations

from typing import Any

import pytest

from provision.components import restarts


def test_the_drop_in_is_read_by_the_unit_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}
    monkeypatch.setattr(restarts.ops, "file", written.__setitem__)
    path = restarts.restarting("munge")
    assert path == "/etc/systemd/system/munge.service.d/provision.conf"
    assert "\nRestart=on-failure\n" in written[path]
