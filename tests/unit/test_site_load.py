"""A site file as types: every mistake at once, with its place and the right spelling."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provision.report.store import state_directory
from provision.site.load import examine, find, load
from provision.site.models import Access, Gpu
from provision.site.problem import SiteError

GOOD = """\
cluster: mini
access: {user: ops, port: 2222}
groups:
  head: {hosts: mini-head, addresses: 10.9.0.10, roles: [head]}
  gpu:
    hosts: mini-gpu-[1-2]
    addresses: 10.9.0.[12,11]
    roles: [worker]
    gpu: {model: h100-sxm, count: 8}
    access: {port: 22}
nodes:
  mini-gpu-2: {access: {user: root}, bmc: 10.10.0.2}
scheduler:
  slurm:
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_text(text: str) -> Path:
        file = tmp_path / "site.yml"
        file.write_text(textwrap.dedent(text))
        return file

    return write_text


def messages(file: Path) -> list[str]:
    return [str(problem).removeprefix(f"{file}:") for problem in examine(file).problems]


def test_a_good_file_is_a_cluster(write: Any) -> None:
    site = load(write(GOOD))
    assert list(site.nodes) == ["mini-head", "mini-gpu-1", "mini-gpu-2"]
    assert site.head.name == "mini-head"
    assert site.nodes["mini-gpu-1"].address == "10.9.0.12"  # paired by the order as written
    assert site.nodes["mini-gpu-2"].address == "10.9.0.11"
    assert site.nodes["mini-gpu-2"].gpu == Gpu(model="h100-sxm", count=8)
    assert site.nodes["mini-head"].access == Access(user="ops", port=2222)
    assert site.nodes["mini-gpu-1"].access == Access(user="ops", port=22)
    assert site.nodes["mini-gpu-2"].access == Access(user="root", port=22)
    assert site.enabled("slurm")  # named, with nothing after it
    assert site.enabled("munge")
    assert not site.enabled("prometheus")


def test_a_host_of_several_groups_plays_all_their_roles(write: Any) -> None:
    site = load(
        write(GOOD.replace("nodes:", "  in: {hosts: 'mini-head,mini-gpu-1', roles: [login]}\nnodes:"))
    )
    assert site.nodes["mini-head"].roles == {"head", "login"}
    assert site.nodes["mini-gpu-1"].group == "gpu"
    assert site.nodes["mini-gpu-1"].groups == ("gpu", "in")
    assert [node.name for node in site.in_group("in")] == ["mini-head", "mini-gpu-1"]
    assert site.nodes["mini-gpu-1"].access.port == 22  # what the first group said still holds


def test_the_digest_follows_the_meaning_not_the_text(write: Any) -> None:
    first = load(write(GOOD)).digest
    assert load(write("# a comment\n" + GOOD)).digest == first
    assert load(write(GOOD.replace("count: 8", "count: 4"))).digest != first


def test_all_mistakes_at_once(write: Any) -> None:
    file = write(
        """\
        cluster: Mini
        acess: {user: ops}
        access: {port: 99999, usr: x}
        groups:
          head: {hosts: mini-head, roles: [haed]}
          gpu:
            hosts: mini-gpu-[1-2]
            addresses: 10.9.0.[11-13]
            roles: [worker]
            gpu: {model: h100-sxm, count: many}
            settings: {slrum: {}}
        nodes:
          mini-gpu1: {}
        scheduler: {slurm: {}}
        monitorng: {}
        """
    )
    said = messages(file)
    assert len(said) == len(set(said))
    for place in (
        '1:10: error: cluster: found "Mini"',
        '2:1: error: acess: found "acess"; did you mean "access"?',
        '3:16: error: access.port: found "99999", expected less than or equal to 65535',
        '3:23: error: access.usr: found "usr"; did you mean "user"?',
        '5:36: error: groups.head.roles[0]: found "haed", expected one of head, worker, login, storage, '
        'monitor, control-plane; did you mean "head"?',
        "8:16: error: groups.gpu.addresses: found 3 addresses, expected 2, as many as there are hosts",
        '10:35: error: groups.gpu.gpu.count: found "many", expected a valid integer',
        '11:16: error: groups.gpu.settings.slrum: found "slrum"; did you mean "slurm"?',
        '13:3: error: nodes.mini-gpu1: found "mini-gpu1", expected a host of one of the groups; '
        'did you mean "mini-gpu-1"?',
        '15:1: error: monitorng: found "monitorng"; did you mean "monitoring"?',
    ):
        assert any(line.startswith(place) for line in said), (place, said)
    assert len(said) == 10, said


def test_a_missing_head_is_not_claimed_while_its_group_cannot_be_read(write: Any) -> None:
    said = messages(write("cluster: mini\ngroups:\n  head: {hosts: 'h[1-', roles: [head]}\n"))
    assert len(said) == 1
    assert "bracket" in said[0]


def test_missing_keys_are_named_where_they_belong(write: Any) -> None:
    said = messages(write("access: {user: ops}\ngroups:\n  gpu: {roles: [head]}\n"))
    assert "1:1: error: cluster: is missing" in said
    assert "3:3: error: groups.gpu.hosts: is missing" in said


def test_settings_that_differ_are_checked_as_the_component_would(write: Any) -> None:
    said = messages(
        write(GOOD.replace("    access: {port: 22}", "    settings: {slurm: {no_such: 1}, monitoring: {}}"))
    )
    assert any("groups.gpu.settings.slurm.no_such" in line for line in said)
    assert any('did you mean "prometheus"?' in line for line in said)
    said = messages(write(GOOD.replace("    access: {port: 22}", "    settings: {prometheus: {}}")))
    assert any("`monitoring` is not in the file" in line for line in said)


def test_a_value_that_may_be_a_secret_is_not_shown(write: Any) -> None:
    (line,) = messages(write(GOOD.replace("user: ops,", "user: ops, sudo_password: hunter2,")))
    assert "access.sudo_password" in line
    assert "hunter2" not in line


def test_control_characters_do_not_reach_the_terminal(write: Any) -> None:
    (line,) = messages(write(GOOD.replace("port: 2222", '"\\e[31mx": 1')))
    assert "\x1b" not in line


def test_load_raises_with_findings(write: Any) -> None:
    file = write(GOOD.replace("roles: [worker]", "roles: [wrker]"))
    with pytest.raises(SiteError) as raised:
        load(file)
    (finding,) = raised.value.findings
    assert finding.source == str(file)
    assert finding.line == 8
    assert finding.action == 'did you mean "worker"?'


def test_find_takes_a_path_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories" / "atlas.yml").touch()
    (tmp_path / "inventories" / "atlas.lock.yml").touch()
    monkeypatch.delenv("PROVISION_INVENTORIES", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find("atlas") == Path("inventories/atlas.yml")
    assert find("some/where.yml") == Path("some/where.yml")
    with pytest.raises(SiteError, match='did you mean "atlas"'):
        find("altas")
    monkeypatch.chdir("/")
    monkeypatch.setenv("PROVISION_INVENTORIES", str(tmp_path / "inventories"))
    assert find("atlas").is_file()


def test_a_relative_path_means_the_same_wherever_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mini.yml").write_text(textwrap.dedent(GOOD))
    monkeypatch.chdir(tmp_path / "here")
    site = load(Path("mini.yml"))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    kept = state_directory(site)
    monkeypatch.chdir("/")
    assert site.path == (tmp_path / "here" / "mini.yml").resolve()
    assert site.directory.is_dir()
    assert kept.is_absolute()


KEYS = [
    "cluster",
    "access",
    "groups",
    "nodes",
    "hosts",
    "roles",
    "gpu",
    "networks",
    "scheduler",
    "slurm",
    "base",
]
KEYS += [
    "settings",
    "hooks",
    "jump",
    "addresses",
    "management",
    "bmc",
    "head",
    "x-1",
    "monitoring",
    "address",
]
scalars = st.sampled_from(
    ["head", "x-1", "x-[1-2]", "10.0.0.1", "none", "::1", "", "slurm", 3, -1, None, True, 1.5]
)
trees = st.recursive(
    scalars,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=4),
    max_leaves=25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), trees, max_size=8))
def test_no_document_raises_and_none_is_silently_refused(tmp_path: Path, tree: dict[str, Any]) -> None:
    file = tmp_path / "site.yml"
    file.write_text(yaml.safe_dump(tree))
    examined = examine(file)
    assert (examined.site is None) == bool(examined.errors)
    assert all(problem.line for problem in examined.problems)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_good_file_with_one_part_replaced_never_raises(tmp_path: Path, data: st.DataObject) -> None:
    tree = yaml.safe_load(GOOD)
    below: Any = tree
    while True:
        key = data.draw(st.sampled_from(sorted(below) if isinstance(below, dict) else range(len(below))))
        if not isinstance(below[key], (dict, list)) or not below[key] or data.draw(st.booleans()):
            below[key] = data.draw(trees)
            break
        below = below[key]
    file = tmp_path / "site.yml"
    file.write_text(yaml.safe_dump(tree))
    examined = examine(file)
    assert (examined.site is None) == bool(examined.errors)
