"""The command line as a whole: every verb is there, and a short command does not pay for the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from provision.cli.verbs import VERBS, register
from provision.report.model import Document, Verdict


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


@pytest.mark.parametrize(
    ("words", "verb", "said"),
    [
        (["plan", "FILE", "--limit", "nope"], "plan", '"nope" is no node, group or role'),
        (["apply", "FILE", "--component", "nope"], "apply", "there is no component nope"),
        (["verify", "FILE", "--component", "nope"], "verify", "has no checks in tiny"),
        (["run", "FILE", "nope"], "run", "nope: no such playbook"),
        (["import", "ansible", "hosts", "--output", "FILE"], "import", "is there already"),
        (["burnin", "FILE", "--level", "long"], "burnin", "known is quick"),
    ],
)
def test_wrong_input_is_a_document_where_one_was_asked_for(
    words: list[str], verb: str, said: str, tmp_path: Path
) -> None:
    site = tmp_path / "tiny.yml"
    site.write_text(
        "cluster: tiny\ngroups:\n  head: {hosts: h1, roles: [head]}\n  gpu: {hosts: g1, roles: [worker]}\n"
        "scheduler: {slurm: {}}\n"
    )
    asked = [str(site) if word == "FILE" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "provision", *asked, "--json"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert done.returncode == 2, done.stderr
    document = Document.model_validate_json(done.stdout)
    assert (document.verb, document.verdict) == (verb, Verdict.FAIL)
    assert said in str(document.findings[0].why)
    assert said in done.stderr, "a person at the terminal reads it, too"
    assert "Traceback" not in done.stderr
