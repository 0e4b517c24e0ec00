"""One root shell on a node, fed by standard input: every command of a run goes through it.

Commands, file contents and passwords travel on the shell's standard input, so none of them is ever an
argument of a process that another user could list. A command runs in a subshell: it can exit, fail or be
wrong syntax without ending the session.
"""

from __future__ import annotations

import base64
import math
import os
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from provision.engine.ssh import CONNECT_TIMEOUT, ssh_command
from provision.site.secrets import arrives_as_root

if TYPE_CHECKING:
    from provision.site.models import Node, Site

Become = Literal["root", "sudo", "sudo-password"]

DEFAULT_TIMEOUT = 300.0  # seconds for one command
LOCK_WAIT = 2  # seconds for a lock: the session that held it last may just be ending
MOST_OUTPUT = 64 << 20  # bytes of commands' output held in memory; more is no answer to anything asked here
_CHUNK = 65536
_LOCAL: tuple[str, ...] = ("sh", "-c")  # what takes the place of ssh on the controller's own machine


class RemoteError(Exception):
    """A node could not be talked to: unreachable, refused, frozen or gone. `advice` says what to do next."""

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice


class DeadlineExceeded(RemoteError):
    """A command did not end in its time; the session was closed, the command may still run on the node."""


@dataclass(frozen=True)
class Output:
    """What a command answered: exit status, and both streams as text (UTF-8, undecodable bytes replaced)."""

    rc: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.rc == 0

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


@dataclass(frozen=True)
class RawOutput:
    """What a command answered, undecoded."""

    rc: int
    stdout: bytes
    stderr: bytes


class RootShell:
    """A shell with root's rights behind a pair of pipes; made by `connect`, used by one run at a time."""

    def __init__(
        self,
        argv: Sequence[str],
        become: Become,
        *,
        name: str,
        sudo_password: str | None = None,
        within: float | None = None,
    ) -> None:
        """`within` is for the whole session, in seconds: nothing in it is waited for any longer."""
        self.name = name
        self._until = time.monotonic() + (math.inf if within is None else within)
        self._nonce = (
            f"@@{os.urandom(12).hex()}"  # stands in arguments: for the greeting and sudo's prompt alone
        )
        self._mark = (
            f"@@{os.urandom(12).hex()}"  # of ends of outputs: travels on standard input, nobody can forge it
        )
        self._process = subprocess.Popen(
            [*argv, _remote_command(self._nonce, become)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to the controller alone, which ends sessions in order
        )
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._out = bytearray()
        self._err = bytearray()
        self._out_seen = self._err_seen = 0  # so far there is no end mark
        try:
            self._greet(sudo_password)
        except BaseException:
            self.close()
            raise

    def run(self, command: str, stdin: bytes | None = None, timeout: float = DEFAULT_TIMEOUT) -> Output:
        """Run `command` (shell text) as root with `stdin` (empty when None).

        Raises DeadlineExceeded after `timeout` seconds and RemoteError when the connection ends.
        """
        return self.run_many([command], stdin=stdin, timeout=timeout)[0]

    def run_many(
        self, commands: Sequence[str], stdin: bytes | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> list[Output]:
        """Run `commands` one after another in a single round trip; their outputs in the same order."""
        return [
            Output(raw.rc, raw.stdout.decode("utf-8", "replace"), raw.stderr.decode("utf-8", "replace"))
            for raw in self._run_raw(commands, stdin, timeout)
        ]

    def run_bytes(self, command: str, timeout: float = DEFAULT_TIMEOUT) -> RawOutput:
        """Like `run`, with both streams as they came: for content that need not be text."""
        return self._run_raw([command], None, timeout)[0]

    def _run_raw(self, commands: Sequence[str], stdin: bytes | None, timeout: float) -> list[RawOutput]:
        for command in commands:
            if "\0" in command:
                raise ValueError("a command holds a NUL byte: content goes to stdin, not into the command")
        script = "".join(_framed(command, self._mark, stdin) for command in commands)
        names = [command.strip().partition("\n")[0][:80] for command in commands]
        return self._exchange(script, names, timeout)

    def hold_lock(self, path: str, note: str) -> str | None:
        """Lock the file `path` for as long as this session lives; None, or the note of who holds it already.

        The lock is the shell's own: the kernel drops it when the session is gone, however that comes about, and
        commands do not inherit it, so a daemon that one of them started never keeps it.
        """
        quoted = shlex.quote(path)
        script = (
            f"__u=$(umask); umask 077; exec 9>>{quoted}; umask $__u; "
            f"chmod 600 {quoted}\n"  # of root alone: whoever can open it could hold it
            f"if flock -w {LOCK_WAIT} 9; then printf '%s\\n' {shlex.quote(note)} >{quoted}; __l=free; "
            f"else __l=$(cat {quoted}); exec 9>&-; fi\n"
        )
        script += _framed('printf %s "$__l"', self._mark, None)
        [answer] = self._exchange(script, [f"flock {path}"], DEFAULT_TIMEOUT)
        text = answer.stdout.decode("utf-8", "replace")
        return None if text == "free" else text

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the session; the remote shell sees the end of its input and leaves."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    def kill(self) -> None:
        """End the session at once, from any thread; a command that another one waits for raises RemoteError."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)  # with a jump host, ssh has a child of its own

    def _greet(self, sudo_password: str | None) -> None:
        """Wait for the shell, answering sudo's own prompt once; a second prompt means a wrong password."""
        ready, prompt = f"{self._nonce}-ready\n".encode(), f"{self._nonce}-sudo".encode()
        deadline = min(time.monotonic() + CONNECT_TIMEOUT * 2, self._until)
        asked = 0
        while ready not in self._out:
            if self._err.count(prompt) > asked:
                asked += 1
                if asked > 1 or sudo_password is None:
                    raise RemoteError(
                        f"{self.name}: sudo refused the password",
                        "check the sudo password (PROVISION_SUDO_PASSWORD or the prompt)",
                    )
                self._write_all(sudo_password.encode() + b"\n", deadline)
            self._pump(deadline, connecting=True)
        self._out.clear()
        self._err.clear()

    def _write_all(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            written = self._try_write(view)
            view = view[written:]
            if view:
                self._pump(deadline, writing=True)

    def _try_write(self, data: memoryview) -> int:
        assert self._process.stdin
        try:
            return os.write(self._process.stdin.fileno(), data[:_CHUNK])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._lost() from None

    def _exchange(self, script: str, names: Sequence[str], timeout: float) -> list[RawOutput]:
        """Send `script`, take in one output for each of `names`, by which what does not answer is named.

        Each of them may take `timeout` seconds.
        """
        timeout = max(min(timeout, self._until - time.monotonic()), 0.0)
        deadline = time.monotonic() + timeout
        outputs: list[RawOutput] = []
        pending = memoryview(script.encode())
        try:
            while len(outputs) < len(names):
                if pending:
                    pending = pending[self._try_write(pending) :]
                self._pump(deadline, writing=bool(pending))
                if len(self._out) + len(self._err) > MOST_OUTPUT:
                    raise RemoteError(
                        f"{self.name}: more than {MOST_OUTPUT >> 20} MiB of output of: {names[len(outputs)]}",
                        "look at what it prints there, by hand",
                    )
                while (found := self._take()) is not None:
                    outputs.append(found)
                    deadline = min(time.monotonic() + timeout, self._until)
        except DeadlineExceeded:
            self.close()
            raise DeadlineExceeded(
                f"{self.name}: no answer within {timeout:.0f} s to: {names[len(outputs)]}",
                "the node or its disk may hang; the command may still be running there",
            ) from None
        except RemoteError:
            self.close()
            raise
        return outputs

    def _take(self) -> RawOutput | None:
        """The next finished command's output, once both streams have shown its end mark."""
        end_out, end_err = f"\n{self._mark} ".encode(), f"\n{self._mark}\n".encode()
        at, err_at = self._out.find(end_out, self._out_seen), self._err.find(end_err, self._err_seen)
        if at < 0:
            self._out_seen = max(0, len(self._out) - len(end_out))
        if err_at < 0:
            self._err_seen = max(0, len(self._err) - len(end_err))
        if at < 0 or err_at < 0:
            return None
        newline = self._out.find(b"\n", at + len(end_out))
        if newline < 0:
            return None
        rc = int(self._out[at + len(end_out) : newline])
        output = RawOutput(rc, bytes(self._out[:at]), bytes(self._err[:err_at]))
        del self._out[: newline + 1]
        del self._err[: err_at + len(end_err)]
        self._out_seen = self._err_seen = 0
        return output

    def _pump(self, deadline: float, *, writing: bool = False, connecting: bool = False) -> None:
        """Wait for something to read (or for room to write) and take in what has come."""
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        out, err = self._process.stdout.fileno(), self._process.stderr.fileno()
        left = deadline - time.monotonic()
        if left <= 0:
            if connecting:
                raise RemoteError(
                    f"{self.name}: no answer from ssh or sudo", "is the node up? try `ssh` by hand"
                )
            raise DeadlineExceeded(self.name)
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(err, select.POLLIN)
        if writing:
            poll.register(self._process.stdin.fileno(), select.POLLOUT)
        for fd, events in poll.poll(min(left, 5.0) * 1000):
            if fd not in (out, err):
                continue
            if events & (select.POLLIN | select.POLLHUP):
                data = _read(fd)
                if data is None:
                    continue
                if not data and fd == out:
                    raise self._lost()
                (self._out if fd == out else self._err).extend(data)

    def _lost(self) -> RemoteError:
        """Why the session ended, in ssh's own words where it has said something."""
        assert self._process.stderr
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while data := _read(self._process.stderr.fileno()):
            self._err.extend(data)
        text = self._err.decode("utf-8", "replace").replace(self._nonce, "").replace(self._mark, "").strip()
        return explain_loss(self.name, text)


_OWN_KEY = "ssh-copy-id puts your key on a node that still takes a password"


def explain_loss(name: str, text: str) -> RemoteError:
    """Turn what ssh or sudo printed as it gave up into an error with advice. Pure."""
    lowered = text.lower()
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("@")]
    last = lines[-1] if lines else "the connection was closed without a word"
    if "host key verification failed" in lowered and "has changed" not in lowered:
        return RemoteError(
            f"{name}: its ssh host key is not known here, and access.host_keys is strict",
            "compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` at the node's console, then log in "
            "once by hand; or access.host_keys: accept-new",
        )
    if "host identification has changed" in lowered:
        return RemoteError(
            f"{name}: its ssh host key is not the known one",
            "if the node was reinstalled, remove the old key with `ssh-keygen -R` and look at the new one first; "
            "if not, somebody may be in between",
        )
    if "permission denied" in lowered:
        # a key that cannot be used is only a warning to ssh, which then tries others
        keys = [line for line in lines[:-1] if line.startswith("Load key ") or "Identity file " in line]
        said = "; ".join([*keys, last])
        return RemoteError(
            f"{name}: ssh: {said}", f"check access.user and access.key of the site file; {_OWN_KEY}"
        )
    if "sudo: not found" in lowered or "sudo: command not found" in lowered:
        return RemoteError(
            f"{name}: {last}", "install sudo on the node, or reach it as root (access.user: root)"
        )
    if "sudoers" in lowered:
        return RemoteError(
            f"{name}: {last}", "give access.user rights by sudo on the node (visudo), or reach it as root"
        )
    if "a password is required" in lowered or "sudo:" in lowered:
        return RemoteError(
            f"{name}: {last}", "sudo wants a password: set access.sudo_password: true in the site file"
        )
    if "timed out" in lowered or "no route" in lowered or "refused" in lowered or "not responding" in lowered:
        return RemoteError(f"{name}: {last}", "is the node up, and its sshd running?")
    return RemoteError(f"{name}: connection lost: {last}", "is the node up? try `ssh` by hand")


def connect(
    site: Site, node: Node, *, sudo_password: str | None = None, within: float | None = None
) -> RootShell:
    """Open a root shell on `node`; the password only goes to nodes that the site file says want one.

    `within` bounds the whole session, in seconds.
    Raises RemoteError with advice when that is impossible.
    """
    if arrives_as_root(node):
        become: Become = "root"
    else:
        become = "sudo-password" if node.access.sudo_password else "sudo"
    if node.access.local:
        _require_own_name(node.name)
        argv = _LOCAL
    else:
        argv = (*ssh_command(site, node), "--")
    return RootShell(argv, become, name=node.name, sudo_password=sudo_password, within=within)


def local_shell(name: str = "localhost") -> RootShell:
    """The same session on this machine, for tests."""
    return RootShell(_LOCAL, "root", name=name)


def _require_own_name(name: str) -> None:
    """A site file that says "local" and is used on another machine would make a node of that one."""
    own = socket.gethostname()
    if name not in (own, own.partition(".")[0]):
        raise RemoteError(
            f"{name}: access.local says that it is this machine, which is called {own}",
            f"run this on {name}, call this machine so (`hostnamectl hostname {name}`), or leave out access.local",
        )


def _remote_command(nonce: str, become: Become) -> str:
    """The text that ssh hands to the login shell, whatever that is: greets, then is a plain shell reading its input."""
    greet = (
        f"printf '%s\\n' {nonce}-ready; "
        "export LC_ALL=C.UTF-8 LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive SYSTEMD_PAGER= SYSTEMD_COLORS=0 "
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin; umask 022; cd /; exec sh"
    )
    # The prompt is ours, so that it can be told from any other output and is only answered when it was asked.
    words = {
        "root": [],
        "sudo": ["sudo", "-n", "--"],
        "sudo-password": ["sudo", "-S", "-p", f"{nonce}-sudo", "--"],
    }[become]
    # out of the home before sudo is there: a process of ours in it would keep a shared one from being unmounted
    return "cd / && exec " + shlex.join([*words, "sh", "-c", greet])


def _framed(command: str, mark: str, stdin: bytes | None) -> str:
    """Shell text that runs `command` in a subshell and then marks the end on both streams."""
    isolated = f"( eval {shlex.quote(command)} )"  # what is wrong syntax ends the subshell alone
    if stdin is None:
        text = f"{isolated} </dev/null 9>&-\n"
    else:
        encoded = base64.encodebytes(stdin).decode()
        text = f"base64 -d <<'{mark}-i' | {isolated} 9>&-\n{encoded}{mark}-i\n"
    return text + f"__r=$?; printf '\\n%s %d\\n' {mark} $__r; printf '\\n%s\\n' {mark} >&2\n"


def _read(fd: int) -> bytes | None:
    """What can be read now; None when nothing waits, empty at the end of the stream."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
