"""What happened on one node in one run: every operation with its outcome, told as events and kept for the manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from provision.engine.remote import RemoteError

Outcome = Literal["changed", "same", "skipped", "later", "failed"]  # "later": known after apply


class OperationFailed(Exception):
    """An operation could not be done; says which, and what the node answered."""

    def __init__(self, title: str, detail: str, advice: str | None = None) -> None:
        super().__init__(f"{title}: {detail}" if detail else title)
        self.title = title
        self.detail = detail
        self.advice = advice


class Stopped(Exception):
    """The run was asked to stop; no further operation begins."""


@dataclass
class Owned:
    """What one component made on a node: the manifest's entry, by which it is removed when it is switched off."""

    files: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)


@dataclass
class Recorder:
    """Collects what a node's operations did. `emit` takes one event, a plain dictionary."""

    node: str
    emit: Callable[[dict[str, Any]], None]
    forecast: bool  # a plan: nothing is executed
    stopping: Callable[[], bool] = lambda: False
    component: str = ""
    step: str = ""
    changes: list[str] = field(default_factory=list)  # titles of what was changed (in a plan: would be)
    written: set[str] = field(default_factory=set)  # files changed (in a plan: that would be) in this run
    owned: dict[str, Owned] = field(default_factory=dict)
    diff: str | None = None  # set by the operation that is running
    later: bool = False  # the running operation can only be told after what comes before it is done

    @contextmanager
    def operation(self, title: str) -> Iterator[None]:
        """One operation; the body sets `diff` and `later` and reports by `finish`."""
        if self.stopping():
            raise Stopped
        self.diff = None
        self.later = False
        self._started = time.monotonic()
        self._title = title
        self.emit({"event": "start", "node": self.node, "step": self.step, "title": title})
        try:
            yield
        except OperationFailed as failure:
            self._tell("failed", detail=failure.detail)
            raise
        except RemoteError as error:
            self._tell("failed", detail=str(error))
            raise

    @property
    def changed(self) -> int:
        return len(self.changes)

    def finish(self, changed: bool) -> None:
        if changed:
            self.changes.append(f"{self.step}: {self._title}")
        self._tell("later" if self.later else "changed" if changed else "same", diff=self.diff)

    def skip(self, title: str, reason: str) -> None:
        """Something does not apply here."""
        self._title, self._started = title, time.monotonic()
        self._tell("skipped", detail=reason)

    def _tell(self, outcome: Outcome, *, diff: str | None = None, detail: str | None = None) -> None:
        event: dict[str, Any] = {
            "event": "op",
            "node": self.node,
            "step": self.step,
            "title": self._title,
            "outcome": outcome,
            "seconds": round(time.monotonic() - self._started, 3),
        }
        if diff:
            event["diff"] = diff
        if detail:
            event["detail"] = detail
        self.emit(event)

    def own(self, *, file: str | None = None, unit: str | None = None) -> None:
        """Remember that the running component made this."""
        entry = self.owned.setdefault(self.component, Owned())
        if file and file not in entry.files:
            entry.files.append(file)
        if unit and unit not in entry.units:
            entry.units.append(unit)
