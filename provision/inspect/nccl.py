"""nccl-tests and NCCL's own log. Pure.

The bandwidth is that of the largest message, never the average over sizes; a result of a run whose data were wrong
is none; far below the limit is a reason to look at the set-up before the hardware is accused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from provision.health.finding import FAIL, PASS, UNKNOWN, WARN
from provision.inspect.recording import Kind, Recording
from provision.profiles.gpu import Shape, gpu_profile

_ROW = re.compile(
    r"\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)?\s*(-?\d+)?\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)"
    r"(?:\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+))?(?:\s+\d+)?\s*"
)
_DEVICE = re.compile(r"#?\s*Rank\s+(\d+).*? on\s+(\S+) device\s+\d+ \[[^\]]*\] (.+?)\s*$")
_HEAD = re.compile(r"^\s*#?\s*size\s+count\s+type", re.MULTILINE)
_NETWORK = ("nccl-transport", "nccl-bootstrap", "peer-memory")
SETUP_SHARE = 0.2  # of the limit; below it the set-up is suspect, not the hardware


@dataclass(frozen=True)
class Row:
    size: int  # bytes
    busbw: float  # GB/s, out of place
    wrong: str  # "0", "N/A", or how many; older tests print an error such as 1e-06


def is_tests(text: str) -> bool:
    return bool(
        _HEAD.search(text)
        or re.search(r"Collective test starting|nccl-tests version|^# nThread \d+ nGpus", text, re.MULTILINE)
    )


def parse_tests(text: str) -> Recording:
    found = Recording("nccl-tests")
    rows, devices = [], {}
    for line in text.splitlines():
        device = _DEVICE.match(line)
        row = _ROW.fullmatch(line)
        if device:
            devices[int(device[1])] = (device[2], device[3])
        elif row and len(row[1]) < 19:
            rows.append(
                Row(int(row[1]), float(row[8]) if row[8].count(".") < 2 and row[8] != "." else 0.0, row[9])
            )
            if row[12] and row[13]:
                rows.append(Row(int(row[1]), 0.0, row[13]))
    _correct(found, text, rows)
    failure = re.search(r"Test (?:NCCL |CUDA )?failure[^\n]*", text)
    if failure:
        found.find(
            FAIL,
            "nccl-run",
            "run",
            failure[0][:120],
            "ends well",
            action="drain",
            advice="NCCL_DEBUG=INFO; are the GPUs idle?",
        )
    average = re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", text)
    measured = [row for row in rows if row.busbw]
    if not rows:
        found.find(
            FAIL,
            "nccl-run",
            "run",
            "no result line",
            "results",
            action="drain",
            why="it ended before it measured",
            advice="what stands above: MPI, devices, NCCL_DEBUG=INFO",
        )
    elif average is None:
        found.cut("no average at the end: cut off, or it did not end")
    elif measured:
        _bandwidth(
            found,
            max(measured, key=lambda row: row.size),
            max(row.busbw for row in measured),
            devices,
            text,
            average[1],
        )
    hosts = len({host for host, _ in devices.values()})
    if hosts > 1 and "NCCL INFO" in text:  # one node needs no network
        found.findings += [one for one in parse_log(text).findings if one.check in _NETWORK]
    found.about = (
        f"{len(devices) or '?'} ranks on {hosts or '?'} hosts, {len({row.size for row in rows})} sizes"
    )
    return found


def _correct(found: Recording, plain: str, rows: list[Row]) -> None:
    bounds = re.search(r"Out of bounds values\s*:\s*(\d+)\s*(\w+)", plain)
    wrong = [row for row in rows if re.fullmatch(r"[1-9]\d*", row.wrong)]
    large = [row for row in rows if re.fullmatch(r"[\d.]+e[+-]\d+", row.wrong) and float(row.wrong) > 1e-2]
    unchecked = bool(rows) and all(row.wrong == "N/A" for row in rows)
    if wrong or large or (bounds and (bounds[1] != "0" or bounds[2] == "FAILED")):
        told = (
            f"{bounds[1]} values out of bounds" if bounds else f"{len(wrong or large)} rows with wrong values"
        )
        found.find(
            FAIL,
            "nccl-data",
            "run",
            told,
            "0",
            action="drain",
            why="silent data corruption, or a broken transport",
            advice="pairs of GPUs one by one; NVLink and P2P off in turn",
        )
    elif unchecked:
        found.find(
            WARN,
            "nccl-data",
            "run",
            "not checked",
            "checked (-c 1)",
            action="warn",
            why="the run was made without validation",
            advice="run it again with -c 1",
        )
    elif bounds:
        found.tell("nccl-data", "run", "0 wrong values")


def _bandwidth(
    found: Recording, row: Row, peak: float, devices: dict[int, tuple[str, str]], plain: str, average: str
) -> None:
    products = {
        product if product.startswith(("NVIDIA", "Tesla")) else f"NVIDIA {product}"
        for _, product in devices.values()
    }
    hosts = {host for host, _ in devices.values()}
    read = f"{row.busbw:g} GB/s at {row.size} bytes (peak {peak:g}, average over sizes {average})"
    operation = re.search(r"Collective test starting: (\w+)", plain)
    profile = gpu_profile(products.pop()) if len(products) == 1 else None
    limit = (
        profile.limit("all_reduce_busbw_gbs", Shape(len(hosts), len(devices) // max(len(hosts), 1)))
        if profile and hosts
        else None
    )
    if operation and operation[1] != "all_reduce_perf":
        limit = None
    if row.busbw == 0 or (limit is not None and row.busbw < SETUP_SHARE * limit.fail):
        found.find(
            UNKNOWN,
            "nccl-bandwidth",
            "run",
            read,
            f">= {limit.fail:g} GB/s" if limit else None,
            why="far below any hardware's: the set-up is suspect",
            advice="which transport? NCCL_DEBUG=INFO; again with the reference container before anybody drains",
        )
    elif limit is None or row.size < limit.bytes // 2:
        why = (
            "not compared: no limit is known for this model and size"
            if limit is None
            else f"not compared: the limit is for {limit.bytes} bytes"
        )
        found.tell("nccl-bandwidth", "run", read, why)
    elif limit.nvls and row.busbw < limit.fail:
        found.find(
            WARN,
            "nccl-bandwidth",
            "run",
            read,
            f">= {limit.fail:g} GB/s with NVLS",
            action="warn",
            why="whether NVLS was used is not told",
            advice="NCCL_DEBUG=INFO, NVLS lines",
        )
    else:
        verdict = FAIL if row.busbw < limit.fail else WARN if row.busbw < limit.warn else PASS
        found.find(
            verdict,
            "nccl-bandwidth",
            "run",
            read,
            f">= {limit.warn:g} GB/s",
            action={FAIL: "drain", WARN: "warn"}.get(verdict),
            advice="pairs of nodes, pairs of GPUs: provision burnin" if verdict != PASS else None,
        )


_LAUNCH = re.compile(
    r"There are not enough slots available|pmix plugin not found|ORTE was unable|mpirun (?:was unable"
    r"|noticed|detected)|MPI_INIT|PMI2_Init|srun: error: .*(?:task|Unable)|unhandled cuda error"
    r"|unsupported display driver",
)


def is_launch(text: str) -> bool:
    return _LAUNCH.search(text) is not None


def parse_launch(text: str) -> Recording:
    found = Recording("messages of a launch")
    match = _LAUNCH.search(text)
    words = (
        next(line.strip() for line in text.splitlines() if match and match[0].split("|")[0][:20] in line)
        if match
        else ""
    )
    advice = "srun --mpi=list; which MPI has the image? slots of the host file"
    why = "the launch failed: it says nothing of network or GPUs"
    if "unhandled cuda error" in text:
        advice, why = (
            "nvidia-smi: does another process hold the GPUs? NCCL_DEBUG=INFO",
            "the run did not begin: it says nothing of the hardware",
        )
    elif "unsupported display driver" in text:
        advice, why = (
            "CUDA of the image is newer than the driver carries: newer driver, or its compat libraries",
            "driver and CUDA do not go together",
        )
    found.find(FAIL, "nccl-run", "launch", words[:120], "results", action="warn", advice=advice, why=why)
    return found


_LINE = re.compile(
    r"\s*(?:\[\d{4}-\d\d-\d\d [\d:.]+\] )?(\S+?):\d+:\d+ \[\d+\] (?:\S+ )?NCCL (INFO|WARN) (.*)"
)


def is_log(text: str) -> bool:
    return re.search(r"NCCL (?:INFO|WARN) ", text) is not None and not is_tests(text)


def parse_log(text: str) -> Recording:
    found = Recording("NCCL's log")
    networks: dict[str, str] = {}
    bootstraps: dict[str, str] = {}
    channels, direct = 0, 0
    for line in text.splitlines():
        told = _LINE.match(line)
        if told is None:
            continue
        host, level, words = told[1], told[2], told[3]
        used = re.match(r"Using network (\S+)", words) or re.match(r"NET/(\w+) : Using", words)
        if used:
            networks[host] = used[1]
        bootstrap = re.match(r"Bootstrap : Using (\S+?):([^<]+)<", words)
        if bootstrap:
            bootstraps[host] = f"{bootstrap[1]} / {bootstrap[2]}"
        if re.match(r"Channel \S+ : .* via NET/IB", words):
            channels += 1
            direct += "GDRDMA" in words
        if level == "WARN" or "NCCL WARN" in line:
            found.find(
                FAIL, "nccl-run", host, words[:140], "no warning", action="warn", advice=_warn_advice(words)
            )
    for host, network in networks.items():
        fine = network in ("IB", "AWS", "OFI", "Libfabric")
        mixed = len(set(networks.values())) > 1
        found.find(
            PASS if fine else FAIL if mixed else WARN,
            "nccl-transport",
            host,
            f"network {network}",
            "IB (or the fabric's plugin) on every rank",
            action=None if fine else "drain" if mixed else "warn",
            advice=None if fine else "ibstat; /dev/infiniband in the container; NCCL_IB_HCA",
            why=None if fine else "NCCL fell back to TCP",
        )
    for host, interface in bootstraps.items():
        name = interface.partition(" / ")[0]
        shared = list(bootstraps.values()).count(interface) > 1
        bad = shared or re.match(r"docker|br-|veth|cni|flannel|virbr|lo$", name)
        if bad:
            found.find(
                FAIL,
                "nccl-bootstrap",
                host,
                interface,
                "an interface of the cluster's network",
                action="drain",
                why="the same address on several hosts: connections end at home"
                if shared
                else "a bridge of this host",
                advice="NCCL_SOCKET_IFNAME=^docker,lo or =NAME",
            )
        else:
            found.tell("nccl-bootstrap", host, interface)
    if channels:
        found.find(
            PASS if direct == channels else WARN,
            "peer-memory",
            "channels",
            f"{channels - direct} of {channels} without GDRDMA",
            "0",
            action=None if direct == channels else "warn",
            advice=None if direct == channels else "nvidia_peermem loaded? NIC and GPU below one switch?",
        )
    if not found.findings:
        found.cut("nothing in it tells network or errors")
    found.data = {"channels": channels, "direct": direct}
    return found


def _warn_advice(words: str) -> str:
    if "nvls" in words.lower() or "invalid argument" in words:
        return "was the fabric manager restarted under running GPUs? reset all GPUs or reboot"
    return "the first WARN of the first rank names the cause"


KINDS = (
    Kind("nccl-tests", is_tests, parse_tests),
    Kind("NCCL's log", is_log, parse_log),
    Kind("messages of a launch", is_launch, parse_launch),
)
