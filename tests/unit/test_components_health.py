"""Health on a site: what the agents are told, and what the whole cluster says."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from provision.components.health import checks, exports
from provision.components.slurm import exports as slurm
from provision.engine.remote import Output, RemoteError
from provision.health import agent, kubernetes
from provision.profiles import distribution
from provision.report.model import Verdict
from provision.site.lock import Lock
from provision.site.models import Hardware, Site, SiteFile
from provision.verify import health as agents
from provision.verify.check import Target

DEBIAN = distribution("debian", "13")
LOCK = Lock(
    hardware={"g1": Hardware(sockets=2, cores=16, threads=2, memory=256000)}, release={"nvidia": "580.95.05"}
)


def make_site(tmp_path: Path, health: dict[str, Any] | None = None, **document: Any) -> Site:
    groups = {
        "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head", "monitor"]},
        "gpu": {
            "hosts": "g[1-2]",
            "addresses": "198.51.100.[11-12]",
            "roles": ["worker"],
            "gpu": {"model": "h100-sxm", "count": 8},
            "settings": {"health": {"ports": {"mlx5_0": 400}}},
        },
    }
    whole = {
        "cluster": "tiny",
        "groups": groups,
        "ssh": {},
        "scheduler": {"slurm": {}},
        "monitoring": {},
        "base": {"swap": "off"},
        "health": health or {},
        **document,
    }
    return Site.from_file(SiteFile.model_validate(whole), tmp_path / "tiny.yml")


def config(site: Site, node: str) -> dict[str, Any]:
    told = json.loads(exports.config_json(site, LOCK, site.nodes[node], DEBIAN, {}))
    assert isinstance(told, dict)
    return told


def test_an_agent_is_told_what_the_site_says_of_its_node(tmp_path: Path) -> None:
    told = config(make_site(tmp_path), "g1")
    assert told["slurm"] is True
    assert told["mounts"] == ["/"]
    assert told["textfile"].endswith("/provision-health.prom")
    expect = told["expect"]
    assert {key: expect[key] for key in ("gpus", "model", "driver", "swap", "ports", "governor")} == {
        "gpus": 8,
        "model": "h100-sxm",
        "driver": "580.95.05",
        "swap": False,
        "ports": {"mlx5_0": 400.0},
        "governor": "performance",
    }
    assert expect["hardware"] == {"cpus": 64, "memory": 256000}
    assert expect["real_memory"] < 256000
    assert {"slurmd", "munge", "prometheus-node-exporter"} <= set(expect["services"])


def test_a_head_without_gpus_is_expected_to_have_none_and_no_slurmd(tmp_path: Path) -> None:
    told = config(make_site(tmp_path), "h1")
    assert "gpus" not in told["expect"]
    assert "slurmd" not in told["expect"]["services"]
    assert told["slurm"] is False


def test_slurm_calls_the_agent_where_health_is_named_and_a_program_of_the_site_wins(tmp_path: Path) -> None:
    def program(**document: Any) -> list[str]:
        site = make_site(tmp_path, **document)
        text = slurm.slurm_conf(site, LOCK, profile=DEBIAN)
        return [line for line in text.splitlines() if line.startswith("HealthCheckProgram")]

    assert program() == ["HealthCheckProgram=/usr/local/lib/provision/health-slurm"]
    assert program(scheduler={"slurm": {"health_check": "/usr/sbin/nhc"}}) == [
        "HealthCheckProgram=/usr/sbin/nhc"
    ]


def test_kubernetes_is_told_by_the_kubelets_own_access_where_the_site_wants_it(tmp_path: Path) -> None:
    assert config(make_site(tmp_path), "g1")["kubernetes"] is None
    assert config(make_site(tmp_path, {"kubernetes": {}}), "g1")["kubernetes"] == {
        "kubeconfig": "/etc/kubernetes/kubelet.conf",
        "node": "g1",
        "taint": None,
    }
    own = {"kubeconfig": "/etc/provision/health.kubeconfig", "node": "g1.example", "taint": "NoSchedule"}
    assert config(make_site(tmp_path, {"kubernetes": own}), "g1")["kubernetes"] == own
    path = tmp_path / "health.json"
    path.write_text(json.dumps(config(make_site(tmp_path, {"kubernetes": own}), "g1")))
    assert agent.configured(path).kubernetes == kubernetes.Settings(
        Path(own["kubeconfig"]), "g1.example", "NoSchedule"
    )
    with pytest.raises(ValidationError, match="an absolute path on the node"):
        make_site(tmp_path, {"kubernetes": {"kubeconfig": "kubelet.conf"}})


def test_what_is_left_out_is_not_expected(tmp_path: Path) -> None:
    expect = config(make_site(tmp_path, {"thresholds": {"link_flaps": 5}, "roce": {"mtu": 4096}}), "g2")[
        "expect"
    ]
    assert (expect["thresholds"], expect["roce"]) == ({"link_flaps": 5.0}, {"mtu": 4096})
    assert not {"nvme", "mrrs", "topology", "nic_firmware", "nvlink_domain", "act"} & set(expect)


# ---- all agents at once

GOOD = {
    "verdict": "pass",
    "nodes": {"x": {"verdict": "pass", "reason": None}},
    "findings": [{"verdict": "pass", "check": "nvml", "subject": "GPU 0", "action": None}],
    "details": {
        "action": None,
        "about": {
            "driver": "580.95.05",
            "gpus": [
                {"index": n, "name": "NVIDIA H100 80GB HBM3", "vbios": "96.00.01", "clock": 1980}
                for n in range(2)
            ],
        },
    },
}


@dataclass
class Shell:
    """A node that answers as written."""

    answer: Output | Exception
    commands: list[str] = field(default_factory=list)

    def run(self, command: str, timeout: float = 1.0) -> Output:
        self.commands.append(command)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.commands.append("close")


def asked(tmp_path: Path, **answers: Output | Exception) -> list[agents.Answer]:
    site = make_site(tmp_path)
    shells = {name: Shell(answer) for name, answer in answers.items()}
    nodes = [site.nodes[name] for name in answers]
    return agents.ask(site, nodes, reach=lambda site, node, password: shells[node.name])  # type: ignore[arg-type, return-value]


def well(**about: Any) -> Output:
    document = json.loads(json.dumps(GOOD))
    document["details"]["about"].update(about)
    return Output(0, json.dumps(document), "")


def test_a_node_that_cannot_be_reached_or_does_not_answer_is_unknown_with_its_reason(tmp_path: Path) -> None:
    found = asked(tmp_path, h1=well(), g1=RemoteError("g1: no route"), g2=Output(127, "", "sh: not found"))
    assert [(each.node, each.verdict) for each in found] == [
        ("h1", Verdict.PASS),
        ("g1", Verdict.UNKNOWN),
        ("g2", Verdict.UNKNOWN),
    ]
    assert "no route" in str(found[1].reason)
    assert found[2].reason == "there is no agent on it"
    assert "Killed, exit 137" in str(agents.parse("g2", 137, "", "Killed").reason)
    assert found[0].findings[0].subject == "h1 GPU 0"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": {}}', json.dumps({**GOOD, "verdict": "fine"})])
def test_an_answer_of_another_form_is_unknown(text: str) -> None:
    assert agents.parse("g1", 0, text, "").verdict is Verdict.UNKNOWN


def test_an_odd_driver_firmware_or_clock_is_told_of_the_one_that_has_it(tmp_path: Path) -> None:
    gpus = [{"index": 0, "name": "NVIDIA H100 80GB HBM3", "vbios": "96.00.09", "clock": 1700}]
    found = agents.fleet(asked(tmp_path, h1=well(), g1=well(), g2=well(driver="580.82.07", gpus=gpus)))
    assert [(each.check, each.subject) for each in found] == [
        ("uniform", "g2"),
        ("uniform", "g2 GPU 0"),
        ("sm-clock", "g2 GPU 0"),
    ]
    assert all(each.verdict is Verdict.WARN for each in found)
    assert agents.fleet(asked(tmp_path, h1=well(), g1=well())) == []


DAY = 86400.0


def said(*verdicts: str, every: float = 3600.0, node: str = "g1") -> list[agents.Change]:
    """What a node said, the last time just now."""
    return [
        agents.Change(DAY - every * (len(verdicts) - 1 - place), node, verdict)
        for place, verdict in enumerate(verdicts)
    ]


@pytest.mark.parametrize(
    ("history", "flaps"),
    [
        (said("pass", "fail", "pass", "fail"), True),
        (said("pass", "fail", "pass", "unknown", "pass"), True),
        (said("pass", "fail", "pass"), False),
        (said("pass", "fail", "fail", "pass"), False),
        (said("pass", "fail", "pass", "fail", every=12 * 3600.0), False),
        ([*said("pass", "fail"), *said("fail", "pass", node="g2")], False),
    ],
)
def test_a_node_that_changes_its_verdict_again_and_again_within_a_day_flaps(
    history: list[agents.Change], flaps: bool
) -> None:
    found = agents.flapping(history, ["g1", "g2"], DAY)
    assert [(each.check, each.subject) for each in found] == ([("health-flapping", "g1")] if flaps else [])


def test_only_what_changed_is_remembered() -> None:
    def answer(node: str, verdict: Verdict, reason: str | None = None) -> agents.Answer:
        return agents.Answer(node, verdict, reason)

    first = agents.changes(
        [], [answer("g1", Verdict.PASS), answer("g2", Verdict.WARN, "clock 1 ms off")], 1.0
    )
    assert [each.node for each in first] == ["g1", "g2"]
    again = [answer("g1", Verdict.PASS), answer("g2", Verdict.WARN, "clock 3 ms off")]
    assert agents.changes(first, again, 2.0) == []
    other = [answer("g1", Verdict.FAIL, "xid 79"), answer("g2", Verdict.WARN, "swap on")]
    assert agents.changes(first, other, 3.0) == [
        agents.Change(3.0, "g1", "fail", "xid 79"),
        agents.Change(3.0, "g2", "warn", "swap on"),
    ]


def test_the_whole_is_as_bad_as_its_worst_node(tmp_path: Path) -> None:
    answers = asked(tmp_path, h1=well(), g1=RemoteError("g1: no route"))
    document = agents.document(make_site(tmp_path), answers, [], 0.0)
    assert (document.verb, document.verdict, document.nodes["h1"].verdict) == (
        "health",
        Verdict.UNKNOWN,
        Verdict.PASS,
    )


def test_the_switch_is_one_file_on_each_node(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    shells = {"g1": Shell(Output(0, "", "")), "g2": Shell(RemoteError("g2: no route"))}
    nodes = [site.nodes[name] for name in shells]
    found = agents.switch(site, nodes, "off", reach=lambda site, node, password: shells[node.name])  # type: ignore[arg-type, return-value]
    assert [(each.subject, each.verdict) for each in found] == [("g1", Verdict.PASS), ("g2", Verdict.UNKNOWN)]
    assert shells["g1"].commands == ["touch /etc/provision/health.off", "close"]


# ---- checks


class Host:
    def __init__(self, rc: int, stdout: str = "", stderr: str = "") -> None:
        self.answer = Output(rc, stdout, stderr)

    def run(self, command: str, *arguments: str) -> Output:
        return self.answer


def target(tmp_path: Path, host: Host, health: dict[str, Any] | None = None) -> Target:
    site = make_site(tmp_path, health)
    return Target(site, site.nodes["g1"], "health", LOCK, DEBIAN, host)


@pytest.mark.parametrize(
    ("check", "host", "verdict"),
    [
        (checks.recent, Host(0, "12\n"), Verdict.PASS),
        (checks.recent, Host(0, "9000\n"), Verdict.FAIL),
        (checks.recent, Host(3), Verdict.FAIL),
        (checks.recent, Host(2, "", "stat: Permission denied"), Verdict.UNKNOWN),
        (checks.acts, Host(1), Verdict.PASS),
        (checks.acts, Host(0), Verdict.WARN),
        (checks.acts, Host(127, "", "sh: broken"), Verdict.UNKNOWN),
        (checks.node_health, Host(0, json.dumps(GOOD)), Verdict.PASS),
        (
            checks.node_health,
            Host(1, json.dumps({**GOOD, "verdict": "fail", "nodes": {"x": {"reason": "xid"}}})),
            Verdict.FAIL,
        ),
        (
            checks.node_health,
            Host(1, json.dumps({**GOOD, "verdict": "unknown", "nodes": {"x": {"reason": "nvml"}}})),
            Verdict.UNKNOWN,
        ),
        (checks.node_health, Host(127, "", "not found"), Verdict.UNKNOWN),
    ],
)
def test_checks_of_the_agent(tmp_path: Path, check: Any, host: Host, verdict: Verdict) -> None:
    assert check.run(target(tmp_path, host)).verdict is verdict


@pytest.mark.parametrize(
    ("host", "verdict"),
    [
        (Host(0, '{"seconds": 200}'), Verdict.PASS),
        (Host(0, '{"seconds": 1000}'), Verdict.FAIL),
        (Host(0, '{"seconds": null}'), Verdict.FAIL),
        (Host(0, "{}"), Verdict.UNKNOWN),
        (Host(1, "", "error: https://192.0.2.1:6443: 403: forbidden"), Verdict.UNKNOWN),
    ],
)
def test_kubernetes_has_heard_of_the_node_lately(tmp_path: Path, host: Host, verdict: Verdict) -> None:
    assert checks.kubernetes.run(target(tmp_path, host, {"kubernetes": {}})).verdict is verdict
    assert checks.kubernetes.run(target(tmp_path, host)).verdict is Verdict.SKIP


def test_an_agent_that_only_tells_need_not_act(tmp_path: Path) -> None:
    assert checks.acts.run(target(tmp_path, Host(0), {"act": False})).verdict is Verdict.SKIP
