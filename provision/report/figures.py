"""Burn-in numbers as tables of text, for a terminal and for a page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from provision.report.text import printable

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float8_e4m3fn": "fp8", "float32": "fp32"}
_COPIES = {
    "device_copy": "copy",
    "triad": "triad",
    "host_to_device": "to device",
    "device_to_host": "to host",
}


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column names what a row is about."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def figures(details: Mapping[str, Any]) -> list[Table]:
    """Tables for details["burnin"], the burn-in's result document, and details["isolation"]. Pure."""
    result = details.get("burnin")
    tables = []
    if isinstance(result, Mapping):
        tables = [_nodes(result), _collectives(result), _training(result), _skipped(result)]
    tables.append(_faults(details.get("isolation") or {}))
    return [table for table in tables if table.rows]


def _nodes(result: Mapping[str, Any]) -> Table:
    """Lowest and highest of each node's GPUs; columns that no node has are left out."""
    ranks = result.get("ranks") or []
    hosts = list(dict.fromkeys(rank["host"] for rank in ranks))
    of_rank = {rank["rank"]: rank["host"] for rank in ranks}
    columns: dict[str, dict[str, list[float]]] = {}

    def add(column: str, rank: int, value: float | None) -> None:
        if value is not None and rank in of_rank:
            columns.setdefault(column, {}).setdefault(of_rank[rank], []).append(value)

    for row in result.get("compute") or []:
        dtype = row.get("dtype") or ""
        add(f"{_DTYPES.get(dtype, dtype)} TFLOP/s".strip(), row["rank"], row.get("tflops"))
    for row in result.get("copies") or []:
        if row.get("place") != "far":
            add(f"{_COPIES.get(row['kind'], row['kind'])} GB/s", row["rank"], row["gbs"])
    for row in result.get("pairs") or []:
        add("peers GB/s", row["source"], row["gbs"])
    kinds: dict[str, Counter[str]] = {host: Counter() for host in hosts}
    for rank in ranks:
        name = rank["gpu"]["name"] if rank.get("gpu") else "CPU"
        kinds[rank["host"]][printable(name).removeprefix("NVIDIA ")] += 1
    rows = [
        (
            printable(host),
            ", ".join(f"{count} x {name}" for name, count in kinds[host].items()),
            *(_range(columns[column].get(host, [])) for column in columns),
        )
        for host in hosts
    ]
    return Table("Each node, slowest to fastest rank", ("node", "ranks", *columns), tuple(rows))


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low}-{high}"


def _collectives(result: Mapping[str, Any]) -> Table:
    """Every operation at its largest message."""
    chosen = {
        (choice["operation"].lower(), choice["bytes"]): f"{choice['algorithm']} {choice['protocol']}"
        for transport in result.get("transports") or []
        for choice in transport["choices"]
    }
    largest: dict[str, Mapping[str, Any]] = {}
    for row in result.get("collectives") or []:
        if row.get("busbw_gbs") and row["bytes"] >= largest.get(row["operation"], row)["bytes"]:
            largest[row["operation"]] = row
    rows = [
        (
            printable(operation),
            f"{row['bytes'] / 2**20:g} MiB",
            f"{row['busbw_gbs']:.2f}",
            str(sum(row.get("wrong") or [])),
            chosen.get((operation.replace("_", ""), row["bytes"]), "-"),
        )
        for operation, row in largest.items()
    ]
    columns = ("operation", "message", "bus GB/s", "wrong", "algorithm")
    return Table("Collectives, all ranks", columns, tuple(rows))


def _training(result: Mapping[str, Any]) -> Table:
    products = [row["tflops"] for row in result.get("compute") or [] if row.get("dtype") == "bfloat16"]
    rows = [
        (
            printable(strategy(run)),
            _count(run["parameters"]),
            f"{run['tokens_per_second']:.0f}",
            f"{run['tflops_per_gpu']:.4g}",
            f"{run['tflops_per_gpu'] / min(products):.2f}" if products else "-",
            f"{statistics.median(run['step_seconds']):.4g}" if run["step_seconds"] else "-",
        )
        for run in result.get("training_runs") or []
    ]
    columns = ("strategy", "parameters", "tokens/s", "TFLOP/s a GPU", "of bf16 products", "seconds a step")
    return Table("Training", columns, tuple(rows))


def _count(number: float) -> str:
    """3487000000 as "3.49 G"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def strategy(run: Mapping[str, Any]) -> str:
    """How a training run was spread, and whether it computed its activations twice."""
    return f"{run['strategy']}, recomputing" if run.get("activation_checkpointing") else str(run["strategy"])


def _skipped(result: Mapping[str, Any]) -> Table:
    rows = [
        (printable(each["what"]), printable(each.get("host") or "everywhere"), printable(each["why"]))
        for each in result.get("skipped") or []
    ]
    return Table("Not measured", ("what", "where", "why"), tuple(rows))


def _faults(isolation: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = [
        (fault["kind"], printable(fault["name"]), _lines(fault["evidence"]))
        for fault in isolation.get("faults") or []
    ]
    if isolation.get("unexplained"):
        rows.append(("unexplained", "-", printable(isolation["unexplained"])))
    return Table("Isolation", ("kind", "what", "evidence"), tuple(rows))


def _lines(evidence: Iterable[str]) -> str:
    lines = [printable(line) for line in evidence]
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more
