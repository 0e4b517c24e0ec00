"""Deciding what a systemd unit needs. Pure: properties and wishes in, actions out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

DIRECTORY = "/etc/systemd/system"
PROPERTIES = "LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,ActiveEnterTimestamp"
_ENABLED = {
    "enabled",
    "enabled-runtime",
    "static",
    "alias",
    "indirect",
    "generated",
    "linked",
    "linked-runtime",
}


@dataclass(frozen=True)
class Wanted:
    """What a component wants of a unit."""

    running: bool
    enabled: bool
    masked: bool
    reload: bool  # reload instead of restart when a file that it reads has changed
    keep: bool = False  # once it is active it stays so: a mount in use can be neither restarted nor reloaded


def instances(files: Iterable[str]) -> list[str]:
    """The patterns of the units that were made of those `files` that are templates: "a@*.service" of "a@.service"."""
    names = [path.rpartition("/")[2] for path in files if path.startswith(f"{DIRECTORY}/")]
    return [name.replace("@.", "@*.") for name in names if "@." in name]


def parse_show(output: str) -> dict[str, str]:
    """The properties that `systemctl show` printed, "Key=value" a line."""
    pairs = (line.partition("=") for line in output.splitlines() if "=" in line)
    return {key: value for key, _, value in pairs}


def entered(properties: Mapping[str, str]) -> float | None:
    """When the unit became active, seconds since the epoch; None when it never did.

    Understands `--timestamp=us+utc` ("Mon 2026-11-30 18:04:07.123456 UTC").
    """
    words = properties.get("ActiveEnterTimestamp", "").split()
    if len(words) < 3:
        return None
    text = f"{words[1]} {words[2]}"
    form = "%Y-%m-%d %H:%M:%S.%f" if "." in text else "%Y-%m-%d %H:%M:%S"
    return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()


def actions(
    properties: Mapping[str, str],
    wanted: Wanted,
    *,
    newest: float | None = None,
    loaded: float | None = None,
    rewritten: bool = False,
) -> list[str]:
    """The systemctl verbs that bring a unit to `wanted`, in order; none when it is right.

    `newest` is the change time of the newest file the unit reads and `loaded` when it was last told to reload, in
    seconds since the epoch; `rewritten` says that such a file is about to change (in a plan).
    A process older than its files is stale, whoever changed them and whenever: an interrupted run is mended too.
    """
    todo: list[str] = []
    file_state = properties.get("UnitFileState", "")
    active = properties.get("ActiveState") in ("active", "activating", "reloading")
    if wanted.masked:
        if active:
            todo.append("stop")
        if not file_state.startswith("masked"):
            todo.append("mask")
        return todo
    missing = properties.get("LoadState") == "not-found"
    if properties.get("NeedDaemonReload") == "yes" or (missing and (wanted.running or wanted.enabled)):
        todo.append("daemon-reload")
    if file_state.startswith("masked"):
        todo.append("unmask")
    if wanted.enabled and file_state not in _ENABLED:
        todo.append("enable")
    if not wanted.enabled and file_state in ("enabled", "enabled-runtime"):
        todo.append("disable")
    if not wanted.running:
        return [*todo, "stop"] if active else todo
    if not active:
        return [*todo, "start"]
    # "activating", but it has just died, and is tried again in a while: a start would wait for that
    if properties.get("SubState", "").startswith("auto-restart"):
        return [*todo, "restart"]
    if wanted.keep:
        return ["daemon-reload", *todo] if rewritten and "daemon-reload" not in todo else todo
    started = max((moment for moment in (entered(properties), loaded) if moment is not None), default=0.0)
    unit_changed = properties.get("NeedDaemonReload") == "yes"
    if rewritten or unit_changed or (newest is not None and newest > started):
        todo.append("reload" if wanted.reload and not unit_changed else "restart")
    return todo
