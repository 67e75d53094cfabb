"""Index semantics of all operators and the laws of functions: true rules are proven, wrong ones beside them are not."""

from __future__ import annotations

from itertools import chain

import pytest

from shardwright.substitutions.equations import equation
from shardwright.verifier.algebra.serialproof import prove_equation
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from tests.each import each
from tests.verifier import laws

CASES = {**laws.FUNCTIONS, **laws.INDICES, **laws.SUMS, **laws.DEFINED}


@each("name", CASES)
def test_true_rules_are_proven_and_not_falsified(name: str) -> None:
    variables, left, rights, _ = CASES[name]
    for right in rights:
        rule = equation(name, variables, left, right)
        failure = prove_equation(rule)
        assert failure is None, f"{rule.equation}: {failure}"
        assert falsify_equation(rule, trials=4) is None


@each("name", CASES)
def test_wrong_rules_are_not_proven_and_have_counterexamples(name: str) -> None:
    variables, left, _, wrongs = CASES[name]
    for right in wrongs:
        rule = equation(name, variables, left, right)
        assert prove_equation(rule) is not None, rule.equation
        assert falsify_equation(rule, trials=6) is not None, rule.equation


@each("name", laws.EXISTING)
def test_a_rule_holds_wherever_its_left_side_exists(name: str) -> None:
    variables, left, right = laws.EXISTING[name]
    rule = equation(name, variables, left, right)
    assert prove_equation(rule) is None
    assert falsify_equation(rule, trials=4) is None


@each("name", laws.NOT_PROVEN)
def test_a_right_side_that_exists_for_fewer_tensors_is_not_proven(name: str) -> None:
    variables, left, right = laws.NOT_PROVEN[name]
    assert prove_equation(equation(name, variables, left, right)) is not None


GUARDED = [
    ({"x": "m n", "y": "k n"}, "add(x, y)", "add(y, x)", ("m == k",)),
    ({"x": "m i"}, "relu(reshape(x, shape=(m, h, d)))", "reshape(relu(x), shape=(m, h, d))", ("i == h * d",)),
    ({"x": "m i"}, "relu(reshape(x, shape=(m, h, i // h)))", "reshape(relu(x), shape=(m, h, i // h))", ("i % h == 0",)),
]


@pytest.mark.parametrize(("variables", "left", "right", "guard"), GUARDED)
def test_sizes_that_a_guard_equates_are_written_by_one_another(
    variables: dict[str, str], left: str, right: str, guard: tuple[str, ...]
) -> None:
    assert prove_equation(equation("guarded", variables, left, right, guard=guard)) is None
    if guard == ("m == k",):
        assert prove_equation(equation("unguarded", variables, left, right)) is not None


HALVES = "reshape(relu(reshape(x, shape=(2, n // 2))), shape=(n,))"


@pytest.mark.parametrize(
    ("right", "guard", "true"),
    [
        ("relu(x)", "n % 2 == 0", True),
        ("relu(x)", "n % 3 == 0", False),
        ("slice(relu(x), dim=0, start=0, stop=n // 2, step=1)", "n % 2 == 0", False),
    ],
)
def test_a_number_may_divide_a_size(right: str, guard: str, true: bool) -> None:
    failure = prove_equation(equation("halves", {"x": "n"}, HALVES, right, guard=(guard,)))
    assert (failure is None) == true


def test_what_may_be_negative_divides_nothing() -> None:
    """s is a bound of a slice: n = s·q says nothing about the sign of q."""
    left = "add(slice(x, dim=0, start=0, stop=s, step=1), slice(x, dim=0, start=0, stop=s, step=1))"
    rule = equation(
        "bound", {"x": "n"}, left, "slice(add(x, x), dim=0, start=0, stop=s, step=1)", guard=("n % s == 0",)
    )
    assert prove_equation(rule) is None
    cut = "slice(add(x, x), dim=0, start=0, stop=n // s, step=1)"
    wrong = equation("bound", {"x": "n"}, left, cut, guard=("n % s == 0",))
    assert prove_equation(wrong) is not None


def test_a_size_of_1_is_not_assumed_away() -> None:
    """x + y broadcasts where n is 1; the sum of what was broadcast is not the sum."""
    rule = equation(
        "broadcast", {"x": "m k", "y": "m n"}, "sum(add(x, y), dims=(1,), keepdim=True)",
        "add(sum(x, dims=(1,), keepdim=True), sum(y, dims=(1,), keepdim=True))",
    )  # fmt: skip
    failure = prove_equation(rule)
    assert failure is not None
    assert "dimensions agree: dimension k against n" in failure.claim


def test_the_order_of_hashes_does_not_matter() -> None:
    """Factors are numbered as they are met; whatever the order, equal forms are one object."""
    variables, left, (right,), _ = CASES["layer_norm_is_shift_invariant"]
    rules = [equation("one", variables, left, right), equation("other", dict(reversed(variables.items())), left, right)]
    assert all(prove_equation(rule) is None for rule in chain(rules, rules))
