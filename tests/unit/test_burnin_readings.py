"""What the burn-in reads of a node beside its work: telemetry, kernel messages, system, other tools' output."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.burnin.result import KernelMessages, Series
from provision.burnin.workload import hosts, kernel, nvml, system, telemetry, tools
from provision.burnin.workload.checksums import odd_gpus
from provision.burnin.workload.document import RankLog
from provision.burnin.workload.telemetry import adapters, bare, counters, smi_rows, thin


def test_nvidia_smi_says_what_it_has_and_what_it_lacks():
    rows = smi_rows(
        "GPU-1, 1980, 0x0000000000000044, [N/A]\nGPU-2, 345, 0x0000000000000001, 41\n",
        ["clock", "mask", "hbm"],
    )
    assert rows["GPU-1"] == ({"clock": 1980, "mask": 0x44}, {"hbm": "[N/A]"})
    assert rows["GPU-2"] == ({"clock": 345, "mask": 1, "hbm": 41}, {})
    with pytest.raises(ValueError, match="expected 4 columns"):
        smi_rows("No devices were found\n", ["clock", "mask", "hbm"])


def test_a_thinned_series_loses_no_slowdown_and_no_count():
    readings = [
        {"power_watts": 100.0 + i, "slowdown_reasons": 8.0 if i == 5 else 4.0, "rx_bytes": float(i)}
        for i in range(9)
    ]
    del readings[8]["power_watts"]
    series = thin([float(i) for i in range(9)], readings, 3)
    assert series["seconds"] == [2, 5, 8]
    assert series["values"] == {
        "power_watts": [101, 104, 106.5],
        "slowdown_reasons": [4, 12, 4],
        "rx_bytes": [2, 5, 8],
    }


@given(st.integers(0, 50), st.integers(1, 10))
def test_a_thinned_series_has_one_value_for_each_time(count: int, most: int):
    series = thin([float(i) for i in range(count)], [{"x": 1.0}] * count, most)
    assert len(series["seconds"]) <= most
    assert all(len(values) == len(series["seconds"]) for values in series["values"].values())
    Series(host="n", subject="s", uuid=None, rank=None, source="nvml", unavailable={}, **series)


def test_counters_of_ports_and_interface(tmp_path: Path):
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1" / "counters"
    port.mkdir(parents=True)
    (port / "port_xmit_data").write_text("123\n")
    statistics = tmp_path / "net" / "eth0" / "statistics"
    statistics.mkdir(parents=True)
    (statistics / "rx_bytes").write_text("7\n")
    found = adapters("eth0", tmp_path / "ib", tmp_path / "net")
    assert [device.subject for device in found] == ["mlx5_0/1", "eth0"]
    assert found[0].read()[0] == {"port_xmit_data": 123}
    values, missing = counters(statistics, ["rx_bytes", "tx_bytes"])
    assert (values, list(missing)) == ({"rx_bytes": 7}, ["tx_bytes"])


def test_both_spellings_of_a_gpu_are_one():
    assert bare("GPU-1A2b") == bare("1a2b")


def test_kernel_records_read_like_dmesg():
    assert kernel.line_of("6,1234,5678901,-;NVRM: Xid 79\n SUBSYSTEM=pci") == "[    5.678901] NVRM: Xid 79"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:06:00): 79, pid=1, GPU has fallen off the bus.",
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal",
        "mlx5_core 0000:3b:00.0: Port module event: module 0, Cable error",
        "EDAC MC0: 1 UE memory read error",
        "pcieport 0000:00:01.0: AER: Corrected error received",
        "Out of memory: Killed process 4242 (python3)",
    ],
)
def test_what_tells_of_hardware_is_kept(line: str):
    assert kernel.telling([line, "systemd[1]: Started something"]) == [line]
    parameters = "[    0.000000] Kernel command line: quiet driver_async_probe=mlx5_core"
    assert kernel.telling([parameters, line]) == [line]


def test_a_kernel_log_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "DEVICE", "/nonexistent/kmsg")
    monkeypatch.setenv("PATH", "")
    row = KernelMessages.model_validate(kernel.Messages().row("node-1"))
    assert row.source is None
    assert row.why
    assert "/nonexistent/kmsg" in row.why


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "LIBRARY", "libnothing.so.1")
    with pytest.raises(nvml.NvmlError, match=r"libnothing\.so\.1"):
        nvml.Nvml()


def test_processors_of_numa_nodes_that_this_process_may_use(tmp_path: Path):
    mine = sorted(os.sched_getaffinity(0))[0]
    for node, processors in {"node0": f"{mine}", "node1": "5000-5003", "node2": ""}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(processors + "\n")
    assert system.numa_nodes(tmp_path) == {0: {mine}}
    assert system.cpu_list("0-2,8\n") == {0, 1, 2, 8}


def test_file_system_system_and_container(tmp_path: Path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    assert system.filesystem(tmp_path / "run", str(mounts)) == "nfs4"
    assert system.filesystem(Path("/usr"), str(mounts)) == "ext4"
    (tmp_path / "os-release").write_text('NAME=x\nPRETTY_NAME="Some Linux 1"\n')
    assert system.os_name(tmp_path / "os-release") == "Some Linux 1"
    assert system.os_name(tmp_path / "none") is None
    assert system.container({}, tmp_path) is None
    assert (
        system.container({"APPTAINER_CONTAINER": "/images/torch.sif"}, tmp_path)
        == "APPTAINER_CONTAINER=/images/torch.sif"
    )


def test_rates_of_fio_and_of_the_wire():
    text = "fio: a warning\n" + json.dumps({"jobs": [{"write": {"bw_bytes": 2_500_000_000}}]})
    assert tools.fio_numbers(text, "write") == {"write_gbs": 2.5}
    table = " #bytes  #iterations  BW peak[Gb/sec]  BW average[Gb/sec]  MsgRate[Mpps]\n"
    table += " 65536  3520000  0.00  384.00  0.7324\n"
    assert tools.wire_numbers(table) == {"write_gbs": 48}
    assert tools.wire_numbers("Couldn't connect to 10.0.0.1:18515\n") == {}


@given(st.lists(st.integers().map(str), unique=True))
def test_nodes_are_paired_both_ways(hosts: list[str]):
    pairs = tools.partners(hosts)
    assert all(pairs[pairs[host]] == host != pairs[host] for host in pairs)
    assert len(pairs) == len(hosts) // 2 * 2


def rotated(ranks: int, shifts: int, bad: dict[int, str]) -> list[dict[str, object]]:
    """Rows of one step where `bad` ranks add something of their own to what they compute."""
    return [
        {
            "step": 0,
            "shift": shift,
            "checksums": [f"share{(rank + shift) % ranks}{bad.get(rank, '')}" for rank in range(ranks)],
        }
        for shift in range(shifts)
    ]


def test_rotation_names_the_gpu_whatever_it_computes():
    assert odd_gpus(rotated(8, 4, {})).ranks == ()
    odd = odd_gpus(rotated(8, 4, {5: "?"}))
    assert (odd.ranks, odd.certain) == ((5,), True)
    assert odd_gpus(rotated(8, 4, {1: "?", 6: "!"})).ranks == (1, 6)


def test_two_gpus_that_disagree_are_both_suspects():
    odd = odd_gpus(rotated(2, 2, {1: "?"}))
    assert (odd.ranks, odd.certain) == ((0, 1), False)


def test_telemetry_is_read_back_as_it_was_written():
    lines: list[dict[str, object]] = [
        {"devices": [{"subject": "gpu 0", "source": "nvml", "uuid": "GPU-1"}], "skipped": None},
        {"seconds": 0.5, "device": 0, "values": {"power_watts": 90.0}, "missing": {}},
        {"seconds": 1.5, "device": 0, "values": {}, "missing": {"power_watts": "Unknown Error"}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for cut in ("", '{"seconds": 2.5, "dev'):
        (history,), skipped = telemetry.parse(text + cut)
        assert (history.seconds, skipped) == ([0.5, 1.5], None)
        assert history.readings == [{"power_watts": 90.0}, {}]
        assert history.unavailable == {"power_watts": "Unknown Error"}
    assert telemetry.parse("") == ([], "nothing was read")


def test_a_reader_that_ends_too_early_is_no_quiet_node(tmp_path: Path):
    readings = telemetry.Telemetry(tmp_path / "none" / "telemetry.jsonl", 0.0, "lo", gpus=False)
    readings._process.wait()
    readings.stop()
    assert "ended too early" in str(readings.skipped)
    assert readings.series("node-1", {}) == []


def test_busy_are_gpus_of_the_job_held_by_others():
    gpu = {"name": "x", "uuid": "1a", "memory_bytes": 1}
    members = [{"host": "n1", "pid": 7, "gpu": gpu}, {"host": "n2", "pid": 8, "gpu": None}]
    busy = {"GPU-1A": ["7 python3", "51220 python3"], "GPU-2B": ["99 other"]}
    assert hosts.others({"host": "n1", "busy": busy}, members) == {"GPU-1A": ["51220 python3"]}
    assert hosts.others({"host": "n2", "busy": busy}, members) == {}


def test_progress_says_what_is_left_only_while_the_expected_time_is_not_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([1000.0, 1000.0, 1000.0, 1100.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    log = RankLog(tmp_path, 0)
    log.progress("start")
    log.expected_seconds = 90.4
    log.progress("under way")
    log.progress("late")
    assert capsys.readouterr().err.splitlines() == [
        "burn-in    0.0 s  start",
        "burn-in    0.0 s, about 1:30 left  under way",
        "burn-in  100.0 s  late",
    ]
