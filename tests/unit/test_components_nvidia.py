"""nvidia: what a node says of its driver, how that is judged, its shell programs with stand-ins for the tools."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provision.components import registry
from provision.components.nvidia import checks, exports, machine
from provision.components.nvidia.settings import NvidiaSettings
from provision.profiles.packaging import MANAGERS, ExactSet
from provision.profiles.repository import NVIDIA, apt_others
from provision.report.model import Verdict
from provision.site.lock import NvidiaLock
from provision.site.models import Gpu, Node
from provision.verify.check import Target

LOCK = NvidiaLock(
    gpus="8 x h100-sxm",
    distribution="ubuntu 24.04",
    kernel="generic",
    source="nvidia",
    branch=580,
    driver="580.126.20",
    modules="open",
    build="dkms",
    fabric_manager="580.126.20",
)

# What a node says

SAID = """kernel=6.8.0-90-generic
arch=x86_64
nouveau=no
loaded=NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (buildd@b)
secure_boot=1
key=/var/lib/dkms/mok.pub is already enrolled
reboot=no
"""


def test_a_machine() -> None:
    assert machine.parse_machine(SAID) == machine.Machine(
        "6.8.0-90-generic", loaded=machine.Loaded("570.124.06", "open"), secure_boot=True, key="enrolled"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        SAID.replace("arch=x86_64\n", ""),
        SAID.replace("secure_boot=1", "secure_boot=7"),
        SAID.replace("NVRM", "MRVN"),
    ],
)
def test_what_cannot_be_understood_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"not told|neither on nor off|not a line of"):
        machine.parse_machine(text)


@pytest.mark.parametrize(
    ("line", "loaded"),
    [
        ("", None),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
            machine.Loaded("535.104.05", "proprietary"),
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.64.03  Release Build",
            machine.Loaded("575.64.03", "open"),
        ),
        (
            "NVRM version: NVIDIA UNIX aarch64 Kernel Module  575.64  Release",
            machine.Loaded("575.64", "proprietary"),
        ),
    ],
)
def test_the_module_that_runs(line: str, loaded: machine.Loaded | None) -> None:
    assert machine.parse_loaded(line) == loaded


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("", "absent"),
        ("/var/lib/dkms/mok.pub is already enrolled", "enrolled"),
        ("/var/lib/dkms/mok.pub is already in the enrollment request", "requested"),
        ("/var/lib/dkms/mok.pub is not enrolled", "new"),
        ("sh: mokutil: not found", "unknown"),
    ],
)
def test_the_state_of_a_key(line: str, state: str) -> None:
    assert machine.parse_key(line) == state


def test_the_query_works_where_there_is_nothing_of_nvidias(tmp_path: Path) -> None:
    """In any shell, also without mokutil, EFI or a driver."""
    answer = subprocess.run(["sh", "-c", machine.QUERY], capture_output=True, text=True, check=True)
    assert machine.parse_machine(answer.stdout).kernel == os.uname().release


# A module that does not build: lines as compilers and make write them

LOG = """DKMS (dkms-3.2.2) make.log for nvidia-current-open/550.163.01 for kernel 6.12.118+deb13-amd64
  CONFTEST: dma_fence_set_error
  cc -Wall -Werror=undef -Wno-error -DNVRM -c /var/lib/dkms/x/build/nvidia/nv-pci.c
/var/lib/dkms/x/build/nvidia/nv-pci.c: In function 'nv_resize_pcie_bars':
/var/lib/dkms/x/build/nvidia/nv-pci.c:237:9: error: too few arguments to function 'pci_resize_resource'
make[4]: *** [scripts/Makefile.build:234: /var/lib/dkms/x/build/nvidia/nv-pci.o] Error 1
make[1]: *** [Makefile:236: __sub-make] Error 2
"""


@pytest.mark.parametrize(
    ("log", "line", "words"),
    [
        (LOG, 5, "too few arguments to function 'pci_resize_resource'"),
        ("x\nmake: *** No rule to make target '/lib/modules/6.8/build'.  Stop.\n", 2, "No rule to make"),
        (
            "c.c:1:10: note: x\nnv.h:3:10: fatal error: linux/stdarg.h: No such file or directory\nmake: *** Error 1\n",
            2,
            "linux/stdarg.h",
        ),
        ('  LD x\nERROR: modpost: nvidia.ko uses GPL-only symbol "rcu"\nmake: *** Error 2\n', 2, "GPL-only"),
        ("cc -c a.c\ncc: fatal error: Killed signal terminated program cc1\n", 2, "Killed signal"),
        ("write: No space left on device\n", 1, "No space left"),
    ],
)  # fmt: skip
def test_the_line_of_a_build_log_that_matters(log: str, line: int, words: str) -> None:
    found = machine.build_error(log)
    assert found is not None
    assert found[0] == line
    assert words in found[1]


def test_a_log_without_a_mistake_names_no_line() -> None:
    assert machine.build_error("  CC a.o\n  cc -Werror=undef -Wno-error -c a.c\n  LD b.ko\n") is None


@given(st.text())
def test_build_logs_take_any_text(text: str) -> None:
    found = machine.build_error(text)
    assert found is None or 1 <= found[0] <= len(text.splitlines())


# Verdicts


@pytest.mark.parametrize(
    ("places", "verdict"),
    [
        ({"package": "580.126.20", "library": "580.126.20", "module": "580.126.20"}, Verdict.PASS),
        ({"package": "580.126.20", "library": "580.126.20", "module": "580.95.05"}, Verdict.FAIL),  # OS-01
        ({"library": "570.124.04", "module": "570.124.06"}, Verdict.FAIL),  # OS-13
        ({"package": "580.126.20", "library": None}, Verdict.UNKNOWN),
        ({"package": None, "library": "580.95.05"}, Verdict.FAIL),
    ],
)
def test_four_places_one_version(places: dict[str, str | None], verdict: Verdict) -> None:
    found = checks.compare(places, "580.126.20")
    assert found.verdict is verdict
    assert found.read is not None
    assert all(place in found.read for place in places)


def test_a_patch_level_is_a_difference() -> None:
    """OS-12"""
    assert checks.compare({"module": "575.64", "library": "575.64.03"}, "575.64.03").verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.124.04\n", "570.124.04"),
        ("/usr/lib64/libnvidia-ml.so.1", None),
        ("", None),
    ],
)
def test_the_librarys_version_is_its_files(path: str, version: str | None) -> None:
    assert checks.library_version(path) == version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("nvidia-persistenced:  version 580.126.20\n", "580.126.20"),
        ("Fabric Manager version is : 575.64\n", "575.64"),
        ("no word", None),
        ("10.580.126.20.1", None),
    ],
)
def test_a_daemons_version(text: str, version: str | None) -> None:
    assert checks.program_version(text) == version


MODINFO = """filename: /lib/modules/x/updates/dkms/nvidia.ko
version: 580.126.20
license: Dual MIT/GPL
signer: DKMS module signing key
"""


@pytest.mark.parametrize(
    ("modinfo", "secure_boot", "verdict"),
    [
        (MODINFO, True, Verdict.PASS),
        (MODINFO.replace("signer: DKMS module signing key\n", ""), False, Verdict.PASS),
        (MODINFO.replace("signer: DKMS module signing key\n", "sig_key:\n"), True, Verdict.FAIL),  # OS-10
        (MODINFO.replace("Dual MIT/GPL", "NVIDIA"), False, Verdict.FAIL),  # DRV-06
        (MODINFO.replace("580.126.20", "580.95.05"), False, Verdict.FAIL),
        ("filename: x\n", False, Verdict.UNKNOWN),
    ],
)
def test_the_module_on_disk(modinfo: str, secure_boot: bool, verdict: Verdict) -> None:
    assert checks.judge_module(modinfo, LOCK, secure_boot).verdict is verdict


@pytest.mark.parametrize(
    ("modinfo", "verdict"),
    [
        (MODINFO.replace("580.126.20", "570.195.03"), Verdict.PASS),
        (MODINFO.replace("signer: DKMS module signing key\n", ""), Verdict.FAIL),
        ("filename: x\n", Verdict.UNKNOWN),
    ],
)
def test_without_a_lock_any_module_will_do_that_secure_boot_takes(modinfo: str, verdict: Verdict) -> None:
    assert checks.judge_module(modinfo, None, True).verdict is verdict


def test_why_a_fabric_manager_does_not_run() -> None:
    """DRV-01, DRV-03"""
    said = "NVIDIA GPU driver interface version 580.95.05 don't match with driver version 580.126.20. Please update"
    assert (
        checks.fabric_cause(said, LOCK)
        == "fabric manager 580.95.05 beside driver 580.126.20: both must be 580.126.20"
    )
    blackwell = LOCK.model_copy(update={"nvlsm": True})
    assert "ib_umad" in (checks.fabric_cause("failed to open /dev/infiniband/umad0", blackwell) or "")
    assert checks.fabric_cause("failed to open /dev/infiniband/umad0", LOCK) is None


# Checks that a node of the lab cannot answer, with stand-ins for its commands


def target(answers: dict[str, tuple[int, str]], *, lock: NvidiaLock | None = LOCK) -> Target:
    """A node whose commands answer by the first key that they contain."""

    def run(command: str, *arguments: str) -> Any:
        for key, (rc, out) in answers.items():
            if key in command:
                return SimpleNamespace(rc=rc, stdout=out, stderr="" if rc == 0 else out)
        raise AssertionError(f"not expected: {command}")

    node = Node("g1", "gpu", frozenset({"worker"}), access=None, gpu=Gpu(model="h100-sxm", count=8))  # type: ignore[arg-type]
    site = SimpleNamespace(settings=lambda component, node, kind: NvidiaSettings())
    known = SimpleNamespace(nvidia={"gpu": lock} if lock else {})
    profile = SimpleNamespace(key="ubuntu 24.04", manager=MANAGERS["debian"])
    return Target(site, node, "nvidia", known, profile, SimpleNamespace(run=run))  # type: ignore[arg-type]


def found(name: str, answers: dict[str, tuple[int, str]], **more: Any) -> Verdict:
    (check,) = (check for check in registry.checks("nvidia") if check.name == name)
    return check.run(target(answers, **more)).verdict


SAME = {
    "dpkg-query": (0, "580.126.20-0ubuntu1"),
    "ldconfig": (0, "/usr/lib/libnvidia-ml.so.580.126.20"),
    "/proc/driver/nvidia/version": (
        0,
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.20  Release\n",
    ),
    "nv-fabricmanager": (0, "/usr/bin/nv-fabricmanager\nFabric Manager version is : 580.126.20"),
    "nvidia-persistenced": (0, "/usr/bin/nvidia-persistenced\nnvidia-persistenced: version 580.126.20"),
}


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (SAME, Verdict.PASS),
        ({**SAME, "ldconfig": (0, "/usr/lib/libnvidia-ml.so.580.95.05")}, Verdict.FAIL),
        ({**SAME, "nv-fabricmanager": (0, "/usr/bin/nv-fabricmanager (deleted)\n580.126.20")}, Verdict.FAIL),
        ({**SAME, "nv-fabricmanager": (0, "/usr/bin/nv-fabricmanager\n580.95.05")}, Verdict.FAIL),
        ({**SAME, "nv-fabricmanager": (0, "")}, Verdict.FAIL),
        ({**SAME, "/proc/driver/nvidia/version": (1, "")}, Verdict.FAIL),
        ({**SAME, "ldconfig": (2, "ldconfig: not found")}, Verdict.UNKNOWN),
        ({**SAME, "/proc/driver/nvidia/version": (0, "gibberish")}, Verdict.UNKNOWN),
        ({**SAME, "nv-fabricmanager": (127, "not found")}, Verdict.UNKNOWN),
        ({**SAME, "dpkg-query": (1, ""), "nv-fabricmanager": (127, "not found")}, Verdict.FAIL),
        ({**SAME, "dpkg-query": (127, "not found"), "nv-fabricmanager": (0, "")}, Verdict.FAIL),
    ],
)
def test_one_version_in_all_places(answers: dict[str, tuple[int, str]], verdict: Verdict) -> None:
    assert found("nvidia-one-version", answers) is verdict


@pytest.mark.parametrize(
    ("check", "answers", "verdict"),
    [
        ("nvidia-persistence", {"is-active": (0, "active")}, Verdict.PASS),
        ("nvidia-persistence", {"is-active": (3, "failed")}, Verdict.FAIL),
        ("nvidia-persistence", {"is-active": (1, "no bus")}, Verdict.UNKNOWN),
        ("nvidia-fabric-manager", {"is-active": (0, "active")}, Verdict.PASS),
        ("nvidia-fabric-manager", {"is-active": (3, "failed"), "journalctl": (0, "")}, Verdict.FAIL),
        ("nvidia-fabric-manager", {"is-active": (127, "not found")}, Verdict.UNKNOWN),
        ("gpu-modes", {"gpu-modes check": (0, "")}, Verdict.PASS),
        ("gpu-modes", {"gpu-modes check": (1, "GPU 0: mig: -, not 1g.10gb")}, Verdict.FAIL),
        ("gpu-modes", {"gpu-modes check": (2, "cannot be read")}, Verdict.UNKNOWN),
        (
            "gpu-devices-first",
            {"systemctl": (0, "ActiveState=active\nUnitFileState=enabled\n")},
            Verdict.PASS,
        ),
        (
            "gpu-devices-first",
            {"systemctl": (0, "ActiveState=failed\nUnitFileState=enabled\n")},
            Verdict.FAIL,
        ),
        ("gpu-devices-first", {"systemctl": (1, "no bus")}, Verdict.UNKNOWN),
    ],
)
def test_checks_of_what_runs(check: str, answers: dict[str, tuple[int, str]], verdict: Verdict) -> None:
    assert found(check, answers) is verdict


@pytest.mark.parametrize(
    ("check", "answers", "verdict"),
    [
        ("nvidia-locked", {}, Verdict.FAIL),
        ("nvidia-held", {}, Verdict.SKIP),
        # the loaded module is what the others are compared with
        ("nvidia-one-version", SAME, Verdict.PASS),
        ("nvidia-one-version", {**SAME, "nv-fabricmanager": (0, "")}, Verdict.PASS),
        ("nvidia-one-version", {**SAME, "ldconfig": (0, "/usr/lib/libnvidia-ml.so.580.95.05")}, Verdict.FAIL),
        ("nvidia-one-version", {**SAME, "nv-fabricmanager": (0, "/usr/bin/x\n580.95.05")}, Verdict.FAIL),
        ("nvidia-one-version", {**SAME, "/proc/driver/nvidia/version": (1, "")}, Verdict.FAIL),
        ("nvidia-one-version", {**SAME, "/proc/driver/nvidia/version": (0, "gibberish")}, Verdict.UNKNOWN),
        ("nvidia-one-version", {**SAME, "ldconfig": (2, "ldconfig: not found")}, Verdict.UNKNOWN),
        ("nvidia-module-built", {"modinfo": (0, MODINFO), "uname -m": (0, SAID)}, Verdict.PASS),
        ("nvidia-module-built", {"modinfo": (1, "no such module")}, Verdict.FAIL),
        ("nvidia-module-built", {"modinfo": (127, "modinfo: not found")}, Verdict.UNKNOWN),
        ("nvidia-fabric-manager", {"is-active": (0, "active")}, Verdict.PASS),
        ("nvidia-fabric-manager", {"is-active": (3, "failed"), "journalctl": (0, "")}, Verdict.FAIL),
    ],
)
def test_without_a_lock_the_places_are_compared_with_each_other(
    check: str, answers: dict[str, tuple[int, str]], verdict: Verdict
) -> None:
    assert found(check, answers, lock=None) is verdict


@pytest.mark.parametrize(
    ("programs", "status", "said"),
    [
        (["/usr/bin/nvidia-persistenced"], 0, "/usr/bin/nvidia-persistenced\nversion 580.126.20\n"),
        (
            ["/usr/bin/nvidia-persistenced (deleted)"],
            0,
            "/usr/bin/nvidia-persistenced (deleted)\nversion 580.126.20\n",
        ),
        (["/usr/bin/other-nvidia-persistenced", "/usr/bin/sh"], 0, ""),
    ],
)
def test_a_daemon_is_found_by_the_program_that_a_process_runs(
    tmp_path: Path, programs: list[str], status: int, said: str
) -> None:
    for number, program in enumerate(programs, 100):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "exe").symlink_to(program)
    (tmp_path / "nvidia-persistenced").write_text("#!/bin/sh\necho version 580.126.20\n")
    (tmp_path / "nvidia-persistenced").chmod(0o755)
    command = checks._DAEMON.format(program="nvidia-persistenced").replace("/proc", str(tmp_path))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    answer = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (status, said)


# Programs


def stub(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}")
    (folder / name).chmod(0o755)


def sh(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", script, "script", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        check=False,
    )


SMI = """cd {folder}
gpu=; what="$*"
while [ $# -gt 0 ]; do
  case $1 in
    -i) gpu=$2; shift;;
    --query-gpu=*) cat "$gpu.${{1#*=}}"; exit;;
    --query-compute-apps=*) cat "$gpu.apps" 2>/dev/null; exit 0;;
    -L) echo "GPU $gpu: X"; sed 's/.*/  MIG &     Device  0: (UUID: MIG-x)/' "$gpu.layout"; exit;;
    -mig)
      for p in current pending; do
        if [ "$2" = 1 ]; then echo Enabled; else echo Disabled; fi >$gpu.mig.mode.$p
      done;;
    -dci) : >$gpu.layout;;
    -cgi) echo "$2" | tr , '\\n' >$gpu.layout;;
    -c) echo "$2" | sed 's/EXCLUSIVE_PROCESS/Exclusive_Process/' >$gpu.compute_mode;;
    -pl) echo "$2.00" >$gpu.power.limit;;
  esac
  shift
done
echo "$what" >>calls
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """Two GPUs behind a stand-in for nvidia-smi, MIG off."""
    stub(tmp_path, "nvidia-smi", SMI.format(folder=tmp_path))
    for gpu in (0, 1):
        for name, value in {
            "mig.mode.current": "Disabled",
            "mig.mode.pending": "Disabled",
            "compute_mode": "Default",
            "power.limit": "700.00",
            "ecc.mode.current": "Enabled",
        }.items():
            (tmp_path / f"{gpu}.{name}").write_text(f"{value}\n")
        (tmp_path / f"{gpu}.layout").write_text("")
    return tmp_path


def modes(folder: Path, verb: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    node = SimpleNamespace(gpu=Gpu(model="h100-sxm", count=2))
    script = exports.modes_script(node, NvidiaSettings.model_validate(settings))  # type: ignore[arg-type]
    return sh(script.replace(machine.REBOOT, str(folder / "reboot")), folder, verb)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def test_gpus_in_their_modes_are_left_alone(gpus: Path) -> None:
    assert modes(gpus, "check").returncode == 0
    assert modes(gpus, "apply").returncode == 0
    assert calls(gpus) == []


def test_mig_on_the_second_of_two_gpus_alone(gpus: Path) -> None:
    """MIG-03"""
    wanted = {"mig": {"1": {"3g.40gb": 1, "1g.10gb": 4}}}
    before = modes(gpus, "check", **wanted)
    assert (before.returncode, before.stderr) == (
        1,
        "GPU 1: mig: -, not 1g.10gb,1g.10gb,1g.10gb,1g.10gb,3g.40gb\n",
    )
    applied = modes(gpus, "apply", **wanted)
    assert applied.returncode == 0, applied.stderr
    assert calls(gpus) == ["-i 1 -mig 1", "mig -i 1 -cgi 1g.10gb,1g.10gb,1g.10gb,1g.10gb,3g.40gb -C"]
    assert modes(gpus, "check", **wanted).returncode == 0
    assert modes(gpus, "apply", **wanted).returncode == 0
    assert len(calls(gpus)) == 2


def test_a_layout_is_taken_away_before_another_is_made(gpus: Path) -> None:
    modes(gpus, "apply", mig={"all": {"1g.10gb": 7}})
    modes(gpus, "apply", mig={"all": {"1g.10gb": 7}, "0": {"3g.40gb": 2}})
    assert [call for call in calls(gpus) if call.startswith("mig -i 0")][1:] == [
        "mig -i 0 -dci",
        "mig -i 0 -dgi",
        "mig -i 0 -cgi 3g.40gb,3g.40gb -C",
    ]


def test_a_gpu_in_use_is_not_changed_and_the_others_are(gpus: Path) -> None:
    (gpus / "0.apps").write_text("4711\n")
    answer = modes(gpus, "apply", mig={"all": {"1g.10gb": 7}})
    assert answer.returncode == 1
    assert "GPU 0: in use by process 4711, not changed" in answer.stderr
    assert calls(gpus) == ["-i 1 -mig 1", "mig -i 1 -cgi " + ",".join(["1g.10gb"] * 7) + " -C"]


def test_compute_mode_power_and_ecc(gpus: Path) -> None:
    answer = modes(gpus, "apply", compute_mode="exclusive-process", power_limit=500, ecc=False)
    assert answer.returncode == 0, answer.stderr
    assert calls(gpus)[:3] == ["-i 0 -c EXCLUSIVE_PROCESS", "-i 0 -pl 500", "-i 0 -e 0"]
    assert (gpus / "reboot").exists()  # ECC holds from the next boot on
    assert (
        "ecc: Enabled, not Disabled"
        in modes(gpus, "check", compute_mode="exclusive-process", ecc=False).stderr
    )


def test_a_gpu_that_cannot_be_read_is_not_in_its_mode(gpus: Path) -> None:
    (gpus / "1.power.limit").unlink()
    for verb in ("check", "apply"):
        answer = modes(gpus, verb)
        assert answer.returncode == 2
        assert "GPU 1: cannot be read" in answer.stderr


@pytest.mark.parametrize(
    "nvidia",
    [
        {"driver": "580"},
        {"driver": "580.126.20; reboot"},
        {"mig": {"first": {"1g.10gb": 7}}},
        {"mig": {"all": {"seven": 1}}},
        {"mig": {"all": {"1g.10gb": 8}}},
        {"mirror": "ftp://mirror"},
        {"keyring": "abc"},
        {"images": ["a b"]},
        {"module_options": {"a b": 1}},
        {"power_limit": 5},
    ],
)
def test_settings_that_are_refused(nvidia: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NvidiaSettings.model_validate(nvidia)


# Repositories: entries and keys of old (OS-08)


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    for folder in ("sources.list.d", "trusted.gpg.d"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sources.list").write_text("deb http://d.example.org/debian trixie main\n")
    return tmp_path


def others(apt: Path, remove: bool) -> subprocess.CompletedProcess[str]:
    return sh(apt_others(NVIDIA, ["https://vendor.example.org/repos"], remove, str(apt)), apt)


def test_one_entry_is_left(apt: Path) -> None:
    lists = apt / "sources.list.d"
    (lists / "cuda.list").write_text("deb http://vendor.example.org/repos/ubuntu2204/x86_64 /\n")
    (lists / "cuda-keyring.list").write_text(
        "deb [signed-by=/k.gpg] https://vendor.example.org/repos/ubuntu2204/x86_64 /\n"
    )
    (lists / "vendor.sources").write_text(
        "Types: deb\nURIs: https://vendor.example.org/repos/x/\nSuites: /\n"
    )
    (lists / "other.list").write_text("deb https://other.example.org/repos /\n")
    (lists / "provision-nvidia.sources").write_text("URIs: https://vendor.example.org/repos/ours/\n")
    with (apt / "sources.list").open("a") as file:
        file.write("deb https://vendor.example.org/repos/mixed /\n")
    (apt / "trusted.gpg.d" / "cuda-7fa2af80.gpg").write_text("old")
    assert others(apt, False).returncode == 1
    answer = others(apt, True)
    assert answer.returncode == 0, answer.stderr
    assert sorted(path.name for path in lists.iterdir() if path.suffix != ".before-provision") == [
        "other.list",
        "provision-nvidia.sources",
    ]
    assert (apt / "sources.list").read_text().splitlines() == [
        "deb http://d.example.org/debian trixie main",
        "# before provision: deb https://vendor.example.org/repos/mixed /",
    ]
    assert [path.name for path in (apt / "trusted.gpg.d").iterdir()] == ["cuda-7fa2af80.gpg.before-provision"]
    assert others(apt, False).returncode == 0


def test_a_clean_node_is_left_alone(apt: Path) -> None:
    assert others(apt, False).returncode == 0


# The set to the patch level, with stand-ins for dpkg-query

WANTED = ExactSet(
    {"libcuda1": "580.126.20-*", "dkms-helper": "*"},
    "580.126.20-*",
    ["*nvidia*", "libcuda1"],
    ["nvidia-modprobe"],
)
WHOLE = """installed libcuda1 580.126.20-1
installed dkms-helper 3.2
installed nvidia-modprobe 595.91.07-1
installed libnvidia-ml1 580.126.20-1
installed nvidia-kernel-common 20240109+1
config-files nvidia-old 570.195.03-1
"""


@pytest.mark.parametrize(
    ("installed", "rc", "words"),
    [
        (WHOLE, 0, ""),
        (
            WHOLE.replace("libcuda1 580.126.20-1", "libcuda1 580.126.2-1"),
            1,
            "libcuda1 580.126.20-* is not installed",
        ),
        (WHOLE.replace("installed dkms-helper 3.2\n", ""), 1, "dkms-helper * is not installed"),
        (WHOLE.replace("ml1 580.126.20-1", "ml1 580.95.05-1"), 1, "of another version: libnvidia-ml1"),
        (WHOLE.replace("config-files", "installed"), 1, "of another version: nvidia-old"),
        (WHOLE.replace("installed libcuda1", "half-configured libcuda1"), 1, "libcuda1 580.126.20-*"),
    ],
)
def test_whether_a_set_is_there(installed: str, rc: int, words: str, tmp_path: Path) -> None:
    stub(tmp_path, "dpkg-query", f"cat <<'EOF'\n{installed}EOF\n")
    answer = sh(MANAGERS["debian"].exact(WANTED), tmp_path)
    assert answer.returncode == rc, answer.stderr
    assert words in answer.stderr


def test_a_package_database_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    stub(tmp_path, "dpkg-query", "echo broken >&2; exit 2\n")
    assert sh(MANAGERS["debian"].exact(WANTED), tmp_path).returncode == 2
    stub(tmp_path, "rpm", "printf 'libcuda1 580.126.20-1.el9\\ndkms-helper 1-1\\n'\n")
    assert sh(MANAGERS["redhat"].exact(WANTED), tmp_path).returncode == 0
