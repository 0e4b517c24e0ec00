"""What benchmarks say of their figures."""

from __future__ import annotations

import pytest

from benchmarks import rules


@pytest.mark.parametrize(
    ("took", "needs", "word"),
    [(9.9, 5.0, "pass:"), (260.0, 5.0, "not shown, the machine was busy:"), (30.0, 12.0, "fail:")],
)
def test_rules_pass_by_the_wall_clock_alone(took: float, needs: float, word: str) -> None:
    said = rules.verdict(took, needs)
    assert said.startswith(word)
    assert f"{took} s of wall clock, {needs} s of a processor, at most 10 s" in said
