"""Base: accounts, files, states of packages and identities, from small site files."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.components import registry
from provision.components.base import checks, exports
from provision.components.base.settings import BaseSettings
from provision.profiles import distribution
from provision.report.model import Verdict
from provision.site.lock import Lock
from provision.site.models import Site, SiteFile
from provision.verify.check import Found, Target

# ssh-ed25519 with an all-zero key: public, and nobody's
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA ada@desk"


def make_site(tmp_path: Path, base: dict[str, Any] | None = None, **document: Any) -> Site:
    groups = {
        "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head"]},
        "gpu": {"hosts": "g[01-02]", "addresses": "192.0.2.[11-12]", "roles": ["worker"]},
    }
    whole = {"cluster": "tiny", "groups": groups, "base": base or {}, **document}
    return Site.from_file(SiteFile.model_validate(whole), tmp_path / "tiny.yml")


def rules(site: Site) -> list[str]:
    return [problem.rule for problem in exports.problems(site)]


def test_a_kernel_may_lack_what_the_site_file_does_not_ask_for() -> None:
    base = BaseSettings(sysctl={"net/ipv6/neigh/default/gc_thresh1": 1, "vm.overcommit_memory": 1})
    assert "net.ipv6.neigh.default.gc_thresh2" in exports.unasked(base)
    assert "net.ipv6.neigh.default.gc_thresh1" not in exports.unasked(base)
    assert "vm.overcommit_memory" not in exports.unasked(base)


def test_hosts_lists_every_node_by_each_of_its_addresses(tmp_path: Path) -> None:
    site = make_site(
        tmp_path,
        {"hosts": {"licences": "198.51.100.7"}},
        nodes={"g01": {"addresses": {"fabric": "2001:db8::11"}}},
    )
    text = exports.hosts(site, site.head)
    assert text.splitlines()[:2] == ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    assert text.splitlines()[5:] == [
        "192.0.2.1 h1",
        "192.0.2.11 g01",
        "2001:db8::11 g01-fabric",
        "192.0.2.12 g02",
        "198.51.100.7 licences",
    ]


def test_hosts_is_the_same_on_every_node_and_gives_no_node_a_loopback_address(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    texts = {exports.hosts(site, node) for node in site.nodes.values()}
    assert len(texts) == 1
    assert not [
        line for line in texts.pop().splitlines() if line.startswith("127.") and "localhost" not in line
    ]


def test_a_node_with_a_domain_is_also_known_by_its_short_name(tmp_path: Path) -> None:
    groups = {"head": {"hosts": "h1.example.org", "addresses": "2001:db8::1", "roles": ["head"]}}
    site = make_site(tmp_path, groups=groups)
    assert "2001:db8::1 h1.example.org h1\n" in exports.hosts(site, site.head)


def test_a_node_without_an_address_is_left_to_dns(tmp_path: Path) -> None:
    site = make_site(tmp_path, groups={"head": {"hosts": "h1", "roles": ["head"]}})
    assert "h1" not in exports.hosts(site, site.head)


def test_users_have_the_same_numbers_everywhere_and_a_group_of_their_own(tmp_path: Path) -> None:
    site = make_site(
        tmp_path,
        {
            "groups": {"lab": 6000},
            "users": {"ada": {"uid": 5001}, "bob": {"uid": 5002, "group": "lab", "groups": ["video"]}},
        },
    )
    assert [(group.name, group.gid) for group in exports.groups(site)] == [("lab", 6000), ("ada", 5001)]
    ada, bob = exports.users(site)
    assert (ada.uid, ada.group, ada.home, ada.shell) == (5001, "ada", "/home/ada", "/bin/bash")
    assert (bob.group, bob.groups, bob.create_home) == ("lab", ("video",), False)
    assert rules(site) == []


@pytest.mark.parametrize(
    ("base", "rule"),
    [
        ({"users": {"a": {"uid": 5001}, "b": {"uid": 5001}}}, "equal-uid"),
        ({"groups": {"x": 6000, "y": 6000}}, "equal-gid"),
        ({"groups": {"x": 5001}, "users": {"a": {"uid": 5001}}}, "equal-gid"),
        ({"groups": {"a": 6000}, "users": {"a": {"uid": 5001}}}, "equal-gid"),
        ({"users": {"a": {"uid": 5001, "group": "nobodies"}}}, "unknown-group"),
        ({"users": {"a": {"uid": 5001}}, "absent_users": ["a"]}, "user-absent-and-present"),
        ({"absent_users": ["admin"]}, "access-user-absent"),
        ({"users": {"admin": {"uid": 5001, "sudo": "password"}}}, "access-user-sudo"),
        ({"hosts": {"g01": "192.0.2.99"}}, "host-twice"),
    ],
)
def test_what_contradicts_itself_is_a_problem(tmp_path: Path, base: dict[str, Any], rule: str) -> None:
    assert rule in rules(make_site(tmp_path, base, access={"user": "admin"}))


def test_accounts_of_one_group_of_nodes_only_are_a_problem(tmp_path: Path) -> None:
    groups = {
        "head": {"hosts": "h1", "roles": ["head"], "settings": {"base": {"users": {"a": {"uid": 5001}}}}}
    }
    (problem,) = exports.problems(make_site(tmp_path, groups=groups))
    assert (problem.rule, problem.key) == ("accounts-differ", ("groups", "head", "settings", "base", "users"))


def test_sudo_with_and_without_a_password(tmp_path: Path) -> None:
    users = {
        "ada": {"uid": 5001, "sudo": "nopasswd"},
        "bob": {"uid": 5002, "sudo": "password"},
        "eve": {"uid": 5003},
    }
    text = exports.sudoers(BaseSettings.model_validate({"users": users}))
    assert text == "ada ALL=(ALL:ALL) NOPASSWD: ALL\nbob ALL=(ALL:ALL) ALL\n"
    assert exports.sudoers(BaseSettings()) is None


@pytest.mark.parametrize(
    "key",
    [
        "ssh-ed25519",
        "ssh-ed25519 not-base64",
        "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIAAA",  # says RSA, is Ed25519
        KEY + "\n" + KEY,
    ],
)
def test_what_is_not_a_public_key_is_refused(key: str) -> None:
    with pytest.raises(ValidationError):
        BaseSettings.model_validate({"users": {"ada": {"uid": 5001, "keys": [key]}}})


def test_a_private_key_is_refused_without_showing_it() -> None:
    with pytest.raises(ValidationError) as refused:
        BaseSettings.model_validate(
            {"users": {"ada": {"uid": 5001, "keys": ["-----BEGIN OPENSSH PRIVATE KEY-----"]}}}
        )
    assert (
        refused.value.errors()[0]["msg"] == "Value error, this is a private key; the public one ends in .pub"
    )


def test_keys_may_carry_options(tmp_path: Path) -> None:
    line = f'from="10.0.0.0/8",no-pty {KEY}'
    site = make_site(tmp_path, {"users": {"ada": {"uid": 5001, "keys": [line, KEY]}}})
    assert exports.keys(site) == {"ada": f"{line}\n{KEY}\n"}


@pytest.mark.parametrize(
    "base",
    [
        {"users": {"ada": {"uid": 12}}},
        {"users": {"Ada": {"uid": 5001}}},
        {"users": {"ada": {"uid": 5001, "home": "home"}}},
        {"users": {"ada": {"uid": 5001, "home": "/data/{ada}*"}}},
        {"timezone": "../../etc/passwd"},
        {"locale": "en_US"},
        {"sysctl": {"vm swappiness": 1}},
        {"journal": {"size": "lots"}},
        {"hold": {"also": ['"; evil']}},
        {"hosts": {"x": "not-an-address"}},
    ],
)
def test_values_that_cannot_be_right_are_refused(base: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BaseSettings.model_validate(base)


def test_memory_can_be_pinned_without_limit_by_users_and_services() -> None:
    base = BaseSettings()
    assert exports.limits(base) == (
        "* - memlock unlimited\n* - nofile 131072\nroot - memlock unlimited\nroot - nofile 131072\n"
    )
    assert exports.manager_limits(base) == {"DefaultLimitMEMLOCK": "infinity", "DefaultLimitNOFILE": "131072"}
    some = BaseSettings.model_validate({"limits": {"memlock": "64"}})
    assert exports.manager_limits(some)["DefaultLimitMEMLOCK"] == "65536"  # KiB there, bytes here


def test_the_site_files_kernel_parameters_win_in_either_spelling() -> None:
    base = BaseSettings.model_validate({"sysctl": {"vm/swappiness": "1", "net.core.somaxconn": 99}})
    wanted = exports.sysctl(base)
    assert (wanted["vm.swappiness"], wanted["net.core.somaxconn"]) == ("1", 99)
    assert wanted["kernel.numa_balancing"] == 0


# Packages that must not move by themselves (OS-01)


@pytest.mark.parametrize(
    "package",
    [
        "nvidia-driver-570-server",
        "nvidia-dkms-570-open",
        "nvidia-fabricmanager-570",
        "nvidia-kernel-common-570",
        "nvidia-firmware-570",
        "libnvidia-common-570",
        "libnvidia-compute-570",
        "libnvidia-nscq-570",
        "libcuda1",
        "cuda-drivers-570",
        "linux-modules-nvidia-570-server-generic",
        "datacenter-gpu-manager-4-core",
        "slurmd",
        "slurm-wlm-basic-plugins",
        "libslurm42t64",
        "munge",
        "libmunge2",
    ],
)
def test_the_whole_set_of_driver_and_scheduler_is_held(package: str) -> None:
    held = exports.held(BaseSettings())
    assert any(fnmatch.fnmatchcase(package, glob) for glob in held)
    assert any(re.match(exports.expression(glob), package) for glob in held)


def test_the_kernel_is_held_when_asked_for_and_other_packages_never() -> None:
    plain, kernel = BaseSettings(), BaseSettings.model_validate({"hold": {"kernel": True, "also": ["ofed*"]}})
    for package, held in [("linux-image-amd64", kernel), ("ofed-scripts", kernel)]:
        assert any(fnmatch.fnmatchcase(package, glob) for glob in exports.held(held))
        assert not any(fnmatch.fnmatchcase(package, glob) for glob in exports.held(plain))
    assert not any(fnmatch.fnmatchcase("openssl", glob) for glob in exports.held(kernel))


@given(st.text("ab+.-*", min_size=1, max_size=6), st.text("ab+.-", max_size=8))
def test_the_expression_says_the_same_as_the_pattern(glob: str, name: str) -> None:
    assert bool(re.match(exports.expression(glob), name)) == fnmatch.fnmatchcase(name, glob)


def test_the_pin_keeps_what_is_installed() -> None:
    (pin,) = re.findall(
        r"Package: (.*)\nPin: (.*)\nPin-Priority: (.*)\n", exports.apt_preferences(BaseSettings())
    )
    assert pin == (" ".join(exports.HELD), "release a=now", "990")


def test_the_list_for_unattended_upgrades_is_in_apts_own_language() -> None:
    text = exports.unattended_upgrades(BaseSettings.model_validate({"hold": {"also": ["libfoo++1"]}}))
    assert text.startswith("Unattended-Upgrade::Package-Blacklist {\n")
    assert '  "^.*nvidia";\n  "^cuda";\n' in text
    assert '  "^libfoo\\+\\+1$";\n' in text
    assert text.endswith("};\n")


def test_priorities_of_installed_versions_are_read_from_apt() -> None:
    policy = """slurmd:
  Installed: 24.11.5-4
  Candidate: 24.11.5-4
  Version table:
     24.11.6-1 90
        500 http://mirror.example/debian trixie/main amd64 Packages
 *** 24.11.5-4 990
        100 /var/lib/dpkg/status
munge:
  Installed: 0.5.16-1
  Candidate: 0.5.16-1
  Version table:
 *** 0.5.16-1 500
        500 http://mirror.example/debian trixie/main amd64 Packages
        100 /var/lib/dpkg/status
"""
    assert checks.installed_priorities(policy) == {"slurmd": 990, "munge": 500}


# Identities (INV-02, INV-18)


def test_clones_of_one_image_are_told_by_host_name_and_machine_id() -> None:
    image = exports.Identity("ubuntu", "c" * 32, "4C4C4544-0001")
    other = exports.Identity("g03", "d" * 32, "4c4c4544-0002")
    found = exports.identity_findings(
        {"g01": image, "g02": exports.Identity("Ubuntu", "c" * 32), "g03": other}
    )
    assert [(finding.verdict, finding.check, finding.subject, finding.read) for finding in found] == [
        (Verdict.FAIL, "equal-hostname", "g01, g02", "ubuntu"),
        (Verdict.FAIL, "equal-machine-id", "g01, g02", "c" * 32),
    ]


def test_different_machines_are_no_finding() -> None:
    nodes = {name: exports.Identity(name, name * 16, None) for name in ("aa", "bb")}
    assert exports.identity_findings(nodes) == []


def test_an_identity_is_host_name_machine_id_and_perhaps_a_product_uuid() -> None:
    assert exports.parse_identity("g01\nabc\n") == exports.Identity("g01", "abc", None)
    assert exports.parse_identity("g01\nabc\n4c4c\n") == exports.Identity("g01", "abc", "4c4c")
    assert exports.parse_identity("g01\n\n4c4c\n") == exports.Identity("g01", None, "4c4c")
    with pytest.raises(ValueError, match="machine-id"):
        exports.parse_identity("g01\n")


@pytest.mark.parametrize(
    ("written", "told"),
    [("0123abcd\n", ["0123abcd"]), ("", [""]), (None, [""])],
)
def test_a_machine_id_that_is_empty_or_missing_is_told_as_such(
    tmp_path: Path, written: str | None, told: list[str]
) -> None:
    if written is not None:
        (tmp_path / "machine-id").write_text(written)
    query = exports.IDENTITY_QUERY.replace("/etc/", f"{tmp_path}/").replace("hostname", "echo g01")
    answer = subprocess.run(["sh", "-c", query], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[:2] == ["g01", *told]


def test_a_machine_id_that_cannot_be_read_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "machine-id").mkdir()
    query = exports.IDENTITY_QUERY.replace("/etc/", f"{tmp_path}/").replace("hostname", "echo g01")
    assert subprocess.run(["sh", "-c", query], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize(
    ("read", "name", "same"),
    [
        ("head01", "head01", True),
        ("head01.lab.internal", "head01", True),
        ("head01", "head01.lab.internal", True),
        ("Head01", "head01", True),
        ("vm-1-74.lab.internal", "head01", False),
        ("head01.other.internal", "head01.lab.internal", False),
    ],
)
def test_the_host_name_must_be_the_one_in_the_site_file(read: str, name: str, same: bool) -> None:
    assert exports.same_host(read, name) is same


# What checks read


def test_addresses_that_names_resolve_to() -> None:
    wanted = {"h1": "192.0.2.1", "g01": "192.0.2.11", "g02": None, "g03": "192.0.2.13"}
    resolved = {
        "h1": {"192.0.2.1", "2001:db8::1"},
        "g01": {"127.0.1.1"},
        "g02": {"198.51.100.2"},
        "g03": set[str](),
    }
    assert checks.wrong_addresses(resolved, wanted, own="g01") == [
        "g01 is 127.0.1.1: daemons would listen where nobody else can reach them",
        "g03 does not resolve",
    ]
    assert checks.wrong_addresses({"g02": {"192.0.2.7", "198.51.100.2"}}, wanted, own="h1") == [
        "g02: 2 candidate addresses, none chosen: 192.0.2.7, 198.51.100.2; "
        "name the right one in the site file, or networks.management"
    ]
    assert (
        checks.wrong_addresses({"g02": {"192.0.2.7", "198.51.100.2"}}, wanted, "h1", ["192.0.2.0/24"]) == []
    )
    assert checks.wrong_addresses({"g02": {"192.0.2.7", "2001:db8::1"}}, wanted, own="h1") == []
    assert checks.wrong_addresses({"h1": {"192.0.2.9"}}, wanted, own="g01") == [
        "h1 is 192.0.2.9 instead of 192.0.2.1"
    ]


def test_kernel_parameters_are_compared_with_single_spaces() -> None:
    assert checks.parse_sysctl("net.ipv4.tcp_rmem = 4096\t131072\t6291456\n") == {
        "net.ipv4.tcp_rmem": "4096 131072 6291456"
    }


# Checks whose subject a container cannot change: no lab test can break them


@dataclass(frozen=True)
class Answer:
    rc: int = 0
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Host:
    """A node that gives one answer."""

    answer: Answer

    def run(self, command: str) -> Answer:
        return self.answer


def found(tmp_path: Path, name: str, answer: Answer, limits: dict[str, str] | None = None) -> Found:
    site = make_site(tmp_path, {"swap": "off"})
    (check,) = (check for check in registry.checks("base") if check.name == name)
    at = Target(
        site,
        site.head,
        "base",
        Lock(),
        distribution("debian", "13"),
        Host(answer),
        limits or {},
        lambda _: None,
    )
    return check.run(at)


SWAPS = "Filename\tType\tSize\tUsed\tPriority\n"


@pytest.mark.parametrize(
    ("name", "answer", "verdict", "read"),
    [
        ("swap-off", Answer(stdout=SWAPS), Verdict.PASS, "none"),
        ("swap-off", Answer(stdout=f"{SWAPS}/dev/sda3 partition 9 0 -2\n"), Verdict.FAIL, "/dev/sda3"),
        ("swap-off", Answer(1, stderr="cat: /proc/swaps: Permission denied"), Verdict.UNKNOWN, None),
        ("governor", Answer(stdout="performance\nperformance\n"), Verdict.PASS, "performance"),
        ("governor", Answer(stdout="performance\npowersave\n"), Verdict.FAIL, "performance, powersave"),
        ("governor", Answer(stdout=""), Verdict.SKIP, None),
        ("governor", Answer(1, stderr="cat: Input/output error"), Verdict.UNKNOWN, None),
        ("journal-persistent", Answer(stdout="disk\n0123abcd\n"), Verdict.PASS, "on disk"),
        ("journal-persistent", Answer(stdout="memory\n0123abcd\n"), Verdict.FAIL, "in memory only"),
        ("journal-persistent", Answer(stdout="memory\n\n"), Verdict.FAIL, "this machine has no id"),
        ("journal-persistent", Answer(1, stderr="cat: Is a directory"), Verdict.UNKNOWN, None),
        (
            "user-limits",
            Answer(stdout="unlimited\n131072\n"),
            Verdict.PASS,
            "memlock unlimited, nofile 131072",
        ),
        ("user-limits", Answer(stdout="8192\n131072\n"), Verdict.FAIL, "memlock 8192, nofile 131072"),
        ("user-limits", Answer(127, stderr="sh: runuser: not found"), Verdict.UNKNOWN, None),
    ],
)
def test_swap_governor_limits_and_journal(
    tmp_path: Path, name: str, answer: Answer, verdict: Verdict, read: str | None
) -> None:
    result = found(tmp_path, name, answer)
    assert (result.verdict, result.read) == (verdict, read)
    if verdict is Verdict.UNKNOWN:
        assert result.why == answer.stderr


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (Answer(stdout="h1\n0123abcd\n"), Verdict.PASS),
        (Answer(stdout="h1\n\n"), Verdict.FAIL),
        (Answer(1, stderr="cat: Is a directory"), Verdict.UNKNOWN),
    ],
)
def test_a_node_without_machine_id_is_known_and_one_that_is_not_read_is_not(
    tmp_path: Path, answer: Answer, verdict: Verdict
) -> None:
    site = Site.from_file(
        SiteFile.model_validate({"cluster": "one", "groups": {"all": {"hosts": "h1", "roles": ["head"]}}}),
        tmp_path / "one.yml",
    )
    (check,) = (check for check in registry.checks("base") if check.name == "machine-id-unique")
    at = Target(site, site.head, "base", Lock(), distribution("debian", "13"), Host(answer))
    assert check.run(at).verdict is verdict


def test_a_limit_that_the_node_cannot_set_is_left_out(tmp_path: Path) -> None:
    answer = Answer(stdout="8192\n131072\n")
    one = found(tmp_path, "user-limits", answer, {"rlimit:memlock": "started with less"})
    assert (one.verdict, one.read) == (Verdict.PASS, "nofile 131072")
    none = found(tmp_path, "user-limits", answer, {"rlimit:*": "started with less"})
    assert (none.verdict, none.why) == (Verdict.SKIP, "started with less")
