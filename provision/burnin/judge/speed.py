"""Whether it was fast enough: against the limits of the GPU model and against the rest of the fleet.

A speed passes only where a limit is known. Where none is, the fleet and the wire may fail a node, and nothing
passes it. A number above what the hardware can do says that the measurement is wrong, not that the node is good.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from provision.burnin.judge.parts import Expected, Judged, found, hosts
from provision.burnin.result import BurninResult
from provision.profiles.gpu import GpuProfile, Limit, Measure, Shape, gpu_profile
from provision.report.model import Verdict
from provision.site.models import Fabric

DTYPES: dict[str, Measure] = {
    "bfloat16": "matmul_bf16_tflops",
    "float16": "matmul_fp16_tflops",
    "tf32": "matmul_tf32_tflops",
    "float8_e4m3fn": "matmul_fp8_tflops",
}
CHECKS: dict[str, str] = {
    "matmul_bf16_tflops": "matmul-speed",
    "matmul_fp16_tflops": "matmul-fp16-speed",
    "matmul_tf32_tflops": "matmul-tf32-speed",
    "matmul_fp8_tflops": "matmul-fp8-speed",
    "device_copy_gbs": "device-copy-speed",
    "triad_gbs": "triad-speed",
    "host_to_device_gbs": "host-to-device-speed",
    "device_to_host_gbs": "device-to-host-speed",
    "host_to_device_far_gbs": "host-to-device-far-speed",
    "device_to_host_far_gbs": "device-to-host-far-speed",
    "pair_gbs": "peer-speed",
}
NAMES: dict[str, str] = {
    "matmul_bf16_tflops": "bf16 products",
    "matmul_fp16_tflops": "fp16 products",
    "matmul_tf32_tflops": "tf32 products",
    "matmul_fp8_tflops": "fp8 products",
    "device_copy_gbs": "device copy",
    "triad_gbs": "triad",
    "host_to_device_gbs": "host to device",
    "device_to_host_gbs": "device to host",
    "host_to_device_far_gbs": "host to device, far",
    "device_to_host_far_gbs": "device to host, far",
    "pair_gbs": "peer to peer",
}
REQUIRED: Measure = "matmul_bf16_tflops"  # besides the all-reduce: without a limit for it nothing is told
CEILING = 1.1  # of the peak: data sheets count with a lower clock than some GPUs boost to (H100: 1.08)
SETUP_SUSPECT = 0.2  # of the limit: so little is rarely hardware
# A ring over 4 nodes reached 320 to 331 GB/s of 8 x 50 in public (nccl issue 1221): about 0.8 of the wire.
WIRE_FAIL, WIRE_WARN = 0.7, 0.8
# Robust z-score, 0.6745 (x - median) / MAD; beyond 3.5 is an outlier (Iglewicz, Hoaglin: How to Detect and Handle
# Outliers, 1993). The shares keep a fleet that agrees within a percent from failing its slowest: two GPUs of one host
# differed by 3 % under load and by 8 % in a burst.
FLEET_LEAST = 4  # numbers that a median tells something about
FLEET_WARN = (3.5, 0.93)  # z-score, share of the median: beyond both
FLEET_FAIL = (5.0, 0.85)
STEP_SPREAD = 1.2  # slowest tenth of the training steps to the median
LOOK = "look for power or heat limits, a lost link, other work on the node; then run it alone"


@dataclass(frozen=True)
class Reading:
    """One number of one rank (or pair of ranks)."""

    measure: str
    node: str
    subject: str  # "rank 3"
    value: float
    model: str | None

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.measure.endswith("tflops") else "GB/s"

    @property
    def text(self) -> str:
        return f"{NAMES[self.measure]}: {self.value:.4g} {self.unit} on {self.subject}"


def speed(
    result: BurninResult, expected: Mapping[str, Expected], overrides: Mapping[Measure, float]
) -> Iterable[Judged]:
    """All findings about speeds."""
    yield from _bandwidth(result, expected, overrides)
    entries = list(readings(result))
    yield from _each_node(result, entries, overrides)
    if result.device == "cuda":
        yield from _fleet(entries)
        yield from _training(result, overrides)


def readings(result: BurninResult) -> Iterator[Reading]:
    """Every number that one GPU is responsible for."""
    models = [rank.gpu.name if rank.gpu else None for rank in result.ranks]
    for row in result.compute:
        measure = DTYPES.get(row.dtype, REQUIRED if result.device == "cpu" else None)
        if measure:
            host = result.host(row.rank)
            yield Reading(measure, host, f"rank {row.rank}", row.tflops, models[row.rank])
    for copy in result.copies:
        far = "_far" if copy.place == "far" else ""
        host = result.host(copy.rank)
        yield Reading(f"{copy.kind}{far}_gbs", host, f"rank {copy.rank}", copy.gbs, models[copy.rank])
    for pair in result.pairs:
        host = result.host(pair.source)
        if host == result.host(pair.target):
            subject = f"rank {pair.source} to {pair.target}"
            yield Reading("pair_gbs", host, subject, pair.gbs, models[pair.source])


def _bandwidth(
    result: BurninResult, expected: Mapping[str, Expected], overrides: Mapping[Measure, float]
) -> Iterable[Judged]:
    """The all-reduce at the largest message, of all ranks together; the all-to-all where it has a limit."""
    yield from _collective(result, expected, overrides, "all_reduce", "collective-bandwidth")
    if not isinstance(limit_for(_models(result), "all_to_all_busbw_gbs", overrides, whole(result)), str):
        yield from _collective(result, expected, overrides, "all_to_all", "collective-bandwidth-all-to-all")


def _collective(
    result: BurninResult,
    expected: Mapping[str, Expected],
    overrides: Mapping[Measure, float],
    operation: Literal["all_reduce", "all_to_all"],
    check: str,
) -> Iterable[Judged]:
    nodes = hosts(result)
    measure: Measure = "all_reduce_busbw_gbs" if operation == "all_reduce" else "all_to_all_busbw_gbs"
    rows = [row for row in result.collectives if row.operation == operation and row.busbw_gbs is not None]
    if not rows:
        return
    row = max(rows, key=lambda entry: entry.bytes)
    assert row.busbw_gbs is not None
    read = f"{operation.replace('_', '-')}: {row.busbw_gbs:.2f} GB/s at {row.bytes} bytes"
    if result.device == "cpu":
        yield found(Verdict.SKIP, check, nodes, read=read, why="CPU run: no limit")
        return
    models, shape = _models(result), whole(result)
    if wrong := _beyond(models, measure, row.busbw_gbs, shape):
        yield found(Verdict.UNKNOWN, check, nodes, read=read, why=wrong)
        return
    limit = (
        _between_nodes(result, expected, overrides)
        if operation == "all_reduce"
        else limit_for(models, measure, overrides, shape)
    )
    known = len(models) == 1 and gpu_profile(next(iter(models))) is not None
    if isinstance(limit, Limit) and measure not in overrides and not known and row.busbw_gbs >= limit.fail:
        limit = limit_for(models, measure, overrides, shape)  # of an unknown model nothing passes
    judged = against(limit, row.busbw_gbs, read, check, nodes)
    short = judged.finding.verdict in (Verdict.WARN, Verdict.FAIL)
    if short and isinstance(limit, Limit) and (doubt := _doubt(limit, shape, row.bytes, row.busbw_gbs)):
        judged = found(
            Verdict.UNKNOWN,
            check,
            nodes,
            read=read,
            expected=judged.finding.expected,
            why=doubt,
            action="look at the transports first: NCCL's log, NCCL_* variables, the container's devices",
            source=judged.finding.source,
        )
    yield judged


def _between_nodes(
    result: BurninResult, expected: Mapping[str, Expected], overrides: Mapping[Measure, float]
) -> Limit | str:
    """The limit of the all-reduce: that of the model and shape, else that of the wire in the site file."""
    models, shape = _models(result), whole(result)
    limit = limit_for(models, "all_reduce_busbw_gbs", overrides, shape)
    fabric = next((expected[node].fabric for node in hosts(result) if node in expected), None)
    if isinstance(limit, str) and shape.nodes > 1 and fabric is not None and fabric.gbits:
        return wire_limit(models, fabric, shape)
    return limit


def limits_used(
    result: BurninResult, expected: Mapping[str, Expected], overrides: Mapping[Measure, float]
) -> dict[str, dict[str, Any]]:
    """The limits that a run is judged by, for its report: measure -> fail, warn, bytes, source."""
    if result.device == "cpu" or not result.ranks:
        return {}
    of_gpus = Shape(1, whole(result).gpus, None, nvls(result))
    limits: dict[str, Limit | str] = {
        measure: limit_for(_models(result), measure, overrides, of_gpus)
        for measure in get_args(Measure)
        if measure != "all_reduce_busbw_gbs"
    }
    limits["all_reduce_busbw_gbs"] = _between_nodes(result, expected, overrides)
    shown = {"fail", "warn", "bytes", "source"}
    return {
        measure: limit.model_dump(include=shown)
        for measure, limit in limits.items()
        if isinstance(limit, Limit)
    }


def _models(result: BurninResult) -> set[str]:
    return {rank.gpu.name for rank in result.ranks if rank.gpu}


def whole(result: BurninResult) -> Shape:
    """The shape of the whole run."""
    per_node = Counter(rank.host for rank in result.ranks)
    return Shape(len(per_node), min(per_node.values()), nics(result), nvls(result))


def percent(share: float) -> str:
    """0.123 -> "12 %"; less than one with a decimal."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def _doubt(limit: Limit, shape: Shape, size: int, value: float) -> str | None:
    """Why a limit that is not reached does not tell about the hardware."""
    if size < limit.bytes:
        return f"the limit holds from {limit.bytes} bytes on; the largest message was {size}"
    if limit.nvls is not None and shape.nvls is None:
        return (
            f"the limit holds {'with' if limit.nvls else 'without'} NVLS; the log does not say which it was"
        )
    if limit.nics is not None and shape.nics is None:
        return f"the limit holds for {limit.nics} adapters a node; the log does not say how many there were"
    if value < SETUP_SUSPECT * limit.fail:
        return f"setup suspect: {value:.4g} GB/s is {100 * value / limit.fail:.0f} % of {limit.fail:g}, rarely hardware"
    return None


def nics(result: BurninResult) -> int | None:
    """Network adapters that NCCL used on each node, the fewest; None where no log tells, or it used sockets."""
    by_host: dict[str, set[str]] = {}
    for transport in result.transports:
        if transport.network is None or transport.network == "Socket" or not transport.devices:
            return None
        by_host.setdefault(result.host(transport.rank), set()).update(transport.devices)
    return min(map(len, by_host.values()), default=None)


def nvls(result: BurninResult) -> bool | None:
    """Whether NCCL used NVLink SHARP; None where nothing tells."""
    if result.environment.get("NCCL_NVLS_ENABLE") == "0":
        return False
    told = {transport.nvls for transport in result.transports}
    return False if False in told else True if told == {True} else None


def limit_for(
    models: set[str], measure: Measure, overrides: Mapping[Measure, float], shape: Shape
) -> Limit | str:
    """The limit to judge by, or why there is none."""
    if measure in overrides:
        lowest = overrides[measure]
        return Limit(measure=measure, fail=lowest, warn=lowest, source="the site file: burnin.limits")
    if len(models) != 1:
        return f"no limit for a mix of models: {', '.join(sorted(models)) or 'none'}"
    model = next(iter(models))
    profile = gpu_profile(model)
    if profile is None:
        return f"no limit known for the model {model!r}"
    limit = profile.limit(measure, shape)
    if limit is None:
        how = {True: " with NVLS", False: " without NVLS", None: ""}[shape.nvls]
        adapters = f" and {shape.nics} adapters a node" if shape.nics and shape.nodes > 1 else ""
        return f"no limit known for {measure} on {shape.nodes} x {shape.gpus} {model}{adapters}{how}"
    return limit


def wire_limit(models: set[str], fabric: Fabric, shape: Shape) -> Limit:
    """What the links of the site file must carry between nodes; never more than one node does inside."""
    wire = (fabric.gbits or 0) / 8 * fabric.rails
    profile = gpu_profile(next(iter(models))) if len(models) == 1 else None
    inside = profile and profile.limit("all_reduce_busbw_gbs", Shape(1, shape.gpus, None, shape.nvls))
    fail, warn = WIRE_FAIL * wire, WIRE_WARN * wire
    if inside:
        fail, warn = min(fail, inside.fail), min(warn, inside.warn)
    source = f"{WIRE_FAIL:g} and {WIRE_WARN:g} of the wire, {fabric.rails} x {fabric.gbits:g} Gbit/s by the site file"
    return Limit(measure="all_reduce_busbw_gbs", fail=fail, warn=warn, source=source)


def _each_node(
    result: BurninResult, entries: Sequence[Reading], overrides: Mapping[Measure, float]
) -> Iterable[Judged]:
    """The slowest of each node's GPUs against the limit, measure by measure."""
    by_place: dict[tuple[str, str], list[Reading]] = {}
    for entry in entries:
        by_place.setdefault((entry.node, entry.measure), []).append(entry)
    limited = get_args(Measure)
    unlimited: dict[tuple[str, str], list[Reading]] = {}  # check, why
    for (node, name), group in by_place.items():
        slowest = min(group, key=lambda entry: entry.value)
        fastest = max(group, key=lambda entry: entry.value)
        check = CHECKS[name]
        if result.device == "cpu":
            if name == REQUIRED:
                read = f"{slowest.value:.4g} TFLOP/s on {slowest.subject}"
                yield found(Verdict.SKIP, check, [node], read=read, why="CPU run: no limit")
            continue
        if name not in limited:
            continue  # the fleet alone
        measure: Measure = name  # type: ignore[assignment]  # one of Measure's own words
        models = {entry.model for entry in group if entry.model}
        gpus = sum(rank.host == node for rank in result.ranks)
        shape = Shape(1, gpus, None, nvls(result))
        if wrong := _beyond(models, measure, fastest.value, shape):
            yield found(Verdict.UNKNOWN, check, [node], read=fastest.text, why=wrong)
            continue
        limit = limit_for(models, measure, overrides, shape)
        if isinstance(limit, str) and name != REQUIRED:
            unlimited.setdefault((check, limit), []).extend(group)
            continue
        yield against(limit, slowest.value, slowest.text, check, [node])
    for (check, why), group in unlimited.items():
        values = [entry.value for entry in group]
        read = f"{NAMES[group[0].measure]}: {min(values):.4g} to {max(values):.4g} {group[0].unit}"
        nodes = list(dict.fromkeys(entry.node for entry in group))
        yield found(Verdict.SKIP, check, nodes, read=read, why=f"{why}: the fleet alone tells")


def _beyond(models: set[str], measure: Measure, value: float, shape: Shape) -> str | None:
    """Why a number cannot be true."""
    profile = gpu_profile(next(iter(models))) if len(models) == 1 else None
    ceiling = profile and _ceiling(profile, measure, shape)
    if not profile or not ceiling or value <= CEILING * ceiling:
        return None
    return (
        f"the measurement is wrong: {value:.4g} is {100 * (value / ceiling - 1):.0f} % above {ceiling:g}, which "
        f"{profile.products[0]} cannot exceed"
    )


def _ceiling(profile: GpuProfile, measure: Measure, shape: Shape) -> float | None:
    peak = profile.peak
    if measure in ("all_reduce_busbw_gbs", "pair_gbs"):
        if not profile.nvlinks or not profile.nvlink_gbs:
            # Each GPU sends as much as the bus bandwidth says; between nodes a switch may add up (SHARP).
            if peak is None or peak.bridge is None or shape.nodes > 1:
                return None
            return max(peak.bridge, peak.pcie)
        # NVLink SHARP adds up in the switch: the bus bandwidth as counted for a ring may exceed that of the link.
        ranks = shape.nodes * shape.gpus
        factor = (
            2 * (ranks - 1) / ranks if measure == "all_reduce_busbw_gbs" and shape.nvls is not False else 1.0
        )
        return profile.nvlinks * profile.nvlink_gbs * max(factor, 1.0)
    if peak is None:
        return None
    return {
        "matmul_bf16_tflops": peak.bf16,
        "matmul_fp16_tflops": peak.fp16,
        "matmul_tf32_tflops": peak.tf32,
        "matmul_fp8_tflops": peak.fp8,
        "device_copy_gbs": peak.memory,
        "host_to_device_gbs": peak.pcie,
        "device_to_host_gbs": peak.pcie,
    }.get(measure)


def against(limit: Limit | str, value: float, read: str, check: str, nodes: Sequence[str]) -> Judged:
    """Judge one number by its limit; `limit` is the reason where there is none."""
    if isinstance(limit, str):
        action = "set burnin.limits in the site file, from a node that is known to be good"
        return found(Verdict.UNKNOWN, check, nodes, read=read, why=limit, action=action)
    if value >= limit.warn:
        return found(
            Verdict.PASS, check, nodes, read=read, expected=f"at least {limit.warn:g}", source=limit.source
        )
    verdict = Verdict.WARN if value >= limit.fail else Verdict.FAIL
    lowest = limit.warn if verdict is Verdict.WARN else limit.fail
    return found(
        verdict,
        check,
        nodes,
        read=read,
        expected=f"at least {lowest:g}",
        why=f"{read}: {percent(1 - value / lowest)} below {lowest:g}",
        source=limit.source,
        action=LOOK,
    )


def _fleet(entries: Sequence[Reading]) -> Iterable[Judged]:
    """Each number against the median of its kind on all GPUs of its model."""
    groups: dict[tuple[str, str | None], list[Reading]] = {}
    for entry in entries:
        groups.setdefault((entry.measure, entry.model), []).append(entry)
    for (measure, _), group in groups.items():
        if len(group) < FLEET_LEAST:
            continue
        check = f"{CHECKS[measure]}-fleet"
        median = statistics.median(entry.value for entry in group)
        mad = statistics.median(abs(entry.value - median) for entry in group)
        outliers: dict[str, list[tuple[float, Reading]]] = {}
        for entry in group:
            z = 0.6745 * (entry.value - median) / mad if mad else float("-inf" if entry.value < median else 0)
            if z < -FLEET_WARN[0] and entry.value < FLEET_WARN[1] * median:
                outliers.setdefault(entry.node, []).append((z, entry))
        source = f"median {median:.4g} and MAD {mad:.2g} of {len(group)} in this run"
        for node, slow in outliers.items():
            z, entry = min(slow, key=lambda pair: pair[1].value)
            fails = z < -FLEET_FAIL[0] and entry.value < FLEET_FAIL[1] * median
            share = FLEET_FAIL[1] if fails else FLEET_WARN[1]
            yield found(
                Verdict.FAIL if fails else Verdict.WARN,
                check,
                [node],
                read=entry.text,
                expected=f"at least {share * median:.4g}, {share:g} of the median",
                why=f"{entry.text}: {percent(1 - entry.value / median)} below the median of {len(group)}, "
                f"robust z-score {z:.1f}",
                source=source,
                action=LOOK,
            )
        good = [node for node in dict.fromkeys(entry.node for entry in group) if node not in outliers]
        if good:
            yield found(Verdict.PASS, check, good, read=f"median {median:.4g} of {len(group)}", source=source)


def _training(result: BurninResult, overrides: Mapping[Measure, float]) -> Iterable[Judged]:
    """Training without recomputation against the matrix rate of the slowest GPU, and steps against each other."""
    nodes = hosts(result)
    rates = [row.tflops for row in result.compute if row.dtype == "bfloat16"]
    models, shape = _models(result), whole(result)
    for run in result.training_runs:
        if run.dtype == "bfloat16" and not run.activation_checkpointing and rates:
            share = run.tflops_per_gpu / min(rates)
            read = f"{run.strategy}: {run.tflops_per_gpu:.4g} TFLOP/s a GPU, {share:.2f} of the matrix rate"
            limit = limit_for(models, "training_of_matmul", overrides, shape)
            if isinstance(limit, str):
                yield found(Verdict.SKIP, "training-speed", nodes, read=read, why=limit)
            else:
                yield against(limit, share, read, "training-speed", nodes)
        if len(run.step_seconds) >= 10:
            middle = statistics.median(run.step_seconds)
            slow = statistics.quantiles(run.step_seconds, n=10)[-1]
            steady = slow <= STEP_SPREAD * middle
            yield found(
                Verdict.PASS if steady else Verdict.WARN,
                "training-steps",
                nodes,
                read=f"{run.strategy}: median {middle:.4g} s, slowest tenth from {slow:.4g} s",
                expected=f"at most {STEP_SPREAD:g} of the median",
                why=None if steady else f"{run.strategy}: steps differ, {slow / middle:.2f} of the median",
                action=None
                if steady
                else "look for other work on the nodes, at the storage, and at the fabric",
            )
