"""Checks of the machine around the GPUs: CPUs, memory, disks, clock, services, scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from provision.health.catalogue import Found, check, judged, passed, skipped, unknown, wanted
from provision.health.finding import FAIL, WARN
from provision.health.limits import Limits
from provision.health.readings import Device, NotApplicable


@check(
    51,
    "numa",
    "NUMA nodes, locality of GPUs and NICs",
    reads="/sys/devices/system/node; numa_node of PCI devices",
    accepts="as the site says",
    action="drain",
)
def numa(node: Device, limits: Limits) -> Iterator[Found]:
    count = node["numa.nodes"]
    yield judged(
        count == wanted(limits.site, "numa"),
        f"{count} nodes",
        f"{limits.site['numa']} nodes",
        advice="a CPU or memory module is off; or NPS/SNC of the firmware differs",
    )


@check(
    52,
    "cpu-memory",
    "CPUs and memory",
    reads="/sys/devices/system/cpu/online, MemTotal",
    accepts="CPUs equal; memory within 3 %",
    action="drain",
    thresholds=("memory_tolerance",),
)
def cpu_memory(node: Device, limits: Limits) -> Iterator[Found]:
    hardware = wanted(limits.site, "hardware")
    cpus, memory = node["cpus"], node["memory.total"]
    share = limits.value("memory_tolerance")
    yield judged(
        cpus == hardware["cpus"],
        f"{cpus} CPUs",
        str(hardware["cpus"]),
        advice="SMT in firmware, a CPU is off; lscpu",
    )
    least = hardware["memory"] * (1 - share)
    yield judged(
        memory >= least,
        f"{memory} MiB",
        f">= {least:.0f} MiB",
        advice="a memory module is off: dmidecode -t memory, BMC",
    )


@check(
    53,
    "governor",
    "CPU governor",
    reads="/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    accepts="as the site says",
    action="fix",
    fixable=True,
    needs="governor",
)
def governor(node: Device, limits: Limits) -> Iterator[Found]:
    found = node["governors"]
    if not found:
        raise NotApplicable("no frequency control here")
    expected = wanted(limits.site, "governor")
    yield judged(
        set(found) == {expected},
        ", ".join(sorted(found)),
        expected,
        verdict=WARN,
        advice="cpupower frequency-set -g",
    )


@check(
    54,
    "memory-errors",
    "memory errors",
    reads="/sys/devices/system/edac/mc*/ue_count, ce_count against the baseline",
    accepts="no uncorrected one",
    action="drain",
)
def memory_errors(node: Device, limits: Limits) -> Iterator[Found]:
    for controller in node["edac"]:
        worse, corrected = controller["ue"], controller.get("ce.delta", 0)
        yield judged(
            worse == 0,
            f"{worse} uncorrected",
            "0",
            advice="replace the module that the BMC's event log names",
            subject=controller.subject,
        )
        if corrected:
            yield Found(
                WARN,
                f"{corrected} new corrected errors",
                "few",
                "watch it; replace the module if it goes on",
                action="warn",
                subject=controller.subject,
            )
    if not node["edac"]:
        raise NotApplicable("no memory controller driver (EDAC) is loaded")


@check(
    55,
    "bmc-events",
    "the BMC's event log",
    reads="ipmitool sel, new since the acknowledgement",
    accepts="no critical entry",
    action="warn",
    slow=True,
)
def bmc_events(node: Device, limits: Limits) -> Iterator[Found]:
    found = node["bmc.events"]
    yield judged(
        not found,
        "; ".join(found[:3]) or "none",
        "no critical entry",
        verdict=WARN,
        advice="mend what it names; then provision-health acknowledge",
    )


@check(
    56,
    "nvme",
    "NVMe drives",
    reads="/sys/class/nvme; SMART log by ioctl",
    accepts="all there, no critical warning, spare above its threshold",
    action="drain",
)
def nvme(node: Device, limits: Limits) -> Iterator[Found]:
    drives = node["nvme"]
    expected = limits.site.get("nvme")
    if expected is not None:
        yield judged(
            len(drives) == expected,
            f"{len(drives)} drives",
            str(expected),
            advice="reseat the missing drive; nvme list",
        )
    elif not drives:
        raise NotApplicable("no NVMe drive here")
    for drive in drives:
        if drive.get("state", "live") != "live":
            yield Found(FAIL, drive["state"], "live", "nvme reset; replace the drive", subject=drive.subject)
            continue
        warning, spare, least = drive["critical_warning"], drive["available_spare"], drive["spare_threshold"]
        fine = warning == 0 and spare >= least
        yield judged(
            fine,
            f"warning {warning:#x}, spare {spare} %",
            f"0x0, spare >= {least} %",
            subject=drive.subject,
            advice="copy what is on it, replace the drive",
        )


@check(
    57,
    "filesystems",
    "file systems",
    reads="/proc/self/mountinfo, statvfs, a file written; kernel messages",
    accepts="expected mounts present and writable, < 90 % used, no I/O errors",
    action="drain",
    thresholds=("filesystem_used",),
)
def filesystems(node: Device, limits: Limits) -> Iterator[Found]:
    bad = False
    if node.told("kernel.events"):
        for event in node["kernel.events"]:
            if event.kind in ("io-error", "read-only", "nvme"):
                bad = True
                yield Found(
                    FAIL,
                    f"{event.text.strip()[:140]} ({event.count} times)",
                    "no I/O error",
                    "smartctl or nvme smart-log; fsck; replace the drive",
                    subject=f"{node.subject} {event.device}".strip(),
                )
    if not node.told("filesystems"):
        node["kernel.events"]
        if not bad:
            yield passed("no I/O error")
        return
    most = limits.value("filesystem_used")
    for system in node["filesystems"]:
        mounted = system["mounted"]
        if not mounted:
            yield Found(
                FAIL,
                "not mounted",
                "mounted",
                "mount it; systemctl status of its mount unit",
                subject=system.subject,
            )
            continue
        if system.get("read_only"):
            yield Found(
                FAIL, "read-only", "writable", "dmesg says why; fsck, or the server", subject=system.subject
            )
            continue
        if system.told("writable"):
            error = system["writable"]
            if error != "yes":
                yield Found(
                    FAIL,
                    f"a file cannot be written: {error}",
                    "writable",
                    "df -h, df -i; dmesg",
                    subject=system.subject,
                )
                continue
        used = max(system["used"], system.get("inodes", 0.0))
        yield judged(
            used < most,
            f"{used:.0%} used",
            f"< {most:.0%}",
            verdict=FAIL if used >= 0.99 else WARN,
            action="drain" if used >= 0.99 else "warn",
            advice="du -xsh; remove what nobody needs",
            subject=system.subject,
        )


@check(
    58, "swap", "swap", reads="SwapTotal", accepts="off, where the site says so", action="warn", needs="swap"
)
def swap(node: Device, limits: Limits) -> Iterator[Found]:
    total = node["swap.total"]
    expected = wanted(limits.site, "swap")
    if expected:
        yield passed(f"{total} MiB", "allowed")
    else:
        yield judged(total == 0, f"{total} MiB", "off", verdict=WARN, advice="swapoff -a; /etc/fstab")


@check(
    59,
    "clock",
    "clock",
    reads="adjtimex, /sys/devices/system/clocksource",
    accepts="synchronised, < 100 ms off, a steady clock source",
    action="drain",
    thresholds=("clock_offset_ms",),
    needs="clock",
)
def clock(node: Device, limits: Limits) -> Iterator[Found]:
    most = limits.value("clock_offset_ms")
    advice = "chronyc tracking, chronyc sources; systemctl restart chrony"
    yield judged(
        node["clock.synchronised"],
        "synchronised" if node["clock.synchronised"] else "not synchronised",
        "synchronised",
        advice=advice,
    )
    offset = node["clock.offset_ms"]
    yield judged(abs(offset) < most, f"{offset:.1f} ms off", f"< {most} ms", advice=advice)
    source = node["clocksource"]
    yield judged(
        source not in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"),
        source,
        "tsc or the hypervisor's",
        verdict=WARN,
        action="warn",
        advice="firmware found the TSC unsteady: dmesg | grep -i tsc",
    )


@check(
    60,
    "stuck",
    "stuck processes and CPUs",
    reads="/proc/*/stat; kernel messages",
    accepts="no process waits for a device over 300 s; no lockup",
    action="drain",
    thresholds=("stuck_seconds",),
)
def stuck(node: Device, limits: Limits) -> Iterator[Found]:
    bad = False
    if node.told("kernel.events"):
        for event in node["kernel.events"]:
            if event.kind in ("lockup", "hung-task"):
                bad = True
                yield Found(
                    FAIL,
                    f"{event.text.strip()[:120]} ({event.count} times)",
                    "none",
                    "drain, keep dmesg, reboot",
                    action="reboot" if event.kind == "lockup" else "drain",
                )
    if node.told("processes.stuck"):
        long = limits.value("stuck_seconds")
        for process in node["processes.stuck"]:
            if process["state"] == "Z":
                bad = True
                yield Found(
                    WARN,
                    f"zombies: {process['name']}",
                    "none",
                    "its parent does not collect it",
                    action="warn",
                )
            elif process["seconds"] >= long:
                bad = True
                again = process.get("readings", 1) > 3
                yield Found(
                    FAIL,
                    f"pid {process['pid']} {process['name']} waits for {process['seconds']:.0f} s",
                    f"< {long} s",
                    "cat /proc/PID/stack: storage, GPU? reboot if it stays",
                    action="reboot" if again else "drain",
                )
    elif not node.told("kernel.events"):
        node["processes.stuck"]
    if not bad:
        yield passed("none")


@check(62, "services", "services", reads="systemd", accepts="active", action="fix", fixable=True)
def services(node: Device, limits: Limits) -> Iterator[Found]:
    states = node["services"]
    names = limits.site.get("services", sorted(states))
    if not names:
        raise NotApplicable("the site names no services")
    for name in names:
        state = states.get(name, "not installed")
        advice = f"systemctl status {name}; journalctl -u {name} -n 30"
        restarts = node.get("services.restarts", {}).get(name, 0)
        if restarts >= 3:
            yield Found(
                FAIL,
                f"{name}: restarted {restarts} times",
                "active",
                advice,
                "it ends again and again",
                "drain",
            )
        else:
            yield judged(state == "active", f"{name}: {state}", "active", advice=advice)


@check(
    64,
    "scheduler",
    "what the scheduler says of this node",
    reads="scontrol show node",
    accepts="no reason but this tool's own",
    action="warn",
)
def scheduler(node: Device, limits: Limits) -> Iterator[Found]:
    slurm = node["slurm"]
    state, reason = slurm["state"], slurm.get("reason")
    if reason and not str(reason).startswith(str(limits.site.get("mark", "provision:"))):
        yield Found(
            WARN, f"{state}: {reason}", "no reason of others", "who set it? this tool leaves it alone"
        )
    elif "NOT_RESPONDING" in state or "INVALID" in state:
        yield Found(
            FAIL, state, "a node that answers", "systemctl status slurmd munge; slurmd -C", action="drain"
        )
    else:
        yield passed(state if not reason else f"{state}: {reason}", "no reason of others")


@check(
    65,
    "slurm-memory",
    "memory against Slurm's",
    reads="MemTotal, MemAvailable; RealMemory and MemSpecLimit of the node",
    accepts="what jobs may have is there",
    action="drain",
    thresholds=("slurm_memory_reserve",),
    needs="memory",
)
def slurm_memory(node: Device, limits: Limits) -> Iterator[Found]:
    real = wanted(limits.site, "real_memory")
    total = node["memory.total"]
    yield judged(
        total >= real,
        f"{total} MiB",
        f">= RealMemory {real} MiB",
        advice="a memory module is off, or RealMemory is wrong: slurmd -C, dmidecode -t memory",
    )
    if node.get("jobs") == 0:
        reserve = limits.value("slurm_memory_reserve")
        least = real - limits.site.get("mem_spec_limit", 0) - reserve * real
        available = node["memory.available"]
        yield judged(
            available >= least,
            f"{available} MiB available at idle",
            f">= {least:.0f} MiB",
            advice="who holds it? ps, /dev/shm, huge pages, slabs",
        )


@check(
    71,
    "shared-memory",
    "shared memory left over from jobs",
    reads="/dev/shm, /proc/sysvipc/shm at idle",
    accepts="< 1 % of memory",
    action="fix",
    fixable=True,
    needs="memory",
)
def shared_memory(node: Device, limits: Limits) -> Iterator[Found]:
    if node["jobs"] != 0:
        yield skipped("a job runs")
        return
    used, total = node["shm.used"], node["memory.total"]
    yield judged(
        used < total / 100,
        f"{used} MiB",
        f"< {total // 100} MiB",
        verdict=WARN,
        advice="remove files of ended jobs in /dev/shm; ipcrm",
    )


@check(
    72,
    "own-name",
    "the node's own name resolves",
    reads="/etc/hosts, DNS",
    accepts="an address",
    action="drain",
)
def own_name(node: Device, limits: Limits) -> Iterator[Found]:
    found = node["own_name"]
    if not found:
        yield Found(FAIL, "not resolvable", "an address", "provision apply -c base writes /etc/hosts")
    else:
        yield passed(found)


@check(
    73,
    "device-files",
    "device files of the GPUs",
    reads="/dev/nvidia[0-9]*, /dev/nvidiactl",
    accepts="as many as GPUs",
    action="drain",
)
def device_files(node: Device, limits: Limits) -> Iterator[Found]:
    if node.get("driver_root"):
        yield skipped(f"below {node['driver_root']}: the driver is in a container")
        return
    count, gpus = node["devices"], len(node["gpus"])
    if gpus == 0 and count == 0:
        raise NotApplicable("no GPU here")
    if count < gpus:
        yield (
            unknown(f"{count} device files for {gpus} GPUs")
            if count == 0 and node.get("nvml") != "ok"
            else Found(
                FAIL,
                f"{count} device files",
                f"{gpus}",
                "nvidia-modprobe -c 0 -u; systemctl restart nvidia-persistenced; then slurmd",
            )
        )
    else:
        yield passed(count, gpus)
