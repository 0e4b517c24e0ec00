"""From what a burn-in measured to a verdict for each node. Pure: the same input gives the same verdicts.

A wrong bit fails a node whatever its model; a speed is only judged where a limit is known, and where none is
the verdict is unknown, never pass. On the CPU no speed is judged at all (skip).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from provision.burnin.result import BurninResult, Collective, Compute, Training
from provision.burnin.workload.checksums import odd_ranks
from provision.profiles.gpu import Limit, Measure, gpu_profile
from provision.report.model import Finding, NodeResult, Verdict, worst
from provision.site.hostlist import fold

LOSS_MUST_FALL_TO = 0.8  # of the first loss, mean of the last steps; the job itself reaches about 0.2
LAST_STEPS = 5


@dataclass(frozen=True)
class Expected:
    """What the site says about one node."""

    gpus: int = 0  # ranks that use a GPU; 0: one rank on the CPU


@dataclass(frozen=True)
class Judgement:
    """Findings, and the verdict of each expected node with the reason for anything but a pass."""

    verdict: Verdict
    nodes: dict[str, NodeResult]
    findings: list[Finding]


@dataclass(frozen=True)
class _Judged:
    """A finding and the nodes whose verdict it counts for."""

    nodes: tuple[str, ...]
    finding: Finding


def judge(
    result: BurninResult | None,
    expected: Mapping[str, Expected],
    *,
    limits: Mapping[str, float] | None = None,
    left_out: Mapping[str, str] | None = None,
    why_no_result: str | None = None,
    source: str | None = None,
) -> Judgement:
    """Judge a run on the nodes `expected`.

    `limits` are the site's own (measure -> lowest number that passes); `left_out` are nodes that could not
    take part, with the reason; `why_no_result` explains a missing `result`; `source` is the document's path.
    """
    left_out = left_out or {}
    took_part = [node for node in expected if node not in left_out]
    judged = [
        _Judged((node,), _finding(Verdict.UNKNOWN, "burnin-ran", [node], why=left_out[node]))
        for node in expected
        if node in left_out
    ]
    if result is None:
        why = why_no_result or "there is no result"
        judged += [
            _Judged((node,), _finding(Verdict.UNKNOWN, "burnin-ran", [node], why=why)) for node in took_part
        ]
    else:
        judged += _attendance(result, took_part, expected)
        if result.ranks:
            judged += [
                *_collectives(result),
                *_bandwidth(result, limits or {}),
                *_compute(result, limits or {}),
                *_training(result),
            ]
    for entry in judged:
        entry.finding.source = entry.finding.source or source
    nodes = {node: _node_result(node, judged) for node in expected}
    return Judgement(worst(node.verdict for node in nodes.values()), nodes, [j.finding for j in judged])


def _node_result(node: str, judged: Iterable[_Judged]) -> NodeResult:
    about = [entry.finding for entry in judged if node in entry.nodes]
    verdict = worst(finding.verdict for finding in about)
    reasons = [finding.why for finding in about if finding.verdict is verdict and finding.why]
    reason = None if verdict in (Verdict.PASS, Verdict.SKIP) else (reasons or ["nothing was measured"])[0]
    return NodeResult(verdict=verdict, reason=reason)


def _finding(
    verdict: Verdict,
    check: str,
    nodes: Sequence[str],
    *,
    read: str | None = None,
    expected: str | None = None,
    why: str | None = None,
    action: str | None = None,
    source: str | None = None,
) -> Finding:
    return Finding(
        verdict=verdict,
        check=check,
        subject=fold(nodes),
        read=read,
        expected=expected,
        why=why,
        action=action,
        source=source,
    )


def _attendance(
    result: BurninResult, nodes: Sequence[str], expected: Mapping[str, Expected]
) -> Iterable[_Judged]:
    """Whether every node took part, to the end, with all its GPUs."""
    ranks = Counter(rank.host for rank in result.ranks)
    at_fault = {
        missing.host: f"rank {missing.rank}: {missing.why}"
        for missing in (result.failure.missing if result.failure else [])
        if missing.host
    }
    for node in nodes:
        if node in at_fault and result.ranks:
            yield _Judged(
                (node,),
                _finding(
                    Verdict.FAIL,
                    "burnin-ran",
                    [node],
                    read=at_fault[node],
                    expected="every rank to the end",
                    why=at_fault[node],
                    action=f"look at the kernel messages of {node} and at its rank's own lines",
                ),
            )
        elif result.failure or not result.complete:
            why = at_fault.get(node) or (
                f"the run did not finish: {result.failure.message}"
                if result.failure
                else "the run did not finish"
            )
            yield _Judged((node,), _finding(Verdict.UNKNOWN, "burnin-ran", [node], why=why))
        elif not ranks[node]:
            why = f"no rank ran on it; ranks ran on {fold(ranks)}"
            yield _Judged((node,), _finding(Verdict.UNKNOWN, "burnin-ran", [node], why=why))
        else:
            yield _Judged((node,), _finding(Verdict.PASS, "burnin-ran", [node], read=f"{ranks[node]} ranks"))
        if ranks[node] and expected[node].gpus:
            yield from _gpus(result, node, expected[node].gpus)
    if result.injected:
        why = f"a fault was injected on purpose ({result.injected}): this run proves nothing good"
        yield _Judged(tuple(nodes), _finding(Verdict.UNKNOWN, "burnin-injected", nodes, why=why))


def _gpus(result: BurninResult, node: str, expected: int) -> Iterable[_Judged]:
    if result.device == "cpu":
        why = f"the site says {expected} GPUs, but the burn-in ran on the CPU"
        yield _Judged((node,), _finding(Verdict.UNKNOWN, "burnin-gpus", [node], why=why, read="cpu"))
        return
    used = [rank.gpu.uuid or f"rank {rank.rank}" for rank in result.ranks if rank.host == node and rank.gpu]
    distinct = len(set(used))
    good = distinct == expected and len(used) == expected
    yield _Judged(
        (node,),
        _finding(
            Verdict.PASS if good else Verdict.FAIL,
            "burnin-gpus",
            [node],
            read=str(distinct),
            expected=str(expected),
            why=None if good else f"{len(used)} ranks used {distinct} different GPUs, expected {expected}",
            action=None if good else f"provision health on {node}: is a GPU lost, or taken by another job?",
        ),
    )


def _hosts(result: BurninResult) -> list[str]:
    return list(dict.fromkeys(rank.host for rank in result.ranks))


def _collectives(result: BurninResult) -> Iterable[_Judged]:
    """Whether every element of every collective came out right."""
    by_operation: dict[str, list[Collective]] = {}
    for row in result.collectives:
        by_operation.setdefault(row.operation, []).append(row)
    hosts = _hosts(result)
    if not by_operation and result.complete:
        verdict, why = (
            (Verdict.SKIP, "a single rank: there is nothing to exchange")
            if result.world_size == 1
            else (Verdict.UNKNOWN, "no collective was measured")
        )
        yield _Judged(tuple(hosts), _finding(verdict, "collective-correct", hosts, why=why))
    for operation, rows in by_operation.items():
        refused = next((row.unsupported for row in rows if row.unsupported), None)
        if refused:
            why = f"{operation}: {result.backend} does not have it: {refused}"
            yield _Judged(tuple(hosts), _finding(Verdict.SKIP, f"collective-{operation}", hosts, why=why))
            continue
        wrong: Counter[str] = Counter()
        for row in rows:
            for rank, count in enumerate(row.wrong):
                wrong[result.host(rank)] += count
        for host in (host for host in hosts if wrong[host]):
            ranks = sorted({rank for row in rows for rank, n in enumerate(row.wrong) if n})
            of_host = [rank for rank in ranks if result.host(rank) == host]
            yield _Judged(
                (host,),
                _finding(
                    Verdict.FAIL,
                    f"collective-{operation}",
                    [host],
                    read=f"{wrong[host]} wrong elements",
                    expected="0",
                    why=f"{operation}: {wrong[host]} wrong elements on rank {_list(of_host)} ({host})",
                    action="run it again with the node alone and with another partner: node, link or switch",
                ),
            )
        right = [host for host in hosts if not wrong[host]]
        if right:
            sizes = f"{len(rows)} sizes, 0 wrong elements"
            yield _Judged(tuple(right), _finding(Verdict.PASS, f"collective-{operation}", right, read=sizes))


def _bandwidth(result: BurninResult, overrides: Mapping[str, float]) -> Iterable[_Judged]:
    """The all-reduce's bus bandwidth against the limit for this model and shape."""
    hosts = _hosts(result)
    check: Measure = "all_reduce_busbw_gbs"
    rows = [row for row in result.collectives if row.operation == "all_reduce" and row.busbw_gbs is not None]
    if not rows:
        return
    row = max(rows, key=lambda entry: entry.bytes)
    assert row.busbw_gbs is not None
    read = f"{row.busbw_gbs:.2f} GB/s at {row.bytes} bytes"
    if result.device == "cpu":
        why = "CPU run: no limit"
        yield _Judged(tuple(hosts), _finding(Verdict.SKIP, "collective-bandwidth", hosts, read=read, why=why))
        return
    shape = Counter(rank.host for rank in result.ranks)
    gpus = min(shape.values())
    limit = _limit(_models(result), check, overrides, nodes=len(shape), gpus=gpus)
    finding = _against(limit, row.busbw_gbs, read, "collective-bandwidth", hosts)
    if isinstance(limit, Limit) and finding.verdict is not Verdict.PASS:
        if row.bytes < limit.bytes:
            finding = _finding(
                Verdict.UNKNOWN,
                "collective-bandwidth",
                hosts,
                read=read,
                why=f"the limit holds from {limit.bytes} bytes on; the largest message was {row.bytes}",
            )
        elif limit.nvls and result.environment.get("NCCL_NVLS_ENABLE") == "0":
            finding = _finding(
                Verdict.UNKNOWN,
                "collective-bandwidth",
                hosts,
                read=read,
                why="the limit holds with NVLS, which NCCL_NVLS_ENABLE=0 switched off",
            )
    yield _Judged(tuple(hosts), finding)


def _compute(result: BurninResult, overrides: Mapping[str, float]) -> Iterable[_Judged]:
    """Each rank's matrix products: right, and fast enough."""
    by_host: dict[str, list[Compute]] = {}
    for row in result.compute:
        by_host.setdefault(result.host(row.rank), []).append(row)
    for host, rows in by_host.items():
        wrong = [row for row in rows if not row.relative_error <= row.tolerance]
        if wrong:
            ranks = _list(row.rank for row in wrong)
            yield _Judged(
                (host,),
                _finding(
                    Verdict.FAIL,
                    "matmul-correct",
                    [host],
                    read=f"{wrong[0].relative_error:.1e}",
                    expected=f"at most {wrong[0].tolerance:.0e}",
                    why=f"wrong matrix product on rank {ranks} ({host})",
                    action="replace this GPU (or CPU): it computes wrong results",
                ),
            )
        else:
            yield _Judged(
                (host,),
                _finding(Verdict.PASS, "matmul-correct", [host], read=f"{rows[0].relative_error:.1e}"),
            )
        slowest = min(rows, key=lambda row: row.tflops)
        read = f"{slowest.tflops:.3g} TFLOP/s on rank {slowest.rank}"
        if result.device == "cpu":
            why = "CPU run: no limit"
            yield _Judged((host,), _finding(Verdict.SKIP, "matmul-speed", [host], read=read, why=why))
            continue
        models = {rank.gpu.name for rank in result.ranks if rank.host == host and rank.gpu}
        limit = _limit(models, "matmul_bf16_tflops", overrides, nodes=1, gpus=len(rows))
        yield _Judged((host,), _against(limit, slowest.tflops, read, "matmul-speed", [host]))


def _models(result: BurninResult) -> set[str]:
    return {rank.gpu.name for rank in result.ranks if rank.gpu}


def _limit(
    models: set[str], measure: Measure, overrides: Mapping[str, float], *, nodes: int, gpus: int
) -> Limit | str:
    """The limit to judge by, or why there is none."""
    if measure in overrides:
        lowest = overrides[measure]
        return Limit(measure=measure, fail=lowest, warn=lowest, source="the site file: burnin.limits")
    if len(models) != 1:
        return f"no limit for a mix of models: {', '.join(sorted(models))}"
    model = next(iter(models))
    profile = gpu_profile(model)
    if profile is None:
        return f"no limit known for the model {model!r}"
    limit = profile.limit(measure, nodes, gpus)
    return limit or f"no limit known for {nodes} x {gpus} {model}"


def _against(limit: Limit | str, value: float, read: str, check: str, nodes: Sequence[str]) -> Finding:
    if isinstance(limit, str):
        action = "set burnin.limits in the site file, from a node that is known to be good"
        return _finding(Verdict.UNKNOWN, check, nodes, read=read, why=limit, action=action)
    if value >= limit.warn:
        return _finding(
            Verdict.PASS, check, nodes, read=read, expected=f"at least {limit.warn:g}", source=limit.source
        )
    verdict = Verdict.WARN if value >= limit.fail else Verdict.FAIL
    lowest = limit.warn if verdict is Verdict.WARN else limit.fail
    return _finding(
        verdict,
        check,
        nodes,
        read=read,
        expected=f"at least {lowest:g}",
        why=f"{read}: {100 * (1 - value / lowest):.0f} % below {lowest:g}",
        source=limit.source,
        action="look for power or heat limits, a lost link, other work on the node; then run it alone",
    )


def _training(result: BurninResult) -> Iterable[_Judged]:
    """Gradients and loss of the training."""
    training, hosts = result.training, _hosts(result)
    if training is None:
        if result.complete:
            why = "no training was run"
            yield _Judged(tuple(hosts), _finding(Verdict.UNKNOWN, "gradients-agree", hosts, why=why))
        return
    yield from _gradients_agree(result, training, hosts)
    off = [
        rank
        for rank, error in enumerate(training.reference_error)
        if not error <= training.reference_tolerance
    ]
    worst_error = max(training.reference_error, key=lambda error: (math.isnan(error), error))
    named = list(dict.fromkeys(result.host(rank) for rank in off)) or hosts
    yield _Judged(
        tuple(named),
        _finding(
            Verdict.FAIL if off else Verdict.PASS,
            "gradient-reference",
            named,
            read=f"{worst_error:.1e}",
            expected=f"at most {training.reference_tolerance:.0e} from a one-process run",
            why=f"the averaged gradient on rank {_list(off)} is not that of a one-process run"
            if off
            else None,
            action="a rank computed its share wrongly, or the all-reduce did" if off else None,
        ),
    )
    yield _Judged(tuple(hosts), _loss_falls(training, hosts))
    same = training.loss_spread == 0.0
    yield _Judged(
        tuple(hosts),
        _finding(
            Verdict.PASS if same else Verdict.FAIL,
            "loss-agrees",
            hosts,
            read=f"spread {training.loss_spread:g}",
            expected="0",
            why=None if same else f"the ranks' averaged losses differ by up to {training.loss_spread:g}",
        ),
    )


def _gradients_agree(result: BurninResult, training: Training, hosts: Sequence[str]) -> Iterable[_Judged]:
    blamed: set[str] = set()
    for entry in training.disagreements:
        odd = odd_ranks(entry.first, entry.replay)
        named = list(dict.fromkeys(result.host(rank) for rank in odd.ranks))
        blamed.update(named)
        who = ", ".join(f"rank {rank} on {result.host(rank)}" for rank in odd.ranks)
        why = (
            f"step {entry.step}: the gradient bits of {who} differ from the others' ({odd.how})"
            if odd.certain
            else f"step {entry.step}: gradient bits differ, one of {who} is wrong ({odd.how})"
        )
        yield _Judged(
            tuple(named),
            _finding(
                Verdict.FAIL,
                "gradients-agree",
                named,
                read=" ".join(entry.first),
                expected="the same checksum on every rank",
                why=why,
                action="silent data corruption: take the node out, keep its lines for the vendor",
            ),
        )
    clean = [host for host in hosts if host not in blamed]
    if clean:
        yield _Judged(
            tuple(clean),
            _finding(Verdict.PASS, "gradients-agree", clean, read=f"{training.steps} steps, bit for bit"),
        )


def _loss_falls(training: Training, hosts: Sequence[str]) -> Finding:
    if len(training.losses) <= LAST_STEPS:
        why = f"only {len(training.losses)} steps were trained"
        return _finding(Verdict.UNKNOWN, "loss-falls", hosts, why=why)
    first, last = training.losses[0], math.fsum(training.losses[-LAST_STEPS:]) / LAST_STEPS
    falls = last <= LOSS_MUST_FALL_TO * first  # False for NaN
    return _finding(
        Verdict.PASS if falls else Verdict.FAIL,
        "loss-falls",
        hosts,
        read=f"{first:.3f} to {last:.3f} in {training.steps} steps",
        expected=f"at most {LOSS_MUST_FALL_TO:g} of the first",
        why=None if falls else f"the loss went from {first:.3f} to {last:.3f} only",
    )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
