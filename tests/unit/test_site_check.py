"""Cross checks: what is wrong between values that are right by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.site.check import address
from provision.site.jumps import JumpError, chain, config_jump, site_chain
from provision.site.load import examine, load
from provision.site.names import cluster_fault, host_faults
from provision.site.problem import Problem


def site_file(folder: Path, **changes: Any) -> Path:
    """A good site file with some of its sections replaced."""
    good: dict[str, Any] = {
        "cluster": "mini",
        "groups": {
            "head": {"hosts": "head-1", "addresses": "10.9.0.10", "roles": ["head"]},
            "gpu": {"hosts": "gpu-[1-3]", "addresses": "10.9.0.[11-13]", "roles": ["worker"]},
        },
        "scheduler": {"slurm": {}},
    }
    file = folder / "site.yml"
    file.write_text(yaml.safe_dump(good | changes, sort_keys=False))
    return file


def only(file: Path) -> Problem:
    (problem,) = examine(file).problems
    return problem


def groups(**changes: dict[str, Any]) -> dict[str, Any]:
    return {"head": {"hosts": "head-1", "roles": ["head"]}} | changes


def test_the_good_file_has_no_problems(tmp_path: Path) -> None:
    assert examine(site_file(tmp_path)).problems == []


# Names


@pytest.mark.parametrize("name", ["gpu-rack1-n01", "a", "1a", "n" * 63, "x-1"])
def test_names_that_are_right(name: str) -> None:
    assert list(host_faults(name, {"slurm", "kubernetes"})) == []


@pytest.mark.parametrize(
    ("name", "why", "proposal"),
    [
        ("1001", "digits only", "node-1001"),
        ("01002", "digits only", "node-01002"),
        ("gpu_3", "RFC 1123", "gpu-3"),
        ("-gpu", "RFC 1123", "gpu"),
        ("gpu-", "RFC 1123", "gpu"),
        ("gpu..a", "RFC 1123", None),
        ("n" * 64, "longer than 63", None),
        ("10.1.0.3", "an address", None),
        ("2001:db8::3", "an address", None),
        ("localhost", "meaning of its own", None),
    ],
)
def test_names_that_are_wrong_everywhere(name: str, why: str, proposal: str | None) -> None:
    for scheduler in ("slurm", "kubernetes"):
        (fault,) = host_faults(name, {scheduler})
        assert why in fault.why
        assert fault.proposal == proposal
        assert not fault.warning


@pytest.mark.parametrize(("name", "proposal"), [("Master01", "master01"), ("GPU-Rack-1", "gpu-rack-1")])
def test_upper_case_is_an_error_for_kubernetes_and_a_warning_for_slurm(name: str, proposal: str) -> None:
    (fault,) = host_faults(name, {"kubernetes"})
    assert (fault.proposal, fault.warning) == (proposal, False)
    assert "RFC 1123" in fault.why
    (fault,) = host_faults(name, {"slurm"})
    assert (fault.proposal, fault.warning) == (proposal, True)


def test_digits_only_are_refused_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "site.yml"
    file.write_text("cluster: mini\ngroups:\n  head: {hosts: 00017, roles: [head]}\n")
    problem = only(file)
    assert problem.read == '"00017"'
    assert problem.nearest == "node-00017"


def test_names_equal_in_dns_are_one(tmp_path: Path) -> None:
    problems = examine(
        site_file(tmp_path, groups=groups(gpu={"hosts": "a1,A1", "roles": ["worker"]}))
    ).problems
    assert any("one name in DNS" in str(problem.why) for problem in problems)


@pytest.mark.parametrize(
    ("name", "proposal"), [("Atlas", "atlas"), ("my cluster", "my-cluster"), ("9lives", None), ("", None)]
)
def test_cluster_names_that_slurm_would_change(name: str, proposal: str | None) -> None:
    fault = cluster_fault(name)
    assert fault
    assert fault.proposal == proposal


# Hosts, roles, groups


def test_the_same_host_in_several_groups_is_legal(tmp_path: Path) -> None:
    more = groups(
        gpu={"hosts": "gpu-[1-3]", "roles": ["worker"]}, login={"hosts": "head-1,gpu-1", "roles": ["login"]}
    )
    assert examine(site_file(tmp_path, groups=more)).problems == []


def test_groups_that_contradict_each_other_about_a_host(tmp_path: Path) -> None:
    one = {"hosts": "gpu-1", "roles": ["worker"], "addresses": "10.9.0.1", "access": {"port": 22}}
    two = {"hosts": "gpu-1", "roles": ["login"], "addresses": "10.9.0.2", "access": {"port": 23}}
    problems = examine(site_file(tmp_path, groups=groups(a=one, b=two))).errors
    assert [problem.subject for problem in problems] == ["groups.b.addresses", "groups.b.access.port"]
    assert "gpu-1 also stands in group a" in str(problems[0].why)


def test_a_cluster_needs_a_head(tmp_path: Path) -> None:
    assert (
        only(site_file(tmp_path, groups={"gpu": {"hosts": "gpu-1", "roles": ["worker"]}})).rule
        == "missing-head"
    )


@pytest.mark.parametrize("role", ["monitor", "storage", "control-plane"])
def test_a_role_without_its_component(tmp_path: Path, role: str) -> None:
    more = groups(gpu={"hosts": "gpu-1", "roles": ["worker"]}, other={"hosts": "other-1", "roles": [role]})
    problem = only(site_file(tmp_path, groups=more))
    assert (problem.rule, problem.subject) == ("role-without-component", "groups.other.roles[0]")


def test_workers_without_a_scheduler(tmp_path: Path) -> None:
    problem = only(site_file(tmp_path, scheduler={}))
    assert "scheduler.slurm" in str(problem.expected)
    assert problem.warning


def test_a_component_without_its_role(tmp_path: Path) -> None:
    problem = only(site_file(tmp_path, monitoring={}))
    assert (problem.rule, problem.subject) == ("component-without-role", "monitoring")
    assert only(site_file(tmp_path, groups=groups())).subject == "scheduler.slurm"


def test_a_head_that_is_also_a_worker_is_allowed_with_a_warning(tmp_path: Path) -> None:
    problem = only(site_file(tmp_path, groups={"all": {"hosts": "head-1", "roles": ["head", "worker"]}}))
    assert (problem.rule, problem.warning) == ("head-is-worker", True)


def test_gpus_of_one_group_are_of_one_model(tmp_path: Path) -> None:
    gpu = {"hosts": "gpu-[1-3]", "roles": ["worker"], "gpu": {"model": "h100-sxm", "count": 8}}
    nodes: dict[str, Any] = {"gpu-2": {"gpu": {"model": "h200-sxm", "count": 8}}}
    problem = only(site_file(tmp_path, groups=groups(gpu=gpu), nodes=nodes))
    assert problem.rule == "mixed-gpu-models"
    assert problem.read == "h100-sxm: gpu-[1,3]; h200-sxm: gpu-2"
    nodes["gpu-2"]["gpu"] = {"model": "h100-sxm", "count": 7}
    problem = only(site_file(tmp_path, groups=groups(gpu=gpu), nodes=nodes))
    assert (problem.rule, problem.warning) == ("mixed-gpu-counts", True)


def test_a_gpu_model_without_known_numbers_is_a_warning_with_the_nearest(tmp_path: Path) -> None:
    gpu = {"hosts": "gpu-[1-3]", "roles": ["worker"], "gpu": {"model": "h100_sxm", "count": 8}}
    problem = only(site_file(tmp_path, groups=groups(gpu=gpu)))
    assert (problem.rule, problem.warning, problem.nearest) == ("unknown-gpu-model", True, "h100-sxm")
    assert problem.line is not None


def test_a_time_zone_that_does_not_exist(tmp_path: Path) -> None:
    problem = only(site_file(tmp_path, base={"timezone": "Europe/Zuerich"}))
    assert (problem.subject, problem.nearest) == ("base.timezone", "Europe/Zurich")


def test_components_check_their_own_part(tmp_path: Path) -> None:
    users = {"ada": {"uid": 2001}, "emmy": {"uid": 2001}}
    problem = only(site_file(tmp_path, base={"users": users}))
    assert problem.subject == "base.users.emmy.uid"
    slurm = {"partitions": [{"name": "train", "groups": ["gpus"]}]}
    problem = only(site_file(tmp_path, scheduler={"slurm": slurm}))
    assert problem.subject == "scheduler.slurm.partitions[0].groups[0]"
    assert problem.nearest == "gpu"


# Addresses


def test_an_address_used_twice_names_both_hosts_and_nothing_else(tmp_path: Path) -> None:
    more = groups(
        gpu={"hosts": "gpu-[1-3]", "addresses": "10.9.0.21,10.9.0.22,10.9.0.23", "roles": ["worker"]},
        login={"hosts": "head-1", "roles": ["login"]},
        extra={"hosts": "gpu-4", "addresses": "10.9.0.22", "roles": ["worker"]},
    )
    problem = only(site_file(tmp_path, groups=more))
    assert problem.rule == "duplicate-address"
    assert problem.why == "address 10.9.0.22 used by gpu-2 and gpu-4"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2001:DB8:0:10:0:0:0:21", "2001:db8:0:10::21"),
        ("::ffff:10.9.0.5", "10.9.0.5"),
        ("fd00::0:1", "fd00::1"),
        ("node.example.com", "NODE.example.com"),
    ],
)
def test_addresses_are_compared_as_addresses(tmp_path: Path, one: str, other: str) -> None:
    gpu = {"hosts": "gpu-[1-2]", "addresses": f"{one},{other}", "roles": ["worker"]}
    assert only(site_file(tmp_path, groups=groups(gpu=gpu))).rule == "duplicate-address"


def test_ipv6_only_nodes_are_accepted(tmp_path: Path) -> None:
    gpu = {"hosts": "gpu-[1-2]", "addresses": "2001:db8:0:10::[21-22]", "roles": ["worker"]}
    file = site_file(tmp_path, groups=groups(gpu=gpu), networks={"management": "2001:db8:0:10::/64"})
    assert examine(file).problems == []
    assert load(file).nodes["gpu-2"].address == "2001:db8:0:10::22"
    assert address("2001:DB8:0:10:0:0:0:21") == address("2001:db8:0:10::21")


@pytest.mark.parametrize("wrong", ["10.9.0.300", "10.9.0", "::1", "0.0.0.0", "224.0.0.1", "a_b"])
def test_addresses_that_no_machine_has(tmp_path: Path, wrong: str) -> None:
    nodes = {"gpu-1": {"address": wrong}}
    problem = only(site_file(tmp_path, nodes=nodes))
    assert (problem.rule, problem.subject) == ("address", "nodes.gpu-1.address")


def test_bmc_addresses(tmp_path: Path) -> None:
    nodes = {"gpu-1": {"bmc": "10.10.0.1"}, "gpu-2": {"bmc": "10.10.0.1"}, "gpu-3": {"bmc": "10.9.0.13"}}
    networks = {"management": ["10.9.0.0/24"], "bmc": "10.10.0.0/24"}
    problems = examine(site_file(tmp_path, nodes=nodes, networks=networks)).problems
    assert [(problem.rule, problem.subject) for problem in problems] == [
        ("duplicate-address", "nodes.gpu-2.bmc"),
        ("duplicate-address", "nodes.gpu-3.bmc"),
        ("outside-network", "nodes.gpu-3.bmc"),
    ]


def test_addresses_outside_of_the_management_network(tmp_path: Path) -> None:
    problem = only(site_file(tmp_path, networks={"management": "10.9.0.8/30"}))
    assert (problem.rule, problem.warning) == ("outside-network", True)
    assert problem.read == "gpu-2 (10.9.0.12), gpu-3 (10.9.0.13)"


def test_a_network_is_not_an_address_in_it(tmp_path: Path) -> None:
    assert only(site_file(tmp_path, networks={"management": "10.9.0.1/24"})).nearest == "10.9.0.0/24"


# Access


def test_jump_hosts_are_resolved_before_connecting() -> None:
    written = {"gpu-1": "head-1", "head-1": "bastion", "bastion": "none", "two": "ops@a:22,b", "a": "x"}
    assert chain("gpu-1", written.get) == ["bastion", "head-1"]
    assert chain("head-1", written.get) == ["bastion"]
    assert chain("bastion", written.get) == []
    assert chain("two", written.get) == ["x", "ops@a:22", "b"]


@pytest.mark.parametrize(
    "written",
    [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "b"}, {"a": "b,a"}, {"a": "b,,c"}],
)
def test_jump_hosts_that_never_arrive(written: dict[str, str]) -> None:
    with pytest.raises(JumpError):
        chain("a", written.get)


def test_jump_hosts_of_an_openssh_configuration(tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(
        "Host gpu-*\n  ProxyJump head-1\nHost head-1\n  ProxyJump gate\nHost gate\n  ProxyJump none\n"
        "Host ring-*\n  ProxyJump ring-b\n"
    )

    def jump_of(host: str) -> str | None:
        return config_jump(config, host)

    assert chain("gpu-7", jump_of) == ["gate", "head-1"]
    assert chain("gate", jump_of) == []
    with pytest.raises(JumpError, match="ring-b is reached through itself"):
        chain("ring-a", jump_of)
    site = load(site_file(tmp_path, access={"ssh_config": "ssh_config"}))
    assert site_chain(site, site.nodes["gpu-1"]) == ["gate", "head-1"]


def test_a_jump_host_of_the_site_that_jumps_over_itself(tmp_path: Path) -> None:
    problem = only(site_file(tmp_path, access={"jump": "head-1"}))
    assert (problem.rule, problem.subject) == ("jump-loop", "access.jump")
    direct = groups(gpu={"hosts": "gpu-1", "roles": ["worker"]})
    direct["head"]["access"] = {"jump": "none"}
    site = load(site_file(tmp_path, access={"jump": "head-1"}, groups=direct))
    assert site_chain(site, site.nodes["gpu-1"]) == ["head-1"]
    assert site_chain(site, site.head) == []


def test_one_node_at_most_is_the_machine_that_this_runs_on(tmp_path: Path) -> None:
    more = groups(gpu={"hosts": "gpu-[1-2]", "roles": ["worker"]})
    more["head"]["access"] = {"local": True}
    assert examine(site_file(tmp_path, groups=more)).problems == []
    more["gpu"]["access"] = {"local": True}
    problem = only(site_file(tmp_path, groups=more))
    assert (problem.rule, problem.subject) == ("access-local", "groups.gpu.access.local")


def test_keys_and_configurations_that_are_not_there(tmp_path: Path) -> None:
    file = site_file(tmp_path, access={"key": "no-key", "ssh_config": "no-config"})
    problems = examine(file).problems
    assert [problem.subject for problem in problems] == ["access.key", "access.ssh_config"]
    assert all(problem.warning for problem in problems)
    (tmp_path / "no-key").touch()
    (tmp_path / "no-config").touch()
    assert examine(file).problems == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_key_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o000)
    assert "may read" in str(only(site_file(tmp_path, access={"key": "key"})).expected)


# Hooks


def test_hooks(tmp_path: Path) -> None:
    (tmp_path / "play.yml").touch()
    hooks: list[dict[str, Any]] = [
        {"playbook": "play.yml", "after": "slurm"},
        {"playbook": "none.yml", "before": "slurm"},
        {"playbook": "play.yml"},
        {"playbook": "play.yml", "before": "slrum"},
        {"playbook": "play.yml", "before": "prometheus"},
    ]
    problems = examine(site_file(tmp_path, hooks=hooks)).problems
    assert {problem.subject: problem.warning for problem in problems} == {
        "hooks[1].playbook": False,
        "hooks[2]": False,
        "hooks[3].before": False,
        "hooks[4].before": True,
    }


@pytest.mark.parametrize(
    "access", [{"user": "-oProxyCommand=id"}, {"user": "a b"}, {"jump": "-x"}, {"jump": "gate, -x"}]
)
def test_names_that_ssh_would_take_for_options_are_refused(tmp_path: Path, access: dict[str, str]) -> None:
    file = site_file(tmp_path, access=access)
    [problem] = [problem for problem in examine(file).errors if problem.key[0] == "access"]
    assert "ssh would take it for options" in problem.message
