"""The controller with workers that are small programs: words passed on, ends told, Ctrl-C in order."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from provision.engine import controller
from provision.engine.controller import converge
from provision.engine.job import Job, events
from provision.engine.journal import Journal, JournalError
from provision.report.model import Document, NodeResult, Verdict
from provision.report.store import state_directory
from provision.site.models import Hook, Site, SiteFile

# A worker of the node FIRST: lets its job be, then does what the action says. Imports nothing that takes long.
WORKER = """
import json, os, signal, sys
first = sys.argv[1]
sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "big"))
def tell(**event):
    print(json.dumps(event), flush=True)
def end(node, verdict="pass", reason=None, blocked=False):
    tell(event="node", node=node, changed=1, seconds=0.1, asked=[], verdict=verdict, reason=reason, advice=None,
         blocked=blocked)
def words():
    for line in sys.stdin:
        yield json.loads(line)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(controller, "SHARD", 1)
    monkeypatch.setattr(controller.runs, "keep", lambda *_, **__: None)  # there is no head to tell
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "others": {"hosts": "n[1-2]", "roles": ["login"]},
        },
        "scheduler": {"slurm": {}},
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def run(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    show: Any = lambda event: None,
    *,
    forecast: bool = False,
) -> Document:
    """An apply, or a plan (`forecast`), whose workers run `action`, one for each node."""
    names = iter(site.nodes)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER + action, next(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    monkeypatch.setattr(controller, "start_worker", start)
    verb = "plan" if forecast else "apply"
    return converge(site, list(site.nodes.values()), verb=verb, forecast=forecast, show=show)


def test_a_worker_that_dies_is_told_to_the_others_and_its_nodes_fail(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = """
if first == "h1":
    sys.stdout.write('{"event": "node", "no')  # cut short in the middle of a line
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
word = next(word for word in words() if "gone" in word)
end(first, "fail", json.dumps(word))
"""
    document = run(site, monkeypatch, action)
    assert document.nodes["h1"].reason == "its worker process ended without a word"
    assert document.nodes["h1"].verdict is Verdict.FAIL
    for name in ("n1", "n2"):
        word = json.loads(str(document.nodes[name].reason))
        assert word == {"gone": ["h1"], "with_secrets": True}


def test_a_node_that_was_blocked_keeps_the_run_from_passing_and_has_not_failed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = """
if first == "h1":
    end(first, "fail", "no space left")
else:
    end(first, "fail", "blocked by h1: slurm:head is not done there", blocked=True)
"""
    document = run(site, monkeypatch, action)
    assert document.exit_status == 1
    assert [node.failed for node in document.nodes.values()] == [1, 0, 0]
    assert document.nodes["n1"].verdict is Verdict.FAIL
    assert str(document.nodes["n1"].reason).startswith("blocked by h1")


def test_words_of_one_worker_reach_the_others_and_no_journal(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = """
if first == "h1":
    tell(private={"secrets": {"munge.key": "aHVudGVyMg=="}})
    end(first)
else:
    word = next(word for word in words() if "secrets" in word)
    end(first, reason="heard " + ",".join(word["secrets"]))
"""
    document = run(site, monkeypatch, action)
    assert document.verdict is Verdict.PASS
    assert document.nodes["n1"].reason == "heard munge.key"
    assert b"aHVudGVyMg" not in Journal(state_directory(site)).path.read_bytes()
    assert site.path.with_suffix(".secrets").exists()


def test_what_a_node_was_asked_and_what_only_began_are_not_among_the_journaled_events(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = """
tell(event="start", node=first, step="base:*", title="x")
tell(event="op", node=first, step="base:*", title="x", outcome="same", seconds=0.1)
tell(event="node", node=first, changed=0, seconds=0.1, asked=[["command", "uname"]], verdict="pass", reason=None,
     advice=None, blocked=False)
"""
    shown: list[str] = []
    run(site, monkeypatch, action, lambda event: shown.append(event["event"]))
    journal = Journal(state_directory(site))
    with closing(sqlite3.connect(journal.path)) as db:
        rows = [json.loads(content) for (content,) in db.execute("SELECT content FROM events")]
    assert sorted(row["event"] for row in rows) == ["node"] * 3 + ["op"] * 3
    assert all("asked" not in row for row in rows)
    assert [list(asked) for asked in journal.questions("*").values()] == [[("command", "uname")]] * 3
    assert "start" in shown


def test_secrets_that_cannot_be_kept_are_a_finding_and_the_answer_is_not_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("not a folder")
    action = """
if first == "h1":
    tell(private={"secrets": {"munge.key": "aHVudGVyMg=="}})
end(first)
"""
    document = run(site, monkeypatch, action)
    assert document.verdict is Verdict.FAIL
    [finding] = document.findings
    assert finding.check == "kept-beside-site-file"
    assert str(tmp_path / "config") in str(finding.why)


def test_a_journal_that_is_lost_on_the_way_ends_no_run_and_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            directory = state_directory(site)
            directory.rename(directory.with_suffix(".gone"))
            directory.write_text("not a folder")

    action = """
if first == "h1":
    tell(event="warning", node=first, text="now")
end(first)
"""
    document = run(site, monkeypatch, action, show)
    assert {node.verdict for node in document.nodes.values()} == {Verdict.PASS}
    assert document.verdict is Verdict.WARN
    finding = next(finding for finding in document.findings if finding.check == "journaled")
    assert f"not all of run {document.details['run']} is in the journal" in str(finding.why)
    assert str(state_directory(site)) in str(finding.why)


def test_without_a_journal_a_plan_goes_on_and_an_apply_touches_no_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("not a folder")
    document = run(site, monkeypatch, "end(first)", forecast=True)
    assert {node.verdict for node in document.nodes.values()} == {Verdict.PASS}
    [finding] = document.findings
    assert (finding.check, finding.verdict) == ("journaled", Verdict.WARN)
    assert "XDG_STATE_HOME" in str(finding.why)
    with pytest.raises(JournalError, match="XDG_STATE_HOME"):
        run(site, monkeypatch, "os._exit(0)")


def test_while_a_hooks_playbook_runs_workers_go_on_talking(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Ctrl-C ends it: `cancel` is what the playbook would be cancelled by."""
    site.file.hooks.append(Hook(playbook=Path("hook.yml"), before="time"))
    action = """
if first == "h1":
    tell(private={"hook": 0, "node": "h1"})
    for word in words():
        if "done" in word:
            tell(event="warning", node=first, text="heard")
        if "hooked" in word:
            end(first, "fail", json.dumps(word["hooked"]))
            break
else:
    if first == "n1":
        tell(private={"done": ["n1", "base:*", True, 1]})
    end(first)
"""
    heard, cancelled = threading.Event(), threading.Event()

    def play(site: Site, playbook: Path, nodes: Any, *, stops: Any, **more: Any) -> Document:
        with stops(cancelled.set):
            assert heard.wait(20)
            os.kill(os.getpid(), signal.SIGINT)
            assert cancelled.wait(20)
        result = NodeResult(verdict=Verdict.FAIL, reason="cancelled")
        return Document(verb="run", verdict=Verdict.FAIL, nodes={node.name: result for node in nodes})

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            heard.set()

    monkeypatch.setattr(controller, "run_playbook", play)
    monkeypatch.setattr(controller, "find_playbook", lambda site, name: name)
    document = run(site, monkeypatch, action, show)
    assert document.details["interrupted"] is True
    assert json.loads(str(document.nodes["h1"].reason)) == [0, "h1", 0, "cancelled"]


def test_ctrl_c_tells_every_worker_to_stop_and_a_second_one_ends_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = """
tell(event="warning", node=first, text="ready")
for word in words():
    if "stop" in word and first != "n2":  # n2 does not listen
        end(first, "fail", "interrupted")
        break
"""
    ready: set[str] = set()
    stopping = threading.Event()

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            ready.add(event["node"])
            if len(ready) == 3:
                os.kill(os.getpid(), signal.SIGINT)
        if event["event"] == "stopping":
            stopping.set()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    began = time.monotonic()
    document = run(site, monkeypatch, action, show)
    assert time.monotonic() - began < 30
    assert stopping.is_set()
    assert document.details["interrupted"] is True
    assert document.nodes["n1"].reason == "interrupted"
    assert document.nodes["n2"].reason == "its worker process ended without a word"
    assert [entry["verdict"] for entry in Journal(state_directory(site)).runs()] == ["fail"]


def test_a_job_is_taken_over_whole_and_what_libraries_print_is_no_event(site: Site) -> None:
    program = (
        "import os; from provision.engine.job import own_output, take_over; out = own_output(); "
        "print('a library'); os.system('echo a program'); job = take_over(); "
        "print(job.run, os.read(0, 100).decode().strip(), file=out)"
    )
    job = Job("r1", "ann@ctl", site, controller.load_lock(site), [], [], None, False, False)
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin
    controller.hand_over(job, worker.stdin)
    out, _ = worker.communicate(b"a word\n", timeout=60)
    assert out.decode().strip() == "r1 a word", "what comes behind the job is left for others"


def test_a_line_that_was_cut_short_is_no_event() -> None:
    assert list(events(io.BytesIO(b'{"event": "a"}\n{"event": "b'))) == [{"event": "a"}]
