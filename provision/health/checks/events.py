"""Checks of what the kernel and daemons beside it reported since boot or since somebody acknowledged it."""

from __future__ import annotations

from collections.abc import Iterator

from provision.health import xid
from provision.health.catalogue import Found, check, judged, passed, unknown
from provision.health.finding import FAIL, PASS, WARN
from provision.health.kernel import Event
from provision.health.limits import Limits
from provision.health.readings import Device

_KERNEL = "kernel messages since boot"


def _of(node: Device, *kinds: str) -> list[Event]:
    return [event for event in node["kernel.events"] if event.kind in kinds]


def _told(event: Event) -> str:
    times = f" ({event.count} times)" if event.count > 1 else ""
    return f"{event.text.strip()[:160] or event.kind}{times}"


def _subject(node: Device, event: Event) -> str:
    return f"{node.subject} {event.device}" if event.device else node.subject


def _report(
    node: Device, kinds: list[str], verdict: str, advice: str, clear: str, action: str | None = None
) -> Iterator[Found]:
    """One finding an event, or PASS where there is none."""
    found = _of(node, *kinds)
    if not found:
        yield passed(clear)
    for event in found:
        yield Found(verdict, _told(event), clear, advice, action=action, subject=_subject(node, event))


@check(
    16,
    "xid",
    "XIDs",
    reads=_KERNEL,
    accepts="none but those of applications and those to be ignored",
    action="reset",
    thresholds=("application_xid_jobs",),
)
def xids(node: Device, limits: Limits) -> Iterator[Found]:
    found = _of(node, "xid")
    history = node.get("xid.actions", {})  # "device number" -> action -> how often it was taken
    jobs = int(limits.value("application_xid_jobs"))
    garbled = _of(node, "garbled")
    if not found and not garbled:
        yield passed("no XID")
    for event in garbled:
        why = f"an XID whose number cannot be read: {event.text.strip()[:80]}"
        yield unknown(why, advice="dmesg | grep -i xid", subject=_subject(node, event))
    for event in found:
        judged_ = xid.judge(event, found, history.get(f"{event.device} {event.number}", {}), jobs)
        times = f", {event.count} times" if event.count > 1 else ""
        yield Found(
            judged_.verdict,
            f"XID {event.number}{times}: {event.text[:120]}",
            "no XID that asks for something",
            xid.ADVICE[judged_.action or "fix"] or None,
            judged_.why,
            judged_.action,
            _subject(node, event),
        )
    for device in sorted({event.device for event in found}):
        applications = [
            e for e in found if e.device == device and xid.table().get(e.number or 0) == "application"
        ]
        pids = {pid for event in applications for pid in event.pids}
        if len(pids) >= jobs and len(applications) > 1:
            yield Found(
                WARN,
                f"application errors of {len(pids)} processes",
                f"fewer than {jobs}",
                "not one program's fault: field diagnostic",
                action="warn",
                subject=f"{node.subject} {device}",
            )


@check(17, "off-bus", "a GPU off the bus without an XID", reads=_KERNEL, accepts="none", action="reboot")
def off_bus(node: Device, limits: Limits) -> Iterator[Found]:
    told = {event.device for event in _of(node, "xid") if event.number == 79}
    found = [event for event in _of(node, "off-bus") if event.device not in told]
    if not found:
        yield passed("none")
    for event in found:
        yield Found(
            FAIL,
            "GPU has fallen off the bus",
            "none",
            xid.ADVICE["reboot"],
            "critical, as XID 79",
            subject=_subject(node, event),
        )


@check(18, "sxid", "SXIDs of NVSwitch", reads=_KERNEL, accepts="no fatal one", action="reboot")
def sxids(node: Device, limits: Limits) -> Iterator[Found]:
    found = [event for event in _of(node, "sxid") if not event.text.startswith("Data ")]
    if not found:
        yield passed("no SXID")
    for event in found:
        fatal = not event.text.startswith("Non-fatal")
        yield Found(
            FAIL if fatal else WARN,
            f"SXID {event.number}: {_told(event)}",
            "no fatal SXID",
            "drain, reset all GPUs and NVSwitches or reboot" if fatal else "look at that link's errors",
            action="reboot" if fatal else "warn",
            subject=_subject(node, event),
        )


@check(
    28,
    "downtrain",
    "a PCIe link trained below what it could",
    reads=_KERNEL,
    accepts="no such line",
    action="reboot",
)
def downtrain(node: Device, limits: Limits) -> Iterator[Found]:
    return _report(
        node, ["downtrain"], FAIL, "reseat the card or its riser; compare lspci -vv LnkSta", "no such line"
    )


@check(44, "peermem", "peer memory lost its context", reads=_KERNEL, accepts="no such line", action="reboot")
def peermem(node: Device, limits: Limits) -> Iterator[Found]:
    return _report(
        node, ["peermem"], FAIL, "drain, reboot: GPUDirect RDMA does not work any more", "no such line"
    )


@check(
    61,
    "oom-panic",
    "processes ended for want of memory, crashes",
    reads="kernel messages; /sys/fs/pstore",
    accepts="none",
    action="warn",
)
def oom_panic(node: Device, limits: Limits) -> Iterator[Found]:
    found = _of(node, "oom", "panic")
    records = node.get("pstore", ())
    for event in found:
        advice = (
            "which job? its memory request"
            if event.kind == "oom"
            else "keep the record, look for firmware and driver"
        )
        yield Found(WARN, _told(event), "none", advice)
    if records:
        yield Found(
            WARN, f"{len(records)} crash records in /sys/fs/pstore", "none", "read, keep, then remove them"
        )
    if not found and not records:
        yield passed("none")


@check(66, "machine-check", "machine checks", reads=_KERNEL, accepts="none", action="drain")
def machine_check(node: Device, limits: Limits) -> Iterator[Found]:
    return _report(node, ["machine-check"], FAIL, "rasdaemon or the BMC's event log names the part", "none")


@check(
    67, "driver-start", "the driver starts every GPU", reads=_KERNEL, accepts="no failure", action="reboot"
)
def driver_start(node: Device, limits: Limits) -> Iterator[Found]:
    failed = _of(node, "rm-init", "api-mismatch", "open-module-wanted", "uvm-fatal")
    if not failed:
        yield passed("no failure")
    for event in failed:
        license_ = node.get("module.license")
        advice = "reboot; if it stays: driver version, firmware, or another slot"
        why = None
        if event.kind == "uvm-fatal":
            why = "unified memory has failed for good on this boot"
            advice = "drain, reboot; look for the XID before it"
        if event.kind == "api-mismatch":
            why = "library and kernel module are of different versions"
            advice = "an upgrade without a reboot: reboot, then hold the packages"
        if (
            event.kind == "open-module-wanted"
            or any(e.number == 169 for e in _of(node, "xid"))
            or license_ == "NVIDIA"
        ):
            why = "a GPU of this generation needs the open kernel modules"
            advice = "install the open flavour of the same driver version, then reboot"
        yield Found(FAIL, _told(event), "no failure", advice, why, subject=_subject(node, event))


@check(
    68,
    "rdma-modules",
    "peer memory was built for this RDMA stack",
    reads=_KERNEL,
    accepts="no such line",
    action="drain",
)
def rdma_modules(node: Device, limits: Limits) -> Iterator[Found]:
    return _report(
        node,
        ["peermem-symbol"],
        FAIL,
        "the RDMA stack came after the driver: rebuild the driver's modules (dkms), then load nvidia_peermem",
        "no unknown symbol",
    )


@check(
    69,
    "application-crash",
    "crashes of programs",
    reads=_KERNEL,
    accepts="not judged: an application's fault",
    action="warn",
)
def application_crash(node: Device, limits: Limits) -> Iterator[Found]:
    found = _of(node, "segfault")
    for event in found:
        yield Found(PASS, _told(event), None, why="an application's fault, not the hardware's")
    if not found:
        yield passed("none")


@check(
    70,
    "user-namespaces",
    "containers of users may make namespaces",
    reads=_KERNEL,
    accepts="no denial",
    action="warn",
)
def user_namespaces(node: Device, limits: Limits) -> Iterator[Found]:
    return _report(
        node,
        ["userns-denied"],
        WARN,
        "AppArmor restricts user namespaces: kernel.apparmor_restrict_unprivileged_userns=0, or a profile",
        "no denial",
    )


@check(
    21,
    "fabric-version",
    "fabric manager of the driver's version",
    reads="fabric manager's words, its version and the driver's",
    accepts="equal",
    action="drain",
)
def fabric_version(node: Device, limits: Limits) -> Iterator[Found]:
    refused = _of(node, "fabric-version") if node.told("kernel.events") else []
    advice = (
        "install the fabric manager of exactly the driver's version, drained; then reset all GPUs or reboot"
    )
    for event in refused:
        yield Found(FAIL, event.text.strip()[:160], "equal versions", advice)
    if not refused and (node.told("fabricmanager.version") or not node.told("kernel.events")):
        have, driver = node["fabricmanager.version"], node["driver_version"]
        yield judged(have == driver, f"fabric manager {have}, driver {driver}", "equal", advice=advice)


# what the kernel complains of and no other check judges: kind -> what to do
_COMPLAINTS = {
    "hardware-corrected": "watch it; replace the part if it goes on: rasdaemon, the BMC's event log",
    "cpu-throttled": "fans, air flow; the BMC's temperatures",
    "nvme-slow": "nvme smart-log; firmware of the drive; replace it if it goes on",
    "file-limit": "who holds them? lsof; fs.file-max",
    "server-silent": "the file server, and the network to it",
    "iommu-fault": "which device is it? IOMMU off or passthrough for GPUDirect; its driver and firmware",
    "nvlink": "nvidia-smi nvlink -s; the fabric manager's log; reset all GPUs if links are down",
    "slot-down": "which card was in that slot? power, seat, riser; lspci -t",
    "nothing-driven": "is nouveau or vfio-pci bound to the GPUs? lspci -nnk -d 10de:",
}


@check(
    75,
    "kernel-complaints",
    "other complaints of the kernel",
    reads=_KERNEL,
    accepts="none about memory, temperature, slots, NVMe, open files, file servers, IOMMU, NVLink",
    action="warn",
)
def kernel_complaints(node: Device, limits: Limits) -> Iterator[Found]:
    found = _of(node, *_COMPLAINTS)
    if not found:
        yield passed("none")
    for event in found:
        yield Found(WARN, _told(event), "none", _COMPLAINTS[event.kind], subject=_subject(node, event))
