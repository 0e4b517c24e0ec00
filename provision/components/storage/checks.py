"""Is what all nodes share mounted, one tree for all, writable, and not full?"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from shlex import quote
from typing import Any

from provision.components.storage import exports
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, skip, unknown


@dataclass(frozen=True)
class Actual:
    """A file system as the kernel has it."""

    source: str
    type: str


def parse_findmnt(text: str) -> Actual | None:
    """The topmost mount of `findmnt --json --target-less PATH`; None where nothing is mounted. ValueError: not JSON."""
    if not text.strip():
        return None
    systems = json.loads(text)["filesystems"]
    return Actual(systems[-1]["source"], systems[-1]["fstype"])


def same_mount(actual: Actual, wanted: exports.Mounted) -> bool:
    """Whether `actual` is what was wanted: FUSE types carry a prefix, NFS comes as nfs4, sources vary in slashes."""
    kind = actual.type.removeprefix("fuse.")
    if wanted.type == "nfs":
        kind = kind.removesuffix("4")
    return kind == wanted.type and _plain(actual.source) == _plain(wanted.source)


def same_folder(text: str) -> bool:
    """Whether two folders are one, by `stat -c %d:%i` of both: a bind mount and its source."""
    identities = text.split()
    return len(identities) == 2 and len(set(identities)) == 1


def _plain(source: str) -> str:
    host, colon, path = source.rpartition(":")
    return f"{host}{colon}{path.strip('/')}"


def parse_df(text: str) -> dict[str, tuple[int, int]]:
    """Mount point -> percent of space and of inodes in use, of `df --output=target,pcent,ipcent`.

    A file system without a count of inodes ("-") has 0. Raises ValueError naming a line of another form.
    """
    found = {}
    for line in text.splitlines()[1:]:
        words = line.rsplit(None, 2)
        if len(words) != 3:
            raise ValueError(f"not a line of df: {line!r}")
        target, space, inodes = words
        found[target.strip()] = (_percent(space), _percent(inodes))
    return found


def _percent(word: str) -> int:
    return 0 if word == "-" else int(word.removesuffix("%"))


def _wanted(at: Target) -> list[exports.Mounted]:
    return [
        mounted for mounted in exports.mounts(at.site, at.node) if not at.limited(f"mount:{mounted.type}")
    ]


@check("storage-mounted")
def mounted(at: Target) -> Found:
    """Every file system is mounted, of the type and from the source that the site file says."""
    wanted = _wanted(at)
    if not wanted:
        return skip("nothing to mount on this node")
    read, right = [], True
    for each in wanted:
        found = at.host.run(f"findmnt --json --mountpoint {quote(each.path)}")
        if found.rc not in (0, 1):
            return unknown(f"findmnt: {found.stderr.strip() or f'exit {found.rc}'}", source="findmnt")
        actual = parse_findmnt(found.stdout)
        if actual is not None and each.type == "none":
            # what findmnt says of it depends on the file system that its source lies on
            both = at.host.run(f"timeout 20 stat -c %d:%i -- {quote(each.path)} {quote(each.source)}")
            if both.rc not in (0, 1):
                return unknown(f"stat: {both.stderr.strip() or f'exit {both.rc}'}", source="stat")
            right = right and same_folder(both.stdout)
        else:
            right = right and actual is not None and same_mount(actual, each)
        read.append(f"{each.path} {actual.source} {actual.type}" if actual else f"{each.path} not mounted")
    return Found(
        Verdict.PASS if right else Verdict.FAIL,
        read="; ".join(read),
        expected="; ".join(f"{each.path} {each.source} {each.type}" for each in wanted),
        action=None if right else f"systemctl status {' '.join(quote(each.unit) for each in wanted)}",
        source="findmnt",
    )


@check("storage-shared")
def shared(at: Target) -> Found:
    """What this node writes is seen by another node: one tree for all."""
    paths = [mounted.path for mounted in _wanted(at) if mounted.served]
    if not paths:
        return skip("no node of this cluster serves a file system to this one")
    other_name = next(
        (node.name for node in [at.site.head, *at.site.nodes.values()] if node.name != at.node.name), None
    )
    if other_name is None:
        return skip("there is no other node to see it")
    other = at.on(other_name)
    if other is None:
        return unknown(f"{other_name} is unreachable: nobody to see what this node writes", source=other_name)
    for path in paths:
        word = secrets.token_hex(8)
        name = quote(f"{path}/{exports.PROBE}/{at.node.name}-{word}")
        wrote = at.host.run(f"timeout 20 sh -c 'umask 022; echo {word} > {name}'")
        if wrote.rc in (126, 127):
            return unknown(wrote.stderr.strip(), source=name)
        if wrote.rc != 0:
            why = "no answer within 20 s" if wrote.rc == 124 else wrote.stderr.strip()
            return Found(Verdict.FAIL, f"cannot write: {why}", "a new file", _advice(path), source=name)
        seen = _seen(other, name)
        at.host.run(f"rm -f {name}")
        if seen is None:
            return unknown(f"{other_name} cannot read below {path}", source=f"{other_name}:{name}")
        if seen != word:
            return Found(
                Verdict.FAIL, seen or "not there", word, _advice(path), source=f"{other_name}:{name}"
            )
    return Found(Verdict.PASS, f"{', '.join(paths)} seen by {other_name}")


def _seen(other: Any, name: str) -> str | None:
    """What the other node reads ("" where it has no such file); None where it cannot be told."""
    found = other.run(f"timeout 20 sh -c 'if [ -e {name} ]; then cat {name}; fi'")
    return found.stdout.strip() if found.rc == 0 else None


def _advice(path: str) -> str:
    return f"findmnt {path}; is it read-only, or a directory of the node's own below a mount that failed?"


@check("storage-space")
def space(at: Target) -> Found:
    """No shared file system and no scratch is full."""
    limit = exports.settings(at.site, at.node).full
    paths = [mounted.path for mounted in _wanted(at)]
    local = exports.scratch(at.site, at.node)
    paths += [local.path] if local else []
    if not paths:
        return skip("nothing is mounted on this node")
    command = f"timeout 20 df --output=target,pcent,ipcent {' '.join(map(quote, paths))}"
    answer = at.host.run(command)
    try:
        used = parse_df(answer.stdout)
    except ValueError as error:
        return unknown(str(error), source="df")
    if answer.rc != 0 or not used:
        return unknown(answer.stderr.strip() or f"df: exit {answer.rc}", source="df")
    worst = max(max(pair) for pair in used.values())
    return Found(
        Verdict.PASS if worst < limit else Verdict.FAIL,
        read=", ".join(f"{path} {pair[0]} % of space, {pair[1]} % of inodes" for path, pair in used.items()),
        expected=f"below {limit} %",
        action=None if worst < limit else "find who fills it: du -xsh PATH/* | sort -h",
        source="df",
    )


@check("storage-server")
def server(at: Target) -> Found:
    """The server runs and serves what the others mount."""
    serving = exports.server(at.site)
    if serving is None or serving.name != at.node.name:
        return skip("this node serves no file system")
    section = exports.settings(at.site, at.node)
    wanted = exports.served_paths(at.site)
    if section.provider == "nfs":
        unit = at.profile.unit("nfs-server")
        if reason := at.limited(f"unit:{unit}.service"):
            return skip(reason)
        command, expected = "exportfs -s", {exports.data_path(at.site, path) for path in wanted}
    else:
        unit, command = at.profile.unit("glusterd"), "gluster --mode=script volume list"
        expected = {exports.volume(path) for path in wanted}
    state = at.host.run(f"systemctl is-active {quote(unit)}")
    if state.rc not in (0, 3):
        return unknown(state.stderr.strip() or f"systemctl: exit {state.rc}", source="systemctl")
    if state.stdout.strip() != "active":
        advice = f"journalctl -u {unit} -n 30; systemctl start {unit}"
        return Found(Verdict.FAIL, f"{unit} is {state.stdout.strip()}", "active", advice, source="systemctl")
    answer = at.host.run(command)
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source=command)
    served = {line.split()[0] for line in answer.stdout.splitlines() if line.strip()}
    missing = expected - served
    return Found(
        Verdict.FAIL if missing else Verdict.PASS,
        read=", ".join(sorted(served)) or "nothing",
        expected=", ".join(sorted(expected)),
        action="run `provision apply`" if missing else None,
        source=command,
    )


@check("scratch")
def scratch(at: Target) -> Found:
    """The node's own space is there, on its device, and everybody may write to it."""
    local = exports.scratch(at.site, at.node)
    if local is None:
        return skip("this node has no scratch")
    state = at.host.run(f"stat -c '%F %a' {quote(local.path)}")
    if state.rc == 127:
        return unknown(state.stderr.strip(), source="stat")
    read, expected = state.stdout.strip() or "nothing there", "directory 1777"
    if local.device is not None:
        where = at.host.run(f"findmnt -n -o SOURCE --mountpoint {quote(local.path)}")
        device = at.host.run(f"readlink -f {quote(local.device)}")
        if where.rc not in (0, 1) or device.rc != 0:
            return unknown((where.stderr + device.stderr).strip() or "findmnt failed", source="findmnt")
        read += f" on {where.stdout.strip() or 'no device of its own'}"
        expected += f" on {device.stdout.strip()}"
    right = read == expected
    action = None if right else "run `provision apply`"
    return Found(Verdict.PASS if right else Verdict.FAIL, read, expected, action, source=local.path)
