"""Lookups by integer tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.pcg.aten.reductions import mean, total
from shardwright.pcg.aten.registry import HANDLERS, cast, dimension, handles, require
from shardwright.pcg.aten.structure import cat, expand, part, reshape, unsqueeze
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float

Bags = tuple[str, None, None, None]
HANDLERS.update({
    "gather": lambda b, x, dim, index, *, sparse_grad=False: b.op("gather", x, index, dim=dimension(b, x, dim)),
    "index_select": lambda b, x, dim, index: _selected(b, x, dimension(b, x, dim), reshape(b, index, (-1,))),
})  # fmt: skip


def _selected(b: GraphBuilder, x: str, dim: int, index: str) -> str:
    """Look rows up. No number is negative, so that rows of a matrix are those of a table, which may be split."""
    if dim == 0 and len(b.shape(x)) == 2 and is_float(b.types[x].dtype):
        return b.op("embedding", x, index, padding_idx=None)
    return b.op("index", x, index, dim=dim)


@handles("embedding")
def _embedding(
    b: GraphBuilder, w: str, index: str, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> str:
    """Append a lookup. For ATen, unlike torch.nn.functional, `padding_idx` -1 means none. Gradients are dense."""
    require(not scale_grad)
    return b.op("embedding", w, index, padding_idx=None if padding_idx < 0 else padding_idx)


@handles("embedding_bag")
def _embedding_bag(b: GraphBuilder, w: str, index: str, starts: str, scale_grad: bool = False, mode: int = 0,
                   sparse: bool = False, weights: str | None = None, include_last: bool = False,
                   padding_idx: int | None = None) -> Bags:  # fmt: skip
    require(not scale_grad and mode <= 1 and not include_last and padding_idx is None)
    if (length := _bag_length(b, index, starts)) is not None:
        return (_equal_bags(b, w, index, length, mode, weights), None, None, None)
    require(weights is None)
    return (b.op("embedding_bag", w, index, starts, mode=("sum", "mean")[mode]), None, None, None)


def _bag_length(b: GraphBuilder, index: str, starts: str) -> int | None:
    """Return the length of all bags if `starts` shows that it is the same: bags given as a matrix of ids."""
    node, (count,) = b.nodes[starts], b.shape(index)
    if node.op != "arange" or node.attr("start") != 0:
        return None
    length = int(str(node.attr("step")))
    return length if b.shape(starts)[0] * length == count else None


def _equal_bags(b: GraphBuilder, w: str, index: str, length: int, mode: int, weights: str | None) -> str:
    """Append a lookup and a sum per bag. Unlike `embedding_bag`, they can be split along the batch and the table."""
    bags = b.shape(index)[0] // length
    rows = b.op("embedding", w, reshape(b, index, (bags, length)), padding_idx=None)
    if weights is not None:
        rows = b.op("mul", rows, reshape(b, weights, (bags, length, 1)))
    return mean(b, rows, 1) if mode else total(b, rows, 1)


@handles("index", "_unsafe_index")
def _index(b: GraphBuilder, x: str, indices: Sequence[str | None]) -> str:
    """Index by integer tensors on neighbouring dimensions; masks would give shapes that depend on data."""
    used = [i for i, v in enumerate(indices) if v is not None]
    names = [v for v in indices if v is not None]
    if not used:
        return x
    require(used == list(range(used[0], used[0] + len(used))))
    require(not any(b.types[v].dtype in ("bool", "uint8") for v in names))
    if len(names) > 1 and _is_each(b, x, used[0], names):
        return _of_each(b, x, used[0], names[1:])
    return b.op("index", x, *names, dim=used[0])


def _is_each(b: GraphBuilder, x: str, dim: int, indices: Sequence[str]) -> bool:
    """Return whether the first index names each element of its dimension once, in order, and the others go with it."""
    node, count = b.nodes[indices[0]], b.shape(x)[dim]
    shapes = [b.shape(index) for index in indices]
    while node.op == "reshape":
        node = b.nodes[node.inputs[0]]
    return (
        node.op == "arange" and (node.attr("start"), node.attr("step"), node.attr("stop")) == (0, 1, count)
        and shapes[0] == (count, *(1,) * (len(shapes[0]) - 1)) and all(s == shapes[1] for s in shapes[2:])
        and len(shapes[0]) == len(shapes[1]) and shapes[1][0] == count
    )  # fmt: skip


def _of_each(b: GraphBuilder, x: str, dim: int, indices: Sequence[str]) -> str:
    """Take x[…, i, index[i], …] for each i of a dimension: unlike `index`, it can be split along that dimension."""
    shape, common, end = b.shape(x), b.shape(indices[0]), dim + 1 + len(indices)
    place = _one_place(b, indices, shape[dim + 1 : end])
    joined = reshape(b, x, (*shape[: dim + 1], math.prod(shape[dim + 1 : end]), *shape[end:]))
    count = common[0], math.prod(common[1:])
    column = reshape(b, place, (*(1,) * dim, *count, *(1,) * len(shape[end:])))
    rows = b.op("gather", joined, expand(b, column, (*shape[:dim], *count, *shape[end:])), dim=dim + 1)
    return reshape(b, rows, (*shape[:dim], *common, *shape[end:]))


@handles("scatter.value")
def _scatter(b: GraphBuilder, x: str, dim: int, index: str, value: float) -> str:
    """Write one value at the places that `index` names along a dimension: a `where` on whether a place is named."""
    dim = dimension(b, x, dim)
    shape, count = b.shape(x), b.shape(index)
    require((*shape[:dim], *shape[dim + 1 :]) == (*count[:dim], *count[dim + 1 :]))
    places = b.op("arange", start=0, stop=shape[dim], step=1, dtype=b.types[index].dtype)
    column = reshape(b, places, (shape[dim], 1, *(1,) * (len(shape) - dim - 1)))
    named = b.op("any", b.op("eq", unsqueeze(b, index, dim), column), dims=(dim + 1,), keepdim=False)
    return b.op("where", named, b.scalar(value, b.types[x].dtype), x)


@handles("index_put")
def _index_put(b: GraphBuilder, x: str, indices: Sequence[str | None], values: str, accumulate: bool = False) -> str:
    """Write, or add, at the places that integer tensors on neighbouring dimensions name; one value where a mask is."""
    used = [i for i, v in enumerate(indices) if v is not None]
    named = [v for v in indices if v is not None]
    values = cast(b, values, b.types[x].dtype)
    require(bool(used) and used == list(range(used[0], used[0] + len(used))))
    if b.types[named[0]].dtype == "bool":
        require(len(indices) == 1 and not accumulate)
        return _where_masked(b, x, named[0], values)
    require(not any(b.types[v].dtype in ("bool", "uint8") for v in named))
    if len(b.shape(x)) == len(b.shape(named[0])) == 1 and not accumulate:
        return b.op("index_put", x, named[0], values)
    dim, shape, lead = used[0], b.shape(x), b.shape(x)[: used[0]]
    indexed, after = shape[dim : dim + len(used)], shape[dim + len(used) :]
    at = _one_place(b, named, indexed)
    rows = expand(b, values, (*lead, *b.shape(at), *after))
    rows = reshape(b, rows, (*lead, math.prod(b.shape(at)), *after))
    flat, put = reshape(b, x, (*lead, math.prod(indexed), *after)), _add_rows if accumulate else _put_rows
    return reshape(b, put(b, flat, dim, _column(b, flat, dim, at), rows), shape)


def _one_place(b: GraphBuilder, indices: Sequence[str], extents: Sequence[int]) -> str:
    """Return the places that several indices name together, as numbers of one dimension; negative ones count back."""
    place: str | None = None
    for index, extent in zip(indices, extents, strict=True):
        wrapped = b.op("where", b.op("lt", index, 0), b.op("add", index, extent), index)
        place = wrapped if place is None else b.op("add", b.op("mul", place, extent), wrapped)
    assert place is not None
    return place


def _column(b: GraphBuilder, x: str, dim: int, index: str) -> str:
    """Return an index along one dimension of x, the same for all others."""
    rank = len(b.shape(x))
    return reshape(b, index, (*(1,) * dim, math.prod(b.shape(index)), *(1,) * (rank - dim - 1)))


def _to_places(b: GraphBuilder, row: str, x: str, dim: int, index: str, rows: str) -> str:
    """Append what rows that go to places of x along a dimension give, by one of the rows for that."""
    return b.op(row, index, rows, dim=dim, places=b.shape(x)[dim])


def _is_zero(b: GraphBuilder, x: str) -> bool:
    return b.nodes[x].op == "full" and b.nodes[x].attr("value") == 0


def _add_rows(b: GraphBuilder, x: str, dim: int, index: str, rows: str) -> str:
    total = _to_places(b, "scatter_sum", x, dim, index, cast(b, rows, b.types[x].dtype))
    return total if _is_zero(b, x) else b.op("add", x, total)


def _put_rows(b: GraphBuilder, x: str, dim: int, index: str, rows: str) -> str:
    return b.op("scatter_put", x, index, cast(b, rows, b.types[x].dtype), dim=dim)


@handles("index_add")
def _index_add(b: GraphBuilder, x: str, dim: int, index: str, rows: str, *, alpha: float = 1) -> str:
    require(len(b.shape(x)) > 0 and b.types[x].dtype != "bool")
    dim, rows = dimension(b, x, dim), rows if alpha == 1 else b.op("mul", rows, alpha)
    return _add_rows(b, x, dim, _column(b, x, dim, index), rows)


@handles("index_copy")
def _index_copy(b: GraphBuilder, x: str, dim: int, index: str, rows: str) -> str:
    require(len(b.shape(x)) > 0)
    return _put_rows(b, x, dimension(b, x, dim), _column(b, x, dimension(b, x, dim), index), rows)


@handles("index_fill")
def _index_fill(b: GraphBuilder, x: str, dim: int, index: str, value: float | str) -> str:
    require(len(b.shape(x)) > 0)
    dim, shape, dtype = dimension(b, x, dim), b.shape(x), b.types[x].dtype
    at = _column(b, x, dim, _one_place(b, [index], [shape[dim]]))
    one = cast(b, value, dtype) if isinstance(value, str) else b.scalar(value, dtype)
    return _put_rows(b, x, dim, at, expand(b, one, (*shape[:dim], b.shape(at)[dim], *shape[dim + 1 :])))


def _aligned(b: GraphBuilder, x: str, dim: int, index: str, rows: str) -> tuple[int, str, str]:
    """Return the dimension, the index and the rows of a `scatter`; what the index says of whole dimensions, once."""
    require(len(b.shape(x)) == len(b.shape(index)) == len(b.shape(rows)) > 0)
    dim = dimension(b, x, dim)
    for d, (extent, count) in enumerate(zip(b.shape(rows), b.shape(index), strict=True)):
        rows = part(b, rows, d, 0, count) if extent != count else rows
    require(all(d == dim or m == n for d, (m, n) in enumerate(zip(b.shape(x), b.shape(index), strict=True))))
    node = b.nodes[index]
    if node.op == "expand" and len(b.shape(node.inputs[0])) == len(b.shape(index)):
        index = node.inputs[0] if b.shape(node.inputs[0])[dim] == b.shape(index)[dim] else index
    return dim, index, rows


@handles("scatter_add")
def _scatter_add(b: GraphBuilder, x: str, dim: int, index: str, rows: str) -> str:
    require(b.types[x].dtype != "bool")
    return _add_rows(b, x, *_aligned(b, x, dim, index, rows))


@handles("scatter.src")
def _scatter_rows(b: GraphBuilder, x: str, dim: int, index: str, rows: str) -> str:
    return _put_rows(b, x, *_aligned(b, x, dim, index, rows))


@handles("scatter_reduce.two")
def _scatter_reduce(b: GraphBuilder, x: str, dim: int, index: str, rows: str, reduce: str, *,
                    include_self: bool = True) -> str:  # fmt: skip
    """Reduce rows by the places that they name, with what is there or, where a row comes, instead of it."""
    require(is_float(b.types[x].dtype) and reduce in ("sum", "mean", "amax", "amin"))
    dim, index, rows = _aligned(b, x, dim, index, rows)
    if reduce in ("amax", "amin"):
        return _scatter_extreme(b, x, dim, index, rows, reduce, include_self)
    ones = expand(b, b.scalar(1, b.types[x].dtype), b.shape(index))
    counts = _to_places(b, "scatter_sum", x, dim, index, ones)
    if reduce == "sum":
        both = _add_rows(b, x, dim, index, rows)
        if include_self or _is_zero(b, x):
            return both
        return b.op("where", b.op("gt", counts, 0), _to_places(b, "scatter_sum", x, dim, index, rows), x)
    if include_self:
        return b.op("div", _add_rows(b, x, dim, index, rows), b.op("add", counts, 1.0))
    sums = _to_places(b, "scatter_sum", x, dim, index, rows)
    means = b.op("div", sums, b.op("maximum", counts, 1.0))
    return means if _is_zero(b, x) else b.op("where", b.op("gt", counts, 0), means, x)


def _numbers(b: GraphBuilder, x: str, dim: int, dtype: str) -> str:
    return b.op("arange", start=0, stop=b.shape(x)[dim], step=1, dtype=dtype)


def _scatter_extreme(b: GraphBuilder, x: str, dim: int, index: str, rows: str, reduce: str, with_self: bool) -> str:
    if with_self:  # what is there is one row more for each place
        shape = [b.shape(index)[d] if d != dim else n for d, n in enumerate(b.shape(x))]
        destinations = expand(b, _column(b, x, dim, _numbers(b, x, dim, b.types[index].dtype)), shape)
        index, rows = cat(b, [destinations, index], dim), cat(b, [x, rows], dim)
    signed = rows if reduce == "amax" else b.op("neg", rows)
    extreme = _to_places(b, "scatter_max", x, dim, index, signed)
    extreme = extreme if reduce == "amax" else b.op("neg", extreme)
    if with_self or _is_zero(b, x):
        return extreme
    ones = expand(b, b.scalar(1, b.types[x].dtype), b.shape(index))
    counts = _to_places(b, "scatter_sum", x, dim, index, ones)
    return b.op("where", b.op("gt", counts, 0), extreme, x)


def _where_masked(b: GraphBuilder, x: str, mask: str, value: str) -> str:
    require(all(s == 1 for s in b.shape(value)))
    trailing = len(b.shape(x)) - len(b.shape(mask))
    return b.op("where", reshape(b, mask, (*b.shape(mask), *(1,) * trailing)), reshape(b, value, ()), x)
