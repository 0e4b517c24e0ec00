"""The agent and a real API server of Kubernetes, on the loopback: what it says there, and what it may not.

Needs etcd, kube-apiserver and kubectl; no lab. What is read of the node is simulated, all else is what a node runs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from provision.health import __main__ as command
from provision.health import agent, kubeconfig, kubernetes
from provision.health.decide import decide
from provision.health.finding import FAIL, PASS, Finding
from provision.health.kubernetes import Api, ApiError, Settings
from provision.health.readings import Unread
from provision.health.sources import Source
from tests.lab.apiserver import PROGRAMS, ApiServer, api_server
from tests.unit.health_node import SITE
from tests.unit.health_node import node as well

MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)}")

MANIFEST = Path("docs/kubernetes/node-health.yml")
# the API server sets it on every new node, and a controller, which is not here, takes it away
NOT_READY = "node.kubernetes.io/not-ready"
NUMBER = count(1)
GRAVE = decide([Finding(FAIL, "nvlink-count", "GPU 1", "17 of 18 up", action="reset")], 0, "", None)
WELL = decide([Finding(PASS, "xid", "g1")], 0, "", None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        server.kubectl("apply", "-f", str(MANIFEST))
        _wait_for_the_policy(server)
        yield server


def _wait_for_the_policy(server: ApiServer) -> None:
    """The server knows of it a moment after it took it."""
    server.add("policy", of="policy")
    agent = "--as=system:serviceaccount:node-health:other", "--as-group=system:serviceaccounts:node-health"
    deadline = time.monotonic() + 60
    while not refused(server, "admin", "label", "node", "policy", "a=b", "--dry-run=server", *agent):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    server.kubectl("delete", "node", "policy")


def refused(server: ApiServer, who: str, *words: str) -> str:
    """What kubectl says where the server does not do what `who` asks for; nothing where it does."""
    try:
        server.kubectl(*words, by=who)
    except subprocess.CalledProcessError as error:
        return str(error.stderr)
    return ""


# ---- a node


class Simulated(Source):
    """All sources of the node at once."""

    def __init__(self) -> None:
        self.node = well()
        self.tells = tuple(self.node.values)

    def read(self) -> dict[str, Any]:
        return deepcopy(self.node.values)


@dataclass
class Node:
    """A node of the API server, and the agent on it."""

    name: str
    server: ApiServer
    source: Simulated
    configure: Callable[[Settings], None]

    @property
    def gpu(self) -> dict[str, Any]:
        """What is read of its second GPU."""
        values: dict[str, Any] = self.source.node["gpus"][1].values
        return values

    def watch(self, kubeconfig: Path, taint: str | None = "NoSchedule") -> int:
        """`provision-health watch`; its exit status."""
        self.configure(Settings(kubeconfig, self.name, taint))
        return command.main(["watch"])

    @property
    def condition(self) -> tuple[str, str, str] | None:
        found = kubernetes.found(self.server.node(self.name))
        return None if found is None else (found["status"], found["reason"], found["message"])

    @property
    def taints(self) -> dict[str, str]:
        """Key -> effect."""
        taints = {each["key"]: each["effect"] for each in self.server.node(self.name)["spec"]["taints"]}
        assert taints.pop(NOT_READY) == "NoSchedule"
        return taints


@pytest.fixture
def node(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A new one, which is well; gone afterwards: its taint would count in the budget of the next."""
    name, source = f"g{next(NUMBER)}", Simulated()
    server.add(name, of=name)

    def configure(settings: Settings) -> None:
        config = agent.Config(name, SITE, act=True, kubernetes=settings)
        monkeypatch.setattr(agent, "configured", lambda: config)

    monkeypatch.setattr(agent, "sources", lambda *_, **__: [source])
    monkeypatch.setattr(agent, "remembered", partial(agent.remembered, tmp_path / "state"))
    yield Node(name, server, source, configure)
    server.kubectl("delete", "node", "-l", f"of={name}")


def kubelet(node: Node) -> Path:
    """The access of the node's kubelet."""
    node.server.authority.vouch(node.name, f"/O=system:nodes/CN=system:node:{node.name}")
    return node.server.kubeconfig(node.name)


def account(node: Node) -> Path:
    """The access of the node's own account, made as docs/health.md says."""
    node.server.kubectl("-n", "node-health", "create", "serviceaccount", node.name)
    token = node.server.kubectl("-n", "node-health", "create", "token", node.name, "--duration=8760h")
    return node.server.kubeconfig(node.name, token=token)


# ---- by the kubelet's access


def test_a_kubelet_tells_of_its_node_by_a_condition(node: Node) -> None:
    access = kubelet(node)
    assert node.watch(access, None) == 0
    assert node.condition == ("False", "Well", "well")
    node.gpu["remapped_rows.failure"] = True
    assert node.watch(access, None) == 1
    assert node.condition is not None
    assert node.condition[:2] == ("True", "NeedsReplacement")
    assert node.taints == {}


def test_a_kubelet_that_shall_taint_is_told_that_it_may_not_and_the_condition_stands(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.gpu["remapped_rows.failure"] = True
    assert node.watch(kubelet(node)) == 1
    said = capsys.readouterr().err
    assert "ALERT: kubernetes could not be told: https://127.0.0.1" in said
    assert "403: " in said
    assert "a kubelet may not change taints" in said
    assert node.condition is not None
    assert node.condition[0] == "True"
    assert node.taints == {}


def test_a_kubelet_may_not_write_of_another_node(node: Node) -> None:
    node.server.add(f"{node.name}-other", of=node.name)
    with pytest.raises(ApiError, match=r"403: .*is forbidden"):
        kubernetes.tell(Settings(kubelet(node), f"{node.name}-other"), GRAVE, acting=True)


# ---- by an account of the agent's own


def test_condition_and_taint_come_and_go_with_a_fault_and_those_of_others_stay(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    access = account(node)
    node.server.kubectl("taint", "node", node.name, "site/reserved=gpu:NoExecute")
    other = {"type": "FrequentDocker", "status": "True", "reason": "Restarts"}
    node.server.kubectl(
        *("patch", "node", node.name, "--subresource=status", "-p"),
        json.dumps({"status": {"conditions": [other]}}),
    )
    assert node.watch(access) == 0
    assert node.condition == ("False", "Well", "well")
    assert node.taints == {"site/reserved": "NoExecute"}

    node.gpu["remapped_rows.pending"] = True
    assert node.watch(access) == 1
    assert "provision-health: tainted: remap-pending GPU 1" in capsys.readouterr().err
    assert node.condition is not None
    assert node.condition[:2] == ("True", "NeedsReset")
    assert node.taints == {"site/reserved": "NoExecute", "provision/unhealthy": "NoSchedule"}

    # what cannot be read clears nothing, nor does a second reading say anything again
    node.gpu["remapped_rows.pending"] = Unread("no answer")
    assert node.watch(access) == 1
    assert capsys.readouterr().err == ""
    assert node.condition[:2] == ("True", "NeedsReset")
    assert "provision/unhealthy" in node.taints

    node.gpu["remapped_rows.pending"] = False
    assert node.watch(access) == 0
    assert "provision-health: taint removed: all is well again" in capsys.readouterr().err
    assert node.condition == ("False", "Well", "well")
    assert node.taints == {"site/reserved": "NoExecute"}
    conditions = node.server.node(node.name)["status"]["conditions"]
    assert [each["type"] for each in conditions if each["type"] != "NodeUnhealthy"] == ["FrequentDocker"]


def test_unknown_is_told_as_unknown_and_taints_only_after_three_readings_without_the_driver(
    node: Node,
) -> None:
    access = account(node)
    node.source.node.values["nvml"] = Unread("no answer")
    for _ in range(2):
        assert node.watch(access) == 1
        assert node.condition is not None
        assert node.condition[:2] == ("Unknown", "CannotTell")
        assert node.taints == {}
    assert node.watch(access) == 1
    assert node.condition[:2] == ("True", "NeedsDrain")
    assert node.taints == {"provision/unhealthy": "NoSchedule"}


def test_the_condition_has_since_when_it_is_so_and_when_it_was_last_told(node: Node) -> None:
    at = Settings(account(node), node.name)
    kubernetes.tell(at, GRAVE, acting=True, now=lambda: 1772366400.0)
    kubernetes.tell(at, GRAVE, acting=True, now=lambda: 1772366700.0)
    found = kubernetes.found(node.server.node(node.name))
    assert found is not None
    assert found["lastTransitionTime"] == "2026-03-01T12:00:00Z"
    assert found["lastHeartbeatTime"] == "2026-03-01T12:05:00Z"
    assert kubernetes.asked(at, 1772366712.0)["seconds"] == 12


def test_an_account_touches_neither_another_node_nor_what_is_not_the_agents(node: Node) -> None:
    access = account(node)
    node.server.add(other := f"{node.name}-other", of=node.name)
    own, taint = node.name, "provision/unhealthy=now:NoSchedule"
    assert "of its own node alone" in refused(node.server, own, "taint", "node", other, taint)
    with pytest.raises(ApiError, match="of its own node alone"):
        kubernetes.tell(Settings(access, other), GRAVE, acting=True)
    for words in (
        ("taint", "node", own, "site/reserved=gpu:NoSchedule"),
        ("taint", "node", own, f"{NOT_READY}-"),
        ("label", "node", own, "node-role.kubernetes.io/control-plane="),
        ("annotate", "node", own, "a=b"),
        ("patch", "node", own, "-p", '{"spec": {"unschedulable": true}}'),
    ):
        assert "its condition and its taint alone" in refused(node.server, own, *words)
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    with pytest.raises(ApiError, match="its condition and its taint alone"):
        Api(kubeconfig.load(access)).patch(f"/api/v1/nodes/{own}/status", ready, kubernetes._STRATEGIC)
    assert "cannot delete resource" in refused(node.server, own, "delete", "node", own)
    assert "cannot list resource" in refused(node.server, own, "get", "secrets", "-A")
    node.server.kubectl("taint", "node", own, taint, by=own)
    assert node.taints == {"provision/unhealthy": "NoSchedule"}


# ---- others do something at the same time


class Busy(Api):
    """Somebody taints the node each time before the agent does."""

    node: Node
    times: int

    def patch(self, path: str, document: Any, kind: str) -> dict[str, Any]:
        if "spec" in document and self.times:
            self.times -= 1
            self.node.server.kubectl("taint", "node", self.node.name, f"site/{self.times}=a:NoSchedule")
        return super().patch(path, document, kind)


def busy(node: Node, times: int) -> tuple[Settings, Busy]:
    access = account(node)
    api = Busy(kubeconfig.load(access))
    api.node, api.times = node, times
    return Settings(access, node.name, "NoSchedule"), api


def test_a_taint_that_somebody_sets_meanwhile_is_not_lost(node: Node) -> None:
    settings, api = busy(node, 2)
    assert kubernetes.tell(settings, GRAVE, acting=True, api=api).startswith("tainted")
    assert set(node.taints) == {"site/0", "site/1", "provision/unhealthy"}


def test_a_node_that_always_changes_is_left_as_it_is_and_that_is_said(node: Node) -> None:
    settings, api = busy(node, 3)
    with pytest.raises(ApiError, match=r"409: .*the object has been modified"):
        kubernetes.tell(settings, GRAVE, acting=True, api=api)
    assert set(node.taints) == {"site/0", "site/1", "site/2"}


def test_of_many_agents_that_taint_at_once_no_more_than_the_budget_do(server: ApiServer) -> None:
    """Of 130 nodes, more than one answer of the server holds, 6 may be tainted in an hour."""
    names = [f"many-{number:03}" for number in range(130)]
    sick = names[::-10]  # later names first
    server.add(*names, of="many")

    def tell(name: str) -> str:
        return kubernetes.tell(Settings(server.folder / "admin.conf", name, "NoSchedule"), GRAVE, acting=True)

    def tainted() -> set[str]:
        nodes = json.loads(server.kubectl("get", "nodes", "-l", "of=many", "-o", "json"))["items"]
        return {each["metadata"]["name"] for each in nodes if kubernetes.tainted_since(each)}

    try:
        with ThreadPoolExecutor(len(sick)) as pool:
            said = dict(zip(sick, pool.map(tell, sick), strict=True))
        at_once = tainted()
        later = [tell(name) for name in sick]
        in_the_end = tainted()
    finally:
        server.kubectl("delete", "node", "-l", "of=many")
    assert len(at_once) <= 6
    assert {name for name in sick if said[name].startswith("tainted: ")} == at_once
    assert {words for name, words in said.items() if name not in at_once} <= {
        f"ALERT: {what}, the budget of an hour is used up: {GRAVE.reason}"
        for what in ("no taint", "taint removed")
    }
    assert at_once <= in_the_end
    assert len(in_the_end) == 6
    assert sum(words.startswith("ALERT: no taint") for words in later) == len(sick) - 6


# ---- what the server refuses, or does not answer


def test_who_is_not_known_or_has_no_rights_is_told_so(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.watch(node.server.kubeconfig(node.name, token="nobody's")) == 0
    assert "401: Unauthorized; the certificate or token of" in capsys.readouterr().err
    node.server.kubectl("create", "serviceaccount", node.name)
    token = node.server.kubectl("create", "token", node.name)
    assert node.watch(node.server.kubeconfig(node.name, token=token)) == 0
    assert 'cannot get resource "nodes"' in capsys.readouterr().err
    assert node.condition is None


def test_a_node_that_the_server_does_not_know_is_an_error(node: Node) -> None:
    with pytest.raises(ApiError, match='404: nodes "g0" not found'):
        kubernetes.tell(Settings(account(node), "g0"), WELL, acting=True)


def test_a_server_that_hangs_or_is_away_is_said_and_told_later(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    access = account(node)
    node.gpu["remapped_rows.failure"] = True
    with node.server.hanging(), monkeypatch.context() as patience:
        patience.setattr(kubernetes, "Api", partial(Api, seconds=2))
        assert node.watch(access) == 1
    assert "ALERT: kubernetes could not be told: https://127.0.0.1" in (said := capsys.readouterr().err)
    assert "timed out" in said
    away = node.server.kubeconfig(f"{node.name}-away", token="any", port=1)
    assert node.watch(away) == 1
    assert "refused" in capsys.readouterr().err
    assert node.watch(access) == 1
    assert "tainted: " in capsys.readouterr().err
    assert node.taints == {"provision/unhealthy": "NoSchedule"}
