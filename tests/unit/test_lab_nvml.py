"""The simulated GPUs, asked through NVIDIA's own Python bindings."""

from __future__ import annotations

import ctypes
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from provision.hardware import smi as hardware
from provision.lab import files, gpus
from provision.lab.command import InputError
from provision.lab.faults import FAULTS
from provision.lab.nvml import devices
from provision.lab.nvml import smi as program
from provision.profiles.gpu import gpu_model
from tests.gpu import nvml_answers

NODE = "lab-gpu-1"
SOURCE = Path(gpus.__file__).parent / "nvml"
RECORDED = Path(nvml_answers.__file__).parent / "recorded/h200-x2-nvml.json"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
Gpus = Callable[..., Path]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The library in this process: the bindings then find it by its name."""
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    files.compile_library(SOURCE / "nvml.c", path)
    ctypes.CDLL(str(path))


@pytest.fixture
def simulated(library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Makes a node's GPUs: their state file."""
    path = tmp_path / "state"
    monkeypatch.setenv("LAB_NVML_STATE", str(path))

    def make(model: str = "h100-sxm", count: int = 2) -> Path:
        path.write_text(gpus.state(NODE, model, count, cpus=4))
        return path

    make()
    pynvml.nvmlInit()
    yield make
    pynvml.nvmlShutdown()


def add(path: Path, *lines: str) -> None:
    """As a fault does: another file under the same name."""
    new = path.with_suffix(".new")
    new.write_text(path.read_text() + "".join(f"{line}\n" for line in lines))
    new.rename(path)


def fault(path: Path, name: str, gpu: int = 0, link: int = 0) -> None:
    found = next(each for each in gpus.faults() if each.name == name)
    add(path, found.text(gpu, link).rstrip())


def gpu(index: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


@pytest.mark.parametrize("model", gpus.models())
def test_every_model_answers_as_its_profile_says(simulated: Gpus, model: str) -> None:
    simulated(model, 3)
    profile = gpu_model(model)
    assert profile is not None
    assert pynvml.nvmlDeviceGetCount() == 3
    assert pynvml.nvmlDeviceGetName(gpu()) == profile.products[0]
    assert pynvml.nvmlDeviceGetPciInfo(gpu(2)).pciDeviceId == profile.pci[0] << 16 | 0x10DE
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu()).total == profile.memory << 20
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += pynvml.nvmlDeviceGetNvLinkState(gpu(), link)
        except pynvml.NVMLError:
            break
    assert up == profile.nvlinks
    assert pynvml.nvmlSystemGetDriverVersion() == gpus.DRIVER


def test_a_model_that_cannot_be_simulated_is_refused_with_those_that_can() -> None:
    with pytest.raises(InputError, match=r"--model k80: cannot be simulated; there are h100-sxm, .*"):
        gpus.require("k80")


def test_every_gpu_of_every_node_is_one_of_its_kind(simulated: Gpus) -> None:
    simulated(count=16)
    handles = [gpu(index) for index in range(16)]
    for ask in (pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetSerial, pynvml.nvmlDeviceGetMinorNumber):
        assert len({ask(handle) for handle in handles}) == 16
    uuid = pynvml.nvmlDeviceGetUUID(handles[5])
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 5
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId("0000:10:00.0")) == 5
    assert uuid == gpus.gpu_uuid(NODE, 5) != gpus.gpu_uuid("lab-gpu-2", 5)


def test_its_answers_have_the_shape_of_a_real_gpus(simulated: Gpus) -> None:
    """The recording is of an H200 with a newer driver: no call of it may be answered in another form."""
    simulated("h200-sxm", 2)
    real = json.loads(RECORDED.read_text())
    ours = nvml_answers.answers()
    assert set(ours) == set(real)
    different = {
        name: (nvml_answers.shape(real[name]), nvml_answers.shape(ours[name]))
        for name in real
        if nvml_answers.shape(real[name]) != nvml_answers.shape(ours[name])
    }
    assert different == {}


def test_a_gpu_that_is_gone_is_counted_no_more_and_a_lost_one_is(simulated: Gpus) -> None:
    path = simulated()
    fault(path, "gpu-gone")
    assert pynvml.nvmlDeviceGetCount() == 1
    assert pynvml.nvmlDeviceGetMinorNumber(gpu()) == 1
    path = simulated()
    fault(path, "gpu-lost", gpu=1)
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlDeviceGetTemperature(gpu(0), 0) == 36
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        gpu(1)


def test_a_handle_from_before_meets_what_happened_since(simulated: Gpus) -> None:
    path = simulated()
    handle = gpu()
    fault(path, "gpu-lost")
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetPowerUsage(handle)


@pytest.mark.parametrize(
    ("name", "ask", "answer"),
    [
        ("gpu-ecc", lambda g: pynvml.nvmlDeviceGetTotalEccErrors(g, 1, 0), 1),
        ("gpu-ecc-off", pynvml.nvmlDeviceGetEccMode, [0, 0]),
        ("gpu-remap", pynvml.nvmlDeviceGetRemappedRows, (0, 1, 1, 0)),
        ("gpu-remap-failed", lambda g: pynvml.nvmlDeviceGetRowRemapperHistogram(g).none, 1),
        ("gpu-nvlink-down", lambda g: [pynvml.nvmlDeviceGetNvLinkState(g, n) for n in (2, 3, 4)], [1, 0, 1]),
        ("gpu-nvlink-errors", lambda g: pynvml.nvmlDeviceGetNvLinkErrorCounter(g, 3, 2), 100000),
        ("gpu-repair", pynvml.nvmlDeviceGetRepairStatus, [1, 0]),
        ("gpu-fabric", lambda g: nvml_answers.fabric(g).state, 2),
        ("gpu-hot", lambda g: pynvml.nvmlDeviceGetTemperature(g, 0), 95),
        ("gpu-hot", pynvml.nvmlDeviceGetMarginTemperature, -3),
        ("gpu-throttle", pynvml.nvmlDeviceGetCurrentClocksEventReasons, 0x88),
        ("gpu-pcie", pynvml.nvmlDeviceGetCurrPcieLinkWidth, 8),
        ("gpu-mig", pynvml.nvmlDeviceGetMigMode, [1, 1]),
        ("gpu-persistence-off", pynvml.nvmlDeviceGetPersistenceMode, 0),
        ("gpu-sram", lambda g: nvml_answers.sram(g).bThresholdExceeded, 1),
        ("gpu-process", lambda g: [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(g)], [4242]),
    ],
)
def test_a_fault_is_seen_by_who_asks(
    simulated: Gpus, name: str, ask: Callable[[object], object], answer: object
) -> None:
    path = simulated()
    before = ask(gpu())
    fault(path, name, link=3)
    assert ask(gpu()) == answer != before
    assert ask(gpu(1)) == before


def test_what_cannot_be_read_is_an_error_never_a_number(simulated: Gpus) -> None:
    path = simulated()
    fault(path, "gpu-unreadable")
    assert pynvml.nvmlDeviceGetName(gpu()) == "NVIDIA H100 80GB HBM3"
    for ask in (
        pynvml.nvmlDeviceGetPowerUsage,
        pynvml.nvmlDeviceGetRemappedRows,
        pynvml.nvmlDeviceGetMemoryInfo,
    ):
        with pytest.raises(pynvml.NVMLError_Unknown):
            ask(gpu())
    (field,) = pynvml.nvmlDeviceGetFieldValues(gpu(), [pynvml.NVML_FI_DEV_MEMORY_TEMP])
    assert field.nvmlReturn == pynvml.NVML_ERROR_UNKNOWN


def test_a_question_that_hangs_does_so_until_its_asker_gives_up(simulated: Gpus) -> None:
    path = simulated()
    fault(path, "gpu-hang", gpu=1)
    asking = threading.Thread(target=lambda: gpu(1), daemon=True)
    asking.start()
    asking.join(0.3)
    assert asking.is_alive()
    assert pynvml.nvmlDeviceGetTemperature(gpu(0), 0) == 36  # the others still answer


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("gpu-driver", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
        ("gpu-no-driver", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    ],
)
def test_without_its_driver_the_library_does_not_start(simulated: Gpus, name: str, error: int) -> None:
    path = simulated()
    fault(path, name)
    with pytest.raises(pynvml.NVMLError) as raised:
        pynvml.nvmlInit()
    assert raised.value.value == error


def test_slices_are_devices_of_their_own(simulated: Gpus) -> None:
    path = simulated()
    fault(path, "gpu-mig")
    slice_ = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), 1)
    assert pynvml.nvmlDeviceIsMigDeviceHandle(slice_).value == 1
    assert pynvml.nvmlDeviceGetUUID(slice_).startswith("MIG-")
    assert pynvml.nvmlDeviceGetGpuInstanceId(slice_) == 2
    assert pynvml.nvmlDeviceGetMemoryInfo(slice_).total == 40448 << 20
    assert pynvml.nvmlDeviceGetAttributes(slice_).gpuInstanceSliceCount == 3
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(slice_)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu())
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(), 2)


def test_every_fault_is_one_of_the_labs_with_its_options() -> None:
    options = {name: list(FAULTS[name].options) for name in FAULTS if name.startswith("gpu-")}
    assert set(options) == {each.name for each in gpus.faults()}
    assert options["gpu-lost"] == ["gpu"]
    assert options["gpu-nvlink-down"] == ["gpu", "link"]
    assert options["gpu-driver"] == []


def test_the_node_has_a_pci_function_for_each_gpu_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text(gpus.state(NODE, "h100-sxm", 2, cpus=4))
    lines = devices.read(path)
    assert list(devices.there(lines)) == ["gpu0", "gpu1"]
    address, found = devices.pci_function(lines, "gpu1")
    assert (address, found["vendor"], found["device"]) == ("0000:0c:00.0", "0x10de", "0x2330")
    assert (found["current_link_speed"], found["current_link_width"]) == ("32.0 GT/s PCIe", "16")
    fault(path, "gpu-lost", gpu=1)  # the driver's trouble: the function stays
    assert devices.pci_function(devices.read(path), "gpu1") == (address, found)
    fault(path, "gpu-gone", gpu=0)
    assert list(devices.there(devices.read(path))) == ["gpu1"]
    assert devices.read(tmp_path / "none") == []


def test_the_slices_of_a_gpu_have_capabilities(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text(gpus.state(NODE, "h100-sxm", 2, cpus=4))
    fault(path, "gpu-mig", gpu=1)
    lines = devices.read(path)
    assert list(devices.slices(lines, "gpu0")) == []
    assert list(devices.slices(lines, "gpu1")) == [
        "gpu1/gi1/access",
        "gpu1/gi1/ci0/access",
        "gpu1/gi2/access",
        "gpu1/gi2/ci0/access",
    ]


# ---- nvidia-smi


@pytest.fixture
def smi(simulated: Gpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs the node's nvidia-smi on the state file; nothing is made in /dev."""
    monkeypatch.setattr(devices, "STATE", simulated())
    monkeypatch.setattr(devices, "main", lambda words: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return lambda words: program.answer(words.split())


def test_what_nvidia_smi_prints_is_read_as_that_of_a_real_one(smi: Callable[[str], str]) -> None:
    first, second = hardware.parse_q(smi("-q -x")).gpus
    assert (first.bus, first.product, first.memory) == ("0000:0b:00.0", "NVIDIA H100 80GB HBM3", 81559)
    assert (first.persistence, first.mig, first.ecc, first.power_limit) == (True, False, True, 700.0)
    assert [each.uuid for each in hardware.parse_list(smi("-L"))] == [first.uuid, second.uuid]
    assert hardware.parse_nvlinks(smi("nvlink -s")) == dict.fromkeys((0, 1), (26.562,) * 18)
    assert hardware.parse_topology(smi("topo -m")).links["GPU1"] == {"GPU0": "NV18"}
    asked = "--query-gpu=index,driver_version,power.limit,fan.speed --format=csv,noheader,nounits"
    with pytest.raises(program.Refused, match=r'"fan\.speed" is not a valid field') as refused:
        smi(f"-i 1 {asked}")
    assert refused.value.status == 2
    assert smi(f"-i 1 {asked.replace(',fan.speed', '')}") == f"1, {gpus.DRIVER}, 700.00\n"


def test_modes_that_are_set_show_in_nvml_and_mend_a_fault(smi: Callable[[str], str]) -> None:
    fault(devices.STATE, "gpu-power-limit")
    assert pynvml.nvmlDeviceGetPowerManagementLimit(gpu()) == 350000
    for words in ("-i 0 -pl 700", "-i 0 -c EXCLUSIVE_PROCESS", "-i 0 -pm 0", "-i 0 -e 0", "-i 0 -e 0"):
        smi(words)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(gpu()) == 700000
    assert pynvml.nvmlDeviceGetComputeMode(gpu()) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert pynvml.nvmlDeviceGetPersistenceMode(gpu()) == 0
    assert pynvml.nvmlDeviceGetEccMode(gpu()) == [1, 0]  # at the next boot
    assert devices.STATE.read_text().count("gpu0.ecc.mode_pending = 0 # nvidia-smi") == 1
    devices.booted(devices.read(devices.STATE))
    assert pynvml.nvmlDeviceGetEccMode(gpu()) == [0, 0]
    with pytest.raises(program.Refused, match="is not a valid power limit"):
        smi("-i 0 -pl 9000")


def test_a_gpu_is_divided_and_made_whole(smi: Callable[[str], str]) -> None:
    with pytest.raises(program.Refused, match="MIG mode is not enabled"):
        smi("mig -i 1 -cgi 1g.10gb -C")
    smi("-i 1 -mig 1")
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu(1)) == 7
    smi("mig -i 1 -cgi 3g.40gb,1g.10gb,1g.10gb -C")
    assert hardware.parse_list(smi("-L"))[1].slices == ("3g.40gb", "1g.10gb", "1g.10gb")
    uuids = [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(1), part))
        for part in (0, 1, 2)
    ]
    assert len(set(uuids)) == 3
    with pytest.raises(program.Refused, match="Insufficient Resources"):
        smi("mig -i 1 -cgi 1g.10gb -C")
    smi("mig -i 1 -dgi")
    assert hardware.parse_list(smi("-L"))[1].slices == ()
    with pytest.raises(program.Refused, match="Insufficient Resources"):
        smi("mig -i 1 -cgi 4g.40gb,4g.40gb -C")


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("gpu-no-driver", 9, "not loaded"),
        ("gpu-driver", 18, "of different versions"),
        ("gpu-lost", 255, "GPU 0000:0B:00.0 cannot be opened"),
    ],
)
def test_nvidia_smi_fails_as_the_real_one_does(
    smi: Callable[[str], str], name: str, status: int, why: str
) -> None:
    fault(devices.STATE, name)
    with pytest.raises(program.Refused) as refused:
        smi("-q -x")
    assert refused.value.status == status
    assert why in str(hardware.cause(str(refused.value)))


def test_a_sensor_that_cannot_be_read_is_an_error_in_its_place(smi: Callable[[str], str]) -> None:
    fault(devices.STATE, "gpu-unreadable", gpu=1)
    assert smi("-i 1 --query-gpu=name,power.limit --format=csv,noheader") == (
        "NVIDIA H100 80GB HBM3, [Unknown Error]\n"
    )
    assert isinstance(hardware.parse_q(smi("-q -x")).gpus[1].temperature, hardware.Unread)
    fault(devices.STATE, "gpu-process")
    assert smi("--query-compute-apps=pid --format=csv,noheader") == "4242\n"
