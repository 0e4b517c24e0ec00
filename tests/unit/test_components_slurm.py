"""Slurm: files rendered from site and lock, what is wrong in such files, and what its daemons say."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.components.slurm import acceptance, accounting, checks, deploy, exports, lint
from provision.components.slurm.settings import Qos, SlurmSettings
from provision.engine import facts, ops
from provision.engine.record import OperationFailed
from provision.engine.remote import Output
from provision.health.finding import PASS
from provision.inspect.judge import inspect
from provision.profiles import distribution
from provision.profiles.gpu import all_models
from provision.report.model import Verdict
from provision.site.hostlist import expand
from provision.site.lock import Lock
from provision.site.models import Gpu, Hardware, Site, SiteFile

DEBIAN = distribution("debian", "13")
BIG = Hardware(sockets=2, cores=32, threads=2, memory=1_031_513)
SMALL = Hardware(sockets=2, cores=32, threads=2, memory=515_513)
GPU = {"model": "h100-sxm", "count": 8}
GROUPS: dict[str, Any] = {
    "head": {"hosts": "h1", "addresses": "192.0.2.1", "roles": ["head"]},
    "gpu": {"hosts": "g[01-03]", "addresses": "192.0.2.[11-13]", "roles": ["worker"], "gpu": GPU},
}


def make_site(
    tmp_path: Path, slurm: dict[str, Any] | None = None, groups: dict[str, Any] | None = None, **more: Any
) -> Site:
    document = {
        "cluster": "tiny",
        "groups": groups or GROUPS,
        "base": {"users": {"alice": {"uid": 2001}, "bob": {"uid": 2002}}},
        "scheduler": {"slurm": slurm or {}},
        **more,
    }
    return Site.from_file(SiteFile.model_validate(document), tmp_path / "tiny.yml")


def lock(**hardware: Hardware) -> Lock:
    return Lock(hardware=hardware or {"g01": BIG})


def conf(site: Site, known: Lock | None = None, **more: Any) -> str:
    return exports.slurm_conf(site, known or lock(), profile=DEBIAN, **more)


# Files


def test_jobs_have_the_groups_of_their_node_where_only_nodes_know_them(tmp_path: Path) -> None:
    line = "LaunchParameters=disable_send_gids\n"
    assert line in conf(make_site(tmp_path, containers={"docker": {"members": ["alice"]}}))
    assert line not in conf(make_site(tmp_path, containers={"docker": {}}))
    assert line not in conf(make_site(tmp_path))


def test_equal_nodes_share_a_line_and_a_dead_one_stays_in_it(tmp_path: Path) -> None:
    text = conf(make_site(tmp_path))  # only g01 was ever read: its group is taken to be alike
    lines = [line for line in text.splitlines() if line.startswith("NodeName")]
    assert lines == [
        "NodeName=g[01-03] Sockets=2 CoresPerSocket=32 ThreadsPerCore=2 RealMemory=1010880 Gres=gpu:h100_80gb_hbm3:8"
    ]
    assert "GresTypes=gpu" in text.splitlines()
    assert exports.gres_conf(make_site(tmp_path), lock(), DEBIAN).splitlines() == [
        "AutoDetect=nvml",
        "NodeName=g[01-03] Name=gpu Type=h100_80gb_hbm3 File=/dev/nvidia[0-7]",
    ]


def test_a_gres_type_is_part_of_the_name_that_nvml_gives_the_gpu() -> None:
    """slurmd drops a line of gres.conf whose type is not: with AutoDetect the GPUs would be lost."""
    for profile in all_models():
        for product in profile.products[:1]:
            told = product.lower().replace(" ", "_")  # as Slurm's plugin does
            assert exports.gres_type(profile.name) in told
    assert len({exports.gres_type(profile.name) for profile in all_models()}) == len(all_models())
    assert exports.gres_type("RTX PRO 6000") == "rtx_pro_6000"


def test_gpus_are_found_by_nvml_where_slurm_can_ask_it(tmp_path: Path) -> None:
    old = distribution("debian", "12")
    gpu = {**GPU, "cores": ["0-31", "32-63"]}
    site = make_site(tmp_path, groups=GROUPS | {"gpu": GROUPS["gpu"] | {"gpu": gpu}})
    one = "NodeName=g[01-03] Name=gpu Type=h100_80gb_hbm3"
    assert exports.gres_conf(site, lock(), DEBIAN).splitlines() == [
        "AutoDetect=nvml",
        f"{one} File=/dev/nvidia[0-7]",
    ]
    files = [
        "AutoDetect=off",
        f"{one} File=/dev/nvidia[0-3] Cores=0-31",
        f"{one} File=/dev/nvidia[4-7] Cores=32-63",
    ]
    assert exports.gres_conf(site, lock(), old).splitlines() == files
    told = make_site(tmp_path, {"gpu_detection": "files"}, GROUPS | {"gpu": GROUPS["gpu"] | {"gpu": gpu}})
    assert exports.gres_conf(told, lock(), DEBIAN).splitlines() == files
    built = make_site(tmp_path, {"source": "repository"})  # nobody knows what it was built with
    assert exports.gpu_detection(built, DEBIAN) == "files"
    assert lint.gres_mistakes("\n".join(files), conf(site)) == []


def test_slices_are_gres_of_their_own(tmp_path: Path) -> None:
    """MIG-04: slurm.conf and the MIG layout come from one place."""
    layout = {"0": {"1g.10gb": 7}, "1": {"3g.40gb": 2}, "2": {"1g.10gb+me": 1, "3g.40gb": 1}}
    site = make_site(tmp_path, nvidia={"mig": layout})
    (line,) = [line for line in conf(site).splitlines() if line.startswith("NodeName")]
    whole = "h100_80gb_hbm3"
    assert line.endswith(f" Gres=gpu:{whole}:5,gpu:{whole}_1g.10gb:8,gpu:{whole}_3g.40gb:3")
    assert exports.gres_conf(site, lock(), DEBIAN) == "AutoDetect=nvml\n"
    all_split = make_site(tmp_path, nvidia={"mig": {"all": {"7g.80gb": 1}}})
    assert f" Gres=gpu:{whole}_7g.80gb:8" in conf(all_split)
    assert "GresTypes=gpu" in conf(all_split)
    by_files = make_site(tmp_path, {"gpu_detection": "files"}, nvidia={"mig": layout})
    assert [problem.rule for problem in exports.problems(by_files)] == ["mig-needs-nvml"]
    shown = f"gpu:{whole}:5(S:0),gpu:{whole}_1g.10gb:8(S:0),gpu:{whole}_3g.40gb:3(S:0)"
    state = acceptance.parse_nodes(json.dumps({"nodes": [entry("g01", "IDLE") | {"gres": shown}]}))["g01"]
    assert checks.judge_node(state, exports.kind_of(site, lock(), "g01"), "g01").verdict is Verdict.PASS


def test_gpus_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValidationError, match="8 GPUs cannot be shared out equally to 3 ranges"):
        Gpu(model="h100-sxm", count=8, cores=["0-9", "10-19", "20-29"])
    with pytest.raises(ValidationError, match="cores as Slurm counts them"):
        Gpu(model="h100-sxm", count=8, cores=["all"])


def test_cores_can_be_kept_from_jobs(tmp_path: Path) -> None:
    assert " CoreSpecCount=4 Gres=" in conf(make_site(tmp_path, {"core_reserve": 4}))
    assert "CoreSpecCount" not in conf(make_site(tmp_path))


def test_two_hardware_kinds_in_a_group_are_two_lines_and_a_warning(tmp_path: Path) -> None:
    site, known = make_site(tmp_path), lock(g01=BIG, g02=SMALL, g03=BIG)
    names = [line.split()[0] for line in conf(site, known).splitlines() if line.startswith("NodeName")]
    assert names == ["NodeName=g[01,03]", "NodeName=g02"]
    assert exports.unlike_its_group(site, known, site.nodes["g02"]) == (
        "group gpu has 2 hardware kinds: g[01,03]: 2 x 32 x 2, 1010880 MiB, gpu:h100_80gb_hbm3:8; "
        "g02: 2 x 32 x 2, 505152 MiB, gpu:h100_80gb_hbm3:8"
    )
    assert exports.unlike_its_group(site, known, site.nodes["g01"]) is None
    assert exports.unlike_its_group(site, lock(), site.nodes["g02"]) is None


def test_a_node_of_unknown_hardware_is_named_and_left_out(tmp_path: Path) -> None:
    groups = {**GROUPS, "new": {"hosts": "n1", "roles": ["worker"]}}
    text = conf(make_site(tmp_path, groups=groups))
    assert "nobody has read their hardware: n1" in text
    assert not [
        line
        for line in text.splitlines()
        if not line.startswith("#") and "n1" in line.split("=")[-1].split(",")
    ]
    assert "PartitionName=batch Nodes=g[01-03] Default=YES" in text


def test_slurm_conf_is_pure_and_joining_nodes_are_drained_only_for_a_moment(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert conf(site) == conf(site)
    assert "State=DRAIN" not in conf(site)
    lines = [line for line in conf(site, joining=["g02"]).splitlines() if line.startswith("NodeName")]
    assert lines[0].startswith("NodeName=g[01,03] ")
    assert "State" not in lines[0]
    assert lines[1].startswith("NodeName=g02 ")
    assert lines[1].endswith('State=DRAIN Reason="provision: awaiting acceptance"')


def test_accounting_and_isolation_hold_by_construction(tmp_path: Path) -> None:
    text = conf(make_site(tmp_path, {}))  # SLM-10: nothing was said, and yet
    for line in (
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=h1",
        "AccountingStorageTRES=gres/gpu",
        "TaskPlugin=task/cgroup,task/affinity",
        "ProctrackType=proctrack/cgroup",
        "SlurmctldParameters=enable_configless",
        "JobAcctGatherType=jobacct_gather/cgroup",
        "MpiDefault=pmix",
        "SlurmctldHost=h1(192.0.2.1)",
    ):
        assert line in text.splitlines()
    site = make_site(tmp_path, {"constrain": {"cores": False, "memory": False}})
    assert "ConstrainDevices=yes" in exports.cgroup_conf(site)
    assert "ConstrainCores=no" in exports.cgroup_conf(site)
    assert "JobAcctGatherType=jobacct_gather/linux" in conf(site)


def test_only_the_distributions_own_slurm_is_known_to_have_pmix(tmp_path: Path) -> None:
    assert "MpiDefault=none" in conf(make_site(tmp_path, {"source": "repository"})).splitlines()


def test_a_second_head_that_people_log_in_to_gets_the_commands_of_a_login_node(tmp_path: Path) -> None:
    groups = {**GROUPS, "spare": {"hosts": "h2", "roles": ["head", "login"]}}
    site = make_site(tmp_path, groups=groups)
    having = [name for name, node in site.nodes.items() if exports.has_commands(site, node)]
    assert having == ["h1", "g01", "g02", "g03"]


def test_a_login_node_that_boots_before_its_head_tries_again(tmp_path: Path) -> None:
    text = exports.sackd_dropin(make_site(tmp_path))
    assert "\nRestart=on-failure\n" in text.partition("[Service]")[2]
    assert "\nStartLimitIntervalSec=0\n" in text.partition("[Service]")[0]
    assert 'Environment="SACKD_OPTIONS=--conf-server h1:6817"' in text


def test_nothing_can_be_said_that_gives_gpus_away() -> None:
    with pytest.raises(ValidationError):
        SlurmSettings.model_validate({"constrain": {"devices": False}})


def test_partitions_topology_and_options_of_the_site(tmp_path: Path) -> None:
    site = make_site(
        tmp_path,
        {
            "partitions": [
                {"name": "train", "groups": ["gpu"], "max_time": "3-00:00:00", "accounts": ["nlp", "vision"]},
                {"name": "debug", "groups": ["gpu"], "default": True, "max_time": "30", "priority": 10},
            ],
            "topology": [
                {"name": "leaf1", "nodes": "g[01-02]"},
                {"name": "leaf2", "nodes": "g03"},
                {"name": "spine", "switches": ["leaf1", "leaf2"]},
            ],
            "options": {"SlurmctldDebug": "debug"},
        },
    )
    lines = conf(site).splitlines()
    partitions = [line for line in lines if line.startswith("PartitionName")]
    assert "Default=NO MaxTime=3-00:00:00" in partitions[0]
    assert "AllowAccounts=nlp,vision" in partitions[0]
    assert "Default=YES MaxTime=30" in partitions[1]
    assert "PriorityTier=10" in partitions[1]
    assert "SlurmctldDebug=debug" in lines
    assert "TopologyPlugin=topology/tree" in lines
    topology = exports.topology_conf(site)
    assert topology is not None
    assert topology.splitlines()[-1] == "SwitchName=spine Switches=leaf[1-2]"
    assert lint.topology_file_mistakes(topology, conf(site)) == []
    assert list(exports.problems(site)) == []


def test_the_files_are_healthy_to_provision_inspect(tmp_path: Path) -> None:
    """What this tool writes must not be warned of by it."""
    switches = [{"name": "leaf1", "nodes": "g[01-03]"}, {"name": "spine", "switches": ["leaf1"]}]
    site = make_site(tmp_path, {"topology": switches})
    files = [
        ("slurm.conf", conf(site)),
        ("gres.conf", exports.gres_conf(site, lock(), DEBIAN)),
        ("cgroup.conf", exports.cgroup_conf(site)),
        ("topology.conf", str(exports.topology_conf(site))),
    ]
    for judged in inspect(files, {}):
        assert [one.line() for one in judged.findings if one.verdict != PASS] == []
        assert judged.findings or judged.name == "together"


def test_private_tmp_follows_storage(tmp_path: Path) -> None:
    assert exports.container_conf(make_site(tmp_path)) is None
    site = make_site(tmp_path, storage={"scratch": {}})
    assert exports.container_conf(site) == (
        "AutoBasePath=true\nDirs=/tmp,/dev/shm\nNodeName=g[01-03] BasePath=/scratch/tmp\n"
    )
    assert "JobContainerType=job_container/tmpfs" in conf(site).splitlines()


def test_ipv6_addresses_switch_it_on(tmp_path: Path) -> None:
    groups = {
        "head": {"hosts": "h1", "addresses": "2001:db8::1", "roles": ["head"]},
        "gpu": {"hosts": "g01", "addresses": "2001:db8::11", "roles": ["worker"]},
    }
    site = make_site(tmp_path, groups=groups)
    assert "CommunicationParameters=EnableIPv6" in conf(site)
    assert exports.rest_url(site) == "http://[2001:db8::1]:6820"
    assert "-a rest_auth/jwt [2001:db8::1]:6820" in exports.rest_dropin(site, "/usr/sbin/slurmrestd")


def test_only_errors_go_to_the_journal_by_syslog(tmp_path: Path) -> None:
    """Slurm's daemons run in the foreground: systemd journals all that they write to their standard error."""
    lines = [line for line in conf(make_site(tmp_path)).splitlines() if "SyslogDebug" in line]
    assert lines == ["SlurmctldSyslogDebug=error", "SlurmdSyslogDebug=error"]


def test_hardware_that_is_written_nowhere_is_unknown_with_what_to_do(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    at = SimpleNamespace(site=site, node=site.nodes["g01"], lock=Lock())
    found = checks.hardware.run(at)  # type: ignore[arg-type]
    assert found.verdict is Verdict.UNKNOWN
    assert f"is {site.path.stem}.lock.yml missing beside {site.path}?" in str(found.action)
    assert "provision apply" in str(found.action)


@pytest.mark.parametrize(
    ("here", "there", "verdict"),
    [
        ((0, "401"), (0, "401"), Verdict.PASS),
        ((0, "402"), (0, "401"), Verdict.FAIL),
        ((1, "id: no such user"), (0, "401"), Verdict.FAIL),
        ((1, "id: no such user"), (1, "id: no such user"), Verdict.FAIL),
        ((0, "401"), (1, "id: no such user"), Verdict.UNKNOWN),
        ((127, "id: not found"), (0, "401"), Verdict.UNKNOWN),
    ],
)
def test_a_user_that_is_not_there_is_known(
    tmp_path: Path, here: tuple[int, str], there: tuple[int, str], verdict: Verdict
) -> None:
    def host(rc: int, said: str) -> SimpleNamespace:
        answer = SimpleNamespace(rc=rc, stdout=said if rc == 0 else "", stderr=said if rc else "")
        return SimpleNamespace(run=lambda command: answer)

    site = make_site(tmp_path)
    at = SimpleNamespace(site=site, node=site.nodes["g01"], host=host(*here), on=lambda name: host(*there))
    assert checks.user.run(at).verdict is verdict  # type: ignore[arg-type]


def test_slurmd_waits_for_exactly_the_gpus_of_its_node(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    text = exports.slurmd_dropin(site, site.nodes["g01"])
    assert "ExecStartPre=/usr/local/lib/provision/gpu-devices 8 60" in text
    assert 'Environment="SLURMD_OPTIONS=--conf-server h1:6817"' in text
    assert "gpu-devices" not in exports.slurmd_dropin(site, site.head)


def test_slurmd_waits_for_what_is_mounted_and_for_a_head_that_boots_later(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    text = exports.slurmd_dropin(site, site.nodes["g01"], ["/home", "/shared"])
    assert "ExecStartPre=/usr/bin/mountpoint /home\nExecStartPre=/usr/bin/mountpoint /shared\n" in text
    assert "Restart=on-failure\n" in text
    assert "\nStartLimitIntervalSec=0\n" in text


def test_database_needs_no_password_and_fits_the_head(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert "StoragePass" not in exports.slurmdbd_conf(site)
    small = Hardware(sockets=1, cores=4, threads=1, memory=8192)
    assert "innodb_buffer_pool_size=2048M" in exports.database_conf(site, lock(h1=small))
    assert "innodb_buffer_pool_size=4096M" in exports.database_conf(site, lock(h1=BIG))


# Nodes that join


def introduce(folder: Path, *nodes: str, answers: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the script that lets slurmctld meet g01 and g02, where scontrol prints `nodes` and exits with `answers`."""
    for name, body in {
        "scontrol": f'[ "$1" = -o ] || exit 0; printf "%s\\n" {" ".join(map(repr, nodes))}; exit {answers}',
        "sacctmgr": "exit 0",
        "systemctl": "exit 0",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    joining = ["g01", "g02"]
    script = deploy.introduction(
        str(folder / "slurm.conf"), str(folder / "met"), joining, joining, patience=0
    )
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-c", script], input="ClusterName=tiny\n", env=path, capture_output=True, text=True
    )


DRAINED = ("NodeName=g01 CPUTot=8 State=IDLE+DRAIN X=1", "NodeName=g02 CPUTot=8 State=UNKNOWN+DRAIN X=1")


def test_nodes_have_joined_once_slurmctld_shows_each_of_them_drained(tmp_path: Path) -> None:
    ran = introduce(tmp_path, *DRAINED)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "met").read_text() == "g01\ng02\n"
    assert (tmp_path / "slurm.conf").read_text() == "ClusterName=tiny\n"


@pytest.mark.parametrize(
    ("nodes", "answers", "said"),
    [
        (("slurm_load_node error: Unable to contact slurm controller",) * 2, 1, "Unable to contact"),
        (DRAINED[:1], 0, "does not know 'g[01-02]'"),
        ((DRAINED[0], "NodeName=g02 CPUTot=8 State=IDLE X=1"), 0, "expected to be drained: NodeName=g02"),
    ],
)
def test_nodes_have_not_joined_where_slurmctld_does_not_say_so(
    tmp_path: Path, nodes: tuple[str, ...], answers: int, said: str
) -> None:
    ran = introduce(tmp_path, *nodes, answers=answers)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert not (tmp_path / "met").exists()


def test_a_slurm_conf_that_slurm_refuses_is_not_put_in_place(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=old\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'fatal: bad line' >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = deploy.introduction(str(tmp_path / "slurm.conf"), str(tmp_path / "met"), ["g01"], ["g01"])
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "-c", script], input="Cluster", env=path, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (1, "fatal: bad line\n")
    assert (tmp_path / "slurm.conf").read_text() == "ClusterName=old\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["scontrol", "slurm.conf"]


OLD = "ClusterName=old\nStateSaveLocation=/var/spool/slurmctld\nNodeName=g1\n"


@pytest.mark.parametrize(
    ("answers", "known"),
    [
        ({"scontrol": "NodeName=g1 Arch=x\nNodeName=g2 Arch=x\n"}, {"g1", "g2"}),
        ({}, set()),  # a bare machine
        (
            {"cat": "ClusterName=sample\nStateSaveLocation=/var/spool/x\n"},
            set(),
        ),  # a package's own, never used
        ({"cat": OLD, "[": ""}, None),
        ({"cat": f"# {ops.MARK}; x\n{OLD}", "[": ""}, set()),
        ({"cat": f"{OLD}NodeName=g2 Reason={exports.AWAITING}\n", "[": ""}, set()),
    ],
)
def test_nodes_of_a_slurmctld_that_does_not_answer_are_not_taken_for_new(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], known: set[str] | None
) -> None:
    def read(command: str) -> Output:
        said = answers.get(command.split()[0])
        return Output(1, "", "Unable to contact slurm controller") if said is None else Output(0, said, "")

    monkeypatch.setattr(facts, "read", read)
    if known is not None:
        assert deploy._known_to_slurmctld() == known
        return
    with pytest.raises(OperationFailed, match=r"does not answer: Unable to contact") as failure:
        deploy._known_to_slurmctld()
    assert "start slurmctld as it was" in str(failure.value.advice)


# Logins with a job


def test_the_rule_of_pam_stands_once_at_the_end_and_goes_without_a_trace(tmp_path: Path) -> None:
    file, own = tmp_path / "sshd", "@include common-auth\naccount required pam_nologin.so\n"
    file.write_text(own)
    first, second = (
        f"{exports.PAM_BEGIN}\naccount {word} pam_x.so\n{exports.PAM_END}\n" for word in ("a", "b")
    )
    for block in (first, first, second, ""):
        subprocess.run(["sh", "-c", deploy.pam(str(file), block)], check=True)
        assert (file.read_text(), file.stat().st_mode & 0o777) == (own + block, 0o644)
    assert [each.name for each in tmp_path.iterdir()] == ["sshd"]


def test_a_file_of_pam_that_cannot_be_read_is_not_made_of_our_rule_alone(tmp_path: Path) -> None:
    assert subprocess.run(["sh", "-c", deploy.pam(str(tmp_path / "sshd"), "account x\n")]).returncode == 1
    assert not list(tmp_path.iterdir())


# Host lists


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["g-001", "g-002", "g-010"], "g-[001-002,010]"),
        (["r1-n01", "r1-n02", "r2-n01", "r2-n02"], "r[1-2]-n[01-02]"),
        (["u1-ib", "u2-ib"], "u1-ib,u2-ib"),  # a range must stand at the end for Slurm
        (["login"], "login"),
        ([], ""),
    ],
)
def test_host_lists_as_slurm_reads_them(names: list[str], folded: str) -> None:
    assert exports.slurm_fold(names) == folded


@given(
    st.sets(
        st.from_regex(r"[a-z]{1,3}-?[0-9]{0,4}(-[a-z]{1,2}[0-9]{0,2})?", fullmatch=True).filter(
            lambda name: not name.endswith("-")
        ),
        min_size=1,
        max_size=30,
    )
)
def test_folding_gives_back_exactly_the_same_names(names: set[str]) -> None:
    folded = exports.slurm_fold(sorted(names))
    assert set(expand(folded)) == names
    for word in exports._words(folded):
        assert "[" not in word or word.endswith("]")


# Cross checks of the site file


def test_mistakes_in_the_site_file_are_found_all_at_once(tmp_path: Path) -> None:
    site = make_site(
        tmp_path,
        {
            "partitions": [
                {"name": "a", "groups": ["gpus"], "default": True},
                {"name": "a", "groups": ["head"], "default": True, "qos": "golt"},
            ],
            "qos": [{"name": "gold"}],
            "accounts": [{"name": "nlp", "users": ["carol"]}],
            "topology": [{"name": "leaf1", "nodes": "g[01-02]"}],
        },
    )
    assert {problem.rule for problem in exports.problems(site)} == {
        "unknown-group",
        "partition-without-workers",
        "partition-twice",
        "two-default-partitions",
        "unknown-qos",
        "unknown-user",
        "topology",
    }


# Accounting


def test_every_user_of_the_site_has_an_account(tmp_path: Path) -> None:
    site = make_site(tmp_path, {"accounts": [{"name": "nlp", "users": ["alice"], "fair_share": 5}]})
    assert [account.name for account in exports.accounts(site)] == ["default", "nlp"]
    assert exports.associations(site) == [("nlp", "alice"), ("default", "bob")]
    test = accounting.test(site)
    assert "nlp||5" in test
    assert "default|bob" in test
    assert "sacctmgr -iQ add user bob cluster=$c account=default" in accounting.make(site)


def test_the_admin_whom_nodes_are_reached_as_may_have_jobs_and_root_needs_no_association(
    tmp_path: Path,
) -> None:
    site = make_site(tmp_path, access={"user": "ops"})
    assert exports.associations(site) == [("default", "alice"), ("default", "bob"), ("default", "ops")]
    listed = make_site(tmp_path, {"accounts": [{"name": "nlp", "users": ["ops"]}]}, access={"user": "ops"})
    assert ("nlp", "ops") in exports.associations(listed)
    assert list(exports.problems(listed)) == []


def test_qualities_of_service_come_before_slurmctld_and_everybody_may_ask_for_them(tmp_path: Path) -> None:
    site = make_site(tmp_path, {"qos": [{"name": "Gold", "priority": 5}, {"name": "long"}]})
    assert "AccountingStorageHost=h1\n" in accounting.asking_database(site)
    assert "\ngold\nlong\nEOF" in accounting.qualities_test(["Gold", "long"])
    assert "sacctmgr -iQ add qos Gold" in accounting.qualities_make(["Gold", "long"])
    assert "\ngold|5||\nlong|0||\nEOF" in accounting.test(site)
    assert "\ngold\nlong\nEOF" in accounting.test(site)
    assert "sacctmgr -iQ modify qos Gold set priority=5 " in accounting.make(site)
    assert "sacctmgr -iQ modify cluster $c set qos+=Gold" in accounting.make(site)
    assert "modify cluster" not in accounting.make(make_site(tmp_path))


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("90", "01:30:00"),
        ("36:00:00", "1-12:00:00"),
        ("2-12", "2-12:00:00"),
        ("10:30", "00:10:30"),
        ("INFINITE", ""),
    ],
)
def test_times_as_slurm_prints_them(written: str, printed: str) -> None:
    assert accounting.slurm_time(written) == printed


def test_qos_lines() -> None:
    qos = Qos(name="Long", priority=5, max_wall="7-0", max_gpus_per_user=16)
    assert accounting.qos_line(qos) == "long|5|7-00:00:00|gres/gpu=16"
    assert accounting.qos_values(Qos(name="x")) == "priority=0 maxwall=-1 maxtresperuser=gres/gpu=-1"


# Files of anybody's


def test_autodetected_gpus_must_not_be_listed_again() -> None:
    mistakes = lint.gres_mistakes("AutoDetect=nvml\nName=gpu\nName=gpu\n")
    assert [mistake.line for mistake in mistakes] == [2, 3]
    assert "duplicate records for gpu" in mistakes[1].message
    assert lint.gres_mistakes("AutoDetect=nvml\n") == []
    assert lint.gres_mistakes("Name=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia1\n") == []


def test_gpus_that_slurm_conf_does_not_know_are_named() -> None:
    gres = "NodeName=c[1-2] Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
    bare = "GresTypes=gpu\nNodeName=c[1-2] CPUs=64\n"
    (mistake,) = lint.gres_mistakes(gres, bare)
    assert str(mistake) == "gres.conf:1: c1, c2 have 4 GPUs in gres.conf and no Gres= in slurm.conf"
    right = "GresTypes=gpu\nNodeName=DEFAULT Gres=gpu:a100:4(S:0-1)\nNodeName=c[1-2] CPUs=64\n"
    assert lint.gres_mistakes(gres, right) == []
    messages = [each.message for each in lint.gres_mistakes(gres, "NodeName=c1 Gres=gpu:a100:3\n")]
    assert messages == [
        "gpu is not in GresTypes of slurm.conf",
        "c2 has no NodeName line in slurm.conf",
        "c1 has 4 gpu here and Gres=gpu:a100:3 in slurm.conf",
    ]


def test_gpus_are_counted_over_all_lines_of_a_node() -> None:
    gres = "".join(f"NodeName=c1 Name=gpu Type=a100 File=/dev/nvidia{n}\n" for n in range(4))
    assert lint.gres_mistakes(gres, "GresTypes=gpu\nNodeName=c1 Gres=gpu:a100:4\n") == []
    assert lint.gres_mistakes(gres, "GresTypes=gpu\nNodeName=c1 Gres=gpu:4\n") == []
    (mistake,) = lint.gres_mistakes(gres, "GresTypes=gpu\nNodeName=c1 Gres=gpu:a100:3,gpu:v100:1\n")
    assert str(mistake) == "gres.conf:1: c1 has 4 gpu here and Gres=gpu:a100:3,gpu:v100:1 in slurm.conf"
    own = "AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-3]\n"  # which node's, the line does not say
    assert lint.gres_mistakes(own, "GresTypes=gpu\nNodeName=c1 Gres=gpu:4\n") == []


def test_own_files_pass_the_same_rules(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert lint.gres_mistakes(exports.gres_conf(site, lock(), DEBIAN), conf(site)) == []


def test_topology_and_nodes_must_agree() -> None:
    topology = "SwitchName=l1 Nodes=c[1-3]\nSwitchName=l2 Nodes=d1\nSwitchName=top Switches=l[1-3]\n"
    assert lint.topology_file_mistakes(topology, "NodeName=c[1-2]\nNodeName=d[1-2]\n") == [
        "node c3 below l1 is unknown to slurm.conf",
        "switch l3 below top is not defined",
        "node d2 is in no switch",
    ]
    circle = {"a": lint.Switch("a", (), ("b",)), "b": lint.Switch("b", (), ("a",))}
    assert lint.topology_mistakes(circle, []) == ["switches form a circle: there is no root"]
    apart = {"a": lint.Switch("a", ("n1",)), "b": lint.Switch("b", ("n1",)), "c": lint.Switch("c")}
    assert lint.topology_mistakes(apart, ["n1"]) == [
        "node n1 is below a and b",
        "switch c has nothing below it",
        "several roots, no path between them: a, b, c",
    ]


def test_blocks_are_no_switches() -> None:
    """topology/block: the nodes are not told to be in no switch."""
    nodes = "NodeName=a[1-4]\nNodeName=login\n"
    good = "BlockName=b1 Nodes=a[1-2]\nBlockName=b2 Nodes=a[3-4]\nBlockName=b3\nBlockSizes=2,4\n"
    assert lint.topology_file_mistakes(good, nodes) == []
    assert lint.topology_file_mistakes(good) == []
    assert lint.topology_file_mistakes("BlockName=b1 Nodes=a[1-2]\nBlockName=b2 Nodes=a2,c1\n", nodes) == [
        "node a2 is in the blocks b1 and b2",
        "node c1 in block b2 is unknown to slurm.conf",
    ]
    (judged,) = inspect([("topology.conf", good)], {})
    assert [one.line() for one in judged.findings] == ["PASS topology-conf topology.conf: 3 blocks, 4 nodes"]


def test_lines_of_slurm_files_are_read_with_comments_and_continuations() -> None:
    text = 'NodeName=a[1-2] \\\n  CPUs=4 # four\n# NodeName=b\nDownNodes=a1 Reason="x # y"\n'
    first, second = lint.parse(text)
    assert (first.line, first.values) == (1, {"nodename": "a[1-2]", "cpus": "4"})
    assert (second.line, second.get("Reason")) == (4, "x # y")


@given(st.text(max_size=200))
def test_reading_any_text_never_fails(text: str) -> None:
    assert all(entry.line >= 1 and entry.values for entry in lint.parse(text))
    lint.gres_mistakes(text, text)
    lint.topology_file_mistakes(text, text)


# What daemons say


def test_fewer_gpus_than_configured_has_a_cause() -> None:
    reason = "gres/gpu count reported lower than configured (0 < 4) [slurm@2026-01-02T03:04:05]"
    first, second = lint.reason_cause(reason, devices=0, memory=1)
    assert first.rule == "gres-low"
    assert "no device files" in first.why
    assert second.rule == "memory-unset"
    assert "before the driver" in lint.reason_cause(reason, devices=4)[0].why
    assert "3 of 4" in lint.reason_cause(reason, devices=3)[0].why
    assert lint.reason_cause("maintenance by eve") == []
    # MIG-04: slices were taken away while slurm.conf still had them
    lowered = "gres/gpu count reported lower than configured (3 < 4)"
    assert lint.reason_cause(lowered, mig=True)[0].why == "the MIG layout has 3 slices, slurm.conf says 4"


def test_smt_switched_off_is_seen_in_the_numbers() -> None:
    printed = (
        "NodeName=c1 CPUs=48 Boards=1 SocketsPerBoard=2 CoresPerSocket=24 ThreadsPerCore=1 RealMemory=257000\n"
        "UpTime=3-01:02:03\n"
    )
    measured = lint.parse_slurmd_c(printed)
    assert lint.hardware_difference(2, 24, 2, 250_000, measured) == [
        "threads per core 2 configured, 1 present (SMT off)"
    ]
    assert lint.hardware_difference(2, 24, 1, 257_001, measured) == [
        "memory 257001 MiB configured, 257000 MiB present"
    ]
    assert lint.reason_cause("Low socket*core*thread count, Low CPUs")[0].rule == "cpus-low"
    with pytest.raises(ValueError, match="NodeName"):
        lint.parse_slurmd_c("slurmd: error: no")


def test_logs_with_one_known_cause() -> None:
    mismatch = lint.log_cause(
        'fatal: CLUSTER ID MISMATCH.\nslurmctld has been started with "ClusterID=11" from the state files in '
        'StateSaveLocation, but the DBD thinks it should be "42".'
    )
    assert mismatch is not None
    assert "id 11" in mismatch.why
    assert "id 42" in mismatch.why
    assert "nothing was deleted" in mismatch.action
    early = lint.log_cause("error: Sending PersistInit msg: Connection refused\nfatal: ... no TRES from it.")
    assert early is not None
    assert early.rule == "start-order"
    plugin = lint.log_cause(
        "error: Couldn't find the specified plugin name for cgroup/v2 looking at all files"
    )
    assert plugin is not None
    assert plugin.rule == "cgroup-plugin"
    assert lint.log_cause("slurmctld version 24.11.5 started on cluster tiny") is None


def test_a_missing_cgroup_plugin_is_named() -> None:
    version2 = "cgroup2 on /sys/fs/cgroup type cgroup2 (rw,nosuid)\n"
    assert "cgroup_v2.so is missing" in str(lint.cgroup_mistake(version2, ["/x/cgroup_v1.so"]))
    assert lint.cgroup_mistake(version2, ["/x/cgroup_v1.so", "/x/cgroup_v2.so"]) is None
    assert lint.cgroup_mistake("tmpfs on /sys/fs/cgroup type tmpfs (ro)\n", ["cgroup_v1.so"]) is None


@pytest.mark.parametrize(
    ("controller", "node", "allowed"),
    [
        ((21, 8, 5), (20, 11, 9), True),
        ((24, 11, 5), (24, 11, 3), True),
        ((24, 11, 5), (23, 2, 1), True),  # three releases, from 24.11 on
        ((24, 5, 1), (22, 5, 9), False),  # three releases, before
        ((23, 11, 4), (24, 5, 0), False),  # newer than the controller
        ((24, 11, 5), (22, 5, 9), False),
    ],
)
def test_releases_that_work_together(
    controller: tuple[int, int, int], node: tuple[int, int, int], allowed: bool
) -> None:
    assert (exports.skew(controller, node) is None) is allowed


def test_a_refused_credential_of_two_releases_is_not_munge() -> None:
    log = "error: Credential signature check: Credential data mismatch"
    versions = {"h1": (21, 8, 5), "g01": (22, 5, 9)}
    cause = lint.credential_cause(log, versions, exports.skew(versions["h1"], versions["g01"]))
    assert cause is not None
    assert cause.rule == "slurm-version"
    same = lint.credential_cause(log, versions, None)
    assert same is not None
    assert same.rule == "credential"


def test_versions_are_read_from_programs_and_packages() -> None:
    assert exports.parse_version("slurm-wlm 24.11.5\n") == (24, 11, 5)
    assert exports.parse_version("24.05.4-1.el9") == (24, 5, 4)
    with pytest.raises(ValueError, match="no version"):
        exports.parse_version("command not found")


# States of nodes


@pytest.mark.parametrize(
    ("word", "base", "flags"),
    [
        ("idle", "IDLE", set()),
        ("resv", "IDLE", {"RESERVED"}),
        ("drain*", "IDLE", {"DRAIN", "NOT_RESPONDING"}),
        ("mix-", "MIXED", {"PLANNED"}),
        ("maint", "IDLE", {"MAINTENANCE"}),
        ("planned", "IDLE", {"PLANNED"}),
        ("down~", "DOWN", {"POWERED_DOWN"}),
        ("comp", "ALLOCATED", {"COMPLETING"}),
        ("inval", "DOWN", {"INVALID_REG"}),
        ("drng@", "ALLOCATED", {"DRAIN", "REBOOT_REQUESTED"}),
        ("IDLE+DRAIN+MAINTENANCE", "IDLE", {"DRAIN", "MAINTENANCE"}),
        ("idle$", "IDLE", {"MAINTENANCE"}),
    ],
)
def test_states_and_their_flags(word: str, base: str, flags: set[str]) -> None:
    assert acceptance.parse_state([word]) == (base, frozenset(flags))
    assert acceptance.NodeState("n", base, frozenset(flags)).known


def test_unknown_states_are_kept_and_told() -> None:
    base, flags = acceptance.parse_state(["foo"])
    assert base == "foo"
    assert not acceptance.NodeState("n", base, flags).known
    base, flags = acceptance.parse_state(["IDLE", "BRAND_NEW"])
    state = acceptance.NodeState("n", base, flags, version="24.11.5")
    assert not state.known
    assert not state.usable
    assert state.word == "idle+brand_new"


@given(st.lists(st.text(max_size=12), max_size=5))
def test_any_words_are_a_state(words: list[str]) -> None:
    base, flags = acceptance.parse_state(words)
    assert base
    assert isinstance(flags, frozenset)


def entry(name: str, *state: str, reason: str = "", version: str = "24.11.5") -> dict[str, Any]:
    return {
        "name": name,
        "state": list(state),
        "reason": reason,
        "cpus": 128,
        "real_memory": 1010880,
        "gres": "gpu:h100_80gb_hbm3:8(S:0-1)",
        "version": version,
        "boot_time": {"set": True, "infinite": False, "number": 1_700_000_000},
    }


class Head:
    """A head whose scontrol knows some nodes, and resumes or drains them as it is told."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self.nodes = {each["name"]: each for each in entries}
        self.updates: list[str] = []

    def __call__(self, command: str, stdin: bytes | None = None, timeout: float = 1) -> Output:
        if command.startswith("scontrol show nodes"):
            return Output(0, json.dumps({"nodes": list(self.nodes.values())}), "")
        self.updates.append(command)
        for name in expand(command.split("nodename=")[1].split()[0].strip("'")):
            self.nodes[name]["state"] = ["IDLE"] if "resume" in command else ["IDLE", "DRAIN"]
        return Output(0, "", "")


def test_only_what_this_tool_closed_is_opened() -> None:
    head = Head(
        entry("g01", "IDLE", "DRAIN", reason="provision: awaiting acceptance"),
        entry("g02", "IDLE", "DRAIN", reason="provision: burn-in failed: rank 3"),
        entry("g03", "IDLE", "DRAIN", reason="fan is loud (eve)"),
        entry("g04", "UNKNOWN", "DRAIN", reason="provision: awaiting acceptance", version=""),
        entry("g05", "IDLE"),
        entry("g06", "IDLE", "DRAIN", "BRAND_NEW", reason="provision: awaiting acceptance"),
        entry("g07", "DOWN", "INVALID_REG", reason="provision: awaiting acceptance"),
    )
    refused = acceptance.admit(head, ["g01", "g02", "g03", "g04", "g05", "g06", "g07", "g99"])
    assert head.updates == ["scontrol update nodename='g[01-02]' state=resume"]
    assert set(refused) == {"g03", "g04", "g06", "g07", "g99"}
    assert "fan is loud" in refused["g03"]
    assert "not registered" in refused["g04"]
    assert "not understood" in refused["g06"]


def test_a_node_in_the_middle_of_a_maintenance_is_opened_by_the_maintenance_alone() -> None:
    defaults = Path(__file__).parents[2] / "roles/slurm_node/defaults/main.yml"
    mark = yaml.safe_load(defaults.read_text())["slurm_node_reason"]
    head = Head(entry("g01", "IDLE", "DRAIN", reason=mark))
    assert acceptance.admit(head, ["g01"]) == {"g01": f"idle+drain: {mark}"}
    assert acceptance.quarantine(head, ["g01"], "failed a check") == []
    assert head.updates == []


def test_a_resumed_node_is_waited_for_until_it_answers() -> None:
    waiting = "provision: awaiting acceptance"
    head = Head(*(entry(name, "IDLE", "DRAIN", reason=waiting) for name in ("g01", "g02", "g03")))
    pauses: list[float] = []

    def resumed(command: str, stdin: bytes | None = None, timeout: float = 1) -> Output:
        answer = head(command, stdin, timeout)
        if "state=resume" in command:
            head.nodes["g01"]["state"] = ["IDLE", "NOT_RESPONDING"]
            head.nodes["g02"]["state"] = ["DOWN", "NOT_RESPONDING"]
        return answer

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            head.nodes["g01"]["state"] = ["IDLE"]

    refused = acceptance.admit(resumed, ["g01", "g02", "g03"], pause=pause)
    assert refused == {"g02": "still down+not_responding after resume"}
    assert len(pauses) == 3


def test_a_node_that_never_answers_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(entry("g01", "IDLE", "DRAIN", reason="provision: awaiting acceptance"))
    monkeypatch.setattr(acceptance, "ANSWER_SECONDS", 0.0)

    def silent(command: str, stdin: bytes | None = None, timeout: float = 1) -> Output:
        answer = head(command, stdin, timeout)
        if "state=resume" in command:
            head.nodes["g01"]["state"] = ["IDLE", "NOT_RESPONDING"]
        return answer

    assert acceptance.admit(silent, ["g01"]) == {"g01": "still idle+not_responding after resume"}


def test_quarantine_keeps_a_persons_reason() -> None:
    head = Head(
        entry("g01", "IDLE"),
        entry("g02", "IDLE", "DRAIN", reason="fan is loud (eve)"),
        entry("g03", "IDLE", "DRAIN", reason="provision: awaiting acceptance"),
    )
    assert acceptance.quarantine(head, ["g01", "g02", "g03"], 'GPU 3: "lost"\nsee log') == ["g01", "g03"]
    (update,) = head.updates
    assert update.endswith("""state=drain reason='provision: GPU 3: '"'"'lost'"'"' see log'""")
    with pytest.raises(acceptance.SlurmError, match="g99"):
        acceptance.quarantine(head, ["g99"], "x")


def test_what_cannot_be_read_admits_nobody() -> None:
    def silent(command: str, stdin: bytes | None = None, timeout: float = 1) -> Output:
        return Output(1, "", "slurm_load_node error: Unable to contact slurm controller")

    with pytest.raises(acceptance.SlurmError, match="Unable to contact"):
        acceptance.admit(silent, ["g01"])
    with pytest.raises(acceptance.SlurmError, match="not understood"):
        acceptance.parse_nodes('{"nodes": [{"state": "IDLE"}]}')


@pytest.mark.parametrize(
    ("reason", "ours"),
    [
        ("provision: awaiting acceptance", True),
        ("provision: burn-in failed: x", True),
        ("waiting for provision: ing", False),
        (None, False),
    ],
)
def test_marks(reason: str | None, ours: bool) -> None:
    assert exports.ours(reason) is ours


# Checks


def judge(**changes: Any) -> checks.Found:
    kind = exports.Kind(("g01",), 2, 32, 2, 1010880, "h100_80gb_hbm3", 8)
    state = acceptance.parse_nodes(json.dumps({"nodes": [{**entry("g01", "IDLE"), **changes}]}))["g01"]
    return checks.judge_node(state, kind, "g01")


def test_a_node_is_judged_by_what_it_registered() -> None:
    assert judge().verdict is Verdict.PASS
    waiting = {"state": ["IDLE", "DRAIN"], "reason": exports.AWAITING}
    assert judge(**waiting).verdict is Verdict.PASS
    assert judge(**{**waiting, "reason": "eve looks"}).verdict is Verdict.WARN
    assert judge(state=["IDLE", "NOT_RESPONDING"]).verdict is Verdict.FAIL
    assert judge(version="").verdict is Verdict.FAIL
    assert judge(gres="gpu:h100_80gb_hbm3:7").verdict is Verdict.FAIL
    assert judge(cpus=64).verdict is Verdict.FAIL
    assert judge(state=["IDLE", "BRAND_NEW"]).verdict is Verdict.UNKNOWN
    low = judge(state=["DOWN", "INVALID_REG"], reason="gres/gpu count reported lower than configured (6 < 8)")
    assert low.verdict is Verdict.FAIL
    assert "6 of 8" in str(low.why)


def test_a_drain_by_slurmctld_itself_is_a_fault_with_its_cause(tmp_path: Path) -> None:
    kind = exports.Kind(("g01",), 2, 32, 2, 1010880, "h100_80gb_hbm3", 8)
    reason = "gres/gpu count reported lower than configured (0 < 8)"
    shown = {"nodes": [entry("g01", "IDLE", "DRAIN", reason=reason)]}
    state = acceptance.parse_nodes(json.dumps(shown))["g01"]
    found = checks.judge_node(state, kind, "g01", devices=0)
    assert found.verdict is Verdict.FAIL
    assert "no device files" in str(found.why)
    silent = acceptance.parse_nodes(json.dumps({"nodes": [entry("g01", "DOWN", version="")]}))["g01"]
    plugin = lint.log_cause("error: Couldn't find the specified plugin name for cgroup/v2")
    found = checks.judge_node(silent, kind, "g01", said=plugin)
    assert "no cgroup/v2 plugin" in str(found.why)
    assert "cgroup_v2.so" in str(found.action)


def test_a_node_that_has_not_registered_is_told_from_an_idle_one(tmp_path: Path) -> None:
    kind = exports.Kind(("g01",), 2, 32, 2, 1010880, "h100_80gb_hbm3", 8)
    state = acceptance.parse_nodes(json.dumps({"nodes": [entry("g01", "IDLE", version="")]}))["g01"]
    found = checks.judge_node(state, kind, "g01")
    assert found.verdict is Verdict.FAIL
    assert str(found.read).startswith("idle without a registration, ")


def test_answers_of_scontrol_are_read() -> None:
    assert checks.parse_ping("Slurmctld(primary) at h1 is UP\n") == {"h1": True}
    assert checks.parse_ping("Slurmctld(primary) at h1 is DOWN\n") == {"h1": False}
    with pytest.raises(ValueError, match="scontrol ping"):
        checks.parse_ping("sh: scontrol: not found")
    assert checks.parse_hash("FOO = 1\nHASH_VAL                = Match\n") == "Match"
    with pytest.raises(ValueError, match="HASH_VAL"):
        checks.parse_hash("")
