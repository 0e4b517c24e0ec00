"""Every check of the catalogue: passes what is well, fails what is broken, and cannot tell what it cannot read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provision.health import __main__ as command
from provision.health import table
from provision.health.catalogue import catalogue, judge
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN, Finding
from provision.health.kernel import Event
from provision.health.limits import load
from provision.health.readings import Absent, Device, Unread
from tests.unit.health_node import limits, node

ROOT = Path(__file__).parents[2]
Break = Callable[[Device], None]


def on_gpu(**values: Any) -> Break:
    """GPU 1 with other values; `__` stands for a dot."""
    return lambda it: it["gpus"][1].values.update(
        {name.replace("__", "."): value for name, value in values.items()}
    )


def on_port(**values: Any) -> Break:
    return lambda it: it["ports"][0].values.update(
        {name.replace("__", "."): value for name, value in values.items()}
    )


def on_node(**values: Any) -> Break:
    return lambda it: it.values.update({name.replace("__", "."): value for name, value in values.items()})


def reports(kind: str, device: str = "", number: int | None = None, text: str = "", count: int = 1) -> Break:
    return on_node(kernel__events=[Event(kind, device, number, text or kind, count)])


def at(it: Device, name: str) -> list[Finding]:
    return [finding for finding in judge(it, limits()) if finding.check == name]


# check -> (what breaks its subject, verdict, action, where its source is)
BROKEN: dict[str, tuple[Break, str, str, str]] = {
    "gpu-count": (lambda it: it["gpus"].pop(), FAIL, "drain", "gpus"),
    "nvml": (on_node(nvml="Driver/library version mismatch"), FAIL, "reboot", "nvml"),
    "inforom": (
        on_gpu(inforom__checksum_validation="corrupted"),
        FAIL,
        "rma",
        "gpu:inforom.checksum_validation",
    ),
    "ecc-mode": (on_gpu(ecc__mode__current="Disabled"), FAIL, "reboot", "gpu:ecc.mode.current"),
    "ecc-uncorrected": (
        on_gpu(ecc__errors__uncorrected__volatile__total=1),
        FAIL,
        "reset",
        "gpu:ecc.errors.uncorrected.volatile.total",
    ),
    "sram-uncorrected": (
        on_gpu(ecc__errors__uncorrected__aggregate__sram=5),
        FAIL,
        "rma",
        "gpu:ecc.errors.uncorrected.aggregate.sram",
    ),
    "sram-threshold": (
        on_gpu(ecc__errors__uncorrected__aggregate__sram__thresholdExceeded=True),
        FAIL,
        "rma",
        "gpu:ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
    ),
    "ecc-corrected": (
        on_gpu(ecc__errors__corrected__aggregate__dram=20_000_001),
        WARN,
        "warn",
        "gpu:ecc.errors.corrected.aggregate.dram",
    ),
    "remap-pending": (on_gpu(remapped_rows__pending=True), FAIL, "reset", "gpu:remapped_rows.pending"),
    "remap-failure": (on_gpu(remapped_rows__failure=True), FAIL, "rma", "gpu:remapped_rows.failure"),
    "remapped-rows": (
        on_gpu(remapped_rows__uncorrectable=512),
        FAIL,
        "rma",
        "gpu:remapped_rows.uncorrectable",
    ),
    "remap-banks": (
        on_gpu(remapped_rows__histogram__none=1),
        WARN,
        "warn",
        "gpu:remapped_rows.histogram.none",
    ),
    "repair-pending": (on_gpu(channel_repair_pending=True), FAIL, "reset", "gpu:channel_repair_pending"),
    "retired-pages": (
        on_gpu(retired_pages__double_bit__count=16),
        FAIL,
        "rma",
        "gpu:retired_pages.double_bit.count",
    ),
    "recovery-action": (on_gpu(gpu_recovery_action="Reboot"), FAIL, "reboot", "gpu:gpu_recovery_action"),
    "xid": (
        reports("xid", "0000:1c:00.0", 79, "GPU has fallen off the bus."),
        FAIL,
        "reboot",
        "kernel.events",
    ),
    "off-bus": (reports("off-bus", "0000:1c:00.0"), FAIL, "reboot", "kernel.events"),
    "sxid": (
        reports("sxid", "0000:05:00.0", 20034, "Fatal, Link 30 LTSSM Fault Up"),
        FAIL,
        "reboot",
        "kernel.events",
    ),
    "fabric-manager": (
        lambda it: it["services"].update({"nvidia-fabricmanager": "failed"}),
        FAIL,
        "fix",
        "services",
    ),
    "fabric-state": (on_gpu(fabric__state="In Progress"), FAIL, "drain", "gpu:fabric.state"),
    "fabric-version": (on_node(fabricmanager__version="580.95.01"), FAIL, "drain", "fabricmanager.version"),
    "nvlink-count": (
        lambda it: it["gpus"][1]["nvlink.links"][3].update(up=False),
        FAIL,
        "drain",
        "gpu:nvlink.links",
    ),
    "nvlink-speed": (
        lambda it: it["gpus"][1]["nvlink.links"][3].update(speed=13.0),
        FAIL,
        "drain",
        "gpu:nvlink.links",
    ),
    "nvlink-errors": (
        lambda it: it["gpus"][1]["nvlink.errors"][3].update({"recovery.delta": 1}),
        FAIL,
        "drain",
        "gpu:nvlink.errors",
    ),
    "p2p": (on_node(p2p={"GPU0-GPU1 read": "TNS", "GPU1-GPU0 read": "OK"}), FAIL, "drain", "p2p"),
    "topology": (
        on_node(topology={"GPU0": {"GPU1": "NV12"}, "GPU1": {"GPU0": "NV12"}}),
        FAIL,
        "drain",
        "topology",
    ),
    "pcie-link": (on_gpu(pcie__link__width__current=8), FAIL, "reboot", "gpu:pcie.link.width.current"),
    "downtrain": (reports("downtrain", "0000:1b:00.0"), FAIL, "reboot", "kernel.events"),
    "pcie-replays": (on_gpu(pcie__replays__delta=10_000), WARN, "warn", "gpu:pcie.replays.delta"),
    "aer": (lambda it: it["aer"][0].values.update({"aer.fatal.delta": 1}), FAIL, "drain", "kernel.events"),
    "slowdown": (
        on_gpu(clocks_event_reasons__hw_power_brake_slowdown="Active"),
        FAIL,
        "drain",
        "gpu:clocks_event_reasons.hw_slowdown",
    ),
    "sm-clock": (on_gpu(clocks__sm=1200), WARN, "warn", "gpus"),
    "temperature": (
        on_gpu(temperature__gpu__tlimit=-2, temperature__gpu=91),
        FAIL,
        "drain",
        "gpu:temperature.gpu",
    ),
    "power-limit": (on_gpu(enforced__power__limit=500.0), WARN, "fix", "gpu:enforced.power.limit"),
    "persistence": (on_gpu(persistence_mode="Disabled"), WARN, "fix", "gpu:persistence_mode"),
    "uniform": (on_gpu(vbios_version="96.00.02"), WARN, "warn", "gpus"),
    "driver-library": (on_node(library__version="580.82.07"), FAIL, "reboot", "library.version"),
    "libraries": (on_node(libraries={"libcuda.so.1": "file too short"}), FAIL, "drain", "libraries"),
    "cuda": (on_node(cuda={"GPU 1": "read back something else"}), FAIL, "drain", "cuda"),
    "gpu-modes": (
        on_gpu(mig__mode__current="Enabled", mig__mode__pending="Enabled"),
        WARN,
        "warn",
        "gpu:mig.mode.current",
    ),
    "left-over": (
        on_gpu(processes=[{"pid": 7, "name": "python3", "memory": 70000, "job": None, "service": False}]),
        FAIL,
        "drain",
        "gpu:processes",
    ),
    "acs-iommu": (lambda it: it["bridges"][0].values.update({"acs.redirect": True}), WARN, "warn", "bridges"),
    "peer-memory": (on_node(modules=["nvidia"], dmabuf=False), WARN, "fix", "modules"),
    "peermem": (reports("peermem"), FAIL, "reboot", "kernel.events"),
    "port": (on_port(phys_state="Polling", state="DOWN"), FAIL, "drain", "ports"),
    "link-flaps": (on_port(flaps=3), FAIL, "drain", "kernel.events"),
    "symbol-errors": (on_port(symbol_error__delta=200), FAIL, "drain", "ports"),
    "transceiver": (reports("module-power", "0000:1a:00.0"), FAIL, "drain", "kernel.events"),
    "nic-firmware": (on_port(fw_ver="28.35"), WARN, "warn", "ports"),
    "roce": (on_port(roce__mtu=1024), FAIL, "drain", "ports"),
    "numa": (on_node(numa__nodes=1), FAIL, "drain", "numa.nodes"),
    "cpu-memory": (on_node(memory__total=200_000), FAIL, "drain", "memory.total"),
    "governor": (on_node(governors=["performance", "powersave"]), WARN, "fix", "governors"),
    "memory-errors": (lambda it: it["edac"][0].values.update(ue=1), FAIL, "drain", "edac"),
    "bmc-events": (on_node(bmc__events=["Power Supply 2: Failure detected"]), WARN, "warn", "bmc.events"),
    "nvme": (lambda it: it["nvme"][0].values.update(critical_warning=4), FAIL, "drain", "nvme"),
    "filesystems": (
        lambda it: it["filesystems"][0].values.update(read_only=True),
        FAIL,
        "drain",
        "filesystems",
    ),
    "swap": (on_node(swap__total=8192), WARN, "warn", "swap.total"),
    "clock": (on_node(clock__offset_ms=250.0), FAIL, "drain", "clock.offset_ms"),
    "stuck": (
        on_node(
            processes__stuck=[{"pid": 9, "name": "rsync", "state": "D", "seconds": 400.0, "readings": 2}]
        ),
        FAIL,
        "drain",
        "kernel.events",
    ),
    "oom-panic": (reports("oom", "4711"), WARN, "warn", "kernel.events"),
    "services": (lambda it: it["services"].update(slurmd="failed"), FAIL, "fix", "services"),
    "container": (on_node(container="nvml error: driver not loaded"), FAIL, "drain", "container"),
    "scheduler": (
        lambda it: it["slurm"].values.update(state="IDLE+DRAIN", reason="swap PSU"),
        WARN,
        "warn",
        "slurm",
    ),
    "slurm-memory": (on_node(memory__available=100_000), FAIL, "drain", "memory.total"),
    "machine-check": (reports("machine-check"), FAIL, "drain", "kernel.events"),
    "driver-start": (reports("rm-init", "0000:1c:00.0"), FAIL, "reboot", "kernel.events"),
    "rdma-modules": (
        reports("peermem-symbol", "ib_register_peer_memory_client"),
        FAIL,
        "drain",
        "kernel.events",
    ),
    "kernel-complaints": (reports("server-silent", "10.0.0.5"), WARN, "warn", "kernel.events"),
    "user-namespaces": (reports("userns-denied", "enroot"), WARN, "warn", "kernel.events"),
    "shared-memory": (on_node(shm__used=50_000), WARN, "fix", "shm.used"),
    "own-name": (on_node(own_name=""), FAIL, "drain", "own_name"),
    "device-files": (on_node(devices=1), FAIL, "drain", "devices"),
    "device-holders": (
        on_node(
            device__holders=[
                {"pid": 7, "name": "python3", "devices": ["/dev/nvidia0"], "job": None, "service": False}
            ]
        ),
        FAIL,
        "drain",
        "device.holders",
    ),
}
NEVER_BAD = {"application-crash"}  # says that something is an application's fault


def three_gpus() -> Device:
    """The SM clock is compared among three GPUs or more."""
    from tests.unit.health_node import gpu

    it = node()
    it["gpus"].append(gpu(2))
    return it


def test_a_node_that_is_well_has_nothing_but_passes_and_skips() -> None:
    bad = [finding.line() for finding in judge(node(), limits()) if finding.verdict not in (PASS, SKIP)]
    assert not bad


def test_the_catalogue_has_all_rows_and_every_one_is_broken_here() -> None:
    rows = catalogue()
    assert set(range(1, 66)) <= {row.number for row in rows}
    assert len({row.number for row in rows}) == len(rows) == len({row.name for row in rows})
    assert {row.name for row in rows} == set(BROKEN) | NEVER_BAD


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_with_its_action_and_nothing_passes_in_its_place(name: str) -> None:
    breaks, verdict, action, _ = BROKEN[name]
    it = three_gpus() if name == "sm-clock" else node()
    breaks(it)
    found = at(it, name)
    assert (verdict, action) in [(finding.verdict, finding.action) for finding in found]
    worst = next(finding for finding in found if finding.verdict == verdict)
    assert worst.advice
    assert worst.read
    assert worst.expected


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_unknown_with_its_reason(name: str) -> None:
    source = BROKEN[name][3]
    it = node()
    unread = Unread("NVML: Unknown Error")
    if source.startswith("gpu:"):
        it["gpus"][1].values[source.removeprefix("gpu:")] = unread
        if name == "temperature":
            it["gpus"][1].values["temperature.gpu.tlimit"] = unread
    else:
        it.values[source] = unread
        if name in (
            "aer",
            "link-flaps",
            "transceiver",
            "stuck",
        ):  # they read kernel messages beside another source
            for other in ("aer", "ports", "nics", "processes.stuck"):
                it.values[other] = unread
    found = at(it, name)
    assert any(finding.verdict == UNKNOWN and "Unknown Error" in (finding.why or "") for finding in found), (
        found
    )


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_source_is_silent_about_is_unknown_and_not_judged_in_a_recording(name: str) -> None:
    empty = Device("gpu-1", {})
    assert {finding.verdict for finding in at(empty, name)} <= {UNKNOWN, SKIP}
    assert not [f for f in judge(empty, limits(), partial=True) if f.check == name and f.verdict != SKIP]


def test_a_pcie_card_without_a_bridge_has_no_broken_links() -> None:
    it = node()
    for gpu in it["gpus"]:
        gpu.values.update({"name": "NVIDIA H100 PCIe", "nvlink.links": [{"link": 0, "up": True}][:0]})
    assert {finding.verdict for finding in at(it, "nvlink-count")} == {SKIP}


def test_a_model_that_is_not_known_is_not_measured_with_the_limit_of_another() -> None:
    it = node()
    it["gpus"][0].values["name"] = "NVIDIA H300"
    assert at(it, "nvlink-count")[0].verdict == UNKNOWN


@pytest.mark.parametrize(
    ("product", "wanted", "same"),
    [
        ("NVIDIA H200", "H200", True),
        ("NVIDIA GH200 480GB", "H200", False),
        ("NVIDIA L40S", "L40", False),
        ("A100-SXM4-40GB", "a100-sxm-40gb", True),
        ("NVIDIA H100 80GB HBM3", "h100-sxm", True),
        ("NVIDIA H100 NVL", "h100-sxm", False),
    ],
)
def test_models_are_told_apart_by_whole_words(product: str, wanted: str, same: bool) -> None:
    assert limits().is_model(product, wanted) is same


def test_a_pcie_generation_below_the_greatest_is_judged_under_load_alone() -> None:
    it = node()
    it["gpus"][0].values.update({"pcie.link.gen.current": 1, "utilization.gpu": 0})
    it["gpus"][1].values.update({"pcie.link.gen.current": 1, "utilization.gpu": 100})
    found = {
        finding.subject: finding.verdict
        for finding in at(it, "pcie-link")
        if "generation" in f"{finding.read}{finding.why}"
    }
    assert found == {"GPU 0": SKIP, "GPU 1": FAIL}


def test_a_margin_that_a_cool_core_cannot_have_is_a_wrong_reading() -> None:
    it = node()
    it["gpus"][0].values.update({"temperature.gpu": 30, "temperature.gpu.tlimit": 0})
    assert at(it, "temperature")[0].verdict == UNKNOWN


def test_three_counts_tell_which_layer_lost_a_gpu() -> None:
    it = node()
    it["gpus"].pop()
    assert "the driver lost 0000:1c:00.0" in (at(it, "gpu-count")[0].why or "")
    it.values["pci.gpus"] = it["pci.gpus"][:1]
    assert "not on the bus" in (at(it, "gpu-count")[0].why or "")


def test_a_value_that_does_not_exist_is_skipped_with_its_reason() -> None:
    it = node()
    it["gpus"][0].values["remapped_rows.pending"] = Absent("NVML: Not Supported")
    found = at(it, "remap-pending")
    assert (found[0].verdict, found[0].why) == (SKIP, "NVML: Not Supported")


def test_thresholds_of_the_site_win_and_say_so() -> None:
    ours = limits(thresholds={"link_flaps": 10})
    assert (ours.value("link_flaps"), ours.source("link_flaps")) == (10, "the site file")
    assert "node health checks" in limits().source("link_flaps")


def test_the_table_in_the_manual_is_the_catalogue() -> None:
    manual = ROOT / "docs" / "health.md"
    assert table.renewed(manual.read_text()) == manual.read_text(), (
        "run python -m provision.health.table docs/health.md"
    )


def test_a_recording_of_two_real_gpus_has_no_false_alarm_and_tells_nearly_everything() -> None:
    """Recorded by the agent on a node with two H200, driver 580.159.04; identifiers replaced."""
    recorded = command.recorded((ROOT / "tests/gpu/recorded/health-h200-x2.json").read_text())
    found = judge(recorded, load({"gpus": 2, "model": "h200-sxm"}), partial=True)
    assert [each.line() for each in found if each.verdict not in (PASS, SKIP)] == []
    gpus = {each.check for each in found if each.verdict == PASS and each.subject.startswith("GPU")}
    assert len(gpus) >= 20
