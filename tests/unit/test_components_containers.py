"""Containers: what is merged with others' configuration, what users share, and what the checks judge."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.components import registry
from provision.components.containers import checks, exports
from provision.components.containers.settings import ContainersSettings, Enroot
from provision.report.model import Verdict
from provision.site.models import Gpu, Node, Site, SiteFile
from provision.verify.check import Target

PLAIN = ContainersSettings.model_validate({"docker": {}})


def make_site(slurm: bool = True, **containers: Any) -> Site:
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g1", "roles": ["worker"]},
        },
        "base": {"users": {"ada": {"uid": 5001}}},
        "containers": containers,
        **({"scheduler": {"slurm": {}}} if slurm else {}),
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


# daemon.json is also written by others (CTR-03)


def test_keys_of_others_stay() -> None:
    theirs = '{"data-root": "/fast/docker", "log-opts": {"max-size": "1g", "tag": "x"}, "runtimes": {"nvidia": {}}}'
    once = exports.merged(theirs, exports.daemon(PLAIN))
    document = json.loads(once)
    assert document["data-root"] == "/fast/docker"
    assert document["runtimes"] == {"nvidia": {}}
    assert document["log-opts"] == {"max-size": "100m", "tag": "x", "max-file": "3"}
    assert document["features"] == {"cdi": True}
    assert document["live-restore"] is True
    assert exports.merged(once, exports.daemon(PLAIN)) == once


def test_lists_keep_what_others_put_in() -> None:
    wanted = ContainersSettings.model_validate({"docker": {}, "insecure": ["a.example.org:5000"]})
    document = json.loads(
        exports.merged('{"insecure-registries": ["b.example.org"]}', exports.daemon(wanted))
    )
    assert document["insecure-registries"] == ["b.example.org", "a.example.org:5000"]


@pytest.mark.parametrize(
    ("text", "place"),
    [('{\n  "data-root": "/x",\n}\n', "line 3"), ("[]", "line 1: not an object"), ("{", "line 1, column 2")],
)
def test_a_file_that_cannot_be_read_is_named_by_its_line(text: str, place: str) -> None:
    with pytest.raises(exports.MergeError, match=place):
        exports.merged(text, {})


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_no_file_yet(text: str | None) -> None:
    assert json.loads(exports.merged(text, {"a": 1})) == {"a": 1}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_OBJECT = st.dictionaries(st.text(max_size=3), _JSON, max_size=3)


@given(_OBJECT, _OBJECT)
def test_merging_twice_changes_nothing_and_loses_no_key(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    once = exports.merged(json.dumps(theirs), ours)
    assert exports.merged(once, ours) == once
    assert json.loads(once).keys() == theirs.keys() | ours.keys()


# Mirrors and proxies


def test_mirrors() -> None:
    wanted = ContainersSettings.model_validate(
        {
            "docker": {},
            "podman": {},
            "mirrors": {
                "docker.io": ["http://m.example.org:5000/hub/"],
                "nvcr.io": ["https://n.example.org"],
            },
            "insecure": ["i.example.org"],
        }
    )
    assert exports.daemon(wanted)["registry-mirrors"] == ["http://m.example.org:5000/hub/"]
    assert exports.registries(wanted) == (
        '[[registry]]\nlocation = "docker.io"\n'
        '[[registry.mirror]]\nlocation = "m.example.org:5000/hub"\ninsecure = true\n'
        '\n[[registry]]\nlocation = "nvcr.io"\n[[registry.mirror]]\nlocation = "n.example.org"\n'
        '\n[[registry]]\nlocation = "i.example.org"\ninsecure = true\n'
    )
    assert exports.registries(PLAIN) is None


def test_the_way_out() -> None:
    wanted = ContainersSettings.model_validate(
        {"docker": {}, "proxy": {"http": "http://p.example.org:3128", "none": [".cluster"]}}
    )
    assert exports.proxy_dropin(wanted) == (
        '[Service]\nEnvironment="HTTP_PROXY=http://p.example.org:3128"\n'
        'Environment="HTTPS_PROXY=http://p.example.org:3128"\nEnvironment="NO_PROXY=localhost,127.0.0.1,.cluster"\n'
    )
    assert exports.proxy_dropin(PLAIN) is None


# Enroot (CTR-05)


def test_every_user_has_folders_of_their_own() -> None:
    assert exports.shared_paths(exports.enroot_conf(Enroot())) == []
    assert "d /run/enroot 1777 root root -\n" in exports.enroot_folders(Enroot())


def test_folders_that_the_first_user_keeps_from_the_second() -> None:
    text = (
        "ENROOT_RUNTIME_PATH /run/enroot\nENROOT_DATA_PATH /tmp/data\nENROOT_CACHE_PATH ${HOME}/.cache\n# x\n"
    )
    assert exports.shared_paths(text) == ["ENROOT_RUNTIME_PATH /run/enroot", "ENROOT_DATA_PATH /tmp/data"]


@given(st.text())
def test_any_text_is_a_configuration(text: str) -> None:
    assert len(exports.shared_paths(text)) <= len(text.splitlines())


# What cannot work


@pytest.mark.parametrize(
    ("site", "rules"),
    [
        (make_site(pyxis=True), ["pyxis-without-enroot"]),
        (make_site(pyxis=True, enroot={}), []),
        (make_site(slurm=False, pyxis=True, enroot={}), ["pyxis-without-slurm"]),
        (make_site(docker={"members": ["ada", "bob"]}), ["docker-member"]),
    ],
)
def test_what_is_refused(site: Site, rules: list[str]) -> None:
    assert [problem.rule for problem in exports.problems(site)] == rules


@pytest.mark.parametrize(
    "containers",
    [
        {"docker": {"data_root": "docker"}},
        {"docker": {"log_size": "100"}},
        {"mirrors": {"https://docker.io": ["https://m"]}},
        {"proxy": {"http": 'http://p"x'}},
        {"enroot": {"data": "/tmp/$(reboot)"}},
        {"lxc": {}},
    ],
)
def test_settings_that_are_refused(containers: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ContainersSettings.model_validate(containers)


# Checks, with stand-ins for a node's commands

INFO = {"LiveRestoreEnabled": True, "CgroupDriver": "systemd", "ServerErrors": None}
MOUNTED = '{"kind": "nvidia.com/gpu", "containerEdits": {"mounts": [{"containerPath": "/etc/nccl.conf"}]}}'
OURS = exports.merged(None, exports.daemon(PLAIN))


def found(
    name: str, answers: dict[str, tuple[int, str]], *, fabric: bool = True, **containers: Any
) -> Verdict:
    def run(command: str, *arguments: str) -> Any:
        for key, (rc, out) in answers.items():
            if key in command:
                return SimpleNamespace(rc=rc, stdout=out, stderr="" if rc == 0 else out)
        raise AssertionError(f"not expected: {command}")

    wanted = ContainersSettings.model_validate(containers or {"docker": {}, "enroot": {}})
    site = SimpleNamespace(
        settings=lambda component, node, kind: wanted,
        enabled=lambda component: component == "fabric" and fabric,
    )
    node = Node("g1", "gpu", frozenset({"worker"}), access=None, gpu=Gpu(model="h100-sxm", count=8))  # type: ignore[arg-type]
    (check,) = (check for check in registry.checks("containers") if check.name == name)
    return check.run(Target(site, node, "containers", None, None, SimpleNamespace(run=run))).verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "answers", "verdict"),
    [
        ("docker-answers", {"cat ": (0, OURS), "docker info": (0, json.dumps(INFO))}, Verdict.PASS),
        ("docker-answers", {"cat ": (0, "{}")}, Verdict.FAIL),
        ("docker-answers", {"cat ": (0, "{,}")}, Verdict.FAIL),
        ("docker-answers", {"cat ": (0, OURS), "docker info": (1, "Cannot connect")}, Verdict.FAIL),
        ("docker-answers", {"cat ": (0, OURS), "docker info": (127, "")}, Verdict.UNKNOWN),
        ("docker-answers", {"cat ": (0, OURS), "docker info": (0, "x")}, Verdict.UNKNOWN),
        ("docker-one", {"systemctl": (0, "docker.service enabled\n")}, Verdict.PASS),
        ("docker-one", {"systemctl": (0, "docker.service x\nsnap.docker.dockerd.service x\n")}, Verdict.FAIL),
        ("docker-one", {"systemctl": (127, "not found")}, Verdict.UNKNOWN),
        ("enroot-paths", {"cat ": (0, exports.enroot_conf(Enroot()))}, Verdict.PASS),
        ("enroot-paths", {"cat ": (0, "ENROOT_DATA_PATH /tmp/x\n")}, Verdict.FAIL),
        ("enroot-paths", {"cat ": (1, "no such file")}, Verdict.UNKNOWN),
        ("user-namespaces", {"cat ": (0, "513000\nabsent\n0\n")}, Verdict.PASS),
        ("user-namespaces", {"cat ": (0, "513000\n1\n0\n")}, Verdict.FAIL),  # OS-19
        ("user-namespaces", {"cat ": (0, "513000\n1\n1\n")}, Verdict.PASS),
        ("user-namespaces", {"cat ": (0, "0\nabsent\n")}, Verdict.FAIL),
        ("user-namespaces", {"cat ": (1, "")}, Verdict.UNKNOWN),
        ("gpus-in-containers", {"cat ": (0, "580.126.20\npath: /usr/lib/libcuda.so.580.126.20\n")}, Verdict.PASS),
        ("gpus-in-containers", {"cat ": (0, "580.126.20\npath: /usr/lib/libcuda.so.570.195.03\n")}, Verdict.FAIL),
        ("gpus-in-containers", {"cat ": (1, "")}, Verdict.FAIL),
        ("gpus-in-containers", {"cat ": (1, "580.126.20\n")}, Verdict.UNKNOWN),
        ("gpus-in-containers", {"cat ": (127, "cat: not found")}, Verdict.UNKNOWN),
        ("nccl-in-containers", {"/run/cdi": (0, MOUNTED), "mounts.d": (0, exports.enroot_nccl())}, Verdict.PASS),
        ("nccl-in-containers", {"/run/cdi": (0, "{}"), "mounts.d": (0, exports.enroot_nccl())}, Verdict.FAIL),
        ("nccl-in-containers", {"/run/cdi": (0, MOUNTED), "mounts.d": (0, "/etc/hosts /etc/hosts\n")}, Verdict.FAIL),
        ("nccl-in-containers", {"/run/cdi": (0, ""), "mounts.d": (0, exports.enroot_nccl())}, Verdict.FAIL),
        ("nccl-in-containers", {"/run/cdi": (127, ""), "mounts.d": (0, exports.enroot_nccl())}, Verdict.UNKNOWN),
        ("nccl-in-containers", {"/run/cdi": (0, ""), "mounts.d": (1, "cat: Input/output error")}, Verdict.FAIL),
        ("nccl-in-containers", {"/run/cdi": (0, MOUNTED), "mounts.d": (1, "cat: no such file")}, Verdict.UNKNOWN),
    ],
)  # fmt: skip
def test_checks(check: str, answers: dict[str, tuple[int, str]], verdict: Verdict) -> None:
    assert found(check, answers) is verdict


@pytest.mark.parametrize("name", ["docker-answers", "docker-one", "enroot-paths", "user-namespaces"])
def test_what_is_not_named_is_not_looked_at(name: str) -> None:
    assert found(name, {}, toolkit=False) is Verdict.SKIP


def test_what_nccl_is_told_is_looked_for_in_each_engine_that_is_named() -> None:
    bound = {"apptainer": (0, "/etc/localtime,/etc/nccl.conf\n")}
    assert found("nccl-in-containers", bound, apptainer={}) is Verdict.PASS
    assert found("nccl-in-containers", {"apptainer": (0, "/etc/hosts\n")}, apptainer={}) is Verdict.FAIL
    assert found("nccl-in-containers", {}, apptainer={}, fabric=False) is Verdict.SKIP
    assert found("nccl-in-containers", {}, toolkit=False, docker={}) is Verdict.SKIP
    assert checks.judge_nccl({"Enroot": "/opt/etc/nccl.conf /etc/hosts none bind"}).verdict is Verdict.FAIL


@pytest.mark.parametrize("nccl", [True, False])
def test_the_specification_of_gpus_has_the_configuration_of_nccl_where_there_is_one(
    nccl: bool, tmp_path: Path
) -> None:
    """With a stand-in for nvidia-ctk; a second time there is nothing to do, and the other way it is made anew."""
    generated = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {}}],
                 "containerEdits": {"mounts": [{"hostPath": "/usr/lib/libcuda.so.580.126.20"}]}}  # fmt: skip
    ctk = tmp_path / "nvidia-ctk"
    ctk.write_text(f"#!/bin/sh\ncat >\"${{3#--output=}}\" <<'E'\n{json.dumps(generated)}\nE\n")
    ctk.chmod(0o755)
    (tmp_path / "version").write_text("580.126.20\n")

    def run(script: str) -> int:
        for path, instead in (("/etc/cdi", f"{tmp_path}/cdi"), ("/sys/module/nvidia", str(tmp_path))):
            script = script.replace(path, instead)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", script], env=environment, check=False).returncode

    assert run(exports.cdi_test(nccl)) == 1
    assert run(exports.cdi_make(nccl)) == 0
    assert run(exports.cdi_test(nccl)) == 0
    assert run(exports.cdi_test(not nccl)) == 1
    written = json.loads((tmp_path / "cdi/nvidia.yaml").read_text())
    mounts = [mount.get("containerPath") for mount in written["containerEdits"]["mounts"]]
    assert mounts == [None, *(["/etc/nccl.conf"] if nccl else [])]
    assert written["devices"] == generated["devices"]
    (tmp_path / "version").write_text("590.10.01\n")
    assert run(exports.cdi_test(nccl)) == 1


def test_containers_that_a_restart_would_end_are_told() -> None:
    """CTR-01"""
    assert checks.judge_docker(json.dumps({**INFO, "LiveRestoreEnabled": False})).verdict is Verdict.FAIL
    assert checks.judge_docker(json.dumps({**INFO, "ServerErrors": ["no daemon"]})).read == "no daemon"
