"""The pyinfra connector of this project: a node behind one root shell, with its facts remembered until it changes.

What a run is known to ask is asked together, in one execution, and answered from memory; any command or upload makes
the node forget it, because nothing is true about a node that was just changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import IOBase
from typing import TYPE_CHECKING, Any

from pyinfra.api.command import StringCommand
from pyinfra.connectors.base import BaseConnector
from pyinfra.connectors.util import CommandOutput, OutputLine

from provision.engine import questions
from provision.engine.limits import limit
from provision.engine.questions import Question
from provision.engine.remote import Output, RootShell

if TYPE_CHECKING:
    from provision.engine.record import Recorder
    from provision.profiles import Distribution

FACT_TIMEOUT = 60.0  # seconds for one read, also of many that are asked together
_WINDOW = 25  # questions asked ahead after a change made the node forget


class Feed(StringCommand):  # type: ignore[misc]  # pyinfra is untyped here
    """A shell command with content on its standard input: the way for anything secret or large."""

    def __init__(self, text: str, stdin: bytes) -> None:
        super().__init__(text)
        self.stdin = stdin


class NodeConnector(BaseConnector):  # type: ignore[misc]
    """Executes on one node; `shell` is its session, `foretell` what this run will ask."""

    handles_execution = True
    shell: RootShell
    recorder: Recorder
    profile: Distribution

    def __init__(self, state: Any, host: Any) -> None:
        super().__init__(state, host)
        self.last: Output | None = None  # of the command that ran last: what a failure is explained by
        self.asked: dict[Question, None] = {}  # in the order in which they were first asked
        self._expected: list[Question] = []
        self._known: dict[Question, Output] = {}
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

    def foretell(self, expected: Sequence[Question]) -> None:
        """Ask `expected` (what an earlier run asked) in a single execution."""
        self._expected = list(expected)
        self._fetch(self._expected)

    def ask(self, *wanted: Question) -> list[Output]:
        """The answers to `wanted`, from memory while the node has not changed."""
        self.asked.update(dict.fromkeys(wanted))
        if unknown := [question for question in wanted if question not in self._known]:
            ahead = self._expected.index(unknown[0]) if unknown[0] in self._expected else len(self._expected)
            together = dict.fromkeys([*unknown, *self._expected[ahead : ahead + _WINDOW]])
            self._fetch([question for question in together if question not in self._known])
        return [self._known[question] for question in wanted]

    def forget(self) -> None:
        """Drop all answers: something has changed, here or on a node that this one depends on."""
        self._known.clear()

    def _fetch(self, wanted: Sequence[Question]) -> None:
        left = questions.batches(wanted)
        while left:
            outputs = self.shell.run_many([batch.text for batch in left], timeout=FACT_TIMEOUT)
            again: list[questions.Batch] = []
            for batch, output in zip(left, outputs, strict=True):
                if batch.refused(output):
                    again += batch.one_by_one()
                else:
                    self._known.update(batch.answers(output))
            left = again

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
