"""The ranks as one group that notices when a member is gone, and says which.

Everything the ranks tell each other about the work (checksums, losses, timings) goes through the store, a
small server in rank 0's process, and never through the collectives, which are under test. Each rank also
publishes a heartbeat with the number of the step it is in. From the heartbeats every rank can tell a dead
rank (no more beats) from a hung one (beats, but behind the others in steps), also while its own main thread
is stuck.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Callable

from .network import why_closed
from .placement import Placement

BEAT_SECONDS = 1.0
LAST_WORDS_SECONDS = 8.0
MAIN_THREAD_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class Missing:
    """One rank that the others had to do without."""

    rank: int
    host: str | None
    why: str


class GroupError(Exception):
    """The group cannot go on; `missing` names the ranks at fault, where that could be told."""

    def __init__(self, message: str, missing: tuple[Missing, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.missing = missing


@dataclass
class _Beat:
    """What a rank last said of itself; `seen` is when its number last changed, by this rank's clock."""

    number: int = 0
    step: int = 0
    label: str = "joining"
    error: str | None = None
    seen: float = field(default_factory=time.monotonic)


def open_store(host: str, port: int, serve: bool, seconds: float) -> Any:
    """A TCPStore; with the plain server where torch was built without libuv (Debian's python3-torch)."""
    from torch.distributed import TCPStore

    def store(use_libuv: bool) -> Any:
        return TCPStore(
            host,
            port,
            is_master=serve,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            use_libuv=use_libuv,
        )

    if os.environ.get("USE_LIBUV") == "0":
        return store(False)
    try:
        return store(True)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        os.environ["USE_LIBUV"] = "0"
        return store(False)


class Group:
    """All ranks of the job, once they have found each other."""

    def __init__(
        self,
        placement: Placement,
        master: str,
        me: dict[str, Any],
        *,
        timeout: float,
        join_timeout: float,
        on_loss: Callable[[GroupError], None],
        heard: Callable[[int], str | None] = lambda rank: None,
    ) -> None:
        """Join, and wait until every rank has.

        `me` is what the others get to know of this rank (at least "host"). A step that takes longer than
        `timeout` seconds is an error. `on_loss` is called once, in any thread, when the group is lost while
        the main thread is stuck; the process ends right after it. `heard` tells what a rank that never joined
        left behind about why.
        """
        self.placement = placement
        self.timeout = timeout
        self.dead_after = max(3.0, min(15.0, timeout / 2))
        self._on_loss = on_loss
        self._heard = heard
        self._sequence = 0
        self._trouble: GroupError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._own = _Beat()
        self._own_since = time.monotonic()
        self._beats: dict[int, _Beat] = {}
        self._store_seen = time.monotonic()
        self.store = self._connect(master, placement.port, join_timeout)
        self._beat_store = self._connect(master, self.store.port, join_timeout, serve=False)
        self.members = self._roll_call(me, join_timeout)
        self._beats = {rank: _Beat() for rank in range(placement.world_size)}
        for work in (self._beat_loop, self._guard_loop):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def _connect(self, master: str, port: int, seconds: float, serve: bool | None = None) -> Any:
        place = self.placement
        if serve is None:
            serve = place.rank == 0 and not place.agent_store
        try:
            return open_store(master, port, serve, seconds)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError
            if serve:
                raise GroupError(
                    f"rank 0 on {place.host} cannot listen on port {port}: {error}; does another burn-in run?"
                ) from error
            first = place.hosts[0] if place.hosts else place.master
            why = why_closed(master, port) or _first_line(error)
            raise GroupError(
                f"rank {place.rank}: {place.host} -> {first} ({master} port {port}) closed for {seconds:.0f} s: {why}",
                (Missing(0, first, f"not to be reached from {place.host} ({master} port {port}): {why}"),),
            ) from error

    def _roll_call(self, me: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        place = self.placement
        keys = [f"hello/{rank}" for rank in range(place.world_size)]
        self._publish(self.store)
        self.store.set(keys[place.rank], json.dumps(me))
        # Rank 0 waits a little longer: it writes the document, and the others' own words are there by then.
        deadline = time.monotonic() + seconds + (0 if place.rank else LAST_WORDS_SECONDS)
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                missing = tuple(
                    Missing(
                        rank,
                        place.hosts[rank] if place.hosts else None,
                        self._heard(rank) or f"did not report within {seconds:.0f} s",
                    )
                    for rank in absent
                )
                if missing:
                    said = "".join(
                        f"; {why}" for why in dict.fromkeys(filter(None, map(self._heard, absent)))
                    )
                    raise GroupError(
                        f"{_names(missing)} did not report within {seconds:.0f} s{said}", missing
                    )
            time.sleep(0.05)
        return [json.loads(value) for value in self.store.multi_get(keys)]

    # The work's side

    def step(self, label: str) -> None:
        """Say what this rank does next; raises GroupError when the group is lost already."""
        self.check()
        self._own.step += 1
        self._own.label = label
        self._own_since = time.monotonic()

    @contextmanager
    def collective(self, label: str) -> Iterator[None]:
        """Run collectives inside; what goes wrong there is taken for the fault of a rank that has gone.

        A killed process shows in the others as "connection closed by peer", so before anybody is blamed the
        heartbeats are watched until they tell who stopped.
        """
        self.step(label)
        try:
            yield
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise  # this rank's own trouble
            deadline = time.monotonic() + self.dead_after + 3 * self._interval
            while self._trouble is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._trouble is not None:
                raise self._trouble from error
            raise GroupError(
                f"rank {self.placement.rank} on {self.placement.host}: {label}: {_first_line(error)}; "
                "all ranks are still there, so look at the network between them"
            ) from error

    def gather(self, name: str, value: Any) -> list[Any]:
        """Every rank's `value` (anything JSON can carry), by rank, on every rank."""
        self.step(name)
        self._sequence += 1
        place, key = self.placement, f"{self._sequence}/{name}"
        self.store.set(f"{key}/{place.rank}", json.dumps(value))
        if place.rank == 0:
            keys = [f"{key}/{rank}" for rank in range(place.world_size)]
            self._wait(keys)
            values = [json.loads(text) for text in self.store.multi_get(keys)]
            self.store.set(f"{key}/all", json.dumps(values))
            return values
        self._wait([f"{key}/all"])
        values = json.loads(self.store.get(f"{key}/all"))
        return list(values)

    def barrier(self, name: str) -> None:
        """Wait for all ranks."""
        self.gather(name, None)

    def _wait(self, keys: list[str]) -> None:
        pause = 0.0005
        try:
            while not self.store.check(keys):
                self.check()
                time.sleep(pause)
                pause = min(0.02, pause * 1.5)
        except RuntimeError as error:
            raise self._store_lost(error) from error

    def check(self) -> None:
        """Raises GroupError when the group is lost; for waiting on something else than the group."""
        if self._trouble is not None:
            raise self._trouble

    def failed(self, message: str) -> None:
        """Tell the others that this rank cannot go on, and why."""
        self._own.error = message
        time.sleep(2 * self._interval)  # two beats: the others have read it

    def leave(self) -> None:
        """End a rank whose group is lost. Rank 0 keeps the store up until the others know why, too."""
        place = self.placement
        gone = {entry.rank for entry in self._trouble.missing} if self._trouble else set()
        if 0 not in gone:
            try:
                if place.rank:
                    self._beat_store.set(f"left/{place.rank}", "")
                else:
                    left = [f"left/{rank}" for rank in range(1, place.world_size) if rank not in gone]
                    deadline = time.monotonic() + self.dead_after + MAIN_THREAD_GRACE_SECONDS
                    while left and not self._beat_store.check(left) and time.monotonic() < deadline:
                        time.sleep(0.1)
            except RuntimeError as error:
                print(f"burn-in: while leaving: {_first_line(error)}", file=sys.stderr)
        self._ended.set()

    def end(self) -> None:
        """Stop the heartbeats: all ranks are done with each other."""
        self._ended.set()

    # The heartbeats' side

    @property
    def _interval(self) -> float:
        return max(BEAT_SECONDS, self.placement.world_size / 64)

    def _beat_loop(self) -> None:
        keys = [f"beat/{rank}" for rank in range(self.placement.world_size)]
        while not self._ended.is_set():
            self._own.number += 1
            try:
                self._publish(self._beat_store)
                for rank, text in enumerate(self._beat_store.multi_get(keys)):
                    self._take(rank, json.loads(text))
            except RuntimeError as error:
                if not self._ended.is_set():
                    self._lost(self._store_lost(error))
                return
            self._store_seen = time.monotonic()
            self._ended.wait(self._interval)

    def _publish(self, store: Any) -> None:
        own = self._own
        beat = {"number": own.number, "step": own.step, "label": own.label, "error": own.error}
        store.set(f"beat/{self.placement.rank}", json.dumps(beat))

    def _take(self, rank: int, beat: dict[str, Any]) -> None:
        known = self._beats[rank]
        if beat["number"] != known.number:
            self._beats[rank] = _Beat(beat["number"], beat["step"], beat["label"], beat["error"])

    def _guard_loop(self) -> None:
        while not self._ended.wait(0.25):
            trouble = self._trouble or self._look_for_trouble()
            if trouble is None:
                continue
            self._lost(trouble)
            if not self._ended.wait(MAIN_THREAD_GRACE_SECONDS + self.dead_after):
                self._on_loss(trouble)
                self.leave()
                sys.stderr.flush()
                os._exit(1)  # the main thread is stuck in native code and would never come back
            return

    def _look_for_trouble(self) -> GroupError | None:
        now = time.monotonic()
        place = self.placement
        if now - self._store_seen > self.dead_after + self._interval:
            return self._store_lost(None)
        others = {rank: beat for rank, beat in self._beats.items() if rank != place.rank}
        missing = tuple(
            Missing(rank, self._host(rank), f"failed in {beat.label}: {beat.error}")
            for rank, beat in others.items()
            if beat.error
        ) or tuple(
            Missing(rank, self._host(rank), f"no sign of life since {beat.label}")
            for rank, beat in others.items()
            if self._store_seen - beat.seen > self.dead_after  # a silent store says nothing of the others
        )
        if missing:
            return GroupError(f"{_names(missing)}: {missing[0].why}", missing)
        if now - self._own_since <= self.timeout:
            return None
        return self._stuck(self._beats)

    def _stuck(self, beats: dict[int, _Beat]) -> GroupError:
        """This rank's step takes too long: blame the ranks that are behind."""
        farthest = max(beat.step for beat in beats.values())
        missing = tuple(
            Missing(rank, self._host(rank), f"hangs in {beat.label}")
            for rank, beat in beats.items()
            if beat.step < farthest
        )
        if missing:
            return GroupError(
                f"{_names(missing)}: {missing[0].why}; the others waited {self.timeout:.0f} s", missing
            )
        return GroupError(
            f"all ranks hang in {self._own.label} for {self.timeout:.0f} s and none is behind: "
            "look at the network between them"
        )

    def _store_lost(self, error: Exception | None) -> GroupError:
        why = "its store closed the connection" if error else "its store does not answer"
        if self.placement.rank == 0:
            return GroupError(f"rank 0 cannot reach its own store: {error and _first_line(error)}")
        missing = (Missing(0, self._host(0), f"{why} during {self._own.label}"),)
        return GroupError(f"{_names(missing)}: {missing[0].why}", missing)

    def _lost(self, trouble: GroupError) -> None:
        with self._lock:
            if self._trouble is None:
                self._trouble = trouble

    def _host(self, rank: int) -> str:
        return str(self.members[rank]["host"])


def writer(world_size: int, missing: tuple[Missing, ...]) -> int:
    """The rank that writes the result: the lowest that is not missing."""
    gone = {entry.rank for entry in missing}
    return min(set(range(world_size)) - gone, default=0)


def _names(missing: tuple[Missing, ...]) -> str:
    return ", ".join(f"rank {entry.rank}" + (f" on {entry.host}" if entry.host else "") for entry in missing)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
