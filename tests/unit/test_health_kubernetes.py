"""Kubernetes hears of a node's health: condition and taint, by TLS, at an API server on the loopback."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provision.health import __main__ as command
from provision.health import agent, kubeconfig, kubernetes
from provision.health.agent import Config, Outcome
from provision.health.decide import Decision, decide
from provision.health.finding import FAIL, PASS, UNKNOWN, Finding
from provision.health.kubeconfig import KubeconfigError
from provision.health.kubernetes import ApiError, Settings
from provision.health.readings import Device
from tests.authority import Authority

NOON = 1772366400.0  # 2026-03-01T12:00:00Z
KUBELET, ACCOUNT = "system:node:g1", "health"


# ---- an API server


def node(name: str, taints: Any = (), conditions: Any = ()) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": {"taints": list(taints)},
        "status": {"conditions": [{"type": "Ready", "status": "True"}, *conditions]},
    }


@dataclass
class Cluster:
    """Nodes and what was done with them, as far as agents go."""

    nodes: dict[str, dict[str, Any]]
    calls: list[str] = field(default_factory=list)
    meanwhile: Any = None  # called once before a taint is written: somebody else's change
    answer: bytes | None = None  # said to everything, whatever was asked

    def patched(self, path: str, kind: str, who: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name, _, part = path.removeprefix("/api/v1/nodes/").partition("/")
        found = self.nodes[name]
        if part == "status":
            assert kind == "application/strategic-merge-patch+json"
            (told,) = document["status"]["conditions"]
            others = [each for each in found["status"]["conditions"] if each["type"] != told["type"]]
            found["status"]["conditions"] = [*others, told]
        else:
            assert kind == "application/merge-patch+json"
            if self.meanwhile is not None:
                self.meanwhile, change = None, self.meanwhile
                change()
            if who.startswith("system:node:"):
                return 403, {"message": f"node {name!r} is not allowed to modify taints"}
            if document["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                return 409, {"message": "the object has been modified"}
            found["spec"]["taints"] = document["spec"]["taints"]
        found["metadata"]["resourceVersion"] = str(int(found["metadata"]["resourceVersion"]) + 1)
        return 200, found

    def got(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        if path == "/api/v1/nodes":
            names = sorted(self.nodes)
            first, size = int(query.get("continue", ["0"])[0].rstrip("+")), int(query["limit"][0])
            more = f"{first + size}+" if first + size < len(names) else ""
            items = [self.nodes[name] for name in names[first : first + size]]
            return 200, {"metadata": {"continue": more}, "items": items}
        name = path.removeprefix("/api/v1/nodes/")
        return (
            (200, self.nodes[name]) if name in self.nodes else (404, {"message": f"nodes {name} not found"})
        )


@dataclass(frozen=True)
class Keys:
    """An authority, a server's certificate for 127.0.0.1, and clients: a kubelet, and one that no one knows."""

    folder: Path

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    own, other = Authority.made(folder), Authority.made(folder, "other")
    for name, who, authority in (
        ("server", "apiserver", own),
        ("kubelet", KUBELET, own),
        ("account", ACCOUNT, own),
        ("stranger", ACCOUNT, other),
    ):
        authority.vouch(name, f"/CN={who}")
    return Keys(folder)


@contextmanager
def served(cluster: Cluster, keys: Keys) -> Iterator[str]:
    """The address of an API server that knows clients by their certificate, or by the token "secret"."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            certificate: Any = self.connection.getpeercert()
            who = (
                next((v for ((k, v),) in certificate["subject"] if k == "commonName"), "")
                if certificate
                else ""
            )
            if self.headers["Authorization"] == "Bearer secret":
                who = ACCOUNT
            url = urlsplit(self.path)
            cluster.calls.append(f"{self.command} {url.path}")
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if cluster.answer is not None:
                status, text = 200, cluster.answer
            else:
                if not who:
                    status, found = 401, {"message": "Unauthorized"}
                elif self.command == "GET":
                    status, found = cluster.got(url.path, parse_qs(url.query))
                else:
                    kind = self.headers["Content-Type"]
                    status, found = cluster.patched(url.path, kind, who, json.loads(body))
                text = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PATCH = _answer

        def log_message(self, *words: object) -> None:
            pass  # not into the tests' output

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.folder / "server.crt", keys.folder / "server.key")
    context.load_verify_locations(keys.folder / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def config(
    server: str, keys: Keys, *, who: str = "account", authority: str = "ca", form: str = "file"
) -> str:
    """A kubeconfig as kubeadm writes a kubelet's: the authority as data, certificate and key in one file."""
    user = {
        "file": f"    client-certificate: {who}.pem\n    client-key: {who}.pem\n",
        "data": "".join(
            f"    client-{kind}-data: {base64.b64encode(keys.read(f'{who}.{end}')).decode()}\n"
            for kind, end in (("certificate", "crt"), ("key", "key"))
        ),
        "token": "    token: secret\n",
        "none": "    token: ''\n",
    }[form]
    data = base64.b64encode(keys.read(f"{authority}.crt")).decode()
    return (
        "apiVersion: v1\nclusters:\n- cluster:\n"
        f"    certificate-authority-data: {data}\n    server: {server}\n  name: atlas\n"
        "contexts:\n- context:\n    cluster: atlas\n    namespace: default\n    user: system:node:g1\n"
        "  name: system:node:g1@atlas\ncurrent-context: system:node:g1@atlas\nkind: Config\npreferences: {}\n"
        f"users:\n- name: system:node:g1\n  user:\n{user}"
    )


@dataclass
class Asked:
    """One cluster, and the agent of its node g1."""

    cluster: Cluster
    settings: Settings
    path: Path

    def tell(self, decision: Decision, *, at: float = NOON, acting: bool = True) -> str:
        return kubernetes.tell(self.settings, decision, acting=acting, now=lambda: at)

    @property
    def condition(self) -> tuple[str, str, str] | None:
        """Status, message, and since when."""
        found = kubernetes.found(self.cluster.nodes["g1"])
        return None if found is None else (found["status"], found["message"], found["lastTransitionTime"])

    @property
    def taints(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.cluster.nodes["g1"]["spec"]["taints"]
        return found


@contextmanager
def asked(
    keys: Keys, *others: dict[str, Any], taint: str | None = "NoSchedule", **form: str
) -> Iterator[Asked]:
    cluster = Cluster({each["metadata"]["name"]: each for each in (node("g1"), *others)})
    with served(cluster, keys) as server:
        path = keys.folder / "kubeconfig"
        path.write_text(config(server, keys, **form))
        yield Asked(cluster, Settings(path, "g1", taint), path)


def decided(*findings: Finding, unreadable: int = 0) -> Decision:
    return decide(findings, unreadable, "", None)


WELL = decided(Finding(PASS, "xid", "g1"))
GRAVE = decided(Finding(FAIL, "nvlink-count", "GPU 3", "17 of 18 up", action="reset"))
SAID = "nvlink-count GPU 3: 17 of 18 up; reset"
BLIND = decided(Finding(UNKNOWN, "temperature", "GPU 0", why="no answer"))
MILD = decided(Finding(FAIL, "services", "g1", "chrony: failed", action="fix"))


# ---- condition


def test_a_node_that_is_well_says_so_and_when_it_was_last_heard_of(keys: Keys) -> None:
    with asked(keys, taint=None) as at:
        assert at.tell(WELL) == ""
        at.tell(WELL, at=NOON + 300)
        found = kubernetes.found(at.cluster.nodes["g1"])
        assert found == {
            "type": "NodeUnhealthy",
            "status": "False",
            "reason": "Well",
            "message": "well",
            "lastHeartbeatTime": "2026-03-01T12:05:00Z",
            "lastTransitionTime": "2026-03-01T12:00:00Z",
        }
        assert [each["type"] for each in at.cluster.nodes["g1"]["status"]["conditions"]] == [
            "Ready",
            "NodeUnhealthy",
        ]


def test_a_kubelet_may_write_the_condition_of_its_node(keys: Keys) -> None:
    with asked(keys, taint=None, who="kubelet") as at:
        at.tell(GRAVE)
        assert at.condition == ("True", SAID, "2026-03-01T12:00:00Z")
        found = kubernetes.found(at.cluster.nodes["g1"])
        assert found is not None
        assert found["reason"] == "NeedsReset"
        assert at.taints == []


@pytest.mark.parametrize("decision", [BLIND, MILD], ids=["unknown", "mild"])
def test_what_cannot_be_told_or_is_no_reason_to_drain_never_clears_the_condition(
    keys: Keys, decision: Decision
) -> None:
    with asked(keys) as at:
        at.tell(GRAVE)
        assert at.tell(decision, at=NOON + 300) == ""
        assert at.condition == ("True", SAID, "2026-03-01T12:00:00Z")
        assert [each["key"] for each in at.taints] == ["provision/unhealthy"]
        assert at.tell(WELL, at=NOON + 600) == "taint removed: all is well again"
        assert at.condition == ("False", "well", "2026-03-01T12:10:00Z")
        assert at.taints == []


def test_unknown_is_never_called_well(keys: Keys) -> None:
    with asked(keys) as at:
        at.tell(WELL)
        at.tell(BLIND, at=NOON + 300)
        assert at.condition == ("Unknown", "temperature GPU 0: no answer", "2026-03-01T12:05:00Z")
        assert at.taints == []
        at.tell(MILD, at=NOON + 600)
        assert at.condition == ("False", "services g1: chrony: failed; fix", "2026-03-01T12:10:00Z")


def test_a_driver_that_cannot_be_read_three_times_is_a_reason(keys: Keys) -> None:
    with asked(keys) as at:
        at.tell(decided(Finding(UNKNOWN, "nvml", "g1", why="no answer"), unreadable=2))
        assert at.condition == ("True", "nvml g1: no answer", "2026-03-01T12:00:00Z")
        assert at.taints


# ---- taint


def test_a_failing_node_is_tainted_and_the_taints_of_others_stay(keys: Keys) -> None:
    own = {"key": "site/reserved", "effect": "NoSchedule"}
    with asked(keys, taint="NoExecute") as at:
        at.taints.append(own)
        assert at.tell(GRAVE) == f"tainted: {SAID}"
        assert at.taints == [
            own,
            {"key": "provision/unhealthy", "value": "20260301T120000Z", "effect": "NoExecute"},
        ]
        assert at.tell(GRAVE, at=NOON + 300) == ""
        at.tell(WELL, at=NOON + 600)
        assert at.taints == [own]


def test_without_a_taint_in_the_site_file_or_with_the_switch_pulled_only_the_condition_is_told(
    keys: Keys,
) -> None:
    with asked(keys) as at:
        assert at.tell(GRAVE, acting=False) == ""
        assert (at.condition or "")[0] == "True"
        assert at.taints == []


def test_a_taint_that_somebody_sets_meanwhile_is_not_lost(keys: Keys) -> None:
    own = {"key": "site/reserved", "effect": "NoSchedule"}
    with asked(keys) as at:

        def change() -> None:
            at.taints.append(own)
            at.cluster.nodes["g1"]["metadata"]["resourceVersion"] = "7"

        at.cluster.meanwhile = change
        assert at.tell(GRAVE).startswith("tainted")
        assert [each["key"] for each in at.taints] == ["site/reserved", "provision/unhealthy"]


def test_a_kubelet_is_told_that_it_may_not_taint_and_the_condition_stands(keys: Keys) -> None:
    with asked(keys, who="kubelet") as at:
        with pytest.raises(ApiError, match=r"403: .*not allowed to modify taints; .*account that may"):
            at.tell(GRAVE)
        assert (at.condition or "")[0] == "True"


def recent(name: str, seconds: float) -> dict[str, Any]:
    return node(name, [kubernetes.taint("NoSchedule", NOON - seconds)])


def test_taints_stop_at_the_budget_of_an_hour(keys: Keys) -> None:
    with asked(keys, recent("g2", 60), recent("g3", 3500)) as at:
        assert at.tell(GRAVE) == f"ALERT: no taint, the budget of an hour is used up: {SAID}"
        assert at.taints == []
        assert (at.condition or "")[0] == "True"
        # an hour after the first of them there is room again
        assert at.tell(GRAVE, at=NOON + 200).startswith("tainted")


def test_the_budget_is_of_all_nodes_also_where_the_answer_has_several_pages(keys: Keys) -> None:
    others = [node(f"n{number:03}") for number in range(250)]
    sick = [recent(f"z{number}", 60) for number in range(3)]
    with asked(keys, *others, *sick) as at:
        assert at.tell(GRAVE).startswith("tainted")  # 5 % of 254 are 12
        assert at.cluster.calls.count("GET /api/v1/nodes") == 6


def test_of_several_that_taint_themselves_at_once_the_last_takes_it_back(keys: Keys) -> None:
    with asked(keys, recent("g2", 60)) as at:

        def change() -> None:
            at.cluster.nodes["a0"] = recent("a0", 0)  # the same second, and before g1 by its name

        at.cluster.meanwhile = change
        assert at.tell(GRAVE).startswith("ALERT: taint removed")
        assert at.taints == []


# ---- who one is, and who the server is


@pytest.mark.parametrize("form", ["file", "data", "token"])
def test_certificates_in_files_or_in_the_kubeconfig_and_tokens_are_understood(keys: Keys, form: str) -> None:
    with asked(keys, form=form) as at:
        at.tell(WELL)
        assert (at.condition or "")[0] == "False"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"authority": "other"}, "CERTIFICATE_VERIFY_FAILED|certificate verify failed"),
        ({"who": "stranger"}, "(?i)unknown ca|connection reset|decrypt error|EOF|broken pipe"),
    ],
    ids=["another server", "an unknown client"],
)
def test_who_is_not_known_is_not_talked_to(keys: Keys, form: dict[str, str], said: str) -> None:
    with asked(keys, **form) as at:
        with pytest.raises(ApiError, match=said):
            at.tell(GRAVE)
        assert at.condition is None
        assert at.cluster.calls == []


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"\xff"])
def test_an_answer_of_another_kind_is_an_error(keys: Keys, answer: bytes) -> None:
    with asked(keys) as at:
        at.cluster.answer = answer
        with pytest.raises(ApiError):
            at.tell(GRAVE)


def test_a_server_that_is_away_and_a_node_that_it_does_not_know_are_errors(keys: Keys) -> None:
    with asked(keys) as at, pytest.raises(ApiError, match="404: nodes g9 not found"):
        kubernetes.tell(Settings(at.path, "g9"), WELL, acting=True)
    with pytest.raises(ApiError, match="refused"):
        at.tell(WELL)


def test_a_token_that_has_expired_is_said_with_its_file(keys: Keys) -> None:
    with asked(keys, form="token") as at:
        at.path.write_text(at.path.read_text().replace("token: secret", "token: expired"))
        with pytest.raises(
            ApiError, match=f"401: Unauthorized; .*{at.path} is not known there, or has expired"
        ):
            at.tell(WELL)


def test_all_answers_together_have_an_end(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "SECONDS_IN_ALL", 0.0)
    with asked(keys) as at, pytest.raises(ApiError, match="0 s were not enough for its answers"):
        at.tell(WELL)


BROKEN = {
    "no file": (None, "No such file"),
    "empty": ("", "empty"),
    "no mapping": ("- a\n", "not a kubeconfig"),
    "another context": ("current-context: b\ncontexts: []\n", "no context b"),
    "flow": ("clusters: [{name: a}]\n", "line 1: .*only YAML in block form"),
    "quote": ('current-context: "a\n', "line 1: a text in quotes that does not end"),
    "depth": ("a:\n    b: c\n  d: e\n", "line 3: not in line"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_kubeconfig_that_cannot_be_used_says_why(tmp_path: Path, kind: str) -> None:
    text, said = BROKEN[kind]
    path = tmp_path / "kubelet.conf"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KubeconfigError, match=f"kubelet.conf.*{said}"):
        kubeconfig.load(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    token: secret\n", "    exec:\n      command: aws\n", "user: exec is not understood"),
        ("    token: secret\n", "    token: ''\n", "neither a client certificate .* nor a token"),
        ("    server: https:", "    server: http:", "expected https"),
        ("    server:", "    insecure-skip-tls-verify: true\n    server:", "the server would not be known"),
        ("    server:", "    proxy-url: http://p\n    server:", "cluster: proxy-url is not understood"),
        ("certificate-authority-data", "certificate-authority", "No such file|File name too long"),
        ("certificate-authority-data: ", "certificate-authority-data: !", "block form|not base64"),
    ],
)
def test_what_is_not_understood_or_not_safe_is_refused(keys: Keys, old: str, new: str, said: str) -> None:
    path = keys.folder / "refused"
    text = config("https://192.0.2.1:6443", keys, form="token")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(KubeconfigError, match=said):
        kubeconfig.load(path)


def test_json_and_yaml_of_the_same_kubeconfig_are_the_same(keys: Keys) -> None:
    text = config("https://192.0.2.1:6443", keys, form="data")
    document = kubeconfig.parsed(text)
    assert kubeconfig.parsed(json.dumps(document)) == document
    assert document["preferences"] == {}
    assert document["users"][0]["name"] == "system:node:g1"
    assert document["contexts"][0]["context"]["user"] == "system:node:g1"


PLAIN = st.text("abcXYZ019._-/@", min_size=1).filter(lambda text: text not in ("-", "---", "~", "null"))
TREES = st.recursive(
    PLAIN.filter(lambda text: not text.startswith(("-", "@"))),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(PLAIN.filter(lambda key: not key.startswith("-")), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES)
def test_block_form_is_read_as_it_was_written(tree: Any) -> None:
    yaml = pytest.importorskip("yaml")
    text = yaml.safe_dump(tree, default_flow_style=False, width=10_000)
    written = yaml.load(text, Loader=yaml.BaseLoader)
    if isinstance(tree, str):
        return  # a document of one text ends with a mark of its own
    assert kubeconfig.parsed(text) == written


@given(st.text() | st.text("ab:- \n'\"{}[]#|"))
@example("-")
@example("- " * 5000 + "a")
@example("- \n")
@example("a: b\n- c")
def test_no_text_is_more_than_wrong(text: str) -> None:
    with contextlib.suppress(ValueError):
        kubeconfig.parsed(text)


# ---- the command


def outcome_of(decision: Decision) -> Outcome:
    return Outcome(Device("g1", {}), [], decision, 0.0)


@dataclass
class Agent:
    """`provision-health VERB` on a node whose readings are all that a test says, with a memory of its own."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    outcome: Outcome = field(default_factory=lambda: outcome_of(WELL))

    def run(self, settings: Settings, verb: str) -> int:
        config = Config("g1", {}, self.folder / "health.prom", act=True, slurm=False, kubernetes=settings)
        self.monkeypatch.setattr(agent, "configured", lambda: config)
        return command.main([verb])

    @property
    def told(self) -> str:
        lines = (self.folder / "health.prom").read_text().splitlines()
        (line,) = (each for each in lines if each.startswith("provision_health_scheduler_told{"))
        return line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent(tmp_path, monkeypatch)
    monkeypatch.setattr(agent, "remembered", partial(agent.remembered, tmp_path))
    monkeypatch.setattr(agent, "examine", lambda *_, **__: made.outcome)
    return made


def test_what_could_not_be_told_is_remembered_until_it_was(
    keys: Keys, here: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    here.outcome = outcome_of(GRAVE)
    with asked(keys) as at:
        at.cluster.answer = b"?"
        here.run(at.settings, "watch")
        alert = "provision-health: ALERT: kubernetes could not be told: https://127.0.0.1"
        assert alert in capsys.readouterr().err
        assert here.told == 'provision_health_scheduler_told{scheduler="kubernetes"} 0'
        at.cluster.answer = None
        here.run(at.settings, "watch")
        assert capsys.readouterr().err == f"provision-health: tainted: {SAID}\n"
        assert here.told == 'provision_health_scheduler_told{scheduler="kubernetes"} 1'
        asked_before = len(at.cluster.calls)
        here.run(at.settings, "prolog")
        assert len(at.cluster.calls) == asked_before


def test_a_prolog_does_not_wait_for_a_server_that_is_asked(keys: Keys, here: Agent) -> None:
    with asked(keys) as at:
        seen: list[int] = []
        at.cluster.meanwhile = lambda: seen.append(here.run(at.settings, "prolog"))
        here.outcome = outcome_of(GRAVE)
        here.monkeypatch.setattr(agent, "QUICK_SECONDS", 0.2)
        assert here.run(at.settings, "watch") == 1
        assert seen == [1]  # for what it found


@pytest.mark.parametrize(("verb", "status"), [("prolog", 0), ("epilog", 0), ("watch", 1)])
def test_an_agent_that_another_one_keeps_waiting_says_so_and_a_prolog_does_not_drain_for_it(
    here: Agent, capsys: pytest.CaptureFixture[str], verb: str, status: int
) -> None:
    here.monkeypatch.setattr(agent, "QUICK_SECONDS", 0.1)
    with agent.remembered():
        assert here.run(Settings(Path("none"), "g1"), verb) == status
    assert capsys.readouterr().err == f"error: {here.folder}/lock: held by another agent for 0 s\n"


def test_what_the_server_has_can_be_asked_for(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with asked(keys) as at:
        monkeypatch.setattr(agent, "configured", lambda: Config("g1", {}, kubernetes=at.settings))
        assert command.main(["kubernetes"]) == 0
        assert json.loads(capsys.readouterr().out)["seconds"] is None
        at.tell(GRAVE, at=time.time() - 5)
        assert command.main(["kubernetes"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["status"], told["reason"], told["message"]) == ("True", "NeedsReset", SAID)
        assert 4 <= told["seconds"] <= 60
        at.cluster.answer = b"?"
        assert command.main(["kubernetes"]) == 1
        assert "error: https://127.0.0.1" in capsys.readouterr().err
    monkeypatch.setattr(agent, "configured", lambda: Config("g1", {}))
    assert command.main(["kubernetes"]) == 2
    assert "health.kubernetes" in capsys.readouterr().err
