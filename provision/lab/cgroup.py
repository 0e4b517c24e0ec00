"""Control groups (v2) of the lab: the only way in which its processes are found and ended."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from provision.lab import host
from provision.lab.command import LabError

# Starts a program inside a control group: sh -c ENTER <group> <program> <arguments...>
ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'


def entering(group: Path, argv: list[str]) -> list[str]:
    """`argv`, changed so that the program starts as a member of `group`."""
    return ["sh", "-c", ENTER, str(group), *argv]


def detached(group: Path, argv: list[str]) -> list[str]:
    """Like `entering`, for a program that lives on: it starts in a session of its own, as a member."""
    return entering(group, ["setsid", "--fork", *argv])


def make(group: Path) -> None:
    """Create `group`, and hand it the controllers that the machine has given to cgroup v2."""
    group.mkdir(parents=True, exist_ok=True)


def delegate(group: Path) -> None:
    """Let the children of `group` (which holds no process itself) use the controllers that it has."""
    for controller in (group / "cgroup.controllers").read_text().split():
        (group / "cgroup.subtree_control").write_text(f"+{controller}")


def populated(group: Path) -> bool:
    """Whether any process lives in `group` or below."""
    try:
        return "populated 1" in (group / "cgroup.events").read_text()
    except FileNotFoundError:
        return False


def pids(group: Path) -> list[int]:
    """The processes of `group` and below."""
    found: list[int] = []
    # os.walk passes over groups that go away meanwhile, as those of services that are started again and again do
    for folder in sorted(folder for folder, _, _ in os.walk(group)):
        try:
            found += [int(word) for word in Path(folder, "cgroup.procs").read_text().split()]
        except OSError:  # the group went away, or is threaded: its processes show in its parent
            continue
    return found


def wait_empty(group: Path, timeout: float) -> bool:
    """Wait until no process is left in `group`; False when `timeout` seconds were not enough."""
    deadline = time.monotonic() + timeout
    try:
        events = (group / "cgroup.events").open()
    except FileNotFoundError:
        return True
    with events:
        watch = select.poll()
        watch.register(events, select.POLLPRI)
        while True:
            events.seek(0)
            try:
                if "populated 0" in events.read():
                    return True
            except OSError:  # removed meanwhile: nothing lives there
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            watch.poll(left * 1000)


def freeze(group: Path, frozen: bool) -> None:
    """Stop all processes of `group` where they are, or let them go on."""
    (group / "cgroup.freeze").write_text("1" if frozen else "0")


def frozen(group: Path) -> bool:
    """Whether `group` has been frozen."""
    try:
        return (group / "cgroup.freeze").read_text().strip() == "1"
    except FileNotFoundError:
        return False


def kill(group: Path, timeout: float = 20) -> None:
    """End every process of `group` at once, frozen ones too. Raises LabError if one cannot be ended."""
    try:
        (group / "cgroup.kill").write_text("1")
    except FileNotFoundError:
        return
    if not wait_empty(group, timeout):
        raise LabError(f"{group}: processes {pids(group)} could not be ended within {timeout:g} s")


def remove(group: Path) -> None:
    """End what lives in `group` and remove it with all groups below, in every hierarchy."""
    kill(group)
    for tree in everywhere(group, Path("/proc/self/mountinfo").read_text()):
        for folder, _, _ in os.walk(tree, topdown=False):
            os.rmdir(folder)


def everywhere(group: Path, mountinfo: str) -> list[Path]:
    """`group` and its namesakes in the machine's v1 hierarchies, where systemd-nspawn makes its groups too."""
    root, _ = host.cgroup_root(mountinfo)
    name = group.relative_to(root)
    return [point / name for point, _ in host.cgroup_hierarchies(mountinfo)]
