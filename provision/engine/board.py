"""What is known across nodes while a run is under way: which steps are done, secrets, hardware. For greenlets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gevent.event import AsyncResult

from provision.engine.plan import Prerequisite


class Blocked(Exception):
    """A step cannot run because another node's failed; says which."""


@dataclass(frozen=True)
class Done:
    """The outcome of one step on one node."""

    ok: bool
    changed: int = 0


@dataclass(frozen=True)
class Hooked:
    """What a hook's playbook came to on one node: its changes, or why it failed."""

    changed: int
    failure: str | None = None


@dataclass
class Board:
    """Greenlets of nodes wait here for each other; other workers' outcomes arrive by `settle`."""

    stopping: bool = False
    _closed: str | None = None  # why nothing more will be told
    _steps: dict[tuple[str, str], AsyncResult[Done]] = field(default_factory=dict)
    _secrets: AsyncResult[dict[str, bytes] | str] = field(default_factory=AsyncResult)
    _admitted: AsyncResult[frozenset[str] | str] = field(default_factory=AsyncResult)
    _hooks: dict[tuple[int, str], AsyncResult[Hooked]] = field(default_factory=dict)
    _seen: dict[str, AsyncResult[bool]] = field(default_factory=dict)

    def settle(self, node: str, step: str, done: Done) -> None:
        """Tell the outcome of a step; the first word counts."""
        result = self._steps.setdefault((node, step), AsyncResult())
        if not result.ready():
            result.set(done)

    def finished(self, node: str, steps: Iterable[str]) -> bool:
        """Whether all of a node's steps have an outcome."""
        return all(self._steps.setdefault((node, step), AsyncResult()).ready() for step in steps)

    def await_steps(self, wanted: Iterable[Prerequisite]) -> bool:
        """Wait until all have ended; True when one of them changed something. Raises Blocked: a needed one failed."""
        changed = False
        for node, step, needed in wanted:
            done: Done = self._wait(self._steps.setdefault((node, step), AsyncResult()))
            if needed and not done.ok:
                raise Blocked(f"blocked by {node}: {step} is not done there")
            changed = changed or done.changed > 0
        return changed

    def give_hook(self, index: int, node: str, hooked: Hooked) -> None:
        """Tell what hook number `index` of the site file came to on `node`."""
        self._hooks.setdefault((index, node), AsyncResult()).set(hooked)

    def await_hook(self, index: int, node: str) -> Hooked:
        """Wait for the hook's playbook to have been run on `node`."""
        hooked: Hooked = self._wait(self._hooks.setdefault((index, node), AsyncResult()))
        return hooked

    def give_secrets(self, secrets: dict[str, bytes] | str) -> None:
        """The site's secrets, or the reason why there are none."""
        if not self._secrets.ready():
            self._secrets.set(secrets)

    def secrets(self) -> dict[str, bytes]:
        """Wait for the secrets. Raises Blocked when the head could not give them."""
        secrets: dict[str, bytes] | str = self._wait(self._secrets)
        if isinstance(secrets, str):
            raise Blocked(secrets)
        return secrets

    def give_admitted(self, nodes: frozenset[str] | str) -> None:
        """The nodes that are in use, or the reason why that is not known."""
        if not self._admitted.ready():
            self._admitted.set(nodes)

    def admitted(self, node: str) -> bool:
        """Wait for the head's word on whether `node` is in use. Raises Blocked when it could not give it."""
        nodes: frozenset[str] | str = self._wait(self._admitted)
        if isinstance(nodes, str):
            raise Blocked(nodes)
        return node in nodes

    def seen(self, node: str) -> None:
        """`node` has told its hardware, or is known to be unable to."""
        result = self._seen.setdefault(node, AsyncResult())
        if not result.ready():
            result.set(True)

    def await_seen(self, nodes: Iterable[str]) -> None:
        """Wait until each of `nodes` has been seen or given up."""
        for node in nodes:
            result = self._seen.setdefault(node, AsyncResult())
            if self._closed is None:
                result.get()

    def close(self, reason: str) -> None:
        """Nothing more will be told: whoever waits, now or later, is blocked with `reason`."""
        self._closed = self._closed or reason
        for node in self._seen:
            self.seen(node)
        waiting: list[AsyncResult[Any]] = [
            self._secrets,
            self._admitted,
            *self._steps.values(),
            *self._hooks.values(),
        ]
        for result in waiting:
            if not result.ready():
                result.set_exception(Blocked(self._closed))

    def _wait(self, result: AsyncResult[Any]) -> Any:
        if self._closed is not None and not result.ready():
            raise Blocked(self._closed)
        return result.get()


class LateSecrets(Mapping[str, bytes]):
    """Secrets that are waited for when the first of them is asked for."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def __getitem__(self, name: str) -> bytes:
        return self._board.secrets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._board.secrets())

    def __len__(self) -> int:
        return len(self._board.secrets())
