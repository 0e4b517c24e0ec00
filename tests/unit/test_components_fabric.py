"""fabric: what NCCL is told, what contradicts itself, and what the checks judge."""

from __future__ import annotations

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
from provision.components.fabric import checks, exports
from provision.components.fabric.settings import FabricSettings
from provision.engine.plan import make_plan
from provision.report.model import Verdict
from provision.site.models import Gpu, Node, Site, SiteFile
from provision.verify.check import Target

INFINIBAND = {"kind": "infiniband", "rails": 2}


def make_site(network: dict[str, Any] | None = INFINIBAND, **fabric: Any) -> Site:
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g1", "roles": ["worker"], "gpu": {"model": "h100-sxm", "count": 8}},
        },
        "networks": {"fabric": network} if network else {},
        "scheduler": {"slurm": {}},
        "nvidia": {},
        "fabric": fabric,
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


def told(site: Site) -> list[str]:
    return exports.nccl_conf(site, site.nodes["g1"]).splitlines()


def test_names_are_exact() -> None:
    site = make_site(interfaces=["ens1f0"], hcas=["mlx5_0", "mlx5_1:1"], nccl={"NCCL_IB_TIMEOUT": 22})
    assert told(site) == ["NCCL_SOCKET_IFNAME==ens1f0", "NCCL_IB_HCA==mlx5_0,mlx5_1:1", "NCCL_IB_TIMEOUT=22"]


def test_without_rdma_nccl_does_not_look_for_it() -> None:
    assert told(make_site({"kind": "ethernet"}, interfaces=["eth1"])) == [
        "NCCL_SOCKET_IFNAME==eth1",
        "NCCL_IB_DISABLE=1",
    ]


def test_what_is_not_said_is_left_to_nccl() -> None:
    assert told(make_site()) == []


def test_what_the_site_says_last_wins() -> None:
    assert told(make_site(hcas=["mlx5_0", "mlx5_1"], nccl={"NCCL_IB_HCA": "^mlx5_2"})) == [
        "NCCL_IB_HCA=^mlx5_2"
    ]


@pytest.mark.parametrize(
    ("site", "rules"),
    [
        (make_site(hcas=["mlx5_0", "mlx5_1"], subnet_manager=True), []),
        (make_site(None), ["fabric-without-network"]),
        (make_site(hcas=["mlx5_0"]), ["fabric-rails"]),
        (make_site({"kind": "ethernet", "rails": 1}, hcas=["mlx5_0"]), ["fabric-hcas"]),
        (make_site({"kind": "roce", "rails": 1}, subnet_manager=True), ["fabric-subnet-manager"]),
    ],
)
def test_what_contradicts_itself(site: Site, rules: list[str]) -> None:
    assert [problem.rule for problem in exports.problems(site)] == rules


@pytest.mark.parametrize(
    "fabric",
    [
        {"interfaces": ["eth0 eth1"]},
        {"hcas": ["mlx5_0,mlx5_1"]},
        {"nccl": {"PATH": "/x"}},
        {"nccl": {"NCCL_DEBUG": "INFO\nLD_PRELOAD=x"}},
        {"peer_memory": "yes"},
    ],
)
def test_settings_that_are_refused(fabric: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FabricSettings.model_validate(fabric)


def test_the_rdma_stack_is_there_before_the_driver_is_built() -> None:
    """DRV-09"""
    site = make_site()
    names = [step.name for step in make_plan(site, [site.nodes["g1"]]).steps["g1"]]
    assert names.index("fabric:worker") < names.index("nvidia:worker") < names.index("slurm:worker")


# Checks


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ({"mlx5_0": "4: ACTIVE", "mlx5_1": "4: ACTIVE"}, Verdict.PASS),
        ({"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"}, Verdict.FAIL),
        ({"mlx5_0": "missing"}, Verdict.FAIL),
        ({"mlx5_0": "4: ACTIVE switch"}, Verdict.FAIL),
    ],
)
def test_adapters(states: dict[str, str], verdict: Verdict) -> None:
    assert checks.judge_adapters(states).verdict is verdict


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.20  Release\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.126.20  Release\n"
CLIENT = "ib_core 417792 3 nvidia_peermem,ib_umad,mlx5_ib, Live 0x0\nnvidia_peermem 16384 0 - Live 0x0\n"


@pytest.mark.parametrize(
    ("way", "kernel", "modules", "verdict"),
    [
        ("dma-buf", "6.8.0-90-generic", OPEN, Verdict.PASS),
        ("dma-buf", "6.12.57+deb13-amd64", OPEN, Verdict.PASS),
        ("dma-buf", "5.4.0-200-generic", OPEN, Verdict.FAIL),
        ("dma-buf", "6.8.0-90-generic", CLOSED, Verdict.FAIL),
        ("nvidia-peermem", "6.8.0-90-generic", CLIENT + CLOSED, Verdict.PASS),
        ("nvidia-peermem", "6.8.0-90-generic", CLIENT.replace("nvidia_peermem,", "") + CLOSED, Verdict.FAIL),  # DRV-09
        ("nvidia-peermem", "6.8.0-90-generic", CLOSED, Verdict.FAIL),
    ],
)  # fmt: skip
def test_the_way_between_adapters_and_gpus(way: str, kernel: str, modules: str, verdict: Verdict) -> None:
    assert checks.judge_peer_memory(way, kernel, modules).verdict is verdict


@given(st.sampled_from(["dma-buf", "nvidia-peermem"]), st.text(), st.text())
def test_any_answer_is_judged(way: str, kernel: str, modules: str) -> None:
    assert checks.judge_peer_memory(way, kernel, modules).verdict in (Verdict.PASS, Verdict.FAIL)


def found(name: str, rc: int, out: str, **fabric: Any) -> Verdict:
    answer = SimpleNamespace(rc=rc, stdout=out if rc == 0 else "", stderr=out if rc else "")
    host = SimpleNamespace(run=lambda command: answer)
    site = make_site(**fabric)
    node = Node("g1", "gpu", frozenset({"worker"}), access=None, gpu=Gpu(model="h100-sxm", count=8))  # type: ignore[arg-type]
    (check,) = (check for check in registry.checks("fabric") if check.name == name)
    return check.run(Target(site, node, "fabric", None, None, host)).verdict  # type: ignore[arg-type]


HCAS = ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("check", "rc", "out", "fabric", "verdict"),
    [
        ("nccl-configuration", 0, "# x\nNCCL_IB_HCA==mlx5_0,mlx5_1\n", {"hcas": HCAS}, Verdict.PASS),
        ("nccl-configuration", 0, "NCCL_IB_HCA=mlx5\n", {"hcas": HCAS}, Verdict.FAIL),
        ("nccl-configuration", 1, "cat: /etc/nccl.conf: No such file or directory", {}, Verdict.FAIL),
        ("nccl-configuration", 127, "cat: not found", {}, Verdict.UNKNOWN),
        ("rdma-adapters", 0, "4: ACTIVE\n", {"hcas": HCAS}, Verdict.PASS),
        ("rdma-adapters", 0, "4: ACTIVE\nswitch\n", {"hcas": HCAS}, Verdict.FAIL),
        ("rdma-adapters", 1, "", {"hcas": HCAS}, Verdict.FAIL),
        ("rdma-adapters", 2, "", {"hcas": HCAS}, Verdict.UNKNOWN),
        ("rdma-adapters", 0, "", {}, Verdict.SKIP),
        ("peer-memory", 0, f"6.8.0-90-generic\nx 1\n{OPEN}", {}, Verdict.PASS),
        ("peer-memory", 0, f"6.8.0-90-generic\nx 1\n{CLOSED}", {}, Verdict.FAIL),
        ("peer-memory", 1, "no driver", {}, Verdict.UNKNOWN),
        ("acs-redirect-off", 0, "", {"acs": "off"}, Verdict.PASS),
        ("acs-redirect-off", 1, "0000:00:01.0 redirects", {"acs": "off"}, Verdict.FAIL),
        ("acs-redirect-off", 2, "setpci is needed", {"acs": "off"}, Verdict.UNKNOWN),
        ("acs-redirect-off", 0, "", {}, Verdict.SKIP),
    ],
)
def test_checks(check: str, rc: int, out: str, fabric: dict[str, Any], verdict: Verdict) -> None:
    assert found(check, rc, out, **fabric) is verdict


# The program, with stand-ins for its tools


def acs(folder: Path, verb: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-c", exports.acs_script(), "acs-off", verb],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_redirect_is_switched_off_where_it_is_on(tmp_path: Path) -> None:
    stubs = {
        "lspci": "printf '0000:00:01.0 0604: x\\n0000:00:02.0 0604: x\\n0000:00:03.0 0604: x\\n'",
        "setpci": f"""cd {tmp_path}; case $3 in
  *=0:c) echo 0010 >$2;;
  *) cat $2 2>/dev/null;;
esac""",
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "0000:00:01.0").write_text("001d\n")
    (tmp_path / "0000:00:02.0").write_text("0000\n")  # the third has no ACS
    before = acs(tmp_path, "check")
    assert (before.returncode, before.stderr) == (1, "0000:00:01.0 redirects\n")
    assert acs(tmp_path, "apply").returncode == 0
    assert (tmp_path / "0000:00:01.0").read_text() == "0010\n"
    assert acs(tmp_path, "check").returncode == 0
