"""testinfra on our own root shell: a check's command costs one round trip, not a new ssh connection.

All commands of a verification go to a node through one `Session`. Checks of other nodes may use it too (the
cross checks of munge), so it serves one command at a time and opens its shell again after a lost one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from testinfra.backend.base import BaseBackend, CommandResult
from testinfra.host import Host

from provision.engine.remote import DeadlineExceeded, RawOutput, RemoteError, RootShell

DEFAULT_TIMEOUT = 60.0  # seconds for one command where no deadline was set


class Shell(Protocol):
    """What the backend needs of a RootShell or a Session."""

    def run_bytes(self, command: str, timeout: float = ...) -> RawOutput: ...


class Session:
    """The root shell of one node, opened when first used, shared by threads.

    A node that could not be reached is not tried again: every later use raises the same RemoteError.
    """

    def __init__(self, name: str, connect: Callable[[], RootShell]) -> None:
        self.name = name
        self._connect = connect
        self._shell: RootShell | None = None
        self._refused: RemoteError | None = None
        self._turn = threading.Lock()

    def open(self) -> None:
        """Connect where that has not happened yet. Raises RemoteError with advice."""
        with self._turn:
            self._live()

    def run_bytes(self, command: str, timeout: float = DEFAULT_TIMEOUT) -> RawOutput:
        """Run `command` as root; waiting for its turn counts towards `timeout` (seconds)."""
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            raise DeadlineExceeded(f"{self.name}: busy with another check's command for {timeout:.0f} s")
        try:
            shell = self._live()
            return shell.run_bytes(command, timeout=max(deadline - time.monotonic(), 0.0))
        finally:
            self._turn.release()

    def interrupt(self) -> None:
        """From any thread: the command that runs now, and every later one, raises RemoteError."""
        self._refused = self._refused or RemoteError(f"{self.name}: the session was closed")
        if self._shell is not None:
            self._shell.kill()

    def close(self) -> None:
        """End the shell; the session cannot be used any more."""
        self.interrupt()
        with self._turn:
            self._drop()

    def _live(self) -> RootShell:
        if self._refused is None and (self._shell is None or not self._shell.alive):
            self._drop()
            try:
                self._shell = self._connect()
            except RemoteError as error:
                self._refused = self._refused or error
            except OSError as error:
                self._refused = RemoteError(
                    f"{self.name}: ssh cannot be started here: {error}", "is OpenSSH's client installed?"
                )
        if self._refused is not None:  # by now, or by another thread while this one was connecting
            self._drop()
            raise self._refused
        assert self._shell is not None
        return self._shell

    def _drop(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None


class RootShellBackend(BaseBackend):  # type: ignore[misc]  # testinfra is not typed
    """A testinfra backend whose commands go through a root shell until `deadline` (of time.monotonic())."""

    NAME = "provision"

    def __init__(self, shell: Shell, name: str) -> None:
        super().__init__(name)
        self.deadline: float | None = None
        self.said: list[str] = []  # on standard error, by the commands of the check that runs
        self._answers: dict[str, CommandResult] = {}
        self._shell = shell
        self._encoding = "utf-8"  # the shell's locale is C.UTF-8

    def run(self, command: str, *args: str, **kwargs: Any) -> CommandResult:
        """Run `command` with its quoted `args`. Raises RemoteError; DeadlineExceeded when time is over."""
        text = self.get_command(command, *args)
        timeout = DEFAULT_TIMEOUT if self.deadline is None else self.deadline - time.monotonic()
        if timeout <= 0:
            raise DeadlineExceeded(f"{self.hostname}: no time left for: {text[:80]}")
        raw = self._shell.run_bytes(text, timeout=timeout)
        if raw.stderr:
            self.said.append(raw.stderr.decode("utf-8", "replace").rstrip("\n"))
        return self.result(raw.rc, self.encode(text), raw.stdout, raw.stderr)

    def once(self, command: str) -> CommandResult:
        """As `run`, for what is the same however often it is asked."""
        if command not in self._answers:
            self._answers[command] = self.run(command)
        return self._answers[command]


def target_host(shell: Shell, name: str) -> Host:
    """A testinfra host that runs everything on `shell`."""
    backend = RootShellBackend(shell, name)
    host = Host(backend)
    backend.set_host(host)
    return host
