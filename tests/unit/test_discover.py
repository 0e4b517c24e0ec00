"""What machines have, as lines for the site file: proposed, compared within a group, put into the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from provision.discover import edit
from provision.discover.discover import Discovery, node_results, silent
from provision.discover.propose import cores_near, proposals, unlike
from provision.engine.remote import RemoteError
from provision.errors import InputError
from provision.hardware import smi
from provision.hardware.machine import Board, Cpus, Machine, Numa
from provision.hardware.pci import Function
from provision.hardware.rdma import Port
from provision.report.model import Finding, Verdict
from provision.site.load import examine_text
from provision.site.models import Site
from provision.verify.progress import watching

TEXT = """# ours
cluster: tiny
groups:
  head: {hosts: h1, roles: [head]}
  gpu:
    hosts: g[1-4]   # rack 7
    roles: [worker]

scheduler: {slurm: {}}
"""
CPUS = Cpus("A CPU", 2, 32, 2, 1031600)


def gpu(number: int, device: int = 0x2330) -> Function:
    link = (16, 16, 32.0, 32.0)
    return Function(f"0000:{number:02x}:00.0", 0x10DE, device, 0x030200, number // 4, *link)


def port(number: int, state: str = "ACTIVE", rate: float = 400.0) -> Port:
    return Port(f"mlx5_{number}", 1, state, "LinkUp", rate, "InfiniBand", firmware="28.39")


DGX = Machine(
    CPUS,
    (Numa(0, "0-31,64-95", 515800), Numa(1, "32-63,96-127", 515800)),
    tuple(gpu(number) for number in range(8)),
    tuple(port(number) for number in range(8)),
    board=Board("NVIDIA", "DGXH100", "S1", "1.6.7"),
)


def site(text: str = TEXT) -> Site:
    examined = examine_text(text, Path("/tiny.yml"))
    assert examined.site is not None, examined.problems
    return examined.site


def machines(*found: Machine) -> dict[str, Machine]:
    return {f"g{number}": machine for number, machine in enumerate(found, 1)}


def of_group(text: str = TEXT, *found: Machine) -> dict[str, object]:
    return {".".join(each.key): dict(each.value) for each in proposals(site(text), machines(*found))}


# ---- what is proposed


def test_a_file_that_only_names_hosts_gets_all_lines() -> None:
    assert of_group(TEXT, DGX, DGX) == {
        "groups.gpu.gpu": {"model": "h100-sxm", "count": 8, "cores": ["0-31", "32-63"]},
        "groups.gpu.hardware": {"sockets": 2, "cores": 32, "threads": 2, "memory": 1031600},
        "networks.fabric": {"kind": "infiniband", "rails": 8},
    }


def test_what_the_file_says_already_is_not_proposed() -> None:
    found = Discovery(site(), TEXT, machines(DGX))
    again = Discovery(site(found.text), found.text, machines(DGX))
    assert again.proposals == []
    assert again.diff == ""


def test_one_machine_that_lacks_a_gpu_does_not_make_the_group_smaller() -> None:
    """INV-19: the facts of one node were taken for all."""
    seven = replace(DGX, functions=DGX.functions[:7])
    found = machines(seven, DGX, DGX)
    assert of_group(TEXT, *found.values())["groups.gpu.gpu"] == {
        "model": "h100-sxm",
        "count": 8,
        "cores": ["0-31", "32-63"],
    }
    (finding,) = unlike(site(), found)
    assert (finding.check, finding.subject, finding.verdict) == ("machine-unlike-group", "g1", Verdict.WARN)
    assert (finding.read, finding.expected) == ("GPUs 7 x h100-sxm", "8 x h100-sxm, as most of group gpu")


def test_the_least_memory_of_equal_machines_counts_and_half_of_it_is_told() -> None:
    little_less = replace(DGX, cpus=replace(CPUS, memory=1031000))
    half = replace(DGX, cpus=replace(CPUS, memory=515000))
    found = machines(DGX, little_less, DGX, half)
    hardware = of_group(TEXT, *found.values())["groups.gpu.hardware"]
    assert isinstance(hardware, dict)
    assert hardware["memory"] == 1031000
    (finding,) = unlike(site(), found)
    assert (finding.subject, finding.read) == ("g4", "memory 515000 MiB")


def test_models_that_are_mixed_in_a_machine_cannot_be_said() -> None:
    mixed = replace(DGX, functions=(gpu(0), gpu(1, 0x2335)))
    assert "groups.gpu.gpu" not in of_group(TEXT, mixed)


def test_only_fast_ports_that_are_up_are_rails() -> None:
    ports = (port(0), port(1, "DOWN"), port(2, rate=25.0), replace(port(3), nvswitch=True))
    assert of_group(TEXT, replace(DGX, ports=ports))["networks.fabric"] == {"kind": "infiniband", "rails": 1}
    assert "networks.fabric" not in of_group(TEXT, replace(DGX, ports=()))


def test_cores_are_told_only_where_gpus_are_shared_out_between_numa_nodes() -> None:
    assert cores_near(DGX) == ("0-31", "32-63")
    assert cores_near(replace(DGX, functions=DGX.functions[:4])) == ()  # all on one node
    assert cores_near(replace(DGX, functions=DGX.functions[:6])) == ()  # four and two
    assert cores_near(replace(DGX, cpus=None)) == ()


def test_what_could_not_be_read_is_unknown_and_proposes_nothing() -> None:
    blind = Machine(unread={"functions": "no such folder", "cpus": "sh: lscpu: not found"})
    assert of_group(TEXT, blind) == {}
    assert {(f.read, f.why, f.verdict) for f in unlike(site(), machines(blind))} == {
        ("functions", "no such folder", Verdict.UNKNOWN),
        ("cpus", "sh: lscpu: not found", Verdict.UNKNOWN),
    }


def test_a_machine_that_does_not_answer_is_unknown_in_the_answer() -> None:
    silent = RemoteError("g2: connection timed out", "is the node up?")
    document = Discovery(site(), TEXT, {"g1": DGX, "g2": silent}).document(1.0)
    assert document.nodes["g2"].verdict is Verdict.UNKNOWN
    (told,) = [finding for finding in document.findings if finding.subject == "g2"]
    assert (told.why, told.action) == ("connection timed out", "is the node up?")
    assert document.nodes["g1"].verdict is Verdict.PASS
    assert document.exit_status == 1
    assert document.details["machines"]["g1"]["gpus"][7] == {
        "model": "h100-sxm",
        "address": "0000:07:00.0",
        "numa": 1,
    }
    assert "+    gpu: {model: h100-sxm, count: 8" in document.details["diff"]


def test_without_a_terminal_progress_says_who_was_asked_and_nothing_of_findings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with watching(["g1", "g2"], "discover") as progress:
        progress("g2", None)
    assert capsys.readouterr().err == "g2: asked\n"


def test_what_was_accepted_needs_no_action() -> None:
    found = Discovery(site(), TEXT, machines(DGX), accepted=True).document(1.0)
    assert {finding.verdict for finding in found.findings} == {Verdict.PASS}
    assert not any(finding.action for finding in found.findings)


def test_a_dead_nvlink_and_another_topology_are_told() -> None:
    links = smi.Topology({"GPU0": {"GPU1": "NV18"}, "GPU1": {"GPU0": "NV18"}}, {}, {}, {})
    slow = smi.Topology({"GPU0": {"GPU1": "SYS"}, "GPU1": {"GPU0": "SYS"}}, {}, {}, {})
    good = replace(DGX, nvlinks={0: (26.562,) * 18, 1: (26.562,) * 18}, topology=links)
    dead = replace(good, nvlinks={0: (26.562,) * 18, 1: (*(26.562,) * 17, None)}, topology=slow)
    found = list(unlike(site(), machines(good, good, dead)))
    fewer = replace(dead, functions=DGX.functions[:7])  # of which the rest follows
    assert [each.read for each in unlike(site(), machines(good, good, fewer))] == ["GPUs 7 x h100-sxm"]
    assert [(each.subject, each.read, str(each.expected).split(",")[0]) for each in found] == [
        ("g3", "NVLinks 18, 17 up", "18 up"),
        ("g3", "topology SYS: 1", "NV18: 1"),
    ]


# ---- the text of the site file


def test_lines_are_put_where_they_belong_and_all_else_stays() -> None:
    text = Discovery(site(), TEXT, machines(DGX)).text
    assert (
        text
        == TEXT.replace(
            "    roles: [worker]\n",
            "    roles: [worker]\n"
            "    gpu: {model: h100-sxm, count: 8, cores: [0-31, 32-63]}\n"
            "    hardware: {sockets: 2, cores: 32, threads: 2, memory: 1031600}\n",
        )
        + "networks: {fabric: {kind: infiniband, rails: 8}}\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: {b: {x: 1}} # c\n", "a: {b: {x: 1}, k: {v: 2}} # c\n"),
        ("a: {}\n", "a: {k: {v: 2}}\n"),
        ("a: {\n  b: 1,\n}\n", "a: {\n  b: 1, k: {v: 2}}\n"),
        ("a:\n  b: 1 # c\nd: 2\n", "a:\n  b: 1 # c\n  k: {v: 2}\nd: 2\n"),
        ("a:\n  k:\n    x: 1\n    y: 2 # c\n  b: 1\n", "a:\n  k: {v: 2} # c\n  b: 1\n"),
        ("a:\n  k: {x: 1} # c\n", "a:\n  k: {v: 2} # c\n"),
        ("a:\n  k:\nb: 1\n", "a:\n  k: {v: 2}\nb: 1\n"),
        ("a:\nb: 1\n", "a: {k: {v: 2}}\nb: 1\n"),
        ("b: 1", "b: 1\na: {k: {v: 2}}"),
    ],
)
def test_a_value_is_put_into_any_style(before: str, after: str) -> None:
    assert edit.put(before, ("a", "k"), "{v: 2}") == after


def test_an_alias_is_left_to_its_author() -> None:
    with pytest.raises(InputError, match="k is an alias: write"):
        edit.put("x: &x {v: 1}\na:\n  k: *x\n", ("a", "k"), "{v: 2}")


WORDS = st.sampled_from(["a", "b", "c"])
TREES = st.recursive(st.integers(0, 9), lambda below: st.dictionaries(WORDS, below, min_size=1), max_leaves=9)


@given(
    tree=st.dictionaries(WORDS, TREES, min_size=1),
    key=st.lists(WORDS, min_size=1, max_size=3),
    flow=st.booleans(),
)
def test_whatever_the_file_it_says_the_value_afterwards_and_the_rest_as_before(
    tree: dict[str, object], key: list[str], flow: bool
) -> None:
    text = edit.put(yaml.safe_dump(tree, default_flow_style=flow), tuple(key), "{v: 2}")
    wanted: dict[str, object] = yaml.safe_load(yaml.safe_dump(tree))
    at = wanted
    for name in key[:-1]:
        if not isinstance(at.get(name), dict):
            at[name] = {}
        below = at[name]
        assert isinstance(below, dict)
        at = below
    at[key[-1]] = {"v": 2}
    assert yaml.safe_load(text) == wanted


def test_a_machines_result_is_the_worst_of_what_was_found_about_it_with_its_reason() -> None:
    answers = {"g1": object(), "g2": object(), "g3": RemoteError("g3: no route", "is the node up?")}
    odd = Finding(verdict=Verdict.WARN, check="machine-unlike-group", subject="g2", read="7 GPUs")
    findings = [odd, *silent(answers)]
    told = {name: (node.verdict, node.reason) for name, node in node_results(answers, findings).items()}
    assert told == {
        "g1": (Verdict.PASS, None),
        "g2": (Verdict.WARN, "machine-unlike-group: 7 GPUs"),
        "g3": (Verdict.UNKNOWN, "machine-read: no route"),
    }
