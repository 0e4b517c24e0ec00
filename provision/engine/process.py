"""Worker processes: how they are started, early enough that their start-up is not waited for.

Imports nothing heavy, so that a worker can be started while the controller is still importing the rest of itself.
"""

from __future__ import annotations

import subprocess
import sys

_waiting: list[subprocess.Popen[bytes]] = []


def start_worker() -> subprocess.Popen[bytes]:
    """A worker that waits for its job on standard input; one that was started ahead where there is one.

    It is in a session of its own: Ctrl-C reaches the controller only, which ends workers in order.
    """
    while _waiting:
        worker = _waiting.pop()
        if worker.poll() is None:
            return worker
    return subprocess.Popen(
        [sys.executable, "-m", "provision.engine.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def start_ahead() -> None:
    """Start a worker that will probably be wanted; without a job it leaves when this process does."""
    _waiting.append(start_worker())
