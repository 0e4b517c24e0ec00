"""Playbooks: the inventory made of a site file, Ansible's events as ours, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.components.base.exports import HELD
from provision.engine import leftovers
from provision.engine.inventory import inventory, variables
from provision.engine.playbook import PlaybookError, find_playbook, hook_nodes
from provision.engine.playbook_events import Reader, explain, node_events
from provision.site.hidden import SecretMissing
from provision.site.models import Site, SiteFile

DOCUMENT: dict[str, Any] = {
    "cluster": "tiny",
    "access": {"user": "admin", "port": 2222, "key": "id_test", "jump": "ops@192.0.2.9"},
    "groups": {
        "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head", "monitor"]},
        "gpu": {"hosts": "g[1-2]", "roles": ["worker"], "access": {"user": "root"}},
        "nodes6": {"hosts": "s1", "addresses": "2001:db8::1", "roles": ["storage"]},
    },
}


def make_site(tmp_path: Path, **more: Any) -> Site:
    return Site.from_file(SiteFile.model_validate({**DOCUMENT, **more}), tmp_path / "tiny.yml")


def test_the_inventory_has_a_group_for_each_group_and_role(tmp_path: Path) -> None:
    everything = inventory(make_site(tmp_path, base={"hold": {"also": ["ofed*"]}}))["all"]
    members = {name: list(group["hosts"]) for name, group in everything["children"].items()}
    assert members == {
        "head": ["h1"],
        "monitor": ["h1"],
        "gpu": ["g1", "g2"],
        "worker": ["g1", "g2"],
        "nodes6": ["s1"],
        "storage": ["s1"],
    }
    assert everything["vars"] == {
        "provision_cluster": "tiny",
        "provision_head": "h1",
        "provision_site": str(tmp_path / "tiny.yml"),
        "provision_command": [sys.executable, "-m", "provision"],
        "provision_scheduler": None,
        "provision_held": [*HELD, "ofed*"],
    }


@pytest.mark.parametrize(
    ("kernels", "programs", "asked"),
    [
        ((), {}, 0),
        (("6.1.0-9-amd64", "6.1.0-18-amd64"), {}, 0),
        (("6.1.0-18-amd64", "6.1.0-21-amd64"), {}, 100),
        (("6.1.0-18-amd64", "6.1.0-21-rt-arm64"), {}, 0),  # of another flavour
        ((), {"dnf": 0, "needs-restarting": 0}, 0),
        ((), {"dnf": 0, "needs-restarting": 1}, 100),
        ((), {"dnf": 0}, 2),
    ],
)
def test_a_reboot_is_due_where_the_system_says_so(
    tmp_path: Path, kernels: tuple[str, ...], programs: dict[str, int], asked: int
) -> None:
    tasks = yaml.safe_load(Path("roles/node_reboot/tasks/main.yml").read_text())
    (script,) = [task["ansible.builtin.shell"] for task in tasks if "ansible.builtin.shell" in task]
    for name in kernels:
        (tmp_path / f"vmlinuz-{name}").touch()
    for name, rc in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {rc}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "uname").write_text("#!/bin/sh\necho 6.1.0-18-amd64\n")
    (tmp_path / "uname").chmod(0o755)
    script = script.replace("/run/reboot-required", f"{tmp_path}/none").replace("/boot/", f"{tmp_path}/")
    ran = subprocess.run(
        ["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert ran.returncode == asked, ran.stderr


def test_nodes_are_reached_by_the_one_definition_of_a_connection(tmp_path: Path) -> None:
    hosts = inventory(make_site(tmp_path))["all"]["hosts"]
    assert (hosts["h1"]["ansible_host"], hosts["h1"]["ansible_port"]) == ("192.0.2.1", 2222)
    assert (hosts["h1"]["ansible_user"], hosts["h1"]["ansible_become"]) == ("admin", True)
    assert (hosts["g1"]["ansible_user"], hosts["g1"]["ansible_become"]) == ("root", False)
    assert hosts["g1"]["ansible_host"] == "g1"
    assert hosts["s1"]["ansible_host"] == "2001:db8::1"
    arguments = hosts["h1"]["ansible_ssh_common_args"]
    assert f"-i {tmp_path}/id_test" in arguments
    assert "-J ops@192.0.2.9" in arguments
    assert "StrictHostKeyChecking=accept-new" in arguments


def test_variables_have_their_secrets_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bmc.secret").write_text("s3cret\n")
    monkeypatch.setenv("TOKEN", "t0ken")
    given = {"plain": 1, "bmc": {"secret": {"file": "bmc.secret"}}, "token": {"secret": {"env": "TOKEN"}}}
    found, secrets = variables(make_site(tmp_path, variables=given))
    assert found == {"plain": 1, "bmc": "s3cret", "token": "t0ken"}
    assert secrets == ["s3cret", "t0ken"]


@pytest.mark.parametrize("source", [{"env": "NOT_SET_ANYWHERE"}, {"file": "none"}, {"fil": "x"}, "text", {}])
def test_a_secret_variable_that_is_not_there_is_named(tmp_path: Path, source: Any) -> None:
    site = make_site(tmp_path, variables={"token": {"secret": source}})
    with pytest.raises(SecretMissing, match=r"tiny\.yml: variables\.token\.secret"):
        variables(site)


def test_hooks_are_for_nodes_of_their_roles(tmp_path: Path) -> None:
    hooks = [
        {"playbook": "a.yml", "before": "slurm", "roles": ["worker"]},
        {"playbook": "b.yml", "after": "slurm"},
    ]
    site = make_site(tmp_path, hooks=hooks)
    workers, everyone = site.file.hooks
    nodes = list(site.nodes.values())
    assert [node.name for node in hook_nodes(site, workers, nodes)] == ["g1", "g2"]
    assert hook_nodes(site, everyone, nodes) == nodes


def test_playbooks_are_found_beside_the_site_file_and_by_name(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    (tmp_path / "mine.yml").write_text("[]")
    assert find_playbook(site, "mine.yml") == tmp_path / "mine.yml"
    assert find_playbook(site, "rolling-maintenance").name == "rolling-maintenance.yml"
    with pytest.raises(PlaybookError, match=r"none\.yml: no such playbook.*rolling-maintenance"):
        find_playbook(site, "none.yml")


def raw(event: str, **data: Any) -> dict[str, Any]:
    return {"event": event, "event_data": data}


def take(reader: Reader, *events: dict[str, Any]) -> list[dict[str, Any]]:
    return [found for event in events for found in reader.take(event)]


def test_results_of_tasks_become_operations() -> None:
    found = take(
        Reader(),
        raw("playbook_on_play_start", name="Update"),
        raw("runner_on_start", host="g1", task="Install"),
        raw("runner_on_ok", host="g1", task="Install", duration=1.23456, res={"changed": True}),
        raw("runner_on_ok", host="g1", task="Look", duration=0.1, res={"changed": False}),
        raw("runner_on_skipped", host="g1", task="Reboot"),
    )
    assert found[0] == {"event": "start", "node": "g1", "step": "Update", "title": "Install"}
    assert found[1] == {
        "event": "op",
        "node": "g1",
        "step": "Update",
        "title": "Install",
        "outcome": "changed",
        "seconds": 1.235,
    }
    assert [event["outcome"] for event in found[1:]] == ["changed", "same", "skipped"]


STATS = {
    "processed": {"g1": 1, "g2": 1, "g3": 1},
    "changed": {"g1": 2},
    "failures": {"g2": 1},
    "dark": {"g3": 1},
}


def test_failed_and_unreachable_nodes_are_told_apart_with_their_reason() -> None:
    reader = Reader()
    take(
        reader,
        raw("playbook_on_play_start", name="Update"),
        raw("runner_on_failed", host="g2", task="Install", res={"msg": "no space left", "rc": 1}),
        raw("runner_on_unreachable", host="g3", task="Install", res={"msg": "connection timed out"}),
        raw("playbook_on_stats", **STATS),
    )
    reasons = {
        event["node"]: event["reason"] for event in node_events(reader, "failed", 1.0, ["g1", "g2", "g3"])
    }
    assert reasons == {
        "g1": None,
        "g2": "Install: no space left",
        "g3": "unreachable: connection timed out",
    }


def test_a_failure_that_is_ignored_or_rescued_fails_no_node() -> None:
    reader = Reader()
    (ignored, rescued) = take(
        reader,
        raw("runner_on_failed", host="g1", task="Try", ignore_errors=True, res={"msg": "no"}),
        raw("runner_on_failed", host="g1", task="Try 2", res={"msg": "no"}),
        raw("playbook_on_stats", processed={"g1": 1}, rescued={"g1": 1}),
    )
    assert (ignored["outcome"], ignored["detail"]) == ("same", "failed, which the playbook ignores: no")
    assert rescued["outcome"] == "failed"
    (node,) = node_events(reader, "successful", 1.0, ["g1"])
    assert node["verdict"] == "pass"


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ("canceled", "interrupted"),
        ("timeout", "not done in time"),
        ("failed", "the playbook did not come to its end"),
    ],
)
def test_a_run_that_was_cut_short_fails_every_node_of_it(ended: str, reason: str) -> None:
    reader = Reader()
    take(reader, raw("runner_on_failed", host="g1", task="Install", res={"msg": "no"}))
    found = {event["node"]: event["reason"] for event in node_events(reader, ended, 1.0, ["g1", "g2"])}
    assert found == {"g1": "Install: no", "g2": reason}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"msg": "non-zero return code", "stderr": "a\nb", "rc": 3}, "non-zero return code; a; b"),
        ({"msg": "non-zero return code", "stdout": "only this"}, "non-zero return code; only this"),
        ({"rc": 3}, "exit status 3"),
        ({}, "no reason given"),
        ({"msg": "s3cret", "_ansible_no_log": True}, "(not shown: the task has no_log)"),
        ({"msg": "x", "results": [{"item": "a", "failed": True, "msg": "bad"}, {"item": "b"}]}, "a: bad"),
    ],
)
def test_why_a_task_failed(result: dict[str, Any], text: str) -> None:
    assert explain(result) == text


def test_no_secret_is_shown_whole_or_by_line_in_titles_or_in_reasons() -> None:
    reader = Reader(["s3cret", "BEGIN KEY\nAAAA\nBBBB\nEND KEY\n", "s3cret-and-more"])
    found = take(
        reader,
        raw("playbook_on_play_start", name="Play s3cret"),
        raw("playbook_on_task_start", task="Write s3cret-and-more"),
        raw("runner_on_start", host="g1", task="Write s3cret"),
        raw("runner_on_failed", host="g1", task="Write s3cret", res={"msg": "s3cret\nBEGIN KEY\nAAAA\nBBBB"}),
        {"event": "verbose", "stdout": "[ERROR]: s3cret\n"},
    )
    assert reader.play == "Play ***"
    assert found[0]["text"] == "Play ***: Write ***"
    assert reader.reasons == {"g1": "Write ***: ***; ***; ***; ***"}
    text = json.dumps(found) + json.dumps(reader.said)
    assert not any(line in text for line in ("s3cret", "AAAA", "BBBB", "and-more"))


def test_marked_processes_are_ended_wherever_they_hide() -> None:
    mark = f"hidden-{os.getpid()}"
    environment = {**os.environ, leftovers.MARK: mark}
    code = "import os,signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);os.fork() or os.setsid();time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    deadline = time.monotonic() + 10
    while len(leftovers.marked(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(leftovers.marked(mark)) == 2
    assert leftovers.marked("another") == []
    assert leftovers.end_marked(mark, grace=0.5) == []
    assert process.wait(timeout=5) == -signal.SIGKILL


def test_the_script_for_nodes_ends_marked_processes_and_says_so() -> None:
    mark = f"remote-{os.getpid()}"
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, leftovers.MARK: mark})
    result = subprocess.run(
        ["sh", "-c", leftovers.end_on_node(mark)], capture_output=True, check=False, timeout=30
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert process.wait(timeout=5) == -signal.SIGTERM
