"""External tools, where the node has them; their whole output is kept for a vendor.

They run one after another on every node while the GPUs are idle. What is not there is skipped with the reason.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .group import Group
from .system import filesystem
from .telemetry import INFINIBAND

DIAG = ("dcgmi", "diag", "-r", "3", "-j")
DIAG_SECONDS = 2400
FIO_SECONDS = 10
FIO_BYTES = "4G"
WIRE_SECONDS = 5
WIRE_PORT = 18515
STEP_SECONDS = 30  # between two signs of life


def measure(group: Group, raw: Path, shared: Path) -> list[dict[str, Any]]:
    """Rows for `Tool`, from one process of each node."""
    place = group.placement
    first = place.local_rank == 0
    rows = []
    if first:
        rows.append(run(group, raw, "dcgmi diag -r 3", None, DIAG, DIAG_SECONDS))
        for folder in (Path(tempfile.gettempdir()), shared):
            rows += fio(group, raw, folder)
    group.barrier("tools: each node by itself")
    rows += wires(group, raw)
    for row in rows:
        row["host"] = place.host
    return [row for answer in group.gather("tools", rows) for row in answer]


def run(
    group: Group, raw: Path, tool: str, subject: str | None, command: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Run one tool to its end, with signs of life meanwhile."""
    row: dict[str, Any] = {
        "tool": tool, "subject": subject, "skipped": None, "exit": None, "seconds": None, "numbers": {}, "raw": None
    }  # fmt: skip
    if shutil.which(command[0]) is None:
        return {**row, "skipped": f"{command[0]} is not installed"}
    name = re.sub(r"[^\w.-]+", "-", " ".join((group.placement.host, tool, subject or ""))).strip("-")
    path = raw / f"{name}.txt"
    start = time.monotonic()
    with path.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while time.monotonic() - start < seconds:
                group.step(f"{tool} {subject or ''}".strip())
                try:
                    process.wait(STEP_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            status = process.wait()
    return {**row, "exit": status, "seconds": round(time.monotonic() - start, 3), "raw": path.name}


def fio(group: Group, raw: Path, folder: Path) -> list[dict[str, Any]]:
    """Large sequential writes and reads, past the page cache, on the storage of `folder`."""
    rows = []
    for way in ("write", "read"):
        command = (
            "fio", "--name=burnin", f"--filename={folder}/burnin-fio-{group.placement.host}", f"--rw={way}",
            "--bs=1M", f"--size={FIO_BYTES}", "--iodepth=16", "--ioengine=libaio", "--direct=1", "--time_based",
            f"--runtime={FIO_SECONDS}", "--output-format=json",
        )  # fmt: skip
        row = run(group, raw, f"fio {way}", f"{folder} ({filesystem(folder)})", command, 20 * FIO_SECONDS)
        if row["exit"] == 0:
            row["numbers"] = fio_numbers((raw / row["raw"]).read_text(), way)
        rows.append(row)
        if row["skipped"]:
            break
    (folder / f"burnin-fio-{group.placement.host}").unlink(missing_ok=True)
    return rows


def fio_numbers(text: str, way: str) -> dict[str, float]:
    """The rate from fio's JSON, which warnings may precede. Pure."""
    job = json.loads(text[text.index("{") :])["jobs"][0][way]
    return {f"{way}_gbs": job["bw_bytes"] / 1e9}


def wires(group: Group, raw: Path) -> list[dict[str, Any]]:
    """ib_write_bw over each rail, between the nodes in twos: the second of each pair asks the first."""
    place = group.placement
    hosts = list(dict.fromkeys(member["host"] for member in group.members))
    address = {member["host"]: member["address"] for member in group.members}
    mine = sorted(port.name for port in INFINIBAND.glob("*")) if place.local_rank == 0 else []
    rails = group.gather("tools: rails", mine)
    common = set.intersection(
        *({*names} for names, member in zip(rails, group.members) if member["local_rank"] == 0)
    )
    partner = partners(hosts).get(place.host)
    lead = place.local_rank == 0
    tool = "ib_write_bw"
    skip: dict[str, Any] = {
        "tool": tool,
        "subject": None,
        "exit": None,
        "seconds": None,
        "numbers": {},
        "raw": None,
    }
    if not common or len(hosts) < 2:
        why = "one node only" if len(hosts) < 2 else "no InfiniBand or RoCE device that all nodes have"
        return [{**skip, "skipped": why}] if lead else []
    rows = []
    for rail in sorted(common):
        group.barrier(f"{tool} {rail}")
        if lead and partner is None:
            rows.append(
                {**skip, "subject": rail, "skipped": "an odd number of nodes: this one has no partner"}
            )
        elif lead and partner:
            client = hosts.index(place.host) > hosts.index(partner)
            common_options = (
                tool,
                "-d",
                rail,
                "-p",
                str(WIRE_PORT),
                "-D",
                str(WIRE_SECONDS),
                "--report_gbits",
                "-F",
            )
            if client:
                time.sleep(2)  # until the other side listens
            command = (*common_options, address[partner]) if client else common_options
            row = run(group, raw, tool, f"{rail} with {partner}", command, 10 * WIRE_SECONDS)
            if row["exit"] == 0:
                row["numbers"] = wire_numbers((raw / row["raw"]).read_text())
            rows.append(row)
    group.barrier(f"{tool} done")
    return rows


def partners(hosts: Sequence[str]) -> dict[str, str]:
    """Nodes in twos, both ways; the last of an odd number has none. Pure."""
    found = {}
    for one, other in zip(hosts[::2], hosts[1::2]):
        found[one], found[other] = other, one
    return found


def wire_numbers(text: str) -> dict[str, float]:
    """The average rate from ib_write_bw's table (Gbit/s) in 10**9 bytes a second. Pure."""
    rows = re.findall(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+[\d.]+\s*$", text, re.MULTILINE)
    return {"write_gbs": float(rows[-1][3]) / 8} if rows else {}
