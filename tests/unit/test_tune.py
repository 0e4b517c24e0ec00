"""`provision tune nccl`: what nodes have, what is worth a measurement, what is chosen, what is written."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.burnin.launch import JobState, LaunchError, Outcome
from provision.burnin.result import BurninResult
from provision.components.fabric.settings import FabricSettings
from provision.engine.remote import Output, RemoteError
from provision.errors import InputError
from provision.hardware.rdma import Port
from provision.report.model import Document, Verdict
from provision.site.load import examine_text
from provision.site.models import Fabric, Site
from provision.tune import decide, nccl, wiring
from provision.tune.decide import DEBUGGING, GID, HCAS, INTERFACES, KEYS, REPEATS, TRAFFIC_CLASS, Trial
from provision.tune.wiring import Gid, Wiring
from tests.unit.test_burnin_judge import H200, document
from tests.unit.test_burnin_judge_speed import all_reduce, transports
from tests.unit.test_burnin_run import Head

# ---- what a node says


def address(text: str, length: int) -> dict[str, Any]:
    return {"family": "inet6" if ":" in text else "inet", "local": text, "prefixlen": length}


ADDRESSES = json.dumps(
    [
        {"ifname": "lo", "flags": ["LOOPBACK", "UP"], "addr_info": [address("127.0.0.1", 8)]},
        {"ifname": "eno1", "flags": ["UP"], "addr_info": [address("10.1.0.7", 24), address("fe80::1", 64)]},
        {"ifname": "ens2", "flags": ["UP"], "addr_info": []},
    ]
)  # fmt: skip


def test_interfaces_are_those_that_are_up_with_their_ipv4_networks() -> None:
    assert wiring.parse_interfaces(ADDRESSES) == {
        "eno1": (ipaddress.IPv4Interface("10.1.0.7/24"),),
        "ens2": (),
    }
    with pytest.raises(ValueError, match="ip -j address"):
        wiring.parse_interfaces('[{"name": "eno1"}]')


def test_gids_and_traffic_classes_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    gids = {0: "fe80::1", 1: "::ffff:10.2.0.7", 2: "::"}
    for index, address in gids.items():
        (port / f"gids/{index}").write_text(f"{ipaddress.IPv6Address(address).exploded}\n")
        (port / f"gid_attrs/types/{index}").write_text("RoCE v2\n" if index == 1 else "IB/RoCE v1\n")
        (port / f"gid_attrs/ndevs/{index}").write_text("ens2\n")
    (tmp_path / "sys/class/infiniband/mlx5_0/tc/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/tc/1/traffic_class").write_text("Global tclass=160\n")
    (tmp_path / "sys/class/infiniband/mlx5_1/tc/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_1/tc/1/traffic_class").write_text("\n")

    def asked(script: str) -> str:
        script = script.replace("/sys/", f"{tmp_path}/sys/")
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout

    found = wiring.parse_gids(asked(wiring.GIDS))
    assert [(gid.device, gid.port, gid.index, gid.interface, gid.routable) for gid in found] == [
        ("mlx5_0", 1, 0, "ens2", False),
        ("mlx5_0", 1, 1, "ens2", True),
    ]
    assert wiring.parse_traffic_classes(asked(wiring.TRAFFIC_CLASSES)) == {"mlx5_0": 160}


@given(st.text())
def test_whatever_a_node_prints_is_read_or_refused(text: str) -> None:
    for parse in (wiring.parse_interfaces, wiring.parse_gids, wiring.parse_traffic_classes):
        try:
            parse(text)
        except ValueError:
            continue
    assert all(name.startswith("NCCL_") for name in wiring.parse_variables(text))


def test_what_cannot_be_read_is_told() -> None:
    answers = [Output(127, "", "sh: ip: not found"), *[Output(0, "", "")] * 5]
    assert wiring.wiring(answers) == Wiring(unread={"interfaces": "sh: ip: not found"})


def test_the_last_of_two_lines_counts() -> None:
    assert wiring.parse_variables("# NCCL_ALGO=Tree\nNCCL_IB_TC=1\nNCCL_IB_TC = 160 # lossless\n") == {
        "NCCL_IB_TC": "160"
    }


# ---- what is worth a measurement


def port(name: str, rate: float, state: str = "ACTIVE") -> Port:
    return Port(name, 1, state, "LinkUp", rate, "Ethernet")


def node(number: int, **changes: Any) -> Wiring:
    """A node with two rails of RoCE, a management interface and a bridge of its own."""

    def gids(device: str, network: str) -> list[Gid]:
        mapped = ipaddress.IPv6Address(f"::ffff:{network}.{number}")
        return [
            Gid(device, 1, 0, ipaddress.IPv6Address("fe80::1"), "IB/RoCE v1", None),
            Gid(device, 1, 3, mapped, "RoCE v2", None),
        ]

    good: dict[str, Any] = {
        "interfaces": {
            "docker0": (ipaddress.IPv4Interface("172.17.0.1/16"),),
            "eno1": (ipaddress.IPv4Interface(f"10.1.0.{number}/24"),),
            "ens2": (ipaddress.IPv4Interface(f"10.2.0.{number}/24"),),
        },
        "ports": tuple(port(f"mlx5_{each}", rate) for each, rate in enumerate((400, 400, 25))),
        "gids": tuple(gids("mlx5_0", "10.2.0") + gids("mlx5_1", "10.3.0")),
        "traffic_classes": {"mlx5_0": 160, "mlx5_1": 160},
    }  # fmt: skip
    return Wiring(**good | changes)


ROCE = Fabric(kind="roce", rails=2)
NOTHING = FabricSettings()


def offered(nodes: Sequence[Wiring], key: tuple[str, ...], fabric: Fabric | None = ROCE) -> list[Any]:
    return list(decide.choices({f"n{n}": each for n, each in enumerate(nodes)}, fabric, key, NOTHING)[0])


def test_what_all_nodes_have_is_offered() -> None:
    nodes = [node(1), node(2)]
    assert offered(nodes, INTERFACES) == [["eno1"], ["ens2"]]
    assert offered(nodes, HCAS) == [["mlx5_0", "mlx5_1"]]
    assert offered(nodes, GID) == [3]
    assert offered(nodes, TRAFFIC_CLASS) == [160]


def test_a_bridge_with_the_same_address_everywhere_is_no_way_between_nodes() -> None:
    """NCL-04"""
    same = {"br_storage": (ipaddress.IPv4Interface("172.30.0.1/16"),)}
    assert offered([node(1, interfaces=same), node(2, interfaces=same)], INTERFACES) == []


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        (INTERFACES, {"interfaces": {"eno1": (ipaddress.IPv4Interface("10.9.0.2/24"),)}}),
        (INTERFACES, {"interfaces": {"eno1": ()}}),
        (HCAS, {"ports": ()}),
        (HCAS, {"ports": (port("mlx5_0", 400, "DOWN"), port("mlx5_1", 400))}),
        (GID, {"gids": ()}),
        (GID, {"gids": node(2).gids[:2]}),  # of one adapter alone
        (TRAFFIC_CLASS, {"traffic_classes": {"mlx5_0": 160, "mlx5_1": 0}}),
        (TRAFFIC_CLASS, {"traffic_classes": {}}),
    ],
)  # fmt: skip
def test_what_one_node_lacks_is_offered_to_none(key: tuple[str, ...], changes: dict[str, Any]) -> None:
    assert offered([node(1), node(2, **changes)], key) == []


def test_without_roce_there_are_neither_gids_nor_traffic_classes_to_choose() -> None:
    for fabric in (Fabric(kind="infiniband", rails=2), Fabric(kind="ethernet"), None):
        assert (
            offered([node(1), node(2)], GID, fabric)
            == offered([node(1), node(2)], TRAFFIC_CLASS, fabric)
            == []
        )
    assert offered([node(1), node(2)], HCAS, Fabric(kind="ethernet")) == []


def test_ports_of_an_nvswitch_and_of_storage_are_no_rails() -> None:
    ports = (*node(1).ports, Port("ibp1", 1, "ACTIVE", "LinkUp", 800, "Ethernet", nvswitch=True))
    assert offered([node(1, ports=ports), node(2, ports=ports)], HCAS) == [["mlx5_0", "mlx5_1"]]


def test_of_an_adapter_with_two_ports_the_port_is_named() -> None:
    ports = tuple(Port("mlx5_0", number, "ACTIVE", "LinkUp", 200, "Ethernet") for number in (1, 2))
    assert offered([node(1, ports=ports)] * 2, HCAS) == [["mlx5_0:1", "mlx5_0:2"]]


# ---- what is chosen

RATES = st.lists(st.floats(1, 500), min_size=0, max_size=5).map(tuple)
TRIALS = st.builds(Trial, st.just(NOTHING), RATES, st.sampled_from(["", "it did not finish"]))


@given(TRIALS, TRIALS)
def test_only_what_is_better_beyond_noise_is_better(trial: Trial, than: Trial) -> None:
    if decide.better(trial, than):
        assert not trial.why
        assert not than.why
        assert len(trial.rates) >= REPEATS <= len(than.rates)
        assert min(trial.rates) > max(than.rates)
        assert trial.rate >= 1.05 * than.rate
        assert not decide.better(than, trial)


@pytest.mark.parametrize(
    ("rates", "better"),
    [((96, 97, 98), True), ((96, 97, 91), False), ((92, 92.5, 93), False), ((96, 97), False)],
)
def test_better(rates: tuple[float, ...], better: bool) -> None:
    assert decide.better(Trial(NOTHING, rates), Trial(NOTHING, (89, 90, 91))) is better


def simulated(gains: Mapping[str, float], seed: int, noise: float = 0.02) -> decide.Measure:
    """A cluster of 40 GB/s where a setting that holds a word of `gains` is so much faster."""
    dice = random.Random(seed)

    def measure(settings: Sequence[FabricSettings]) -> list[Trial]:
        def rates(wanted: FabricSettings) -> tuple[float, ...]:
            text, rate = str(wanted.model_dump()), 40.0
            for word, gain in gains.items():
                rate *= gain if word in text else 1
            return tuple(rate * dice.gauss(1, noise) for _ in range(REPEATS))

        return [Trial(wanted, rates(wanted)) for wanted in settings]

    return measure


def searched(measure: decide.Measure, now: FabricSettings = NOTHING) -> dict[tuple[str, ...], Any]:
    nodes = {"n1": node(1), "n2": node(2)}
    found = decide.search(now, lambda key, wanted: decide.choices(nodes, ROCE, key, wanted), measure)
    return {each.key: decide.value(each.chosen.wanted, each.key) for each in found if each.chosen}


def test_where_nothing_is_faster_nothing_is_chosen() -> None:
    """200 clusters whose measurements lie apart by 2 % (standard deviation)."""
    assert [seed for seed in range(200) if searched(simulated({}, seed))] == []


def test_a_setting_that_is_a_fifth_faster_is_found() -> None:
    for seed in range(200):
        found = searched(simulated({"NCCL_IB_TC': 160": 1.2, "mlx5_1": 1.3}, seed))
        assert found == {HCAS: ["mlx5_0", "mlx5_1"], TRAFFIC_CLASS: 160}, seed


def test_what_proved_better_stands_while_the_rest_is_tried() -> None:
    tried: list[FabricSettings] = []
    measure = simulated({"mlx5_1": 1.5}, 1)

    def watched(settings: Sequence[FabricSettings]) -> Sequence[Trial]:
        tried.extend(settings)
        return measure(settings)

    searched(watched)
    assert all(each.hcas == ["mlx5_0", "mlx5_1"] for each in tried[4:])


@given(st.integers(0, 10**6), st.dictionaries(st.sampled_from(sorted(DEBUGGING)), st.just("1")))
def test_nothing_but_the_four_keys_is_ever_changed(seed: int, debugging: dict[str, str]) -> None:
    now = FabricSettings.model_validate({"nccl": {**debugging, "NCCL_IB_TIMEOUT": 22}})
    gains = {"mlx5_1": 1.5, "NCCL_IB_TC': 160": 1.5, "NCCL_IB_GID_INDEX': 3": 1.5, "ens2": 1.5}
    chosen = searched(simulated(gains, seed), now)
    assert set(chosen) == set(KEYS)
    assert not any(key[-1] in DEBUGGING for key in chosen)
    after = now
    for key, value in chosen.items():
        after = decide.changed(after, key, value)
    assert {
        name: value for name, value in after.nccl.items() if name not in (GID[-1], TRAFFIC_CLASS[-1])
    } == now.nccl


# ---- the verb, on a Slurm that is played

SITE = """# ours
cluster: tiny
groups:
  head: {hosts: h1, roles: [head]}
  gpu:
    hosts: n[1-2]   # rack 7
    addresses: 10.0.0.[1-2]
    roles: [worker]
    gpu: {model: h200-sxm, count: 8}
networks: {fabric: {kind: roce, rails: 2}}
scheduler: {slurm: {}}
fabric: {}  # RDMA
"""


class Cluster(Head):
    """Runs the collectives as fast as the variables of the job say."""

    def __init__(self, rate: Callable[[str], float | None], network: str = "IB") -> None:
        super().__init__({"n1": None, "n2": None}, None)
        self.rate, self.network = rate, network

    def _submit(self, script: bytes | None) -> str | None:
        number = super()._submit(script)
        rate = self.rate(self.scripts[-1])
        run = {"collectives": all_reduce(rate or 0, 16), "transports": transports(16, network=self.network)}
        self.result = json.dumps(document(H200, 8, 2, **run)) if rate else None
        return number


def site_of(folder: Path, text: str = SITE) -> Site:
    (folder / "tiny.yml").write_text(text)
    found = examine_text(text, folder / "tiny.yml")
    assert found.site is not None, found.problems
    return found.site


Answers = Mapping[str, Wiring | RemoteError]
Tuned = Callable[..., Document]


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    def tuned(site: Site, head: Cluster, *, accept: bool = False, answers: Answers | None = None) -> Document:
        monkeypatch.setattr(nccl, "connect", lambda *_, **__: SimpleNamespace(run=head, close=lambda: None))
        monkeypatch.setattr(nccl, "ask", lambda *_, **__: answers or {"n1": node(1), "n2": node(2)})
        nodes = list(site.nodes.values())
        return nccl.tune(site, nodes, sudo_password=None, accept=accept, wait=5, progress=lambda line: None)[
            1
        ]

    return tuned


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def faster(word: str, gain: float = 1.2) -> Callable[[str], float | None]:
    return lambda script: 40 * (gain if word in script else 1)


def about(found: Document, subject: str) -> tuple[str, Verdict]:
    (finding,) = (each for each in found.findings if each.subject == subject)
    return finding.check, finding.verdict


def test_what_is_faster_is_proposed_and_the_file_left_alone(tmp_path: Path, tuned: Tuned) -> None:
    head = Cluster(faster("NCCL_IB_TC=160"))
    found = tuned(site_of(tmp_path), head)
    assert found.verdict is Verdict.WARN
    assert about(found, "fabric.nccl.NCCL_IB_TC") == ("site-file-lacks", Verdict.WARN)
    assert about(found, "fabric.hcas") == ("nccl-setting", Verdict.PASS)
    assert "+fabric: {nccl: {NCCL_IB_TC: 160}}  # RDMA" in found.details["diff"]
    assert (tmp_path / "tiny.yml").read_text() == SITE
    assert head.reserved == {}
    assert len(head.scripts) == REPEATS * (2 + 2 + 2 + 2 + 3)  # the traffic class twice
    measured = next(each for each in found.details["measured"] if each["chosen"])
    assert measured == {
        "key": "fabric.nccl.NCCL_IB_TC",
        "value": 160,
        "chosen": True,
        "rates": (48,) * 6,
        "why": "",
    }


def test_accepted_it_stands_in_the_file_and_is_not_proposed_again(tmp_path: Path, tuned: Tuned) -> None:
    head = Cluster(faster("NCCL_IB_HCA==mlx5_0,mlx5_1"))
    assert tuned(site_of(tmp_path), head, accept=True).verdict is Verdict.PASS
    text = (tmp_path / "tiny.yml").read_text()
    assert text == SITE.replace("fabric: {}", "fabric: {hcas: [mlx5_0, mlx5_1]}")
    again = tuned(site_of(tmp_path, text), head)
    assert again.details["diff"] == ""
    assert about(again, "fabric.hcas") == ("nccl-setting", Verdict.SKIP)


def test_the_settings_of_one_group_are_written_there(tmp_path: Path) -> None:
    other = '  big: {hosts: "n[3-4]", roles: [worker], gpu: {model: h200-sxm, count: 8}}\nnetworks:'
    site = site_of(tmp_path, SITE.replace("networks:", other))
    members = [site.nodes["n1"], site.nodes["n2"]]
    assert nccl.place(site, members) == ("groups", "gpu", "settings", "fabric")
    with pytest.raises(InputError, match="--limit GROUP"):
        nccl.place(site, [*members, site.nodes["n3"]])


def test_a_setting_that_cannot_be_measured_is_unknown_and_never_chosen(tmp_path: Path, tuned: Tuned) -> None:
    head = Cluster(lambda script: None if "NCCL_IB_GID_INDEX=3" in script else 40)
    found = tuned(site_of(tmp_path), head)
    assert found.verdict is Verdict.UNKNOWN
    checks = [(each.check, each.verdict) for each in found.findings if each.subject.endswith("GID_INDEX")]
    assert checks == [("nccl-setting", Verdict.PASS), ("nccl-setting", Verdict.UNKNOWN)]
    assert found.details["diff"] == ""


def test_where_the_file_as_it_is_cannot_be_measured_nothing_is_better(tmp_path: Path, tuned: Tuned) -> None:
    head = Cluster(lambda script: 40 if "NCCL_IB_HCA" in script.split("burnin.pyz")[0] else None)
    found = tuned(site_of(tmp_path), head, accept=True)
    assert found.verdict is Verdict.UNKNOWN
    assert (tmp_path / "tiny.yml").read_text() == SITE


def test_a_run_by_sockets_tells_nothing_of_the_fabric(tmp_path: Path, tuned: Tuned) -> None:
    found = tuned(site_of(tmp_path), Cluster(lambda script: 40, "Socket"))
    assert found.verdict is Verdict.UNKNOWN
    assert "by sockets" in str(found.findings[0].why)


def test_debugging_variables_are_told_with_their_place_and_never_written(
    tmp_path: Path, tuned: Tuned
) -> None:
    text = SITE.replace("fabric: {}", "fabric: {nccl: {NCCL_PROTO: Simple}}")
    answers = {
        "n1": node(1, configuration={"NCCL_BUFFSIZE": "8388608", "NCCL_IB_TC": "160"}),
        "n2": node(2, environment={"NCCL_ALGO": "Ring"}),
    }
    found = tuned(site_of(tmp_path, text), Cluster(faster("ens2")), accept=True, answers=answers)
    told = [
        (each.subject, each.read, each.source)
        for each in found.findings
        if each.check == "nccl-debugging-variable"
    ]
    assert told == [
        ("n1", "NCCL_BUFFSIZE=8388608", "/etc/nccl.conf"),
        ("n1", "NCCL_PROTO=Simple", "fabric.nccl of the site file"),
        ("n2", "NCCL_ALGO=Ring", "environment of a login"),
        ("n2", "NCCL_PROTO=Simple", "fabric.nccl of the site file"),
    ]  # fmt: skip
    written = (tmp_path / "tiny.yml").read_text()
    assert "fabric: {nccl: {NCCL_PROTO: Simple}, interfaces: [ens2]}" in written


def test_a_node_that_cannot_be_asked_is_unknown_and_the_rest_too_few(tmp_path: Path, tuned: Tuned) -> None:
    answers: Answers = {"n1": node(1), "n2": RemoteError("n2: no route")}
    found = tuned(site_of(tmp_path), Cluster(lambda script: 40), answers=answers)
    assert found.nodes["n2"].verdict is Verdict.UNKNOWN
    assert "1 nodes answered" in next(
        str(each.why) for each in found.findings if each.check == "nccl-measured"
    )


def test_a_drained_node_is_not_measured_on(tmp_path: Path, tuned: Tuned) -> None:
    head = Cluster(lambda script: 40)
    head.reasons["n2"] = "bad fan"
    found = tuned(site_of(tmp_path), head)
    assert found.verdict is Verdict.UNKNOWN
    assert "n2 takes no jobs: drained: bad fan" in str(found.findings[-1].why)
    assert head.scripts == []


def test_whatever_ends_the_measuring_frees_the_nodes(tmp_path: Path, tuned: Tuned) -> None:
    def broken(script: str) -> float | None:
        raise RemoteError("connection lost")

    head = Cluster(broken)
    found = tuned(site_of(tmp_path), head)
    assert found.verdict is Verdict.UNKNOWN
    assert head.reserved == {}


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        (("fabric: {}  # RDMA\n", ""), "has no `fabric"),
        (("h200-sxm, count: 8}", "h200-sxm, count: 8}\nburnin: {device: cpu}"), "takes two"),
        (("n[1-2]   # rack 7\n    addresses: 10.0.0.[1-2]", "n1"), "takes two"),
        (("fabric: {}", "fabric: {nccl: {NCCL_IB_HCA: mlx5_3}}"), "wins over fabric.hcas"),
        (("fabric: {}", "fabric: {nccl: {NCCL_IB_TC: high}}"), "NCCL_IB_TC: high is no number"),
        (("scheduler", "nodes: {n1: {settings: {fabric: {acs: off}}}}\nscheduler"), "other fabric settings"),
    ],
)  # fmt: skip
def test_wrong_input_is_told_before_anything_is_done(
    tmp_path: Path, instead: tuple[str, str], said: str
) -> None:
    site = site_of(tmp_path, SITE.replace(*instead))
    with pytest.raises(InputError, match=re.escape(said)):
        nccl.workers(site, list(site.nodes.values()))


def test_a_run_that_slurm_refuses_makes_its_setting_unknown(tmp_path: Path) -> None:
    def refused(environment: Mapping[str, str]) -> Outcome:
        raise LaunchError("sbatch refused the burn-in: no such account")

    (trial,) = nccl.measuring(site_of(tmp_path), refused, lambda line: None)([NOTHING])
    assert "no such account" in trial.why


def test_wrong_elements_are_no_speed() -> None:
    rows = all_reduce(40, 16)
    rows[0]["wrong"] = [0] * 15 + [2]
    result = BurninResult.model_validate(document(H200, 8, 2, collectives=rows, transports=transports(16)))
    assert nccl.trial(NOTHING, ROCE, [(result, "")]).why == "all_reduce: 2 wrong elements"


def test_without_a_scheduler_the_ranks_get_the_variables_over_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, ...]] = []

    class Played:
        def __init__(self, shells: Mapping[str, object], *_: object, **__: object) -> None:
            assert list(shells) == ["n1", "n2"]

        def run(self, *arguments: Any) -> Outcome:
            started.append(arguments)
            run = {"collectives": all_reduce(40, 16), "transports": transports(16)}
            return Outcome("unit", JobState("ENDED"), json.dumps(document(H200, 8, 2, **run)), "/run", [])

    monkeypatch.setattr(nccl, "Direct", Played)
    monkeypatch.setattr(nccl, "connect", lambda *_, **__: SimpleNamespace(run=None, close=lambda: None))
    monkeypatch.setattr(nccl, "ask", lambda *_, **__: {"n1": node(1), "n2": node(2)})
    site = site_of(tmp_path, SITE.replace("scheduler: {slurm: {}}\n", ""))
    _, found = nccl.tune(
        site, list(site.nodes.values()), sudo_password=None, accept=False, wait=5, progress=lambda line: None
    )
    assert found.verdict is Verdict.PASS
    assert {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "106"} in [arguments[-1] for arguments in started]
    assert all(arguments[2] == 8 and "collectives" in arguments[4] for arguments in started)
