"""Lookups by integer tensors."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.pcg.aten.reductions import mean, total
from shardwright.pcg.aten.registry import HANDLERS, NotCovered, cast, dimension, handles, require
from shardwright.pcg.aten.structure import reshape, unsqueeze
from shardwright.pcg.builder import GraphBuilder

Bags = tuple[str, None, None, None]
HANDLERS.update({
    "gather": lambda b, x, dim, index, *, sparse_grad=False: b.op("gather", x, index, dim=dimension(b, x, dim)),
    "index_select": lambda b, x, dim, index: b.op("index", x, reshape(b, index, (-1,)), dim=dimension(b, x, dim)),
})  # fmt: skip


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
    return b.op("index", x, *names, dim=used[0])


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
    """Write one value where a mask is true, or a vector of values at a vector of positions in a vector."""
    index = indices[0]
    if accumulate or len(indices) != 1 or index is None or b.types[index].dtype == "uint8":
        raise NotCovered
    values = cast(b, values, b.types[x].dtype)
    if b.types[index].dtype == "bool":
        return _where_masked(b, x, index, values)
    require(len(b.shape(x)) == len(b.shape(index)) == 1)
    return b.op("index_put", x, index, values)


def _where_masked(b: GraphBuilder, x: str, mask: str, value: str) -> str:
    require(all(s == 1 for s in b.shape(value)))
    trailing = len(b.shape(x)) - len(b.shape(mask))
    return b.op("where", reshape(b, mask, (*b.shape(mask), *(1,) * trailing)), reshape(b, value, ()), x)
