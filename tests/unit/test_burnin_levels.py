"""How long a level takes, and which strategies a job of any shape trains by."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.burnin.workload.levels import GIB, KIB, LEVELS, plan
from provision.burnin.workload.meshes import AXES, Strategy, loss_spread, out_of_reach, strategies
from provision.burnin.workload.shapes import SMALL, TINY, shape_for

RANKS = st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 4), (8, 8), (16, 8), (12, 4), (24, 8), (64, 8), (6, 6)])


def test_quick_takes_less_than_150_seconds():
    assert plan("quick", None, "cuda").seconds < 150


@pytest.mark.parametrize("level", LEVELS)
def test_minutes_scale_a_level(level: str):
    short, long = plan(level, 8, "cuda"), plan(level, 60, "cuda")
    assert (short.seconds, long.seconds) == (480, 3600)
    assert long.strategies > 5 * short.strategies
    assert short.sizes == long.sizes
    assert sum((long.collectives, long.compute, long.replicas, long.strategies)) < long.seconds


def test_messages_go_from_1_kib_to_16_gib():
    sizes = plan("standard", None, "cuda").sizes
    assert (sizes[0], sizes[-1]) == (KIB, 16 * GIB)
    assert all(small < large for small, large in pairwise(sizes))


@given(RANKS, st.booleans())
def test_every_strategy_uses_every_rank_once(job: tuple[int, int], thorough: bool):
    ranks, per_node = job
    found = strategies(ranks, per_node, layers=16, heads=32, thorough=thorough)
    assert found[0] == Strategy("fsdp2", shard=ranks)
    assert len(found) == len(set(found))
    for strategy in found:
        places = [tuple(strategy.coordinates(rank)[axis] for axis in AXES) for rank in range(ranks)]
        assert len(set(places)) == ranks
        assert all(
            0 <= number < size for place in places for number, size in zip(place, strategy.sizes, strict=True)
        )
        assert {strategy.share(rank) for rank in range(ranks)} == set(range(strategy.shares))
        assert strategy.tensor <= per_node


def test_eight_gpus_are_tried_by_every_strategy_of_the_field():
    names = {strategy.name for strategy in strategies(8, 8, layers=16, heads=32, thorough=True)}
    assert names == {"fsdp2", "ddp", "tp", "pp+fsdp2", "pp+fsdp2+tp"}
    two_nodes = strategies(16, 8, layers=16, heads=32, thorough=True)
    assert Strategy("fsdp2", replicate=2, shard=8) in two_nodes
    assert Strategy("fsdp2+tp", shard=2, tensor=8) in two_nodes


@pytest.mark.parametrize(("gigabytes", "billions"), [(16, 0.2), (24, 0.6), (40, 1.0), (80, 1.5), (141, 3.0)])
def test_the_model_grows_with_the_memory_and_fits(gigabytes: int, billions: float):
    shape = shape_for(gigabytes * 10**9)
    assert shape.parameters > billions * 1e9 * 0.5
    assert shape.parameters * 18 < gigabytes * 10**9
    assert shape.layers % 4 == 0


def test_useful_operations_count_attention():
    # The usual estimate: six operations for each weight that is multiplied and token; attention comes on top.
    products = 6 * (SMALL.parameters - SMALL.vocabulary * SMALL.width)
    assert products < SMALL.flops_per_token < 1.1 * products


def collective(operation: str, algbw: float | None, unsupported: str | None = None) -> dict[str, object]:
    return {"operation": operation, "seconds": algbw and 1.0, "algbw_gbs": algbw, "unsupported": unsupported}


def test_what_the_network_cannot_carry_is_not_tried():
    model = shape_for(141 * 10**9)
    sharded, replicated = Strategy("fsdp2", shard=2), Strategy("ddp", replicate=2)
    slow = [collective("all_gather", 0.3), collective("all_reduce", 0.3)]
    assert "every step would take" in (out_of_reach(sharded, model, slow) or "")
    assert out_of_reach(sharded, TINY, slow) is None
    assert out_of_reach(sharded, model, [collective("all_gather", 300.0)]) is None
    refused = [collective("reduce_scatter", None, "gloo does not support it")]
    assert "gloo" in (out_of_reach(sharded, model, refused) or "")
    assert out_of_reach(replicated, model, refused) is None


def test_ranks_that_share_a_batch_must_have_one_loss():
    pair = Strategy("fsdp2+tp", shard=2, tensor=2)  # ranks 0, 1 train the first share, 2, 3 the second
    means = [[3.0, 2.0]] * 4
    assert loss_spread(pair, means, [[3.5, 2.5], [3.5, 2.5], [2.5, 1.5], [2.5, 1.5]]) == 0
    assert loss_spread(pair, means, [[3.5, 2.5], [3.5, 2.75], [2.5, 1.5], [2.5, 1.5]]) == 0.25
    assert loss_spread(pair, [*means[:3], [3.0, 2.125]], [None] * 4) == 0.125
