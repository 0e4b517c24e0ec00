"""The pyinfra connector of this project: a node behind one root shell, with its facts remembered until it changes.

Facts that a run is known to read are fetched together, in one execution, and answered from memory; any command or
upload makes the node forget them, because nothing is true about a node that was just changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import IOBase
from typing import TYPE_CHECKING, Any

from pyinfra.api.command import StringCommand
from pyinfra.connectors.base import BaseConnector
from pyinfra.connectors.util import CommandOutput, OutputLine

from provision.engine.limits import limit
from provision.engine.remote import Output, RootShell

if TYPE_CHECKING:
    from provision.engine.record import Recorder
    from provision.profiles import Distribution

FACT_TIMEOUT = 60.0  # seconds for one read; many together get this much in all
_WINDOW = 25  # facts fetched ahead after a change made the node forget them


class Feed(StringCommand):  # type: ignore[misc]  # pyinfra is untyped here
    """A shell command with content on its standard input: the way for anything secret or large."""

    def __init__(self, text: str, stdin: bytes) -> None:
        super().__init__(text)
        self.stdin = stdin


class NodeConnector(BaseConnector):  # type: ignore[misc]
    """Executes on one node; `shell` is its session, `foretell` the facts that this run will read."""

    handles_execution = True
    shell: RootShell
    recorder: Recorder
    profile: Distribution

    def __init__(self, state: Any, host: Any) -> None:
        super().__init__(state, host)
        self.last: Output | None = None  # of the command that ran last: what a failure is explained by
        self.learnt: list[str] = []  # fact commands in the order in which they were first read
        self._expected: list[str] = []
        self._known: dict[str, Output] = {}
        self.timeout = 300.0  # of the operation that runs
        self.longest: float | None = None  # no operation may take longer

    @staticmethod
    def make_names_data(name: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
        yield name, {}, []

    def attach(self, recorder: Recorder, profile: Distribution, limits: Mapping[str, str]) -> None:
        self.recorder = recorder
        self.profile = profile
        self._limits = limits

    def limited(self, what: str) -> str | None:
        """Why this node cannot do `what` ("unit:x.service", "sysctl:vm.swappiness"), None when it can."""
        return limit(self._limits, what)

    def foretell(self, commands: list[str]) -> None:
        """Fetch the facts `commands` (those that an earlier run read) in a single execution."""
        self._expected = commands
        self._fetch(commands)

    def read(self, command: str) -> Output:
        """What the read-only `command` answers, from memory while the node has not changed."""
        if command not in self.learnt:
            self.learnt.append(command)
        if command not in self._known:
            ahead = self._expected.index(command) if command in self._expected else None
            window = self._expected[ahead : ahead + _WINDOW] if ahead is not None else [command]
            self._fetch([text for text in window if text not in self._known])
        return self._known[command]

    def forget(self) -> None:
        """Drop all facts: something has changed, here or on a node that this one depends on."""
        self._known.clear()

    def _fetch(self, commands: list[str]) -> None:
        if commands:
            self._known.update(
                zip(commands, self.shell.run_many(commands, timeout=FACT_TIMEOUT), strict=True)
            )

    def run_shell_command(
        self, command: StringCommand, print_output: bool = False, print_input: bool = False, **arguments: Any
    ) -> tuple[bool, CommandOutput]:
        self.forget()
        stdin = command.stdin if isinstance(command, Feed) else None
        self.last = self.shell.run(
            command.get_raw_value(),
            stdin=stdin,
            timeout=self.timeout if self.longest is None else min(self.timeout, self.longest),
        )
        lines = [OutputLine("stdout", line) for line in self.last.stdout.splitlines()]
        lines += [OutputLine("stderr", line) for line in self.last.stderr.splitlines()]
        return self.last.ok, CommandOutput(lines)

    def put_file(
        self,
        filename_or_io: str | IOBase,
        remote_filename: str,
        remote_temp_filename: str | None = None,
        print_output: bool = False,
        print_input: bool = False,
        **arguments: Any,
    ) -> bool:
        raise NotImplementedError(
            "files are written by provision.engine.ops.file, which is atomic and private"
        )

    def get_file(
        self,
        remote_filename: str,
        filename_or_io: str | IOBase,
        remote_temp_filename: str | None = None,
        print_output: bool = False,
        print_input: bool = False,
        **arguments: Any,
    ) -> bool:
        raise NotImplementedError("files are read by provision.engine.facts.text")
