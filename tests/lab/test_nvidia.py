"""NVIDIA's software for real, from Debian's own packages: the lock, a module that does not build, and one that does.

Building the kernel modules takes five minutes on an idle machine; the CUDA toolkit is 2 GB to fetch, 5 GB on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.checking import HEAD, WORKER, Bench, bench, break_and_mend, hidden, tell_apart
from tests.lab.command import provision

GPU = {
    "hosts": WORKER,
    "addresses": "10.77.0.11",
    "roles": ["worker", "monitor"],  # any role that bench wants
    "gpu": {"model": "h100-sxm", "count": 2},
}
NVIDIA = {"source": "distribution", "cuda": "12.4", "nccl": "2.22.3", "also": ["slurm-nvml"]}
KERNEL = "__global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n"
BUILD = 3600.0  # seconds, on a machine that does other things, too
BROKEN = "/etc/dkms/nvidia-current.conf"  # dkms lets it override the package's own way of building
COMPILER = "nv-pci.c:237:9: error: too few arguments to function 'pci_resize_resource'"

CONTROL = r"Package: libcuda1\nVersion: 999.1-1\nArchitecture: amd64\nMaintainer: x <x@example.org>\nDescription: x\n"
NEWER = (  # a package source that offers a newer one of the set
    f"mkdir -p /srv/newer/p/DEBIAN; cd /srv/newer; printf '{CONTROL}' >p/DEBIAN/control; dpkg-deb -b p libcuda1.deb; "
    "rm -r p; dpkg-scanpackages . >Packages; "
    "echo 'deb [trusted=yes] file:/srv/newer ./' >/etc/apt/sources.list.d/newer.list; apt-get -qq update"
)
CASES = [
    hidden("nvidia-locked", "dpkg --remove --force-depends nvidia-smi", "/usr/bin/dpkg-query"),
    hidden("nvidia-held", f"rm /etc/apt/preferences.d/80-provision-nvidia; {NEWER}", "/usr/bin/apt-get"),
    hidden("nouveau-off", "rm /etc/modprobe.d/*nouveau*", "/usr/sbin/modprobe"),
]  # fmt: skip
CANNOT = {"nvidia-persistence", "gpu-modes", "gpu-devices-first"}  # no GPU here: tried in tests/unit


@pytest.fixture(scope="module")
def site(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site file of a head and a worker with GPUs."""
    folder = tmp_path_factory.mktemp("nvidia")
    document = {
        "cluster": "lab",
        "access": {"user": "ops", "ssh_config": str(lab.paths.ssh_config), "host_keys": "strict"},
        "groups": {"head": {"hosts": HEAD, "addresses": "10.77.0.10", "roles": ["head"]}, "gpu": GPU},
        "scheduler": {"slurm": {}},
        "monitoring": {},
        "nvidia": NVIDIA,
    }
    path = folder / "lab.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield path


@pytest.fixture(scope="module")
def on(lab: Lab, site: Path) -> Iterator[Bench]:
    sections = {"groups": yaml.safe_load(site.read_text())["groups"], "scheduler": {"slurm": {}}}
    with bench(lab, site.parent, "nvidia", timeout=BUILD, nvidia=NVIDIA, **sections) as made:
        yield made


def test_a_set_that_cannot_work_is_refused_before_any_node_is_touched(site: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    text = site.read_text().replace("source: distribution", "branch: 570")
    wrong.write_text(text.replace("cuda: '12.4'", "cuda: '13.0'"))
    answer = provision("lock", str(wrong))
    assert answer.rc == 2
    assert "CUDA 13.0 needs driver 580.65.06 or newer" in answer.stderr


def test_the_lock_is_what_the_nodes_sources_offer(site: Path) -> None:
    assert provision("lock", str(site), "--check").rc == 1
    answer = provision("lock", str(site))
    assert answer.rc == 0, answer
    lock = site.with_name("lab.lock.yml")
    entry = yaml.safe_load(lock.read_text())["nvidia"]["gpu"]
    assert entry["distribution"] == "debian 13"
    assert entry["driver"].startswith(f"{entry['branch']}.")
    assert entry["kernel"] == "amd64"
    assert provision("lock", str(site), "--check").rc == 0
    kept = lock.read_text()
    lock.write_text(
        kept.replace(f"driver: {entry['driver']}", "driver: 550.90.07").replace("h100-sxm", "h200-sxm")
    )
    assert provision("apply", str(site), "--component", "nvidia").rc == 2
    lock.write_text(kept)


def test_a_module_that_does_not_build_leaves_the_packages_whole(lab: Lab, site: Path) -> None:
    lab.inside(WORKER, f"mkdir -p /etc/dkms; echo 'MAKE[0]=\"sh /etc/dkms/broken\"' >{BROKEN}")
    lab.inside(WORKER, f'echo "echo \\"{COMPILER}\\"; exit 2" >/etc/dkms/broken')
    answer = provision("apply", str(site), "--component", "nvidia", "--limit", WORKER, timeout=BUILD)
    assert answer.rc == 1
    reason = answer.nodes[WORKER]["reason"]
    assert COMPILER in reason, reason
    assert "dkms-make.log:" in reason
    lab.inside(
        WORKER,
        "[ -z \"$(dpkg --audit)\" ]; ! dpkg-query -W -f='${db:Status-Status}' nvidia-kernel-dkms | grep -qx installed",
    )
    lab.inside(WORKER, f"rm {BROKEN} /etc/dkms/broken")


def test_a_second_apply_changes_nothing(on: Bench) -> None:
    assert on.apply() == dict.fromkeys(on.site.nodes, 0)


def test_the_toolkit_makes_code_for_the_nodes_gpus(on: Bench) -> None:
    assert "release 12.4" in on.lab.inside(WORKER, "nvcc --version")
    on.lab.inside(WORKER, "cat >/root/twice.cu", stdin=KERNEL)
    on.lab.inside(
        WORKER,
        "cd /root && nvcc -arch=sm_90 -cubin twice.cu && cuobjdump -elf twice.cubin | grep -q 'sm=90, toolkit=124'",
    )


def test_every_check_is_tried(on: Bench) -> None:
    tried = {case.check for case in CASES} | {
        "nvidia-one-version",
        "nvidia-module-built",
        "nvidia-fabric-manager",
    }
    assert tried | CANNOT == on.names
    assert {name: on.found(name).verdict for name in CANNOT} == dict.fromkeys(CANNOT, Verdict.SKIP)
    assert on.found("nvidia-fabric-manager").verdict is Verdict.SKIP  # no NVSwitch between two GPUs


def test_a_check_without_its_source_cannot_tell(on: Bench) -> None:
    tell_apart(
        on,
        [
            *CASES,
            hidden("nvidia-one-version", "", "/usr/sbin/ldconfig"),
            hidden("nvidia-module-built", "", "/usr/sbin/modinfo"),
        ],
    )


def test_what_is_changed_by_hand_fails_and_is_mended(on: Bench) -> None:
    break_and_mend(on, CASES)


def test_a_library_of_another_version_is_told(on: Bench) -> None:
    """OS-13: as a .run file leaves it behind."""
    link = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    wrong = "/opt/x/libnvidia-ml.so.535.104.05"
    on.lab.inside(
        WORKER, f"mkdir -p /opt/x; cp $(readlink -f {link}) {wrong}; ln -s {wrong} /opt/x/libnvidia-ml.so.1"
    )
    on.lab.inside(WORKER, "echo /opt/x >/etc/ld.so.conf.d/00-a.conf; ldconfig")
    found = on.found("nvidia-one-version")
    on.lab.inside(WORKER, "rm -r /opt/x /etc/ld.so.conf.d/00-a.conf; ldconfig")
    assert found.verdict is Verdict.FAIL
    assert "535.104.05" in str(found.read)
    assert on.found("nvidia-one-version").verdict is Verdict.PASS


def test_the_modules_are_there_for_the_kernel(on: Bench) -> None:
    assert on.found("nvidia-module-built").verdict is Verdict.PASS
    on.lab.inside(
        WORKER,
        "f=$(ls /lib/modules/*/updates/dkms/nvidia-current.ko*); mv $f /root/; depmod $(ls /lib/modules)",
    )
    found = on.found("nvidia-module-built")
    on.lab.inside(
        WORKER, "mv /root/nvidia-current.ko* /lib/modules/*/updates/dkms/; depmod $(ls /lib/modules)"
    )
    assert found.verdict is Verdict.FAIL
    assert on.found("nvidia-module-built").verdict is Verdict.PASS
