"""The verbs about the site file: `init`, `check`, `import`; and what all verbs share."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from provision.cli import verbs
from provision.cli.common import answering, limited, open_site, select
from provision.engine.ssh import jump_chain, ssh_options
from provision.site.hostlist import HostlistError
from provision.site.load import examine, examine_text, load
from provision.site.models import Site, SiteFile
from provision.site.problem import SiteError
from provision.site.secrets import sudo_password

app = typer.Typer()
verbs.register(app, [])
runner = CliRunner()

GOOD = """\
cluster: mini
access: {user: ops}
groups:
  head: {hosts: head-1, addresses: "2001:db8::1", roles: [head]}
  gpu: {hosts: "gpu-[1-3]", roles: [worker]}
  front: {hosts: "gpu-3,in-1", roles: [login]}
scheduler: {slurm: {}}
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "mini.yml").write_text(GOOD)
    return load(tmp_path / "mini.yml")


# check


def test_check_says_every_mistake_on_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "site.yml"
    file.write_text(GOOD.replace("roles: [worker]", "roles: [wrker]").replace("user:", "usr:"))
    result = runner.invoke(app, ["check", str(file)])
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert lines[0] == f'{file}:2:10: error: access.usr: found "usr"; did you mean "user"?'
    assert lines[1].startswith(
        f'{file}:5:37: error: groups.gpu.roles[0]: found "wrker", expected one of head'
    )
    assert lines[2:] == ["2 errors, 0 warnings"]
    assert "\x1b" not in result.stdout  # no colours where it is no terminal


def test_check_prints_one_document(tmp_path: Path) -> None:
    file = tmp_path / "site.yml"
    file.write_text(GOOD + "acess: {}\n")
    result = runner.invoke(app, ["check", str(file), "--json"])
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert (document["verb"], document["verdict"], document["nodes"]) == ("check", "fail", {})
    (finding,) = document["findings"]
    assert (finding["source"], finding["line"], finding["subject"]) == (str(file), 8, "acess")


def test_warnings_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "site.yml"
    file.write_text(GOOD.replace("user: ops", "key: none-there"))
    result = runner.invoke(app, ["check", str(file)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "mini: 5 nodes in 3 groups; 0 errors, 1 warning"


def test_a_name_that_is_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_INVENTORIES", str(tmp_path))
    (tmp_path / "atlas.yml").write_text(GOOD)
    assert runner.invoke(app, ["check", "atlas"]).exit_code == 0
    result = runner.invoke(app, ["check", "altas"])
    assert result.exit_code == 2
    assert 'did you mean "atlas"?' in result.stdout


# init


def test_the_starter_passes_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "new" / "opal.yml"
    result = runner.invoke(app, ["init", str(file)])
    assert result.exit_code == 0
    examined = examine(file)
    assert examined.problems == []
    assert examined.site
    assert examined.site.cluster == "opal"


def test_every_setting_that_the_starter_offers_is_one() -> None:
    text = files("provision.site").joinpath("starter.yml").read_text().replace("CLUSTER", "opal")
    uncommented = re.sub(r"^(\s*)#(?=[a-zA-Z-])|^(\s*)#(?=- )", r"\1\2", text, flags=re.MULTILINE)
    examined = examine_text(uncommented, Path("opal.yml"))
    wrong = [problem for problem in examined.errors if problem.rule != "hook"]  # its playbook is yours
    assert wrong == []
    assert uncommented.count("\n    #") > 3  # the explanations stay comments


def test_init_never_overwrites(tmp_path: Path) -> None:
    file = tmp_path / "site.yml"
    file.write_text("mine")
    result = runner.invoke(app, ["init", str(file)])
    assert result.exit_code == 2
    assert file.read_text() == "mine"


# import


def test_import_writes_a_file_that_passes(tmp_path: Path) -> None:
    hosts = {name: {"ansible_user": "ops", "rack": 7} for name in ("w1", "w2")}
    listing = {"_meta": {"hostvars": hosts}, "head": {"hosts": ["m1"]}, "compute": {"hosts": list(hosts)}}
    (tmp_path / "hosts.json").write_text(json.dumps(listing))
    output = tmp_path / "opal.yml"
    arguments = ["import", "ansible", str(tmp_path / "hosts.json"), "-o", str(output)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/hosts.json:1: warning: rack: left out" in result.stderr
    assert runner.invoke(app, ["check", str(output)]).exit_code == 0
    assert runner.invoke(app, arguments).exit_code == 2  # never overwrites


def test_import_says_what_must_be_filled_in(tmp_path: Path) -> None:
    listing = {"_meta": {"hostvars": {}}, "racks": {"hosts": ["m1"]}}
    (tmp_path / "hosts.json").write_text(json.dumps(listing))
    result = runner.invoke(app, ["import", "ansible", str(tmp_path / "hosts.json"), "--json"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert "hosts: m1" in document["details"]["text"]
    assert any(finding["subject"] == "groups.others.roles" for finding in document["findings"])


def test_import_refuses_a_template(tmp_path: Path) -> None:
    (tmp_path / "hosts.tpl").write_text("[head]\n${name}\n")
    result = runner.invoke(app, ["import", "ansible", str(tmp_path / "hosts.tpl")])
    assert result.exit_code == 2
    assert f"{tmp_path}/hosts.tpl:2: error:" in result.stderr


# Shared by all verbs


def test_limit_takes_hosts_groups_and_roles(site: Site) -> None:
    def names(limit: str | None) -> list[str]:
        return [node.name for node in select(site, limit)]

    assert names(None) == ["head-1", "gpu-1", "gpu-2", "gpu-3", "in-1"]
    assert names("gpu-[2-3],head-1") == ["head-1", "gpu-2", "gpu-3"]
    assert names("gpu") == ["gpu-1", "gpu-2", "gpu-3"]
    assert names("login,head") == ["head-1", "gpu-3", "in-1"]


@pytest.mark.parametrize(
    ("limit", "says"),
    [("gpu-4", "no node, group or role of mini"), ("gpu-[1-", "bracket"), ("wrker", "worker")],
)
def test_an_unknown_limit_is_wrong_input(
    site: Site, capsys: pytest.CaptureFixture[str], limit: str, says: str
) -> None:
    with pytest.raises(HostlistError):
        select(site, limit)
    with pytest.raises(typer.Exit) as ended:
        limited(site, limit)
    assert ended.value.exit_code == 2
    assert says in capsys.readouterr().err


def test_opening_a_wrong_file_ends_with_all_its_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "site.yml"
    file.write_text("cluster: mini\n")
    with pytest.raises(typer.Exit) as ended:
        open_site(str(file))
    assert ended.value.exit_code == 2
    assert "groups: is missing" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        answering("apply", lambda as_json: open_site(str(file)))(as_json=True)  # type: ignore[func-returns-value]
    document = json.loads(capsys.readouterr().out)
    assert (document["verb"], document["site"]) == ("apply", str(file))
    assert document["findings"][0]["check"] == "site-missing-key"


def test_help_breaks_lines_where_the_terminal_does() -> None:
    def verb() -> None:
        """First
        sentence.

        Example: provision verb
        """

    assert answering("verb", verb).__doc__ == "First sentence.\n\nExample: provision verb"


# How nodes are reached


def test_jump_hosts_of_jump_hosts_and_ipv6(tmp_path: Path) -> None:
    text = GOOD.replace("user: ops", "user: ops, jump: adm@gate").replace(
        "roles: [worker]", "roles: [worker], access: {jump: head-1}"
    )
    (tmp_path / "mini.yml").write_text(text)
    site = load(tmp_path / "mini.yml")
    assert jump_chain(site, "head-1") == "adm@gate,ops@[2001:db8::1]:22"
    arguments = ssh_options(site, site.nodes["gpu-1"])
    assert arguments[arguments.index("-J") + 1] == "adm@gate,ops@[2001:db8::1]:22"


def test_no_jump_host_is_no_argument(tmp_path: Path) -> None:
    text = GOOD.replace("user: ops", "user: ops, jump: gate").replace(
        "roles: [head]", "roles: [head], access: {jump: none}"
    )
    (tmp_path / "mini.yml").write_text(text)
    site = load(tmp_path / "mini.yml")
    assert "-J" not in ssh_options(site, site.head)
    assert "-J" in ssh_options(site, site.nodes["in-1"])


# The sudo password


def asking(tmp_path: Path) -> Site:
    (tmp_path / "mini.yml").write_text(GOOD.replace("user: ops", "user: ops, sudo_password: true"))
    return load(tmp_path / "mini.yml")


def test_no_password_is_asked_for_where_none_is_needed(site: Site) -> None:
    assert sudo_password(site, site.nodes.values()) is None


def test_the_password_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISION_SUDO_PASSWORD", "sesame")
    site = asking(tmp_path)
    assert sudo_password(site, site.nodes.values()) == "sesame"


@pytest.mark.parametrize(("number", "password"), [(0, None), (1000, "sesame")])
def test_on_the_controllers_own_machine_it_counts_who_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, password: str | None
) -> None:
    monkeypatch.setenv("PROVISION_SUDO_PASSWORD", "sesame")
    monkeypatch.setattr("os.geteuid", lambda: number)
    access = {"local": True, "sudo_password": True}  # and no user: the one of ssh says nothing here
    groups = {"head": {"hosts": "h1", "roles": ["head"], "access": access}}
    file = SiteFile.model_validate({"cluster": "tiny", "groups": groups})
    site = Site.from_file(file, tmp_path / "tiny.yml")
    assert sudo_password(site, site.nodes.values()) == password


def test_the_password_is_asked_for_once_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def getpass(prompt: str) -> str:
        asked.append(prompt)
        return "sesame"

    monkeypatch.delenv("PROVISION_SUDO_PASSWORD", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", getpass)
    site = asking(tmp_path)
    assert sudo_password(site, site.in_group("gpu")) == "sesame"
    assert asked == ["sudo password for gpu-[1-3]: "]


def test_without_terminal_and_variable_it_is_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROVISION_SUDO_PASSWORD", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    site = asking(tmp_path)
    with pytest.raises(SiteError, match="set PROVISION_SUDO_PASSWORD"):
        sudo_password(site, site.nodes.values())
