"""What a node's own journal is told of a run."""

from __future__ import annotations

from provision.engine.audit import lines


def test_each_change_is_told_with_run_and_person() -> None:
    assert lines("apply", "20260301T120000-ab12", "root@desk", ["base:*: file /etc/hosts"]) == [
        "apply 20260301T120000-ab12 by root@desk: 1 changes",
        "apply 20260301T120000-ab12 by root@desk: base:*: file /etc/hosts",
    ]


def test_a_change_is_one_line_and_many_are_counted() -> None:
    told = lines("apply", "r", "h", ["a\nb\x1b[2J"] * 1000)
    assert len(told) == 302
    assert told[1] == "apply r by h: a b [2J"
    assert told[-1] == "apply r by h: and 700 more"
