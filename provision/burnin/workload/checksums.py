"""Which rank holds a gradient that the others do not: from tables of checksums, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
