"""How the ranks share a training run: which strategies fit a job, and each rank's place in a mesh. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .shapes import Shape

ACCUMULATION = 2  # micro batches a step and share
MOST_STEP_SECONDS = 30.0  # above it a network is too slow for a model of this size: that is known already
AXES = (
    "pipeline",
    "replicate",
    "shard",
    "tensor",
)  # from the outermost; tensor ranks are neighbours on a node


@dataclass(frozen=True)
class Strategy:
    """One way to train; the product of the four numbers is the number of ranks."""

    name: str
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    activation_checkpointing: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """By `AXES`."""
        return (self.pipeline, self.replicate, self.shard, self.tensor)

    @property
    def shares(self) -> int:
        """Parts of the batch that different ranks train."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` on each axis."""
        place = {}
        for axis, size in reversed(list(zip(AXES, self.sizes))):
            rank, place[axis] = divmod(rank, size)
        return place

    def share(self, rank: int) -> int:
        """Which part of the batch `rank` trains."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]


def strategies(ranks: int, per_node: int, layers: int, heads: int, thorough: bool) -> list[Strategy]:
    """The strategies to try with `ranks` GPUs, `per_node` on each node; FSDP2 alone unless `thorough`."""
    found = [Strategy("fsdp2", shard=ranks)]
    if not thorough:
        return found
    found += [
        Strategy("ddp", replicate=ranks),
        Strategy("fsdp2", shard=ranks, activation_checkpointing=True),
    ]
    nodes = ranks // per_node
    if nodes > 1 and per_node > 1:
        found.append(Strategy("fsdp2", replicate=nodes, shard=per_node))
    tensor = _largest_divisor(per_node, heads)
    if tensor > 1:
        found.append(Strategy("tp" if tensor == ranks else "fsdp2+tp", shard=ranks // tensor, tensor=tensor))
    stages = _largest_divisor(min(ranks, 4) if ranks % 4 == 0 else ranks, layers)
    if stages > 1:
        found.append(
            Strategy("pp" if stages == ranks else "pp+fsdp2", pipeline=stages, shard=ranks // stages)
        )
    if per_node % 2 == 0 and ranks % 4 == 0 and ranks > 4:
        found.append(Strategy("pp+fsdp2+tp", pipeline=2, shard=ranks // 4, tensor=2))
    elif per_node % 2 == 0 and ranks == 4:
        found.append(Strategy("fsdp2+tp", shard=2, tensor=2))
    return list(dict.fromkeys(found))


def _largest_divisor(count: int, of: int) -> int:
    """The largest number that divides both."""
    return next(number for number in range(count, 0, -1) if count % number == 0 and of % number == 0)


def out_of_reach(strategy: Strategy, shape: Shape, collectives: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a strategy cannot be run, judged by what the collectives showed; None: it can. Pure."""
    largest = {row["operation"]: row for row in collectives if row["seconds"]}
    refused = {row["operation"]: row["unsupported"] for row in collectives if row["unsupported"]}
    if strategy.name != "ddp" and "reduce_scatter" in refused:
        return f"the backend has no reduce_scatter: {refused['reduce_scatter']}"
    spread = "all_gather" if strategy.shard > 1 else "all_reduce"
    if strategy.shares > 1 and spread in largest:
        row = largest[spread]
        rounds = (
            (3 * ACCUMULATION) if strategy.shard > 1 else 1
        )  # gathered twice and reduced, each micro batch
        seconds = 2 * shape.parameters / strategy.pipeline / strategy.tensor * rounds / row["algbw_gbs"] / 1e9
        if seconds > MOST_STEP_SECONDS:
            return f"{spread} at {row['algbw_gbs']:.2g} GB/s: every step would take {seconds:.0f} s"
    return None


def loss_spread(strategy: Strategy, means: list[list[float]], own: list[list[float] | None]) -> float:
    """How far apart ranks are that must have the same loss: all of them on the mean, tensor ranks on their own."""
    spread: float = max(max(column) - min(column) for column in zip(*means))
    peers: dict[tuple[int, int], list[list[float]]] = {}
    for rank, losses in enumerate(own):
        if losses is not None:
            place = strategy.coordinates(rank)
            peers.setdefault((place["replicate"], place["shard"]), []).append(losses)
    for group in peers.values():
        spread = max(spread, max(max(column) - min(column) for column in zip(*group)))
    return spread
