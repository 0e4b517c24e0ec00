"""The operations that components are built from. Each reads the node, changes it only where it differs, and says so.

All of them return whether something changed (in a plan: would change), so that a deploy can write
`if ops.file(...): ...`. They raise OperationFailed, which ends the step on that node alone, and must be called from
within a step.
"""

from __future__ import annotations

import difflib
import hashlib
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyinfra.api.command import StringCommand
from pyinfra.api.exceptions import NestedOperationError
from pyinfra.api.operation import operation

from provision.engine import accounts as _accounts
from provision.engine import questions, units
from provision.engine.connector import Feed
from provision.engine.facts import ask, connector, read
from provision.engine.record import OperationFailed
from provision.engine.replace import replace

MARK = "Written by provision"  # in the header of every text file that is ours
_DIFF_LINES = 200
_LOADED = "/var/lib/provision/loaded"  # one stamp a unit: when it was last told to reload


def packages(*names: str, absent: bool = False) -> bool:
    """Distribution packages are installed (or removed). Waits for another package manager to finish."""
    verb = "remove" if absent else "install"
    return _perform(f"{verb} {_short(names)}", _packages, names=names, absent=absent, timeout=1800.0)


def file(
    path: str,
    content: str | bytes,
    *,
    mode: str = "644",
    user: str = "root",
    group: str = "root",
    secret: bool = False,
    validate: str | None = None,
    comment: str | None = "#",
) -> bool:
    """`path` has exactly this content, mode and owner.

    Replaced atomically (temporary file beside it, fsync, rename) and never readable to others on the way. `validate`
    is a command with `{}` for the temporary file: content that it refuses never arrives. Text gets a header in
    `comment` style (None: no header). `secret` keeps the content out of differences.
    """
    data = content if isinstance(content, bytes) else _headed(content, comment).encode()
    connector().recorder.own(file=path)
    return _perform(
        f"file {path}",
        _file,
        path=path,
        data=data,
        mode=mode,
        owner=f"{user}:{group}",
        secret=secret or isinstance(content, bytes),
        validate=validate,
    )


def directory(path: str, *, mode: str = "755", user: str = "root", group: str = "root") -> bool:
    """`path` is a directory with this mode and owner; what is in it stays."""
    return _perform(f"directory {path}", _directory, path=path, mode=mode, owner=f"{user}:{group}")


def link(path: str, target: str) -> bool:
    """`path` is a symbolic link to `target`."""
    connector().recorder.own(file=path)
    return _perform(f"link {path}", _link, path=path, target=target)


def absent(path: str) -> bool:
    """There is no file or link at `path`; a directory is an error, never removed with its content."""
    return _perform(f"no {path}", _absent, path=path)


def unit(
    name: str,
    *,
    running: bool = True,
    enabled: bool = True,
    masked: bool = False,
    reads: Sequence[str] = (),
    reload: bool = False,
) -> bool:
    """A systemd unit is in the wanted state.

    It is restarted (or reloaded) when any file in `reads` is newer than the running process, which also mends a run
    that was interrupted between writing and restarting; a mount is not, because it may be in use. A unit that this
    node cannot run is skipped with the reason.
    """
    name = name if "." in name else f"{name}.service"
    conn = connector()
    reason = conn.limited(f"unit:{name}")
    if reason is not None:
        conn.recorder.skip(f"unit {name}", reason)
        return False
    conn.recorder.own(unit=name)
    wanted = units.Wanted(
        running and not masked, enabled and not masked, masked, reload, keep=name.endswith(".mount")
    )
    return _perform(f"unit {name}", _unit, unit=name, wanted=wanted, reads=tuple(reads), timeout=180.0)


def accounts(groups: Sequence[_accounts.Group] = (), users: Sequence[_accounts.User] = ()) -> bool:
    """Groups and users exist with these ids and properties; others are left alone. One operation for all."""
    return _perform(
        f"accounts ({len(groups)} groups, {len(users)} users)", _apply_accounts, groups=groups, users=users
    )


def sysctl(
    values: Mapping[str, str | int], name: str = "90-provision", *, optional: Collection[str] = ()
) -> bool:
    """Kernel parameters hold now and after a reboot; those that this node cannot set are skipped with the reason.

    So are `optional` ones that its kernel does not have.
    """
    conn = connector()
    files = shlex.join(key.replace(".", "/") for key in optional)
    lacking = _known(f"cd /proc/sys && for f in {files}; do [ -e $f ] || echo $f; done").splitlines()
    absent = {file.replace("/", ".") for file in lacking}
    settable: dict[str, str] = {}
    for key, value in values.items():
        reason = "this kernel does not have it" if key in absent else conn.limited(f"sysctl:{key}")
        if reason is None:
            settable[key] = " ".join(str(value).split())
        else:
            conn.recorder.skip(f"sysctl {key}", reason)
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    written = file(f"/etc/sysctl.d/{name}.conf", text)
    if not settable:
        return written
    return _perform(f"sysctl {_short(settable)}", _sysctl, values=settable) or written


def ensure(
    title: str,
    *,
    test: str,
    make: str,
    stdin: bytes | Callable[[], bytes] | None = None,
    requires: str | None = None,
    owns: Sequence[str] = (),
    timeout: float = 300.0,
) -> bool:
    """Whatever no other operation covers: `test` exits 0 when it is right and 1 when it is not; `make` mends it.

    After `make`, `test` must exit 0. Any other exit status of `test` is "could not be told" and an error, except in a
    plan while `requires`, the program it needs, is not installed yet: then it is known after apply.
    `stdin` feeds `make`: the way for secrets; a function is asked for it when it is needed. `owns` are the files that
    `make` writes: they go with the component.
    """
    for path in owns:
        connector().recorder.own(file=path)
    return _perform(
        title, _ensure, title=title, test=test, make=make, stdin=stdin, requires=requires, timeout=timeout
    )


def wait(title: str, *, test: str, timeout: int = 60) -> None:
    """Wait on the node until `test` exits 0; fails after `timeout` seconds with its last words. Changes nothing.

    What is so already was so when everything behind it was asked, too; otherwise that is asked again.
    """
    conn = connector()
    if conn.recorder.forecast:
        return
    most = timeout if conn.longest is None else min(timeout, int(conn.longest))
    # by the time since boot: the clock may just be set
    script = (
        "now() { cut -d . -f 1 /proc/uptime; }; "
        f"e=$(($(now) + {most})); until o=$(sh -c {shlex.quote(test)} 2>&1); do "
        f"[ $(now) -lt $e ] || {{ printf '%s\\n' \"$o\" >&2; exit 1; }}; sleep 0.2; done"
    )
    with conn.recorder.operation(title):
        if not read(test).ok:
            output = conn.shell.run(script, timeout=most + 30)
            conn.forget()
            if not output.ok:
                raise OperationFailed(title, f"not within {most} s: {_tail(output.stderr)}")
        conn.recorder.finish(False)


def skip(title: str, reason: str) -> None:
    """Record that something does not apply on this node."""
    connector().recorder.skip(title, reason)


def _perform(name: str, function: Any, *, timeout: float = 120.0, **arguments: Any) -> bool:
    """Run one pyinfra operation, at once in an apply, in forecast in a plan, and tell what came of it."""
    conn = connector()
    recorder = conn.recorder
    with recorder.operation(name):
        conn.timeout = timeout
        try:
            meta = function(name=name, **arguments)
        except NestedOperationError:
            last = conn.last
            detail = _tail(last.stderr or last.stdout) if last else "no answer"
            raise OperationFailed(name, f"{detail} (exit {last.rc if last else '?'})") from None
        changed = bool(meta.will_change if recorder.forecast else meta.did_change())
        recorder.finish(changed)
        return changed


@operation()
def _packages(names: Sequence[str], absent: bool) -> Iterator[StringCommand]:
    manager = connector().profile.manager
    try:
        installed = manager.installed(_known(manager.query))
    except ValueError as error:
        raise OperationFailed("the list of packages", str(error)) from error
    todo = [name for name in names if (name in installed) == absent]
    if todo:
        connector().recorder.diff = "".join(f"{'-' if absent else '+'} {name}\n" for name in todo)
        yield StringCommand(manager.remove(todo) if absent else manager.install(todo))


@operation()
def _file(
    path: str, data: bytes, mode: str, owner: str, secret: bool, validate: str | None
) -> Iterator[StringCommand]:
    recorder = connector().recorder
    quoted = shlex.quote(path)
    [state] = ask(questions.content(path))
    kind, now_mode, now_owner, digest = (*state.stdout.split("|"), "", "", "", "")[:4]
    if kind == "directory":
        raise OperationFailed(f"file {path}", "there is a directory of this name", "move it away by hand")
    same = kind.startswith("regular") and digest == hashlib.sha256(data).hexdigest()
    if same and (now_mode, now_owner) == (mode.lstrip("0") or "0", owner):
        return
    recorder.written.add(path)
    if same:
        recorder.diff = f"- {now_mode} {now_owner}\n+ {mode} {owner}\n"
        yield StringCommand(f"chown -h {shlex.quote(owner)} {quoted} && chmod {mode} {quoted}")
        return
    recorder.diff = _difference(path, read(f"cat -- {quoted}").stdout if state.ok else None, data, secret)
    check = f"( {validate.replace('{}', chr(34) + '$t' + chr(34))} ) </dev/null" if validate else ":"
    yield Feed(replace(path, mode=mode, owner=owner, check=check), data)


@operation()
def _directory(path: str, mode: str, owner: str) -> Iterator[StringCommand]:
    quoted = shlex.quote(path)
    now = ask(questions.directory(path))[0].stdout
    wish = f"directory|{mode.lstrip('0') or '0'}|{owner}"
    if now != wish:
        connector().recorder.diff = f"- {now or 'nothing'}\n+ {wish}\n"
        user, _, group = owner.partition(":")
        yield StringCommand(
            f"install -d -m {mode} -o {shlex.quote(user)} -g {shlex.quote(group)} -- {quoted}"
        )


@operation()
def _link(path: str, target: str) -> Iterator[StringCommand]:
    now = read(f"readlink -- {shlex.quote(path)}").stdout.strip()
    if now != target:
        connector().recorder.diff = f"- {now or 'nothing'}\n+ -> {target}\n"
        yield StringCommand(f"ln -sfnT -- {shlex.quote(target)} {shlex.quote(path)}")


@operation()
def _absent(path: str) -> Iterator[StringCommand]:
    quoted = shlex.quote(path)
    if read(f"[ -e {quoted} ] || [ -L {quoted} ]").ok:
        connector().recorder.diff = f"- {path}\n"
        # systemd would go on to know the unit, and start it for whoever requires it: a login its home
        forget = " && systemctl daemon-reload" if path.startswith(f"{units.DIRECTORY}/") else ""
        yield StringCommand(f"rm -f -- {quoted}{forget}")


@operation()
def _unit(unit: str, wanted: units.Wanted, reads: Sequence[str]) -> Iterator[StringCommand]:
    recorder = connector().recorder
    stamp = f"{_LOADED}/{unit}"
    state, loaded, *files = ask(questions.unit(unit), *map(questions.written, [stamp, *reads]))
    if not state.ok:
        raise OperationFailed(f"unit {unit}", _tail(state.stderr))
    todo = units.actions(
        units.parse_show(state.stdout),
        wanted,
        newest=max((float(file.stdout) for file in files if file.ok), default=None),
        loaded=float(loaded.stdout) if wanted.reload and loaded.ok else None,
        rewritten=recorder.forecast and any(path in recorder.written for path in reads),
    )
    if todo:
        recorder.diff = "".join(f"+ systemctl {verb} {unit}\n" for verb in todo)
        yield StringCommand(_unit_script(unit, todo, wanted, reads, stamp))


def _unit_script(unit: str, todo: list[str], wanted: units.Wanted, reads: Sequence[str], stamp: str) -> str:
    """Shell text for the verbs; on failure the unit's last words are on stderr. Files from the future are touched,
    or a clock that was set back would make the unit look stale for ever."""
    quoted = shlex.quote(unit)
    lines = ["set -u", f"mkdir -p {_LOADED}; now=$(mktemp {_LOADED}/.now.XXXXXX); trap 'rm -f $now' EXIT"]
    lines += [f"[ ! {shlex.quote(path)} -nt $now ] || touch -c -- {shlex.quote(path)}" for path in reads]
    # what systemctl itself says comes last: of a long explanation the end is kept
    told = (
        f"{{ systemctl --no-pager -l status -n 0 {quoted}; journalctl -q --no-pager -o cat -u {quoted} -n 15; "
        "printf '%s\\n' \"$said\"; } >&2"
    )
    for verb in todo:
        if verb == "daemon-reload":
            lines.append("systemctl daemon-reload")
        elif verb in ("start", "restart"):
            lines.append(f"! systemctl -q is-failed {quoted} || systemctl reset-failed {quoted}")
        command = f"systemctl {verb} {quoted}"
        if verb == "restart":
            # A unit whose file was away while it ran (a package put back) may be refused by a reload with EBUSY: it
            # has its control group already. It is read again once it is stopped.
            command = (
                f"{{ systemctl restart {quoted} || {{ "
                f'[ "$(systemctl show -p LoadState --value {quoted})" = error ] && systemctl stop {quoted} && '
                f"systemctl daemon-reload && systemctl start {quoted}; }}; }}"
            )
        if verb == "stop" and unit.endswith(".mount"):
            # Stopping the unit of a file system with homes would end the sessions of all who have theirs there, ours
            # too: they require it. systemd sees the mount gone by itself.
            command = f'umount -- "$(systemctl show -p Where --value {quoted})"'
        if verb != "daemon-reload":
            lines.append(f"said=$({command} 2>&1) || {{ {told}; exit 1; }}")
    if wanted.running:
        lines.append(f"said=$(systemctl is-active {quoted}) || {{ {told}; exit 1; }}")
    if any(verb in todo for verb in ("start", "restart", "reload")):
        lines.append(f"mv -f $now {shlex.quote(stamp)}")
    return "\n".join(lines)


@operation()
def _apply_accounts(
    groups: Sequence[_accounts.Group], users: Sequence[_accounts.User]
) -> Iterator[StringCommand]:
    now = _accounts.parse(_known("getent passwd"), _known("getent group"))
    commands = _accounts.commands(now, groups, users)
    if commands:
        connector().recorder.diff = "".join(f"+ {command}\n" for command in commands)
        yield StringCommand(" && ".join(commands))


@operation()
def _sysctl(values: Mapping[str, str]) -> Iterator[StringCommand]:
    live = read(f"sysctl -e -- {shlex.join(values)}")
    now = {
        key.strip(): " ".join(value.split()) for key, _, value in (line.partition("=") for line in live.lines)
    }
    todo = {key: value for key, value in values.items() if now.get(key) != value}
    if todo:
        connector().recorder.diff = "".join(
            f"- {key} = {now.get(key, 'unknown here')}\n+ {key} = {value}\n" for key, value in todo.items()
        )
        yield StringCommand("sysctl -q -w -- " + shlex.join(f"{key}={value}" for key, value in todo.items()))


@operation()
def _ensure(
    title: str, test: str, make: str, stdin: bytes | Callable[[], bytes] | None, requires: str | None
) -> Iterator[StringCommand]:
    recorder = connector().recorder
    if requires is not None and recorder.forecast and not read(f"command -v {shlex.quote(requires)}").ok:
        recorder.later = True
        yield StringCommand(make)
        return
    before = read(test)
    if before.rc == 0:
        return
    if before.rc != 1:
        if recorder.forecast and recorder.changed:
            recorder.later = True  # what would be done before it may be what it needs
            yield StringCommand(make)
            return
        raise OperationFailed(
            title, f"could not be told: {_tail(before.stderr)} (exit {before.rc} of its test)"
        )
    if stdin is None:
        yield StringCommand(make)
    else:
        yield Feed(make, stdin() if callable(stdin) else stdin)
    yield StringCommand(f"{{ {test}\n}} >&2 || {{ echo 'it was done, and is still not so' >&2; exit 1; }}")


def _known(command: str) -> str:
    """The output of a read-only command that must work wherever this tool does. Raises OperationFailed."""
    output = read(command)
    if not output.ok:
        raise OperationFailed(command, f"{_tail(output.stderr)} (exit {output.rc})")
    return output.stdout


def _headed(content: str, comment: str | None) -> str:
    """`content` with the line that says who writes this file; after a `#!` line where there is one."""
    if comment is None:
        return content
    line = f"{comment} {MARK}; changes made here are undone. Change the site file instead.\n"
    if content.startswith("#!"):
        first, _, rest = content.partition("\n")
        return f"{first}\n{line}{rest}"
    return line + content


def _difference(path: str, old: str | None, new: bytes, secret: bool) -> str:
    """A unified difference to show, or only that there is one."""
    if secret:
        return f"{'new' if old is None else 'changed'} content (not shown)\n"
    lines = list(
        difflib.unified_diff(
            (old or "").splitlines(),
            new.decode("utf-8", "replace").splitlines(),
            path,
            path,
            "now",
            "wanted",
            lineterm="",
        )
    )
    cut = (
        [*lines[:_DIFF_LINES], f"... {len(lines) - _DIFF_LINES} more lines"]
        if len(lines) > _DIFF_LINES
        else lines
    )
    return "\n".join(cut) + "\n"


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _short(names: Iterable[str], most: int = 4) -> str:
    words = list(names)
    return " ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
