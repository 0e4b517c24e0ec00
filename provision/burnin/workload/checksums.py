"""Which rank holds a gradient that the others do not: from tables of checksums, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Odd:
    """The ranks that differ, how that was told, and whether it names the culprit or only suspects."""

    ranks: tuple[int, ...]
    certain: bool
    how: str


def odd_ranks(first: Sequence[str], replay: Sequence[str] | None = None) -> Odd:
    """Name the ranks whose checksum is wrong, when all should be equal.

    `first` has one checksum for each rank; `replay` those of the same step done once more from the same
    weights and data. More than half of the ranks outvote the rest. Without such a majority (two ranks, say)
    the replay decides, if its checksums agree: right is what could be repeated. Else all are suspects.
    """
    values, votes = Counter(first).most_common(1)[0]
    if votes == len(first):
        return Odd((), True, "all ranks agree")
    if 2 * votes > len(first):
        ranks = tuple(rank for rank, value in enumerate(first) if value != values)
        return Odd(ranks, True, f"{votes} of {len(first)} ranks agree on another value")
    if replay is not None and len(set(replay)) == 1:
        ranks = tuple(rank for rank, value in enumerate(first) if value != replay[0])
        if len(ranks) < len(first):
            return Odd(ranks, True, "the step done once more agrees on all ranks")
    return Odd(tuple(range(len(first))), False, "no majority, and doing the step once more did not settle it")


def odd_gpus(rows: Sequence[Mapping[str, Any]]) -> Odd:
    """The ranks whose GPU computed what the others did not, from rows of `Rotation`.

    For each share of each step the ranks that computed it vote. A rank that is outvoted is named for certain; where
    there is no majority, all that disagree are suspects.
    """
    certain: dict[int, None] = {}
    suspects: dict[int, None] = {}
    for votes in _votes(rows).values():
        voters = [rank for rank, _ in votes]
        odd = odd_ranks([checksum for _, checksum in votes])
        for index in odd.ranks:
            (certain if odd.certain else suspects)[voters[index]] = None
    if certain:
        return Odd(tuple(sorted(certain)), True, "other GPUs got other bits from the same data")
    if suspects:
        return Odd(
            tuple(sorted(suspects)),
            False,
            "the same data gave different bits, and no majority tells which are right",
        )
    return Odd((), True, "all GPUs agree")


def _votes(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], list[tuple[int, str]]]:
    """(step, share) -> who computed it, with what result."""
    votes: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for row in rows:
        ranks = len(row["checksums"])
        for rank, checksum in enumerate(row["checksums"]):
            votes.setdefault((row["step"], (rank + row["shift"]) % ranks), []).append((rank, checksum))
    return votes
