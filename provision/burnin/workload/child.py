"""Processes that a rank starts beside itself, from the same archive or folder as the program."""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def command(module: str, function: str, order: Any) -> list[str]:
    """Calls `function` of a module of this package with `order`, which JSON can carry, in a new Python."""
    package = __package__
    root = Path(__file__).parents[package.count(".") + 1]
    start = (
        f"import json, sys; sys.path.insert(0, {str(root)!r}); "
        f"from {package}.{module} import {function}; sys.exit({function}(json.loads(sys.argv[1])))"
    )
    return [sys.executable, "-c", start, json.dumps(order)]


def end_with_parent() -> None:
    """In a child: never outlive the rank that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
