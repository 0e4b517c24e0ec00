"""Who holds the wrong gradient: majority first, then the step done once more."""

from hypothesis import given
from hypothesis import strategies as st

from provision.burnin.workload.checksums import odd_ranks


def test_all_equal_names_nobody():
    assert odd_ranks(["a", "a"]).ranks == ()


def test_the_majority_outvotes_one_rank():
    odd = odd_ranks(["a", "b", "a", "a"])
    assert (odd.ranks, odd.certain) == ((1,), True)


def test_two_ranks_need_the_replay():
    odd = odd_ranks(["a", "b"], replay=["a", "a"])
    assert (odd.ranks, odd.certain) == ((1,), True)


def test_two_ranks_that_differ_again_are_both_suspects():
    odd = odd_ranks(["a", "b"], replay=["a", "b"])
    assert (odd.ranks, odd.certain) == ((0, 1), False)


def test_a_replay_that_equals_nobody_names_nobody_for_certain():
    odd = odd_ranks(["a", "b"], replay=["c", "c"])
    assert (odd.ranks, odd.certain) == ((0, 1), False)


def test_two_pairs_are_no_majority():
    odd = odd_ranks(["a", "b", "a", "b"], replay=["b", "b", "b", "b"])
    assert (odd.ranks, odd.certain) == ((0, 2), True)


@given(st.integers(2, 64), st.data())
def test_a_single_passing_fault_is_always_named(size: int, data: st.DataObject):
    culprit = data.draw(st.integers(0, size - 1))
    first = ["wrong" if rank == culprit else "right" for rank in range(size)]
    odd = odd_ranks(first, replay=["right"] * size)
    assert (odd.ranks, odd.certain) == ((culprit,), True)
