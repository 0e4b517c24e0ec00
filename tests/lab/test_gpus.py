"""The simulated GPUs of real nodes: found by NVIDIA's own bindings, by the kernel's folders, and by Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from provision.components.nvidia.exports import modes_script
from provision.components.nvidia.settings import NvidiaSettings
from provision.engine.remote import Output
from provision.lab import InputError, Lab, gpus
from provision.site.models import Access, Gpu, Node

WORKER = "lab-gpu-1"
NAMES = """
import sys; sys.path.insert(0, "/run/nvml")
import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        print(pynvml.nvmlDeviceGetMinorNumber(handle), pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab of one worker with four GPUs, and NVIDIA's bindings on it."""
    lab = Lab(tmp_path_factory.mktemp("labs") / "gpus")
    lab.up(workers=1, gpus=4, layer_names=["base", "software", "compute"])
    give_bindings(lab)
    yield lab
    lab.down()


def give_bindings(lab: Lab) -> None:
    lab.inside(
        WORKER, "mkdir -p /run/nvml; cat >/run/nvml/pynvml.py", stdin=Path(pynvml.__file__).read_text()
    )


def names(lab: Lab) -> list[str]:
    """What the bindings say of each GPU."""
    return lab.inside(WORKER, 'timeout 20 python3 -c "$1"', NAMES).splitlines()


def seen(lab: Lab) -> tuple[list[str], list[str]]:
    """The device files, and the GPUs' PCI functions."""
    files = lab.inside(WORKER, "cd /dev; ls -d nvidia[0-9]*").split()
    functions = lab.inside(WORKER, "cd /sys/bus/pci/devices; grep -lx 0x10de */vendor").split()
    return files, [path.partition("/")[0] for path in functions]


def test_bindings_kernel_and_slurm_see_the_same_gpus(worker: Lab) -> None:
    assert names(worker) == [f"{minor} NVIDIA H100 80GB HBM3" for minor in range(4)]
    files, functions = seen(worker)
    assert files == [f"nvidia{minor}" for minor in range(4)]
    assert functions == [f"0000:{gpus.bus(gpu):02x}:00.0" for gpu in range(4)]
    assert gpus.DRIVER in worker.inside(WORKER, "cat /proc/driver/nvidia/version")
    assert len(worker.inside(WORKER, "nvidia-smi -L").splitlines()) == 4
    installed = worker.run(
        WORKER,
        "apt-get update && apt-get install -y --no-install-recommends slurm-wlm-nvml-plugin",
        timeout=180,
    )
    assert installed.returncode == 0, installed.stderr
    assert "Gres=gpu:nvidia_h100_80gb_hbm3:4" in worker.inside(WORKER, "timeout 20 slurmd -C")


def test_the_modes_of_the_site_file_are_set_by_nvidia_smi_and_hold(worker: Lab) -> None:
    """The program that the nvidia component puts on nodes: asserts first, changes a free GPU alone, ECC at a reboot."""
    settings = NvidiaSettings(
        mig={"1": {"3g.40gb": 2}}, compute_mode="exclusive-process", power_limit=500, ecc=False
    )
    node = Node(WORKER, "gpu", frozenset({"worker"}), Access(), gpu=Gpu(model="h100-sxm", count=4))
    script = modes_script(node, settings)

    def modes(what: str) -> Output:
        found = worker.run(WORKER, f"cat >/run/modes && sh /run/modes {what}", stdin=script, timeout=120)
        return Output(found.returncode, found.stdout, found.stderr)

    before = modes("check")
    assert before.rc == 1
    assert "GPU 1: mig: -, not 3g.40gb,3g.40gb" in before.stderr
    worker.fault("gpu-process", WORKER, gpu=3)
    busy = modes("apply")
    assert busy.rc == 1
    assert "GPU 3: in use by process 4242, not changed" in busy.stderr
    worker.fault("gpu-process", WORKER, undo=True)
    assert modes("apply").rc == 0
    assert "ecc: Enabled, not Disabled" in modes("check").stderr  # until the node has rebooted
    worker.power_off(WORKER)
    worker.start(WORKER)
    assert modes("check").rc == 0, modes("check")
    assert "gpu:nvidia_h100_80gb_hbm3_3g.40gb:2" in worker.inside(WORKER, "timeout 20 slurmd -C")
    worker.up(gpus=4, model="h200-sxm")  # other GPUs, as they come
    worker.up(gpus=4, model="h100-sxm")
    give_bindings(worker)
    assert modes("check").rc == 1


def test_slurm_finds_the_slices_of_a_gpu(worker: Lab) -> None:
    worker.fault("gpu-mig", WORKER, gpu=1)
    try:
        told = worker.inside(WORKER, "timeout 20 slurmd -C")
    finally:
        worker.fault("gpu-mig", WORKER, undo=True)
    assert "gpu:nvidia_h100_80gb_hbm3:3" in told
    assert "gpu:nvidia_h100_80gb_hbm3_3g.40gb:2" in told


def test_a_gpu_that_is_gone_stays_gone_over_a_reboot_and_comes_back(worker: Lab) -> None:
    worker.fault("gpu-gone", WORKER, gpu=1)
    worker.power_off(WORKER)
    worker.start(WORKER)
    give_bindings(worker)
    assert [line.split()[0] for line in names(worker)] == ["0", "2", "3"]
    files, functions = seen(worker)
    assert files == ["nvidia0", "nvidia2", "nvidia3"]
    assert len(functions) == 3
    worker.fault("gpu-gone", WORKER, undo=True)
    assert len(names(worker)) == len(seen(worker)[0]) == len(seen(worker)[1]) == 4


def test_a_lost_gpu_and_the_driver_are_told_apart(worker: Lab) -> None:
    worker.fault("gpu-lost", WORKER, gpu=2)
    try:
        assert names(worker)[1:3] == ["1 NVIDIA H100 80GB HBM3", "GPU is lost"]
        assert len(seen(worker)[1]) == 4
    finally:
        worker.fault("gpu-lost", WORKER, undo=True)
    worker.fault("gpu-driver", WORKER)
    try:
        told = worker.run(WORKER, ["python3", "-c", NAMES]).stderr
        assert "version mismatch" in told
        assert gpus.DRIVER not in worker.inside(WORKER, "cat /proc/driver/nvidia/version")
    finally:
        worker.fault("gpu-driver", WORKER, undo=True)
    assert len(names(worker)) == 4


def test_a_fault_of_a_gpu_that_is_not_there_is_refused(worker: Lab) -> None:
    with pytest.raises(InputError, match="--gpu 4: lab-gpu-1 has 4, counted from 0"):
        worker.fault("gpu-hot", WORKER, gpu=4)
    with pytest.raises(InputError, match="no option --link"):
        worker.fault("gpu-hot", WORKER, link=1)


def test_the_same_node_gets_other_gpus(worker: Lab) -> None:
    worker.fault("gpu-gone", WORKER, gpu=0)
    worker.up(gpus=1, model="l40s")
    give_bindings(worker)
    assert names(worker) == ["0 NVIDIA L40S"]
    assert worker.nodes[WORKER].model == "l40s"
