"""Layouts: the ways in which a logical tensor lies on the devices of each mesh axis.

Per mesh axis a tensor has one of four layouts; its gradient has the dual one:

    R          every device holds the whole value, used the same way everywhere       dual R
    C          every device holds the whole value, each may use it differently        dual P
    S(d)       device p holds slice p of dimension d                                  dual S(d)
    P          device p holds a summand; the value is the sum over the axis           dual C

`S(d, n)` is the general form of sharding: dimension d is seen as n equal *blocks*, and device p holds slice p of
each of them. `S(d)` is `S(d, 1)`. A reshape, a concatenation or a fused QKV weight makes blocks of a
plain shard: splitting o of `(q o)` is `S(d, q)`.

If several axes shard one dimension, the dimension is a mixed-radix number. An axis with n blocks takes the digit
that stands after a prefix of size n; axes with equal n stand in mesh order. Three invariants, checked in
`shard_order`:

* axes with fewer blocks come first; an axis of size k with n blocks takes the digit between prefixes n and n·k, so the
  blocks of later axes are multiples of n·k;
* every axis divides what is left of a block;
* only the last axis in that order can be gathered or sliced without touching the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from shardwright.pcg.errors import LayoutError
from shardwright.pcg.mesh import Mesh

LayoutKind = Literal["R", "C", "S", "P"]
_DUAL: dict[LayoutKind, LayoutKind] = {"R": "R", "C": "P", "S": "S", "P": "C"}
_SHARD = re.compile(r"S\((\d+)(?:,\s*(\d+))?\)")


class Layout(NamedTuple):
    """The layout of a tensor on one mesh axis. It is a tuple, as searches compare and look up millions of layouts."""

    kind: LayoutKind
    dim: int = -1
    blocks: int = 1

    @property
    def dual(self) -> Layout:
        """The layout of the gradient of a tensor with this layout."""
        return Layout(_DUAL[self.kind], self.dim, self.blocks)

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim},{self.blocks})"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout that `str` printed as `text`; raise a `LayoutError` for anything else."""
        if text in ("R", "C", "P"):
            return cls(text)
        match = _SHARD.fullmatch(text)
        if not match or match[2] == "0":
            raise LayoutError(f"layout {text!r} is not one of R, C, P, S(dim) or S(dim,blocks)")
        return cls("S", int(match[1]), int(match[2] or 1))


R = Layout("R")
C = Layout("C")
P = Layout("P")


def S(dim: int, blocks: int = 1) -> Layout:
    """Return the layout sharded along `dim`, where a device holds its slice of each of `blocks` equal blocks."""
    return Layout("S", dim, blocks)


Layouts = tuple[Layout, ...]


def format_layouts(layouts: Layouts, mesh: Mesh) -> str:
    """Return the layouts as text for people: `dp: S(0), tp: R`."""
    return ", ".join(f"{name}: {layout}" for name, layout in zip(mesh.names, layouts, strict=True))


@lru_cache(maxsize=65536)
def shard_order(
    shape: tuple[int, ...], layouts: Layouts, sizes: tuple[int, ...]
) -> tuple[tuple[int, int, int], ...] | str:
    """Return the slices that lead from the logical tensor to a device's local one, outermost first.

    Each entry is `(axis index, dim, blocks)` where `blocks` counts the blocks of the tensor that is *left* when
    the slice is taken. If the layouts cannot hold for this shape, the reason is returned as text.
    """
    steps: list[tuple[int, int, int]] = []
    for layout in layouts:
        if layout.is_shard and not 0 <= layout.dim < len(shape):
            return f"{layout} names dimension {layout.dim} of a tensor of rank {len(shape)}"
        if layout.is_shard and layout.blocks < 1:
            return f"{layout} has {layout.blocks} blocks"
    for dim, extent in enumerate(shape):
        axes = sorted((x.blocks, axis) for axis, x in enumerate(layouts) if x.is_shard and x.dim == dim)
        left = extent
        for blocks, axis in axes:
            last = max((other_blocks for other_blocks, _ in axes if other_blocks < blocks), default=1)
            prefix = last * prod(sizes[other] for other_blocks, other in axes if other_blocks == last < blocks)
            if blocks % prefix:
                return f"dimension {dim} cannot hold {blocks} blocks inside the {prefix} parts of outer axes"
            inside = local_blocks(layouts, axis, sizes)
            if left % (inside * sizes[axis]):
                return (
                    f"dimension {dim} has size {extent}"
                    + (f" ({left} after outer shards)" if left != extent else "")
                    + (f" in {inside} blocks" if inside > 1 else "")
                    + f", not divisible by {sizes[axis]}"
                )
            left //= sizes[axis]
            steps.append((axis, dim, inside))
    return tuple(steps)


def local_blocks(layouts: Sequence[Layout], axis: int, sizes: tuple[int, ...]) -> int:
    """Return the blocks that the shard on `axis` sees in the part that the axes outside it leave."""
    mine = layouts[axis]
    outer = (a for a, x in enumerate(layouts) if x.is_shard and x.dim == mine.dim and x.blocks < mine.blocks)
    return mine.blocks // prod(sizes[a] for a in outer)


def positions(extent: int, layouts: Layouts, sizes: tuple[int, ...], at: Sequence[int]) -> range | None:
    """Return where the elements of a device's part of a dimension lie in it; None: they are not evenly spaced.

    Args:
        extent: the size of the whole dimension, which the layouts divide.
        layouts: by axis, `S(0, blocks)` where it shards the dimension, else anything that is no shard.
        sizes: of the axes.
        at: the device's number along each axis.
    """
    indices, order = range(extent), shard_order((extent,), layouts, sizes)
    assert not isinstance(order, str)
    for axis, _, blocks in order:
        part = len(indices) // sizes[axis]
        if blocks == 1:
            indices = indices[at[axis] * part :][:part]
        elif blocks == part:
            indices = indices[at[axis] :: sizes[axis]]
        else:
            return None
    return indices


def local_shape(shape: tuple[int, ...], layouts: Layouts, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one device's part of a tensor of logical `shape`."""
    local = list(shape)
    for axis, layout in enumerate(layouts):
        if layout.kind == "S":
            local[layout.dim] //= sizes[axis]
    return tuple(local)


def check_layouts(
    shape: tuple[int, ...], layouts: Layouts, mesh: Mesh, where: str = ""
) -> tuple[tuple[int, int, int], ...]:
    """Return the order of shards; raise a `LayoutError`, beginning with `where`, if `shape` cannot have the layouts."""
    where = where and f"{where}: "
    if len(layouts) != len(mesh):
        raise LayoutError(f"{where}{len(layouts)} layouts for the {len(mesh)} axes of {mesh}")
    order = shard_order(shape, layouts, mesh.sizes)
    if isinstance(order, str):
        raise LayoutError(
            f"{where}shape {list(shape)} cannot have layout ({format_layouts(layouts, mesh)}): {order}; "
            "choose axis sizes that divide the dimension, or another layout"
        )
    return order


def in_chunks(shape: tuple[int, ...], unpadded: tuple[int, ...], layouts: Layouts, sizes: tuple[int, ...]) -> bool:
    """Return whether what is left of a tensor without its padding lies as `torch.chunk` and `DTensor` cut it up.

    So a dimension with padding lies whole, or along one axis in parts that are as short as they can be.
    """
    for dim, (extent, size) in enumerate(zip(shape, unpadded, strict=True)):
        axes = [axis for axis, x in enumerate(layouts) if x.is_shard and x.dim == dim] if extent != size else []
        if axes and (
            len(axes) > 1 or layouts[axes[0]].blocks > 1 or -(-size // sizes[axes[0]]) * sizes[axes[0]] != extent
        ):
            return False
    return True


def innermost(layouts: Sequence[Layout], axis: int) -> bool:
    """Return whether no later axis shards the same dimension, so that this axis can be gathered or sliced alone."""
    mine = layouts[axis]
    return all(
        other == axis or not x.is_shard or x.dim != mine.dim or (x.blocks, other) < (mine.blocks, axis)
        for other, x in enumerate(layouts)
    )
