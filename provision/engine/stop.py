"""Ctrl-C and TERM as a wish to stop in order, instead of an exception in the middle of anything."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_stop(stop: Callable[[], object]) -> Iterator[None]:
    """Within the block each Ctrl-C (or TERM) calls `stop`, between any two instructions of the main thread.

    `stop` may set flags, put words into a `queue.SimpleQueue` and write to file descriptors; it must take no lock.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: stop()) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt() -> None:
    """A `stop` for what may be ended anywhere: by KeyboardInterrupt, as Ctrl-C does it by itself and TERM does not."""
    raise KeyboardInterrupt
