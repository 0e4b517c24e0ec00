"""Storage: what is mounted where, units, and how the node's answers are read."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.components.storage import checks, deploy, exports
from provision.components.storage.settings import StorageSettings
from provision.profiles import distribution
from provision.report.model import Verdict
from provision.site.lock import Lock
from provision.site.models import Site, SiteFile
from provision.verify.check import Target

GROUPS: dict[str, Any] = {
    "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head"]},
    "gpu": {"hosts": "g[1-2]", "addresses": "192.0.2.[11-12]", "roles": ["worker"]},
}
NAS = {"path": "/home", "source": "nas:/export/home"}


def make_site(tmp_path: Path, groups: dict[str, Any] | None = None, **storage: Any) -> Site:
    document = {
        "cluster": "tiny",
        "groups": groups or GROUPS,
        "base": {"users": {"alice": {"uid": 2001}, "svc": {"uid": 2002, "home": "/opt/svc"}}},
        "storage": storage,
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def seen(site: Site, name: str) -> list[tuple[str, str, str]]:
    return [(each.path, each.source, each.type) for each in exports.mounts(site, site.nodes[name])]


def test_without_a_word_the_head_serves_by_nfs(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert seen(site, "g1") == [
        ("/home", "h1:/srv/provision/home", "nfs"),
        ("/shared", "h1:/srv/provision/shared", "nfs"),
    ]
    assert seen(site, "h1") == [
        ("/home", "/srv/provision/home", "none"),
        ("/shared", "/srv/provision/shared", "none"),
    ]
    home, shared = exports.nfs_exports(site).splitlines()
    identity = "fsid=23d36019-e8d1-5b37-a2fb-35a44091987c"
    assert home.startswith(f"/srv/provision/home 192.0.2.1(rw,sync,no_subtree_check,{identity}) 192.0.2.11(")
    assert identity not in shared
    assert exports.nfs_exports(make_site(tmp_path, mounts=[NAS])) == f"{shared}\n"
    assert "no_root_squash" not in exports.nfs_exports(site)


def test_servers_that_are_there_come_first(tmp_path: Path) -> None:
    lustre = {"path": "/data", "source": "10.0.0.5@o2ib:/fs", "type": "lustre", "roles": ["worker"]}
    site = make_site(tmp_path, mounts=[NAS, lustre])
    assert exports.served_paths(site) == ["/shared"]
    assert ("/home", "nas:/export/home", "nfs") in seen(site, "h1")
    assert ("/data", "10.0.0.5@o2ib:/fs", "lustre") in seen(site, "g1")
    assert "/data" not in [path for path, _, _ in seen(site, "h1")]
    assert exports.homes(site) == []  # the homes are another server's
    everything = make_site(tmp_path, mounts=[NAS], shared=["/home"])
    assert exports.server(everything) is None


def test_a_storage_node_serves_instead_of_the_head(tmp_path: Path) -> None:
    groups = {**GROUPS, "nas": {"hosts": "s1", "roles": ["storage"]}}
    site = make_site(tmp_path, groups, provider="glusterfs", data="/data/gluster")
    assert (
        seen(site, "h1")
        == seen(site, "s1")
        == [
            ("/home", "s1:/home", "glusterfs"),
            ("/shared", "s1:/shared", "glusterfs"),
        ]
    )
    assert exports.data_path(site, "/home") == "/data/gluster/home"
    assert exports.gluster_clients(site) == "192.0.2.1,192.0.2.11,192.0.2.12,s1"  # never everybody
    assert exports.gluster_clients(make_site(tmp_path)) == "192.0.2.1,192.0.2.11,192.0.2.12"


def test_only_the_node_that_serves_must_run_a_server(tmp_path: Path) -> None:
    groups = {**GROUPS, "nas": {"hosts": "s1", "roles": ["storage"]}}
    site = make_site(tmp_path, groups, provider="glusterfs")
    units = {name: exports.serving_unit(site, node) for name, node in site.nodes.items()}
    assert units == {**dict.fromkeys(site.nodes, None), "s1": "glusterd"}
    site = make_site(tmp_path)
    assert exports.serving_unit(site, site.head) == "nfs-server"
    everything = make_site(tmp_path, mounts=[NAS], shared=["/home"])
    assert exports.serving_unit(everything, everything.head) is None


def test_homes_on_what_is_served_are_made_by_the_server(tmp_path: Path) -> None:
    assert exports.homes(make_site(tmp_path)) == [("alice", "alice", "/home/alice")]


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/home", "home"),
        ("/shared/data", "shared-data"),
        ("/a-b/c", r"a\x2db-c"),
        ("/x/.y", r"x-.y"),
        ("/.x", r"\x2ex"),
        ("/", "-"),
    ],
)
def test_unit_names_are_systemds(path: str, unit: str) -> None:
    assert exports.escape_path(path) == unit


@given(st.from_regex(r"(/[A-Za-z0-9_][A-Za-z0-9_.+-]{0,8}){1,4}", fullmatch=True))
def test_unit_names_can_be_read_back(path: str) -> None:
    name = exports.escape_path(path)
    back = name.replace("-", "/").encode().decode("unicode_escape")
    assert f"/{back}" == path


def test_the_unit_waits_for_the_network_where_it_needs_it(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    remote = exports.mount_unit(exports.mounts(site, site.nodes["g1"])[0])
    assert "What=h1:/srv/provision/home\nWhere=/home\nType=nfs\nOptions=hard,vers=4.2,_netdev\n" in remote
    assert "WantedBy=remote-fs.target" in remote
    local = exports.mount_unit(exports.mounts(site, site.head)[0])
    assert "RequiresMountsFor=/srv/provision/home" in local
    assert "network" not in local


def test_a_mount_whose_server_boots_later_is_tried_again(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    unit = exports.mount_unit(exports.mounts(site, site.nodes["g1"])[0])
    assert "\nOnFailure=provision-mount-again@%p.service\n" in unit
    assert "ExecStart=/usr/bin/systemctl start %i.mount\nRestart=on-failure\n" in exports.mount_again()


def test_what_must_be_mounted_before_a_job_runs(tmp_path: Path) -> None:
    site = make_site(tmp_path, scratch={"device": "/dev/nvme1n1"})
    assert exports.mounted(site, site.nodes["g1"], {}) == ["/home", "/shared", "/scratch"]
    assert exports.mounted(site, site.nodes["g1"], {"mount:nfs*": "no kernel client"}) == ["/scratch"]
    assert exports.mounted(site, site.head, {}) == ["/home", "/shared"]


def test_jobs_own_tmp_lies_on_scratch_where_there_is_one(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert exports.private_tmp(site, site.nodes["g1"]) == "/var/tmp/slurm"
    site = make_site(tmp_path, scratch={"device": "/dev/nvme1n1"})
    assert exports.private_tmp(site, site.nodes["g1"]) == "/scratch/tmp"
    assert exports.scratch(site, site.head) is None
    site = make_site(tmp_path, private_tmp=False)
    assert exports.private_tmp(site, site.nodes["g1"]) is None


@pytest.mark.parametrize(
    "storage",
    [
        {"mounts": [{"path": "/etc", "source": "nas:/x"}]},
        {"mounts": [{"path": "data", "source": "nas:/x"}]},
        {"mounts": [{"path": "/a b", "source": "nas:/x"}]},
        {"mounts": [NAS, NAS]},
        {"mounts": [{**NAS, "options": "rw, hard"}]},
        {"shared": ["/home", "/home"]},
        {"scratch": {"device": "nvme1n1"}},
        {"provider": "smb"},
    ],
)
def test_what_cannot_be_mounted_is_refused(storage: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        StorageSettings.model_validate(storage)


def test_problems_of_the_site_file(tmp_path: Path) -> None:
    groups = {
        **GROUPS,
        "nas": {"hosts": "s[1-2]", "roles": ["storage"], "settings": {"storage": {"provider": "nfs"}}},
    }
    site = make_site(tmp_path, groups, data="/shared/data")
    rules = [problem.rule for problem in exports.problems(site)]
    assert rules == ["storage-differs", "storage-differs", "storage-data-below-share", "storage-one-server"]
    assert list(exports.problems(make_site(tmp_path))) == []


def findmnt(source: str, kind: str) -> str:
    return json.dumps({"filesystems": [{"target": "/x", "source": source, "fstype": kind, "options": "rw"}]})


@pytest.mark.parametrize(
    ("source", "kind", "wanted", "right"),
    [
        ("h1:/home", "fuse.glusterfs", exports.Mounted("/home", "h1:/home", "glusterfs", ""), True),
        ("h1:home", "fuse.glusterfs", exports.Mounted("/home", "h1:/home", "glusterfs", ""), True),
        ("h2:/home", "fuse.glusterfs", exports.Mounted("/home", "h1:/home", "glusterfs", ""), False),
        ("nas:/e", "nfs4", exports.Mounted("/e", "nas:/e", "nfs", ""), True),
        ("nas:/e", "cifs", exports.Mounted("/e", "nas:/e", "nfs", ""), False),
    ],
)
def test_what_is_mounted_is_compared_with_what_was_wanted(
    source: str, kind: str, wanted: exports.Mounted, right: bool
) -> None:
    actual = checks.parse_findmnt(findmnt(source, kind))
    assert actual is not None
    assert checks.same_mount(actual, wanted) is right


def test_nothing_mounted_and_nonsense_are_two_things() -> None:
    assert checks.parse_findmnt("") is None
    with pytest.raises(ValueError, match="Expecting"):
        checks.parse_findmnt("findmnt: error")


def test_df_is_read_with_and_without_inodes() -> None:
    text = "Mounted on Use% IUse%\n/home       91%   12%\n/shared      5%     -\n"
    assert checks.parse_df(text) == {"/home": (91, 12), "/shared": (5, 0)}
    with pytest.raises(ValueError, match="not a line of df"):
        checks.parse_df("Mounted on Use% IUse%\nbroken\n")


@pytest.mark.parametrize(
    ("own", "kept", "hangs", "expected"),
    [
        ("ssh-ed25519 A\n", "", False, 1),
        ("ssh-ed25519 A\n", "ssh-ed25519 A\n", False, 0),
        ("", "", False, 0),  # no keys to keep
        ("ssh-ed25519 A\n", "", True, 2),
        ("ssh-ed25519 A\n", "ssh-ed25519 A\n", True, 0),  # then nobody looks into the home
    ],
)
def test_a_home_that_hangs_is_asked_for_keys_only_where_there_are_none_yet(
    tmp_path: Path, own: str, kept: str, hangs: bool, expected: int
) -> None:
    keys, file = tmp_path / "homes/ops/.ssh/authorized_keys", tmp_path / "ops"
    keys.parent.mkdir(parents=True)
    keys.write_text(own)
    file.write_text(kept)
    programs = {"getent": f"echo ops:x:1:1::{tmp_path}/homes/ops:/bin/sh"}
    if hangs:
        programs["timeout"] = "exit 124"
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = deploy._KEYS_TEST.format(user="ops", file=file, below=f"{tmp_path}/homes/?*")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["sh", "-c", script], env=path, stderr=subprocess.DEVNULL).returncode == expected


@pytest.mark.parametrize(
    ("source", "stats", "rc", "verdict"),
    [
        ("/dev/sda1[/srv/provision/home]", "2049:7 2049:7", 0, Verdict.PASS),
        ("/dev/sdb1[/provision/home]", "2065:7 2065:7", 0, Verdict.PASS),  # /srv is a file system of its own
        ("/dev/sda1[/srv/other]", "2049:9 2049:7", 0, Verdict.FAIL),
        ("/dev/sda1[/srv/provision/home]", "2049:7", 1, Verdict.FAIL),  # its source is gone
        ("/dev/sda1[/srv/provision/home]", "", 124, Verdict.UNKNOWN),
    ],
)
def test_the_server_sees_the_folder_that_it_serves_wherever_that_lies(
    tmp_path: Path, source: str, stats: str, rc: int, verdict: Verdict
) -> None:
    site = make_site(tmp_path, shared=["/home"])

    def run(command: str) -> SimpleNamespace:
        if "findmnt" in command:
            listed = {"filesystems": [{"target": "/home", "source": source, "fstype": "ext4"}]}
            return SimpleNamespace(rc=0, stdout=json.dumps(listed), stderr="")
        return SimpleNamespace(rc=rc, stdout=stats, stderr="")

    profile = distribution("debian", "13")
    at = Target(site, site.head, "storage", Lock(), profile, SimpleNamespace(run=run))
    assert checks.mounted.run(at).verdict is verdict
