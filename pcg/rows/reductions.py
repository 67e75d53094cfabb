"""Reductions, scans and sorts along dimensions. Only sums may be split along what they reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwright.pcg.attrs import Attrs, dimension, dimensions, get, integer
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import Row, attr_dtype, count_dtype, float_dtype, no_grad_dtype, numpy_dtype
from shardwright.pcg.rows.structural import FactorText, names


def _reduced(mark: str) -> Callable[[Sequence[Shape], Attrs], FactorText]:
    """Return the factor rule of a reduction over `dims`; `mark` is "!" where the reduced factors may not be split."""

    def rule(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
        dims = dimensions(attrs, "dims", len(shapes[0]))
        left = [n + (mark if i in dims else "") for i, n in enumerate(names(len(shapes[0])))]
        right = [("1" if get(attrs, "keepdim") else "") if i in dims else n for i, n in enumerate(left)]
        return f"{' '.join(left)} -> {' '.join(n for n in right if n)}", {}

    return rule


def along(result: str | None = None) -> Callable[[Sequence[Shape], Attrs], FactorText]:
    """Return the factor rule of an operator that needs dimension `dim` whole; attribute `result` is its new size."""

    def rule(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
        dim = dimension(attrs, "dim", len(shapes[0]))
        left = [n + ("!" if i == dim else "") for i, n in enumerate(names(len(shapes[0])))]
        right = [("k!" if result and i == dim else n) for i, n in enumerate(left)]
        return f"{' '.join(left)} -> {' '.join(right)}", {"k": integer(attrs, result)} if result else {}

    return rule


def _np_softmax(x: np.ndarray, dim: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=dim, keepdims=True))
    return e / e.sum(axis=dim, keepdims=True)


def _np_log_softmax(x: np.ndarray, dim: int) -> np.ndarray:
    shifted = x - x.max(axis=dim, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=dim, keepdims=True))


def _sort_indices(x: np.ndarray, dim: int, descending: bool) -> np.ndarray:
    return np.argsort(-x if descending else x, axis=dim, kind="stable")


def _sort_values(x: np.ndarray, dim: int, descending: bool) -> np.ndarray:
    return np.take_along_axis(x, _sort_indices(x, dim, descending), dim)


def _topk_indices(x: np.ndarray, k: int, dim: int) -> np.ndarray:
    return np.take(_sort_indices(x, dim, True), np.arange(k), axis=dim)


def _topk_values(x: np.ndarray, k: int, dim: int) -> np.ndarray:
    return np.take_along_axis(x, _topk_indices(x, k, dim), dim)


def _cumsum(x: np.ndarray, dim: int, dtype: str) -> np.ndarray:
    return np.cumsum(x, axis=dim, dtype=numpy_dtype(dtype))


def _logcumsumexp(x: np.ndarray, dim: int) -> np.ndarray:
    return np.logaddexp.accumulate(x, axis=dim)


def _argmax(x: np.ndarray, dims: Sequence[int], keepdim: bool) -> np.ndarray:
    return np.asarray(np.argmax(x, axis=dims[0], keepdims=keepdim))


def _histc(x: np.ndarray, bins: int, low: float, high: float) -> np.ndarray:
    return np.histogram(x, bins, (low, high))[0].astype(x.dtype)


def _reduction(reduce: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return NumPy's reduction with our attributes as its arguments."""
    return lambda x, dims, keepdim: reduce(x, axis=tuple(dims), keepdims=keepdim)


_int64, _bool = no_grad_dtype("int64"), no_grad_dtype("bool")
_SORT = "{0}.sort(dim={dim}, descending={descending}, stable=True)"
ROWS = [
    Row("sum", _reduced(""), _reduction(np.sum), "{0}.sum({dims}, {keepdim})", dtype=count_dtype, linear_in=((0,),),
        fresh=True, autocast="wide"),
    Row("amax", _reduced("!"), _reduction(np.max), "{0}.amax({dims}, {keepdim})", saves=(0, "result")),
    Row("amin", _reduced("!"), _reduction(np.min), "{0}.amin({dims}, {keepdim})", saves=(0, "result")),
    Row("any", _reduced("!"), _reduction(np.any), "{0}.any(dim={dims}, keepdim={keepdim})", dtype=_bool),
    Row("all", _reduced("!"), _reduction(np.all), "{0}.all(dim={dims}, keepdim={keepdim})", dtype=_bool),
    Row("argmax", _reduced("!"), _argmax, "{0}.argmax({dims}[0], {keepdim})", dtype=_int64),
    Row("softmax", along(), _np_softmax, "{0}.softmax({dim})", dtype=float_dtype, saves=("result",),
        rounds=True, autocast="wide", flops_per_element=12),
    Row("log_softmax", along(), _np_log_softmax, "{0}.log_softmax({dim})", dtype=float_dtype, saves=("result",),
        rounds=True, autocast="wide", flops_per_element=12),
    Row("cumsum", along(), _cumsum, "{0}.cumsum({dim}, dtype=torch.{dtype})", dtype=attr_dtype, linear_in=((0,),),
        fresh=True, autocast="wide"),
    Row("logcumsumexp", along(), _logcumsumexp, "{0}.logcumsumexp({dim})", dtype=float_dtype, saves=(0, "result"),
        rounds=True, flops_per_element=12),
    Row("sort_values", along(), _sort_values, f"{_SORT}[0]", saves=("index",)),
    Row("sort_indices", along(), _sort_indices, f"{_SORT}[1]", dtype=_int64),
    Row("topk_values", along("k"), _topk_values, "{0}.topk({k}, dim={dim})[0]", saves=("index",)),
    Row("topk_indices", along("k"), _topk_indices, "{0}.topk({k}, dim={dim})[1]", dtype=_int64),
    Row("histc", lambda shapes, attrs: ("a -> n!", {"n": integer(attrs, "bins")}), _histc,
        "{0}.histc({bins}, {low}, {high})", fresh=True, differentiable=False),
]  # fmt: skip
