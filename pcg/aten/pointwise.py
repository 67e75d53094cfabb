"""Arithmetic, comparisons and choices, element by element."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwright.pcg.aten.registry import HANDLERS, Handler, cast, dimension, handles, require, scaled
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float

_UNARY = ("abs", "detach", "hardsigmoid", "hardswish", "mish", "neg", "relu", "sign")
_REAL = (
    "cos", "digamma", "erf", "erfinv", "exp", "expm1", "lgamma", "log", "log1p", "reciprocal", "rsqrt", "sigmoid",
    "silu", "sin", "sqrt", "tanh",
)  # fmt: skip
_ROUNDING = ("ceil", "floor", "round.default")
_BINARY = {
    "mul": "mul", "pow": "pow", "floor_divide": "floor_divide", "remainder": "remainder",
    "maximum": "maximum", "minimum": "minimum",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
    "__and__": "bitwise_and", "bitwise_and": "bitwise_and", "__or__": "bitwise_or", "bitwise_or": "bitwise_or",
}  # fmt: skip
_LOGICAL = {"logical_and": "bitwise_and", "logical_or": "bitwise_or", "logical_xor": "ne"}


def real(b: GraphBuilder, x: str) -> str:
    """Cast integers and bools to real numbers."""
    return x if is_float(b.types[x].dtype) else cast(b, x, b.default_float)


def _unary(row: str) -> Handler:
    return lambda b, x: b.op(row, x)


def _real(row: str) -> Handler:
    return lambda b, x: b.op(row, real(b, x))


def _rounding(row: str) -> Handler:
    return lambda b, x: b.op(row, x) if is_float(b.types[x].dtype) else x


def _binary(row: str) -> Handler:
    return lambda b, x, y: b.op(row, x, y)


def _logical(row: str) -> Handler:
    return lambda b, x, y: b.op(row, cast(b, x, "bool"), cast(b, y, "bool"))


HANDLERS.update({name: _unary(name) for name in _UNARY})
HANDLERS.update({name: _real(name) for name in _REAL})
HANDLERS["special_i0e"] = _real("i0e")
HANDLERS.update({name: _rounding(name.removesuffix(".default")) for name in _ROUNDING})
HANDLERS.update({name: _binary(row) for name, row in _BINARY.items()})
HANDLERS.update({name: _logical(row) for name, row in _LOGICAL.items()})
HANDLERS.update({
    "add": lambda b, x, y, alpha=1: x if y == 0 else b.op("add", x, scaled(b, y, alpha)),
    "acos": lambda b, x: b.op("atan2", _other_leg(b, real(b, x)), real(b, x)),
    "addcdiv": lambda b, x, y, z, *, value=1: b.op("add", x, scaled(b, b.op("div", real(b, y), z), value)),
    "addcmul": lambda b, x, y, z, *, value=1: b.op("add", x, scaled(b, b.op("mul", y, z), value)),
    "alias": lambda b, x: x,
    "asin": lambda b, x: b.op("atan2", real(b, x), _other_leg(b, real(b, x))),
    "atan": lambda b, x: b.op("atan2", real(b, x), 1.0),
    "atan2": lambda b, x, y: b.op("atan2", real(b, x), real(b, y)),
    "atanh": lambda b, x: _halves(b, "sub", b.op("log1p", real(b, x)), b.op("log1p", b.op("neg", real(b, x)))),
    "clamp": lambda b, x, low=None, high=None: _at_most(b, _at_least(b, x, low), high),
    "clone": lambda b, x: x,
    "cosh": lambda b, x: _halves(b, "add", b.op("exp", real(b, x)), b.op("exp", b.op("neg", real(b, x)))),
    "exp2": lambda b, x: b.op("exp", b.op("mul", real(b, x), math.log(2))),
    "gelu": lambda b, x, approximate="none": b.op("gelu", x, approximate=approximate),
    "isnan": lambda b, x: b.op("ne", x, x),
    "leaky_relu": lambda b, x, slope=0.01: b.op("where", b.op("gt", x, 0), x, b.op("mul", x, slope)),
    "lerp": lambda b, x, y, weight: b.op("add", x, b.op("mul", b.op("sub", y, x), weight)),
    "log10": lambda b, x: b.op("mul", b.op("log", real(b, x)), 1 / math.log(10)),
    "log2": lambda b, x: b.op("mul", b.op("log", real(b, x)), 1 / math.log(2)),
    "logical_not": lambda b, x: b.op("logical_not", cast(b, x, "bool")),
    "rsub": lambda b, x, y, alpha=1: b.op("sub", y, scaled(b, x, alpha)),
    "sinh": lambda b, x: _halves(b, "sub", b.op("expm1", real(b, x)), b.op("expm1", b.op("neg", real(b, x)))),
    "square": lambda b, x: b.op("mul", x, x),
    "sub": lambda b, x, y, alpha=1: x if y == 0 else b.op("sub", x, scaled(b, y, alpha)),
    "tan": lambda b, x: b.op("div", b.op("sin", real(b, x)), b.op("cos", real(b, x))),
    "threshold": lambda b, x, bound, value: b.op("where", b.op("gt", x, bound), x, b.scalar(value, b.types[x].dtype)),
    "frac": lambda b, x: b.op("sub", x, _trunc(b, x)),
    "_to_copy": lambda b, x, *, dtype=None: cast(b, x, dtype),  # devices and memory formats are no part of a graph
    "where": lambda b, condition, x, y: b.op("where", cast(b, condition, "bool"), *b.operands(x, y)),
})  # fmt: skip


def _other_leg(b: GraphBuilder, x: str) -> str:
    """Append √(1 − x²), without loss of digits near 1."""
    return b.op("sqrt", b.op("mul", b.op("add", x, 1.0), b.op("sub", 1.0, x)))


def _halves(b: GraphBuilder, row: str, x: str, y: str) -> str:
    return b.op("mul", b.op(row, x, y), 0.5)


@handles("trunc")
def _trunc(b: GraphBuilder, x: str) -> str:
    """Round towards zero."""
    return b.op("where", b.op("lt", x, 0), b.op("ceil", x), b.op("floor", x)) if is_float(b.types[x].dtype) else x


@handles("bitwise_not")
def _bitwise_not(b: GraphBuilder, x: str) -> str:
    """Negate bools. For integers in two's complement the result is -x - 1."""
    return b.op("logical_not", x) if b.types[x].dtype == "bool" else b.op("sub", b.op("neg", x), 1)


@handles("bitwise_xor", "__xor__")
def _bitwise_xor(b: GraphBuilder, x: Any, y: Any) -> str:
    x, y = b.operands(x, y)
    require(b.types[x].dtype == b.types[y].dtype == "bool")
    return b.op("ne", x, y)


@handles("div")
def _div(b: GraphBuilder, x: str, y: Any, rounding_mode: str | None = None) -> str:
    """Divide. Rounded down, the quotient has a gradient of zero, while `floor_divide` refuses to have one."""
    if rounding_mode is None:
        return b.op("div", x, y)
    if rounding_mode == "trunc":
        require(is_float(b.types[x].dtype))
        return _trunc(b, b.op("div", x, y))
    return b.op("floor_divide", b.op("detach", x), b.op("detach", y) if isinstance(y, str) else y)


@handles("softplus")
def _softplus(b: GraphBuilder, x: str, beta: float = 1, threshold: float = 20) -> str:
    """Append log(1 + eˣ) of beta times x over beta, which is x itself beyond the threshold."""
    if (beta, threshold) == (1, 20):
        return b.op("softplus", x)
    wide = scaled(b, x, beta)
    return b.op("where", b.op("gt", wide, threshold), x, scaled(b, b.op("softplus", wide), 1 / beta))


@handles("glu")
def _glu(b: GraphBuilder, x: str, dim: int = -1) -> str:
    dim = dimension(b, x, dim)
    half = b.shape(x)[dim] // 2
    value, gate = (b.op("slice", x, dim=dim, start=n, stop=n + half, step=1) for n in (0, half))
    return b.op("mul", value, b.op("sigmoid", gate))


@handles("nan_to_num")
def _nan_to_num(
    b: GraphBuilder, x: str, nan: float | None = None, above: float | None = None, below: float | None = None
) -> str:
    """Replace what is no number, and infinities; no gradient passes there."""
    dtype = b.types[x].dtype
    if not is_float(dtype):
        return x
    ends = torch.finfo(getattr(torch, dtype))
    y = b.op("where", b.op("eq", x, math.inf), b.scalar(ends.max if above is None else above, dtype), x)
    y = b.op("where", b.op("eq", x, -math.inf), b.scalar(ends.min if below is None else below, dtype), y)
    return b.op("where", b.op("ne", x, x), b.scalar(nan or 0.0, dtype), y)


@handles("log_sigmoid_forward")
def _log_sigmoid(b: GraphBuilder, x: str) -> tuple[str, None]:
    """Return log 1 / (1 + e⁻ˣ) = -softplus(-x); torch keeps the second result for its derivative."""
    return b.op("neg", b.op("softplus", b.op("neg", x))), None


@handles("xlogy")
def _xlogy(b: GraphBuilder, x: str, y: str) -> str:
    """Return x log y: 0 where x is 0 and y a number. No gradient passes where x is 0 and y is not positive."""
    x, y = real(b, x), real(b, y)
    nothing = b.op("bitwise_and", b.op("eq", x, 0), b.op("le", y, 0))
    return b.op("mul", x, b.op("log", b.op("where", nothing, b.scalar(1, b.types[y].dtype), y)))


def _expm1_below(b: GraphBuilder, x: str) -> str:
    """Return eˣ - 1 = 2t / (1 - t) with t = tanh(x / 2) for x ≤ 0, to the last digits also where x is small."""
    t = b.op("tanh", b.op("mul", x, 0.5))
    return b.op("div", b.op("mul", t, 2.0), b.op("sub", 1.0, t))


@handles("elu")
def _elu(b: GraphBuilder, x: str, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> str:
    """Append ELU. The branch that is not taken sees 0, because its gradient would be too large where x is large."""
    below = b.op("where", b.op("gt", x, 0), b.scalar(0, b.types[x].dtype), x)
    below = b.op("mul", _expm1_below(b, scaled(b, below, input_scale)), alpha * scale)
    return b.op("where", b.op("gt", x, 0), scaled(b, x, scale), below)


handles("celu")(lambda b, x, alpha=1: _elu(b, x, alpha, 1, 1 / alpha))
handles("selu")(lambda b, x: _elu(b, x, 1.6732632423543772, 1.0507009873554805))


@handles("_prelu_kernel")
def _prelu(b: GraphBuilder, x: str, slope: str) -> str:
    return b.op("where", b.op("gt", x, 0), x, b.op("mul", x, slope))


@handles("hardtanh")
def _hardtanh(b: GraphBuilder, x: str, low: float = -1, high: float = 1) -> str:
    """Clamp x like `clamp`, except that no gradient passes where x is at a bound."""
    y = b.op("where", b.op("ge", x, high), high, x)
    return b.op("where", b.op("le", x, low), low, y)


@handles("clamp_min")
def _at_least(b: GraphBuilder, x: str, low: Any) -> str:
    """Clamp from below. Where x equals a tensor of bounds, x gets the whole gradient; `maximum` would halve it."""
    if not isinstance(low, str):
        return x if low is None else b.op("maximum", x, low)
    return b.op("where", b.op("lt", x, low), low, x)


@handles("clamp_max")
def _at_most(b: GraphBuilder, x: str, high: Any) -> str:
    if not isinstance(high, str):
        return x if high is None else b.op("minimum", x, high)
    return b.op("where", b.op("gt", x, high), high, x)


@handles("masked_fill")
def _masked_fill(b: GraphBuilder, x: str, mask: str, value: Any) -> str:
    dtype = b.types[x].dtype
    return b.op("where", mask, cast(b, value, dtype) if isinstance(value, str) else b.scalar(value, dtype), x)
