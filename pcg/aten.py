"""How ATen operators become rows of the op table.

One handler per ATen operator, by its name without overload; a handler gets the builder, the positional arguments
(tensors as node names, everything else as it is) and keyword arguments, and returns a node name, or a tuple of names
for operators with several results. Operators without a handler become `opaque` nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import OPAQUE
from shardwright.pcg.types import is_float

Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
IGNORED = frozenset({"_assert_tensor_metadata", "_assert_async", "_guards", "sym_constrain_range"})


class NotCovered(Exception):
    """A handler's operator has a row, but not for these arguments; it becomes opaque."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(b: GraphBuilder, x: str, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    rank = len(b.shape(x))
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(rank))
    return tuple(d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims))


def _dim(b: GraphBuilder, x: str, dim: int, extra: int = 0) -> int:
    return dim % (len(b.shape(x)) + extra)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


# ---- pointwise ----

_UNARY = ["abs", "ceil", "cos", "erf", "exp", "floor", "log", "log1p", "logical_not", "neg", "reciprocal", "relu", "rsqrt",
          "sigmoid", "sign", "silu", "sin", "sqrt", "tanh", "detach"]  # fmt: skip
_BINARY = {"mul": "mul", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "pow": "pow",
           "maximum": "maximum", "minimum": "minimum", "floor_divide": "floor_divide", "remainder": "remainder",
           "__and__": "bitwise_and", "bitwise_and": "bitwise_and", "logical_and": "bitwise_and",
           "__or__": "bitwise_or", "bitwise_or": "bitwise_or", "logical_or": "bitwise_or"}  # fmt: skip

for _name in _UNARY:
    HANDLERS[_name] = lambda b, x, _row=_name: b.op(_row, x)
for _name, _row in _BINARY.items():
    HANDLERS[_name] = lambda b, x, y, _row=_row: b.op(_row, x, y)


@handles("add", "sub")
def _add(b: GraphBuilder, x: Any, y: Any, alpha: float = 1, *, row: str = "add") -> str:
    if alpha != 1:
        y = b.op("mul", y, alpha) if isinstance(y, str) else y * alpha
    if not isinstance(y, str) and y == 0:
        return x
    return b.op(row, x, y)


HANDLERS["sub"] = lambda b, x, y, alpha=1: _add(b, x, y, alpha, row="sub")
HANDLERS["rsub"] = lambda b, x, y, alpha=1: _add(b, y, x, alpha, row="sub")
HANDLERS["min"] = lambda b, x, y: b.op("minimum", x, y)
HANDLERS["max"] = lambda b, x, y: b.op("maximum", x, y)


@handles("div", "true_divide")
def _div(b: GraphBuilder, x: Any, y: Any, rounding_mode: str | None = None) -> str:
    if rounding_mode == "floor":
        return b.op("floor_divide", x, y)
    if rounding_mode is not None:
        raise NotCovered
    return b.op("div", x, y)


@handles("gelu")
def _gelu(b: GraphBuilder, x: str, approximate: str = "none") -> str:
    return b.op("gelu", x, approximate=approximate)


@handles("softplus")
def _softplus(b: GraphBuilder, x: str, beta: float = 1, threshold: float = 20) -> str:
    if (beta, threshold) != (1, 20):
        raise NotCovered
    return b.op("softplus", x)


@handles("clamp")
def _clamp(b: GraphBuilder, x: str, low: Any = None, high: Any = None) -> str:
    x = x if low is None else b.op("maximum", x, low)
    return x if high is None else b.op("minimum", x, high)


HANDLERS["clamp_min"] = lambda b, x, low: b.op("maximum", x, low)
HANDLERS["clamp_max"] = lambda b, x, high: b.op("minimum", x, high)
HANDLERS["square"] = lambda b, x: b.op("mul", x, x)


@handles("_to_copy", "to", "type_as")
def _to_copy(b: GraphBuilder, x: str, dtype: Any = None, **_: Any) -> str:
    return b.op("cast", x, dtype=dtype_name(dtype)) if dtype is not None else x


@handles("clone", "contiguous", "alias", "lift_fresh_copy", "lift_fresh", "_unsafe_alias", "view_as")
def _same(b: GraphBuilder, x: str, *_: Any, **__: Any) -> str:
    return x


@handles("where")
def _where(b: GraphBuilder, condition: str, x: Any, y: Any) -> str:
    return b.op("where", b.op("cast", condition, dtype="bool"), *_values(b, x, y))


def _values(b: GraphBuilder, *values: Any) -> list[str]:
    """Scalars among branches take the dtype of the tensor branches."""
    dtypes = [b.types[v].dtype for v in values if isinstance(v, str)]
    floating = any(isinstance(v, float) for v in values)
    dtype = next((d for d in dtypes if is_float(d)), "float32" if floating else next(iter(dtypes), "int64"))
    return [v if isinstance(v, str) else b.scalar(v, dtype) for v in values]


@handles("masked_fill")
def _masked_fill(b: GraphBuilder, x: str, mask: str, value: Any) -> str:
    value = value if isinstance(value, str) else b.scalar(value, b.types[x].dtype)
    return b.op("where", mask, value, x)


@handles("native_dropout", "dropout")
def _dropout(b: GraphBuilder, x: str, p: float, train: bool = True) -> Any:
    return (b.op("dropout", x, p=p if train else 0), None)


HANDLERS["dropout"] = lambda b, x, p, train: _dropout(b, x, p, train)[0]


# ---- structure ----


@handles("view", "reshape", "_unsafe_view")
def _reshape(b: GraphBuilder, x: str, shape: Sequence[int]) -> str:
    known = math.prod(s for s in shape if s != -1)
    total = math.prod(b.shape(x))
    return b.op("reshape", x, shape=tuple(total // known if s == -1 else s for s in shape))


@handles("flatten")
def _flatten(b: GraphBuilder, x: str, start: int = 0, end: int = -1) -> str:
    shape, start, end = b.shape(x), _dim(b, x, start), _dim(b, x, end)
    return b.op("reshape", x, shape=(*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@handles("unflatten")
def _unflatten(b: GraphBuilder, x: str, dim: int, sizes: Sequence[int]) -> str:
    shape, dim = b.shape(x), _dim(b, x, dim)
    return _reshape(b, x, (*shape[:dim], *sizes, *shape[dim + 1 :])) if -1 not in sizes else _raise()


def _raise() -> str:
    raise NotCovered


@handles("unsqueeze")
def _unsqueeze(b: GraphBuilder, x: str, dim: int) -> str:
    shape, dim = b.shape(x), _dim(b, x, dim, 1)
    return b.op("reshape", x, shape=(*shape[:dim], 1, *shape[dim:]))


@handles("squeeze")
def _squeeze(b: GraphBuilder, x: str, dim: int | Sequence[int] | None = None) -> str:
    drop = _dims(b, x, dim)
    return b.op("reshape", x, shape=tuple(s for i, s in enumerate(b.shape(x)) if i not in drop or s != 1))


@handles("permute")
def _permute(b: GraphBuilder, x: str, dims: Sequence[int]) -> str:
    return b.op("permute", x, dims=_dims(b, x, dims))


@handles("transpose")
def _transpose(b: GraphBuilder, x: str, i: int, j: int) -> str:
    order = list(range(len(b.shape(x))))
    order[i], order[j] = order[j], order[i]
    return b.op("permute", x, dims=tuple(order))


@handles("t")
def _t(b: GraphBuilder, x: str) -> str:
    return _transpose(b, x, 0, 1) if len(b.shape(x)) == 2 else x


@handles("expand")
def _expand(b: GraphBuilder, x: str, sizes: Sequence[int], implicit: bool = False) -> str:
    shape, lead = b.shape(x), len(sizes) - len(b.shape(x))
    return b.op("expand", x, shape=tuple(shape[i - lead] if s == -1 else s for i, s in enumerate(sizes)))


def narrow(b: GraphBuilder, x: str, dim: int, start: int, stop: int, step: int = 1) -> str:
    """Elements [start, stop) of one dimension."""
    return b.op("slice", x, dim=dim, start=start, stop=stop, step=step)


@handles("slice")
def _slice(
    b: GraphBuilder, x: str, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> str:
    dim = _dim(b, x, dim)
    begin, end, step = slice(start, stop, step).indices(b.shape(x)[dim])
    return narrow(b, x, dim, begin, max(begin, end), step)


HANDLERS["narrow"] = lambda b, x, dim, start, length: narrow(b, x, _dim(b, x, dim), start, start + length)


@handles("select")
def _select(b: GraphBuilder, x: str, dim: int, index: int) -> str:
    shape, dim = b.shape(x), _dim(b, x, dim)
    piece = narrow(b, x, dim, index % shape[dim], index % shape[dim] + 1)
    return b.op("reshape", piece, shape=(*shape[:dim], *shape[dim + 1 :]))


@handles("split", "split_with_sizes")
def _split(b: GraphBuilder, x: str, sizes: int | Sequence[int], dim: int = 0) -> tuple[str, ...]:
    dim = _dim(b, x, dim)
    extent = b.shape(x)[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - i) for i in range(0, extent, sizes)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(narrow(b, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True))


@handles("chunk")
def _chunk(b: GraphBuilder, x: str, chunks: int, dim: int = 0) -> tuple[str, ...]:
    return _split(b, x, -(-b.shape(x)[_dim(b, x, dim)] // chunks), dim)


@handles("unbind")
def _unbind(b: GraphBuilder, x: str, dim: int = 0) -> tuple[str, ...]:
    return tuple(_select(b, x, dim, i) for i in range(b.shape(x)[_dim(b, x, dim)]))


@handles("cat")
def _cat(b: GraphBuilder, xs: Sequence[str], dim: int = 0) -> str:
    return b.op("concat", *xs, dim=_dim(b, xs[0], dim)) if len(xs) > 1 else xs[0]


@handles("stack")
def _stack(b: GraphBuilder, xs: Sequence[str], dim: int = 0) -> str:
    dim = _dim(b, xs[0], dim, 1)
    return _cat(b, [_unsqueeze(b, x, dim) for x in xs], dim)


@handles("slice_scatter")
def _slice_scatter(
    b: GraphBuilder, x: str, src: str, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> str:
    dim = _dim(b, x, dim)
    extent = b.shape(x)[dim]
    begin, end, step = slice(start, stop, step).indices(extent)
    if step != 1:
        raise NotCovered
    before = [narrow(b, x, dim, 0, begin)] if begin else []
    after = [narrow(b, x, dim, end, extent)] if end < extent else []
    return _cat(b, [*before, src, *after], dim)


@handles("select_scatter")
def _select_scatter(b: GraphBuilder, x: str, src: str, dim: int, index: int) -> str:
    index %= b.shape(x)[_dim(b, x, dim)]
    return _slice_scatter(b, x, _unsqueeze(b, src, _dim(b, x, dim)), dim, index, index + 1)


@handles("copy")
def _copy(b: GraphBuilder, x: str, src: str, non_blocking: bool = False) -> str:
    return b.op("expand", b.op("cast", src, dtype=b.types[x].dtype), shape=b.shape(x))


@handles("constant_pad_nd", "pad")
def _pad(b: GraphBuilder, x: str, pads: Sequence[int], mode: Any = "constant", value: float | None = None) -> str:
    if isinstance(mode, (int, float)):
        mode, value = "constant", mode
    if mode != "constant" or min(pads) < 0:
        raise NotCovered
    rank = len(b.shape(x))
    before_after = [pads[i : i + 2] for i in range(0, len(pads), 2)][::-1]
    full = [(0, 0)] * (rank - len(before_after)) + [tuple(p) for p in before_after]
    value = value or 0
    return b.op(
        "pad", x, pads=tuple(n for p in full for n in p), value=value if is_float(b.types[x].dtype) else int(value)
    )


@handles("flip")
def _flip(b: GraphBuilder, x: str, dims: Sequence[int]) -> str:
    return b.op("flip", x, dims=_dims(b, x, dims))


# ---- constants ----


def full_like(b: GraphBuilder, x: str, value: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> str:
    """A constant tensor of x's dtype and shape, unless told otherwise."""
    name = dtype_name(dtype) if dtype is not None else b.types[x].dtype
    return full(b, b.shape(x) if shape is None else shape, value, name)


def full(b: GraphBuilder, shape: Sequence[int], value: Any, dtype: Any) -> str:
    name = dtype_name(dtype)
    value = bool(value) if name == "bool" else float(value) if is_float(name) else int(value)
    return b.op("full", shape=tuple(shape), value=value, dtype=name)


HANDLERS |= {
    "full": lambda b, shape, value, dtype=None, **_: full(b, shape, value, dtype or ("float32" if isinstance(value, float) else "int64")),
    "zeros": lambda b, shape, dtype="float32", **_: full(b, shape, 0, dtype),
    "ones": lambda b, shape, dtype="float32", **_: full(b, shape, 1, dtype),
    "zeros_like": lambda b, x, dtype=None, **_: full_like(b, x, 0, dtype),
    "ones_like": lambda b, x, dtype=None, **_: full_like(b, x, 1, dtype),
    "empty_like": lambda b, x, dtype=None, **_: full_like(b, x, 0, dtype),
    "full_like": lambda b, x, value, dtype=None, **_: full_like(b, x, value, dtype),
    "new_zeros": lambda b, x, shape, dtype=None, **_: full_like(b, x, 0, dtype, shape),
    "new_ones": lambda b, x, shape, dtype=None, **_: full_like(b, x, 1, dtype, shape),
    "new_full": lambda b, x, shape, value, dtype=None, **_: full_like(b, x, value, dtype, shape),
    "scalar_tensor": lambda b, value, dtype="float32", **_: full(b, (), value, dtype),
}  # fmt: skip


@handles("fill")
def _fill(b: GraphBuilder, x: str, value: Any) -> str:
    return _copy(b, x, value) if isinstance(value, str) else full_like(b, x, value)


@handles("arange")
def _arange(b: GraphBuilder, *bounds: Any, dtype: Any = None, **_: Any) -> str:
    start, stop, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not all(isinstance(v, int) for v in (start, stop, step)):
        raise NotCovered
    return b.op("arange", start=start, stop=stop, step=step, dtype=dtype_name(dtype) if dtype else "int64")


# ---- reductions ----


@handles("sum")
def _sum(b: GraphBuilder, x: str, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> str:
    x = b.op("cast", x, dtype=dtype_name(dtype)) if dtype is not None else x
    return b.op("sum", x, dims=_dims(b, x, dims), keepdim=keepdim)


@handles("mean")
def mean(b: GraphBuilder, x: str, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> str:
    """A sum times one over the global count, so that a split gives exact partial sums."""
    count = math.prod(b.shape(x)[d] for d in _dims(b, x, dims))
    return b.op("mul", _sum(b, x, dims, keepdim, dtype), 1.0 / count)


@handles("var")
def _var(b: GraphBuilder, x: str, dims: Any = None, correction: float = 1, keepdim: bool = False) -> str:
    count = math.prod(b.shape(x)[d] for d in _dims(b, x, dims))
    centred = b.op("sub", x, mean(b, x, dims, True))
    return b.op("mul", _sum(b, b.op("mul", centred, centred), dims, keepdim), 1.0 / (count - correction))


for _name in ("amax", "amin"):
    HANDLERS[_name] = lambda b, x, dims=None, keepdim=False, _row=_name: b.op(
        _row, x, dims=_dims(b, x, dims), keepdim=keepdim
    )
for _name in ("any", "all"):
    HANDLERS[_name] = lambda b, x, dims=None, keepdim=False, _row=_name: b.op(
        _row, b.op("cast", x, dtype="bool"), dims=_dims(b, x, dims), keepdim=keepdim
    )


@handles("argmax")
def _argmax(b: GraphBuilder, x: str, dim: int | None = None, keepdim: bool = False) -> str:
    if dim is None:
        raise NotCovered
    return b.op("argmax", x, dims=_dims(b, x, dim), keepdim=keepdim)


@handles("softmax", "_softmax", "log_softmax", "_log_softmax")
def _softmax(b: GraphBuilder, x: str, dim: int, dtype: Any = None, *, row: str = "softmax") -> str:
    x = b.op("cast", x, dtype=dtype_name(dtype)) if dtype not in (None, False) else x
    return b.op(row, x, dim=_dim(b, x, dim))


HANDLERS["log_softmax"] = HANDLERS["_log_softmax"] = lambda b, x, dim, dtype=None: _softmax(
    b, x, dim, dtype, row="log_softmax"
)


@handles("cumsum")
def _cumsum(b: GraphBuilder, x: str, dim: int, dtype: Any = None) -> str:
    own = b.types[x].dtype
    return b.op(
        "cumsum", x, dim=_dim(b, x, dim), dtype=dtype_name(dtype) if dtype else own if is_float(own) else "int64"
    )


@handles("sort")
def _sort(b: GraphBuilder, x: str, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[str, str]:
    attrs = {"dim": _dim(b, x, dim), "descending": descending}
    return b.op("sort_values", x, **attrs), b.op("sort_indices", x, **attrs)


@handles("topk")
def _topk(b: GraphBuilder, x: str, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[str, str]:
    if not largest:
        raise NotCovered
    dim = _dim(b, x, dim)
    return b.op("topk_values", x, k=k, dim=dim), b.op("topk_indices", x, k=k, dim=dim)


@handles("histc")
def _histc(b: GraphBuilder, x: str, bins: int = 100, low: float = 0, high: float = 0) -> str:
    if low == high:
        raise NotCovered
    return b.op("histc", b.op("reshape", x, shape=(math.prod(b.shape(x)),)), bins=bins, low=low, high=high)


@handles("diff")
def _diff(
    b: GraphBuilder, x: str, n: int = 1, dim: int = -1, prepend: str | None = None, append: str | None = None
) -> str:
    dim = _dim(b, x, dim)
    x = _cat(b, [v for v in (prepend, x, append) if v is not None], dim)
    for _ in range(n):
        extent = b.shape(x)[dim]
        x = b.op("sub", narrow(b, x, dim, 1, extent), narrow(b, x, dim, 0, extent - 1))
    return x


# ---- contractions ----


@handles("linear")
def _linear(b: GraphBuilder, x: str, w: str, bias: str | None = None) -> str:
    y = b.op("linear", x, w)
    return y if bias is None else b.op("add", y, bias)


@handles("mm", "bmm", "matmul")
def _matmul(b: GraphBuilder, x: str, y: str) -> str:
    if min(len(b.shape(x)), len(b.shape(y))) < 2:
        raise NotCovered
    return b.op("matmul", x, y)


@handles("addmm", "baddbmm")
def _addmm(b: GraphBuilder, bias: str, x: str, y: str, beta: float = 1, alpha: float = 1) -> str:
    if (beta, alpha) != (1, 1):
        raise NotCovered
    return b.op("add", b.op("matmul", x, y), bias)


@handles("conv2d")
def _conv2d(b: GraphBuilder, x: str, w: str, bias: str | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
            groups: int = 1) -> str:  # fmt: skip
    if isinstance(padding, str):
        raise NotCovered
    y = b.op("conv2d", x, w, stride=_pair(stride), padding=_pair(padding), dilation=_pair(dilation), groups=groups)
    return y if bias is None else b.op("add", y, b.op("reshape", bias, shape=(1, b.shape(bias)[0], 1, 1)))


@handles("convolution")
def _convolution(b: GraphBuilder, x: str, w: str, bias: str | None, stride: Any, padding: Any, dilation: Any,
                 transposed: bool, output_padding: Any, groups: int) -> str:  # fmt: skip
    if transposed or len(b.shape(w)) != 4:
        raise NotCovered
    return _conv2d(b, x, w, bias, stride, padding, dilation, groups)


@handles("grouped_mm_fallback", "_grouped_mm")
def _grouped_mm(b: GraphBuilder, x: str, w: str, ends: str, *_: Any) -> str:
    return b.op("grouped_mm", x, w, ends)


# ---- lookups ----


@handles("embedding")
def _embedding(b: GraphBuilder, w: str, index: str, padding_idx: int = -1, *_: Any) -> str:
    rows = b.shape(w)[0]
    return b.op(
        "embedding", w, index, padding_idx=padding_idx % rows if padding_idx is not None and padding_idx != -1 else None
    )


@handles("embedding_bag", "_embedding_bag")
def _embedding_bag(b: GraphBuilder, w: str, index: str, starts: str, scale_grad: bool = False, mode: int = 0, sparse: bool = False,
                   weights: Any = None, include_last: bool = False, padding_idx: int | None = None) -> Any:  # fmt: skip
    if scale_grad or mode > 1 or weights is not None or include_last or padding_idx not in (None, -1):
        raise NotCovered
    return (b.op("embedding_bag", w, index, starts, mode=("sum", "mean")[mode]), None, None, None)


@handles("index")
def _index(b: GraphBuilder, x: str, indices: Sequence[str | None]) -> str:
    used = [i for i, v in enumerate(indices) if v is not None]
    names = [v for v in indices if v is not None]
    if used != list(range(used[0], used[0] + len(used))) or any(b.types[v].dtype == "bool" for v in names):
        raise NotCovered
    return b.op("index", x, *names, dim=used[0])


HANDLERS["index_select"] = lambda b, x, dim, index: b.op("index", x, index, dim=_dim(b, x, dim))


@handles("gather")
def _gather(b: GraphBuilder, x: str, dim: int, index: str, sparse_grad: bool = False) -> str:
    return b.op("gather", x, index, dim=_dim(b, x, dim))


@handles("index_put")
def _index_put(b: GraphBuilder, x: str, indices: Sequence[str | None], values: str, accumulate: bool = False) -> str:
    if accumulate or len(indices) != 1 or indices[0] is None or len(b.shape(indices[0])) != 1 or len(b.shape(x)) != 1:
        raise NotCovered
    return b.op("index_put", x, indices[0], values)


# ---- networks ----


@handles("layer_norm")
def _layer_norm(b: GraphBuilder, x: str, shape: Sequence[int], w: str | None = None, bias: str | None = None,
                eps: float = 1e-5, *_: Any) -> str:  # fmt: skip
    if w is None and bias is not None:
        raise NotCovered
    return b.op("layer_norm", *(v for v in (x, w, bias) if v is not None), normalized_dims=len(shape), eps=eps)


@handles("rms_norm")
def _rms_norm(b: GraphBuilder, x: str, shape: Sequence[int], w: str | None = None, eps: float | None = None) -> str:
    eps = 1.1920928955078125e-07 if eps is None else eps  # torch's default: the machine epsilon of float32
    return b.op("rms_norm", *(v for v in (x, w) if v is not None), normalized_dims=len(shape), eps=eps)


@handles("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "batch_norm")
def _batch_norm(b: GraphBuilder, x: str, w: str | None, bias: str | None, running_mean: str, running_var: str,
                *options: Any) -> Any:  # fmt: skip
    """Statistics over the whole batch, as a single process has them, from sums that may be split."""
    training, momentum, eps = options if len(options) == 3 else (False, *options)
    dims = [d for d in range(len(b.shape(x))) if d != 1]
    wide = tuple(s if d == 1 else 1 for d, s in enumerate(b.shape(x)))

    def over_channels(v: str) -> str:
        return b.op("reshape", v, shape=wide)

    def update(old: str, new: str) -> str:
        return b.op("add", b.op("mul", old, 1 - momentum), b.op("mul", new, momentum))

    count = math.prod(b.shape(x)) // wide[1]
    centre = mean(b, x, dims) if training else running_mean
    centred = b.op("sub", x, over_channels(centre))
    spread = mean(b, b.op("mul", centred, centred), dims) if training else running_var
    y = b.op("mul", centred, over_channels(b.op("rsqrt", b.op("add", spread, eps))))
    y = y if w is None else b.op("mul", y, over_channels(w))
    y = y if bias is None else b.op("add", y, over_channels(bias))
    if not training:
        return (y, None, None)
    unbiased = b.op("mul", b.op("detach", spread), count / max(count - 1, 1))
    return (y, None, None, update(running_mean, b.op("detach", centre)), update(running_var, unbiased))


@handles("scaled_dot_product_attention")
def _sdpa(b: GraphBuilder, q: str, k: str, v: str, mask: str | None = None, p: float = 0.0, causal: bool = False,
          scale: float | None = None, enable_gqa: bool = False) -> str:  # fmt: skip
    if not p:
        return b.op("sdpa", *(t for t in (q, k, v, mask) if t is not None), causal=causal, scale=scale)
    return _attention_with_dropout(b, q, k, v, mask, p, causal, scale)


def _attention_with_dropout(b: GraphBuilder, q: str, k: str, v: str, mask: str | None, p: float, causal: bool,
                            scale: float | None) -> str:  # fmt: skip
    """Attention whose probabilities are dropped, written out: the mask is drawn for the whole tensor of probabilities."""
    scale = 1 / math.sqrt(b.shape(q)[-1]) if scale is None else scale
    k, v = _repeat_heads(b, k, b.shape(q)[-3]), _repeat_heads(b, v, b.shape(q)[-3])
    scores = b.op("mul", b.op("matmul", q, _transpose(b, k, -2, -1)), scale)
    if causal:
        rows, columns = (b.op("arange", start=0, stop=n, step=1, dtype="int64") for n in b.shape(scores)[-2:])
        mask = b.op("le", _unsqueeze(b, columns, 0), _unsqueeze(b, rows, 1))
    if mask is None:
        return b.op("matmul", b.op("dropout", b.op("softmax", scores, dim=len(b.shape(scores)) - 1), p=p), v)
    if b.types[mask].dtype != "bool":
        weights = b.op("softmax", b.op("add", scores, mask), dim=len(b.shape(scores)) - 1)
        return b.op("matmul", b.op("dropout", weights, p=p), v)
    lowest = b.scalar(-3.4028234663852886e38, b.types[scores].dtype)
    weights = b.op("softmax", b.op("where", mask, scores, lowest), dim=len(b.shape(scores)) - 1)
    out = b.op("matmul", b.op("dropout", weights, p=p), v)
    if causal:
        return out
    seen = b.op("any", mask, dims=(len(b.shape(mask)) - 1,), keepdim=True)
    return b.op("where", seen, out, b.scalar(0, b.types[out].dtype))


def _repeat_heads(b: GraphBuilder, x: str, heads: int) -> str:
    shape = b.shape(x)
    if shape[-3] == heads:
        return x
    wide = b.op("reshape", x, shape=(*shape[:-2], 1, *shape[-2:]))
    wide = b.op("expand", wide, shape=(*shape[:-2], heads // shape[-3], *shape[-2:]))
    return b.op("reshape", wide, shape=(*shape[:-3], heads, *shape[-2:]))


@handles("max_pool2d", "max_pool2d_with_indices")
def _max_pool(
    b: GraphBuilder, x: str, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> str:
    if _pair(dilation) != (1, 1) or ceil:
        raise NotCovered
    return b.op("max_pool2d", x, kernel=_pair(kernel), stride=_pair(stride or kernel), padding=_pair(padding))


@handles("avg_pool2d")
def _avg_pool(b: GraphBuilder, x: str, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any) -> str:
    if rest:
        raise NotCovered
    return b.op("avg_pool2d", x, kernel=_pair(kernel), stride=_pair(stride or kernel), padding=_pair(padding))


@handles("adaptive_avg_pool2d")
def _adaptive(b: GraphBuilder, x: str, size: Any) -> str:
    return mean(b, x, (-2, -1), True) if _pair(size) == (1, 1) else b.op("adaptive_avg_pool2d", x, size=_pair(size))


# ---- losses: sums over the batch, divided by global counts, so that a split gives exact partial sums ----


def _reduced_loss(b: GraphBuilder, losses: str, reduction: int) -> str:
    return losses if reduction == 0 else mean(b, losses) if reduction == 1 else _sum(b, losses)


@handles("cross_entropy_loss")
def _cross_entropy(b: GraphBuilder, x: str, target: str, weight: str | None = None, reduction: int = 1,
                   ignore_index: int = -100, label_smoothing: float = 0.0) -> str:  # fmt: skip
    if weight is not None or reduction == 0 or is_float(b.types[target].dtype):
        raise NotCovered
    total = b.op("cross_entropy_sum", x, target, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == 2:
        return total
    kept = b.op("cast", b.op("ne", target, ignore_index), dtype=b.types[total].dtype)
    return b.op("div", total, _sum(b, kept))


@handles("binary_cross_entropy_with_logits")
def _bce(b: GraphBuilder, x: str, target: str, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> str:
    if weight is not None or pos_weight is not None:
        raise NotCovered
    return _reduced_loss(b, b.op("sub", b.op("softplus", x), b.op("mul", x, target)), reduction)


@handles("mse_loss")
def _mse(b: GraphBuilder, x: str, target: str, reduction: int = 1) -> str:
    error = b.op("sub", x, target)
    return _reduced_loss(b, b.op("mul", error, error), reduction)


# ---- operators without a row ----


def opaque(
    b: GraphBuilder,
    target: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Sequence[tuple[tuple[int, ...], str]],
) -> Any:
    """The operator as it is: its argument template has ("$", i) where operand i goes. One node per result."""
    operands: list[str] = []

    def template(value: Any) -> Any:
        if isinstance(value, Ref):
            operands.append(value)
            return ("$", len(operands) - 1)
        if isinstance(value, (list, tuple)):
            return tuple(template(v) for v in value)
        return value if isinstance(value, (int, float, bool, str, type(None))) else ("torch", str(value))

    packed = template(args)
    named = tuple((key, template(value)) for key, value in sorted(kwargs.items()))
    nodes = tuple(
        b.op(OPAQUE, *operands, target=target, args=packed, kwargs=named, result=i, shape=shape, dtype=dtype)
        for i, (shape, dtype) in enumerate(results)
    )
    return nodes if len(results) > 1 else nodes[0]


class Ref(str):
    """A node name, told apart from string arguments."""


HANDLERS["getitem"] = operator.getitem
