"""Recordings are recognised by content and judged; what is cut off or no recording is never called well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from provision.cli import verbs
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN, Finding
from provision.inspect.judge import KINDS, expectations, inspect, recognise, verdict
from provision.inspect.text import clean

app = typer.Typer()
verbs.register(app, [])

GPU_XML = """<gpu id="00000000:1B:00.0"><product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid>
<vbios_version>96.00.01</vbios_version><persistence_mode>Enabled</persistence_mode>
<mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
<gpu_recovery_action>None</gpu_recovery_action>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
</pci_gpu_link_info></pci>
<clocks_event_reasons><clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap></clocks_event_reasons>
<ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_uncorrectable>0</dram_uncorrectable></volatile>
<aggregate><sram_uncorrectable_parity>3</sram_uncorrectable_parity>
<sram_uncorrectable_secded>1</sram_uncorrectable_secded></aggregate></ecc_errors>
<remapped_rows>N/A</remapped_rows>
<temperature><gpu_temp>40 C</gpu_temp><gpu_temp_tlimit>47 C</gpu_temp_tlimit>
<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold></temperature>
<gpu_power_readings><power_draw>N/A</power_draw><instant_power_draw>66.84 W</instant_power_draw></gpu_power_readings>
<fabric><state>Completed</state><status>Success</status></fabric></gpu>"""
XML = f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>580.95.05</driver_version><attached_gpus>1</attached_gpus>{GPU_XML}
</nvidia_smi_log>
"""
Q = """
==============NVSMI LOG==============

Timestamp                                              : Tue Mar  4 08:12:38 2025
Driver Version                                         : 580.95.05
CUDA Version                                           : 13.0

Attached GPUs                                          : 1
GPU 00000000:1B:00.0
    Product Name                                       : NVIDIA H100 80GB HBM3
    Persistence Mode                                   : Enabled
    MIG Mode
        Current                                        : Disabled
        Pending                                        : Disabled
    GPU Recovery Action                                : None
    PCI
        GPU Link Info
            PCIe Generation
                Max                                    : 5
                Current                                : 5
            Link Width
                Max                                    : 16x
                Current                                : 16x
    Clocks Event Reasons
        HW Slowdown                                    : Not Active
            HW Thermal Slowdown                        : Not Active
    ECC Mode
        Current                                        : Enabled
        Pending                                        : Enabled
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity                  : 0
            SRAM Uncorrectable SEC-DED                 : 0
            DRAM Uncorrectable                         : 0
    Remapped Rows
        Uncorrectable Error                            : 0
        Pending                                        : No
        Remapping Failure Occurred                     : No
    Temperature
        GPU Current Temp                               : 41 C
        GPU T.Limit Temp                               : 46 C
        GPU Slowdown T.Limit Temp                      : -2 C
    Fabric
        State                                          : Completed
        Status                                         : Success
    Processes                                          : None
"""
TABLE = """Tue Mar  4 08:12:38 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    0 |
| N/A   41C    P0             69W /  700W |       0MiB /  81559MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000001)\n" + "".join(
    f"\t Link {number}: 26.562 GB/s\n" for number in range(18)
)
LINKS = NVLINK.partition("\n")[2]
ERRORS = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000001)\n" + "".join(
    f"\t Link {number}: {kind} Errors: 0\n" for number in range(4) for kind in ("Replay", "Recovery", "CRC")
)
LIST = (
    "GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000001)\n"
    "  MIG 3g.71gb     Device  0: (UUID: MIG-00000000-0000-0000-0000-000000000001)\n"
)
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\t0-31\t0\nGPU1\tNV18\t X \tSYS\t0-31\t0\nNIC0\tPXB\tSYS\t X \t\t\n"
)
P2P = "\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n\nLegend:\n\n  OK   = Status Ok\n"
CSV = (
    "index, name, temperature.gpu, power.draw [W], clocks_throttle_reasons.hw_thermal_slowdown\n"
    "0, Tesla M40, 41, 61.20 W, Not Active\n1, GeForce GTX 745, 38, [Not Supported], [N/A]\n"
)
IBSTAT = """CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tFirmware version: 28.39.1002
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tBase lid: 12
\t\tSM lid: 1
\t\tLink layer: InfiniBand
"""
PERFQUERY = (
    "# Port counters: Lid 12 port 1 (CapMask: 0x5A00)\nPortSelect:......................1\n"
    + "".join(
        f"{name}:{'.' * (32 - len(name))}0\n"
        for name in (
            "SymbolErrorCounter",
            "LinkErrorRecoveryCounter",
            "LinkDownedCounter",
            "PortRcvErrors",
            "LocalLinkIntegrityErrors",
            "ExcessiveBufferOverrunErrors",
        )
    )
)
DIAG = json.dumps(
    {
        "DCGM Diagnostic": {
            "test_categories": [
                {
                    "category": "Deployment",
                    "tests": [
                        {
                            "name": "software",
                            "results": [
                                {
                                    "entity_group": "GPU",
                                    "entity_group_id": 1,
                                    "entity_id": 0,
                                    "status": "Pass",
                                }
                            ],
                            "test_summary": {"status": "Pass"},
                        }
                    ],
                },
                {
                    "category": "Hardware",
                    "tests": [
                        {
                            "name": "memory",
                            "results": [
                                {
                                    "entity_group": "GPU",
                                    "entity_group_id": 1,
                                    "entity_id": 0,
                                    "status": "Pass",
                                }
                            ],
                            "test_summary": {"status": "Pass"},
                        }
                    ],
                },
            ]
        },
        "metadata": {"version": "4.4.1"},
    },
    indent=1,
)
NCCL = """# nThread 1 nGpus 1 minBytes 4294967296 maxBytes 8589934592 step: 2(factor) validation: 1
# Using devices
#  Rank  0 Group  0 Pid  100 on gpu-7 device  0 [0x1b] NVIDIA H200
#  Rank  1 Group  0 Pid  101 on gpu-7 device  1 [0x2b] NVIDIA H200
#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  4294967296    1073741824     float     sum      -1    12302   349.1  349.12      0    12300   349.1  349.10      0
  8589934592    2147483648     float     sum      -1    24403   352.0  352.01      0    24400   352.0  352.00      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 350.5
"""
CGROUP = "CgroupPlugin=autodetect\nConstrainDevices=yes\nConstrainCores=yes\nConstrainRAMSpace=yes\n"
LOG = (
    "[    1.000000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    "[    2.000000] usb 1-1: new device\n"
)

DEVINFO = (
    "hca_id:\tmlx5_0\n\tfw_ver:\t28.39.1002\n\t\tport:\t1\n\t\t\tstate:\tPORT_ACTIVE (4)\n"
    "\t\t\tport_lid:\t12\n\t\t\tlink_layer:\tInfiniBand\n"
)
RDMA = "link mlx5_0/1 subnet_prefix fe80 lid 12 state ACTIVE physical_state LINK_UP netdev ib0\n"
BURN = "Tested 2 GPUs:\n\tGPU 0: OK\n\tGPU 1: OK\n"
HEALTH = """+---------------------------+----------------------------------------------+
| Health Monitor Report                                                    |
+===========================+==============================================+
| Overall Health            | Healthy                                      |
+---------------------------+----------------------------------------------+
"""

MLXLINK = (
    "Operational Info\n----------------\nState                : Active\nPhysical state       : LinkUp\n"
    "Speed                : IB-NDR\nWidth                : 4x\n\nTroubleshooting Info\n--------------------\n"
    "Status Opcode        : 0\nRecommendation       : No issue was observed\n"
)
IBDIAGNET = (
    "Summary\n-I- Stage                     Warnings   Errors     Comment\n"
    "-I- Discovery                 0          0\n-I- Lids Check                0          0\n"
    "-I- Links Check               0          0\n"
)
IBLINKINFO = (
    "CA: gpu-1 HCA-1:\n"
    '      0xb88303ffff7f61c4      6    1[  ] ==( 4X      53.125 Gbps Active/  LinkUp)==>       3    3[  ] "leaf" ( )\n'
    "Switch: 0x0c42a10300b95bfa leaf:\n"
    '           3    3[  ] ==( 4X      53.125 Gbps Active/  LinkUp)==>       6    1[  ] "gpu-1 HCA-1" ( )\n'
    '           3    4[  ] ==(                Down/ Polling)==>             [  ] "" ( )\n'
)
MANAGER = "[Feb 27 2025 15:10:02] [INFO] [tid 1584] Connected to 1 node.\n"
DETAILS = "# PortRcvErrorDetails counters: Lid 17 port 1\nPortLocalPhysicalErrors:.........0\n"
NODES = "NODELIST   NODES PARTITION STATE\ngpu-1          1    train* idle\ngpu-2          1    train* mix\n"

WELL: dict[str, tuple[str, str]] = {
    "devinfo": ("ibv_devinfo", DEVINFO),
    "rdma": ("rdma link", RDMA),
    "burn": ("gpu-burn", BURN),
    "health": ("dcgmi health", HEALTH),
    "xml": ("nvidia-smi -q -x", XML),
    "q": ("nvidia-smi -q", Q),
    "table": ("nvidia-smi", TABLE),
    "nvlink": ("nvidia-smi nvlink", NVLINK),
    "nvlink-errors": ("nvidia-smi nvlink", ERRORS),
    "list": ("nvidia-smi -L", LIST),
    "topo": ("nvidia-smi topo", TOPO),
    "csv": ("nvidia-smi CSV", CSV),
    "ibstat": ("ibstat", IBSTAT),
    "perfquery": ("perfquery", PERFQUERY),
    "diag": ("dcgmi diag -j", DIAG),
    "nccl": ("nccl-tests", NCCL),
    "cgroup": ("cgroup.conf", CGROUP),
    "log": ("kernel messages", LOG),
    "mlxlink": ("mlxlink", MLXLINK),
    "ibdiagnet": ("ibdiagnet", IBDIAGNET),
    "iblinkinfo": ("iblinkinfo", IBLINKINFO),
    "manager": ("fabric manager's log", MANAGER),
    "details": ("perfquery's details", DETAILS),
    "nodes": ("sinfo", NODES),
}
# a cut at the end of a line leaves a recording that nobody can tell from a whole one: lists, logs, settings
OPEN_ENDED = {
    "list",
    "csv",
    "cgroup",
    "log",
    "nvlink-errors",
    "ibdiagnet",
    "iblinkinfo",
    "manager",
    "details",
    "nodes",
}


def found(*texts: str, **expect: Any) -> list[Finding]:
    judged = inspect([(f"file{number}", text) for number, text in enumerate(texts)], expect)
    return [finding for each in judged for finding in each.findings]


def bad(*texts: str, **expect: Any) -> list[tuple[str, str]]:
    return [(f.verdict, f.check) for f in found(*texts, **expect) if f.verdict not in (PASS, SKIP)]


def overall(text: str, **expect: Any) -> str:
    return verdict(inspect([("file", text)], expect))


@pytest.mark.parametrize("name", WELL)
def test_what_is_well_is_recognised_and_has_no_false_alarm(name: str) -> None:
    kind, text = WELL[name]
    known = recognise(clean(text))
    assert known is not None
    assert known.name == kind
    assert bad(text) == []
    assert overall(text) == PASS


@pytest.mark.parametrize("name", sorted(set(WELL) - OPEN_ENDED))
def test_what_is_cut_off_is_never_well(name: str) -> None:
    text = WELL[name][1]
    by_lines = name in ("perfquery", "ibstat", "nvlink", "topo", "devinfo", "rdma", "burn")
    last = text.rstrip("\n").rfind("\n") if by_lines else len(text.rstrip()) - 1
    # a table that ends with its last GPU is one of an older driver, or cut: a warning
    healthy = (PASS,) if name == "table" else (PASS, WARN)
    for cut in range(1, last, max(1, len(text) // 60)):
        assert overall(text[:cut]) not in healthy, text[:cut][-80:]


@given(st.text(max_size=400))
@example("GPU0 GPU1\n")
@example("Link 0: 1.2.3 GB/s")
@example('{"DCGM Diagnostic": 3}')
@settings(max_examples=150, deadline=None)
def test_no_text_makes_it_fail_or_is_called_well(text: str) -> None:
    assert overall(text) != PASS or recognise(text) is not None


LINES = sorted({line for _, text in WELL.values() for line in text.splitlines()})


@given(st.lists(st.sampled_from(LINES), max_size=12), st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_no_mixture_of_lines_makes_a_parser_fail(lines: list[str], cut: int) -> None:
    """Every parser that takes a text for its own must come through it without the net below all of them."""
    text = ("\n".join(lines) + "\n")[: cut or None]
    for kind in KINDS:
        if kind.is_it(text):
            kind.parse(text)


@given(st.sampled_from(sorted(WELL)), st.data())
@settings(max_examples=100, deadline=None)
def test_no_damage_makes_a_parser_fail(name: str, data: st.DataObject) -> None:
    text = WELL[name][1]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    broken = text[:start] + data.draw(st.text(max_size=8)) + text[end:]
    for kind in KINDS:
        if kind.is_it(broken):
            kind.parse(broken)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            XML.replace("<sram_uncorrectable_secded>1<", "<sram_uncorrectable_secded>2<"),
            (FAIL, "sram-uncorrected"),
        ),
        (XML.replace("<current_link_width>16x", "<current_link_width>8x"), (FAIL, "pcie-link")),
        (XML.replace("47 C", "-3 C").replace("40 C", "90 C"), (FAIL, "temperature")),
        (XML.replace("<attached_gpus>1", "<attached_gpus>8"), (UNKNOWN, "gpu-count")),
        (XML.replace("40 C", "Unknown Error"), (UNKNOWN, "temperature")),
        (
            Q.replace(
                "Pending                                        : No",
                "Pending                                        : Yes",
            ),
            (FAIL, "remap-pending"),
        ),
        (Q.replace("Completed", "In Progress"), (FAIL, "fabric-state")),
        (
            Q.replace(
                "Status                                         : Success",
                "Status    : Insufficient Resources",
            ),
            (FAIL, "fabric-state"),
        ),
        (Q.replace(": 0\n", ": Unknown Error\n"), (FAIL, "gpu-lost")),
        (TABLE.replace("                  0 |", "                  3 |"), (FAIL, "ecc-uncorrected")),
        (TABLE.replace("41C", "ERR!"), (UNKNOWN, "temperature")),
        (TABLE.replace("41C", "ERR!"), (UNKNOWN, "gpu-readable")),
        (TABLE.replace(" 69W", "ERR!"), (UNKNOWN, "gpu-readable")),
        (XML.replace("66.84 W", "[Unknown Error]"), (UNKNOWN, "gpu-readable")),
        (CSV.replace("61.20 W", "[Unknown Error]"), (UNKNOWN, "gpu-readable")),
        ("index, clocks_event_reasons.active\n0, 0x0000000000000048\n", (FAIL, "slowdown")),
        (
            "Unable to determine the device handle for gpu 0000:3D:00.0: GPU requires reset\n",
            (FAIL, "recovery-action"),
        ),
        (
            "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error\n" + LIST,
            (FAIL, "gpu-count"),
        ),
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            (FAIL, "driver-library"),
        ),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", (FAIL, "nvml")),
        ("WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n", (FAIL, "inforom")),
        (NVLINK.replace("Link 7: 26.562 GB/s", "Link 7: <inactive>"), (FAIL, "nvlink-count")),
        (NVLINK.replace("Link 7: 26.562 GB/s", "Link 7: inActive"), (FAIL, "nvlink-count")),
        (NVLINK.replace("26.562", "13.281"), (FAIL, "nvlink-speed")),
        (NVLINK.replace("H100 80GB HBM3", "H999"), (UNKNOWN, "nvlink-count")),
        (ERRORS.replace("Recovery Errors: 0", "Recovery Errors: 7", 1), (WARN, "nvlink-errors")),
        (TOPO.replace("GPU1\tNV18", "GPU1\tNV12"), (UNKNOWN, "topology")),
        (P2P.replace("GPU1\tOK", "GPU1\tCNS"), (FAIL, "p2p")),
        (
            "GPU 0: Tesla V100-SXM2-32GB\n" + LINKS.replace("7: 26.562 GB/s", "7: <inactive>"),
            (FAIL, "nvlink-count"),
        ),
        (CSV.replace("41", "abc"), (UNKNOWN, "temperature")),
        (CSV.replace("Not Active", "Active"), (FAIL, "slowdown")),
        (CSV.replace("[N/A]", "[GPU requires reset]"), (FAIL, "recovery-action")),
        (CSV.replace("[N/A]", "[GPU is lost]"), (FAIL, "gpu-lost")),
        (IBSTAT.replace("Active", "Initializing"), (FAIL, "port")),
        (IBSTAT.replace("State: Active", "State: Down").replace("LinkUp", "Polling"), (FAIL, "port")),
        (
            PERFQUERY.replace("SymbolErrorCounter:..............0", "SymbolErrorCounter:..............65535"),
            (WARN, "symbol-errors"),
        ),
        (DIAG.replace('"Pass"', '"Fail"'), (FAIL, "dcgm-diag")),
        (NCCL.replace("352.01      0", "352.01      5"), (FAIL, "nccl-data")),
        (NCCL.replace("0 OK", "2 FAILED"), (FAIL, "nccl-data")),
        (NCCL.replace("352.01", "200.00"), (FAIL, "nccl-bandwidth")),
        (NCCL.replace("352.01", "20.00"), (UNKNOWN, "nccl-bandwidth")),
        ("There are not enough slots available in the system to satisfy the 16\n", (FAIL, "nccl-run")),
        (CGROUP.replace("ConstrainDevices=yes", "ConstrainDevices=no"), (FAIL, "cgroup-conf")),
        (LOG + "[    3.000000] NVRM: Xid (PCI:0000:1b:00): 95, Uncontained: LTC TAG\n", (FAIL, "xid")),
        ("AutoDetect=nvml\nName=gpu\nName=gpu\n", (FAIL, "gres-conf")),
        ("mlx5_0 port 1 ==> ib0 (Up)\nmlx5_1 port 1 ==> ib1 (Down)\n", (FAIL, "port")),
        ("    gpuId 0:\n        U U U D\n", (FAIL, "nvlink-count")),
        (DEVINFO.replace("PORT_ACTIVE (4)", "PORT_DOWN (1)"), (FAIL, "port")),
        (MLXLINK.replace("Active", "Polling"), (FAIL, "port")),
        (MLXLINK.replace("No issue was observed", "Bad signal integrity"), (WARN, "port")),
        (IBDIAGNET.replace("Lids Check                0          0", "Lids Check  0  2"), (FAIL, "fabric")),
        (IBDIAGNET.replace("Links Check               0          0", "Links Check 7  0"), (WARN, "fabric")),
        (IBLINKINFO.replace("Active/  LinkUp", "Initialize/  LinkUp"), (FAIL, "port")),
        (IBLINKINFO.replace('"leaf" ( )', '"leaf" ( Could be 106.25 Gbps)'), (WARN, "port")),
        (NODES.replace("mix", "down*"), (FAIL, "scheduler")),
        (RDMA.replace("LINK_UP", "POLLING").replace("ACTIVE", "DOWN"), (FAIL, "port")),
        (BURN.replace("1: OK", "1: FAULTY"), (FAIL, "gpu-burn")),
        (HEALTH.replace("Healthy", "Failure"), (FAIL, "dcgm-health")),
        (
            LIST.partition("\n")[0] + "\n\tUnable to retrieve NVLink information as all links are inActive\n",
            (FAIL, "nvlink-count"),
        ),
        (
            ERRORS.replace("Link 0: Replay Errors: 0", "Link 0: Malformed packet Errors: 4"),
            (WARN, "nvlink-errors"),
        ),
        (
            TABLE.replace("HBM3          On ", "HBM3        ERR! ").replace("41C", "ERR!"),
            (UNKNOWN, "temperature"),
        ),
    ],
)
def test_what_is_broken_is_found(text: str, expected: tuple[str, str]) -> None:
    assert expected in bad(text)


def test_spellings_of_drivers_come_to_the_same_reading() -> None:
    (each,) = inspect([("file", XML)], {})
    (gpu,) = each.parts[0].node["gpus"]
    assert gpu["power.draw"] == 66.84
    assert gpu["clocks_event_reasons.sw_power_cap"] == "Active"
    assert gpu["ecc.errors.uncorrected.aggregate.sram"] == 4
    old = XML.replace("clocks_event_reason", "clocks_throttle_reason").replace(
        "gpu_power_readings", "power_readings"
    )
    (again,) = inspect([("file", old)], {})
    assert again.parts[0].node["gpus"][0].values == gpu.values


def test_a_gpu_with_fewer_links_than_the_others_is_named() -> None:
    names = [f"GPU{number}" for number in range(8)]
    rows = [
        "\t".join([a, *(" X " if a == b else "NV17" if "GPU3" in (a, b) else "NV18" for b in names)])
        for a in names
    ]
    text = "\t" + "\t".join(names) + "\tCPU Affinity\n" + "".join(f"{row}\t0-31\n" for row in rows)
    (told,) = [each for each in found(text) if each.check == "topology"]
    assert (told.verdict, told.read) == (WARN, "7 x NV17, 21 x NV18; of GPU3")
    assert bad(text.replace("NV17", "NV18"), model="h100-sxm") == []
    for model, verdicts in (("h100-sxm", [(WARN, "topology")]), ("l40s", [])):
        assert bad(text.replace("NV17", "SYS").replace("NV18", "SYS"), model=model) == verdicts


@pytest.mark.parametrize(
    "text",
    [
        "index, pid, max_memory_usage [MiB], gpu_name, time [ms]\n0, 17, 818 MiB, NVIDIA H200, 39376 ms\n",
        NVLINK.partition("\n")[0]
        + "\n\t Link 0, P2P is supported: true\n\t Link 0, SLI is supported: false\n",
        NVLINK.partition("\n")[0] + "\n\t Link 0: Remote Device 00000008:00:00.0: Link 29\n",
        NVLINK.partition("\n")[0] + "\n\t Link 0: 00000000:C4:00.0\n",
    ],
)
def test_what_tells_nothing_of_the_state_is_skipped_and_no_alarm(text: str) -> None:
    assert bad(text) == []
    assert any(each.verdict == SKIP and each.why for each in found(text))


FABRIC_MANAGER = (
    "[Feb 27 2025 15:10:02] [INFO] [tid 1584] Connected to 1 node.\n"
    "[Feb 27 2025 15:10:02] [{}] [tid 12727] {}\n"
)


@pytest.mark.parametrize(
    ("level", "words", "verdict"),
    [
        ("INFO", "Successfully configured all the available NVSwitches", PASS),
        (
            "ERROR",
            "detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 port 61",
            WARN,
        ),
        (
            "ERROR",
            "detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 port 30",
            FAIL,
        ),
        ("ERROR", "failed to allocate NVLink trunk ports", FAIL),
        ("WARNING", "access link is not active", WARN),
    ],
)
def test_the_fabric_managers_log_is_judged(level: str, words: str, verdict: str) -> None:
    told = [each for each in found(FABRIC_MANAGER.format(level, words)) if each.check == "fabric-manager"]
    assert {each.verdict for each in told} == {verdict}


def test_the_one_port_that_is_slower_than_all_of_its_type_is_told() -> None:
    ports = "".join(IBSTAT.replace("mlx5_0", f"mlx5_{number}") for number in range(8))
    slow = ports.replace("Rate: 400", "Rate: 200", 1)
    assert bad(ports) == []
    (told,) = [each for each in found(slow) if each.verdict == WARN]
    assert (told.check, told.subject) == ("port", "mlx5_0:1")
    assert bad(slow.replace("Rate: 400", "Rate: 200", 1)) == []  # two of them: another network


def test_the_long_form_of_ibdev2netdev_and_the_details_of_perfquery_are_read() -> None:
    line = "0000:19:00.0 mlx5_{} (MT4129 - MCX755106AS) NVIDIA ConnectX-7 fw 28.39.1002 port 1 ({}) ==> ib{} ({})\n"
    long = line.format(0, "ACTIVE", 0, "Up") + line.format(1, "DOWN  ", 1, "Down")
    assert bad(long) == [(FAIL, "port")]
    details = "# PortRcvErrorDetails counters: Lid 17 port 1\nPortLocalPhysicalErrors:.........{}\n"
    assert bad(details.format(0)) == []
    assert bad(details.format(4)) == [(WARN, "symbol-errors")]


def test_counters_of_links_that_are_cut_off_are_not_well() -> None:
    text = NVLINK.partition("\n")[0] + "\n"
    text += "".join(
        f"\t Link {n}: {kind} Errors: 0\n" for n in range(3) for kind in ("Rx", "Malformed packet")
    )
    assert bad(text) == []
    assert overall(text[: text.rindex("\t")]) == UNKNOWN


def test_a_table_of_processes_that_ends_in_its_header_is_not_an_idle_gpu() -> None:
    header = "pid, process_name, used_gpu_memory [MiB]\n"
    assert overall(header) == PASS
    assert overall(header[:-6]) == UNKNOWN


def test_what_fec_has_corrected_is_no_error() -> None:
    fec = ERRORS + "".join(f"\t Link {number}: FEC Errors - 0: 128292892\n" for number in range(4))
    assert bad(fec) == []


@pytest.mark.parametrize("name", ["nvlink", "list", "q", "ibdev", "perfquery", "rdma"])
def test_a_last_line_that_is_whole_needs_no_line_end(name: str) -> None:
    text = {**{key: text for key, (_, text) in WELL.items()}, "ibdev": "mlx5_0 port 1 ==> ib0 (Up)\n"}[name]
    assert bad(text.rstrip("\n")) == []


def test_a_branch_that_is_one_word_is_absent_as_a_whole() -> None:
    assert {f.verdict for f in found(XML) if f.check in ("remap-pending", "remapped-rows")} == {SKIP}


def test_the_largest_message_counts_and_not_the_average() -> None:
    (said,) = [f for f in found(NCCL) if f.check == "nccl-bandwidth"]
    assert (said.read or "").startswith("352.01 GB/s at 8589934592 bytes")


def test_messages_of_the_kernel_with_commas_are_no_table_of_values() -> None:
    line = "NVRM: Xid (PCI:0000:38:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception"
    known = recognise(f"kern  :warn  : 2025-03-03T04:41:44,283302+00:00 {line}\n" * 2)
    assert known is not None
    assert known.name == "kernel messages"


def test_what_the_site_would_know_is_compared() -> None:
    assert bad(XML, gpus=1, model="H100") == []
    assert (FAIL, "gpu-count") in bad(XML, gpus=8)
    assert (FAIL, "gpu-count") in bad(XML, model="H200")
    assert (FAIL, "gpu-count") in bad(TOPO, gpus=8)
    assert (FAIL, "port") in bad(IBSTAT, rate=200)
    assert (FAIL, "gpu-count") in bad("gpus: 3\n", LIST)


def test_files_are_compared_with_each_other() -> None:
    conf = "GresTypes=gpu\nNodeName=gpu-[1-2] CPUs=192 RealMemory=1031000\n"
    assert (FAIL, "gres-conf") in bad(conf, "NodeName=gpu-[1-2] Name=gpu Type=h100 File=/dev/nvidia[0-7]\n")
    job = "JobId=1 GRES=gpu:1(IDX:0)\n"
    minors = "index, pci.bus_id, minor\n0, 00000000:01:00.0, 4\n6, 00000000:C1:00.0, 0\n"
    assert any("index 6, bus 0000:c1:00.0" in (f.read or "") for f in found(job, minors))


def test_a_transcript_and_a_bug_report_are_judged_by_their_parts() -> None:
    assert bad(f"$ nvidia-smi -L\n{LIST}[exit 0]\n$ nvidia-smi topo -m\n{TOPO}[exit 0]\n") == []
    line = "_" * 46
    parts = [f"*** nvidia-smi -q\n{Q}", LOG, "End of NVIDIA bug report log file."]
    whole = "Start of NVIDIA bug report log file.\n" + "".join(f"{line}\n{part}\n" for part in parts)
    assert bad(whole) == []
    assert (UNKNOWN, "recording") in bad(whole[:-60])


@pytest.mark.parametrize("text", ["", "hello\n", "\x00\x01\x02", "{}", "[]", "a: b\n", "<html></html>"])
def test_what_is_no_recording_cannot_be_told(text: str) -> None:
    assert overall(text) == UNKNOWN


@pytest.mark.parametrize("text", ["gpus", "gpus=x", "colour=red", "gpus="])
def test_an_expectation_that_is_none_is_wrong_input(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected gpus=8|is a number"):
        expectations(text)


def test_the_verb_prints_a_line_a_finding_and_ends_with_one_for_what_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "smi.xml"
    file.write_text(XML.replace("<current_link_width>16x", "<current_link_width>8x"))
    answer = CliRunner().invoke(app, ["inspect", str(file), "--expect", "gpus=1"])
    assert answer.exit_code == 1
    assert (
        "FAIL pcie-link GPU 0 0000:1b:00.0: width x8, expected x16, reboot: reseat the card" in answer.output
    )
    told = json.loads(CliRunner().invoke(app, ["inspect", str(file), "--json"]).output)
    assert (told["verb"], told["verdict"], told["nodes"]) == ("inspect", "fail", {})
    assert told["details"]["files"][0]["kind"] == "nvidia-smi -q -x"
    assert any(finding["source"] == str(file) for finding in told["findings"])


def test_a_file_that_is_not_there_is_wrong_input(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "none")]).exit_code == 2


# ---- a launch over several nodes, as somebody wrote it down


def told(value: Any) -> list[tuple[str, str, str | None]]:
    return [(finding.verdict, finding.subject, finding.read) for finding in found(json.dumps(value))]


def test_a_name_that_others_cannot_resolve_is_told_of_them() -> None:
    """TRN-01"""
    seen = {"n2": None, "n3": "10.7.0.1", "n4": "127.0.1.1"}
    assert told({"n1": {"fqdn": "n1.lab.example", "seen_by": seen}}) == [
        (FAIL, "n2", "cannot resolve n1.lab.example"),
        (PASS, "n3", "n1.lab.example is 10.7.0.1"),
        (FAIL, "n4", "n1.lab.example is 127.0.1.1"),
    ]


@pytest.mark.parametrize(
    ("endpoint", "resolves", "expected"),
    [
        ("meet:29500", {"meet": "10.8.0.9"}, (FAIL, "n1", "10.8.0.9 is no address of n1")),
        ("meet:29500", {}, (FAIL, "n1", "n1 cannot resolve meet")),
        ("10.8.0.9:29500", {}, (FAIL, "n1", "10.8.0.9 is no address of n1")),
        ("meet:29500", {"meet": "10.7.0.1"}, (PASS, "n1", "meet is n1")),
        ("10.7.0.1:29500", {}, (PASS, "n1", "10.7.0.1 is n1")),
        ("n1:29500", {}, (PASS, "n1", "n1 is n1")),
    ],
)
def test_a_launch_meets_at_an_address_of_its_head(
    endpoint: str, resolves: dict[str, str], expected: tuple[str, str, str]
) -> None:
    """TRN-02"""
    head = {"hostname": "n1", "addrs": ["10.7.0.1"], "resolves": resolves}
    assert told({"endpoint": endpoint, "head": head}) == [expected]


def test_a_closed_port_names_the_pair_and_a_host_that_reaches_itself_shows_nothing() -> None:
    """TRN-04"""
    probes = [
        {"from": "n2", "to": "n1", "addr": "10.7.0.1", "port": 20007, "error": "timed out"},
        {"from": "n3", "to": "n1", "addr": "10.7.0.1", "port": 20007, "error": None},
        {"from": "n1", "to": "n1", "addr": "127.0.1.1", "port": 20007, "error": None},
    ]
    assert told(probes) == [
        (FAIL, "n2 -> n1", "10.7.0.1 port 20007: timed out"),
        (PASS, "n3 -> n1", "10.7.0.1 port 20007: open"),
        (SKIP, "n1 -> n1", "127.0.1.1 port 20007"),
    ]


# NCL-01
def test_a_route_by_another_interface_is_found_from_addresses_and_routes() -> None:
    addresses = {
        "n1": {"eth0": "10.7.0.1/20", "eth1": "10.7.1.1/20"},
        "n2": {"eth0": "10.7.0.2/20", "eth1": "10.7.1.2/20"},
    }
    routes = {
        "n1": {"10.7.0.2": {"dev": "eth0", "src": "10.7.0.1"}},
        "n2": {"10.7.0.1": {"dev": "eth1", "src": "10.7.1.2"}},
    }
    failed = [f for f in found(json.dumps(addresses), json.dumps(routes)) if f.verdict == FAIL]
    assert [(f.check, f.subject) for f in failed] == [
        ("overlapping-networks", "n1"),
        ("overlapping-networks", "n2"),
        ("route", "n2 -> 10.7.0.1"),
    ]
