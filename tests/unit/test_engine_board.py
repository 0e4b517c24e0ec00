"""What nodes wait for: steps of others, secrets, hardware, hooks; and that nobody waits for what will never come."""

from __future__ import annotations

import gevent
import pytest

from provision.engine.board import Blocked, Board, Done, Hooked, LateSecrets
from provision.engine.plan import Prerequisite


def test_a_step_waits_for_another_nodes_and_is_told_whether_it_changed_something() -> None:
    board = Board()
    waiting = gevent.spawn(
        board.await_steps, [Prerequisite("head-1", "munge:*"), Prerequisite("head-1", "slurm:head")]
    )
    board.settle("head-1", "munge:*", Done(True))
    gevent.sleep(0)
    assert not waiting.ready()
    board.settle("head-1", "slurm:head", Done(True, changed=2))
    assert waiting.get(timeout=5) is True


def test_behind_a_failed_step_a_node_is_blocked_by_its_name() -> None:
    board = Board()
    board.settle("head-1", "slurm:head", Done(False))
    board.settle("head-1", "slurm:head", Done(True))  # the first word counts
    with pytest.raises(Blocked, match="blocked by head-1: slurm:head is not done there"):
        board.await_steps([Prerequisite("head-1", "slurm:head")])


def test_one_that_is_not_needed_is_waited_for_and_may_fail() -> None:
    board = Board()
    waiting = gevent.spawn(board.await_steps, [Prerequisite("head-2", "slurm:head", needed=False)])
    gevent.sleep(0)
    assert not waiting.ready()
    board.settle("head-2", "slurm:head", Done(False))
    assert waiting.get(timeout=5) is False


def test_secrets_are_waited_for_when_one_is_asked_for() -> None:
    board = Board()
    secrets = LateSecrets(board)
    asked = gevent.spawn(secrets.__getitem__, "munge.key")
    gevent.sleep(0)
    assert not asked.ready()
    board.give_secrets({"munge.key": b"k"})
    assert asked.get(timeout=5) == b"k"


def test_when_nothing_more_will_be_told_nobody_waits_now_or_later() -> None:
    board = Board()
    board.settle("n1", "base:*", Done(True))
    step = gevent.spawn(board.await_steps, [Prerequisite("head-1", "slurm:head")])
    hook = gevent.spawn(board.await_hook, 0, "n1")
    seen = gevent.spawn(board.await_seen, ["n1", "n2"])
    gevent.sleep(0)
    board.close("the controller is gone")
    seen.get(timeout=5)
    for waiting in (step, hook):
        with pytest.raises(Blocked, match="the controller is gone"):
            waiting.get(timeout=5)
    with pytest.raises(Blocked, match="the controller is gone"):
        board.secrets()
    with pytest.raises(Blocked, match="the controller is gone"):
        board.await_steps([Prerequisite("n3", "base:*")])
    board.await_seen(["n4"])
    assert board.await_steps([Prerequisite("n1", "base:*")]) is False  # what was told before holds


def test_what_a_hook_came_to_is_told_to_the_node_that_waits_for_it() -> None:
    board = Board()
    waiting = gevent.spawn(board.await_hook, 1, "n1")
    board.give_hook(1, "n1", Hooked(3))
    assert waiting.get(timeout=5) == Hooked(3)


def test_whether_a_node_is_in_use_is_the_heads_word_and_no_word_is_no_answer() -> None:
    board = Board()
    waiting = gevent.spawn(board.admitted, "n1")
    board.give_admitted(frozenset({"n1"}))
    assert waiting.get(timeout=5) is True
    assert board.admitted("n2") is False
    silent = Board()
    silent.give_admitted("blocked by head-1: no route")
    with pytest.raises(Blocked, match="no route"):
        silent.admitted("n1")
