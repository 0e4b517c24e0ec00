"""YAML with places: names stay text, and nothing in a file raises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.site.document import Document, parse_document, read_document
from provision.site.load import examine


def parsed(text: str) -> Document:
    document = Document("site.yml")
    parse_document(text, document)
    return document


def test_plain_scalars_stay_text() -> None:
    document = parsed(
        "{a: 01002, b: no, c: on, d: 24.10, e: 1e3, f: 12:30:00, g: 2024-01-02, 0x1f: x, y: ok}"
    )
    assert document.problems == []
    assert document.data == {
        "a": "01002",
        "b": "no",
        "c": "on",
        "d": "24.10",
        "e": "1e3",
        "f": "12:30:00",
        "g": "2024-01-02",
        "0x1f": "x",
        "y": "ok",
    }


def test_true_false_and_nothing_are_themselves_unless_quoted() -> None:
    assert parsed("[true, False, ~, null, 'true', \"\"]").data == [True, False, None, None, "true", ""]


def test_numbers_below_variables_are_numbers() -> None:
    data = parsed("{variables: {n: 3, f: 0.5, s: '3', octal: 010, big: 99999999999999999999}, port: 3}").data
    assert data["variables"] == {"n": 3, "f": 0.5, "s": "3", "octal": "010", "big": "99999999999999999999"}
    assert data["port"] == "3"


def test_every_key_and_value_has_its_place() -> None:
    document = parsed("a:\n  - x\n  - {b: c}\n")
    assert document.keys[("a",)] == (1, 1)
    assert document.values[("a", 0)] == (2, 5)
    assert document.keys[("a", 1, "b")] == (3, 6)
    assert document.values[("a", 1, "b")] == (3, 9)


def test_anchors_and_merges_are_followed_and_written_keys_win() -> None:
    document = parsed("base: &b {x: 1, y: 2}\nuse:\n  <<: *b\n  y: 3\nalso: *b\n")
    assert document.problems == []
    assert document.data["use"] == {"y": "3", "x": "1"}
    assert document.data["also"] == {"x": "1", "y": "2"}
    assert document.values[("use", "y")] == (4, 6)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("null\n", 1, "holds nothing"),
        ("--- ~\n", 1, "holds nothing"),
        ("a: 1\nb: 2\na: 3\n", 3, "stands twice, first on line 1"),
        ("a:\n\tb: 1\n", 2, "tab"),
        ("a: [1, 2\n", 2, "expected"),
        ("a: b: c\n", 1, "mapping values are not allowed"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: &x [*x]\n", 1, "contains itself"),
        ("a: &x {<<: *x}\n", 1, "contains itself"),
        ("a: !vault |\n  31\n", 1, "the tag"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "the tag"),
        ("? [a, b]\n: 1\n", 1, "a key must be text"),
        ("a: 1\nb: \x01\n", 2, "#x0001"),
        ('a: "\\ud800"\n', 1, "not Unicode"),
        ("[" * 500 + "]" * 500, 1, "nested deeper"),
        ("%YAML 9.9\n---\na: 1\n", 1, "version"),
    ],
)
def test_mistakes_have_their_line(text: str, line: int, says: str) -> None:
    problems = parsed(text).problems
    assert problems
    assert says in problems[0].message
    assert problems[0].line == line


def test_aliases_cannot_blow_up() -> None:
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for above, below in zip("bcdefgh", "abcdefg", strict=True):
        text += f"{above}: &{above} [{', '.join([f'*{below}'] * 10)}]\n"
    assert any("values" in problem.message for problem in parsed(text).problems)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"cluster: lab\nx: \xff\n", "not UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00", "#x007f|not UTF-8"),
        (b"a" * (5 << 20), "larger than"),
    ],
)
def test_files_that_are_no_site_files(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "site.yml"
    file.write_bytes(content)
    (problem,) = examine(file).problems
    assert any(part in problem.message for part in says.split("|"))
    assert problem.file == str(file)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "site.yml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_document(file).data == {"a": "1"}


def test_folders_and_absent_files(tmp_path: Path) -> None:
    assert "a folder" in examine(tmp_path).problems[0].message
    assert "No such file" in examine(tmp_path / "none.yml").problems[0].message
    assert "not a regular file" in examine(Path("/dev/null")).problems[0].message
    os.mkfifo(tmp_path / "pipe.yml")  # nobody will ever write to it
    assert "not a regular file" in examine(tmp_path / "pipe.yml").problems[0].message
    assert examine(Path("a\0b")).errors


@given(st.text(alphabet="abc:-[]{}\n \t'\"#&*!|>?%@,<~01\\u\x00\x85", max_size=120))
def test_no_text_raises(text: str) -> None:
    parsed(text)
