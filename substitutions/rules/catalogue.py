"""The hand-named algebraic rules, by topic. The verifier proves each before a search may use it."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.rules.decompositions import DECOMPOSITIONS, MAXIMUM

X, W, V = {"x": "*b i"}, {"w": "o i"}, {"v": "o i"}
XY = {"x": "*b i", "y": "*b i"}


def _both(rule: Equation, converse: str) -> tuple[Equation, Equation]:
    return rule, rule.converse(converse)


LINEAR = [
    *_both(
        equation("linear_of_sum", XY | W, "linear(add(x, y), w)", "add(linear(x, w), linear(y, w))"),
        "sum_of_linears",
    ),
    *_both(
        equation("linear_by_sum", X | V | W, "linear(x, add(v, w))", "add(linear(x, v), linear(x, w))"),
        "sum_of_linears_of_one",
    ),
    *_both(
        equation("linear_of_scaled", X | W | {"c": ""}, "linear(mul(x, c), w)", "mul(linear(x, w), c)"),
        "scaled_linear",
    ),
    *_both(
        equation("linear_by_scaled", X | W | {"c": ""}, "linear(x, mul(w, c))", "mul(linear(x, w), c)"),
        "scaled_linear_by_weight",
    ),
    *_both(equation("linear_of_neg", X | W, "linear(neg(x), w)", "neg(linear(x, w))"), "neg_of_linear"),
    *_both(
        equation("linear_of_linear", X | {"v": "h i", "w": "o h"},
                 "linear(linear(x, v), w)", "linear(x, matmul(w, v))"),
        "linear_by_product",
    ),
    equation("linear_as_matmul", X | W, "linear(x, w)", "matmul(x, permute(w, dims=(1, 0)))", guard=("len(b) > 0",)),
    equation(
        "sum_of_linear", {"x": "m *b i"} | W,
        "sum(linear(x, w), dims=(0,), keepdim=False)", "linear(sum(x, dims=(0,), keepdim=False), w)",
    ),
]  # fmt: skip

MATMUL = [
    *_both(
        equation("matmul_associates", {"x": "*b m k", "y": "*b k n", "z": "*b n p"},
                 "matmul(matmul(x, y), z)", "matmul(x, matmul(y, z))"),
        "matmul_associates_left",
    ),
    *_both(
        equation("matmul_of_scaled", {"x": "*b m k", "y": "*b k n", "c": ""},
                 "mul(matmul(x, y), c)", "matmul(mul(x, c), y)"),
        "scaled_matmul",
    ),
    equation("matmul_by_scaled", {"x": "*b m k", "y": "*b k n", "c": ""},
             "mul(matmul(x, y), c)", "matmul(x, mul(y, c))"),
]  # fmt: skip

_PIECES = "slice({0}, dim=len(b), start=0, stop=s, step=1); slice({0}, dim=len(b), start=s, stop=t, step=1)"
_WEIGHTS = "linear(x, slice(w, dim=0, start=0, stop=s, step=1)); linear(x, slice(w, dim=0, start=s, stop=t, step=1))"
_LAST = "; slice({0}, dim=len(b), start=t, stop=u, step=1)"
_LAST_WEIGHT = "; linear(x, slice(w, dim=0, start=t, stop=u, step=1))"


def _with_bias(start: str, stop: str) -> str:
    cut = f"start={start}, stop={stop}, step=1"
    return f"add(linear(x, slice(w, dim=0, {cut})), slice(c, dim=0, {cut}))"


FUSION = [
    *_both(
        equation("slice_of_linear", X | W, "slice(linear(x, w), dim=len(b), start=s, stop=t, step=1)",
                 "linear(x, slice(w, dim=0, start=s, stop=t, step=1))"),
        "linear_by_slice",
    ),
    *_both(
        equation("concat_of_linears", X | {"v": "o i", "w": "p i"}, "concat(linear(x, v), linear(x, w), dim=len(b))",
                 "linear(x, concat(v, w, dim=0))"),
        "linear_by_concat",
    ),
    *_both(
        equation("linear_of_concat", {"x": "*b i", "y": "*b j", "v": "o i", "w": "o j"},
                 "linear(concat(x, y, dim=len(b)), concat(v, w, dim=1))", "add(linear(x, v), linear(y, w))"),
        "sum_of_linears_fused",
    ),
    equation("linear_of_concat_sliced", {"x": "*b i", "y": "*b j", "w": "o n"}, "linear(concat(x, y, dim=len(b)), w)",
             "add(linear(x, slice(w, dim=1, start=0, stop=i, step=1)),"
             " linear(y, slice(w, dim=1, start=i, stop=n, step=1)))"),
    equation("fuse_two_linears", X | {"v": "o i", "w": "p i"}, "linear(x, v); linear(x, w)",
             "slice(linear(x, concat(v, w, dim=0)), dim=len(b), start=0, stop=o, step=1);"
             "slice(linear(x, concat(v, w, dim=0)), dim=len(b), start=o, stop=o + p, step=1)"),
    equation("fuse_three_linears", X | {"u": "o i", "v": "p i", "w": "q i"}, "linear(x, u); linear(x, v); linear(x, w)",
             "slice(linear(x, concat(u, v, w, dim=0)), dim=len(b), start=0, stop=o, step=1);"
             "slice(linear(x, concat(u, v, w, dim=0)), dim=len(b), start=o, stop=o + p, step=1);"
             "slice(linear(x, concat(u, v, w, dim=0)), dim=len(b), start=o + p, stop=o + p + q, step=1)"),
    equation("unfuse_two_linears", X | W, _PIECES.format("linear(x, w)"), _WEIGHTS),
    equation("unfuse_three_linears", X | W, (_PIECES + _LAST).format("linear(x, w)"), _WEIGHTS + _LAST_WEIGHT),
    equation("unfuse_three_affine", X | W | {"c": "o"}, (_PIECES + _LAST).format("add(linear(x, w), c)"),
             "; ".join(_with_bias(*cut) for cut in (("0", "s"), ("s", "t"), ("t", "u")))),
]  # fmt: skip

ALL = {"x": "*b", "y": "*b", "z": "*b"}
ARITHMETIC = [
    equation("add_commutes", {"x": "*b", "y": "*b"}, "add(x, y)", "add(y, x)"),
    *_both(equation("add_associates", ALL, "add(add(x, y), z)", "add(x, add(y, z))"), "add_associates_left"),
    *_both(
        equation("bias_last", {"x": "*b i", "y": "*b i", "c": "i"}, "add(add(x, c), y)", "add(add(x, y), c)"),
        "bias_first",
    ),
    equation("mul_commutes", {"x": "*b", "y": "*b"}, "mul(x, y)", "mul(y, x)"),
    *_both(equation("mul_associates", ALL, "mul(mul(x, y), z)", "mul(x, mul(y, z))"), "mul_associates_left"),
    *_both(equation("mul_of_sum", ALL, "mul(add(x, y), z)", "add(mul(x, z), mul(y, z))"), "sum_of_muls"),
    *_both(
        equation("scale_of_sum", {"x": "*b", "y": "*b", "c": ""}, "mul(add(x, y), c)", "add(mul(x, c), mul(y, c))"),
        "sum_of_scaled",
    ),
    equation("scale_of_scaled", {"x": "*b", "c": "", "d": ""}, "mul(mul(x, c), d)", "mul(x, mul(c, d))"),
    equation("sub_as_add", {"x": "*b", "y": "*b"}, "sub(x, y)", "add(x, neg(y))"),
    equation("neg_of_neg", {"x": "*b"}, "neg(neg(x))", "x", moves=True),
    equation("relu_of_relu", {"x": "*b"}, "relu(relu(x))", "relu(x)", moves=True),
]

MOVES = [
    equation("reshape_of_reshape", {"x": "*b"}, "reshape(reshape(x, shape=s), shape=t)", "reshape(x, shape=t)",
             moves=True),
    equation("permute_of_permute", {"x": "*b"}, "permute(permute(x, dims=p), dims=q)", "permute(x, dims=compose(p, q))",
             moves=True),
    equation("permute_of_none", {"x": "*b"}, "permute(x, dims=p)", "x", guard=("p == iota(len(b))",), moves=True),
    equation("slice_of_slice", {"x": "*b n"},
             "slice(slice(x, dim=len(b), start=s, stop=t, step=1), dim=len(b), start=u, stop=v, step=1)",
             "slice(x, dim=len(b), start=s + u, stop=s + v, step=1)", moves=True),
    equation("slice_of_sum", XY, "slice(add(x, y), dim=len(b), start=s, stop=t, step=1)",
             "add(slice(x, dim=len(b), start=s, stop=t, step=1), slice(y, dim=len(b), start=s, stop=t, step=1))",
             moves=True),
    equation("slice_of_biased", {"x": "*b i", "c": "i"}, "slice(add(x, c), dim=len(b), start=s, stop=t, step=1)",
             "add(slice(x, dim=len(b), start=s, stop=t, step=1), slice(c, dim=0, start=s, stop=t, step=1))",
             moves=True),
    equation("first_slice_of_concat", {"x": "*b i", "y": "*b j"},
             "slice(concat(x, y, dim=len(b)), dim=len(b), start=0, stop=i, step=1)", "x", moves=True),
    equation("last_slice_of_concat", {"x": "*b i", "y": "*b j"},
             "slice(concat(x, y, dim=len(b)), dim=len(b), start=i, stop=i + j, step=1)", "y", moves=True),
    equation("first_rows_of_concat", {"x": "i n", "y": "j n"},
             "slice(concat(x, y, dim=0), dim=0, start=0, stop=i, step=1)", "x", moves=True),
    equation("last_rows_of_concat", {"x": "i n", "y": "j n"},
             "slice(concat(x, y, dim=0), dim=0, start=i, stop=i + j, step=1)", "y", moves=True),
    equation("rows_of_concat", {"x": "i n", "y": "j n"},
             "slice(concat(x, y, dim=0), dim=0, start=s, stop=t, step=1)",
             "slice(x, dim=0, start=s, stop=t, step=1)", guard=("s <= t", "t <= i"), moves=True),
    equation("rows_of_last_concat", {"x": "i n", "y": "j n"},
             "slice(concat(x, y, dim=0), dim=0, start=s, stop=t, step=1)",
             "slice(y, dim=0, start=s - i, stop=t - i, step=1)", guard=("i <= s", "s <= t"), moves=True),
    *_both(
        equation("rows_of_three", {"x": "i n", "y": "j n", "z": "k n"}, "concat(x, y, z, dim=0)",
                 "concat(concat(x, y, dim=0), z, dim=0)", moves=True),
        "rows_of_three_flat",
    ),
    equation("concat_of_slices", {"x": "*b n"},
             "concat(slice(x, dim=len(b), start=0, stop=s, step=1), slice(x, dim=len(b), start=s, stop=n, step=1),"
             " dim=len(b))", "x", moves=True),
    *(equation(f"permute_of_{op}", {"x": "*b"}, f"permute({op}(x), dims=p)", f"{op}(permute(x, dims=p))", moves=True)
      for op in ("neg", "relu", "silu")),
    *(equation(f"reshape_of_{op}", {"x": "*b"}, f"reshape({op}(x), shape=s)", f"{op}(reshape(x, shape=s))", moves=True)
      for op in ("neg", "relu", "silu")),
    equation("reshape_of_sum", {"x": "*b", "y": "*b"}, "reshape(add(x, y), shape=s)",
             "add(reshape(x, shape=s), reshape(y, shape=s))", moves=True),
    equation("permute_of_sum", {"x": "*b", "y": "*b"}, "permute(add(x, y), dims=p)",
             "add(permute(x, dims=p), permute(y, dims=p))", moves=True),
]  # fmt: skip

CATALOGUE: Mapping[str, Equation] = {
    rule.name: rule for rule in (*DECOMPOSITIONS, *LINEAR, *MATMUL, *FUSION, *ARITHMETIC, *MOVES, *MAXIMUM)
}
"""Every hand-named rule, by name; a search tries them in this order."""

_FOR_PROOFS = (
    "add_commutes", "mul_commutes", "sub_as_add", "linear_as_matmul", "rows_of_three", "rows_of_three_flat",
    "rows_of_concat", "rows_of_last_concat", "masked_attention_in_parts", "masked_attention_in_parts_of_usual_scale",
)  # fmt: skip

NO_GAIN = (
    "mul_associates", "mul_associates_left", "mul_of_sum", "scale_of_sum",
    *(f"permute_of_{op}" for op in ("neg", "relu", "silu", "sum")),
    *(f"reshape_of_{op}" for op in ("neg", "relu", "silu", "sum")),
)  # fmt: skip
"""The rules whose right sides do all that the left ones do, on as much data, and hold no less of it whole: by one of
them alone no plan is cheaper. A search misses what they lead up to, such as two permutations that meet and cancel. A
test finds these rules.
"""

SEARCHED = tuple(name for name in CATALOGUE if name not in (*_FOR_PROOFS, *NO_GAIN))
"""The rules that a search profits from. The others are steps of proofs: alone they never make a plan cheaper. Masked
attention is left out: masks hold infinities, which are no numbers, and a query without keys would give NaN for 0.
"""
