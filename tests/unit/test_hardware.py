"""What machines say of their hardware, read: nvidia-smi of several drivers, PCI, RDMA, NUMA, disks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.engine.remote import local_shell
from provision.hardware import machine, pci, rdma, smi
from provision.profiles.gpu import gpu_model

RECORDED = Path(__file__).parents[1] / "gpu/recorded"


def log(gpu: str, driver: str = "580.1.2") -> str:
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>'
        f'<driver_version>{driver}</driver_version><gpu id="00000000:4B:00.0">{gpu}</gpu></nvidia_smi_log>'
    )


def one(gpu: str) -> smi.Gpu:
    (found,) = smi.parse_q(log(gpu)).gpus
    return found


def refusal(parse: Callable[[str], object], text: str, kind: type[Exception]) -> str | None:
    """The words of the error; None where `text` was understood. Any other exception is a mistake."""
    try:
        parse(text)
    except kind as error:
        return str(error)
    return None


# ---- nvidia-smi


def test_values_are_numbers_and_what_a_gpu_does_not_have_is_none() -> None:
    gpu = one(
        "<product_name>NVIDIA H200</product_name><serial>N/A</serial><minor_number>3</minor_number>"
        "<persistence_mode>Enabled</persistence_mode><ecc_mode><current_ecc>Disabled</current_ecc></ecc_mode>"
        "<fb_memory_usage><total>143771 MiB</total></fb_memory_usage><temperature><gpu_temp> 37 C </gpu_temp>"
        "</temperature><pci><pci_device_id>233510DE</pci_device_id><pci_gpu_link_info><link_widths>"
        "<current_link_width>8x</current_link_width></link_widths></pci_gpu_link_info></pci>"
    )
    assert (gpu.bus, gpu.product, gpu.serial, gpu.minor) == ("0000:4b:00.0", "NVIDIA H200", None, 3)
    assert (gpu.persistence, gpu.ecc, gpu.memory, gpu.temperature) == (True, False, 143771, 37)
    assert (gpu.pci_id, gpu.pcie_width, gpu.pcie_width_max) == (0x2335, 8, None)


@pytest.mark.parametrize("said", ["Unknown Error", "[Unknown Error]", "ERR!", "GPU is lost", "soon"])
def test_what_could_not_be_read_is_no_number(said: str) -> None:
    """OPS: a field with an error in it was taken for a healthy one."""
    gpu = one(f"<temperature><gpu_temp>{said}</gpu_temp></temperature>")
    assert isinstance(gpu.temperature, smi.Unread)
    assert gpu.temperature.said == said.strip("[]")


def test_the_power_limit_moved_with_driver_535() -> None:
    old = "<power_readings><power_limit>300.00 W</power_limit></power_readings>"
    new = "<gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings>"
    assert (one(old).power_limit, one(new).power_limit) == (300.0, 700.0)


def test_remapped_rows_are_a_tree_or_a_leaf() -> None:
    tree = "<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>"
    assert one(tree).remap_pending is True
    assert one("<remapped_rows>N/A</remapped_rows>").remap_pending is None


def test_slices_are_told_with_their_memory() -> None:
    part = (
        "<mig_device><index>0</index><gpu_instance_id>3</gpu_instance_id><compute_instance_id>0"
        "</compute_instance_id><fb_memory_usage><total>9856 MiB</total></fb_memory_usage></mig_device>"
    )
    assert one(f"<mig_devices>{part}</mig_devices>").slices == (smi.Slice(0, 3, 0, 9856),)
    assert one("<mig_devices>None</mig_devices>").slices == ()


def test_no_action_is_an_advice_and_no_advice_is_none() -> None:
    assert one("<gpu_recovery_action>None</gpu_recovery_action>").recovery == "None"
    assert one("<gpu_recovery_action>N/A</gpu_recovery_action>").recovery is None


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\n", "of different versions"),
        ("Failed to initialize NVML: Unknown Error", "NVML does not start: Unknown Error"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make", "not loaded"),
        (
            "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error",
            "GPU 0000:CB:00.0 cannot",
        ),
        (
            "Unable to determine the device handle for GPU1: 0000:34:00.0: GPU is lost.",
            "GPU 0000:34:00.0 cannot",
        ),
        ("No devices were found", "finds no GPU"),
        ("", "not what nvidia-smi -q -x prints"),
        ("<nvidia_smi_log><gpu>", "cut or damaged"),
    ],
)
def test_where_there_is_no_answer_the_reason_is_told(said: str, why: str) -> None:
    with pytest.raises(smi.SmiError, match=why):
        smi.parse_q(said)


@given(st.text())
def test_any_text_is_an_answer_or_an_error(text: str) -> None:
    for parse in (smi.parse_q, smi.parse_list, smi.parse_nvlinks, smi.parse_topology, smi.parse_version):
        assert refusal(parse, text, smi.SmiError) != ""


def test_a_list_has_gpus_with_the_kinds_of_their_slices() -> None:
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)\n  MIG 3g.20gb     Device  0: (UUID: MIG-GPU-1/1/0)\n"
        "  MIG 1g.5gb      Device  1: (UUID: MIG-GPU-1/7/0)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)\n"
    )
    assert [each.slices for each in smi.parse_list(text)] == [("3g.20gb", "1g.5gb"), ()]
    with pytest.raises(smi.SmiError, match="not loaded"):
        smi.parse_list("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_a_dead_link_is_none_and_no_links_are_an_empty_tuple() -> None:
    begin = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-{})\n"
    text = begin.format(0, 1) + "\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\t Link 2: inActive\n"
    text += begin.format(1, 2) + "Nvlink queries are not supported for Devices in MIG mode\n"
    assert smi.parse_nvlinks(text) == {0: (26.562, None, None), 1: ()}
    with pytest.raises(smi.SmiError, match="not a line"):
        smi.parse_nvlinks(begin.format(0, 1) + "\t Link 1: 26.562 GB/s\n")  # link 0 is missing


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-31,64-95\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\nNIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_3\n"
)


def test_topology_tells_which_nic_is_next_to_a_gpu() -> None:
    found = smi.parse_topology(TOPOLOGY)
    assert found.links["GPU0"] == {"GPU1": "NV18", "NIC0": "PIX", "NIC1": "SYS"}
    assert (found.cpus["GPU1"], found.numa) == ("32-63,96-127", {"GPU0": 0, "GPU1": 1})
    assert (found.nearest("GPU0"), found.nearest("GPU1")) == (["mlx5_0"], ["mlx5_3"])


def test_a_topology_that_was_cut_is_an_error() -> None:
    with pytest.raises(smi.SmiError, match="GPU1 has 1 of 4 columns"):
        smi.parse_topology(TOPOLOGY.replace("\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A", ""))


def test_the_driver_is_called_kmd_since_610() -> None:
    old = "NVIDIA-SMI version  : 590.48.01\nNVML version        : 590.48\nDRIVER version      : 590.48.01\nCUDA Version        : 13.1\n"  # noqa: E501
    new = 'NVIDIA-SMI version  : 610.57.04\nDRIVER version      : Deprecated, see "KMD version" instead\nKMD version         : 610.57.04\nCUDA UMD version    : 13.3\n'  # noqa: E501
    assert (smi.parse_version(old)["driver"], smi.parse_version(old)["cuda"]) == ("590.48.01", "13.1")
    assert (smi.parse_version(new)["driver"], smi.parse_version(new)["cuda"]) == ("610.57.04", "13.3")


# ---- PCI, RDMA


FUNCTIONS = """0000:0b:00.0|0x10de|0x2330|0x030200|0|16|16|32.0 GT/s PCIe|32.0 GT/s PCIe
0000:05:00.0|0x10de|0x22a3|0x068000|-1|2|2|8.0 GT/s PCIe|16.0 GT/s PCIe
0000:18:00.0|0x15b3|0x1021|0x020700|1|16|16|32.0 GT/s PCIe|32.0 GT/s PCIe
0000:00:1f.0|0x8086|0x0d57|0x060100|-1|0|255|Unknown|-
"""


def test_functions_are_told_apart_by_class_and_maker() -> None:
    gpu, switch, nic, bridge = pci.parse(FUNCTIONS)
    assert (gpu.is_gpu, switch.is_nvswitch, nic.is_nic) == (True, True, True)
    assert not any((bridge.is_gpu, bridge.is_nvswitch, bridge.is_nic, switch.is_gpu))
    assert (gpu.numa, switch.numa, gpu.speed, bridge.speed) == (0, None, 32.0, None)


@given(st.text())
def test_any_text_is_functions_or_an_error(text: str) -> None:
    for parse in (pci.parse, rdma.parse, rdma.parse_ibstat, rdma.parse_ibstatus, rdma.parse_interfaces):
        assert refusal(parse, text, ValueError) != ""


PORTS = (
    "mlx5_0|1|no|0000:18:00.0|4: ACTIVE|5: LinkUp|400 Gb/sec (4X NDR)|InfiniBand|a088:c203:0012:3456|28.39.1002|MT_1"
    "|0|ib0 \n"
    "mlx5_5|1|yes|0000:05:00.0|4: ACTIVE|5: LinkUp|400 Gb/sec (4X NDR)|InfiniBand|b088:c203:0012:3456|35.2014|||\n"
)


def test_an_nvswitch_is_no_adapter() -> None:
    """FAB: on B200 the NVSwitches appear as mlx5 devices."""
    ports = rdma.parse(PORTS)
    assert ports[0].up
    assert (ports[0].rate, ports[0].interfaces, ports[0].numa) == (400.0, ("ib0",), 0)
    found = machine.Machine(ports=tuple(ports))
    assert [port.device for port in found.adapters] == ["mlx5_0"]


IBSTAT = """CA 'mlx5_0'
\tNumber of ports: 1
\tFirmware version: 20.1
\tPort 1:
\t\tState: Initializing
\t\tPhysical state: LinkUp
\t\tRate: 100
\t\tPort GUID: 0x01
\t\tLink layer: InfiniBand
CA 'rdma0'
        CA type: MT1
        Port 2:
                State: Active
                Physical state: LinkUp
                Rate: 25
                Link layer: Ethernet
"""


def test_ibstat_and_ibdev2netdev_together() -> None:
    first, second = rdma.with_interfaces(
        rdma.parse_ibstat(IBSTAT), rdma.parse_interfaces("mlx5_0 port 1 ==> ib0 (Down)\n")
    )
    assert (first.state, first.up, first.firmware, first.interfaces) == ("INIT", False, "20.1", ("ib0",))
    assert (second.device, second.number, second.up, second.layer) == ("rdma0", 2, True, "Ethernet")
    with pytest.raises(ValueError, match="ibstat tells of no port"):
        rdma.parse_ibstat("")


def test_ibstatus() -> None:
    (port,) = rdma.parse_ibstatus(
        "Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n"
        "\trate:\t\t 200 Gb/sec (4X HDR)\n\tlink_layer:\t InfiniBand\n\n"
    )
    assert (port.up, port.rate, port.layer) == (True, 200.0, "InfiniBand")


# ---- a machine


@dataclass(frozen=True)
class Said:
    rc: int
    stdout: str
    stderr: str = ""


CPUS = "Socket(s): 2\nCore(s) per socket: 32\nThread(s) per core: 2\nModel name: A CPU\nMemTotal: 1056362496 kB\n"
GOOD = {
    "cpus": CPUS,
    "numa": "1|32-63|515796\n0|0-31|515797000\n",
    "functions": FUNCTIONS,
    "ports": PORTS,
    "disks": '{"blockdevices": [{"name": "nvme0n1", "size": 3840755982336, "model": "X ", "serial": "S1",'
    ' "rota": false, "type": "disk", "tran": "nvme"}, {"name": "zram0", "size": 0, "type": "disk"}]}',
    "board": "sys_vendor=NVIDIA\nproduct_name=DGXH100\nproduct_serial=\nbios_version=1.6.7\n",
}


def machine_of(**changed: Said) -> machine.Machine:
    without = {question.part: Said(127, "") for question in machine.QUESTIONS if question.of_driver}
    answers = {part: Said(0, text) for part, text in GOOD.items()} | without | changed
    return machine.machine([answers[question.part] for question in machine.QUESTIONS])


def test_a_machine_without_a_driver_tells_its_gpus_all_the_same() -> None:
    found = machine_of()
    assert found.unread == {}
    assert found.driver is None
    assert [pci.gpu_model_name(gpu) for gpu in found.gpus] == ["h100-sxm"]
    assert found.cpus == machine.Cpus("A CPU", 2, 32, 2, 1031604)
    assert [node.cpus for node in found.numa] == ["0-31", "32-63"]
    assert found.board == machine.Board("NVIDIA", "DGXH100", None, "1.6.7")
    assert [(disk.name, disk.model) for disk in found.disks] == [("nvme0n1", "X")]


def test_what_was_not_answered_is_unread_with_its_reason() -> None:
    found = machine_of(
        cpus=Said(127, "", "sh: lscpu: not found"),
        disks=Said(0, "{}"),
        functions=Said(0, "nonsense"),
        driver=Said(18, "Failed to initialize NVML: Driver/library version mismatch"),
        listed=Said(18, "Failed to initialize NVML: Driver/library version mismatch"),
    )
    assert set(found.unread) == {"cpus", "disks", "functions", "driver"}
    assert found.unread["cpus"] == "sh: lscpu: not found"
    assert "not a PCI function: 'nonsense'" in found.unread["functions"]
    assert "of different versions" in found.unread["driver"]
    assert found.cpus is None


def test_a_gpu_of_an_unknown_model_is_told_by_its_number() -> None:
    text = FUNCTIONS.replace("0x2330", "0x1234")
    assert [pci.gpu_model_name(gpu) for gpu in machine_of(functions=Said(0, text)).gpus] == ["10de:1234"]


def test_a_container_has_no_board() -> None:
    assert machine.parse_board("") is None


@given(st.text())
def test_any_answers_make_a_machine(text: str) -> None:
    found = machine.machine([Said(0, text)] * len(machine.QUESTIONS))
    assert all(found.unread.values())


def test_this_machine_answers() -> None:
    """Whatever it is: no question is wrong shell, and what it cannot tell has a reason."""
    shell = local_shell()
    try:
        found = machine.machine(shell.run_many([question.command for question in machine.QUESTIONS]))
    finally:
        shell.close()
    assert found.cpus is not None
    assert not any("yntax error" in why for why in found.unread.values())


# ---- a recording of a real machine: tests/gpu/record.py


def recorded(name: str) -> dict[str, Said]:
    text = (RECORDED / f"h200-x2-{name}.json").read_text()
    return {key: Said(**answer) for key, answer in json.loads(text).items()}


def test_a_recorded_machine_is_read_whole() -> None:
    views = recorded("nvidia-smi")
    answers = recorded("machine") | {
        "listed": views["nvidia-smi -L"],
        "nvlinks": views["nvidia-smi nvlink -s"],
        "topology": views["nvidia-smi topo -m"],
    }
    found = machine.machine([answers[question.part] for question in machine.QUESTIONS])
    assert found.unread == {}
    assert [pci.gpu_model_name(gpu) for gpu in found.gpus] == ["h200-sxm", "h200-sxm"]
    assert found.cpus is not None
    assert (found.cpus.sockets, found.cpus.cores, found.cpus.threads) == (1, 32, 1)
    assert found.driver is not None
    assert found.driver.driver == "580.159.04"
    assert [gpu.address for gpu in found.gpus] == [gpu.bus for gpu in found.driver.gpus]
    assert [len(links) for links in found.nvlinks.values()] == [18, 18]
    assert found.topology is not None
    assert found.topology.links["GPU0"] == {"GPU1": "NV18"}
    first = found.driver.gpus[0]
    assert (first.pci_id, first.memory, first.pcie_width, first.power_limit) == (0x2335, 143771, 16, 700.0)
    assert (first.fabric_state, first.fabric_status, first.recovery) == ("Completed", "Success", "None")
    read = [getattr(first, name) for name in vars(first)]
    assert not [value for value in read if isinstance(value, smi.Unread)]


def test_views_of_the_same_machine_agree() -> None:
    views = recorded("nvidia-smi")
    assert smi.parse_version(views["nvidia-smi --version"].stdout)["driver"] == "580.159.04"
    assert [each.product for each in smi.parse_list(views["nvidia-smi -L"].stdout)] == ["NVIDIA H200"] * 2
    links = smi.parse_nvlinks(views["nvidia-smi nvlink -s"].stdout)
    profile = gpu_model("h200-sxm")
    assert profile is not None
    assert links == dict.fromkeys((0, 1), (profile.nvlink_gbs,) * profile.nvlinks)
    topology = smi.parse_topology(views["nvidia-smi topo -m"].stdout)
    assert topology.links["GPU0"] == {"GPU1": "NV18"}
    assert (topology.cpus["GPU1"], topology.numa["GPU1"]) == ("0-31", 0)
