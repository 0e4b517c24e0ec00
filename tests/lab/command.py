"""The command `provision` as a user calls it, from tests."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

PROVISION = [sys.executable, "-m", "provision"]


@dataclass(frozen=True)
class Answer:
    """Exit status, the document (None where the input was refused) and what was said on the way."""

    rc: int
    document: dict[str, Any] | None
    stderr: str

    @property
    def nodes(self) -> dict[str, Any]:
        assert self.document is not None, self.stderr
        nodes = self.document["nodes"]
        assert isinstance(nodes, dict)
        return nodes

    @property
    def changed(self) -> dict[str, int]:
        return {name: node["changed"] for name, node in self.nodes.items()}

    @property
    def operations(self) -> list[dict[str, Any]]:
        """What was not already right, as `details.operations` has it."""
        assert self.document is not None, self.stderr
        found = self.document["details"]["operations"]
        assert isinstance(found, list)
        return found


def provision(*words: str, timeout: float = 900) -> Answer:
    """Run a verb with --json and wait for its answer."""
    return answer(start(*words), timeout)


def start(*words: str) -> subprocess.Popen[str]:
    """Start a verb with --json and do not wait."""
    return subprocess.Popen(
        [*PROVISION, *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def answer(running: subprocess.Popen[str], timeout: float = 900) -> Answer:
    """Wait for a verb that was started."""
    out, err = running.communicate(timeout=timeout)
    return Answer(running.returncode, json.loads(out) if out.strip().startswith("{") else None, err)
