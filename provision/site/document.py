"""YAML with the place of every key and value, read so that a name is never taken for a number.

Plain scalars stay text, apart from true, false and null: `01002` and `no` are names of hosts, a version 24.10
is not 24.1, and the models turn text into numbers where a number is wanted. Only below `variables`, which
belong to playbooks, do numbers become numbers. Nothing that stands in a file makes this module raise.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from provision.site.problem import Key, Problem, shown

LARGEST_FILE = 4 << 20  # bytes
DEEPEST = 50  # levels of nesting
MOST_VALUES = 200_000  # after aliases are followed

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,17}\.[0-9]{1,17}([eE][-+]?[0-9]{1,3})?")
_CORE = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_CORE + tag for tag in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")}
_NATIVE_BELOW = "variables"


class Place(NamedTuple):
    line: int  # from 1
    column: int  # from 1


@dataclass
class Document:
    """A YAML file: its values, and where each of them stands."""

    file: str  # as the admin named it
    data: Any = None
    values: dict[Key, Place] = field(default_factory=dict)
    keys: dict[Key, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, problem: Problem) -> Problem:
        """`problem` with file, line and column: its own, or those of the nearest key above it."""
        if problem.line is not None:
            return problem
        own = (self.keys if problem.at_key else self.values).get(problem.key)
        key = problem.key
        while own is None and key:
            key = key[:-1]
            own = self.keys.get(key) or self.values.get(key)
        return problem.at(self.file, *(own or ()))


def read_document(path: Path) -> Document:
    """The document at `path`; everything that is wrong with it is in its `problems`, never raised."""
    document = Document(str(path))
    text = _read(path, document)
    if text is not None:
        parse_document(text, document)
    return document


def parse_document(text: str, document: Document) -> None:
    """Fill `document` from `text`."""
    try:
        root = _compose(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"the character #x{error.character:04x}" if isinstance(error.character, int) else "a byte"
        _broken(document, line, None, f"{character} cannot stand in a text file")
        return
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = " ".join(str(part) for part in (error.context, error.problem) if part)
        if "'\\t'" in why:
            why = "a tab; YAML is indented by spaces"
        _broken(document, mark.line + 1 if mark else None, mark.column + 1 if mark else None, why)
        return
    if root is None:
        _broken(document, 1, 1, "the file is empty", action="`provision init FILE` writes one to start from")
        return
    document.data = _Builder(document).build(root, ())
    if document.data is None and not document.problems:
        _broken(document, 1, 1, "holds nothing", action="`provision init FILE` writes one to start from")


def _read(path: Path, document: Document) -> str | None:
    try:
        kind = path.stat().st_mode  # before it is opened: that waits for a writer where it is a pipe
        if not stat.S_ISREG(kind):
            _broken(
                document, None, None, "a folder, not a file" if stat.S_ISDIR(kind) else "not a regular file"
            )
            return None
        with path.open("rb") as opened:
            content = opened.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        action = (
            "`provision init FILE` writes one to start from" if isinstance(error, FileNotFoundError) else None
        )
        _broken(document, None, None, f"cannot be read: {reason}", action=action)
        return None
    if len(content) > LARGEST_FILE:
        _broken(document, None, None, f"larger than {LARGEST_FILE >> 20} MiB: not a site file")
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        _broken(document, line, None, f"not UTF-8 text (byte 0x{content[error.start]:02x})")
        return None


def _broken(
    document: Document, line: int | None, column: int | None, why: str, *, action: str | None = None
) -> None:
    document.problems.append(Problem("yaml", (), why=why, action=action).at(document.file, line, column))


class _Loader(yaml.SafeLoader):
    """Composes nodes, no deeper than DEEPEST."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth > DEEPEST:
            mark = self.get_mark()
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {DEEPEST} levels", problem_mark=mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


class _Builder:
    """Turns nodes into values, noting places and collecting mistakes."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: set[int] = set()  # nodes being built: an alias to one of them has no end
        self.left = MOST_VALUES

    def build(self, node: yaml.Node, key: Key) -> Any:
        self.document.values.setdefault(key, _start(node))
        self.left -= 1
        if self.left < 0 or id(node) in self.open:
            why = "an alias that contains itself" if self.left >= 0 else f"more than {MOST_VALUES} values"
            if self.left >= -1:
                self.mistake("alias", key, _start(node), why)
            return None
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, key)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return self.sequence(node, key)
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, key)
        finally:
            self.open.discard(id(node))

    def sequence(self, node: yaml.SequenceNode, key: Key) -> list[Any]:
        self.check_tag(node, key, {_CORE + "seq"})
        return [self.build(item, (*key, index)) for index, item in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        self.check_tag(node, key, {_CORE + "map"})
        built: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.mistake("key", key, _start(key_node), "a key must be text")
                continue
            if key_node.tag == _CORE + "merge" and key_node.style is None:
                merged.append(value_node)
                continue
            name = self.text(key_node, key)
            own = (*key, name)
            if name in built:
                first = self.document.keys[own]
                self.mistake(
                    "duplicate-key", own, _start(key_node), f"stands twice, first on line {first.line}"
                )
                continue
            self.document.keys.setdefault(
                own, _start(key_node)
            )  # a key written out stands before a merged one
            built[name] = self.build(value_node, own)
        for value_node in merged:
            for name, value in self.merged(value_node, key):
                built.setdefault(name, value)
        return built

    def merged(self, node: yaml.Node, key: Key) -> Iterator[tuple[str, Any]]:
        """What `<<: *anchor` brings along; keys that are written out win."""
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                self.mistake("key", key, _start(source), "only mappings can be merged by <<")
                continue
            yield from (self.build(source, key) or {}).items()

    def scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        self.check_tag(node, key, _PLAIN_TAGS)
        if node.style is not None:
            return self.text(node, key)
        text: str = node.value
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if key[:1] == (_NATIVE_BELOW,):
            if _INTEGER.fullmatch(text):
                return int(text)
            if _FLOAT.fullmatch(text):
                return float(text)
        return self.text(node, key)

    def text(self, node: yaml.ScalarNode, key: Key) -> str:
        text: str = node.value
        if any("\ud800" <= character <= "\udfff" for character in text):
            self.mistake("text", key, _start(node), f"{shown(text)} is not Unicode text")
            return ""
        return text

    def check_tag(self, node: yaml.Node, key: Key, known: set[str]) -> None:
        if node.tag not in known:
            tag = node.tag.replace(_CORE, "!!")
            why = f"the tag {shown(tag)} is not understood"
            self.mistake("tag", key, _start(node), why)

    def mistake(self, rule: str, key: Key, place: Place, why: str) -> None:
        self.document.problems.append(Problem(rule, key, why=why).at(self.document.file, *place))


def _start(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)
