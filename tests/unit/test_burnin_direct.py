"""The burn-in without a scheduler: what starts it on a node, and what becomes of nodes that fail or fall silent."""

import os
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from provision.burnin import run
from provision.burnin.direct import UNIT, Direct, Ranks, start_script
from provision.burnin.launch import LaunchError
from provision.burnin.workload import spawn
from provision.engine.remote import Output, RemoteError
from provision.report.model import Verdict
from provision.site.models import Site, SiteFile


def test_the_start_passes_on_what_the_machine_sets(tmp_path: Path):
    fake = tmp_path / "systemd-run"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = start_script(
        Ranks("gpu-2", first=8, local=8, total=16, address="10.0.0.1", port=21000),
        "/shared/burnin/run 1", "/opt/torch/bin/python3", "ops", ["--level", "quick"],
    )  # fmt: skip
    (tmp_path / ".profile").write_text(f"PATH={tmp_path}:$PATH\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NCCL_IB_HCA": "=mlx5_0", "SECRET": "x"}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert f"--unit={UNIT}" in words
    assert "--uid=ops" in words
    assert "--setenv=NCCL_IB_HCA" in words
    assert "SECRET" not in done.stdout
    command = words[words.index("/opt/torch/bin/python3") :]
    assert command[1:] == [
        "/shared/burnin/run 1/burnin.pyz",
        "--spawn",
        "8:8:16:10.0.0.1:21000",
        "--level",
        "quick",
    ]


def test_what_is_asked_for_wins_over_what_the_machine_sets():
    ranks = Ranks("gpu-2", first=8, local=8, total=16, address="10.0.0.1", port=21000)
    script = start_script(
        ranks, "/run", "python3", "ops", [], {"NCCL_IB_TC": "106", "NCCL_IB_HCA": "=mlx5_0"}
    )
    assert "env NCCL_IB_TC=106 NCCL_IB_HCA==mlx5_0 python3 /run/burnin.pyz --spawn" in script


class Node:
    """A node's root shell that plays a burn-in of some polls."""

    def __init__(self, polls: int = 2, result: str | None = None, starts: str = "", silent_after: int = 99):
        self.polls, self.result, self.starts, self.silent_after = polls, result, starts, silent_after
        self.commands: list[str] = []

    def __call__(self, command: str, stdin: bytes | None = None, timeout: float = 0) -> Output:
        self.commands.append(command)
        if "systemctl is-active" in command:
            self.polls -= 1
            self.silent_after -= 1
            if self.silent_after < 0:
                raise RemoteError("connection lost")
            state = "active" if self.polls > 0 else "inactive"
            if not (found := re.search(r"tail -n \+(\d+)", command)):
                return self._answer(f"{state}\n")
            log = "".join(f"line {number}\n" for number in range(int(found[1]), 3))
            return self._answer(f"{state}\n\n@@ log\n{log}")
        if "systemd-run" in command and self.starts:
            return self._answer("", rc=1, stderr=self.starts)
        if command.startswith("cat ") and "result.json" in command and stdin is None:
            return self._answer(self.result or "", rc=0 if self.result else 1)
        return self._answer("")

    @staticmethod
    def _answer(stdout: str, rc: int = 0, stderr: str = "") -> Output:
        return Output(stdout=stdout, stderr=stderr, rc=rc)

    @property
    def stopped(self) -> bool:
        return any("systemctl stop" in command for command in self.commands)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provision.burnin.direct.POLL_SECONDS", 0.0)


def burn_in(stop: threading.Event | None = None, timeout: float = 60, **nodes: Node):
    job = Direct(nodes, "root", lambda line: None, stop=stop or threading.Event())
    return job, lambda: job.run("/shared/burnin", {"a": "10.0.0.1"}, 2, "python3", [], timeout)


def test_ranks_are_numbered_by_node_and_lines_come_once():
    nodes = {"a": Node(result="{}"), "b": Node(polls=4)}
    _, run = burn_in(**nodes)
    outcome = run()
    assert (outcome.result, outcome.log) == ("{}", ["line 1", "line 2"])
    places = [re.search(r"--spawn (\S+)", " ".join(node.commands)) for node in nodes.values()]
    assert [place and place[1].rsplit(":", 1)[0] for place in places] == ["0:2:4:10.0.0.1", "2:2:4:10.0.0.1"]
    assert not nodes["a"].stopped


def test_where_another_burn_in_runs_it_goes_on_and_ours_ends():
    nodes = {"a": Node(), "b": Node(starts="Unit provision-burnin.service was already loaded")}
    _, run = burn_in(**nodes)
    with pytest.raises(LaunchError, match="b: another burn-in runs there") as caught:
        run()
    assert caught.value.advice
    assert nodes["a"].stopped
    assert not nodes["b"].stopped


def test_a_node_that_falls_silent_is_waited_for_no_more_and_the_result_is_taken_elsewhere():
    nodes = {"a": Node(polls=99, silent_after=1), "b": Node(polls=3, result='{"failure": 1}')}
    job, run = burn_in(**nodes)
    assert run().result == '{"failure": 1}'
    assert list(job.lost) == ["a"]


def test_ctrl_c_and_the_time_limit_stop_it_on_all_nodes():
    stop = threading.Event()
    stop.set()
    nodes = {"a": Node(polls=99), "b": Node(polls=99)}
    _, run = burn_in(stop, **nodes)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert all(node.stopped for node in nodes.values())
    late = {"a": Node(polls=99)}
    _, run = burn_in(timeout=-1, **late)
    with pytest.raises(LaunchError, match="still ran after"):
        run()
    assert late["a"].stopped


def test_an_interrupted_burn_in_over_ssh_tells_nothing_of_any_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = {
        "cluster": "small",
        "groups": {
            "head": {"hosts": "h", "roles": ["head"]},
            "gpu": {"hosts": "n[1-2]", "roles": ["worker"]},
        },
    }
    site = Site.from_file(SiteFile.model_validate(text), tmp_path / "small.yml")
    nodes = {"n1": Node(polls=99), "n2": Node(polls=99)}
    monkeypatch.setattr(
        run, "connect", lambda site, node, **_: SimpleNamespace(run=nodes[node.name], close=lambda: None)
    )
    stop = threading.Event()
    stop.set()
    document = run._directly(site, list(site.nodes.values()), run.Options(), None, lambda line: None, stop)
    assert document.details["interrupted"]
    assert {name: node.reason for name, node in document.nodes.items()} == dict.fromkeys(nodes, "interrupted")
    assert document.verdict is Verdict.UNKNOWN
    assert {finding.action for finding in document.findings} == {"run it again"}
    assert all(node.stopped for node in nodes.values())


def test_ranks_of_a_node_live_on_when_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '3': sys.exit(7)\n"
        "time.sleep(0.5)\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(os.environ['MASTER_ADDR'])\n"
    )
    monkeypatch.setattr(spawn.child, "command", lambda *_: ["python3", str(program)])
    assert spawn.main("2:3:8:fd00::1:29500", []) == 7
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "4"]
    assert (tmp_path / "4").read_text() == "fd00::1"
