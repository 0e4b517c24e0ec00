"""Playbooks run by Ansible itself on this machine alone: no ssh, no node. Nothing of a run is left behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from provision.engine import leftovers, playbook
from provision.engine.playbook import PlaybookError, run_playbook
from provision.report.model import Verdict
from provision.site.models import Site, SiteFile

RUN = f"test-{os.getpid()}"
NOBODY: dict[str, Any] = {"cluster": "tiny", "groups": {"head": {"hosts": "h1", "roles": ["head"]}}}


def run_locally(tmp_path: Path, play: str, **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run tasks on this machine by Ansible's local connection; no ssh, no root."""
    site = Site.from_file(SiteFile.model_validate({**NOBODY, **more.pop("site", {})}), tmp_path / "tiny.yml")
    (tmp_path / "play.yml").write_text(
        "- name: Here\n  hosts: all\n  connection: local\n  gather_facts: false\n"
        f"  vars: {{ansible_connection: local, ansible_become: false, ansible_python_interpreter: {sys.executable}}}\n"
        "  tasks:\n" + play
    )
    events: list[dict[str, Any]] = []
    document = run_playbook(
        site,
        tmp_path / "play.yml",
        list(site.nodes.values()),
        run=RUN,
        show=events.append,
        **more,
    )
    return document, events


def nothing_left() -> bool:
    """Neither process nor folder of the run is there."""
    return leftovers.marked(RUN) == [] and not leftovers._directory(RUN).exists()


def test_a_playbook_runs_with_variables_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUSH", "psst-psst")
    monkeypatch.setenv("ANSIBLE_STDOUT_CALLBACK", "no-such-callback")  # a user's own configuration
    document, events = run_locally(
        tmp_path,
        "    - name: Same\n      ansible.builtin.assert: {that: [hush == 'psst-psst', extra == 'e']}\n"
        "    - name: Made\n"
        f"      ansible.builtin.copy: {{dest: {tmp_path}/made, content: made, mode: '0600'}}\n"
        "    - name: Loud\n      ansible.builtin.command: echo {{ hush }}\n      changed_when: false\n",
        site={"variables": {"hush": {"secret": {"env": "HUSH"}}}},
        extra={"extra": "e"},
    )
    assert document.verdict is Verdict.PASS
    assert document.nodes["h1"].changed == 1
    assert (tmp_path / "made").read_text() == "made"
    assert [(e["title"], e["outcome"]) for e in events if e["event"] == "op"] == [
        ("Same", "same"),
        ("Made", "changed"),
        ("Loud", "same"),
    ]
    assert "psst-psst" not in document.model_dump_json() + json.dumps(events)
    assert nothing_left()


def test_check_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = (
        f"    - name: Made\n      ansible.builtin.copy: {{dest: {tmp_path}/made, content: x, mode: '0600'}}\n"
    )
    document, _ = run_locally(tmp_path, play, check=True)
    assert document.nodes["h1"].changed == 1
    assert not (tmp_path / "made").exists()


def test_a_playbook_that_ansible_refuses_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(PlaybookError, match=r"(?s)Ansible refuses it.*no_such_key"):
        run_locally(tmp_path, "    - ansible.builtin.debug: {msg: x}\n      no_such_key: 1\n")
    assert nothing_left()


def test_a_run_over_its_time_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playbook, "end_on_nodes", lambda *_: iter(()))
    document, _ = run_locally(
        tmp_path,
        "    - name: Long\n      ansible.builtin.shell: setsid sleep 600 & sleep 600\n",
        timeout=4,
    )
    assert document.nodes["h1"].reason == "not done in time"
    assert nothing_left()


def test_a_sudo_password_is_in_no_file_and_no_argument(tmp_path: Path) -> None:
    folder = leftovers._directory(RUN)
    script = (
        f"import pathlib;found=[str(p) for p in pathlib.Path('{folder}').rglob('*') if p.is_file() "
        "and b'open-ses'+b'ame' in p.read_bytes()];"
        "found+=[str(p) for p in pathlib.Path('/proc').glob('[0-9]*/cmdline') if b'open-ses'+b'ame' in p.read_bytes()];"
        "print(found)"
    )
    (tmp_path / "look.py").write_text(script)
    document, events = run_locally(
        tmp_path,
        f"    - name: Look\n      ansible.builtin.command: {sys.executable} {tmp_path}/look.py\n      register: found\n"
        "    - name: Nowhere\n      ansible.builtin.assert: {that: \"found.stdout == '[]'\", "
        "fail_msg: '{{ found.stdout }}'}\n",
        sudo_password="open-sesame",
    )
    assert document.verdict is Verdict.PASS, document.findings
    assert "open-sesame" not in json.dumps(events)
