"""Whether every result was right. Wrong bits fail a node on any model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from provision.burnin.judge.parts import Judged, found, hosts, listed
from provision.burnin.result import BurninResult, Collective, Compute, Training, TrainingRun
from provision.burnin.workload.checksums import Odd, odd_gpus, odd_ranks
from provision.report.model import Verdict

LOSS_MUST_FALL_TO = 0.8  # of the first loss, mean of the last steps; the job itself reaches about 0.2
LAST_STEPS = 5
CORRUPTION = "silent data corruption: take the node out, keep its lines for the vendor"


def bits(result: BurninResult) -> Iterable[Judged]:
    """All findings about right and wrong."""
    yield from _collectives(result)
    yield from _products(result)
    yield from _transfers(result)
    yield from _training(result)
    yield from _rotations(result)
    for run in result.training_runs:
        yield _run_learns(result, run)
    yield from _checkpoint(result)


def _collectives(result: BurninResult) -> Iterable[Judged]:
    """Whether every element of every collective came out right."""
    by_operation: dict[str, list[Collective]] = {}
    for row in result.collectives:
        by_operation.setdefault(row.operation, []).append(row)
    nodes = hosts(result)
    if not by_operation and result.complete:
        verdict, why = (
            (Verdict.SKIP, "a single rank: there is nothing to exchange")
            if result.world_size == 1
            else (Verdict.UNKNOWN, "no collective was measured")
        )
        yield found(verdict, "collective-correct", nodes, why=why)
    for operation, rows in by_operation.items():
        check = f"collective-{operation}"
        refused = next((row.unsupported for row in rows if row.unsupported), None)
        if refused:
            why = f"{operation}: {result.backend} does not have it: {refused}"
            yield found(Verdict.SKIP, check, nodes, why=why)
            continue
        wrong = Counter(dict.fromkeys(range(result.world_size), 0))
        for row in rows:
            wrong.update(dict(enumerate(row.wrong)))
        of_host: Counter[str] = Counter()
        for rank, count in wrong.items():
            of_host[result.host(rank)] += count
        for host in (host for host in nodes if of_host[host]):
            ranks = [rank for rank, count in wrong.items() if count and result.host(rank) == host]
            yield found(
                Verdict.FAIL,
                check,
                [host],
                read=f"{of_host[host]} wrong elements",
                expected="0",
                why=f"{operation}: {of_host[host]} wrong elements on rank {listed(ranks)} ({host})",
                action="run it again with the node alone and with another partner: node, link or switch",
            )
        right = [host for host in nodes if not of_host[host]]
        if right:
            yield found(Verdict.PASS, check, right, read=f"{len(rows)} sizes, 0 wrong elements")


def _products(result: BurninResult) -> Iterable[Judged]:
    """Matrix products: near the exact ones, the same bits every time, the same bits on every GPU of a model."""
    by_host: dict[str, list[Compute]] = {}
    for row in result.compute:
        by_host.setdefault(result.host(row.rank), []).append(row)
    for host, rows in by_host.items():
        wrong = [row for row in rows if not row.relative_error <= row.tolerance]
        unsteady = [row for row in rows if row.differing_products]
        if wrong:
            ranks = listed(sorted({row.rank for row in wrong}))
            yield found(
                Verdict.FAIL,
                "matmul-correct",
                [host],
                read=f"{wrong[0].relative_error:.1e}",
                expected=f"at most {wrong[0].tolerance:.0e}",
                why=f"wrong {wrong[0].dtype} matrix product on rank {ranks} ({host})",
                action="replace this GPU (or CPU): it computes wrong results",
            )
        if unsteady:
            first = unsteady[0]
            yield found(
                Verdict.FAIL,
                "matmul-steady",
                [host],
                read=f"{first.differing_products} of {first.products} batches",
                expected="the bits of the first product every time",
                why=f"rank {first.rank} ({host}): the same {first.dtype} product gave different bits",
                action=CORRUPTION,
            )
        if not wrong and not unsteady:
            yield found(Verdict.PASS, "matmul-correct", [host], read=f"{rows[0].relative_error:.1e}")
    yield from _same_products(result)


def _same_products(result: BurninResult) -> Iterable[Judged]:
    groups: dict[tuple[str, str | None], list[Compute]] = {}
    for row in result.compute:
        if row.checksum is not None:
            gpu = result.ranks[row.rank].gpu
            groups.setdefault((row.dtype, gpu.name if gpu else None), []).append(row)
    for (dtype, _), rows in groups.items():
        if result.device == "cpu" or len(rows) < 2:
            continue
        odd = odd_ranks([row.checksum or "" for row in rows])
        ranks = [rows[index].rank for index in odd.ranks]
        if ranks:
            yield from _blamed(result, "matmul-agrees", ranks, odd, f"the same {dtype} product")
        else:
            nodes = list(dict.fromkeys(result.host(row.rank) for row in rows))
            yield found(Verdict.PASS, "matmul-agrees", nodes, read=f"{dtype}: {len(rows)} GPUs, bit for bit")


def _blamed(result: BurninResult, check: str, ranks: Sequence[int], odd: Odd, what: str) -> Iterable[Judged]:
    """One finding for each node of the ranks that differ; as suspects where it cannot be told who is wrong."""
    for node in dict.fromkeys(result.host(rank) for rank in ranks):
        own = [rank for rank in ranks if result.host(rank) == node]
        gpus = listed(_gpu(result, rank) for rank in own)
        doubt = "" if odd.certain else f", one of ranks {listed(ranks)} is wrong"
        yield found(
            Verdict.FAIL,
            check,
            [node],
            read=f"rank {listed(own)} differs",
            expected="the same bits on every GPU of the model",
            why=f"{what}: other bits on rank {listed(own)} of {node} ({gpus}){doubt}; {odd.how}",
            action=CORRUPTION,
        )


def _gpu(result: BurninResult, rank: int) -> str:
    entry = result.ranks[rank]
    return (entry.gpu and entry.gpu.uuid) or f"local rank {entry.local_rank}"


def _transfers(result: BurninResult) -> Iterable[Judged]:
    """Copies and peer-to-peer transfers."""
    for pair in result.pairs:
        if pair.wrong:
            ends = list(dict.fromkeys((result.host(pair.source), result.host(pair.target))))
            yield found(
                Verdict.FAIL,
                "peer-correct",
                ends,
                read=f"{pair.wrong} wrong elements",
                expected="0",
                why=f"{pair.wrong} wrong elements from rank {pair.source} to rank {pair.target}",
                action="of two GPUs the one that is wrong with others too; else the link between them",
            )
    for copy in result.copies:
        if copy.wrong:
            host = result.host(copy.rank)
            yield found(
                Verdict.FAIL,
                "copy-correct",
                [host],
                read=f"{copy.wrong} wrong elements",
                expected="0",
                why=f"{copy.kind}: {copy.wrong} wrong elements on rank {copy.rank} ({_gpu(result, copy.rank)})",
                action=CORRUPTION,
            )


def _rotations(result: BurninResult) -> Iterable[Judged]:
    """One training step, its shares computed by other GPUs in turn."""
    if not result.rotations:
        return
    odd = odd_gpus([row.model_dump() for row in result.rotations])
    yield from _blamed(result, "gradients-replayed", odd.ranks, odd, "the same training step")
    blamed = {result.host(rank) for rank in odd.ranks}
    clean = [host for host in hosts(result) if host not in blamed]
    if clean:
        replays = f"{len(result.rotations)} replays, bit for bit"
        yield found(Verdict.PASS, "gradients-replayed", clean, read=replays)


def _training(result: BurninResult) -> Iterable[Judged]:
    """Gradients and loss of the training that is compared bit for bit."""
    training, nodes = result.training, hosts(result)
    if training is None:
        if result.complete:
            yield found(Verdict.UNKNOWN, "gradients-agree", nodes, why="no training was run")
        return
    yield from _gradients_agree(result, training, nodes)
    off = [
        rank
        for rank, error in enumerate(training.reference_error)
        if not error <= training.reference_tolerance
    ]
    worst_error = max(training.reference_error, key=lambda error: (math.isnan(error), error))
    named = list(dict.fromkeys(result.host(rank) for rank in off)) or nodes
    yield found(
        Verdict.FAIL if off else Verdict.PASS,
        "gradient-reference",
        named,
        read=f"{worst_error:.1e}",
        expected=f"at most {training.reference_tolerance:.0e} from a one-process run",
        why=f"the averaged gradient on rank {listed(off)} is not that of a one-process run" if off else None,
        action="a rank computed its share wrongly, or the all-reduce did" if off else None,
    )
    yield _loss_falls(training, nodes)
    same = training.loss_spread == 0.0
    yield found(
        Verdict.PASS if same else Verdict.FAIL,
        "loss-agrees",
        nodes,
        read=f"spread {training.loss_spread:g}",
        expected="0",
        why=None if same else f"the ranks' averaged losses differ by up to {training.loss_spread:g}",
    )


def _gradients_agree(result: BurninResult, training: Training, nodes: Sequence[str]) -> Iterable[Judged]:
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
        yield found(
            Verdict.FAIL,
            "gradients-agree",
            named,
            read=" ".join(entry.first),
            expected="the same checksum on every rank",
            why=why,
            action=CORRUPTION,
        )
    clean = [host for host in nodes if host not in blamed]
    if clean:
        yield found(Verdict.PASS, "gradients-agree", clean, read=f"{training.steps} steps, bit for bit")


def _loss_falls(training: Training, nodes: Sequence[str]) -> Judged:
    if len(training.losses) <= LAST_STEPS:
        why = f"only {len(training.losses)} steps were trained"
        return found(Verdict.UNKNOWN, "loss-falls", nodes, why=why)
    first, last = training.losses[0], math.fsum(training.losses[-LAST_STEPS:]) / LAST_STEPS
    falls = last <= LOSS_MUST_FALL_TO * first  # False for NaN
    return found(
        Verdict.PASS if falls else Verdict.FAIL,
        "loss-falls",
        nodes,
        read=f"{first:.3f} to {last:.3f} in {training.steps} steps",
        expected=f"at most {LOSS_MUST_FALL_TO:g} of the first",
        why=None if falls else f"the loss went from {first:.3f} to {last:.3f} only",
    )


def _run_learns(result: BurninResult, run: TrainingRun) -> Judged:
    """A run for speed is short and large: its loss must fall at all, and be the same to every rank."""
    check, nodes = f"training-{run.strategy}", hosts(result)
    if len(run.losses) < 2:
        return found(Verdict.UNKNOWN, check, nodes, why=f"only {len(run.losses)} steps were trained")
    late = run.losses[len(run.losses) // 2 :]
    first, last = run.losses[0], math.fsum(late) / len(late)
    rates = f"{run.tokens_per_second:.0f} tokens/s, {run.tflops_per_gpu:.3g} TFLOP/s a GPU"
    read = f"loss {first:.3f} to {last:.3f}, {rates}"
    if not last < first:  # NaN too
        why = f"{run.strategy}: the loss went from {first:.3f} to {last:.3f}"
        return found(Verdict.FAIL, check, nodes, read=read, expected="a loss that falls", why=why)
    if run.loss_spread != 0.0:
        why = f"{run.strategy}: the ranks' losses differ by up to {run.loss_spread:g}"
        return found(Verdict.FAIL, check, nodes, read=read, expected="the same loss on all ranks", why=why)
    return found(Verdict.PASS, check, nodes, read=read)


def _checkpoint(result: BurninResult) -> Iterable[Judged]:
    saved = result.checkpoint
    if saved is None:
        return
    same = bool(saved.losses) and saved.losses == saved.resumed_losses[: len(saved.losses)]
    written, read_back = (saved.bytes / seconds / 1e9 for seconds in (saved.save_seconds, saved.load_seconds))
    rates = f"saved at {written:.2f} GB/s, loaded at {read_back:.2f} GB/s"
    yield found(
        Verdict.PASS if same else Verdict.FAIL,
        "checkpoint-resumes",
        hosts(result),
        read=f"{saved.folder} ({saved.filesystem or 'filesystem unknown'}): {rates}",
        expected="the losses of the run before it was killed",
        why=None
        if same
        else f"after the restart the losses were {listed(saved.resumed_losses)}, before {listed(saved.losses)}",
        action=None if same else "what was read back is not what was written: look at the storage",
    )
