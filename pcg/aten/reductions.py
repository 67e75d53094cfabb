"""Reductions, scans and sorts along dimensions."""

from __future__ import annotations

import math
from typing import Any

from shardwright.pcg.aten.registry import Handler, Ints, cast, dimension, dtype_name, handles, reduced, require
from shardwright.pcg.aten.structure import flatten, reshape, transpose, unsqueeze
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float

_FEW_ROWS = 25
"""Of more, torch computes Euclidean distances by a product."""


def total(b: GraphBuilder, x: str, dims: Ints | None = None, keepdim: bool = False) -> str:
    """Append the sum over `dims`; None: over all."""
    return b.op("sum", x, dims=reduced(b, x, dims), keepdim=keepdim)


def mean(b: GraphBuilder, x: str, dims: Ints | None = None, keepdim: bool = False) -> str:
    """Append a sum times one over the global count, so that a split gives exact partial sums."""
    count = math.prod(b.shape(x)[d] for d in reduced(b, x, dims))
    require(count > 0)
    return b.op("mul", total(b, wide(b, x), dims, keepdim), 1.0 / count)


def wide(b: GraphBuilder, x: str) -> str:
    """Cast float16 to float32 before a sum that torch divides first and never stores, as it may be too large."""
    return cast(b, x, "float32" if b.types[x].dtype == "float16" else None)


@handles("var.correction")
def _var(
    b: GraphBuilder, x: str, dims: Ints | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> str:
    count = math.prod(b.shape(x)[d] for d in reduced(b, x, dims))
    freedom = count - (1 if correction is None else correction) * b.num_samples(x, reduced(b, x, dims))
    require(freedom > 0)
    centred = b.op("sub", wide(b, x), mean(b, x, dims, True))
    return b.op("mul", total(b, b.op("mul", centred, centred), dims, keepdim), 1.0 / freedom)


@handles("std.correction")
def _std(
    b: GraphBuilder, x: str, dims: Ints | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> str:
    return root(b, _var(b, x, dims, correction=correction, keepdim=keepdim))


@handles("std_mean.correction")
def _std_mean(
    b: GraphBuilder, x: str, dims: Ints | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[str, str]:
    return _std(b, x, dims, correction=correction, keepdim=keepdim), mean(b, x, dims, keepdim)


def root(b: GraphBuilder, squares: str) -> str:
    """Append the square root, through which no gradient passes at 0."""
    nothing, zero, one = b.op("eq", squares, 0), *(b.scalar(n, b.types[squares].dtype) for n in (0, 1))
    return b.op("where", nothing, zero, b.op("sqrt", b.op("where", nothing, one, squares)))


@handles("nansum")
def _nansum(b: GraphBuilder, x: str, dims: Ints | None = None, keepdim: bool = False, *, dtype: Any = None) -> str:
    known = b.op("where", b.op("ne", x, x), b.scalar(0, b.types[x].dtype), x) if is_float(b.types[x].dtype) else x
    return total(b, cast(b, known, dtype), dims, keepdim)


def _extreme(row: str) -> Handler:
    return lambda b, x, dims=None, keepdim=False: b.op(row, x, dims=reduced(b, x, dims), keepdim=keepdim)


handles("sum")(lambda b, x, dims=None, keepdim=False, *, dtype=None: total(b, cast(b, x, dtype), dims, keepdim))
handles("mean")(lambda b, x, dims=None, keepdim=False, *, dtype=None: mean(b, cast(b, x, dtype), dims, keepdim))
handles("max.dim")(lambda b, x, dim, keepdim=False: _chosen(b, x, x, dim, keepdim))
handles("amax", "max.default")(_extreme("amax"))
handles("amin", "min.default")(_extreme("amin"))


@handles("min.dim")
def _min_dim(b: GraphBuilder, x: str, dim: int, keepdim: bool = False) -> tuple[str, str]:
    require(is_float(b.types[x].dtype))
    return _chosen(b, x, b.op("neg", x), dim, keepdim)


def _chosen(b: GraphBuilder, x: str, score: str, dim: int, keepdim: bool) -> tuple[str, str]:
    """Return the element of x with the highest score, and its index.

    The gradient goes to the chosen element alone; `amax` gives it to all elements equal to it.
    """
    dim = dimension(b, x, dim)
    index = b.op("argmax", score, dims=(dim,), keepdim=True)
    value = b.op("gather", x, index, dim=dim)
    if keepdim:
        return value, index
    shape = (*b.shape(x)[:dim], *b.shape(x)[dim + 1 :])
    return reshape(b, value, shape), reshape(b, index, shape)


@handles("logsumexp")
def _logsumexp(b: GraphBuilder, x: str, dims: Ints, keepdim: bool = False) -> str:
    """Append log Σ eˣ. The largest x is subtracted before and added after, unless it is infinite, as in torch."""
    x, dims = wide(b, b.wide(x)), reduced(b, x, dims)
    require(is_float(b.types[x].dtype))
    largest = b.op("detach", b.op("amax", x, dims=dims, keepdim=True))
    finite = b.op("lt", b.op("abs", largest), math.inf)
    largest = b.op("where", finite, largest, b.scalar(0, b.types[x].dtype))
    logs = b.op("add", b.op("log", total(b, b.op("exp", b.op("sub", x, largest)), dims, True)), largest)
    remaining = tuple(n for d, n in enumerate(b.shape(x)) if d not in dims)
    return logs if keepdim else reshape(b, logs, remaining)


@handles("linalg_vector_norm")
def _vector_norm(
    b: GraphBuilder, x: str, order: float = 2, dims: Ints | None = None, keepdim: bool = False, *, dtype: Any = None
) -> str:
    """Append the sum of absolute values, or the root of the sum of squares. No gradient passes where all are 0."""
    require(order in (1, 2) and is_float(b.types[x].dtype))
    x = wide(b, b.wide(cast(b, x, dtype)))
    if order == 1:
        return total(b, b.op("abs", x), dims, keepdim)
    return root(b, total(b, b.op("mul", x, x), dims, keepdim))


@handles("_cdist_forward")
def _distances(b: GraphBuilder, x: str, y: str, order: float, mode: int | None = None) -> str:
    """Append ‖xᵢ − yⱼ‖ for each pair of rows. Only of few: torch keeps no differences, and these do."""
    require(max(b.shape(x)[-2], b.shape(y)[-2]) <= _FEW_ROWS)
    return _vector_norm(b, b.op("sub", unsqueeze(b, x, -2), unsqueeze(b, y, -3)), order, (-1,))


@handles("_euclidean_dist")
def _euclidean_distances(b: GraphBuilder, x: str, y: str) -> str:
    """Append √(‖xᵢ‖² + ‖yⱼ‖² − 2 xᵢ·yⱼ) from one product, where rounding may leave less than 0, which counts as 0."""
    left = b.op("concat", b.op("mul", x, -2.0), _squares(b, x), _ones(b, x), dim=len(b.shape(x)) - 1)
    right = b.op("concat", y, _ones(b, y), _squares(b, y), dim=len(b.shape(y)) - 1)
    product = b.op("matmul", left, transpose(b, right, -2, -1))
    return root(b, b.op("where", b.op("gt", product, 0), product, b.scalar(0, b.types[product].dtype)))


def _squares(b: GraphBuilder, x: str) -> str:
    return total(b, b.op("mul", x, x), (-1,), True)


def _ones(b: GraphBuilder, x: str) -> str:
    return b.op("full", shape=(*b.shape(x)[:-1], 1), value=1.0, dtype=b.types[x].dtype)


@handles("norm.ScalarOpt_dim")
def _norm(b: GraphBuilder, x: str, order: float | None, dims: Ints, keepdim: bool = False) -> str:
    return _vector_norm(b, x, 2 if order is None else order, dims, keepdim)


def _logical(row: str) -> Handler:
    def handler(b: GraphBuilder, x: str, dims: Ints | None = None, keepdim: bool = False) -> str:
        x = cast(b, x, "bool")
        if dims is not None and dims in ((), []):  # here, and only here, no dimensions mean none
            return x
        return b.op(row, x, dims=reduced(b, x, dims), keepdim=keepdim)

    return handler


handles("any")(_logical("any"))
handles("all")(_logical("all"))


@handles("argmax")
def _argmax(b: GraphBuilder, x: str, dim: int | None = None, keepdim: bool = False) -> str:
    if dim is not None:
        return b.op("argmax", x, dims=(dimension(b, x, dim),), keepdim=keepdim)
    index = b.op("argmax", flatten(b, x), dims=(0,), keepdim=False)
    return reshape(b, index, (1,) * len(b.shape(x))) if keepdim else index


@handles("argmin")
def _argmin(b: GraphBuilder, x: str, dim: int | None = None, keepdim: bool = False) -> str:
    require(is_float(b.types[x].dtype))
    return _argmax(b, b.op("neg", x), dim, keepdim)


def _normalized(row: str) -> Handler:
    return lambda b, x, dim, dtype=None: b.op(row, cast(b, x, dtype), dim=dimension(b, x, dim))


handles("softmax")(_normalized("softmax"))
handles("log_softmax")(_normalized("log_softmax"))


@handles("cumsum")
def _cumsum(b: GraphBuilder, x: str, dim: int, *, dtype: Any = None) -> str:
    x = b.wide(x)
    usual = b.types[x].dtype if is_float(b.types[x].dtype) else "int64"
    return b.op("cumsum", x, dim=dimension(b, x, dim), dtype=dtype_name(dtype or usual))


@handles("logcumsumexp")
def _logcumsumexp(b: GraphBuilder, x: str, dim: int) -> str:
    require(is_float(b.types[x].dtype))
    return b.op("logcumsumexp", x, dim=dimension(b, x, dim))


def _sortable(b: GraphBuilder, x: str) -> None:
    """Require a dtype that has -x, which descending order sorts by: bools and unsigned integers do not."""
    require(b.types[x].dtype not in ("bool", "uint8"))


@handles("sort")
def _sort(
    b: GraphBuilder, x: str, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[str, str]:
    _sortable(b, x)
    attrs = {"dim": dimension(b, x, dim), "descending": descending}
    return b.op("sort_values", x, **attrs), b.op("sort_indices", x, **attrs)


@handles("topk")
def _topk(b: GraphBuilder, x: str, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[str, str]:
    """Append the k largest in descending order, which is a valid order also where `sorted` is false."""
    _sortable(b, x)
    require(largest)
    dim = dimension(b, x, dim)
    return b.op("topk_values", x, k=k, dim=dim), b.op("topk_indices", x, k=k, dim=dim)


@handles("histc")
def _histc(b: GraphBuilder, x: str, bins: int = 100, low: float = 0, high: float = 0) -> str:
    require(low < high)
    if b.num_samples(x, range(len(b.shape(x)))) > 1:
        return _counts(b, flatten(b, x), bins, low, high)
    return b.op("histc", flatten(b, x), bins=bins, low=low, high=high)


def _counts(b: GraphBuilder, x: str, bins: int, low: float, high: float) -> str:
    """Append a histogram as sums, which may be split: each element is compared with every bin."""
    place = b.op("floor", b.op("mul", b.op("div", b.op("sub", x, low), high - low), bins))
    place = b.op("where", b.op("eq", x, high), bins - 1, place)
    numbers = b.op("arange", start=0, stop=bins, step=1, dtype=b.types[place].dtype)
    hits = b.op("eq", reshape(b, place, (*b.shape(x), 1)), reshape(b, numbers, (1, bins)))
    return total(b, cast(b, hits, b.types[x].dtype), (0,))
