"""The falsifier of equations: all kinds of variables, nothing but a `RuleError` where it cannot tell."""

from __future__ import annotations

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import equation
from shardwright.verifier.falsify_serial import falsify_equation

TAKEN = {"w": "v h", "i": "*b"}
BLOCKS = {"x": "m (n c)"}


@pytest.mark.parametrize(
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
