"""What a systemd unit needs, decided from its properties."""

from __future__ import annotations

import pytest

from provision.engine.units import Wanted, actions, entered, instances, parse_show

MOUNT = Wanted(True, True, False, False, keep=True)
RUN = Wanted(running=True, enabled=True, masked=False, reload=False)
RUNNING = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "UnitFileState": "enabled",
    "NeedDaemonReload": "no",
    "ActiveEnterTimestamp": "Mon 2026-01-05 10:00:00.500000 UTC",
}
STARTED = 1767607200.5


def test_a_unit_that_is_right_needs_nothing() -> None:
    assert actions(RUNNING, RUN, newest=STARTED - 1) == []


def test_properties_are_read_as_systemctl_prints_them() -> None:
    assert (
        parse_show("LoadState=loaded\nExecStart={ path=/bin/a ; x=y }\n")["ExecStart"]
        == "{ path=/bin/a ; x=y }"
    )
    assert entered(RUNNING) == STARTED
    assert entered({"ActiveEnterTimestamp": ""}) is None
    assert entered({"ActiveEnterTimestamp": "Mon 2026-01-05 10:00:00 UTC"}) == STARTED - 0.5


@pytest.mark.parametrize(
    ("change", "wanted", "more", "expected"),
    [
        ({"ActiveState": "inactive", "UnitFileState": "disabled"}, RUN, {}, ["enable", "start"]),
        ({"ActiveState": "failed"}, RUN, {}, ["start"]),
        ({"ActiveState": "activating", "SubState": "start"}, RUN, {}, []),
        # systemd waits before it tries again: the service has died, and its unit is "activating" meanwhile
        (
            {"ActiveState": "activating", "SubState": "auto-restart"},
            RUN,
            {"newest": STARTED - 1},
            ["restart"],
        ),
        ({"ActiveState": "activating", "SubState": "auto-restart-queued"}, RUN, {}, ["restart"]),
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "UnitFileState": "disabled"},
            Wanted(False, False, False, False),
            {},
            ["stop"],
        ),
        (
            {"LoadState": "not-found", "ActiveState": "inactive", "UnitFileState": ""},
            RUN,
            {},
            ["daemon-reload", "enable", "start"],
        ),
        (
            {"LoadState": "not-found", "ActiveState": "inactive", "UnitFileState": ""},
            Wanted(False, False, False, False),
            {},
            [],  # what is not there is neither running nor enabled
        ),
        ({"UnitFileState": "static"}, RUN, {}, []),
        ({"UnitFileState": "masked", "ActiveState": "inactive"}, RUN, {}, ["unmask", "enable", "start"]),
        ({}, RUN, {"newest": STARTED + 1}, ["restart"]),
        ({}, RUN, {"rewritten": True}, ["restart"]),
        ({"NeedDaemonReload": "yes"}, RUN, {}, ["daemon-reload", "restart"]),
        ({}, Wanted(True, True, False, True), {"newest": STARTED + 1}, ["reload"]),
        ({}, Wanted(True, True, False, True), {"newest": STARTED + 1, "loaded": STARTED + 2}, []),
        ({}, MOUNT, {"newest": STARTED + 1}, []),
        ({}, MOUNT, {"rewritten": True}, ["daemon-reload"]),
        ({"NeedDaemonReload": "yes"}, MOUNT, {}, ["daemon-reload"]),
        ({"ActiveState": "failed"}, MOUNT, {}, ["start"]),
        ({}, Wanted(False, False, False, False), {}, ["disable", "stop"]),
        (
            {"ActiveState": "inactive", "UnitFileState": "disabled"},
            Wanted(False, False, False, False),
            {},
            [],
        ),
        ({}, Wanted(False, False, True, False), {}, ["stop", "mask"]),
        ({"UnitFileState": "masked", "ActiveState": "inactive"}, Wanted(False, False, True, False), {}, []),
    ],
)
def test_actions(change: dict[str, str], wanted: Wanted, more: dict[str, float], expected: list[str]) -> None:
    assert actions({**RUNNING, **change}, wanted, **more) == expected  # type: ignore[arg-type]


def test_units_made_of_a_template_are_found_by_its_file() -> None:
    files = [
        "/etc/systemd/system/again@.service",
        "/etc/systemd/system/home.mount",
        "/etc/wireguard/wg@.conf",
    ]
    assert instances(files) == ["again@*.service"]
