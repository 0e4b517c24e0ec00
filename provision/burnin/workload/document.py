"""What a run leaves behind: one result document, and each rank's own lines, written as they happen."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write atomically: a reader on any node sees the whole document or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.jsonl"


def last_trouble(folder: Path, rank: int) -> str | None:
    """What another rank last said went wrong, where its lines are to be seen from this node."""
    try:
        lines = [json.loads(line) for line in rank_file(folder, rank).read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    return next((str(line["message"]) for line in reversed(lines) if line["event"] == "trouble"), None)


class RankLog:
    """One rank's lines, `rank-0003.jsonl`; rank 0 also reports progress on standard error."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.expected_seconds: float | None = None  # of the whole run
        self._file = rank_file(folder, rank).open("w", encoding="utf-8", buffering=1)
        self._rank = rank
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since this rank's start."""
        return time.monotonic() - self.start

    def event(self, event: str, **values: Any) -> None:
        """Keep one raw line."""
        self._file.write(json.dumps({"seconds": round(self.seconds, 3), "event": event, **values}) + "\n")

    def progress(self, text: str) -> None:
        """Tell the person who waits (rank 0 only)."""
        if self._rank == 0:
            left, seconds = "", self.seconds
            remaining = round((self.expected_seconds or 0) - seconds)
            if remaining > 0:
                left = f", about {remaining // 60}:{remaining % 60:02d} left"
            print(f"burn-in {seconds:6.1f} s{left}  {text}", file=sys.stderr, flush=True)

    def trouble(self, text: str) -> None:
        """Tell the person who waits, from any rank."""
        self.event("trouble", message=text)
        print(f"burn-in {self.seconds:6.1f} s  TROUBLE  {text}", file=sys.stderr, flush=True)
