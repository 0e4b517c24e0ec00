"""What was done where, when, with what outcome: SQLite, one file a site.

It makes runs comparable and tells what a node's next run will ask it; it is never asked what is true of a node. Every
run keeps its line; the events of the last 50 runs of each verb are kept.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.engine.questions import Question
from provision.errors import InputError
from provision.report.model import Document, Finding, Verdict, worst
from provision.report.store import KEEP, state_directory

if TYPE_CHECKING:
    from provision.site.models import Site

_STEP = 20_000  # events forgotten, and pages given back, in one transaction: others wait for it
_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, verb TEXT NOT NULL, holder TEXT NOT NULL, site TEXT NOT NULL,
    started TEXT NOT NULL, ended TEXT, verdict TEXT
);
CREATE TABLE IF NOT EXISTS events (
    run TEXT NOT NULL REFERENCES runs(run), at REAL NOT NULL, node TEXT, event TEXT NOT NULL, content TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of_run ON events(run, node);
CREATE TABLE IF NOT EXISTS questions (
    node TEXT NOT NULL, scope TEXT NOT NULL, asked TEXT NOT NULL, PRIMARY KEY (node, scope)
);
CREATE TABLE IF NOT EXISTS applied (node TEXT PRIMARY KEY, site TEXT NOT NULL, run TEXT NOT NULL);
"""


class JournalError(InputError):
    """The journal cannot be read or written; the message says where it is and what to do."""


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def holder() -> str:
    """Who runs this: user@host, as locks and journal name it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def new_run() -> str:
    """An identifier that sorts by time and that two controllers do not share."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.urandom(2).hex()}"


class Journal:
    """The journal of one site; every method is one transaction. All raise JournalError."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "journal.db"

    def begin(self, run: str, verb: str, holder: str, site: str, started: str) -> None:
        self._do(
            "INSERT INTO runs(run, verb, holder, site, started) VALUES (?, ?, ?, ?, ?)",
            [(run, verb, holder, site, started)],
        )

    def end(self, run: str, ended: str, verdict: str) -> None:
        self._do("UPDATE runs SET ended = ?, verdict = ? WHERE run = ?", [(ended, verdict, run)])

    def add(self, run: str, events: Iterable[tuple[float, Mapping[str, Any]]]) -> None:
        """Events with their moment, seconds since the epoch."""
        rows = [(run, at, event.get("node"), event["event"], json.dumps(event)) for at, event in events]
        self._do("INSERT INTO events(run, at, node, event, content) VALUES (?, ?, ?, ?, ?)", rows)

    def forget(self, keep: int = KEEP) -> None:
        """Remove the events of all but the last `keep` runs of each verb, and give their space back."""
        places = "row_number() OVER (PARTITION BY verb ORDER BY started DESC, run DESC) AS place"
        old = f"SELECT run FROM (SELECT run, {places} FROM runs) WHERE place > ?"
        some = f"SELECT rowid FROM events WHERE run IN ({old}) LIMIT ?"
        while self._do(f"DELETE FROM events WHERE rowid IN ({some})", [(keep, _STEP)]):
            with self._said(), closing(self._open()) as db:
                # not `execute`, which stops after the first page
                db.executescript(f"PRAGMA incremental_vacuum({_STEP})")

    def remember_questions(self, scope: str, asked: Mapping[str, list[Question]]) -> None:
        """What each node was asked by its run; `scope` tells whole runs from those of single components."""
        rows = [(node, scope, json.dumps(questions)) for node, questions in asked.items()]
        self._do("INSERT OR REPLACE INTO questions(node, scope, asked) VALUES (?, ?, ?)", rows)

    def questions(self, scope: str) -> dict[str, list[Question]]:
        """Node -> what its last run of this `scope` asked it."""
        rows = self._ask("SELECT node, asked FROM questions WHERE scope = ?", (scope,))
        return {node: [Question(*pair) for pair in json.loads(asked)] for node, asked in rows}

    def mark_applied(self, nodes: Iterable[str], site: str, run: str) -> None:
        """These nodes are what the site file of digest `site` says."""
        self._do(
            "INSERT OR REPLACE INTO applied(node, site, run) VALUES (?, ?, ?)",
            [(node, site, run) for node in nodes],
        )

    def applied(self) -> dict[str, str]:
        """Node -> digest of the site file that it was last brought to by this controller."""
        return dict(self._ask("SELECT node, site FROM applied", ()))

    def runs(self, most: int = 20) -> list[dict[str, Any]]:
        """The latest runs, newest first."""
        rows = self._ask(
            "SELECT run, verb, holder, site, started, ended, verdict FROM runs ORDER BY started DESC LIMIT ?",
            (most,),
        )
        names = ("run", "verb", "holder", "site", "started", "ended", "verdict")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def told(self, event: str) -> list[tuple[float, dict[str, Any]]]:
        """What is kept of all events of this kind, with their moments, the earliest first."""
        rows = self._ask("SELECT at, content FROM events WHERE event = ? ORDER BY at, rowid", (event,))
        return [(at, json.loads(content)) for at, content in rows]

    def _open(self) -> sqlite3.Connection:
        """The database, made where it is missing."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=30)
        try:
            self.path.chmod(0o600)
            db.executescript(_SCHEMA)
        except BaseException:
            db.close()
            raise
        return db

    def _do(self, statement: str, rows: list[tuple[Any, ...]]) -> int:
        """How many rows of the journal were changed."""
        with self._said(), closing(self._open()) as db, db:
            return db.executemany(statement, rows).rowcount

    def _ask(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._said(), closing(self._open()) as db:
            return list(db.execute(query, values))

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise JournalError(
                f"{self.path}: the journal cannot be read or written: {error}; "
                "free the disk or mend its rights, or name another place by XDG_STATE_HOME"
            ) from error


@dataclass
class Entry:
    """One run in the journal, while it is under way."""

    run: str
    journal: Journal
    holder: str
    started: str  # ISO 8601, UTC
    verdict: Verdict = Verdict.UNKNOWN  # what is written at the end

    ended: bool = False
    lost: JournalError | None = None  # what could not be written down; nothing is after it

    def add(self, events: Iterable[tuple[float, Mapping[str, Any]]]) -> None:
        """Events with their moment, seconds since the epoch."""
        self.write(self.journal.add, self.run, events)

    def write(self, method: Callable[..., None], *arguments: object) -> None:
        """Call a method of the journal. What is done on nodes is done: where it cannot be written, the run goes on."""
        if self.lost is None:
            try:
                method(*arguments)
            except JournalError as error:
                self.lost = error

    def questions(self, scope: str) -> dict[str, list[Question]]:
        """Node -> what its last run asked it, by which this one is faster; none where that cannot be read."""
        return {} if self.lost else self.journal.questions(scope)

    def told(self, event: str) -> list[tuple[float, dict[str, Any]]]:
        """What earlier runs said of this kind; nothing where that cannot be read."""
        return [] if self.lost else self.journal.told(event)

    def end(self) -> None:
        """Write down what the run came to, and forget the events of runs long past."""
        self.ended = True
        self.write(self.journal.end, self.run, now(), self.verdict)
        self.write(self.journal.forget)

    def conclude(self, document: Document) -> None:
        """End with the verdict of `document`, the answer of the run, and say there where the journal has a gap."""
        document.details["run"] = self.run
        self.verdict = document.verdict
        self.end()
        if self.lost is not None:
            document.findings.append(
                Finding(
                    verdict=Verdict.WARN,
                    check="journaled",
                    subject=str(document.site),
                    why=f"not all of run {self.run} is in the journal: {self.lost}",
                    source=str(self.journal.path),
                )
            )
            document.verdict = worst([document.verdict, Verdict.WARN])


@contextmanager
def journaled(site: Site, verb: str, *, looking: bool = False) -> Iterator[Entry]:
    """An entry for one run of `verb`, ended whatever happens within the block.

    Raises JournalError before it, but not where the run only looks at nodes: that goes on, and says so.
    """
    entry = Entry(new_run(), Journal(state_directory(site)), holder(), now())
    entry.write(entry.journal.begin, entry.run, verb, entry.holder, site.digest, entry.started)
    if entry.lost is not None and not looking:
        raise entry.lost
    try:
        yield entry
    finally:
        if not entry.ended:
            entry.end()
