"""Reshapes, slices, concatenations: handlers of operators that only move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from shardwright.pcg.aten.registry import HANDLERS, Ints, cast, dimension, dimensions, handles, require
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float

HANDLERS.update({
    "permute": lambda b, x, dims: b.op("permute", x, dims=dimensions(b, x, dims)),
    "t": lambda b, x: transpose(b, x, 0, 1) if len(b.shape(x)) == 2 else x,
    "tril": lambda b, x, diagonal=0: _triangle(b, x, "le", diagonal),
    "triu": lambda b, x, diagonal=0: _triangle(b, x, "ge", diagonal),
    "unbind": lambda b, x, dim=0: tuple(select(b, x, dim, i) for i in range(b.shape(x)[dimension(b, x, dim)])),
})  # fmt: skip

# ---- reshapes ----


@handles("view", "_unsafe_view")
def reshape(b: GraphBuilder, x: str, shape: Sequence[int]) -> str:
    """Reshape x; one size may be -1. A view of a tensor as another dtype is not covered."""
    require(isinstance(shape, (tuple, list)))
    known = math.prod(s for s in shape if s != -1)
    total = math.prod(b.shape(x))
    return b.op("reshape", x, shape=tuple(total // known if s == -1 else s for s in shape))


def flatten(b: GraphBuilder, x: str, start: int = 0, end: int = -1) -> str:
    """Join the dimensions from start to end, both included, into one."""
    if not b.shape(x):
        return reshape(b, x, (1,))
    shape, start, end = b.shape(x), dimension(b, x, start), dimension(b, x, end)
    return reshape(b, x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@handles("unsqueeze")
def unsqueeze(b: GraphBuilder, x: str, dim: int) -> str:
    """Insert a new dimension of size 1."""
    shape, dim = b.shape(x), dimension(b, x, dim, 1)
    return reshape(b, x, (*shape[:dim], 1, *shape[dim:]))


@handles("squeeze")
def squeeze(b: GraphBuilder, x: str, dims: Ints | None = None) -> str:
    """Drop the dimensions of size 1 among `dims`; None: among all."""
    drop = range(len(b.shape(x))) if dims is None else dimensions(b, x, dims)
    return reshape(b, x, [s for i, s in enumerate(b.shape(x)) if i not in drop or s != 1])


@handles("transpose")
def transpose(b: GraphBuilder, x: str, i: int, j: int) -> str:
    """Exchange two dimensions."""
    if not b.shape(x):
        return x
    order = list(range(len(b.shape(x))))
    order[i], order[j] = order[j], order[i]
    return b.op("permute", x, dims=tuple(order))


@handles("expand")
def expand(b: GraphBuilder, x: str, sizes: Sequence[int], implicit: bool = False) -> str:
    """Repeat dimensions of size 1, and prepend new ones; -1 keeps a size."""
    shape, lead = b.shape(x), len(sizes) - len(b.shape(x))
    return b.op("expand", x, shape=tuple(shape[i - lead] if s == -1 else s for i, s in enumerate(sizes)))


@handles("repeat")
def _repeat(b: GraphBuilder, x: str, times: Sequence[int]) -> str:
    """Repeat the whole tensor: each dimension gets one in front, along which the tensor is expanded."""
    shape = (*(1,) * (len(times) - len(b.shape(x))), *b.shape(x))
    single = reshape(b, x, [n for s in shape for n in (1, s)])
    wide = expand(b, single, [n for t, s in zip(times, shape, strict=True) for n in (t, s)])
    return reshape(b, wide, [t * s for t, s in zip(times, shape, strict=True)])


@handles("copy")
def copy(b: GraphBuilder, x: str, src: str, non_blocking: bool = False) -> str:
    """Expand `src` to the shape of x, in the dtype of x."""
    return expand(b, cast(b, src, b.types[x].dtype), b.shape(x))


@handles("flip")
def flip(b: GraphBuilder, x: str, dims: Sequence[int]) -> str:
    """Reverse x along these dimensions."""
    dims = dimensions(b, x, dims)
    return b.op("flip", x, dims=dims) if dims else x


# ---- parts ----


def part(b: GraphBuilder, x: str, dim: int, start: int, stop: int, step: int = 1) -> str:
    """Take elements [start, stop) of one dimension."""
    return b.op("slice", x, dim=dim, start=start, stop=stop, step=step)


@handles("slice")
def _slice(
    b: GraphBuilder, x: str, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> str:
    dim = dimension(b, x, dim)
    begin, end, step = slice(start, stop, step).indices(b.shape(x)[dim])
    return part(b, x, dim, begin, max(begin, end), step)


@handles("select")
def select(b: GraphBuilder, x: str, dim: int, index: int) -> str:
    """Take one element of a dimension, and drop the dimension."""
    shape, dim = b.shape(x), dimension(b, x, dim)
    piece = part(b, x, dim, index % shape[dim], index % shape[dim] + 1)
    return reshape(b, piece, (*shape[:dim], *shape[dim + 1 :]))


@handles("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(b: GraphBuilder, x: str, sizes: Ints, dim: int = 0) -> tuple[str, ...]:
    """Cut x into pieces of these sizes, or of one size with the remainder at the end."""
    dim = dimension(b, x, dim)
    extent = b.shape(x)[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - i) for i in range(0, max(extent, 1), max(sizes, 1))]
    ends = list(accumulate(sizes))
    return tuple(part(b, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True))


@handles("diagonal")
def _diagonal(b: GraphBuilder, x: str, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    """Take the elements of two dimensions whose indices differ by `offset`, as a new last dimension."""
    rank, (i, j) = len(b.shape(x)), (dimension(b, x, d) for d in (dim1, dim2))
    moved = b.op("permute", x, dims=(*(d for d in range(rank) if d not in (i, j)), i, j))
    first = max(-offset, 0), max(offset, 0)
    count = min(size - at for size, at in zip(b.shape(moved)[-2:], first, strict=True))
    require(count > 0)
    rows, columns = (b.op("arange", start=at, stop=at + count, step=1, dtype="int64") for at in first)
    return b.op("index", moved, rows, columns, dim=rank - 2)


@handles("diag_embed")
def _diag_embed(b: GraphBuilder, x: str, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    """Lay the last dimension out along a diagonal of two new ones."""
    rank, (i, j) = len(b.shape(x)), (dimension(b, x, d, 1) for d in (dim1, dim2))
    pads = [max(offset, 0), 0, 0, max(offset, 0)] if offset > 0 else [0, -offset, -offset, 0]
    columns = unsqueeze(b, x, rank - 1)
    wide = expand(b, columns, (*b.shape(x)[:-1], b.shape(x)[-1], b.shape(x)[-1]))
    here = b.op("eq", *_positions(b, wide, 0))
    square = constant_pad(b, b.op("where", here, wide, b.scalar(0, b.types[x].dtype)), pads)
    order = [d for d in range(rank + 1) if d not in (i, j)]
    places = {**{d: n for n, d in enumerate(order)}, i: rank - 1, j: rank}
    return b.op("permute", square, dims=tuple(places[d] for d in range(rank + 1)))


def _triangle(b: GraphBuilder, x: str, side: str, diagonal: int) -> str:
    """Keep the elements on the diagonal and on one side of it; zeros elsewhere."""
    return b.op("where", b.op(side, *_positions(b, x, diagonal)), x, b.scalar(0, b.types[x].dtype))


def _positions(b: GraphBuilder, x: str, diagonal: int) -> tuple[str, str]:
    """Return the number of each column, and the number of the column in which the diagonal meets each row."""
    height, width = b.shape(x)[-2:]
    columns = b.op("arange", start=0, stop=width, step=1, dtype="int64")
    meets = b.op("arange", start=diagonal, stop=height + diagonal, step=1, dtype="int64")
    return reshape(b, columns, (1, width)), reshape(b, meets, (height, 1))


# ---- joins ----


@handles("cat")
def cat(b: GraphBuilder, xs: Sequence[str], dim: int = 0) -> str:
    """Join tensors along a dimension. Empty ones add nothing; those of shape [0] fit everywhere, as in torch."""
    longest = max(xs, key=lambda x: len(b.shape(x)))
    dim = dimension(b, longest, dim)
    nonempty = [x for x in xs if b.shape(x) != (0,) and b.shape(x)[dim]] or [longest]
    require(len(nonempty) == len(xs) or len({b.types[x].dtype for x in xs}) == 1)
    return b.op("concat", *nonempty, dim=dim) if len(nonempty) > 1 else nonempty[0]


@handles("stack")
def _stack(b: GraphBuilder, xs: Sequence[str], dim: int = 0) -> str:
    dim = dimension(b, xs[0], dim, 1)
    return cat(b, [unsqueeze(b, x, dim) for x in xs], dim)


@handles("roll")
def _roll(b: GraphBuilder, x: str, shifts: Ints, dims: Ints = ()) -> str:
    """Roll x: elements that are pushed out at the end come in at the front."""
    distances, order = ([n] if isinstance(n, int) else n for n in (shifts, dims))
    require(len(distances) == len(order))
    for shift, dim in zip(distances, dimensions(b, x, order), strict=True):
        extent = b.shape(x)[dim]
        if cutting := -shift % max(extent, 1):
            x = cat(b, [part(b, x, dim, cutting, extent), part(b, x, dim, 0, cutting)], dim)
    return x


@handles("slice_scatter")
def _slice_scatter(
    b: GraphBuilder, x: str, src: str, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> str:
    dim = dimension(b, x, dim)
    extent = b.shape(x)[dim]
    begin, end, step = slice(start, stop, step).indices(extent)
    require(step == 1)
    if end <= begin:
        return x
    before = [part(b, x, dim, 0, begin)] if begin else []
    after = [part(b, x, dim, end, extent)] if end < extent else []
    return cat(b, [*before, cast(b, src, b.types[x].dtype), *after], dim)


@handles("select_scatter")
def _select_scatter(b: GraphBuilder, x: str, src: str, dim: int, index: int) -> str:
    dim = dimension(b, x, dim)
    index %= b.shape(x)[dim]
    return _slice_scatter(b, x, unsqueeze(b, src, dim), dim, index, index + 1)


@handles("constant_pad_nd")
def constant_pad(b: GraphBuilder, x: str, pads: Sequence[int], value: Any = 0) -> str:
    """Pad each dimension; `pads` lists the sizes before and after it, from the last one. Negative sizes cut."""
    rank = len(b.shape(x))
    pairs = [(0, 0)] * (rank - len(pads) // 2) + [(pads[i], pads[i + 1]) for i in range(0, len(pads), 2)][::-1]
    for dim, (before, after) in enumerate(pairs):
        extent = b.shape(x)[dim]
        if before < 0 or after < 0:
            x = part(b, x, dim, max(-before, 0), extent + min(after, 0))
    full = tuple(max(n, 0) for before_after in pairs for n in before_after)
    if not any(full):
        return x
    return b.op("pad", x, pads=full, value=value if is_float(b.types[x].dtype) else int(value))
