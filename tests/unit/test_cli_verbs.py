"""The command line as a whole: every verb is there, and a short command does not pay for the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from provision import __version__
from provision.cli import completed
from provision.cli.verbs import VERBS, register
from provision.lab.state import Paths, Spec, plan_nodes, save
from provision.report.model import Document, Verdict


def registered(*words: str) -> set[str]:
    app = typer.Typer()
    register(app, words)
    return {command.name or "" for command in app.registered_commands} | {
        group.name or "" for group in app.registered_groups
    }


def invoked(*words: str) -> Result:
    app = typer.Typer()
    register(app, [])
    return CliRunner().invoke(app, words)


def test_all_verbs_are_there_for_help_and_completion() -> None:
    assert registered() == set(VERBS)
    assert registered("--help") == set(VERBS)
    assert registered("aply") == set(VERBS)


@pytest.mark.parametrize(
    ("environment", "verbs"),
    [
        ({"COMP_WORDS": "provision status l", "COMP_CWORD": "2"}, {"status"}),
        ({"COMP_WORDS": ".venv/bin/provision lab fault ", "COMP_CWORD": "3"}, {"lab"}),
        ({"COMP_WORDS": "provision st", "COMP_CWORD": "1"}, set(VERBS)),
        ({"_TYPER_COMPLETE_ARGS": "provision check o"}, {"check"}),
        ({"_TYPER_COMPLETE_ARGS": "provision "}, set(VERBS)),
        ({}, set(VERBS)),
    ],
)
def test_completion_of_what_follows_a_verb_pays_for_that_verb_alone(
    environment: dict[str, str], verbs: set[str]
) -> None:
    assert registered(*completed(environment)) == verbs


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lab fault unpl", ["unplug"]),
        ("lab fault unplug lab-gpu", ["lab-gpu-1", "lab-gpu-2"]),
        ("run lab ", ["rolling-maintenance"]),
        ("plan lab -c slurm", ["slurm", "slurm_exporter"]),
        ("verify lab --component mun", ["munge"]),
        ("status ti", ["tiny"]),
    ],
)
def test_a_shell_is_offered_the_names_there_are(line: str, offered: list[str], tmp_path: Path) -> None:
    lab = Paths(tmp_path / "lab")
    lab.state.mkdir()
    save(lab, Spec("trixie", "http://d", None, (), plan_nodes(2, 0)))
    (tmp_path / "tiny.yml").touch()
    words = f"provision {line}"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['provision']; from provision.cli import main; main()",
        ],
        env={
            **os.environ,
            "_PROVISION_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - (not words.endswith(" "))),
            "PROVISION_LAB_DIR": str(lab.state),
            "PROVISION_INVENTORIES": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == offered, done.stderr


def test_the_version_is_told_without_any_verb() -> None:
    script = "import sys; from provision.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"provision {__version__}\n")
    assert "provision.engine.controller" not in done.stderr.split()


def test_a_verb_is_called_by_its_name_and_no_other_is_imported(tmp_path: Path) -> None:
    assert registered("check", "site.yml") == {"check"}
    script = "import sys; from provision.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    answer = subprocess.run(
        [sys.executable, "-c", script, "check", str(tmp_path / "none.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 2
    assert "none.yml" in answer.stdout
    assert "provision.cli.check" in answer.stderr.split()
    assert "provision.engine.controller" not in answer.stderr.split()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("import", "lab")])
def test_every_verb_teaches_by_an_example(verb: str) -> None:
    answer = invoked(verb, "--help")
    assert answer.exit_code == 0
    assert f"provision {verb}" in " ".join(answer.output.split())


@pytest.mark.parametrize(
    ("words", "verb", "said"),
    [
        (["plan", "FILE", "--limit", "nope"], "plan", '"nope" is no node, group or role'),
        (["apply", "FILE", "--component", "nope"], "apply", "there is no component nope"),
        (["apply", "FILE", "--component", "sluurm"], "apply", "did you mean slurm?"),
        (["verify", "FILE", "--component", "sluurm"], "verify", "did you mean slurm?"),
        (["verify", "FILE", "--component", "nope"], "verify", "has no checks in tiny"),
        (["run", "FILE", "nope"], "run", "nope: no such playbook"),
        (["import", "ansible", "hosts", "--output", "FILE"], "import", "is there already"),
        (["burnin", "FILE", "--level", "long"], "burnin", "known are quick"),
    ],
)
def test_wrong_input_is_a_document_where_one_was_asked_for(
    words: list[str], verb: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site = tmp_path / "tiny.yml"
    site.write_text(
        "cluster: tiny\ngroups:\n  head: {hosts: h1, roles: [head]}\n  gpu: {hosts: g1, roles: [worker]}\n"
        "scheduler: {slurm: {}}\n"
    )
    done = invoked(*(str(site) if word == "FILE" else word for word in words), "--json")
    assert done.exit_code == 2, done.stderr
    document = Document.model_validate_json(done.stdout)
    assert (document.verb, document.verdict) == (verb, Verdict.FAIL)
    assert said in str(document.findings[0].why)
    assert said in done.stderr, "a person at the terminal reads it, too"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "tiny"], "expected a site file, or a name in inventories/; `provision init` writes one"),
        (["plan", "tiny.yml"], "No such file or directory; `provision init FILE` writes one to start from"),
        (["import", "ansible", "hosts"], "hosts: error: cannot be read: No such file or directory"),
        (["burnin", "HEAD"], "tiny.yml: no node is of role worker, which is what is burned in: h1"),
        (["burnin", "HEAD", "--limit", "h1"], "--limit h1: no node is of role worker"),
    ],
)
def test_the_first_mistakes_of_a_newcomer_are_answered_with_the_next_step(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "HEAD" in words:
        Path("tiny.yml").write_text("cluster: tiny\ngroups:\n  head: {hosts: h1, roles: [head]}\n")
    done = invoked(*("tiny.yml" if word == "HEAD" else word for word in words))
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize("words", [["up"], ["down"], ["status"], ["fault", "unplug", "lab-gpu-1"]])
def test_the_lab_is_for_root(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    done = invoked("lab", *words, "--state", str(tmp_path / "lab"))
    assert done.exit_code == 2
    assert "the lab needs root on this machine" in done.stderr
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize("words", [["--help"], ["check", "none.yml", "--json"]])
def test_an_answer_that_cannot_be_written_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "provision", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1:] == ["error: the answer cannot be written: No space left on device"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "rc", "check"),
    [
        (["fault", "no-such-fault", "lab-gpu-1"], 2, "input"),
        (["fault", "freeze", "lab-gpu-1"], 2, "input"),
        (["restore", "none"], 2, "input"),
    ],
)
def test_what_goes_wrong_with_the_lab_is_a_document_too(
    words: list[str], rc: int, check: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "provision", "lab", *words, "--state", str(tmp_path / "lab"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == rc, done.stderr
    document = Document.model_validate_json(done.stdout)
    assert (document.verb, document.verdict) == (f"lab {words[0]}", Verdict.FAIL)
    assert document.findings[0].check == check
    assert str(document.findings[0].why) in " ".join(done.stderr.split())
