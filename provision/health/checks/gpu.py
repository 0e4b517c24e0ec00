"""Checks of GPUs: presence, memory errors, repairs, clocks, temperature, power, modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from provision.health import xid
from provision.health.catalogue import Found, check, judged, passed, skipped, unknown
from provision.health.finding import FAIL, PASS, UNKNOWN, WARN
from provision.health.limits import Limits
from provision.health.readings import Device, Missing, Unwanted

# What nvidia-smi and NVML say when they cannot start, and what that means: part of the text -> name, action, advice
NVML_STATES = (
    (
        "version mismatch",
        "driver and library differ",
        "reboot",
        "an upgrade without a reboot: reboot, then hold the packages",
    ),
    (
        "communicate with the nvidia driver",
        "driver not loaded",
        "drain",
        "modprobe nvidia; dkms status; dmesg | grep NVRM; retry",
    ),
    (
        "driver not loaded",
        "driver not loaded",
        "drain",
        "modprobe nvidia; dkms status; dmesg | grep NVRM; retry",
    ),
    ("insufficient permissions", "no permission", "drain", "run it as root; ls -l /dev/nvidia*"),
    ("external power", "power cable", "drain", "connect the GPU's power cables"),
    ("irq", "interrupt problem", "reboot", "reboot; look at the firmware's interrupt settings"),
    ("shared library not found", "no NVML library", "drain", "install the driver's libraries; ldconfig"),
    ("couldn't find libnvidia-ml", "no NVML library", "drain", "install the driver's libraries; ldconfig"),
    ("inforom", "InfoROM corrupted", "rma", "reset once; if it stays, replace the GPU"),
    ("is lost", "GPU off the bus", "reboot", "drain, reboot; check seat, power and cooling"),
    ("no devices were found", "no GPU", "drain", "lspci -d 10de: ; dmesg | grep NVRM"),
    (
        "unknown error",
        "NVML fails",
        "drain",
        "in a container: restart it; on a node: dmesg | grep NVRM, reboot",
    ),
)


@check(
    1,
    "gpu-count",
    "GPU count",
    reads="NVML; PCI functions of class 03, vendor 10de in /sys/bus/pci",
    accepts="both as the site says",
    action="drain",
)
def gpu_count(node: Device, limits: Limits) -> Iterator[Found]:
    lost: list[str] = list(node.get("lost", ()))
    expected = limits.site.get("gpus")
    attached = node.get("attached_gpus")
    gpus = node["gpus"]
    model = limits.site.get("model")
    missing = f"lost {', '.join(lost)}" if lost else None
    total = expected if expected is not None else attached if attached is not None else len(gpus) + len(lost)
    if attached is not None and len(gpus) < attached and not lost and expected in (None, attached):
        yield unknown(
            f"{attached} are attached, {len(gpus)} are told: a recording that is not whole, or GPUs that do not answer",
            read=f"{len(gpus)} of {attached}",
            advice="nvidia-smi -L; record it again",
        )
        return
    if expected is None and attached is None and not lost and not node.told("pci.gpus"):
        yield passed(f"{len(gpus)}", why="not compared: the expected number was not given")
    elif lost or len(gpus) != total:
        on_bus = node.get("pci.gpus")
        layer = None
        if on_bus is not None and len(gpus) < int(str(total)):
            gone = sorted(set(on_bus) - {gpu.get("pci.bus_id") for gpu in gpus})
            layer = (
                f"{len(on_bus)} on the bus: the driver lost {', '.join(gone) or 'one'}"
                if len(on_bus) > len(gpus)
                else f"{len(on_bus)} on the bus: not on the bus"
            )
        why = "; ".join(part for part in (missing, layer) if part) or None
        yield Found(
            FAIL,
            f"{len(gpus)} of {total}",
            str(total),
            "lspci -d 10de: ; dmesg | grep -e NVRM -e AER; reboot",
            why,
        )
    elif node.told("pci.gpus") and len(node["pci.gpus"]) != len(gpus):
        yield Found(
            FAIL,
            f"{len(gpus)} by NVML, {len(node['pci.gpus'])} on the bus",
            str(total),
            "dmesg | grep NVRM; reboot",
        )
    else:
        yield passed(len(gpus), total)
    if model is not None:
        for gpu in gpus:
            product = gpu["name"]
            yield judged(
                limits.is_model(product, str(model)),
                product,
                model,
                subject=gpu.subject,
                advice="another GPU than the site file says: correct the one that is wrong",
            )


@check(
    2,
    "nvml",
    "NVML and nvidia-smi themselves",
    reads="nvmlInit, exit status and words of nvidia-smi",
    accepts="works",
    action="drain",
)
def nvml(node: Device, limits: Limits) -> Iterator[Found]:
    state = str(node["nvml"])
    if state == "ok":
        yield passed("ok")
        return
    for part, name, action, advice in NVML_STATES:
        if part in state.lower():
            yield Found(FAIL, name, "works", advice, state, action)
            return
    yield Found(UNKNOWN, state, "works", "dmesg | grep NVRM", "NVML says something that is not known")


@check(
    3,
    "inforom",
    "InfoROM",
    reads="nvidia-smi's warning, NVML's checksum",
    accepts="sound",
    action="rma",
    each="gpus",
    slow=True,
)
def inforom(gpu: Device, limits: Limits) -> Iterable[Found]:
    state = str(gpu["inforom.checksum_validation"])
    return [judged(state == "valid", state, "valid", advice="reset once; if it stays, replace the GPU")]


@check(
    4,
    "ecc-mode",
    "ECC mode",
    reads="NVML: current and pending",
    accepts="both enabled",
    action="reboot",
    each="gpus",
)
def ecc_mode(gpu: Device, limits: Limits) -> Iterable[Found]:
    current, pending = gpu["ecc.mode.current"], gpu.first("ecc.mode.pending", "ecc.mode.current")
    read = str(current) if current == pending else f"{current}, after a reboot {pending}"
    return [
        judged(
            current == pending == "Enabled",
            read,
            "Enabled",
            advice="nvidia-smi -e 1, then reboot (maintenance)",
        )
    ]


@check(
    5,
    "ecc-uncorrected",
    "uncorrected ECC errors since the last reset",
    reads="NVML: volatile total",
    accepts="0",
    action="reset",
    each="gpus",
)
def ecc_uncorrected(gpu: Device, limits: Limits) -> Iterable[Found]:
    return [_zero(gpu["ecc.errors.uncorrected.volatile.total"], advice=xid.ADVICE["reset"])]


@check(
    6,
    "sram-uncorrected",
    "uncorrected SRAM errors of its life",
    reads="NVML: aggregate (parity and SEC-DED where told apart)",
    accepts="<= 4",
    action="rma",
    each="gpus",
    thresholds=("sram_uncorrected_aggregate",),
)
def sram_uncorrected(gpu: Device, limits: Limits) -> Iterable[Found]:
    most = limits.value("sram_uncorrected_aggregate")
    count = gpu["ecc.errors.uncorrected.aggregate.sram"]
    return [judged(count <= most, count, f"<= {most}", advice=xid.ADVICE["rma"])]


@check(
    7,
    "sram-threshold",
    "SRAM error threshold exceeded",
    reads="NVML: flag",
    accepts="no",
    action="rma",
    each="gpus",
)
def sram_threshold(gpu: Device, limits: Limits) -> Iterable[Found]:
    return [_no(gpu["ecc.errors.uncorrected.aggregate.sram.thresholdExceeded"], advice=xid.ADVICE["rma"])]


@check(
    8,
    "ecc-corrected",
    "corrected SRAM and DRAM errors of its life",
    reads="NVML: aggregate",
    accepts="SRAM <= 10 M, DRAM <= 20 M",
    action="warn",
    each="gpus",
    thresholds=("sram_corrected", "dram_corrected"),
)
def ecc_corrected(gpu: Device, limits: Limits) -> Iterator[Found]:
    for memory, name in (("sram", "sram_corrected"), ("dram", "dram_corrected")):
        count, most = gpu[f"ecc.errors.corrected.aggregate.{memory}"], limits.value(name)
        yield judged(
            count <= most,
            f"{memory.upper()} {count}",
            f"<= {most}",
            verdict=WARN,
            advice="watch it; plan a field diagnostic",
        )


@check(
    9, "remap-pending", "row remapping pending", reads="NVML: flag", accepts="no", action="reset", each="gpus"
)
def remap_pending(gpu: Device, limits: Limits) -> Iterable[Found]:
    return [_no(gpu["remapped_rows.pending"], advice=xid.ADVICE["reset"])]


@check(
    10, "remap-failure", "row remapping failed", reads="NVML: flag", accepts="no", action="rma", each="gpus"
)
def remap_failure(gpu: Device, limits: Limits) -> Iterable[Found]:
    return [_no(gpu["remapped_rows.failure"], advice=xid.ADVICE["rma"])]


@check(
    11,
    "remapped-rows",
    "rows remapped for uncorrectable errors",
    reads="NVML: count",
    accepts="< 512",
    action="rma",
    each="gpus",
    thresholds=("remapped_uncorrectable",),
)
def remapped_rows(gpu: Device, limits: Limits) -> Iterable[Found]:
    count, most = gpu["remapped_rows.uncorrectable"], limits.value("remapped_uncorrectable")
    return [judged(count < most, count, f"< {most}", advice=xid.ADVICE["rma"])]


@check(
    12,
    "remap-banks",
    "banks without a spare row",
    reads="NVML: row remapper histogram",
    accepts="none",
    action="warn",
    each="gpus",
)
def remap_banks(gpu: Device, limits: Limits) -> Iterable[Found]:
    count = gpu["remapped_rows.histogram.none"]
    return [
        judged(
            count == 0,
            count,
            0,
            verdict=WARN,
            advice="the next error there cannot be remapped: plan a replacement",
        )
    ]


@check(
    13,
    "repair-pending",
    "channel or TPC repair pending, memory beyond repair",
    reads="NVML: flags",
    accepts="no",
    action="reset",
    each="gpus",
)
def repair_pending(gpu: Device, limits: Limits) -> Iterator[Found]:
    for name in ("channel_repair_pending", "tpc_repair_pending"):
        yield _no(gpu[name], what=name.replace("_", " "), advice=xid.ADVICE["reset"])
    if gpu.told("unrepairable_memory"):
        yield _no(
            gpu["unrepairable_memory"], what="unrepairable memory", advice=xid.ADVICE["rma"], action="rma"
        )


@check(
    14,
    "retired-pages",
    "retired pages (before Ampere)",
    reads="NVML: single and double bit, pending",
    accepts="< 63, double bit <= 15, none pending",
    action="rma",
    each="gpus",
    thresholds=("retired_pages", "retired_double_bit"),
)
def retired_pages(gpu: Device, limits: Limits) -> Iterator[Found]:
    single, double = gpu["retired_pages.single_bit_ecc.count"], gpu["retired_pages.double_bit.count"]
    most, most_double = limits.value("retired_pages"), limits.value("retired_double_bit")
    yield judged(single + double < most, f"{single + double} pages", f"< {most}", advice=xid.ADVICE["rma"])
    yield judged(
        double <= most_double, f"{double} by double bit errors", f"<= {most_double}", advice=xid.ADVICE["rma"]
    )
    yield _no(gpu["retired_pages.pending"], what="pending", action="reboot", advice="drain, reboot")


@check(
    15,
    "recovery-action",
    "what the driver itself asks for",
    reads="NVML: GPU recovery action",
    accepts="None",
    action="reset",
    each="gpus",
)
def recovery_action(gpu: Device, limits: Limits) -> Iterable[Found]:
    words = str(gpu["gpu_recovery_action"])
    known = xid.recovery(words)
    if known is None:
        return [
            unknown(f"the driver asks for {words!r}, which is not known", advice="treat the node as suspect")
        ]
    verdict, action = known
    return [
        judged(
            verdict == PASS,
            words,
            "None",
            action=action,
            advice=xid.ADVICE[action or "warn"],
            why=f"{action} asked for by the driver",
        )
    ]


@check(
    31,
    "slowdown",
    "clocks held down by the hardware",
    reads="NVML: clock event reasons",
    accepts="no HW slowdown, thermal slowdown, power brake",
    action="drain",
    each="gpus",
)
def slowdown(gpu: Device, limits: Limits) -> Iterator[Found]:
    hard = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
    told = [name for name in (*hard, "sw_thermal_slowdown") if gpu.told(f"clocks_event_reasons.{name}")]
    active = [name for name in told or hard if gpu[f"clocks_event_reasons.{name}"] == "Active"]
    bad = [name for name in active if name in hard]
    if bad:
        advice = (
            "power supply and cables"
            if "hw_power_brake_slowdown" in bad
            else "fans, air flow, coolant, heat sink"
        )
        yield Found(FAIL, ", ".join(bad), "none active", advice)
    elif active:
        yield Found(WARN, "sw_thermal_slowdown", "none active", "fans, air flow, coolant", None, "warn")
    else:
        cap = gpu.get("clocks_event_reasons.sw_power_cap") == "Active"
        yield passed("none active", why="at the power cap, as under full load" if cap else None)


@check(
    32,
    "sm-clock",
    "SM clock under load",
    reads="NVML: SM clock of GPUs at full use, without power cap",
    accepts=">= 0.95 of the median",
    action="warn",
    thresholds=("clock_share_of_median",),
)
def sm_clock(node: Device, limits: Limits) -> Iterator[Found]:
    share = limits.value("clock_share_of_median")
    clocks = {}
    for gpu in node["gpus"]:
        if (
            gpu.get("utilization.gpu", 0) >= 95
            and gpu.get("clocks_event_reasons.sw_power_cap") == "Not Active"
        ):
            clocks[gpu.subject] = float(gpu["clocks.sm"])
    if len(clocks) < 3:
        raise Unwanted("fewer than 3 GPUs at full use and below their power cap: nothing to compare")
    median = sorted(clocks.values())[len(clocks) // 2]
    for subject, clock in clocks.items():
        yield judged(
            clock >= share * median,
            f"{clock:.0f} MHz",
            f">= {share * median:.0f} MHz ({share} of the median)",
            verdict=WARN,
            subject=subject,
            advice="nvidia-smi -q -d CLOCK,PERFORMANCE: locked clocks? temperature?",
        )


@check(
    33,
    "temperature",
    "temperature of core and memory",
    reads="NVML: margin to the GPU's own slowdown",
    accepts="above slowdown, by more than 5 C",
    action="drain",
    each="gpus",
    thresholds=("temperature_margin", "cool"),
)
def temperature(gpu: Device, limits: Limits) -> Iterator[Found]:
    near = limits.value("temperature_margin")
    now = gpu["temperature.gpu"]
    try:
        margin, at = (
            gpu["temperature.gpu.tlimit"],
            gpu.get("temperature.tlimit.slowdown", limits.value("slowdown_margin")),
        )
        left, expected = margin - at, f"margin above {at} C by more than {near} C"
        read = f"{now} C, margin {margin} C"
        if margin <= 0 and now < limits.value("cool"):
            yield unknown(f"{read}: a cool core has a margin; the reading is wrong", read=read)
            return
    except Missing:
        if gpu.get("temperature.slowdown") is None:
            yield passed(f"{now} C", why="not compared: the GPU's thresholds are not told")
            return
        at = gpu["temperature.slowdown"]
        left, expected, read = at - now, f"below {at} C by more than {near} C", f"{now} C"
    advice = "fans, air flow, coolant, heat sink"
    if left <= 0:
        yield Found(FAIL, read, expected, advice)
    else:
        yield judged(left > near, read, expected, verdict=WARN, action="warn", advice=advice)
    if gpu.get("temperature.memory") is not None and gpu.get("temperature.memory.max_operating") is not None:
        memory, most = gpu["temperature.memory"], gpu["temperature.memory.max_operating"]
        yield judged(
            memory < most, f"memory {memory} C", f"below {most} C", verdict=WARN, action="warn", advice=advice
        )


@check(
    34,
    "power-limit",
    "power limit",
    reads="NVML: enforced and default",
    accepts="equal",
    action="fix",
    each="gpus",
    fixable=True,
)
def power_limit(gpu: Device, limits: Limits) -> Iterable[Found]:
    now, default = gpu.first("enforced.power.limit", "power.limit"), gpu["power.default_limit"]
    allowed = limits.site.get("power_limit", default)
    return [
        judged(
            abs(now - float(str(allowed))) < 1,
            f"{now:g} W",
            f"{float(str(allowed)):g} W",
            verdict=WARN,
            advice="nvidia-smi -pl, to what the site says",
        )
    ]


@check(
    35,
    "persistence",
    "persistence mode",
    reads="NVML: persistence mode",
    accepts="on",
    action="fix",
    each="gpus",
    fixable=True,
)
def persistence(gpu: Device, limits: Limits) -> Iterable[Found]:
    mode = gpu["persistence_mode"]
    return [
        judged(mode == "Enabled", mode, "Enabled", verdict=WARN, advice="systemctl start nvidia-persistenced")
    ]


@check(
    36,
    "uniform",
    "one VBIOS and driver for GPUs of one model",
    reads="NVML: VBIOS, driver; the site's version lock",
    accepts="one value",
    action="warn",
)
def uniform(node: Device, limits: Limits) -> Iterator[Found]:
    firmware: dict[str, set[str]] = {}
    for gpu in node["gpus"]:
        if gpu.get("vbios_version") is not None:
            firmware.setdefault(gpu.get("name", "?"), set()).add(gpu["vbios_version"])
    for product, versions in firmware.items():
        yield judged(
            len(versions) == 1,
            f"{product}: VBIOS {', '.join(sorted(versions))}",
            "one version",
            verdict=WARN,
            advice="update the odd one (maintenance)",
        )
    if limits.site.get("driver") is not None:
        driver = node["driver_version"]
        yield judged(
            driver == limits.site["driver"],
            f"driver {driver}",
            limits.site["driver"],
            verdict=WARN,
            advice="provision apply, then a reboot (maintenance)",
        )
    elif not firmware:
        raise Unwanted("nothing to compare")


@check(
    40,
    "gpu-modes",
    "MIG and compute mode",
    reads="NVML: current and pending",
    accepts="as the site says",
    action="warn",
    each="gpus",
)
def gpu_modes(gpu: Device, limits: Limits) -> Iterator[Found]:
    current, pending = gpu["mig.mode.current"], gpu.get("mig.mode.pending")
    advice = "change it in maintenance: MIG, then the scheduler's configuration, then resume"
    if pending is not None and pending != current:
        yield Found(WARN, f"MIG {current}, after a reset {pending}", "no change pending", advice)
    elif limits.site.get("mig") is not None:
        expected = "Enabled" if limits.site["mig"] not in (False, "none") else "Disabled"
        yield judged(current == expected, f"MIG {current}", f"MIG {expected}", verdict=WARN, advice=advice)
    else:
        yield passed(f"MIG {current}", why="not compared: the site does not say which")
    if limits.site.get("compute_mode") is not None:
        mode = gpu["compute_mode"]
        yield judged(
            mode == limits.site["compute_mode"],
            f"compute mode {mode}",
            limits.site["compute_mode"],
            verdict=WARN,
            advice="nvidia-smi -c",
        )


@check(
    41,
    "left-over",
    "processes and memory left over from jobs",
    reads="NVML: compute processes and their control group; memory used against the idle baseline",
    accepts="no process without a job; memory as at idle",
    action="drain",
    each="gpus",
    thresholds=("idle_memory_mib",),
)
def left_over(gpu: Device, limits: Limits) -> Iterator[Found]:
    processes = gpu["processes"]
    strays = [process for process in processes if process.get("job") is None and not process.get("service")]
    if strays:
        told = ", ".join(
            f"pid {process['pid']} {process['name']} {process['memory']} MiB" for process in strays[:4]
        )
        yield Found(FAIL, told, "no process without a job", "end them; what ended their job? then resume")
        return
    yield passed(f"{len(processes)} of jobs" if processes else "none", "no process without a job")
    if not processes and gpu.told("memory.idle"):
        used, idle = gpu["memory.used"], gpu["memory.idle"]
        most = idle + limits.value("idle_memory_mib")
        yield judged(
            used <= most,
            f"{used} MiB used with no process",
            f"<= {most} MiB",
            advice="fuser -v /dev/nvidia*; reset the GPU in maintenance",
        )


@check(
    38,
    "libraries",
    "libraries of the driver can be loaded",
    reads="libcuda.so.1 and libnvidia-ml.so.1: size, dlopen",
    accepts="loaded",
    action="drain",
)
def libraries(node: Device, limits: Limits) -> Iterator[Found]:
    no_cuda = limits.site.get("cannot", {}).get("cuda")
    for name, state in node["libraries"].items():
        if name.startswith("libcuda") and no_cuda is not None:
            yield skipped(no_cuda, subject=f"{node.subject} {name}")
            continue
        yield judged(
            state == "ok", f"{name}: {state}", "loaded", advice="reinstall the driver's libraries; ldconfig"
        )


@check(
    39,
    "cuda",
    "CUDA starts; memory can be allocated, written and read back",
    reads="libcuda: cuInit, 64 MiB on each GPU",
    accepts="read as written",
    action="drain",
    slow=True,
    needs="cuda",
)
def cuda(node: Device, limits: Limits) -> Iterator[Found]:
    for subject, state in node["cuda"].items():
        yield judged(
            state == "ok",
            state,
            "read as written",
            subject=f"{node.subject} {subject}",
            advice="802: fabric manager; 46, 2: who holds it? otherwise reset, reboot",
        )


@check(
    63,
    "container",
    "a GPU in a container",
    reads="the container runtime's own self-test",
    accepts="lists the GPUs",
    action="drain",
    slow=True,
)
def container(node: Device, limits: Limits) -> Iterable[Found]:
    state = node["container"]
    return [
        judged(
            state == "ok", state, "lists the GPUs", advice="nvidia-container-cli info; nvidia-ctk cdi list"
        )
    ]


def _zero(count: int, *, advice: str) -> Found:
    return judged(count == 0, count, 0, advice=advice)


def _no(flag: object, *, advice: str, what: str = "", action: str | None = None) -> Found:
    text = {True: "yes", False: "no"}.get(flag, str(flag)) if isinstance(flag, bool) else str(flag)
    read = f"{what} {text}".strip()
    return judged(text.lower() in ("no", "0"), read, "no", advice=advice, action=action)


@check(
    74,
    "device-holders",
    "processes that hold a GPU's device file without a job",
    reads="/proc/*/fd",
    accepts="none but services and jobs",
    action="drain",
)
def device_holders(node: Device, limits: Limits) -> Iterator[Found]:
    strays = [each for each in node["device.holders"] if each["job"] is None and not each["service"]]
    told = "; ".join(
        f"pid {each['pid']} {each['name']} holds {', '.join(each['devices'])}" for each in strays[:4]
    )
    yield judged(
        not strays, told or "none", "none without a job", advice="end them; what ended their job? then resume"
    )
