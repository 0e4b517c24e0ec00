"""Where readings come from. A source says which values it tells and reads them; nothing here judges.

Every source takes the root of the file system, so that a recorded tree can stand for a machine, and raises nothing
that `collect` does not turn into "could not be read", with the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from provision.health.readings import Device, Unread


class Source:
    """One source; `tells` are the names of the values that it gives."""

    name = ""
    tells: tuple[str, ...] = ()
    slow = False  # starts other programs

    def read(self) -> dict[str, Any]:
        """The values, by name. Raises whatever kept it from reading."""
        raise NotImplementedError


def collect(subject: str, sources: Iterable[Source], *, seconds: float) -> Device:
    """What `sources` tell, read at the same time; one that has not answered in `seconds` is unread.

    Threads are daemons: one that hangs in the driver holds up neither the others nor the end of the program.
    """
    wanted = list(sources)
    values: dict[str, Any] = {}
    answers: list[dict[str, Any]] = [{} for _ in wanted]

    def work(place: int, source: Source) -> None:
        try:
            told = source.read()
        except Exception as error:  # noqa: BLE001 - becomes the reason for which the values are unknown
            told = {name: Unread(f"{source.name}: {_said(error)}") for name in source.tells}
        for name in source.tells:
            told.setdefault(name, Unread(f"{source.name} did not tell it"))
        answers[place] = told

    threads = [
        threading.Thread(target=work, args=(place, source), name=source.name, daemon=True)
        for place, source in enumerate(wanted)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    for source, answer in zip(wanted, answers):
        late = {name: Unread(f"{source.name} did not answer in {seconds:.0f} s") for name in source.tells}
        values.update(answer or late)
    return Device(subject, values)


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
