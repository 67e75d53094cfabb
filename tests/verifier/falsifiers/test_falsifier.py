"""The falsifier of equations: all kinds of variables, nothing but a `RuleError` where it cannot tell."""

from __future__ import annotations

import random

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import equation
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.falsifiers.instances import instances
from tests.each import each

TAKEN = {"w": "v h", "i": "*b"}
BLOCKS = {"x": "m (n c)"}


@each(
    ("variables", "left", "right", "true"),
    [
        (TAKEN, "embedding(neg(w), i, padding_idx=p)", "neg(embedding(w, i, padding_idx=p))", True),
        (TAKEN, "embedding(neg(w), i, padding_idx=p)", "embedding(w, i, padding_idx=p)", False),
        (BLOCKS, "reshape(relu(x), shape=(m, n, c))", "relu(reshape(x, shape=(m, n, c)))", True),
        (BLOCKS, "reshape(relu(x), shape=(m, n, c))", "relu(reshape(x, shape=(m, c, n)))", False),
        ({"x": "m n", "r": "1 n"}, "sub(x, r)", "neg(sub(r, x))", True),
        ({"x": "m n", "r": "1 n"}, "sub(x, r)", "sub(r, x)", False),
        ({"x": "m n"}, "log(sqrt(x))", "sqrt(log(x))", False),
        ({"x": "m n"}, "reciprocal(reciprocal(x))", "x", True),
        ({"x": "m n"}, "rms_norm(x, eps=e, normalized_dims=1)", "x", False),
    ],
)
def test_every_kind_of_variable_and_attribute_has_values(
    variables: dict[str, str], left: str, right: str, true: bool
) -> None:
    assert (falsify_equation(equation("some", variables, left, right)) is None) == true


@each(
    ("variables", "left", "right", "true"),
    [
        ({**TAKEN, "y": "h"}, "embedding(mul(w, y), i, padding_idx=p)", "mul(embedding(w, i, padding_idx=p), y)",
         False),
        ({**TAKEN, "y": "h"}, "embedding(mul(w, y), i, padding_idx=None)", "mul(embedding(w, i, padding_idx=None), y)",
         True),
        (TAKEN, "embedding(w, i, padding_idx=p)", "embedding(w, i, padding_idx=None)", False),
        ({"x": "m n"}, "mul(x, detach(x))", "mul(x, x)", False),
        ({"x": "m n"}, "mul(x, detach(x))", "mul(detach(x), x)", True),
        ({"x": "m n"}, "detach(neg(x))", "neg(detach(x))", True),
        ({"x": "m n"}, "maximum(x, x)", "x", True),
        ({"x": "m n"}, "relu(x)", "maximum(x, mul(detach(x), sub(x, x)))", True),
    ],
)  # fmt: skip
def test_derivatives_are_compared(variables: dict[str, str], left: str, right: str, true: bool) -> None:
    """The values of all of these are equal: what stops gradients tells them apart."""
    found = falsify_equation(equation("some", variables, left, right), trials=12)
    assert (found is None) == true
    assert true or "the values are equal; these are derivatives, which are not" in str(found)


def test_optional_attributes_are_drawn_with_and_without_a_value() -> None:
    rule = equation("some", TAKEN, "embedding(w, i, padding_idx=p)", "embedding(w, i, padding_idx=p)")
    drawn = {match.sizes["p"] for _, match in instances(rule, random.Random(0), 40)}
    assert drawn == {None, 0, 1}


def test_sizes_of_1_are_drawn_too() -> None:
    rule = equation("some", {"x": "m n"}, "relu(x)", "relu(x)")
    assert any(match.sizes["m"] == 1 for _, match in instances(rule, random.Random(0), 200))


def test_parameters_are_sizes_that_satisfy_the_guard() -> None:
    parts = "sum(sum(reshape(x, shape=(m, n, k // n)), dims=(2,), keepdim=False), dims=(1,), keepdim=False)"
    left = "sum(x, dims=(1,), keepdim=False)"
    rule = equation("parts", {"x": "m k"}, left, parts, guard=("k % n == 0",), parameters=("n",))
    assert falsify_equation(rule) is None
    wrong = equation("parts", {"x": "m k"}, left, f"mul({parts}, {parts})", guard=("k % n == 0",), parameters=("n",))
    assert "n = " in str(falsify_equation(wrong))


def test_instances_without_elements_are_few() -> None:
    """A slice that ends before it starts says nothing about its elements."""
    cut = "slice(x, dim=0, start={0}, stop={1}, step=1)".format
    wrong = equation("moved", {"x": "n"}, cut("s", "t"), f"neg({cut('s', 't')})")
    assert falsify_equation(wrong, trials=2) is not None


@pytest.mark.parametrize(
    ("variables", "left", "guard"),
    [
        ({"x": "m n"}, "expand(x, shape=(1000000, 1000000, m, n))", ()),
        ({"x": "m n"}, "relu(x)", ("m > 1000",)),
        ({"x": "m n"}, "reshape(x, shape=(m, m, n))", ("m > 1",)),
        ({"x": "m n"}, "relu(x)", ("m // (n - n) == 1",)),
    ],
)
def test_what_has_no_small_instances_is_an_error_that_names_the_rule(
    variables: dict[str, str], left: str, guard: tuple[str, ...]
) -> None:
    rule = equation("none", variables, left, left, guard=guard)
    with pytest.raises(RuleError, match="rule 'none': no small sizes satisfy its left side and guard"):
        falsify_equation(rule)
