"""The equations of `verifier.routing` need what they assume: without it Z3 finds where they are false."""

from __future__ import annotations

from shardwright.verifier.logic import z3
from shardwright.verifier.routing import ROUTING
from shardwright.verifier.solver import is_satisfiable, is_valid
from tests.each import each


@each(
    ("name", "obligation", "left_out"),
    [
        ("sorted-counts", 1, "s_m"),  # entries in no order
        ("histogram", 0, "s >= 0"),  # a negative entry, which no bin counts
        ("sorted-groups", 0, "start"),  # groups that do not begin where the last one ends
        ("repeated-rows", 0, "i < k"),
        ("put-back", 0, "q(p(r))"),  # another order than the one that is inverted
        ("put-back", 1, "w(i + 1)"),  # numbers that are there twice
        ("one-expert", 2, "t < m"),  # an index outside
    ],
)
def test_it_is_false_without(name: str, obligation: int, left_out: str) -> None:
    given, goal = ROUTING[name].obligations()[obligation]
    less = [hypothesis for hypothesis in given if left_out not in str(hypothesis)]
    assert len(less) < len(given)
    assert is_valid(goal, given)
    assert is_satisfiable([*less, z3.Not(goal)])
