"""What nvidia-smi prints: -q as text and XML, the table, -L, topo, nvlink, CSV, dmon, --version, errors. Pure.

All forms come to the same names, those of --query-gpu; drivers renamed fields at 535 and 580.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from xml.etree import ElementTree

from provision.health.finding import FAIL, SKIP, UNKNOWN, WARN
from provision.health.kernel import address
from provision.health.readings import Absent, Device, Unread
from provision.health.xid import ADVICE
from provision.inspect.recording import Kind, Recording, ends_with_border

# ---- values

_NUMBER = re.compile(
    r"(-?\d+(?:\.\d+)?)\s*(?:x|W|C|%|[MG]Hz|[KMG]i?B(?:/s)?|us|ms|bank\(s\)|\[.*\])?", re.IGNORECASE
)
_ABSENT = re.compile(
    r"\[?(?:n/?a|not supported|none found|requested functionality has been deprecated|deprecated.*)\]?",
    re.IGNORECASE,
)
_UNREAD = re.compile(
    r"\[?(?:unknown error|err!|gpu is lost.*|gpu requires reset.*|insufficient permissions|error.*)\]?",
    re.IGNORECASE,
)
_TEXTS = {
    "name",
    "uuid",
    "serial",
    "vbios_version",
    "driver_version",
    "pci.bus_id",
    "gpu_recovery_action",
    "pstate",
    "fabric.state",
    "fabric.status",
    "fabric.clusterUuid",
    "fabric.cliqueId",
    "fabric.health.summary",
    "inforom.checksum_validation",
    "compute_mode",
    "clocks_event_reasons.active",
}
_MODES = {"ecc.mode.current", "ecc.mode.pending", "mig.mode.current", "mig.mode.pending", "persistence_mode"}
_FLAGS = {
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
    "channel_repair_pending",
    "tpc_repair_pending",
    "unrepairable_memory",
    "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
}


def value(name: str, text: str) -> Any:
    """`text` as the value of the field `name`: number, text, or why it is none. Never text where a number belongs."""
    bare = text.strip()
    if name == "gpu_recovery_action" and bare.lower() == "none":
        return "None"
    if _UNREAD.fullmatch(bare):
        return Unread(f"nvidia-smi says {bare!r}")
    if _ABSENT.fullmatch(bare) or not bare:
        return Absent(f"nvidia-smi says {bare or 'nothing'!r}")
    if name in _TEXTS:
        return (
            address(bare)
            if name == "pci.bus_id" and re.fullmatch(r"[\da-fA-F]+:[\da-fA-F]+:[\da-fA-F.]+", bare)
            else bare
        )
    if name in _MODES:
        return (
            bare if bare in ("Enabled", "Disabled") else Unread(f"{bare!r} is neither Enabled nor Disabled")
        )
    if name in _FLAGS:
        return bare if bare.lower() in ("yes", "no", "0", "1") else Unread(f"{bare!r} is neither yes nor no")
    if name.startswith("clocks_event_reasons.") and not name.endswith((".active", ".supported")):
        return (
            bare if bare in ("Active", "Not Active") else Unread(f"{bare!r} is neither Active nor Not Active")
        )
    number = _NUMBER.fullmatch(bare)
    if number is None:
        return Unread(f"{bare[:40]!r} is no number")
    return float(number[1]) if "." in number[1] else int(number[1][:18])


# path of slugs, as XML and text have it -> canonical name
_PATHS = {
    "product_name": "name",
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "minor_number": "minor_number",
    "vbios_version": "vbios_version",
    "persistence_mode": "persistence_mode",
    "mig_mode/current_mig": "mig.mode.current",
    "mig_mode/current": "mig.mode.current",
    "mig_mode/pending_mig": "mig.mode.pending",
    "mig_mode/pending": "mig.mode.pending",
    "gpu_recovery_action": "gpu_recovery_action",
    "compute_mode": "compute_mode",
    "performance_state": "pstate",
    "ecc_mode/current_ecc": "ecc.mode.current",
    "ecc_mode/current": "ecc.mode.current",
    "ecc_mode/pending_ecc": "ecc.mode.pending",
    "ecc_mode/pending": "ecc.mode.pending",
    "ecc_errors/aggregate/sram_threshold_exceeded": "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
    "ecc_errors/aggregate/sram_correctable": "ecc.errors.corrected.aggregate.sram",
    "ecc_errors/aggregate/dram_correctable": "ecc.errors.corrected.aggregate.dram",
    "ecc_errors/channel_repair_pending": "channel_repair_pending",
    "ecc_errors/tpc_repair_pending": "tpc_repair_pending",
    "ecc_errors/unrepairable_memory": "unrepairable_memory",
    "remapped_rows/remapped_row_corr": "remapped_rows.correctable",
    "remapped_rows/correctable_error": "remapped_rows.correctable",
    "remapped_rows/remapped_row_unc": "remapped_rows.uncorrectable",
    "remapped_rows/uncorrectable_error": "remapped_rows.uncorrectable",
    "remapped_rows/remapped_row_pending": "remapped_rows.pending",
    "remapped_rows/pending": "remapped_rows.pending",
    "remapped_rows/remapped_row_failure": "remapped_rows.failure",
    "remapped_rows/remapping_failure_occurred": "remapped_rows.failure",
    "remapped_rows/row_remapper_histogram/row_remapper_histogram_none": "remapped_rows.histogram.none",
    "remapped_rows/bank_remap_availability_histogram/none": "remapped_rows.histogram.none",
    "retired_pages/multiple_single_bit_retirement/retired_count": "retired_pages.single_bit_ecc.count",
    "retired_pages/single_bit_ecc": "retired_pages.single_bit_ecc.count",
    "retired_pages/double_bit_retirement/retired_count": "retired_pages.double_bit.count",
    "retired_pages/double_bit_ecc": "retired_pages.double_bit.count",
    "retired_pages/pending_blacklist": "retired_pages.pending",
    "retired_pages/pending_retirement": "retired_pages.pending",
    "retired_pages/pending_page_blacklist": "retired_pages.pending",
    "retired_pages/pending": "retired_pages.pending",
    "temperature/gpu_temp": "temperature.gpu",
    "temperature/gpu_current_temp": "temperature.gpu",
    "temperature/gpu_temp_tlimit": "temperature.gpu.tlimit",
    "temperature/gpu_t_limit_temp": "temperature.gpu.tlimit",
    "temperature/gpu_current_t_limit_temp": "temperature.gpu.tlimit",
    "temperature/gpu_temp_slow_tlimit_threshold": "temperature.tlimit.slowdown",
    "temperature/gpu_slowdown_t_limit_temp": "temperature.tlimit.slowdown",
    "temperature/gpu_temp_slow_threshold": "temperature.slowdown",
    "temperature/gpu_slowdown_temp": "temperature.slowdown",
    "temperature/memory_temp": "temperature.memory",
    "temperature/memory_current_temp": "temperature.memory",
    "temperature/gpu_temp_max_mem_threshold": "temperature.memory.max_operating",
    "temperature/memory_max_operating_temp": "temperature.memory.max_operating",
    "clocks/sm_clock": "clocks.sm",
    "clocks/sm": "clocks.sm",
    "max_clocks/sm_clock": "clocks.max.sm",
    "max_clocks/sm": "clocks.max.sm",
    "utilization/gpu_util": "utilization.gpu",
    "utilization/gpu": "utilization.gpu",
    "fb_memory_usage/total": "memory.total",
    "fb_memory_usage/used": "memory.used",
    "pci/pci_bus_id": "pci.bus_id",
    "pci/bus_id": "pci.bus_id",
    "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "pcie.link.gen.max",
    "pci/gpu_link_info/pcie_generation/max": "pcie.link.gen.max",
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": "pcie.link.gen.current",
    "pci/gpu_link_info/pcie_generation/current": "pcie.link.gen.current",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "pcie.link.width.max",
    "pci/gpu_link_info/link_width/max": "pcie.link.width.max",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "pcie.link.width.current",
    "pci/gpu_link_info/link_width/current": "pcie.link.width.current",
    "pci/replay_counter": "pcie.replays",
    "pci/replays_since_reset": "pcie.replays",
    "fabric/state": "fabric.state",
    "fabric/status": "fabric.status",
    "fabric/cliqueid": "fabric.cliqueId",
    "fabric/clusteruuid": "fabric.clusterUuid",
    "fabric/health/summary": "fabric.health.summary",
}
for _kind in ("throttle", "event"):
    for _old, _new in (
        ("hw_slowdown", "hw_slowdown"),
        ("hw_slowdown/hw_thermal_slowdown", "hw_thermal_slowdown"),
        ("hw_slowdown/hw_power_brake_slowdown", "hw_power_brake_slowdown"),
        ("sw_thermal_slowdown", "sw_thermal_slowdown"),
        ("sw_power_cap", "sw_power_cap"),
    ):
        _PATHS[f"clocks_{_kind}_reasons/{_old}"] = f"clocks_event_reasons.{_new}"
    for _name in (
        "hw_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "sw_thermal_slowdown",
        "sw_power_cap",
    ):
        _PATHS[f"clocks_{_kind}_reasons/clocks_{_kind}_reason_{_name}"] = f"clocks_event_reasons.{_name}"
# several spellings of one reading: the first that has a value wins
_CHAINS = {
    "power.draw": ("power_draw", "instant_power_draw", "instantaneous_power_draw", "average_power_draw"),
    "power.limit": ("enforced_power_limit", "current_power_limit", "power_limit"),
    "power.default_limit": ("default_power_limit",),
}
_POWER = ("gpu_power_readings", "power_readings", "gpu_power_readings/gpu_ceiling_power_limit")
_SUMS = {
    "ecc.errors.uncorrected.aggregate.sram": (
        ("ecc_errors/aggregate/sram_uncorrectable",),
        ("ecc_errors/aggregate/sram_uncorrectable_parity", "ecc_errors/aggregate/sram_uncorrectable_sec_ded"),
        ("ecc_errors/aggregate/sram_uncorrectable_parity", "ecc_errors/aggregate/sram_uncorrectable_secded"),
    ),
    "ecc.errors.uncorrected.volatile.total": (
        ("ecc_errors/volatile/sram_uncorrectable", "ecc_errors/volatile/dram_uncorrectable"),
        (
            "ecc_errors/volatile/sram_uncorrectable_parity",
            "ecc_errors/volatile/sram_uncorrectable_sec_ded",
            "ecc_errors/volatile/dram_uncorrectable",
        ),
        (
            "ecc_errors/volatile/sram_uncorrectable_parity",
            "ecc_errors/volatile/sram_uncorrectable_secded",
            "ecc_errors/volatile/dram_uncorrectable",
        ),
        ("ecc_errors/volatile/double_bit/total",),
    ),
}
# where the whole branch is one word ("Remapped Rows : N/A"), all below it are
_LEAVES = (
    "remapped_rows",
    "retired_pages",
    "ecc_errors",
    "fabric",
    "clocks_throttle_reasons",
    "clocks_event_reasons",
    "temperature",
)


def canonical(paths: dict[str, str]) -> dict[str, Any]:
    """Values by canonical name, from texts by path of slugs."""
    found: dict[str, Any] = {}
    for path, name in _PATHS.items():
        if path in paths:
            told = value(name, paths[path])
            if name not in found or isinstance(found[name], Absent):
                found[name] = told
    for name, spellings in _CHAINS.items():
        told = [
            value(name, paths[f"{power}/{each}"])
            for power in _POWER
            for each in spellings
            if f"{power}/{each}" in paths
        ]
        if told:
            found[name] = next(
                (each for kind in ((int, float), Unread) for each in told if isinstance(each, kind)), told[0]
            )
    for name, ways in _SUMS.items():
        for way in ways:
            if all(path in paths for path in way):
                found[name] = _sum([value(name, paths[path]) for path in way])
                break
    for leaf in _LEAVES:
        if leaf in paths and _ABSENT.fullmatch(paths[leaf].strip()):
            for path, name in _PATHS.items():
                if path.startswith(f"{leaf}/"):
                    found.setdefault(name, Absent(f"nvidia-smi says {leaf}: {paths[leaf].strip()}"))
    return found


def _sum(parts: list[Any]) -> Any:
    for kind in (Unread, Absent):
        for part in parts:
            if isinstance(part, kind):
                return part
    return sum(parts)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _gpu(number: int, values: dict[str, Any], source: str) -> Device:
    bus = values.get("pci.bus_id")
    subject = f"GPU {number}" + (f" {bus}" if isinstance(bus, str) else "")
    return Device(subject, {"index": number, **values}, source)


def _unreadable(found: Recording, gpus: Iterable[Device]) -> None:
    """Say of each GPU that it does not tell what it should: many fields of a GPU that is lost, one of a busy driver."""
    for gpu in gpus:
        unread = [
            f"{name}: {told.why}"
            for name, told in gpu.values.items()
            if isinstance(told, Unread) and told.why.startswith("nvidia-smi says")
        ]
        unread = [each for each in unread if not each.startswith("temperature.memory")]
        if unread:
            many = len(unread) > 2
            found.find(
                UNKNOWN,
                "gpu-readable",
                gpu.subject,
                "; ".join(unread[:2]) + (f" and {len(unread) - 2} more" if many else ""),
                "values",
                action="reboot" if many else None,
                advice="a GPU that answers so is lost: dmesg | grep NVRM"
                if many
                else "read it again; dmesg | grep NVRM",
                why="the driver cannot read it",
            )


def _version(*texts: str | None) -> str | None:
    """The first of `texts` that is a version; newer drivers write there that the field is deprecated."""
    return next(
        (text.strip() for text in texts if text and re.fullmatch(r"\s*[\d.]+\s*", text)), None
    ) or next((match[0] for text in texts if text and (match := re.match(r"\s*\d+\.[\d.]+", text))), None)


def _about(gpus: list[Device], driver: str | None) -> str:
    counted: dict[str, int] = {}
    for gpu in gpus:
        name = str(gpu.get("name", "GPU"))
        counted[name] = counted.get(name, 0) + 1
    parts = [f"{count} x {name}" for name, count in counted.items()]
    return ", ".join([*parts, *([f"driver {driver}"] if driver else [])])


# ---- -q -x


def is_xml(text: str) -> bool:
    return "<nvidia_smi_log" in text or bool(re.match(r"\s*<gpu[ >]", text))


def parse_xml(text: str) -> Recording:
    found = Recording("nvidia-smi -q -x")
    if "<!ENTITY" in text:
        found.cut("XML with entities of its own is not what nvidia-smi writes")
        return found
    start = text.find("<nvidia_smi_log")
    before = text[: max(start, 0)]
    body = text[start:] if start >= 0 else text
    end = body.rfind("</nvidia_smi_log>")
    try:
        root = ElementTree.fromstring(body[: end + 17] if end >= 0 else body)
    except (ElementTree.ParseError, ValueError) as error:
        found.cut(f"not well-formed XML: {error}; cut off?")
        return found
    elements = [root] if root.tag == "gpu" else root.findall("gpu")
    gpus = []
    for number, element in enumerate(elements):
        paths = dict(_flat(element))
        values = canonical(paths)
        if element.get("id"):
            values.setdefault("pci.bus_id", value("pci.bus_id", element.get("id") or ""))
        gpu = _gpu(number, values, found.kind)
        found.tell("gpu-values", gpu.subject, _told(values))
        processes = element.find("processes")
        if processes is not None:
            gpu.values["processes.listed"] = len(processes.findall("process_info"))
        gpus.append(gpu)
    driver = _version(root.findtext("driver_version"), root.findtext("kmd_version"))
    found.node = Device("node", {"gpus": gpus}, found.kind)
    if driver:
        found.node.values["driver_version"] = driver
    attached = (root.findtext("attached_gpus") or "").strip()
    if attached.isdigit():
        found.node.values["attached_gpus"] = int(attached)
    lost = _lost(before)
    if lost:
        found.node.values["lost"] = lost
    _unreadable(found, gpus)
    if not gpus and not lost:
        found.cut("no GPU in it")
    found.about = _about(gpus, driver)
    return found


def _flat(element: ElementTree.Element, path: str = "") -> Iterator[tuple[str, str]]:
    for child in element:
        here = f"{path}/{_slug(child.tag)}" if path else _slug(child.tag)
        if here.startswith(("mig_devices", "supported_clocks", "processes", "accounted_processes")):
            continue
        if len(child):
            yield from _flat(child, here)
        else:
            yield here, child.text or ""


# ---- -q


def is_q(text: str) -> bool:
    return "NVSMI LOG" in text or bool(
        re.search(r"^\s{4}(?:Fabric|ECC Mode|Remapped Rows|ECC Errors)\s*$", text, re.MULTILINE)
    )


_ENDS = ("processes", "capabilities", "fabric")


def parse_q(text: str) -> Recording:
    found = Recording("nvidia-smi -q")
    head: dict[str, str] = {}
    blocks: list[tuple[str, dict[str, str], str]] = []  # bus id, texts by path, the last section
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("="):
            continue
        begun = re.match(r"GPU ([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+)\s*$", line)
        if begun:
            blocks.append((begun[1], {}, ""))
            stack = []
            continue
        indent = len(line) - len(line.lstrip())
        name, colon, told = line.strip().partition(" :") if " :" in line else (line.strip(), "", "")
        if indent == 0 and colon:
            head[_slug(name)] = told.strip()
            continue
        if indent == 0:
            continue
        if not blocks:
            blocks.append(("", {}, ""))
        while stack and stack[-1][0] >= indent:
            stack.pop()
        # below a leaf that has a value of its own ("HW Slowdown : Not Active") stand further ones
        path = "/".join([*(each for _, each in stack), _slug(name)])
        stack.append((indent, _slug(name)))
        bus, paths, _ = blocks[-1]
        if colon:
            paths.setdefault(path, told.strip())
        blocks[-1] = (bus, paths, stack[0][1])
    gpus = []
    for number, (bus, paths, _) in enumerate(blocks):
        values = canonical({path: told for path, told in paths.items() if not path.startswith("mig_device/")})
        if bus:
            values["pci.bus_id"] = address(bus)
        gpus.append(_gpu(number, values, found.kind))
        found.tell("gpu-values", gpus[-1].subject, _told(values))
    driver = _version(head.get("driver_version"), head.get("kmd_version"))
    found.node = Device("node", {"gpus": gpus}, found.kind)
    if driver:
        found.node.values["driver_version"] = driver
    attached = head.get("attached_gpus", "")
    if attached.isdigit():
        found.node.values["attached_gpus"] = int(attached)
    lost = _lost(text)
    if lost:
        found.node.values["lost"] = lost
    _whole(found, text, blocks)
    _unreadable(found, gpus)
    found.about = _about(gpus, driver)
    return found


def _whole(found: Recording, text: str, blocks: list[tuple[str, dict[str, str], str]]) -> None:
    """Whether each GPU is told to its end. Selections (-d) have no product name and end where they like."""
    if not blocks:
        found.cut("no GPU in it")
    for bus, paths, last in blocks:
        if "product_name" in paths and last not in _ENDS:
            found.cut(f"GPU {bus} ends in the section {last!r}: cut off?")
    last = text.rpartition("\n")[2]
    if (
        last
        and "NVSMI LOG" in text
        and not re.search(r": (?:None|N/A|Enabled|Disabled|\d+ [A-Za-z/]+)$", last)
    ):
        found.cut("ends in the middle of a line")
    for bus, paths, _ in blocks:
        broken = [path for path, told in paths.items() if re.search(r"Unknown Error", told)]
        if broken:
            found.find(
                FAIL,
                "gpu-lost",
                f"GPU {bus}".strip(),
                f"{broken[0]}: Unknown Error",
                "a value",
                action="reboot",
                advice="drain, reboot; check seat, power and cooling",
                why="as a GPU that is off the bus answers",
            )


# ---- the table

_TABLE_HEAD = re.compile(r"NVIDIA-SMI\s+([\d.]+)\s+(?:Driver|KMD) Version:\s*([\d.]+)")
_ROW1 = re.compile(r"\s*(\d+)\s+(.+?)\s+(On|Off|N/A|ERR!)\s*")


def is_table(text: str) -> bool:
    return _TABLE_HEAD.search(text) is not None


def parse_table(text: str) -> Recording:
    found = Recording("nvidia-smi")
    head = _TABLE_HEAD.search(text)
    gpus: list[Device] = []
    place = 0
    summary = text.partition("Processes:")[0].partition("MIG devices:")[0].splitlines()
    while place < len(summary):
        cells = summary[place].split("|")
        row = _ROW1.fullmatch(cells[1]) if len(cells) == 5 else None
        if row and re.search(r"[0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+", cells[2]):
            gpus.append(_table_row(int(row[1]), row[2], row[3], cells, summary[place + 1 : place + 3]))
            place += 2
        place += 1
    driver = head[2] if head else None
    found.node = Device("node", {"gpus": gpus, **({"driver_version": driver} if driver else {})}, found.kind)
    lost = _lost(text)
    if lost:
        found.node.values["lost"] = lost
    for gpu in gpus:
        gpu.values["processes.listed"] = len(
            re.findall(rf"^\|\s+{gpu.values['index']}\s+\S+\s+\S+\s+\d+\s+[CGM+]", text, re.MULTILINE)
        )
    _unreadable(found, gpus)
    if not gpus:
        found.cut("the table has no GPU")
    elif not ends_with_border(text):
        found.cut("the table has no end: cut off?")
    elif "Processes:" not in text:
        found.find(
            WARN,
            "recording",
            found.kind,
            f"{len(gpus)} GPUs and no list of processes",
            "a whole table",
            why="the part below the last GPU is missing: there may have been more",
            advice="record it again",
        )
    found.about = _about(gpus, driver)
    return found


def _table_row(number: int, name: str, persistence: str, cells: list[str], below: list[str]) -> Device:
    values: dict[str, Any] = {
        "name": Unread(f"the table shortens it to {name!r}") if name.endswith("...") else name,
        "persistence_mode": {"On": "Enabled", "Off": "Disabled"}.get(
            persistence, Absent("nvidia-smi says N/A")
        ),
        "pci.bus_id": address(cells[2].split()[0]),
    }
    ecc = cells[3].strip()
    if ecc.isdigit():
        values["ecc.errors.uncorrected.volatile.total"] = int(ecc[:18])
        values["ecc.mode.current"] = "Enabled"
    elif ecc == "Off":
        values["ecc.mode.current"] = "Disabled"
    else:
        values["ecc.errors.uncorrected.volatile.total"] = (
            value("ecc", ecc) if ecc != "On" else Absent("MIG is on")
        )
    second = below[0].split("|") if below else []
    if len(second) == 5:
        temperature = re.search(r"(\d+)C\b", second[1])
        if temperature:
            values["temperature.gpu"] = int(temperature[1])
        elif "ERR!" in second[1]:
            values["temperature.gpu"] = Unread("nvidia-smi says ERR!")
        power = re.search(r"(\S+)\s*/\s*(\S+)\s*$", second[1])
        if power:
            values["power.draw"] = value("power.draw", power[1].replace("W", " W"))
        memory = re.search(r"(\d+)MiB\s*/\s*(\d+)MiB", second[2])
        if memory:
            values["memory.used"], values["memory.total"] = int(memory[1]), int(memory[2])
        used = re.match(r"\s*(\d+)%", second[3])
        if used:
            values["utilization.gpu"] = int(used[1])
    third = below[1].split("|") if len(below) > 1 else []
    if len(third) == 5 and third[3].strip():
        mig = third[3].strip().rstrip("*")
        values["mig.mode.current"] = value("mig.mode.current", mig)
    gpu = _gpu(number, values, "nvidia-smi")
    if "ERR!" in "".join([*cells, *below]):
        gpu.values["temperature.gpu"] = (
            gpu.values["temperature.gpu"] if gpu.get("temperature.gpu") else Unread("nvidia-smi says ERR!")
        )
    return gpu


# ---- errors, lists


_LOST = re.compile(
    r"Unable to determine the device handle for (?:GPU ?\d*:? ?"
    r"|gpu )?([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f.]+):?\s*(.*)"
)


def _lost(text: str) -> list[str]:
    """PCI addresses of GPUs that the driver has lost."""
    return [_full(match[1]) for match in _LOST.finditer(text)]


def _full(bus: str) -> str:
    domain, _, rest = bus.partition(":")
    return f"{domain.zfill(4)}:{rest}".upper() if re.fullmatch(r"[0-9A-Fa-f]+", domain) else bus


_ERRORS = re.compile(
    r"Failed to initialize NVML|NVIDIA-SMI has failed|No devices were found"
    r"|couldn't find libnvidia-ml|infoROM is corrupted"
    r"|^GPU is lost|Insufficient Permissions to|Driver/library version mismatch|not have permission to"
    r"|Unable to determine the device handle",
)


def is_error(text: str) -> bool:
    return _ERRORS.search(text) is not None


def parse_error(text: str) -> Recording:
    found = Recording("nvidia-smi's error")
    lost = _lost(text)
    listed = list(_LISTED.finditer(text))
    if lost:
        gpus = [_gpu(int(each[1][:9]), {"name": each[2], "uuid": each[3]}, found.kind) for each in listed]
        found.node = Device("node", {"lost": lost, "gpus": gpus}, found.kind)
        for bus, words in _LOST.findall(text):
            if "requires reset" in words:
                found.find(
                    FAIL,
                    "recovery-action",
                    f"GPU {_full(bus)}",
                    words,
                    "None",
                    action="reset",
                    advice=ADVICE["reset"],
                )
        found.about = f"{len(gpus)} GPUs and {len(lost)} lost"
        return found
    library = re.search(r"NVML library version: ([\d.]+)", text)
    words = next(line.strip() for line in text.splitlines() if _ERRORS.search(line))
    if "infoROM" in words:
        bus = re.search(r"gpu ([0-9A-Fa-f:.]+)", words)
        found.find(
            FAIL,
            "inforom",
            f"GPU {address(bus[1]) if bus and bus[1].count(':') else '?'}",
            "corrupted",
            "sound",
            action="rma",
            advice="reset once; if it stays, replace the GPU",
            why=words,
        )
        return found
    found.node = Device(
        "node", {"nvml": words, "library.version": library[1] if library else Absent("not told")}, found.kind
    )
    found.about = words[:80]
    return found


_LISTED = re.compile(r"^GPU (\d+): (.+?) \(UUID: (GPU-[0-9a-fA-F-]+)\)", re.MULTILINE)
_MIG = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-\S+)\)", re.MULTILINE)


def is_list(text: str) -> bool:
    return _LISTED.search(text) is not None and " Link " not in text and "vlink" not in text


def parse_list(text: str) -> Recording:
    found = Recording("nvidia-smi -L")
    gpus: list[Device] = []
    odd = []
    for line in text.splitlines():
        listed, mig = _LISTED.match(line), _MIG.match(line)
        if listed:
            gpus.append(_gpu(int(listed[1][:9]), {"name": listed[2], "uuid": listed[3]}, found.kind))
        elif mig and gpus:
            gpus[-1].values.setdefault("mig.devices", []).append(mig[1])
        elif line.strip():
            odd.append(line.strip())
    found.node = Device("node", {"gpus": gpus, "lost": _lost(text)}, found.kind)
    for gpu in gpus:
        if gpu.get("mig.devices"):
            found.tell(
                "mig-devices",
                gpu.subject,
                f"{len(gpu['mig.devices'])} MIG devices: {', '.join(gpu['mig.devices'])}",
            )
    strange = [line for line in odd if not _LOST.search(line)]
    if strange:
        found.cut(f"not a line of the list: {strange[0][:60]!r}")
    found.about = _about(gpus, None)
    return found


# ---- nvlink


_OF_LINKS = re.compile(
    r"^GPU (\d+): (.+?)(?: \(UUID: (GPU-[0-9a-fA-F-]+)\))?[ \t]*$", re.MULTILINE
)  # old ones lack it


def is_nvlink(text: str) -> bool:
    return _OF_LINKS.search(text) is not None and bool(
        re.search(r"^\s*Link \d+[:,]|nvlink", text, re.MULTILINE | re.IGNORECASE)
    )


_LINK_STATE = re.compile(r"\s*Link (\d+): (?:<?(inactive|disabled)>?|([\d.]+) GB/s|(\S.*))\s*", re.IGNORECASE)
_LINK_ERROR = re.compile(
    r"\s*Link (\d+): (Replay|Recovery|CRC)(?: FLIT| Data)? Errors?: (\S+)\s*", re.IGNORECASE
)


# -c, -R and -p
_WIRING = re.compile(
    r"\s*Link \d+, .+ supported: (?:true|false)"
    r"|\s*Link \d+: (?:Remote Device )?[\da-fA-F]{8}:[\da-fA-F]{2}:[\da-fA-F]{2}\.\d\b"
)
# traffic, rates of bit errors, and the histogram of what FEC has corrected: bin 0 are symbols without an error
_UNJUDGED = re.compile(
    r"\s*Link \d+: (?:FEC Errors - \d+:|(?:Raw|Effective|Symbol) BER|[TR]x (?:packets|bytes)|Link recovery successful"
    r"|(?:Unit|Raw|Data|BER)\b)"
)
_OTHER_ERROR = re.compile(
    r"\s*Link (\d+): (.*(?:errors|discards|recovery failed|events)\b.*?): (\d+)\s*", re.IGNORECASE
)


def parse_nvlink(text: str) -> Recording:
    found = Recording("nvidia-smi nvlink")
    gpus: list[Device] = []
    errors = wiring = False
    for line in text.splitlines():
        listed = _OF_LINKS.match(line)
        if listed:
            gpus.append(_gpu(int(listed[1][:9]), {"name": listed[2], "uuid": listed[3]}, found.kind))
            continue
        if not gpus or not line.strip():
            continue
        error = _LINK_ERROR.fullmatch(line)
        if error:
            errors = True
            _link_error(gpus[-1], int(error[1][:9]), error[2].lower(), error[3])
            continue
        if _WIRING.match(line):
            wiring = True
            continue
        state = _LINK_STATE.fullmatch(line)
        if state and (state[2] or state[3]):
            link: dict[str, Any] = {"link": int(state[1][:9]), "up": state[2] is None}
            if state[3]:
                link["speed"] = float(state[3]) if state[3].count(".") < 2 and state[3] != "." else 0.0
            _listed(gpus[-1], "nvlink.links").append(link)
        elif re.search(r"all links are inactive", line, re.IGNORECASE):
            gpus[-1].values["nvlink.links"] = []
        elif not _UNJUDGED.match(line) and (other := _OTHER_ERROR.fullmatch(line)) is not None:
            errors = True
            _listed(gpus[-1], "nvlink.other").append(other[1])
            if other[3].strip("0"):
                found.find(
                    WARN,
                    "nvlink-errors",
                    gpus[-1].subject,
                    f"link {other[1]}: {other[3]} {other[2].lower()}",
                    "0",
                    action="warn",
                    why="since the last reset; a second reading tells whether they grow",
                    advice="nvidia-smi nvlink -e again; reseat, or the cable",
                )
        elif re.search(r"not have or support|not supported|not support nvlink", line, re.IGNORECASE):
            why = Absent(line.strip())
            gpus[-1].values.update({"nvlink.links": why, "nvlink.errors": why})
        elif not _UNJUDGED.match(line):
            found.cut(f"not a line of nvlink: {line.strip()[:60]!r}")
    found.node = Device("node", {"gpus": gpus}, found.kind)
    found.kind = "nvidia-smi nvlink -e" if errors else "nvidia-smi nvlink -s"
    if wiring and not any(gpu.told("nvlink.links") or gpu.told("nvlink.errors") for gpu in gpus):
        found.kind = "nvidia-smi nvlink"
        found.find(
            SKIP,
            "nvlink-count",
            "all GPUs",
            why="where links lead or what they can, not whether they are up: -s",
        )
        return found
    for gpu in gpus:
        if not (gpu.told("nvlink.links") or gpu.told("nvlink.errors") or gpu.told("nvlink.other")):
            found.cut(f"{gpu.subject} without a link: cut off?")
        elif errors:
            kinds = [
                set(link) - {"link"} for link in gpu.get("nvlink.errors") or [] if isinstance(link, dict)
            ]
            if len({len(each) for each in kinds}) > 1:
                found.cut(f"{gpu.subject}: not every link has the same counters: cut off?")
        told = set(Counter(gpu.get("nvlink.other") or []).values())
        if len(told) > 1:
            found.cut(f"{gpu.subject}: not every link has the same counters: cut off?")
    counts = {len(gpu.get("nvlink.errors") or gpu.get("nvlink.links") or []) for gpu in gpus}
    if len(counts) > 1:
        found.cut(f"GPUs with {' and '.join(map(str, sorted(counts)))} links: cut off?")
    found.about = _about(gpus, None)
    return found


def _listed(gpu: Device, name: str) -> list[Any]:
    """The list of a GPU's readings under `name`; a new one where it said before that there is none."""
    told = gpu.values.get(name)
    if not isinstance(told, list):
        told = gpu.values[name] = []
    return told


def _link_error(gpu: Device, number: int, kind: str, told: str) -> None:
    errors = gpu.values.setdefault("nvlink.errors", [])
    if not isinstance(errors, list):
        return
    if not errors or errors[-1]["link"] != number:
        errors.append({"link": number})
    if told.isdigit():
        errors[-1][kind] = errors[-1].get(kind, 0) + int(told[:18])
    else:
        gpu.values["nvlink.errors"] = Unread(f"link {number}: {kind} errors {told!r}")


# ---- topo

_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|NV\d+|OK|CNS|GNS|TNS|NS|U|DR|N/A")


def is_topo(text: str) -> bool:
    return (
        re.search(
            r"^\s*GPU\d+(?:[ \t]+GPU\d+)*[ \t]*(?:(?:NIC|mlx|ib|CPU|NUMA)\S*[^\n]*)?$", text, re.MULTILINE
        )
        is not None
    )


def parse_topo(text: str) -> Recording:
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if re.match(r"\s*GPU\d+", line))
    columns = re.findall(r"(?:GPU|NIC)\d+|mlx\d_\w+", lines[at].partition("CPU Affinity")[0])
    matrix: dict[str, dict[str, str]] = {}
    odd = []
    for line in lines[at + 1 :]:
        words = line.split()
        if not words or not re.fullmatch(r"(?:GPU|NIC)\d+|mlx\d_\w+", words[0]):
            if line.strip():
                break
            continue
        cells = words[1 : 1 + len(columns)]
        if len(cells) < len(columns) or not all(_CELL.fullmatch(cell) for cell in cells):
            odd.append(words[0])
            continue
        matrix[words[0]] = {column: cell for column, cell in zip(columns, cells, strict=True) if cell != "X"}
    peers = any(
        cell in ("OK", "CNS", "GNS", "TNS", "NS", "U", "DR")
        for row in matrix.values()
        for cell in row.values()
    )
    found = Recording("nvidia-smi topo -p2p" if peers else "nvidia-smi topo -m")
    if odd or set(columns) - set(matrix):
        found.cut(f"rows missing or cut: {', '.join(odd or sorted(set(columns) - set(matrix)))}")
    elif len(set(lines[at + 1].split())) and not text.endswith("\n"):
        found.cut("ends in the middle of a line")
    if peers:
        found.node.values["p2p"] = {f"{a}-{b}": cell for a, row in matrix.items() for b, cell in row.items()}
    else:
        found.node.values["topology"] = matrix
    gpus = [name for name in matrix if name.startswith("GPU")]
    found.node.values["gpu.count"] = len(gpus)
    found.about = f"{len(gpus)} GPUs, {len(matrix) - len(gpus)} NICs"
    return found


# ---- CSV

_ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
    "minor": "minor_number",
    "pcie.replay.count": "pcie.replays",
    "kmd_version": "driver_version",
    "power.draw.instant": "power.draw.instant",
}
_KNOWN_COLUMNS = re.compile(
    r"(?:name|index|uuid|serial|pid|process_name|used_(?:gpu_)?memory|gpu_(?:uuid|bus_id|name|serial)|timestamp|count|pstate"
    r"|driver_version|display_mode|minor|compute_mode|persistence_mode|vbios_version)$"
    r"|(?:temperature|power|clocks\w*|ecc|pcie?|memory|utilization|remapped_rows|retired_pages|fabric|mig)\.\w"
)


def _columns(line: str) -> list[str]:
    return [re.sub(r"\s*\[[^\]]*\]$", "", cell.strip()) for cell in line.split(",")]


def is_csv(text: str) -> bool:
    first = next((line for line in text.splitlines() if line.strip()), "")
    columns = _columns(first)
    return (
        len(columns) >= 2
        and sum(bool(_KNOWN_COLUMNS.match(column)) for column in columns) >= 2
        and "|" not in first
    )


def column_name(column: str) -> str:
    """The canonical name of a column; drivers before 535 call event reasons throttle reasons."""
    return _ALIASES.get(column, column.replace("clocks_throttle_reasons", "clocks_event_reasons"))


def parse_csv(text: str) -> Recording:
    lines = [line for line in text.splitlines() if line.strip()]
    columns = [column_name(column) for column in _columns(lines[0])]
    try:
        rows = list(csv.reader(lines[1:], skipinitialspace=True))
    except csv.Error as error:
        found = Recording("nvidia-smi CSV")
        found.cut(str(error))
        return found
    if "pid" in columns:
        found = _processes(columns, rows)
        if not rows and not text.endswith("\n"):
            found.cut("ends in its header")
        return found
    if any(column.startswith("retired_pages.") for column in columns) and "retired_pages.cause" in columns:
        return _retired(columns, rows)
    found = Recording("nvidia-smi --query-gpu")
    gpus, unsupported = [], 0
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            found.cut(f"row {number + 1} has {len(row)} cells, the header {len(columns)}")
            continue
        values = {column: value(column, cell) for column, cell in zip(columns, row, strict=True)}
        unsupported += sum(isinstance(each, Absent) for each in values.values())
        index = values.pop("index", number)
        _chains(values)
        gpu = _gpu(index if isinstance(index, int) else number, values, found.kind)
        _given_up(found, gpu.subject, row)
        if isinstance(index, int):
            gpu.values["index"] = index
        gpus.append(gpu)
        found.tell(
            "gpu-values",
            gpu.subject,
            _told(values),
            f"{sum(isinstance(v, Absent) for v in values.values())} fields unsupported",
        )
    found.node = Device("node", {"gpus": gpus}, found.kind)
    drivers = {gpu.get("driver_version") for gpu in gpus} - {None}
    if len(drivers) == 1:
        found.node.values["driver_version"] = drivers.pop()
    _unreadable(found, gpus)
    if not gpus and not found.findings:
        found.cut("a header without a row")
    if not text.endswith("\n"):
        found.cut("ends in the middle of a line")
    found.about = f"{_about(gpus, found.node.get('driver_version'))}; {unsupported} fields unsupported"
    found.data = {
        "unsupported": unsupported,
        "minors": [(g.get("index"), g.get("pci.bus_id"), g.get("minor_number")) for g in gpus],
    }
    return found


_SHOWN = (
    "name",
    "temperature.gpu",
    "power.draw",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.sw_power_cap",
    "minor_number",
    "driver_version",
)


def _told(values: dict[str, Any]) -> str:
    shown = [
        f"{name} {values[name]:g}" if isinstance(values[name], (int, float)) else f"{name} {values[name]}"
        for name in _SHOWN
        if name in values and not isinstance(values[name], (Absent, Unread))
    ]
    return ", ".join(shown) or f"{len(values)} fields"


def _given_up(found: Recording, subject: str, row: Iterable[str]) -> None:
    """A GPU that the driver has given up says so in its cells."""
    words = " ".join(row).lower()
    if "gpu requires reset" in words:
        found.find(
            FAIL,
            "recovery-action",
            subject,
            "GPU requires reset",
            "None",
            action="reset",
            advice=ADVICE["reset"],
        )
    if "gpu is lost" in words:
        found.find(
            FAIL, "gpu-lost", subject, "GPU is lost", "a value", action="reboot", advice=ADVICE["reboot"]
        )


# bits of clocks_event_reasons.active, as NVML has them
_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}


def _chains(values: dict[str, Any]) -> None:
    """Readings that have several columns."""
    for name, others in (("power.draw", ("power.draw.instant", "power.draw.average")),):
        if not isinstance(values.get(name), (int, float)):
            for other in others:
                if isinstance(values.get(other), (int, float)):
                    values[name] = values[other]
                    break
    reasons = str(values.get("clocks_event_reasons.active", ""))
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", reasons):
        for name, bit in _REASONS.items():
            values.setdefault(
                f"clocks_event_reasons.{name}", "Active" if int(reasons, 16) & bit else "Not Active"
            )
    parity, secded = (
        values.get(f"ecc.errors.uncorrected.aggregate.sram.{each}") for each in ("parity", "secded")
    )
    if isinstance(parity, int) and isinstance(secded, int):
        values["ecc.errors.uncorrected.aggregate.sram"] = parity + secded


def _retired(columns: list[str], rows: Iterable[list[str]]) -> Recording:
    found = Recording("nvidia-smi --query-retired-pages")
    pages: dict[str, int] = {}
    for row in rows:
        if len(row) != len(columns):
            found.cut(f"a row has {len(row)} cells, the header {len(columns)}")
            continue
        told = dict(zip(columns, row, strict=True))
        uuid = told.get("uuid", "GPU")
        pages.setdefault(uuid, 0)
        pages[uuid] += not isinstance(value("address", told.get("retired_pages.address", "")), Absent)
    for uuid, count in pages.items():
        found.find(
            FAIL if count >= 63 else "pass",
            "retired-pages",
            uuid,
            f"{count} pages",
            "< 63",
            action="rma" if count >= 63 else None,
        )
    if not pages:
        found.cut("a header without a row")
    return found


def _processes(columns: list[str], rows: Iterable[list[str]]) -> Recording:
    if any(column.startswith(("max_memory_usage", "gpu_util")) for column in columns):
        found = Recording("nvidia-smi --query-accounted-apps")
        found.find(
            SKIP, "gpu-idle", "all GPUs", f"{sum(1 for _ in rows)} processes", why="those that have ended"
        )
        return found
    found = Recording("nvidia-smi --query-compute-apps")
    busy = 0
    for row in rows:
        if len(row) != len(columns):
            found.cut(f"a row has {len(row)} cells, the header {len(columns)}")
            continue
        told = dict(zip(columns, row, strict=True))
        busy += 1
        memory = told.get("used_gpu_memory", told.get("used_memory", "?"))
        found.find(
            UNKNOWN,
            "gpu-idle",
            told.get("uuid", told.get("pci.bus_id", "GPU")),
            f"pid {told.get('pid', '?')} {told.get('process_name', '?')} holds {memory}",
            "no process before a test",
            why="busy: a test beside it tells nothing of the hardware",
            advice="whose is it? end it, or wait for its job",
        )
    if not busy and not found.findings:
        found.tell("gpu-idle", "all GPUs", "no process")
    found.data = {"busy": busy}
    return found


# ---- others


def is_dmon(text: str) -> bool:
    return re.search(r"^# gpu\s+\w+", text, re.MULTILINE) is not None


def parse_dmon(text: str) -> Recording:
    found = Recording("nvidia-smi dmon")
    columns: list[str] = []
    seen: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        words = line.lstrip("#").split()
        if line.startswith("# gpu"):
            columns = words
        elif line.strip() and not line.startswith("#"):
            if len(words) != len(columns):
                found.cut(f"a row has {len(words)} values, the header {len(columns)}")
                continue
            seen.setdefault(words[0], []).append(dict(zip(columns, words, strict=True)))
    gpus = []
    for number, rows in seen.items():
        last = rows[-1]
        values = {
            name: value(name, last[column])
            for column, name in (
                ("pwr", "power.draw"),
                ("gtemp", "temperature.gpu"),
                ("mtemp", "temperature.memory"),
                ("sm", "utilization.gpu"),
                ("pclk", "clocks.sm"),
            )
            if last.get(column, "-") != "-"
        }
        gpus.append(_gpu(int(number[:9]) if number.isdigit() else 0, values, found.kind))
        for column in ("xid", "pviol", "tviol"):
            counts = [
                row[column] for row in rows if row.get(column, "-").isdigit() and row[column].strip("0")
            ]
            if counts and column != "pviol":
                found.find(
                    WARN,
                    "slowdown" if column == "tviol" else "xid",
                    f"GPU {number}",
                    f"{column} {counts[-1]}",
                    "0",
                    action="warn",
                    advice="nvidia-smi -q -d PERFORMANCE; dmesg | grep Xid",
                )
    found.node = Device("node", {"gpus": gpus}, found.kind)
    if not gpus:
        found.cut("no samples")
    if not text.endswith("\n"):
        found.cut("ends in the middle of a line")
    found.about = f"{len(gpus)} GPUs, {sum(map(len, seen.values()))} samples"
    return found


def is_version(text: str) -> bool:
    return re.search(r"^NVIDIA-SMI version\s*:", text, re.MULTILINE) is not None


def parse_version(text: str) -> Recording:
    found = Recording("nvidia-smi --version")
    told = {
        _slug(key): each.strip()
        for key, _, each in (line.partition(":") for line in text.splitlines())
        if each.strip()
    }
    usable = {key: each for key, each in told.items() if re.fullmatch(r"[\d.]+", each)}
    driver = usable.get("driver_version") or usable.get("kmd_version")
    cuda = usable.get("cuda_version") or usable.get("cuda_umd_version")
    if driver is None or cuda is None:
        found.cut("no version of the driver or of CUDA in it")
    else:
        found.tell("driver-version", "driver", f"driver {driver}, CUDA {cuda}")
        library, module = usable.get("nvml_version", driver), driver
        if not (module == library or module.startswith(f"{library}.")):
            found.find(
                FAIL,
                "driver-library",
                "driver",
                f"module {module}, NVML {library}",
                "equal",
                action="reboot",
                advice="an upgrade without a reboot: reboot, then hold the packages",
            )
    found.data = {"driver": driver, "cuda": cuda}
    return found


def is_command(text: str) -> bool:
    return (
        len(text.strip().splitlines()) == 1
        and re.match(r"\s*(?:\$ )?(?:sudo )?nvidia-smi\b", text) is not None
    )


def parse_command(text: str) -> Recording:
    found = Recording("a command line")
    found.find(SKIP, "recording", text.strip()[:60], why="a command, not its answer")
    return found


KINDS = (
    Kind("nvidia-smi -q -x", is_xml, parse_xml),
    Kind("nvidia-smi -q", is_q, parse_q),
    Kind("nvidia-smi", is_table, parse_table),
    Kind("nvidia-smi --version", is_version, parse_version),
    Kind("nvidia-smi nvlink", is_nvlink, parse_nvlink),
    Kind("nvidia-smi's error", is_error, parse_error),
    Kind("nvidia-smi -L", is_list, parse_list),
    Kind("nvidia-smi topo", is_topo, parse_topo),
    Kind("nvidia-smi dmon", is_dmon, parse_dmon),
    Kind("nvidia-smi CSV", is_csv, parse_csv),
    Kind("a command line", is_command, parse_command),
)
