"""Operators that act on each element, with NumPy broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import copysign, erf, floor, inf, lgamma, log, nan, pi, sqrt, tan
from statistics import NormalDist
from typing import Any

import numpy as np

from shardwright.pcg.attrs import Attrs
from shardwright.pcg.row import Row, attr_dtype, float_dtype, no_grad_dtype, numpy_dtype
from shardwright.pcg.types import promote

_erf = np.vectorize(erf, otypes=[np.float64])
_BERNOULLI = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132)
"""B₂ₖ / 2k for k = 1 … 5 (https://dlmf.nist.gov/24.2#T1)."""


@partial(np.vectorize, otypes=[np.float64])
def _lgamma(x: float) -> float:
    return inf if x <= 0 and x == floor(x) else lgamma(x)


@partial(np.vectorize, otypes=[np.float64])
def _erfinv(x: float) -> float:
    """Return the inverse of the error function: a quantile of the normal distribution."""
    return NormalDist(sigma=sqrt(0.5)).inv_cdf((x + 1) / 2) if abs(x) < 1 else copysign(inf, x) if abs(x) == 1 else nan


@partial(np.vectorize, otypes=[np.float64])
def _digamma(x: float) -> float:
    """Return ψ by reflection, recurrence and its series (https://dlmf.nist.gov/5.5, https://dlmf.nist.gov/5.11.E2)."""
    if x <= 0 and x == floor(x):
        return nan if x else -copysign(inf, x)
    if x < 0.5:
        return float(_digamma(1 - x)) - pi / tan(pi * x)
    below = 0.0
    while x < 12:
        below, x = below + 1 / x, x + 1
    return log(x) - 1 / (2 * x) - sum(b / x ** (2 * k) for k, b in enumerate(_BERNOULLI, 1)) - below


def _gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x / sqrt(2)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _cross_entropy(x: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the cross-entropy of probabilities; logarithms are -100 at least, as in torch."""
    return -target * np.maximum(np.log(x), -100) - (1 - target) * np.maximum(np.log1p(-x), -100)


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(numpy_dtype(dtype))


def _unary(
    name: str,
    numpy: Callable[..., np.ndarray],
    torch: str,
    *,
    saves: tuple[int | str, ...] = (0,),
    floats: bool = True,
    **facts: Any,
) -> Row:
    return Row(name, "... -> ...", numpy, torch, dtype=float_dtype if floats else None, saves=saves, **facts)


def _binary(
    name: str, numpy: Callable[..., np.ndarray], torch: str, *, numbers: tuple[int, ...] = (0, 1), **facts: Any
) -> Row:
    return Row(name, "..., ... -> ...", numpy, torch, numbers=numbers, **facts)


_bool = no_grad_dtype("bool")


def _where_dtype(dtypes: Sequence[str], attrs: Attrs) -> str:
    return promote(*dtypes[1:])


ROWS = [
    _unary("abs", np.abs, "{0}.abs()", floats=False),
    _unary("ceil", np.ceil, "{0}.ceil()", saves=(), floats=False, differentiable=False),
    _unary("cos", np.cos, "{0}.cos()", rounds=True, flops_per_element=8),
    _unary("digamma", _digamma, "{0}.digamma()", rounds=True, flops_per_element=40),
    _unary("erf", _erf, "{0}.erf()", rounds=True, flops_per_element=8),
    _unary("erfinv", _erfinv, "{0}.erfinv()", rounds=True, autocast="wide", flops_per_element=12),
    _unary("exp", np.exp, "{0}.exp()", saves=("result",), rounds=True, autocast="wide", flops_per_element=8),
    _unary("expm1", np.expm1, "{0}.expm1()", saves=("result",), rounds=True, autocast="wide", flops_per_element=8),
    _unary("floor", np.floor, "{0}.floor()", saves=(), floats=False, differentiable=False),
    _unary("gelu", _gelu, "F.gelu({0}, approximate={approximate!r})", rounds=True, flops_per_element=12),
    _unary("hardsigmoid", lambda x: np.clip(x + 3, 0, 6) / 6, "F.hardsigmoid({0})", rounds=True, flops_per_element=3),
    _unary("hardswish", lambda x: x * np.clip(x + 3, 0, 6) / 6, "F.hardswish({0})", rounds=True, flops_per_element=4),
    _unary("i0e", lambda x: np.i0(x) * np.exp(-np.abs(x)), "torch.special.i0e({0})", saves=(0, "result"), rounds=True,
           flops_per_element=40),
    _unary("lgamma", _lgamma, "{0}.lgamma()", rounds=True, flops_per_element=40),
    _unary("log", np.log, "{0}.log()", rounds=True, autocast="wide", flops_per_element=8),
    _unary("log1p", np.log1p, "{0}.log1p()", rounds=True, autocast="wide", flops_per_element=8),
    _unary("logical_not", np.logical_not, "{0}.logical_not()", saves=(), floats=False),
    _unary("mish", lambda x: x * np.tanh(np.logaddexp(0, x)), "F.mish({0})", rounds=True, flops_per_element=20),
    _unary("neg", np.negative, "-{0}", saves=(), linear_in=((0,),), fresh=True, floats=False),
    _unary("reciprocal", np.reciprocal, "{0}.reciprocal()", saves=("result",), rounds=True, autocast="wide"),
    _unary("relu", lambda x: np.maximum(x, 0), "{0}.relu()", saves=("result",), floats=False),
    _unary("round", np.round, "{0}.round()", saves=(), floats=False, differentiable=False),
    _unary("rsqrt", lambda x: 1 / np.sqrt(x), "{0}.rsqrt()", saves=("result",), rounds=True, autocast="wide",
           flops_per_element=2),
    _unary("sigmoid", _sigmoid, "{0}.sigmoid()", saves=("result",), rounds=True, flops_per_element=8),
    _unary("sign", np.sign, "{0}.sign()", saves=(), floats=False, differentiable=False),
    _unary("silu", lambda x: x * _sigmoid(x), "F.silu({0})", rounds=True, flops_per_element=9),
    _unary("sin", np.sin, "{0}.sin()", rounds=True, flops_per_element=8),
    _unary("softplus", lambda x: np.logaddexp(0, x), "F.softplus({0})", rounds=True, autocast="wide",
           flops_per_element=10),
    _unary("sqrt", np.sqrt, "{0}.sqrt()", saves=("result",), rounds=True),
    _unary("tanh", np.tanh, "{0}.tanh()", saves=("result",), rounds=True, flops_per_element=8),
    Row("cast", "... -> ...", _cast, "{0}.to(torch.{dtype})", dtype=attr_dtype, linear_in=((0,),), passes_on=True),
    Row("detach", "... -> ...", lambda x: x, "{0}.detach()", linear_in=((0,),), view=True, differentiable=False),
    _binary("add", np.add, "{0} + {1}", linear_in=((0, 1),), fresh=True, commutative=True),
    _binary("sub", np.subtract, "{0} - {1}", linear_in=((0, 1),), fresh=True),
    _binary("mul", np.multiply, "{0} * {1}", saves=(0, 1), linear_in=((0,), (1,)), fresh=True,
            commutative=True),
    _binary("div", np.true_divide, "{0} / {1}", saves=(0, 1), linear_in=((0,),), dtype=float_dtype, fresh=True,
            rounds=True),
    _binary("pow", np.power, "{0} ** {1}", saves=(0,), rounds=True, autocast="wide"),
    _binary("maximum", np.maximum, "torch.maximum({0}, {1})", with_number="{0}.clamp_min({1})", saves=(0, 1),
            commutative=True),
    _binary("minimum", np.minimum, "torch.minimum({0}, {1})", with_number="{0}.clamp_max({1})", saves=(0, 1),
            commutative=True),
    _binary("atan2", np.arctan2, "torch.atan2({0}, {1})", numbers=(), saves=(0, 1), dtype=float_dtype, rounds=True,
            flops_per_element=12),
    _binary("binary_cross_entropy", _cross_entropy, "torch.ops.aten.binary_cross_entropy({0}, {1}, None, 0)",
            numbers=(), saves=(0, 1), dtype=float_dtype, rounds=True, autocast="wide", flops_per_element=20),
    _binary("floor_divide", np.floor_divide, "{0} // {1}"),
    _binary("remainder", np.remainder, "{0} % {1}"),
    _binary("eq", np.equal, "{0} == {1}", dtype=_bool, commutative=True),
    _binary("ne", np.not_equal, "{0} != {1}", dtype=_bool, commutative=True),
    _binary("lt", np.less, "{0} < {1}", dtype=_bool),
    _binary("le", np.less_equal, "{0} <= {1}", dtype=_bool),
    _binary("gt", np.greater, "{0} > {1}", dtype=_bool),
    _binary("ge", np.greater_equal, "{0} >= {1}", dtype=_bool),
    _binary("bitwise_and", np.bitwise_and, "{0} & {1}", numbers=(), commutative=True),
    _binary("bitwise_or", np.bitwise_or, "{0} | {1}", numbers=(), commutative=True),
    Row("where", "..., ..., ... -> ...", np.where, "torch.where({0}, {1}, {2})", dtype=_where_dtype, numbers=(1, 2),
        linear_in=((1, 2),), fresh=True, saves=(0,)),
]  # fmt: skip
