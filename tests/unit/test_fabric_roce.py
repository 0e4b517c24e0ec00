"""RoCE's settings: the program against a tree of files as the drivers have them, and what NCCL is told."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from provision.components import registry
from provision.components.fabric import exports, roce
from provision.components.fabric.settings import FabricSettings
from provision.report.model import Verdict
from provision.site.models import Site, SiteFile
from provision.verify.check import Target

DOCA = {"stack": "doca", "doca": {"version": "3.2.1", "keyring": "5" * 64}}

# What iproute2's dcb does with files TABLE.INTERFACE in place of an adapter's tables (dcb-app(8), dcb-pfc(8)).
DCB = """#!/bin/sh
[ "$1" != -N ] || shift
file=$STORE/$1.$4
[ -e "$file" ] || { echo "Object $1: Operation not supported" >&2; exit 1; }
case "$1 $2" in
  "app show" | "pfc show") cat "$file" ;;
  "app replace") shift 5; echo "dscp-prio $*" >"$file" ;;
  "pfc set")
    n=${7%:on}
    o=prio-pfc
    for p in 0 1 2 3 4 5 6 7; do
      if [ $p = $n ]; then o="$o $p:on"; else o="$o $p:off"; fi
    done
    echo "$o" >"$file"
    ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A tree of files, and dcb before it."""

    root: Path

    def path(self, path: str) -> Path:
        return self.root / "sys" / path

    def put(self, path: str, text: str = "") -> None:
        self.path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path(path).write_text(text)

    def adapter(
        self, name: str, interface: str, *, doca: bool, layer: str = "Ethernet", vpd: str = "x"
    ) -> None:
        """One as inbox's or DOCA's driver shows it, fresh from a boot."""
        pci = f"devices/0000:{int(name[-1]) + 1:02x}:00.0"
        self.put(f"{pci}/vpd", vpd)
        self.put(f"{pci}/net/{interface}/mtu", "1500\n")
        self.put(f"class/infiniband/{name}/ports/1/link_layer", f"{layer}\n")
        self.path(f"class/infiniband/{name}/device").symlink_to(self.path(pci))
        self.path("class/net").mkdir(parents=True, exist_ok=True)
        self.path(f"class/net/{interface}").symlink_to(self.path(f"{pci}/net/{interface}"))
        self.put(f"kernel/config/rdma_cm/{name}/ports/1/default_roce_mode", "IB/RoCE v1\n")
        self.put(f"kernel/config/rdma_cm/{name}/ports/1/default_roce_tos", "0\n")
        (self.root / f"app.{interface}").write_text("")
        (self.root / f"pfc.{interface}").write_text(
            "prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off\n"
        )
        if doca:
            for point in ("np", "rp"):
                self.put(f"class/net/{interface}/ecn/roce_{point}/enable/3", "0\n")
            self.put(f"class/net/{interface}/ecn/roce_np/cnp_dscp", "0\n")
            self.put(f"class/infiniband/{name}/tc/1/traffic_class", "Global tclass=0\n")
        else:
            self.put(f"kernel/debug/mlx5/{pci.partition('/')[2]}/cc_params/np_cnp_dscp", "0\n")

    def run(self, verb: str, **fabric: Any) -> subprocess.CompletedProcess[str]:
        script = roce.script(FabricSettings.model_validate(fabric))
        environment = {**os.environ, "PATH": f"{self.root}:{os.environ['PATH']}", "STORE": str(self.root)}
        return subprocess.run(
            ["sh", "-c", script, "roce", verb, str(self.root)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )

    def checked(self, **fabric: Any) -> tuple[int, list[str]]:
        done = self.run("check", **fabric)
        return done.returncode, done.stderr.splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "dcb").write_text(DCB)
    (tmp_path / "dcb").chmod(0o755)
    return Machine(tmp_path)


def test_everything_is_set_on_adapters_of_doca(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.adapter("mlx5_1", "rail1", doca=True)
    settings = {**DOCA, "roce": {"mtu": 9000}}
    rc, said = machine.checked(**settings)
    assert rc == 1
    first = [line for line in said if line.startswith("mlx5_0: ")]
    assert len(first) == len(said) // 2
    assert {
        "mlx5_0: priority by DSCP is not set, not 26:3",
        "mlx5_0: flow control is 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off, not 3:on",
        "mlx5_0: MTU is 1500, not 9000",
        "mlx5_0: ECN notification point is 0, not 1",
        "mlx5_0: ECN reaction point is 0, not 1",
        "mlx5_0: DSCP of notifications is 0, not 48",
        "mlx5_0: traffic class is 0, not 106",
        "mlx5_0: connection manager's RoCE is IB/RoCE v1, not RoCE v2",
        "mlx5_0: connection manager's type of service is 0, not 106",
    } <= set(first)
    done = machine.run("apply", **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.checked(**settings) == (0, [])
    assert (machine.root / "app.rail1").read_text() == "dscp-prio 26:3 48:6\n"
    assert "3:on" in (machine.root / "pfc.rail1").read_text()
    assert machine.path("class/net/rail1/mtu").read_text() == "9000\n"


def test_a_second_apply_writes_nothing(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.run("apply", **DOCA)
    mtu = machine.path("class/net/rail0/ecn/roce_np/enable/3")
    os.utime(mtu, (1, 1))
    assert machine.run("apply", **DOCA).returncode == 0
    assert mtu.stat().st_mtime == 1


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        ("class/net/rail0/ecn/roce_rp/enable/3", "0\n", "ECN reaction point is 0, not 1"),
        ("class/net/rail0/ecn/roce_np/cnp_dscp", "46\n", "DSCP of notifications is 46, not 48"),
        ("class/infiniband/mlx5_0/tc/1/traffic_class", "Global tclass=96\n", "traffic class is 96, not 106"),
        (
            "kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos",
            "104\n",
            "connection manager's type of service is 104, not 106",
        ),
        ("../app.rail0", "dscp-prio 26:5 48:6\n", "priority by DSCP is 26:5 48:6, not 26:3"),
        (
            "../pfc.rail0",
            "prio-pfc 0:off 1:off 2:off 3:on 4:on 5:off 6:off 7:off\n",
            "flow control is 0:off 1:off 2:off 3:on 4:on 5:off 6:off 7:off, not 4:off",
        ),
    ],
)
def test_each_knob_that_is_turned_back_is_found(machine: Machine, path: str, text: str, line: str) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.run("apply", **DOCA)
    machine.put(path, text)
    assert machine.checked(**DOCA) == (1, [f"mlx5_0: {line}"])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("class/net/rail0/ecn/roce_rp/enable/3", "no knob for ECN reaction point"),
        ("class/infiniband/mlx5_0/tc/1/traffic_class", "no knob for traffic class"),
        ("../pfc.rail0", "flow control cannot be read: Object pfc: Operation not supported"),
    ],
)
def test_what_an_adapter_has_no_knob_for_is_not_told(machine: Machine, path: str, words: str) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.run("apply", **DOCA)
    machine.path(path).unlink()
    rc, said = machine.checked(**DOCA)
    assert rc == 2
    assert [line for line in said if line.startswith(f"mlx5_0: {words}")] == said
    assert machine.run("apply", **DOCA).returncode == 0  # what can be set is set


def test_what_is_wrong_wins_over_what_cannot_be_told(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.path("class/infiniband/mlx5_0/tc/1/traffic_class").unlink()
    assert machine.checked(**DOCA)[0] == 1


def test_the_kernels_own_driver_leaves_congestion_to_the_firmware(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=False)
    assert machine.run("apply").returncode == 0
    assert machine.checked() == (0, [])
    rc, said = machine.checked(roce={"ecn": True})
    assert rc == 1
    assert "mlx5_0: DSCP of notifications is 0, not 48" in said
    assert machine.run("apply", roce={"ecn": True}).returncode == 0
    rc, said = machine.checked(roce={"ecn": True})
    assert rc == 2
    assert said == [
        "mlx5_0: no knob for ECN of a priority in the kernel's own driver, the firmware decides (ROCE_CC_PRIO_MASK)"
    ]


def test_the_bridges_of_nvswitches_are_left_out(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.adapter("mlx5_4", "bridge0", doca=True, vpd="\x00\x01 SW_MNG \x02")
    machine.adapter("mlx5_5", "ib0", doca=True, layer="InfiniBand")
    assert machine.run("apply", **DOCA).returncode == 0
    assert machine.checked(**DOCA) == (0, [])
    assert machine.path("class/infiniband/mlx5_4/tc/1/traffic_class").read_text() == "Global tclass=0\n"
    assert machine.path("class/infiniband/mlx5_5/tc/1/traffic_class").read_text() == "Global tclass=0\n"
    rc, said = machine.checked(**DOCA, hcas=["mlx5_0", "mlx5_4"])
    assert (rc, said) == (1, ["mlx5_4: belongs to an NVSwitch; take it out of fabric.hcas"])


def test_only_named_adapters_are_touched(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.adapter("mlx5_1", "storage0", doca=True)
    assert machine.run("apply", **DOCA, hcas=["mlx5_0:1"]).returncode == 0
    assert machine.path("class/infiniband/mlx5_1/tc/1/traffic_class").read_text() == "Global tclass=0\n"
    assert machine.checked(**DOCA, hcas=["mlx5_0:1"]) == (0, [])
    assert machine.checked(**DOCA, hcas=["mlx5_0", "mlx5_7"]) == (1, ["mlx5_7: there is no such adapter"])


def test_adapters_in_a_bond_are_the_sites(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=True)
    machine.path("class/net/rail0/master/bonding").mkdir(parents=True)
    rc, said = machine.checked(**DOCA)
    assert (rc, said) == (2, ["mlx5_0: rail0: adapters in a bond are the site's to set"])


def test_other_numbers(machine: Machine) -> None:
    machine.adapter("mlx5_0", "rail0", doca=False)
    settings = {"roce": {"priority": 5, "dscp": 40, "cnp_dscp": 56}}
    assert machine.run("apply", **settings).returncode == 0
    assert (machine.root / "app.rail0").read_text() == "dscp-prio 40:5 56:7\n"
    assert "5:on" in (machine.root / "pfc.rail0").read_text()
    tos = machine.path("kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos").read_text()
    assert tos == "162\n"  # 40 * 4 + 2


def test_where_nothing_can_be_told(machine: Machine) -> None:
    rc, said = machine.checked(hcas=["mlx5_0"])
    assert (rc, said) == (2, [f"{machine.root}/sys/class/infiniband is not there: no RDMA stack"])
    machine.path("class/infiniband").mkdir(parents=True)
    assert machine.checked()[0] == 2  # no adapters
    assert machine.run("show").returncode == 2
    (machine.root / "dcb").unlink()
    script = roce.script(FabricSettings())
    done = subprocess.run(
        ["/bin/sh", "-c", script, "roce", "check", str(machine.root)],
        capture_output=True,
        text=True,
        env={"PATH": str(machine.root)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "dcb is needed (iproute2)\n")


# NCCL


def make_site(kind: str = "roce", **fabric: Any) -> Site:
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g1", "roles": ["worker"], "gpu": {"model": "h100-sxm", "count": 8}},
        },
        "networks": {"fabric": {"kind": kind, "rails": 2}},
        "scheduler": {"slurm": {}},
        "fabric": fabric,
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:000"


def table(**index: int) -> str:
    """A port's GIDs as they come: link-local ones of both kinds, then that of the IPv4 address."""
    return "".join(
        f"{device}|1|0|fe80:0000:0000:0000:0000:0000:0000:0001|IB/RoCE v1|x\n"
        f"{device}|1|1|fe80:0000:0000:0000:0000:0000:0000:0001|RoCE v2|x\n"
        f"{device}|1|{at - 1}|{MAPPED}1|IB/RoCE v1|x\n{device}|1|{at}|{MAPPED}1|RoCE v2|x\n"
        for device, at in index.items()
    )


@pytest.mark.parametrize(
    ("gids", "hcas", "expected"),
    [
        (table(mlx5_0=3, mlx5_1=3), ["mlx5_0", "mlx5_1:1"], 3),
        (table(mlx5_0=3, mlx5_1=5), ["mlx5_0", "mlx5_1"], None),  # NCCL looks for each of them
        (table(mlx5_0=3, mlx5_1=5), ["mlx5_1"], 5),
        (table(mlx5_0=3), [], None),
        ("", ["mlx5_0"], None),
    ],
)
def test_the_gid_is_looked_up(gids: str, hcas: list[str], expected: int | None) -> None:
    assert roce.gid_index(FabricSettings.model_validate({"hcas": hcas}), gids) == expected


@pytest.mark.parametrize(
    ("fabric", "found", "lines"),
    [
        ({}, 3, ["NCCL_IB_GID_INDEX=3", "NCCL_IB_TC=106"]),
        ({}, None, ["NCCL_IB_TC=106"]),
        ({"roce": {"gid_index": 5, "dscp": 40}}, 3, ["NCCL_IB_GID_INDEX=5", "NCCL_IB_TC=162"]),
        ({"nccl": {"NCCL_IB_TC": 0}}, None, ["NCCL_IB_TC=0"]),
    ],
)
def test_nccl_marks_its_packets_as_the_adapters_expect_them(
    fabric: dict[str, Any], found: int | None, lines: list[str]
) -> None:
    site = make_site(**fabric)
    assert exports.nccl_conf(site, site.nodes["g1"], found).splitlines() == lines


def test_no_other_fabric_is_told_of_it() -> None:
    site = make_site("infiniband")
    assert exports.nccl_conf(site, site.nodes["g1"], 3) == ""


# The checks


def found(name: str, answers: dict[str, tuple[int, str]], kind: str = "roce", **fabric: Any) -> Verdict:
    def run(command: str) -> SimpleNamespace:
        rc, text = next(answer for word, answer in answers.items() if word in command)
        return SimpleNamespace(rc=rc, stdout=text, stderr=text)

    site = make_site(kind, **fabric)
    (check,) = (check for check in registry.checks("fabric") if check.name == name)
    host = SimpleNamespace(run=run)
    return check.run(Target(site, site.nodes["g1"], "fabric", None, None, host)).verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rc", "verdict"), [(0, Verdict.PASS), (1, Verdict.FAIL), (2, Verdict.UNKNOWN), (127, Verdict.UNKNOWN)]
)
def test_the_check_of_the_adapters(rc: int, verdict: Verdict) -> None:
    assert found("roce", {"roce check": (rc, "mlx5_0: x")}) is verdict
    assert found("roce", {}, kind="infiniband") is Verdict.SKIP


@pytest.mark.parametrize(
    ("gids", "text", "verdict"),
    [
        ((0, table(mlx5_0=3, mlx5_1=3)), "NCCL_IB_GID_INDEX=3\nNCCL_IB_TC=106\n", Verdict.PASS),
        ((0, table(mlx5_0=5, mlx5_1=5)), "NCCL_IB_GID_INDEX=3\nNCCL_IB_TC=106\n", Verdict.FAIL),
        ((1, "sh: not found"), "NCCL_IB_TC=106\n", Verdict.UNKNOWN),
        ((0, "nonsense"), "NCCL_IB_TC=106\n", Verdict.UNKNOWN),
    ],
)
def test_the_check_of_nccl_looks_for_the_gid_again(
    gids: tuple[int, str], text: str, verdict: Verdict
) -> None:
    hcas = ["mlx5_0", "mlx5_1"]
    told = f"NCCL_IB_HCA=={','.join(hcas)}\n{text}"
    assert found("nccl-configuration", {exports.NCCL: (0, told), "gid_attrs": gids}, hcas=hcas) is verdict
