"""Kernel messages: forms of lines, events, XIDs and what they ask for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.health import follow, xid
from provision.health.finding import FAIL, PASS, UNKNOWN, WARN
from provision.health.kernel import Event, address, events, parse

LINE = "NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "form",
    [
        "3,1042,9000123,-;{}",
        "[    9.000123] {}",
        "[Mon Mar  3 10:11:12 2025] {}",
        "<3>[    9.000123] {}",
        "kern  :warn  : 2025-03-03T10:11:12,000123+00:00 {}",
        "kern  :err   : [    9.000123] {}",
        "Mar 03 10:11:12 gpu-7 kernel: {}",
        "Mar  3 10:11:12 gpu-7 kernel: [    9.000123] {}",
        "2025-03-03T10:11:12.000123+01:00 gpu-7 kernel: {}",
        "2025-03-03T10:11:12+0100 gpu-7 kernel: {}",
        '{{"MESSAGE": "{}", "SYSLOG_IDENTIFIER": "kernel"}}',
        "[...] {}",
        "[Mar03 10:11] {}",
        "[  +0.000123] {}",
        "[    9.000123] [  T1946] {}",
        "[    9.000123] gpu-7 kernel: {}",
        "Mon 2025-03-03 10:11:12 UTC gpu-7 kernel: {}",
        "2025 Mar  3 10:11:12.123 gpu-7 kernel: {}",
        "2025-03-03T10:11:12.000123456Z [    9.000123] {}",
        "10.0.0.7: kern: warning: [2025-03-03T10:11:12.000123456Z]: {}",
        "kernel: [    9.000123] {}",
        "kernel: {}",
        "<4>{}",
        "{}",
    ],
)
def test_a_line_of_any_form_is_the_same_event(form: str) -> None:
    (event,) = events(parse(form.format(LINE) + "\n"))
    assert (event.kind, event.device, event.number, event.pids) == ("xid", "0000:1b:00.0", 79, ("4711",))


@pytest.mark.parametrize(
    ("text", "kind", "device"),
    [
        ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", "off-bus", "0000:29:00.0"),
        ("NVRM: GPU 18:00.0: GPU has fallen off the bus.", "off-bus", "0000:18:00.0"),
        ("NVRM: GPU 000f:01:00.0: RmInitAdapter failed! (0x62:0x1a:2631)", "rm-init", "000f:01:00.0"),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "sxid",
            "0000:a9:00.0",
        ),
        (
            "pcieport 0000:00:02.0: AER: Uncorrected (Fatal) error received: id=0010",
            "aer-fatal",
            "0000:00:02.0",
        ),
        (
            "pcieport 0000:00:02.0: AER: Uncorrectable (Fatal) error message received from 0000:1b:00.0",
            "aer-fatal",
            "0000:00:02.0",
        ),
        (
            "nvidia 0000:1b:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer",
            "aer-nonfatal",
            "0000:1b:00.0",
        ),
        (
            "pcieport 0000:00:02.0: AER: Correctable error message received from 0000:1b:00.0",
            "aer-corrected",
            "0000:00:02.0",
        ),
        ("NVRM: GPU0 RmInitAdapter: Cannot initialize GSP firmware RM", "rm-init", ""),
        ("NVRM: RmInitAdapter failed! (0x62:0x65:2028)", "rm-init", ""),
        ("NVRM: None of the NVIDIA devices were initialized.", "nothing-driven", ""),
        (
            "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!",
            "nvlink",
            "",
        ),
        ("NVRM: Xid (PCI:0000:1b:00): ", "garbled", "0000:1b:00"),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "hardware-corrected", "MC0"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "machine-check", ""),
        ("Memory failure: 0x12ab: recovery action for dirty LRU page: Recovered", "machine-check", ""),
        ("{1}[Hardware Error]: event severity: fatal", "machine-check", ""),
        ("{1}[Hardware Error]: event severity: corrected", "hardware-corrected", ""),
        (
            "pcieport 0000:97:01.0: DPC: containment event, status:0x1f01 source:0x0000",
            "aer-fatal",
            "0000:97:01.0",
        ),
        ("pcieport 0000:97:01.0: pciehp: Slot(12): Link Down", "slot-down", "0000:97:01.0"),
        (
            "NVRM: nvGpuOpsReportFatalError: uvm encountered global fatal error 0x60, requiring os reboot",
            "uvm-fatal",
            "",
        ),
        ("CPU0: Package temperature above threshold, cpu clock throttled", "cpu-throttled", ""),
        ("CPU3: Core temperature is above threshold, cpu clock is throttled", "cpu-throttled", ""),
        (
            "Memory cgroup out of memory: Kill process 471 (python) score 1000 or sacrifice child",
            "oom",
            "471",
        ),
        ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", "lockup", ""),
        (
            "mlx5_core 0000:5c:00.0: High temperature on sensors with bit set 0 1",
            "module-temperature",
            "0000:5c:00.0",
        ),
        (
            "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, Bus stuck (I2C or data shorted)",
            "module-error",
            "0000:5c:00.0",
        ),
        (
            "mlx5_core 0000:5c:00.0: probe_one:1702:(pid 9): mlx5_init_one failed with -110",
            "nic-health",
            "0000:5c:00.0",
        ),
        ("mlx5_core 0000:5c:00.0 mlx5_3: Port: 1 Link DOWN", "carrier-lost", "mlx5_3"),
        ("nvme nvme3: I/O 22 (I/O Cmd) QID 5 timeout, aborting", "nvme-slow", "nvme3"),
        ("nvme nvme4: Disabling device after reset failure: -19", "nvme", "nvme4"),
        (
            "EXT4-fs error (device sda2): ext4_lookup:1700: inode #13: comm ls: deleted inode",
            "io-error",
            "sda2",
        ),
        ("EXT4-fs (dm-0): I/O error while writing superblock", "io-error", "dm-0"),
        ("md/raid1:md0: Disk failure on nvme1n1p1, disabling device.", "io-error", "md0"),
        ("nfs: server 10.0.0.5 not responding, still trying", "server-silent", "10.0.0.5"),
        ("DMAR: [DMA Write] Request device [3b:00.0] fault addr 0x7f000000", "iommu-fault", "3b:00.0"),
        (
            "pci 0000:1b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 16.0 GT/s",
            "downtrain",
            "0000:1b:00.0",
        ),
        ("nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context", "peermem", ""),
        (
            "mlx5_core 0000:1a:00.0: mlx5_port_module_event: High Temperature",
            "module-temperature",
            "0000:1a:00.0",
        ),
        ("blk_update_request: I/O error, dev nvme0n1, sector 8", "io-error", "nvme0n1"),
        ("EXT4-fs (sda1): Remounting filesystem read-only", "read-only", "sda1"),
        ("watchdog: BUG: soft lockup - CPU#7 stuck for 22s!", "lockup", "7"),
        ("INFO: task kworker/7:1:99 blocked for more than 120 seconds.", "hung-task", "kworker/7:1"),
        ("Out of memory: Killed process 4711 (python3)", "oom", "4711"),
        (
            "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -2)",
            "peermem-symbol",
            "ib_register_peer_memory_client",
        ),
    ],
)
def test_what_the_kernel_reports_is_an_event_with_its_device(text: str, kind: str, device: str) -> None:
    (event,) = events(parse(f"[  1.000000] {text}\n"))
    assert (event.kind, event.device) == (kind, device)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid error: xyz",
        "NVRM: Xid (invalid): some error",
        "nvidia-nvswitch0: SXid (PCI:0000:00:00.0): xyz, Fatal",
        "NVRM: The NVIDIA GPU invalid-bdf.0",
        "usb 1-1: new high-speed USB device",
        "mlx5_core 0000:5c:00.0: Port module event: module 1, Cable unplugged",
        "mlx5_core 0000:5c:00.0: 504.112 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x16 link)",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode",
    ],
)
def test_what_only_looks_like_an_event_is_none(text: str) -> None:
    assert events(parse(f"[  1.000000] {text}\n")) == []


def test_a_gpu_off_the_bus_told_in_three_lines_is_one_event() -> None:
    log = (
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n"
        "               NVRM: (PCI ID: 10de:2335) installed in this system has\n"
        "               NVRM: fallen off the bus and is not responding to commands.\n"
        "[ 1843.439662] NVRM: The NVIDIA probe routine failed for 1 device(s).\n"
    )
    assert [(event.kind, event.device) for event in events(parse(log))] == [("off-bus", "0000:b3:00.0")]


def test_equal_lines_are_one_event_with_a_count() -> None:
    log = "".join(f"[{n}.000000] {LINE.replace('4711', str(n % 3))}\n" for n in range(20_000))
    (event,) = events(parse(log))
    assert (event.count, event.first, event.last, len(event.pids)) == (20_000, "0.000000", "19999.000000", 3)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("1b:00.0", "0000:1b:00.0"),
        ("0009:01:00", "0009:01:00.0"),
        ("10001:00:00.0", "10001:00:00.0"),
    ],
)
def test_addresses_are_written_one_way(written: str, plain: str) -> None:
    assert address(written) == plain


@given(st.text(), st.integers(0, 200))
def test_no_text_makes_the_parser_fail(text: str, cut: int) -> None:
    log = f"[    9.000123] {LINE}\n{text}\n"
    assert isinstance(events(parse(log[:cut])), list)
    assert events(parse(text)) == [] or "NVRM" in text or len(text) > 10


# ---- XIDs


def xid_of(number: int, text: str = "", **over: object) -> Event:
    return Event("xid", "0000:1b:00.0", number, text, **over)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "others", "verdict", "action"),
    [
        (13, [], PASS, None),
        (43, [], PASS, None),
        (31, [], PASS, None),
        (45, [], WARN, "warn"),
        (45, [13], PASS, None),
        (48, [], FAIL, "reset"),
        (48, [63], FAIL, "reset"),
        (48, [64], FAIL, "rma"),
        (54, [], FAIL, "drain"),
        (63, [], WARN, "warn"),
        (64, [], FAIL, "reset"),
        (74, [], FAIL, "reset"),
        (74, [79], PASS, None),
        (78, [], WARN, "warn"),
        (79, [], FAIL, "reboot"),
        (94, [], WARN, "warn"),
        (95, [], FAIL, "reset"),
        (119, [], FAIL, "reset"),
        (120, [], FAIL, "reset"),
        (140, [], FAIL, "reset"),
        (142, [], FAIL, "drain"),
        (151, [], FAIL, "reboot"),
        (162, [], PASS, None),
        (163, [], WARN, "warn"),
        (165, [], WARN, "warn"),
        (168, [], FAIL, "reboot"),
        (169, [], UNKNOWN, "drain"),
        (171, [48], PASS, None),
        (172, [], FAIL, "reset"),
        (999, [], UNKNOWN, "drain"),
    ],
)
def test_an_xid_asks_for_what_its_workflow_says(
    number: int, others: list[int], verdict: str, action: str | None
) -> None:
    event = xid_of(number)
    judged = xid.judge(event, [event, *map(xid_of, others)], {})
    assert (judged.verdict, judged.action) == (verdict, action)
    assert judged.why


@pytest.mark.parametrize(
    ("number", "text", "verdict", "action"),
    [
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 01", FAIL, "reset"),
        (145, "RLW_REMAP Nonfatal XC0 i0 Link 00", WARN, "warn"),
        (150, "something else", FAIL, "reset"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", FAIL, "reset"),
        (
            154,
            "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)",
            FAIL,
            "reboot",
        ),
        (154, "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", FAIL, "drain"),
        (154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)", PASS, None),
        (154, "GPU recovery action changed from 0x0 (None) to 0x9 (Dance)", UNKNOWN, "drain"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", FAIL, "reset"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", FAIL, "reboot"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)", FAIL, "drain"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x6 (another word)", FAIL, "reset"),
        (149, "NETIR_BER_EVENT Non-Fatal XC0 i0 Link 03", WARN, "warn"),
    ],
)
def test_the_text_of_an_xid_decides_where_its_number_does_not(
    number: int, text: str, verdict: str, action: str | None
) -> None:
    event = xid_of(number, text)
    judged = xid.judge(event, [event], {})
    assert (judged.verdict, judged.action) == (verdict, action)


def test_the_last_recovery_action_of_a_gpu_has_the_last_word() -> None:
    asked, done = (
        f"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from {change}"
        for change in ("0x0 (None) to 0x1 (GPU Reset Required)", "0x1 (GPU Reset Required) to 0x0 (None)")
    )

    def told(*lines: str, form: str = "[  1.0] {}") -> list[str]:
        found = events(parse("".join(form.format(line) + "\n" for line in lines)))
        return [xid.judge(event, found, {}).verdict for event in found]

    assert told(asked) == [FAIL]
    assert told(asked, done) == [PASS, PASS]
    assert told(asked, done, asked) == [FAIL, PASS]
    earlier, later = Event("xid", "0000:1b:00.0", 154, asked, sequence=7), xid_of(154, done)
    assert xid.judge(earlier, [earlier, later], {}).verdict == FAIL  # whose order nobody knows


def test_the_journal_writes_messages_as_bytes_too() -> None:
    (event,) = events(parse(json.dumps({"MESSAGE": list(LINE.encode())}) + "\n"))
    assert event.number == 79
    assert parse('{"MESSAGE": [1, 999]}') == []


def test_what_did_not_help_is_not_tried_again() -> None:
    event = xid_of(119)
    assert xid.judge(event, [event], {"reset": 1}).action == "reboot"
    assert xid.judge(event, [event], {"reset": 1, "reboot": 1}).action == "rma"
    bus = xid_of(79)
    assert xid.judge(bus, [bus], {"reboot": 1}).action == "reboot"
    assert xid.judge(bus, [bus], {"reboot": 2}).action == "rma"


def test_application_errors_of_three_jobs_on_one_gpu_are_not_one_programs_fault() -> None:
    event = xid_of(13, pids=("1", "2", "3"))
    assert xid.judge(event, [event], {}).verdict == WARN


def test_events_of_another_gpu_explain_nothing() -> None:
    event, other = xid_of(45), Event("xid", "0000:2b:00.0", 13)
    assert xid.judge(event, [event, other], {}).verdict == WARN


# ---- waiting for them


class Enough(Exception):
    """Ends what would wait for ever."""


def followed(path: Path, *written: str) -> list[str]:
    """What happens while `written` is logged, a part at each pause: pauses, rests, readings."""
    found: list[str] = []
    parts = list(written)

    def wait(seconds: float) -> None:
        found.append("rest" if seconds == follow.REST else "pause")
        if not parts:
            raise Enough
        part = parts.pop(0)
        if part == "anew":
            path.write_text("")
        else:
            with path.open("a") as file:
                file.write(part)

    with pytest.raises(Enough):
        follow.follow(path, lambda: found.append("read"), wait)
    return found


FAULT = "3,1001,5,-;NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
CHATTER = "6,1002,6,-;usb 1-1: new device\n"


def test_a_fault_that_is_logged_is_read_at_once_and_what_stood_there_before_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(FAULT)
    assert followed(path) == ["pause"]
    assert followed(path, FAULT) == ["pause", "read", "rest"]
    assert followed(path, CHATTER, "") == ["pause", "pause", "pause"]


def test_many_messages_are_one_reading_in_half_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    assert followed(path, FAULT * 10_000, FAULT * 10_000) == ["pause", "read", "rest", "read", "rest"]


def test_a_file_that_was_begun_anew_is_followed_from_there(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(CHATTER)
    assert followed(path, "anew", FAULT) == ["pause", "pause", "read", "rest"]


def test_kernel_messages_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        follow.follow(tmp_path / "none", lambda: None)
