"""False rules that look true: each was certified once. None is, and their true siblings are."""

from __future__ import annotations

from typing import Any

from shardwright.substitutions.equations import equation
from shardwright.verifier.certificates import Certificate, certify
from tests.each import each

W = {"w": "v d", "i": "m"}
KEPT = "ne(t, full(shape=(), value=3, dtype='int64'))"
ZERO = "full(shape=(), value=0, dtype='float32')"
CHOSEN = f"where({KEPT}, reciprocal(x), {ZERO})"
FIRST = "slice(w, dim=0, start=0, stop=1, step=1)"
NORMED = (
    "mul(x, rsqrt({}(div(sum(mul(x, x), dims=(1,), keepdim=True), full(shape=(), value=n, dtype='int64')),"
    " full(shape=(), value={}, dtype='{}'))))"
)
ROUNDED = "m - m // (s - t) * (s - t)"

FALSE: dict[str, tuple[dict[str, str], str, str, tuple[str, ...]]] = {
    # indices beyond the table
    "embedding of a part": (W, "embedding(w, i)", f"embedding({FIRST}, i)", ()),
    "index of a part": (W, "index(w, i, dim=0)", f"index({FIRST}, i, dim=0)", ()),
    "gather of a part": ({"w": "v d", "i": "m d"}, "gather(w, i, dim=0)", f"gather({FIRST}, i, dim=0)", ()),
    "indices of something else": (
        W | {"x": "m n"}, "add(pick(x, i), sum(w, dims=(0, 1), keepdim=False))",
        ("add(pick(x, i), sub(sum(w, dims=(0, 1), keepdim=False),"
        " sub(sum(embedding(w, i), dims=(1,), keepdim=False), sum(embedding(w, i), dims=(1,), keepdim=False))))"), ()),
    # dimensions that ranks move
    "another dimension from rank 8 on": (
        {"x": "*b i j"}, "softmax(x, dim=len(b))", "softmax(x, dim=len(b) + len(b) // 6)", ()),
    "the rank of another variable": (
        {"x": "*b i j", "y": "*c i j"}, "softmax(x, dim=len(b)); softmax(y, dim=len(c))",
        "softmax(x, dim=len(c)); softmax(y, dim=len(b))", ()),
    # data types
    "two that is True": ({"x": "m"}, "add(x, x)", "mul(x, full(shape=(), value=2, dtype='bool'))", ()),
    "minus one that is 255": ({"x": "m"}, "neg(x)", "mul(x, full(shape=(), value=-1, dtype='uint8'))", ()),
    "sum of bools": (
        {"x": "m", "t": "m"}, f"mul(add({KEPT}, {KEPT}), x)",
        f"mul(mul({KEPT}, x), full(shape=(), value=2, dtype='int64'))", ()),
    "negative of a bool": ({"x": "m", "t": "m"}, f"mul({KEPT}, neg(x))", f"mul(neg({KEPT}), x)", ()),
    # what exists on the left only
    "zero times a reciprocal": ({"x": "m"}, f"mul(x, {ZERO})", f"mul(reciprocal(x), {ZERO})", ()),
    "zero times a logarithm": ({"x": "m"}, "sub(x, x)", "mul(sub(x, x), log(x))", ()),
    "a product for a choice": ({"x": "m", "t": "m"}, CHOSEN, f"mul({KEPT}, reciprocal(x))", ()),
    "a quotient that the choice avoids": (
        {"x": "m", "t": "m"}, f"where({KEPT}, {ZERO}, reciprocal(x))",
        f"add(where({KEPT}, {ZERO}, reciprocal(x)), sub(div(x, x), full(shape=(), value=1, dtype='int64')))", ()),
    "a loss that is ignored": (
        {"x": "m n", "t": "m"}, "cross_entropy_sum(log(x), t, ignore_index=3, label_smoothing=0.0)",
        f"sum(mul({KEPT}, sub(log(sum(x, dims=(1,), keepdim=False)), pick(log(x), t))), dims=(0,), keepdim=False)",
        ()),
    "a constant that does not exist": ({"x": "m"}, "contiguous(x)", "add(x, sub(detach(log(x)), detach(log(x))))", ()),
    # numbers that are none
    "dimension True": ({"x": "m n"}, "softmax(x, dim=1)", "softmax(x, dim=True)", ()),
    "dimension 1.0": ({"x": "m n"}, "softmax(x, dim=1)", "softmax(x, dim=1.0)", ()),
    "dimensions False and True": ({"x": "m n"}, "relu(x)", "permute(relu(x), dims=(False, True))", ()),
    "True dimensions": (
        {"x": "m n"}, "rms_norm(x, eps=e, normalized_dims=1)", "rms_norm(x, eps=e, normalized_dims=True)", ()),
    # gradients: what is looked up at the padding index has none
    "a weight behind a padded table": (
        {"w": "v k", "u": "k d", "i": "m"}, "embedding(matmul(w, u), i, padding_idx=p)",
        "matmul(embedding(w, i, padding_idx=p), u)", ()),
    "a bias behind a padded table": (
        {"w": "v k", "u": "k", "i": "m"}, "embedding(add(w, u), i, padding_idx=0)",
        "add(embedding(w, i, padding_idx=0), u)", ()),
    "ids behind a padded table": (
        {"w": "v d", "j": "n 1", "i": "m"},
        "embedding(reshape(embedding(w, j, padding_idx=None), shape=(n, d)), i, padding_idx=p)",
        "embedding(w, reshape(embedding(j, i, padding_idx=p), shape=(m,)), padding_idx=None)", ()),
    # gradients: a root has none at 0
    "zero times a root": ({"x": "m"}, f"mul(x, {ZERO})", "mul(x, sub(sqrt(relu(x)), sqrt(relu(x))))", ()),
    "a root of nothing": ({"x": "m"}, "relu(x)", "add(relu(x), sqrt(sub(x, x)))", ()),
    # constants that their data type does not hold
    "a fraction in a sum": (
        {"x": "m n"}, "rms_norm(x, eps=e, normalized_dims=1)", NORMED.format("sub", "-e", "int64"), ()),
    "a large integer": (
        {"x": "m"}, "mul(x, full(shape=(), value=1e30, dtype='float32'))",
        "mul(x, full(shape=(), value=1e30, dtype='int64'))", ()),
    "a large number": (
        {"x": "m"}, "mul(x, full(shape=(), value=100000, dtype='float32'))",
        "mul(x, full(shape=(), value=100000, dtype='float16'))", ()),
    # rounding down, by a negative number
    "a slice from -1": (
        {"x": "m", "y": "k"}, "relu(x); slice(y, dim=0, start=s, stop=t, step=1)",
        (f"relu(concat(slice(x, dim=0, start=0, stop={ROUNDED}, step=1),"
        f" slice(x, dim=0, start={ROUNDED}, stop=m, step=1), dim=0)); slice(y, dim=0, start=s, stop=t, step=1)"),
        ("s < t", "t - s < m")),
}  # fmt: skip


@each("name", FALSE)
def test_a_false_rule_is_not_certified(name: str) -> None:
    variables, left, right, guard = FALSE[name]
    assert not isinstance(certify(equation(name, variables, left, right, guard=guard)), Certificate)


TRUE: dict[str, tuple[dict[str, str], str, str, tuple[str, ...]]] = {
    "embedding of a part that is all": (
        W, "embedding(w, i)", "embedding(slice(w, dim=0, start=0, stop=v, step=1), i)", ()),
    "embedding of more": (
        W, "embedding(slice(w, dim=0, start=0, stop=s, step=1), i)", "embedding(w, i)", ()),
    "a function of a padded table": (
        W, "embedding(relu(w), i, padding_idx=p)", "relu(embedding(w, i, padding_idx=p))", ()),
    "a weight behind a table": (
        {"w": "v k", "u": "k d", "i": "m"}, "embedding(matmul(w, u), i, padding_idx=None)",
        "matmul(embedding(w, i, padding_idx=None), u)", ()),
    "a fraction in a sum of numbers": (
        {"x": "m n"}, "rms_norm(x, eps=e, normalized_dims=1)", NORMED.format("sub", "-e", "float32"), ()),
    "zero times a root that exists": (
        {"x": "m"}, f"mul(x, {ZERO})", "mul(x, sub(sqrt(exp(x)), sqrt(exp(x))))", ()),
    "zero times what exists": ({"x": "m"}, f"mul(x, {ZERO})", f"mul(exp(x), {ZERO})", ()),
    "a product for a choice that exists": (
        {"x": "m", "t": "m"}, f"where({KEPT}, exp(x), {ZERO})", f"mul({KEPT}, exp(x))", ()),
}  # fmt: skip


@each("name", TRUE)
def test_its_true_sibling_is_certified(name: str) -> None:
    variables, left, right, guard = TRUE[name]
    assert isinstance(certify(equation(name, variables, left, right, guard=guard)), Certificate)


def test_an_axis_that_is_called_as_a_size_says_nothing_about_the_size() -> None:
    """`m % m == 0` holds whatever the degree and the size."""

    def rule(axis: str) -> Any:
        left, right = f"relu(partition(x, axis={axis}, dim=0))", f"partition(relu(x), axis={axis}, dim=0)"
        return equation("rule", {"x": "m i"}, left, right, (f"m % {axis} == 0",), False, (axis,), {"x": ["R"]})

    assert isinstance(certify(rule("a")), Certificate)
    assert certify(rule("m")) == "rule 'rule': 'm' names a mesh axis and a size or attribute: not proven"


def test_an_attribute_is_no_parameter_and_may_be_0() -> None:
    whole = "slice(x, dim=1, start=s, stop=n, step=1)"
    right = "slice(slice(x, dim=1, start=1, stop=n, step=1), dim=1, start=s - 1, stop=n - 1, step=1)"
    assert isinstance(certify(equation("rule", {"x": "m n"}, whole, right, ("s > 0",))), Certificate)
    wrong = equation("rule", {"x": "m n"}, whole, right, parameters=("s",))
    assert certify(wrong) == "'s' is bound by the left side, and no parameter: not proven"


def test_a_dimension_to_partition_is_a_number() -> None:
    left, right = "relu(partition(x, axis=a, dim=1))", "partition(relu(x), axis=a, dim=True)"
    rule = equation("rule", {"x": "m n"}, left, right, ("n % a == 0",), False, ("a",), {"x": ["R"]})
    assert "True is not a dimension" in str(certify(rule))
