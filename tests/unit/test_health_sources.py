"""Sources: what they read from a machine, from recorded files, and what becomes of them when they cannot."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.health import __main__ as command
from provision.health import act, agent, bundle, decide, memory, metrics
from provision.health.catalogue import judge
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, Finding, worst
from provision.health.limits import load
from provision.health.readings import Absent, Device, Unread, plain, revived
from provision.health.sources import Source, collect, machine, programs
from provision.health.sources.nvml import Nvml
from tests.unit.health_node import limits, node


class Works(Source):
    name, tells = "works", ("a", "b")

    def read(self) -> dict[str, Any]:
        return {"a": 1}


class Breaks(Source):
    name, tells = "breaks", ("c",)

    def read(self) -> dict[str, Any]:
        raise PermissionError(13, "Permission denied", "/dev/kmsg")


class Hangs(Source):
    name, tells = "hangs", ("d",)

    def read(self) -> dict[str, Any]:
        time.sleep(60)
        return {}


def test_a_source_that_breaks_or_hangs_takes_no_other_with_it() -> None:
    began = time.monotonic()
    read = collect("node", [Works(), Breaks(), Hangs()], seconds=0.5)
    assert time.monotonic() - began < 5
    assert read["a"] == 1
    assert read.values["b"] == Unread("works did not tell it")
    assert read.values["c"] == Unread("breaks: /dev/kmsg: Permission denied")
    assert read.values["d"] == Unread("hangs did not answer in 0 s")


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def acs(control: int) -> bytes:
    """A configuration space with one extended capability: ACS (0x0d), its control at offset 6."""
    return bytes(0x100) + struct.pack("<IHH", 0x0D | 1 << 16, 0, control)


def test_the_bus_tells_gpus_switches_bridges_and_errors(tmp_path: Path) -> None:
    pci = "sys/bus/pci/devices"
    write(
        tmp_path,
        {
            f"{pci}/0000:1b:00.0/class": "0x030200\n",
            f"{pci}/0000:1b:00.0/vendor": "0x10de\n",
            f"{pci}/0000:1b:00.0/aer_dev_fatal": "DLP 0\nTOTAL_ERR_FATAL 2\n",
            f"{pci}/0000:1b:00.0/aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0\n",
            f"{pci}/0000:05:00.0/class": "0x068000\n",
            f"{pci}/0000:05:00.0/vendor": "0x10de\n",
            f"{pci}/0000:10:00.0/class": "0x060400\n",
            f"{pci}/0000:10:00.0/vendor": "0x1000\n",
            f"{pci}/0000:10:00.0/config": acs(0x1D),
            f"{pci}/0000:20:00.0/class": "0x060400\n",
            f"{pci}/0000:20:00.0/vendor": "0x1000\n",
            f"{pci}/0000:20:00.0/config": acs(0x00),
            "proc/cpuinfo": "flags : fpu\n",
            "dev/nvidia0": "",
            "dev/nvidiactl": "",
        },
    )
    told = machine.Pci(tmp_path).read()
    assert (told["pci.gpus"], told["nvswitches"], told["devices"], told["iommu"]) == (
        ["0000:1b:00.0"],
        1,
        1,
        "off",
    )
    assert [(each.subject, each["acs.redirect"]) for each in told["bridges"]] == [
        ("0000:10:00.0", True),
        ("0000:20:00.0", False),
    ]
    assert told["aer"][0]["aer.fatal"] == 2


def test_a_machine_is_read_and_a_missing_file_is_one_unknown_value(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\nSwapTotal: 0 kB\nShmem: 2048 kB\n",
            "sys/devices/system/cpu/online": "0-3,8\n",
            "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
            "sys/devices/system/edac/mc/mc0/ce_count": "N/A\n",
        },
    )
    told = machine.Machine(tmp_path, resolve=lambda: "192.0.2.7").read()
    assert (told["cpus"], told["memory.total"], told["shm.used"], told["own_name"]) == (
        5,
        2048,
        2,
        "192.0.2.7",
    )
    assert isinstance(told["modules"], Unread)
    assert isinstance(told["edac"][0].values["ce"], Unread)


def test_ports_are_read_and_one_counter_that_is_no_number_is_one_value(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/node_guid": "0x1\n",
            "sys/class/infiniband/mlx5_0/fw_ver": "28.39\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/phys_state": "5: LinkUp\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/link_layer": "InfiniBand\n",
            f"{port}/lid": "0xc\n",
            f"{port}/counters/symbol_error": "N/A (no PMA)\n",
            f"{port}/counters/link_downed": "2\n",
        },
    )
    (found,) = list(machine.ports(tmp_path))
    assert (found["state"], found["rate"], found["lid"], found["link_downed"]) == ("ACTIVE", 400.0, 12, 2)
    assert isinstance(found.values["symbol_error"], Unread)


def test_an_nvswitch_that_looks_like_an_adapter_is_told_by_its_product_data(tmp_path: Path) -> None:
    device = write(tmp_path, {"device/vpd": b"\x82\x10\x00NVIDIA NVSwitch\x00"})
    assert machine._is_nvswitch(device)
    assert not machine._is_nvswitch(tmp_path / "none")


def test_kernel_messages_come_from_a_file_of_the_same_form(tmp_path: Path) -> None:
    kmsg = tmp_path / "kmsg"
    kmsg.write_text("3,7,9000123,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n")
    (event,) = machine.Kernel(kmsg).read()["kernel.events"]
    assert (event.number, event.sequence) == (79, 7)
    with pytest.raises(FileNotFoundError):
        machine.Kernel(tmp_path / "none").read()


def test_file_systems_are_written_to_and_nothing_stays(tmp_path: Path) -> None:
    mounts = f"1 0 8:1 / {tmp_path} rw - ext4 /dev/sda1 rw\n2 0 8:2 / /gone ro - xfs /dev/sdb1 ro\n"
    root = write(tmp_path / "root", {"proc/self/mountinfo": mounts})
    told = machine.Filesystems([str(tmp_path), "/gone", "/absent"], root).read()["filesystems"]
    assert [(each["mounted"], each.get("read_only"), each.get("writable")) for each in told] == [
        (True, False, "yes"),
        (True, True, None),
        (False, None, None),
    ]
    assert not list(tmp_path.glob(".provision-health*"))


@pytest.mark.parametrize(
    ("cgroup", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n", "42"),
        ("0::/user.slice/user-1000.slice\n", None),
        ("12:devices:/slurm/uid_1000/job_7\n0::/\n", "7"),
    ],
)
def test_a_process_belongs_to_the_job_of_its_control_group(cgroup: str, job: str | None) -> None:
    assert machine.job_of(cgroup) == job


@given(st.binary(max_size=600))
def test_a_smart_log_is_read_or_refused(page: bytes) -> None:
    if len(page) < 6:
        with pytest.raises(ValueError, match="SMART log"):
            machine.smart(page)
    else:
        assert set(machine.smart(page)) == {"critical_warning", "available_spare", "spare_threshold"}


def test_states_of_units_are_told_and_units_that_are_not_there_left_out() -> None:
    states = (("sshd", "loaded", "active"), ("x", "not-found", "inactive"))
    text = "\n".join(
        f"Id={n}.service\nLoadState={load_}\nActiveState={s}\nNRestarts=0\n" for n, load_, s in states
    )
    assert programs.units(text) == {"services": {"sshd": "active"}, "services.restarts": {"sshd": 0}}


def test_a_node_of_scontrol_is_read() -> None:
    line = (
        "NodeName=gpu-1 Arch=x86_64 State=IDLE+DRAIN RealMemory=1031000 Partitions=train,debug "
        "Reason=swap PSU [root@2025-03-03T10:00:00] Comment=x\n"
    )
    read = programs.slurm_node(line)
    assert (read["state"], read["reason"], read["real_memory"], read["partitions"]) == (
        "IDLE+DRAIN",
        "swap PSU",
        1031000,
        ["train", "debug"],
    )
    with pytest.raises(programs.Failed, match="not a node"):
        programs.slurm_node("Unable to contact slurm controller")


def test_an_entry_of_the_bmc_that_was_taken_back_does_not_stand() -> None:
    log = (
        " 1 | 03/03/2025 | 10:00:00 | Power Supply 2 | Failure detected | Asserted\n"
        " 2 | 03/03/2025 | 10:05:00 | Memory | Uncorrectable ECC | Asserted\n"
        " 3 | 03/03/2025 | 11:00:00 | Power Supply 2 | Failure detected | Deasserted\n"
        " 4 | 03/03/2025 | 11:00:00 | Fan 3 | Lower Non-critical going low | Asserted\n"
    )
    assert programs.critical(log) == ["03/03/2025 10:05:00 Memory: Uncorrectable ECC"]


# ---- NVML, by something that answers as pynvml does


class Library:
    """NVML with one GPU; what a test does not answer is not supported."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__({3: "Not Supported", 15: "GPU is lost", 999: "Unknown Error"}[value])
            self.value = value

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_INVALID_ARGUMENT = 3, 13, 2
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetPciInfo": type("Pci", (), {"busId": b"00000000:1B:00.0"}),
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlSystemGetNVMLVersion": "13.580.95.05",
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 1),
            "nvmlDeviceGetEccMode": [1, 0],
            "nvmlDeviceGetTemperature": self.NVMLError(999),
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and name[4].isupper():
            answer = self.answers.get(name, self.NVMLError(3))

            def call(*arguments: Any) -> Any:
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return call
        if name.startswith("NVML_"):
            return 0
        raise AttributeError(name)


def by_nvml(**answers: Any) -> Device:
    return Device(
        "node",
        Nvml(lambda: Library(**answers), lambda pid: {"name": "x", "job": None, "service": False}).read(),
    )


def test_nvml_is_read_under_the_names_of_nvidia_smi() -> None:
    (gpu,) = by_nvml()["gpus"]
    assert (gpu["pci.bus_id"], gpu["name"], gpu["remapped_rows.failure"]) == (
        "0000:1b:00.0",
        "NVIDIA H100 80GB HBM3",
        True,
    )
    assert (gpu["ecc.mode.current"], gpu["ecc.mode.pending"]) == ("Enabled", "Disabled")
    assert gpu.values["temperature.gpu"] == Unread("NVML: Unknown Error")
    assert gpu.values["nvlink.links"] == Absent("no NVLink on this GPU")
    assert gpu.values["power.draw"] == Absent("NVML: Not Supported")


def test_the_librarys_version_is_compared_with_the_modules() -> None:
    read = by_nvml()
    read.values["module.version"] = "580.95.05"
    assert [
        each.verdict for each in judge(read, limits(), partial=True) if each.check == "driver-library"
    ] == [PASS]


def test_a_gpu_without_a_handle_is_lost_and_the_count_fails() -> None:
    read = by_nvml(nvmlDeviceGetHandleByIndex=Library.NVMLError(15))
    read.values["pci.gpus"] = ["0000:1b:00.0"]
    found = [
        each for each in judge(read, limits(gpus=1, model=None), partial=True) if each.check == "gpu-count"
    ]
    assert (found[0].verdict, found[0].why) == (
        FAIL,
        "lost GPU 0 (GPU is lost); 1 on the bus: the driver lost 0000:1b:00.0",
    )


def test_nvml_that_does_not_start_is_a_failure_and_its_gpus_are_unknown() -> None:
    read = by_nvml(nvmlInit=Library.NVMLError(999))
    found = {each.check: each.verdict for each in judge(read, limits(), partial=True)}
    assert (found["nvml"], found["gpu-count"], found["ecc-mode"]) == (FAIL, UNKNOWN, UNKNOWN)


@pytest.mark.parametrize(
    "silent",
    [
        {"nvmlDeviceGetNvLinkState": Library.NVMLError(999)},
        {"nvmlDeviceGetNvLinkState": 1, "nvmlDeviceGetP2PStatus": Library.NVMLError(999)},
    ],
)
def test_links_that_cannot_be_read_are_no_pair_without_nvlink(silent: dict[str, Any]) -> None:
    pair = {"nvmlDeviceGetCount": 2, "nvmlDeviceGetP2PStatus": 0, "nvmlDeviceGetTopologyCommonAncestor": 50}
    assert by_nvml(**pair, nvmlDeviceGetNvLinkState=1)["topology"]["GPU0"] == {"GPU1": "NV18"}
    assert by_nvml(**pair)["topology"]["GPU0"] == {"GPU1": "SYS"}
    assert by_nvml(**{**pair, **silent}).values["topology"] == Unread("NVML: Unknown Error")


# ---- recordings of the agent


def test_readings_go_through_json_and_come_back() -> None:
    whole = node()
    whole.values.update(a=Absent("x"), b=Unread("y"), c={"d": [1, None, "e"]})
    again = revived(json.loads(json.dumps(plain(whole))))
    assert again == whole


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
DOCUMENTS = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["provision-health", "node", "a"]), inner)
    ),
    max_leaves=6,
)


@given(DOCUMENTS)
def test_no_document_makes_reading_a_recording_fail_otherwise_than_it_says(value: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        command.recorded(json.dumps(value))


def test_a_recorded_node_is_judged_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = node()
    broken["gpus"][0].values["remapped_rows.failure"] = True
    assert command._record(broken, str(tmp_path / "node.json")) == 0
    assert command.main(["judge", str(tmp_path / "node.json")]) == 1
    assert "FAIL remap-failure GPU 0: yes, expected no, rma" in capsys.readouterr().out
    assert command.main(["judge", str(tmp_path / "none")]) == 2


# ---- the agent


def config(tmp_path: Path, **values: Any) -> agent.Config:
    path = tmp_path / "health.json"
    path.write_text(json.dumps({"node": "gpu-1", "expect": {}, **values}))
    return agent.configured(path)


def test_a_configuration_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    path.write_text("[]")
    with pytest.raises(agent.ConfigError, match=r"health\.json: not a configuration"):
        agent.configured(path)
    assert agent.configured(tmp_path / "none").expect == {}


def test_state_is_kept_and_what_is_no_state_is_put_aside(tmp_path: Path) -> None:
    with agent.remembered(tmp_path) as state:
        state["unreadable"] = 2
    with agent.remembered(tmp_path) as state:
        assert state["unreadable"] == 2
    (tmp_path / "state.json").write_text("{")
    with agent.remembered(tmp_path) as state:
        assert state == memory.empty()
    assert (tmp_path / "state.broken").exists()


def examined(
    tmp_path: Path, reading: Device, state: dict[str, Any] | None = None, **options: Any
) -> agent.Outcome:
    return agent.examine(
        config(tmp_path), {} if state is None else state, reading=lambda *a, **k: reading, **options
    )


def test_an_agent_says_what_it_found_and_remembers_it(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    broken = node()
    broken.values["nvml"] = "Driver/library version mismatch"
    outcome = examined(tmp_path, broken, state)
    assert (outcome.decision.verdict, outcome.decision.drain) == (FAIL, True)
    assert state["history"][-1][1:] == [FAIL, outcome.decision.reason]
    assert "bmc-events" not in {finding.check for finding in outcome.findings}


def test_metrics_hold_numbers_alone_and_every_series_once(tmp_path: Path) -> None:
    broken = node()
    broken["gpus"][0].values.update({"temperature.gpu": Unread("?"), "power.draw": Absent("N/A")})
    broken["gpus"][1].values["power.draw"] = 61.2
    broken.values["own_name"] = ""
    outcome = examined(tmp_path, broken)
    agent.write_metrics(tmp_path / "health.prom", outcome, {"slurm": True, "kubernetes": False})
    lines = (tmp_path / "health.prom").read_text().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    for sample in samples:
        float(sample.rpartition(" ")[2])
    assert len({sample.rpartition(" ")[0] for sample in samples}) == len(samples)
    assert 'provision_gpu_power_watts{gpu="1",uuid="GPU-1"} 61.2' in samples
    assert 'provision_health{verdict="fail"} 1' in samples
    assert 'provision_health_scheduler_told{scheduler="kubernetes"} 0' in samples
    assert any('check="own-name"' in sample for sample in samples)


class Memory(Source):
    name, tells = "meminfo", ("memory.total",)

    def __init__(self, how: Callable[[], Any]) -> None:
        self.how = how

    def read(self) -> dict[str, Any]:
        return {"memory.total": self.how()}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda: Path("/nowhere/meminfo").read_text(), id="absent"),
        pytest.param(lambda: time.sleep(60), id="hangs"),
        pytest.param(lambda: int("%$#"), id="garbage"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_metric(tmp_path: Path, how: Callable[[], Any]) -> None:
    reading = node()
    reading.values.update(collect("node", [Memory(how)], seconds=0.3).values)
    agent.write_metrics(tmp_path / "health.prom", examined(tmp_path, reading, full=True), {})
    lines = (tmp_path / "health.prom").read_text().splitlines()
    assert 'provision_health{verdict="unknown"} 1' in lines
    assert any(line.startswith("provision_health_finding{") and 'verdict="unknown"' in line for line in lines)
    assert any(line.startswith("provision_gpu_temperature_celsius{") for line in lines), "the others go on"


@given(st.text())
def test_no_label_breaks_a_line_of_metrics(text: str) -> None:
    told = metrics.text(Device("n", {}), [Finding(FAIL, "xid", text, action="drain")], 0.1, 1.0, {})
    assert all(line.startswith(("#", "provision_")) for line in told.split("\n") if line)


# ---- what it does


class Commands:
    """Programs that answer as written, and what they were called with."""

    def __init__(self, answers: dict[str, str], failing: str = "") -> None:
        self.answers, self.failing = answers, failing
        self.calls: list[str] = []

    def __call__(self, words: Any) -> subprocess.CompletedProcess[str]:
        line = " ".join(words)
        self.calls.append(line)
        code = 1 if self.failing and line.startswith(self.failing) else 0
        answer = next((text for start, text in self.answers.items() if line.startswith(start)), "")
        return subprocess.CompletedProcess(words, code, answer, "refused" if code else "")


def outcome_of(findings: list[Finding], state: str = "IDLE", reason: str | None = None) -> agent.Outcome:
    return agent.Outcome(Device("gpu-1"), findings, decide.decide(findings, 0, state, reason), 0.1)


GRAVE = Finding(FAIL, "nvlink-count", "GPU 3", "17 of 18 up", "18", "reset")


def slurm(drained: str = "", after: str = "State=IDLE+DRAIN ") -> Commands:
    return Commands(
        {
            "sinfo -h -N -n": "train\n",
            "sinfo -h -N -p": "gpu-1\ngpu-2\n",
            "sinfo -h -N -o": drained,
            "scontrol -o show": after,
        }
    )


def test_a_node_is_drained_with_a_reason_and_looked_at_again(tmp_path: Path) -> None:
    run = slurm()
    said = act.slurm(config(tmp_path), outcome_of([GRAVE]), run, now=lambda: 1000.0)
    assert said == "drained: nvlink-count GPU 3: 17 of 18 up; reset"
    update = next(call for call in run.calls if call.startswith("scontrol update"))
    assert (
        update
        == "scontrol update NodeName=gpu-1 State=DRAIN Reason=provision: health: nvlink-count GPU 3: 17 of 18 up; reset"
    )


def test_a_drain_that_took_no_effect_is_an_alarm(tmp_path: Path) -> None:
    with pytest.raises(programs.Failed, match="ALERT: gpu-1 should be drained and is not"):
        act.slurm(config(tmp_path), outcome_of([GRAVE]), slurm(after="State=IDLE "), now=lambda: 1000.0)


def test_the_budget_stops_drains_and_alerts(tmp_path: Path) -> None:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(900))
    drained = "".join(f"gpu-{number}|provision: health: xid|{moment}\n" for number in (2, 3))
    run = slurm(drained)
    assert act.slurm(config(tmp_path), outcome_of([GRAVE]), run, now=lambda: 1000.0).startswith(
        "ALERT: not drained"
    )
    assert not [call for call in run.calls if call.startswith("scontrol update")]


def test_a_drain_beyond_the_budget_is_taken_back_where_others_drained_meanwhile(tmp_path: Path) -> None:
    nobody = slurm()

    def run(words: Any) -> subprocess.CompletedProcess[str]:
        if "State=DRAIN" in words:
            nobody.answers["sinfo -h -N -o"] = "".join(
                f"gpu-{number}|provision: health: xid|1970-01-01T00:16:4{4 - number}\n"
                for number in (1, 2, 3)
            )
        return nobody(words)

    said = act.slurm(config(tmp_path), outcome_of([GRAVE]), run, now=lambda: 1000.0)
    assert said.startswith("ALERT: resumed, the budget of 2 nodes an hour is used up: nvlink-count")
    assert nobody.calls[-1] == "scontrol update NodeName=gpu-1 State=RESUME"


def test_what_an_agent_drained_is_resumed_when_all_is_well(tmp_path: Path) -> None:
    run = slurm(after="State=IDLE ")
    well = outcome_of([Finding(PASS, "xid", "gpu-1")], "IDLE+DRAIN", "provision: health: xid; reset")
    assert act.slurm(config(tmp_path), well, run, now=lambda: 1.0).startswith("resumed")
    assert "scontrol update NodeName=gpu-1 State=RESUME" in run.calls


def test_nothing_is_done_where_the_switch_was_pulled_or_the_site_does_not_want_it(tmp_path: Path) -> None:
    switch = tmp_path / "off"
    assert act.may(config(tmp_path, act=True), switch)
    switch.touch()
    assert not act.may(config(tmp_path, act=True), switch)
    assert not act.may(config(tmp_path), tmp_path / "none")


def test_what_can_be_mended_is_mended_and_what_cannot_says_why() -> None:
    findings = [
        Finding(FAIL, "services", "gpu-1", "slurmd: failed", "active", "fix"),
        Finding("warn", "power-limit", "GPU 2", "500 W", "700 W", "fix"),
        Finding("warn", "persistence", "GPU 0", "Disabled", "Enabled", "fix"),
        GRAVE,
    ]
    run = Commands({}, failing="nvidia-smi -pm")
    done = act.fix(outcome_of(findings), run)
    assert run.calls == ["systemctl start slurmd", "nvidia-smi -i 2 -pl 700", "nvidia-smi -pm 1"]
    assert done[:2] == ["services: started slurmd", "power-limit: power limit of GPU 2 set to 700 W"]
    assert done[2].startswith("persistence: could not be mended: nvidia-smi exited with 1")


# ---- one file


def test_the_agent_is_one_file_that_any_python_runs_and_starts_quickly_once_compiled(tmp_path: Path) -> None:
    source, target = tmp_path / "source.pyz", tmp_path / "agent.pyz"
    source.write_bytes(bundle.build())
    assert source.read_bytes() == bundle.build()
    bundle.compiled(str(source), str(target))
    (tmp_path / "recorded.json").write_text(
        json.dumps({"provision-health": 1, "node": plain(Device("gpu-1", {"nvml": "ok"}))})
    )
    for program in (source, target):
        answer = subprocess.run(
            [sys.executable, "-I", program, "judge", tmp_path / "recorded.json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (answer.returncode, answer.stderr) == (0, "")
        assert "pass: 1 pass" in answer.stdout
    assert b"def nvmlInit" not in target.read_bytes()


STANDARD = {
    "__future__",
    "base64",
    "binascii",
    "calendar",
    "collections",
    "contextlib",
    "ctypes",
    "dataclasses",
    "fcntl",
    "functools",
    "importlib",
    "io",
    "json",
    "marshal",
    "os",
    "pathlib",
    "provision",
    "re",
    "select",
    "shutil",
    "socket",
    "stat",
    "struct",
    "subprocess",
    "sys",
    "threading",
    "time",
    "typing",
    "zipfile",
}


def test_the_bundle_needs_nothing_but_the_standard_library_and_nvml() -> None:
    names = set(bundle.contents())
    roots = {name.split("/")[0].removesuffix(".py") for name in names}
    assert roots == {"provision", "pynvml", "__main__"}
    for name, content in bundle.contents().items():
        if name.startswith("provision/health/"):
            lines = content.decode().splitlines()
            imported = {
                line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))
            }
            assert imported <= STANDARD, name


def test_unknown_words_of_the_command_line_are_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["dance"]) == 2
    assert command.main(["--help"]) == 0
    assert "provision-health check" in capsys.readouterr().out


def test_the_quick_set_of_an_empty_site_has_an_answer_for_every_check() -> None:
    found = judge(Device("n", {}), load(), quick=True)
    assert worst(each.verdict for each in found) == UNKNOWN
    assert all(each.why for each in found if each.verdict in (SKIP, UNKNOWN))
