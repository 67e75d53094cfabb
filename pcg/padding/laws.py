"""The laws by which a factor may be stretched: the operator computes the same where there is no padding.

    map      the factor is one of the result's: what an operator computes at one index depends on that index alone
    sum      an operand is zero in the padding, and the operator is linear in it: terms of the padding are zero; so are
             the entries of a table that no index names
    neutral  an operand is filled with what changes nothing, such as -inf under a softmax

The padding of a result is garbage, but finite (`FINITE`), so that its product with zero is zero. Gradients are zero in
the padding by the same laws: each way out of it is a trim, a `where` or a product with zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from math import inf

from shardwright.pcg.factors import Signature
from shardwright.pcg.node import Node
from shardwright.pcg.padding.stretches import Stretch, holders
from shardwright.pcg.row import Row

FINITE = frozenset((
    "linear", "matmul", "conv2d", "conv3d", "embedding", "pick", "expert_linear", "experts", "sdpa", "layer_norm",
    "rms_norm", "softmax", "log_softmax", "cross_entropy_sum", "sum", "cast", "detach", "reshape", "permute", "expand",
    "slice", "concat", "flip", "index", "gather", "where", "add", "sub", "mul", "div", "neg", "relu",
    "gelu", "silu", "sigmoid", "tanh", "sin", "cos", "erf", "softplus", "maximum", "minimum", "eq", "ne", "lt", "le",
    "gt", "ge", "bitwise_and", "bitwise_or", "logical_not",
))  # fmt: skip
"""The operators whose results and derivatives are finite wherever operands are: norms with an epsilon, other divisors
without padding."""
_DIVISORS: Mapping[str, int] = {"div": 1}
NEUTRAL: Mapping[str, tuple[int, int, float]] = {"cross_entropy_sum": (0, 1, -inf)}
"""By operator: an operand, its dimension that may be padded although the operator needs it whole, and with what."""


def is_neutral(node: Node, signature: Signature, factor: int) -> bool:
    """Return whether a factor is the dimension that `NEUTRAL` has for this operator."""
    operand, dim, _ = NEUTRAL.get(node.op, (0, 0, 0.0))
    plain = node.op in NEUTRAL and not dict(node.attrs).get("label_smoothing")
    dims = signature.operands[operand]
    return plain and len(dims) > dim and dims[dim] == (factor,)


def may_stretch(node: Node, row: Row, signature: Signature, factor: int, stretch: Stretch) -> bool:
    """Return whether one of the laws lets a factor be stretched; the law of sums may need a mask besides."""
    (_, _, role), operands = astuple(signature.factors[factor]), holders(signature, factor)
    if node.op not in FINITE or dict(node.attrs).get("eps") == 0 or _DIVISORS.get(node.op) in operands:
        return False
    neutral = is_neutral(node, signature, factor)
    if knows_positions(row, signature, factor, stretch) or (neutral and not stretch.is_suffix):
        return False
    return role == "map" or neutral or (role == "sum" and any((i,) in row.linear_in for i in operands))


def knows_positions(row: Row, signature: Signature, factor: int, stretch: Stretch) -> bool:
    """Return whether an operator computes with indices along a factor, which a stretch between them would shift."""
    return row.offset == signature.factors[factor].name and not stretch.is_suffix


def gives_zeros(row: Row, signature: Signature, stretched: Mapping[int, Stretch], zeros: Sequence[int]) -> bool:
    """Return whether the result's padding is zero, as an operand in which the operator is linear is zero there.

    `zeros`: the operands whose padding is zero.
    """
    mapped = [f for f in stretched if signature.factors[f].role == "map"]
    linear = [i for i in zeros if (i,) in row.linear_in]
    return any(all(i in holders(signature, f) for f in mapped) for i in linear)
