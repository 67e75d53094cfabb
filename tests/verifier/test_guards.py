"""The weakest guard: rules of which the guard was dropped get it back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.expressions import expression
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier.algebra.serialproof import prove_equation
from shardwright.verifier.guards import weakest_guard


def found(rule: Equation) -> list[str] | None:
    guard = weakest_guard(rule)
    return None if guard is None else sorted(map(str, guard))


@pytest.mark.parametrize("name", ["linear_as_matmul", "rows_of_concat", "rows_of_last_concat", "permute_of_none"])
def test_a_dropped_guard_is_found_again(name: str) -> None:
    rule = CATALOGUE[name]
    bare = replace(rule, guard=())
    assert prove_equation(bare) is not None
    assert found(bare) == sorted(map(str, rule.guard))


def test_a_true_rule_needs_no_guard() -> None:
    assert weakest_guard(CATALOGUE["linear_of_sum"]) == ()


def test_sizes_that_must_be_equal_are_found() -> None:
    rule = equation("same", {"x": "m n", "y": "k n"}, "concat(x, y, dim=0)", "concat(relu(x), y, dim=0)")
    assert weakest_guard(rule) is None
    swapped = equation(
        "swapped", {"x": "m n", "y": "k n"}, "slice(concat(x, y, dim=0), dim=0, start=0, stop=m, step=1)",
        "slice(concat(x, y, dim=0), dim=0, start=0, stop=k, step=1)",
    )  # fmt: skip
    assert found(swapped) == ["k == m"]


def test_a_condition_that_never_holds_is_no_guard() -> None:
    """Whatever follows from a contradiction: under n < n everything does."""
    cut = "slice({}, dim=1, start=0, stop=s, step=1)".format
    rule = equation("false", {"x": "m n"}, cut("x"), cut("neg(x)"))
    assert weakest_guard(rule, [expression("n < s")]) is None


def test_a_placement_rule_gets_the_divisibilities_that_its_types_need() -> None:
    rule = equation(
        "split", {"x": "m i", "w": "o i"}, "linear(combine(x, axis=a), combine(w, axis=a))",
        "reduce(linear(x, w), axis=a)", axes=("a",), layouts={"x": ["S(1)"], "w": ["S(1)"]},
    )  # fmt: skip
    assert found(rule) == ["i % a == 0"]
    ill_typed = replace(rule, right=rule.right[0].operands)  # type: ignore[union-attr]
    assert weakest_guard(ill_typed) is None
