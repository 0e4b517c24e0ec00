"""Keeps what verbs answered, so that `provision report` can show it again.

One JSON file a document below $XDG_STATE_HOME/provision/<cluster>-<hash of the site file's path>/documents/,
readable by its owner alone; the last 50 of each verb are kept.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from provision import atomic
from provision.errors import InputError
from provision.report.model import Document

if TYPE_CHECKING:
    from provision.site.models import Site

KEEP = 50


@dataclass(frozen=True)
class Stored:
    """A document, when it was saved and where."""

    document: Document
    at: datetime
    path: Path


class StoreError(InputError):
    """A stored document cannot be read; the message names the file."""


def state_directory(site: Site) -> Path:
    """Where this machine keeps what it knows about `site` between runs; not made here."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state").absolute()
    place = hashlib.sha256(os.fsencode(site.path)).hexdigest()[:8]
    return base / "provision" / f"{site.cluster}-{place}"


def save(document: Document, site: Site) -> Path:
    """Store `document` atomically and forget the oldest ones of its verb beyond 50; the path of its file."""
    directory = state_directory(site) / "documents"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{time.time_ns():020d}-{document.verb}.json"
    atomic.write(path, document.model_dump_json().encode())
    for old in [each for each in _files(directory) if _verb(each) == document.verb][:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def latest(site: Site, verb: str | None = None) -> Stored | None:
    """The last document of `site` (of `verb`), None where there is none. Raises StoreError."""
    found = [
        path
        for path in _files(state_directory(site) / "documents")
        if verb is None or path.stem.partition("-")[2] == verb
    ]
    return load(found[-1]) if found else None


def load(path: Path) -> Stored:
    """The document in `path`. Raises StoreError where it is not one."""
    try:
        document = Document.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path}: not a stored document: {error}; remove the file and run again") from None
    return Stored(document, datetime.fromtimestamp(int(path.stem.partition("-")[0]) / 1e9, UTC), path)


def _verb(path: Path) -> str:
    return path.stem.partition("-")[2]


def _files(directory: Path) -> list[Path]:
    """Stored documents, oldest first."""
    return sorted(directory.glob("[0-9]*-*.json"))
