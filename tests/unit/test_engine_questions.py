"""Many questions become few commands, and each gets the answer that it would have got alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.engine import facts, ops, questions
from provision.engine.connector import NodeConnector
from provision.engine.questions import Question
from provision.engine.record import OperationFailed, Recorder
from provision.engine.remote import Output, RootShell, local_shell


@pytest.fixture(scope="module")
def shell() -> Iterator[RootShell]:
    shell = local_shell()
    yield shell
    shell.close()


def asked(shell: RootShell, wanted: Sequence[Question]) -> dict[Question, Output]:
    batches = questions.batches(wanted)
    answers: dict[Question, Output] = {}
    for batch, output in zip(batches, shell.run_many([batch.text for batch in batches]), strict=True):
        answers.update(batch.answers(output))
    return answers


def test_a_file_is_told_with_type_mode_owner_and_digest(shell: RootShell, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("x")
    file.chmod(0o640)
    answer = asked(shell, [questions.content(str(file))])[questions.content(str(file))]
    assert answer.ok
    assert answer.stdout == "|".join(
        ["regular file", "640", f"{file.owner()}:{file.group()}", hashlib.sha256(b"x").hexdigest()]
    )


def test_what_is_not_there_is_told_as_such_beside_what_is(shell: RootShell, tmp_path: Path) -> None:
    here, gone, broken = tmp_path / "here", tmp_path / "gone", tmp_path / "broken"
    here.write_text("")
    broken.symlink_to("nowhere")
    answers = asked(shell, [questions.content(str(path)) for path in (gone, here, broken)])
    assert answers[questions.content(str(gone))].rc == 1
    assert answers[questions.content(str(here))].stdout.startswith("regular empty file|")
    assert answers[questions.content(str(broken))].stdout.startswith("symbolic link|")


def test_a_directory_has_no_digest_and_is_followed_to_where_asked(shell: RootShell, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    tmp_path.chmod(0o750)
    answers = asked(shell, [questions.content(str(tmp_path)), questions.directory(str(link))])
    told = f"directory|750|{tmp_path.owner()}:{tmp_path.group()}"
    assert answers[questions.content(str(tmp_path))].stdout == told
    assert answers[questions.directory(str(link))].stdout == told


def test_when_a_file_was_written_is_told_to_the_nanosecond(shell: RootShell, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("")
    os.utime(file, ns=(0, 1_800_000_000_123_456_789))
    answers = asked(shell, [questions.written(str(file)), questions.written(f"{file}.not")])
    assert float(answers[questions.written(str(file))].stdout) == pytest.approx(1_800_000_000.123457)
    assert not answers[questions.written(f"{file}.not")].ok


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=20)


@given(st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4, unique=True))
def test_any_path_gets_its_own_answer(shell: RootShell, tmp_path_factory: Any, found: list[str]) -> None:
    directory: Path = tmp_path_factory.mktemp("paths")
    for name in found:
        (directory / name).write_text(name)
    answers = asked(shell, [questions.content(f"{directory}/{name}") for name in found])
    digests = [answers[questions.content(f"{directory}/{name}")].stdout.rpartition("|")[2] for name in found]
    assert digests == [hashlib.sha256(name.encode()).hexdigest() for name in found]


def unit_answers(output: Output, *units: str) -> list[Output]:
    [batch] = questions.batches(map(questions.unit, units))
    answers = batch.answers(output)
    return [answers[questions.unit(unit)] for unit in units]


def test_units_are_told_apart_by_their_order() -> None:
    text = "LoadState=loaded\nActiveState=active\n\nLoadState=not-found\nActiveState=inactive\n"
    first, second = unit_answers(Output(0, text, ""), "a.service", "b.service")
    assert first.stdout.splitlines() == ["LoadState=loaded", "ActiveState=active"]
    assert second.stdout.splitlines() == ["LoadState=not-found", "ActiveState=inactive"]


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (Output(1, "", "Failed to connect to bus"), "connect to bus"),
        (Output(0, "LoadState=loaded\n", ""), "tells of 1 units, 2 were asked after"),
        (Output(0, "", ""), "2 were asked after"),
    ],
)
def test_units_that_were_not_told_are_unknown_all_of_them(output: Output, why: str) -> None:
    for answer in unit_answers(output, "a.service", "b.service"):
        assert not answer.ok
        assert why in answer.stderr


def test_a_kind_is_one_command_however_many_are_asked() -> None:
    wanted = [
        questions.content("/a"),
        questions.command("true"),
        questions.unit("a.service"),
        questions.content("/b"),
        questions.unit("b.service"),
        questions.written("/a"),
    ]
    assert len(questions.batches(wanted)) == 4
    assert questions.batches([]) == []


class Counting:
    """A shell that answers everything with its own text, and counts executions."""

    def __init__(self) -> None:
        self.executions: list[list[str]] = []

    def run_many(self, commands: Sequence[str], timeout: float) -> list[Output]:
        self.executions.append(list(commands))
        return [Output(0, command, "") for command in commands]


@pytest.fixture
def connector() -> NodeConnector:
    connector = NodeConnector(SimpleNamespace(), SimpleNamespace(name="n1", data=SimpleNamespace()))
    connector.shell = Counting()  # type: ignore[assignment]
    return connector


def executions(connector: NodeConnector) -> list[list[str]]:
    assert isinstance(connector.shell, Counting)
    return connector.shell.executions


def test_what_was_foretold_is_not_asked_again(connector: NodeConnector) -> None:
    one, two = questions.command("one"), questions.command("two")
    connector.foretell([one, two])
    assert [answer.stdout for answer in connector.ask(two, one)] == ["two", "one"]
    assert executions(connector) == [["one", "two"]]


def test_after_a_change_everything_is_asked_anew_with_what_comes_next(connector: NodeConnector) -> None:
    one, two, new = (questions.command(text) for text in ("one", "two", "new"))
    connector.foretell([one, two])
    connector.forget()
    connector.ask(one)
    connector.ask(two)
    connector.ask(new)
    assert executions(connector) == [["one", "two"], ["one", "two"], ["new"]]


class Refusing(Counting):
    """systemctl: a name that is none spoils what it tells of the others."""

    def run_many(self, commands: Sequence[str], timeout: float) -> list[Output]:
        super().run_many(commands, timeout)
        return [
            Output(1, "", "Invalid unit name") if "@" in command else Output(0, "LoadState=loaded", "")
            for command in commands
        ]


def test_a_unit_that_is_refused_costs_the_others_no_answer(connector: NodeConnector) -> None:
    connector.shell = Refusing()  # type: ignore[assignment]
    wrong, right = connector.ask(questions.unit("@.service"), questions.unit("ssh.service"))
    assert (wrong.ok, wrong.stderr, right.stdout) == (False, "Invalid unit name", "LoadState=loaded")
    assert [len(commands) for commands in executions(connector)] == [1, 2]


def test_what_was_asked_is_known_once_each_in_order(connector: NodeConnector) -> None:
    connector.foretell([questions.command("never used")])
    connector.ask(questions.command("b"), questions.command("a"))
    connector.ask(questions.command("b"))
    assert [question.subject for question in connector.asked] == ["b", "a"]


class Starting(Counting):
    """A service that answers from the second time on."""

    def run_many(self, commands: Sequence[str], timeout: float) -> list[Output]:
        super().run_many(commands, timeout)
        return [Output(0 if len(self.executions) > 1 else 2, "", "connection refused") for _ in commands]

    def run(self, command: str, timeout: float) -> Output:
        return self.run_many([command], timeout)[0]


def test_what_was_asked_together_with_what_is_waited_for_is_asked_again_where_that_was_not_so(
    connector: NodeConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector.shell = Starting()  # type: ignore[assignment]
    connector.recorder = Recorder("n1", lambda event: None, forecast=False)
    for module in (facts, ops):
        monkeypatch.setattr(module, "connector", lambda: connector)
    answers, accounts = questions.command("sacctmgr ping"), questions.command("sacctmgr show")
    connector.foretell([answers, accounts])
    assert not connector.ask(accounts)[0].ok
    ops.wait("it answers", test=answers.subject)
    assert connector.ask(accounts)[0].ok
    connector.ask(answers)
    before = len(executions(connector))
    ops.wait("it answers", test=answers.subject)
    assert len(executions(connector)) == before, "what is so already costs nothing"


@pytest.fixture
def node(connector: NodeConnector, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeConnector]:
    """A step that runs on this machine."""
    connector.shell = local_shell("n1")
    connector.recorder = Recorder("n1", lambda event: None, forecast=False)
    for module in (facts, ops):
        monkeypatch.setattr(module, "connector", lambda: connector)
    yield connector
    connector.shell.close()


@pytest.mark.parametrize(
    ("longest", "test", "why"),
    [
        (1.5, "echo not yet; false", "not within 1 s: not yet"),
        (None, "echo no >&2; false", "not within 2 s: no"),
    ],
)
def test_a_wait_ends_with_the_last_words_of_what_it_waited_for(
    node: NodeConnector, longest: float | None, test: str, why: str
) -> None:
    node.longest = longest
    with pytest.raises(OperationFailed, match=rf"^it answers: {why}$"):
        ops.wait("it answers", test=test, timeout=2)


def test_a_wait_ends_as_soon_as_it_is_so(node: NodeConnector, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    ops.wait("third time", test=f"echo >>{tries}; [ $(wc -l <{tries}) -ge 3 ]")
    assert tries.read_text() == "\n\n\n"
