"""An Ansible inventory becomes a site file, and everything left out is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from provision.report.model import Finding, Verdict
from provision.site.ansible import Inventory, InventoryError, _prepare, read_inventory
from provision.site.importer import Imported, site_text
from provision.site.load import examine_text
from provision.site.models import Access
from provision.site.ssh_arguments import translate_arguments


def imported(folder: Path, text: str, name: str = "mini.ini") -> Imported:
    (folder / name).write_text(text)
    return site_text(read_inventory(folder / name))


def listed(folder: Path, groups: dict[str, str], **variables: dict[str, Any]) -> Imported:
    """The same from what Ansible has read already: groups with their hosts, variables of hosts."""
    listing: dict[str, Any] = {group: {"hosts": hosts.split()} for group, hosts in groups.items()}
    return imported(folder, json.dumps(listing | {"_meta": {"hostvars": variables}}), "mini.json")


def prepared(folder: Path, text: str) -> Imported:
    """What is said before Ansible reads it."""
    inventory = Inventory(folder / "mini.ini", text)
    _prepare(inventory)
    return site_text(inventory)


def document(result: Imported) -> dict[str, Any]:
    found = yaml.safe_load(result.text)
    assert isinstance(found, dict)
    return found


def said(result: Imported, subject: str) -> Finding:
    (finding,) = [finding for finding in result.findings if finding.subject == subject]
    return finding


INI = """\
[all]
m1 ansible_host=10.5.0.1
w01 ansible_host=10.5.0.11
w02 ansible_host=10.5.0.12
w03 ansible_host=10.5.0.13

[slurm-master]
m1

[slurm-node]
w[01:03]

[slurm-login:children]
slurm-master

[slurm-metric:children]
slurm-master

[slurm-cluster:children]
slurm-master
slurm-node

[all:vars]
ansible_user=ops
ansible_port=2222
ansible_python_interpreter=/usr/bin/python3
"""


def test_an_ini_inventory_with_ranges_children_and_variables(tmp_path: Path) -> None:
    result = imported(tmp_path, INI)
    assert document(result) == {
        "cluster": "mini",
        "access": {"user": "ops", "port": 2222},
        "groups": {
            "slurm-master": {"hosts": "m1", "addresses": "10.5.0.1", "roles": ["head", "login", "monitor"]},
            "slurm-node": {"hosts": "w[01-03]", "addresses": "10.5.0.[11-13]", "roles": ["worker"]},
        },
        "scheduler": {"slurm": {}},
        "monitoring": {},
    }
    assert examine_text(result.text, tmp_path / "site.yml").errors == []
    assert [finding.verdict for finding in result.findings] == [Verdict.SKIP]  # the interpreter is not needed


def test_addresses_follow_their_hosts(tmp_path: Path) -> None:
    hosts = {"z": "10.5.0.1", "b": "10.5.0.9", "a": "10.5.0.30"}
    variables = {name: {"ansible_host": address} for name, address in hosts.items()}
    result = listed(tmp_path, {"head": "z", "compute": "b a"}, **variables)
    assert document(result)["groups"]["compute"]["hosts"] == "a,b"
    site = examine_text(result.text, tmp_path / "site.yml").site
    assert site
    assert {name: node.address for name, node in site.nodes.items()} == hosts


def test_a_yaml_inventory_with_group_vars_and_host_vars(tmp_path: Path) -> None:
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "group_vars" / "compute.yml").write_text("ansible_user: ops\nmtu: 9000\n")
    (tmp_path / "host_vars" / "w1.yml").write_text("ansible_port: 2201\n")
    text = """\
all:
  children:
    control: {hosts: {m1: {ansible_user: ops}}}
    compute: {hosts: {"w[1:2]": {}}}
    racks: {hosts: {w1: {}}}
  vars: {cluster_name: opal}
"""
    result = imported(tmp_path, text, "hosts.yml")
    found = document(result)
    assert found["cluster"] == "opal"
    assert found["access"] == {"user": "ops"}
    assert found["nodes"] == {"w1": {"access": {"port": 2201}}}
    assert found["groups"]["compute"] == {"hosts": "w[1-2]", "roles": ["worker"]}
    assert "w[1-2]" in str(said(result, "mtu").why)
    assert "no role is known" in str(said(result, "racks").why)
    assert examine_text(result.text, tmp_path / "site.yml").errors == []


def test_a_folder_is_read_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "opal"
    folder.mkdir()
    (folder / "hosts").write_text("[head]\nm1\n[compute]\nw1\n")
    (folder / "more").write_text("[compute]\nw2\n")
    assert document(site_text(read_inventory(folder)))["groups"]["compute"]["hosts"] == "w[1-2]"


def test_what_ansible_inventory_lists_is_an_inventory(tmp_path: Path) -> None:
    listing = {
        "_meta": {"hostvars": {"w1": {"ansible_host": "fd00::11"}}},
        "all": {"children": ["compute", "head"]},
        "compute": {"hosts": ["w1"]},
        "head": {"hosts": ["m1"]},
    }
    result = imported(tmp_path, json.dumps(listing), "listing.json")
    assert document(result)["groups"]["compute"]["addresses"] == "fd00::11"


def test_names_of_digits_stay_names_and_are_refused(tmp_path: Path) -> None:
    names = ["2001", "02002", "no"]
    text = "all: {hosts: {" + ", ".join(f"{name}: {{}}" for name in names) + "}}\n"
    edited, kind = _prepare(Inventory(tmp_path / "hosts", text))
    assert (kind, list(yaml.safe_load(edited)["all"]["hosts"])) == ("yaml", names)
    result = listed(tmp_path, {"compute": " ".join(names)})
    assert document(result)["groups"]["compute"]["hosts"] == "[2001,02002],no"
    errors = examine_text(result.text, tmp_path / "site.yml").errors
    assert [error.nearest for error in errors if error.rule == "host-name"] == ["node-2001", "node-02002"]


def test_upper_case_in_kubernetes_groups(tmp_path: Path) -> None:
    result = listed(tmp_path, {"kube_control_plane": "Ctl1", "kube_node": "Rack-A-1"})
    assert document(result)["groups"]["kube_control_plane"]["roles"] == ["head", "control-plane"]
    errors = examine_text(result.text, tmp_path / "site.yml").errors
    assert [error.nearest for error in errors if error.rule == "host-name"] == ["ctl1", "rack-a-1"]
    assert said(result, "scheduler").verdict == Verdict.FAIL  # to be filled in


def test_a_host_in_two_groups_is_no_duplicate_but_an_address_is(tmp_path: Path) -> None:
    groups = {"head": "m1", "monitoring": "m1", "compute": "w1 w2"}
    result = listed(tmp_path, groups, w1={"ansible_host": "10.5.0.7"}, w2={"ansible_host": "10.5.0.7"})
    (error,) = examine_text(result.text, tmp_path / "site.yml").errors
    assert error.why == "address 10.5.0.7 used by w1 and w2"


def test_a_head_that_computes_is_imported_with_a_warning(tmp_path: Path) -> None:
    result = listed(tmp_path, {"slurm-master": "m1", "slurm-node": "m1 w1"})
    (problem,) = examine_text(result.text, tmp_path / "site.yml").problems
    assert (problem.rule, problem.warning) == ("head-is-worker", True)


def test_a_variable_behind_a_comment_sign_is_named(tmp_path: Path) -> None:
    text = "[head]\nm1 ansible_host=m1  # cluster_ip=10.5.0.1\n#old1 ansible_host=10.5.0.9\n"
    result = prepared(tmp_path, text)
    finding = said(result, "cluster_ip")
    assert (finding.read, finding.line, finding.verdict) == ("cluster_ip=10.5.0.1", 2, Verdict.WARN)
    assert said(result, "comments").line == 3


def test_of_several_addresses_one_must_be_chosen(tmp_path: Path) -> None:
    """As ansible-inventory lists them where facts are cached."""
    several = {"ansible_all_ipv4_addresses": ["10.5.0.7", "192.0.2.10", "127.0.0.1"]}
    result = listed(
        tmp_path, {"head": "m1", "gpu": "g1"}, m1=several, g1={**several, "ansible_host": "10.5.0.8"}
    )
    finding = said(result, "nodes.m1.address")
    assert (finding.verdict, finding.check) == (Verdict.FAIL, "import-fill-in")
    assert finding.why == "2 candidate addresses, none chosen: 10.5.0.7, 192.0.2.10"
    assert not [each for each in result.findings if each.subject == "nodes.g1.address"], "it is chosen"


def test_secrets_are_never_copied(tmp_path: Path) -> None:
    names = ("ansible_become_password", "ansible_password", "mysql_root_password", "api_token")
    result = listed(tmp_path, {"head": "m1"}, m1=dict.fromkeys(names, "hunter2"))
    assert "hunter2" not in result.text + repr(result.findings)
    assert document(result)["access"] == {"sudo_password": True}
    for subject in names:
        assert said(result, subject).check == "import-secret"


def test_vault_values_are_left_out_and_vault_files_reported(tmp_path: Path) -> None:
    value = {"extra": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n6162\n"}}  # as Ansible lists it
    assert "ansible-vault" in str(said(listed(tmp_path, {"head": "m1"}, m1=value), "extra").why)
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6162\n")
    for text, name, file in (
        ("[head]\nm1\n", "mini.ini", "group_vars/all.yml"),
        ("$ANSIBLE_VAULT;1.1;AES256\n6162\n", "hosts.yml", "hosts.yml"),
    ):
        with pytest.raises(InventoryError, match="encrypted by ansible-vault") as raised:
            imported(tmp_path, text, name)
        assert raised.value.findings[0].source == str(tmp_path / file)
    with pytest.raises(InventoryError, match="encrypted by ansible-vault"):
        read_inventory(tmp_path)


def test_hosts_without_a_role_are_to_be_filled_in(tmp_path: Path) -> None:
    result = listed(tmp_path, {"head": "m1", "auth": "a1"})
    assert document(result)["groups"]["others"] == {"hosts": "a1", "roles": []}
    assert said(result, "groups.others.roles").verdict == Verdict.FAIL
    assert "there is no host" in str(said(listed(tmp_path, {"head": ""}), "groups").why)


def test_kubernetes_beside_slurm_is_left_out(tmp_path: Path) -> None:
    result = listed(tmp_path, {"slurm-master": "m1", "slurm-node": "w1", "kube_node": "m1 w1"})
    assert set(document(result)["groups"]) == {"slurm-master", "slurm-node"}
    assert "Kubernetes beside Slurm" in str(said(result, "kube_node").why)


def test_groups_of_another_file_are_named(tmp_path: Path) -> None:
    result = prepared(tmp_path, "[head]\nm1\n[login:children]\nfront\n")
    assert said(result, "front").line == 4


def test_expressions_are_not_understood(tmp_path: Path) -> None:
    result = listed(tmp_path, {"head": "m1"}, m1={"ansible_host": "{{ lookup('env', 'X') }}"})
    assert "expression" in str(said(result, "ansible_host").why)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.tpl", "[head]\n${head_name} ansible_host=${head_ip}\n", "a template"),
        ("x.tpl", "[head]\n%{ for n in nodes ~}\n${n}\n%{ endfor }\n", "a template"),
        ("x.j2", "[head]\n{% for n in nodes %}\n{{ n }}\n{% endfor %}\n", "a template"),
        ("x.yml", "plugin: amazon.aws.aws_ec2\nregions: [eu-west-1]\n", "of the plugin"),
        ("x.yml", "api_url: http://maas.example.com\napi_key: abc\n", "dynamic inventory"),
        ("x.yml", "all:\n\thosts: {}\n", "not YAML"),
        ("x.py", "#!/usr/bin/env python3\nprint('{}')\n", "it is not run"),
        ("x.ini", "[head]\nm1 oops\n", "Expected key=value"),
        ("x.ini", "[gpu]\nn[1:99999999] a=b\n", '"n[1:99999999]" is 99999999 names, more than 65536'),
        ("x.ini", "[gpu]\nn[a:z][001:999]-[:99]\n", "2597400 names"),
        ("x.yml", "all:\n  hosts:\n    n[1:999999:2]:\n", "500000 names"),
    ],
)
def test_what_is_no_inventory_is_said_and_not_run(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(InventoryError) as raised:
        imported(tmp_path, text, name)
    (finding,) = raised.value.findings
    assert says in str(finding.why)
    assert finding.source == str(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="No such file"):
        read_inventory(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\x7fELF\x00\xff")
    with pytest.raises(InventoryError, match="not a text file"):
        read_inventory(tmp_path / "binary")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InventoryError, match="not a regular file"):
        read_inventory(tmp_path / "pipe")


def test_a_range_in_a_folder_that_is_too_wide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# n[1:99999999] is a comment\n[gpu]\nn[1:99999999]\n")
    with pytest.raises(InventoryError) as raised:
        read_inventory(tmp_path)
    (finding,) = raised.value.findings
    assert (finding.source, finding.line) == (str(tmp_path / "hosts"), 3)


# ssh arguments


@pytest.mark.parametrize(
    ("text", "access"),
    [
        ("-J ops@gate", {"jump": "ops@gate"}),
        ("-Jgate1,gate2", {"jump": "gate1,gate2"}),
        ("-o ProxyJump=ops@gate -p 2222 -i ~/.ssh/k", {"jump": "ops@gate", "port": 2222, "key": "~/.ssh/k"}),
        ("-oProxyJump=none", {"jump": "none"}),
        ("-o 'ProxyJump ops@gate'", {"jump": "ops@gate"}),
        ('-o ProxyCommand="ssh -W %h:%p -q ops@gate"', {"jump": "ops@gate"}),
        ("-o ProxyCommand='ssh -q -p 2222 -l ops -W [%h]:%p gate'", {"jump": "ops@gate:2222"}),
        ("-o StrictHostKeyChecking=yes -l ops", {"host_keys": "strict", "user": "ops"}),
        (
            "-F my_config -o Port=23 -o User=u -o IdentityFile=k",
            {"ssh_config": "my_config", "port": 23, "user": "u", "key": "k"},
        ),
    ],
)
def test_ssh_arguments_that_are_translated(text: str, access: dict[str, Any]) -> None:
    translated = translate_arguments(text)
    assert translated.access == access
    assert translated.left_out == []


@pytest.mark.parametrize(
    ("text", "argument", "why"),
    [
        ("-o StrictHostKeyChecking=no", "StrictHostKeyChecking=no", "host keys are always checked"),
        ("-o UserKnownHostsFile=/dev/null", "UserKnownHostsFile=/dev/null", "host keys are always checked"),
        ("-o Ciphers=+x", "Ciphers=+x", "option not understood"),
        ("-o ProxyCommand='nc -X 5 %h %p'", "ProxyCommand=nc -X 5 %h %p", "only `ssh -W"),
        ("-o ProxyCommand='ssh gate nc %h %p'", "ProxyCommand=ssh gate nc %h %p", "only `ssh -W"),
        ("-L 80:x:80", "-L", "not understood"),
        ("-p twenty", "Port=twenty", "not a port"),
        ("-J", "-J", "missing"),
        ("-o ForwardAgent", "-o ForwardAgent", "missing"),
        ("-o 'open", "-o 'open", "cannot be split"),
    ],
)
def test_ssh_arguments_that_are_reported(text: str, argument: str, why: str) -> None:
    translated = translate_arguments(text)
    assert translated.access == {}
    assert translated.left_out[0][0] == argument
    assert why in translated.left_out[0][1]


def test_sharing_of_connections_is_not_needed() -> None:
    translated = translate_arguments("-o ControlMaster=auto -o ControlPersist=60s -C")
    assert (translated.access, translated.left_out) == ({}, [])
    assert translated.unneeded == ["ControlMaster=auto", "ControlPersist=60s", "-C"]


@given(st.text(alphabet="-oJpiWqssh %h:=\"' gate@,1", max_size=50))
def test_no_ssh_arguments_raise(text: str) -> None:
    translated = translate_arguments(text)
    assert set(translated.access) <= set(Access.model_fields)
    if text.strip():
        assert translated.access or translated.left_out or translated.unneeded, (
            "nothing is left out in silence"
        )


def test_the_inventory_says_it_once_for_each_host(tmp_path: Path) -> None:
    arguments = {
        "w1": "-o ProxyJump=ops@192.0.2.9 -o StrictHostKeyChecking=no",
        "w2": '-o ProxyCommand="ssh -W %h:%p -q ops@192.0.2.9"',
        "w3": "-o MACs=+x",
    }
    hosts = {name: {"ansible_ssh_common_args": text} for name, text in arguments.items()}
    text = "".join(f"{name} ansible_ssh_common_args='{words}'\n" for name, words in arguments.items())
    result = site_text(Inventory(tmp_path / "mini.ini", text, hosts, {"compute": list(hosts)}))
    assert document(result)["nodes"] == {
        "w1": {"access": {"jump": "ops@192.0.2.9"}},
        "w2": {"access": {"jump": "ops@192.0.2.9"}},
    }
    finding = said(result, "MACs=+x")
    assert finding.line == 3
    assert str(finding.why).endswith("on w3")
    assert str(said(result, "StrictHostKeyChecking=no").why).endswith("on w1")
