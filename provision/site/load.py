"""Reads a site file: `load` gives the cluster, `examine` everything there is to say about the file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from provision.site.check import ABSENT_HOSTS, ABSENT_ROLES, site_problems, structure_problems
from provision.site.document import Document, parse_document, read_document
from provision.site.models import SECTIONS, Site, SiteFile
from provision.site.problem import Key, Problem, SiteError, nearest, one_of, shown
from provision.site.translate import child, holds_model, translate

SUFFIXES = (".yml", ".yaml")


@dataclass(frozen=True)
class Examined:
    """A site file that was read: the cluster, None where there are errors, and all problems by line."""

    path: Path
    site: Site | None
    problems: list[Problem]

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if not problem.warning]


def load(path: Path) -> Site:
    """The cluster described by the file at `path`. Raises SiteError with all mistakes at once."""
    examined = examine(path)
    if examined.site is None:
        raise SiteError(examined.errors)
    return examined.site


def find(name: str) -> Path:
    """The site file that `name` means: a path, or a name in the folder of site files. Raises SiteError."""
    path = Path(name).expanduser()
    if os.sep in name or path.suffix in SUFFIXES:
        return path
    folder = inventories()
    for suffix in SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    if path.is_file():
        return path
    known = site_names()
    raise SiteError(
        [
            Problem(
                "not-found",
                (),
                read=shown(name),
                expected=f"a site file, or a name in {folder}{os.sep}"
                + (f": {one_of(known)}" if known else ""),
                nearest=nearest(name, known),
                action=None if known else "`provision init` writes one to start from",
            ).at(name)
        ]
    )


def inventories() -> Path:
    """The folder of site files: PROVISION_INVENTORIES, else inventories/ here."""
    return Path(os.environ.get("PROVISION_INVENTORIES") or "inventories")


def site_names() -> list[str]:
    """The names that stand for a file in the folder of site files."""
    folder = inventories()
    if not folder.is_dir():
        return []
    files = (path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    return sorted(path.stem for path in files if not path.stem.endswith(".lock"))


def examine(path: Path) -> Examined:
    """Read and check the file at `path`. Never raises for anything that stands in a file."""
    return _examined(read_document(path), path)


def examine_text(text: str, path: Path) -> Examined:
    """Check `text` as if it stood in the file at `path`."""
    document = Document(str(path))
    parse_document(text, document)
    return _examined(document, path)


def _examined(document: Document, path: Path) -> Examined:
    site = None
    if document.data is not None:
        site = _examine(document, path)
    placed = {_identity(placed): placed for placed in map(document.place, document.problems)}
    problems = sorted(placed.values(), key=lambda problem: (problem.line or 0, problem.column or 0))
    if any(not problem.warning for problem in problems):
        site = None
    return Examined(path, site, problems)


def _identity(problem: Problem) -> tuple[object, ...]:
    return problem.rule, problem.line, problem.column, problem.message


def _examine(document: Document, path: Path) -> Site | None:
    if not isinstance(document.data, dict):
        expected = "a mapping with the keys cluster, groups, ..."
        document.problems.append(Problem("yaml", (), read=shown(document.data), expected=expected))
        return None
    _name_empty_sections(document.data)
    file, removed = _validate(document.data, document.problems)
    if file is None:
        return None
    structure = list(structure_problems(file))
    document.problems += structure
    wrong = [problem for problem in structure if not problem.warning]
    if wrong:
        removed += [key for problem in wrong if (key := _leave_out(document.data, problem)) is not None]
        file, more = _validate(document.data, [])  # what is missing now was reported above
        removed += more
        if file is None:
            return None
    site = Site.from_file(file, path)
    doubtful = frozenset[str]().union(*map(_doubtful, removed))
    document.problems += [problem for problem in site_problems(site) if problem.rule not in doubtful]
    return site


def _doubtful(key: Key) -> frozenset[str]:
    """The rules that may find something missing only because `key` was left out."""
    if key[0] == "groups" and (len(key) <= 2 or key[2] == "hosts"):
        return ABSENT_ROLES | ABSENT_HOSTS
    if key[0] == "groups" and key[2] == "roles":
        return ABSENT_ROLES
    return ABSENT_ROLES if key == ("scheduler",) or key in SECTIONS.values() else frozenset()


def _name_empty_sections(data: dict[str, Any]) -> None:
    """`firewall:` with nothing after it names the component, with its defaults."""
    sections = [(name,) for name, field in SiteFile.model_fields.items() if holds_model(field.annotation)]
    for *above, last in [*sections, *SECTIONS.values()]:
        below: Any = data
        for part in above:
            below = below.get(part) if isinstance(below, dict) else None
        if isinstance(below, dict) and last in below and below[last] is None:
            below[last] = {}


def _validate(data: dict[str, Any], problems: list[Problem]) -> tuple[SiteFile | None, list[Key]]:
    """The document as types, and the keys that had to be left out of `data` to get there.

    What the models refuse is added to `problems` and left out, so that the rest is checked in the same run.
    """
    reported: set[Key] = set()
    removed: list[Key] = []
    while True:
        try:
            return SiteFile.model_validate(data), removed
        except ValidationError as error:
            refused = translate(error, data, SiteFile)
        problems += [problem for problem in refused if not _explained(problem.key, reported)]
        reported |= {problem.key for problem in refused}
        left_out = [key for problem in refused if (key := _leave_out(data, problem)) is not None]
        if not left_out:
            return None, removed
        removed += left_out


def _explained(key: Key, reported: set[Key]) -> bool:
    """Whether a mistake at `key` is one that was reported, or comes from leaving out something below it."""
    return any(earlier[: len(key)] == key for earlier in reported)


def _leave_out(data: Any, problem: Problem) -> Key | None:
    """Take what `problem` is about out of `data`; what lacks a key goes as a whole. The key that is gone.

    A cluster's name and a group's roles have stand-ins, so that the rest can still be checked.
    """
    key = problem.key
    if key == ("cluster",):
        data["cluster"] = "cluster"
        return key
    if key[0] == "groups" and key[2:3] == ("roles",):
        group = child(child(data, "groups"), key[1])
        if isinstance(group, dict):
            group["roles"] = ["worker"]
        return key
    if problem.rule == "missing-key":
        key = key[:-1]
    below = data
    for part in key[:-1]:
        below = child(below, part)
    if isinstance(below, dict) and key and key[-1] in below:
        del below[key[-1]]
        return key
    if isinstance(below, list) and isinstance(key[-1], int) and key[-1] < len(below):
        del below[key[-1] :]  # those after it would change their places
        return key
    return None
