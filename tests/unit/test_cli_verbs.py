"""The command line as a whole: every verb is there, and a short command does not pay for the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from provision.cli.verbs import VERBS, register


def registered(*words: str) -> set[str]:
    app = typer.Typer()
    register(app, words)
    return {command.name or "" for command in app.registered_commands} | {
        group.name or "" for group in app.registered_groups
    }


def test_all_verbs_are_there_for_help_and_completion() -> None:
    assert registered() == set(VERBS)
    assert registered("--help") == set(VERBS)
    assert registered("aply") == set(VERBS)


def test_the_verb_that_was_called_is_the_only_one_to_be_imported() -> None:
    assert registered("check", "site.yml") == {"check"}
    script = "import sys; from provision.cli import app, verbs; verbs.register(app, ['check']); print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "provision.engine.controller" not in answer.stdout.split()


def test_a_verb_is_called_by_its_name(tmp_path: Path) -> None:
    script = "from provision.cli import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", script, "check", str(tmp_path / "none.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 2
    assert "none.yml" in answer.stdout + answer.stderr


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("import", "lab")])
def test_every_verb_teaches_by_an_example(verb: str) -> None:
    from typer.testing import CliRunner

    app = typer.Typer()
    register(app, [])
    answer = CliRunner().invoke(app, [verb, "--help"])
    assert answer.exit_code == 0
    assert f"provision {verb}" in " ".join(answer.output.split())
