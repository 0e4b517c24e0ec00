"""Users and groups: what is there, what is wanted, and the commands between. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    name: str
    gid: int | None = None  # None: any
    system: bool = False


@dataclass(frozen=True)
class User:
    name: str
    uid: int | None = None
    group: str | None = None  # primary; None: one of the user's own name
    groups: tuple[str, ...] = ()  # further ones; memberships beyond these are left alone
    home: str | None = None
    shell: str | None = None
    comment: str | None = None
    system: bool = False
    create_home: bool = False  # homes on a shared file system are made by the storage server


@dataclass(frozen=True)
class Present:
    """The accounts of a node."""

    users: Mapping[str, tuple[int, int, str, str, str]]  # name -> uid, gid, comment, home, shell
    groups: Mapping[str, tuple[int, frozenset[str]]]  # name -> gid, members


def parse(passwd: str, group: str) -> Present:
    """From the output of `getent passwd` and `getent group`."""
    users: dict[str, tuple[int, int, str, str, str]] = {}
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) == 7:
            users[fields[0]] = (int(fields[2]), int(fields[3]), fields[4], fields[5], fields[6])
    groups: dict[str, tuple[int, frozenset[str]]] = {}
    for line in group.splitlines():
        fields = line.split(":")
        if len(fields) == 4:
            groups[fields[0]] = (int(fields[2]), frozenset(fields[3].split(",")) - {""})
    return Present(users, groups)


def commands(now: Present, groups: Sequence[Group], users: Sequence[User]) -> list[str]:
    """Shell commands that bring `now` to what is wanted, none when it is so already."""
    todo = [command for group in groups if (command := _group(now, group))]
    for user in users:
        todo += _user(now, user)
    return todo


def _group(now: Present, group: Group) -> str | None:
    have = now.groups.get(group.name)
    if have is None:
        words = ["groupadd", *(["-r"] if group.system else [])]
        words += ["-g", str(group.gid)] if group.gid is not None else []
        return shlex.join([*words, group.name])
    if group.gid is not None and have[0] != group.gid:
        return shlex.join(["groupmod", "-g", str(group.gid), group.name])
    return None


def _user(now: Present, user: User) -> list[str]:
    have = now.users.get(user.name)
    primary = user.group or user.name
    if have is None:
        words = ["useradd", "-M" if not user.create_home else "-m", *(["-r"] if user.system else [])]
        words += ["-u", str(user.uid)] if user.uid is not None else []
        words += ["-g", primary] if user.group else ["-U"]
        words += _properties(user)
        words += ["-G", ",".join(user.groups)] if user.groups else []
        return [shlex.join([*words, user.name])]
    uid, gid, comment, home, shell = have
    words = []
    words += ["-u", str(user.uid)] if user.uid is not None and uid != user.uid else []
    group = now.groups.get(primary)
    words += ["-g", primary] if user.group and (group is None or group[0] != gid) else []
    words += ["-d", user.home] if user.home and home != user.home else []
    words += ["-s", user.shell] if user.shell and shell != user.shell else []
    words += ["-c", user.comment] if user.comment is not None and comment != user.comment else []
    missing = [name for name in user.groups if user.name not in now.groups.get(name, (0, frozenset()))[1]]
    words += ["-a", "-G", ",".join(missing)] if missing else []
    return [shlex.join(["usermod", *words, user.name])] if words else []


def _properties(user: User) -> list[str]:
    words = ["-d", user.home] if user.home else []
    words += ["-s", user.shell] if user.shell else []
    words += ["-c", user.comment] if user.comment is not None else []
    return words
