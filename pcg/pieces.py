"""What the ranks of one pipeline stage send those of another, of a tensor with equal layouts on meshes of unlike sizes.

Layouts are by axis, so both stages have the same ones; along an axis of k devices here and m there:

    S       who receives gets what it has in common with each that sends, along all axes together
    R, C    each that receives gets the copy of one that sends: device j there that of device ⌊j·k/m⌋ here
    P       device i here gives its summand to device ⌊i·m/k⌋ there, which adds up what it gets; others there have 0

This is the identity on the logical tensor, in every layout. Gradients come back by the same rule in the dual layouts:
what is R both ways is copied both ways; what is C is copied, and of its gradient, P, all summands come back once.
Where both meshes are equal, each rank sends its whole part to the one at its place.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pcg.layout import Layout, Layouts, local_shape, shard_order
from shardwright.pcg.mesh import Mesh

Some = range | tuple[int, ...] | None
"""Indices of a dimension of a rank's own part; None: all of them."""
Where = tuple[Some, ...]


class Piece(NamedTuple):
    """What goes to the rank at a place of another stage's mesh, or comes from there.

    where   of this rank's part of the tensor
    shape   of what is sent
    """

    place: int
    where: Where
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of this rank's part."""
        return not any(self.where)


class Tensor(NamedTuple):
    """A logical shape, and how it lies on the ranks that send it and on those that receive it."""

    shape: tuple[int, ...]
    layouts: Layouts

    @property
    def dual(self) -> Tensor:
        """Its gradient."""
        return self._replace(layouts=tuple(layout.dual for layout in self.layouts))


def sent(tensor: Tensor, here: Mesh, there: Mesh, place: int) -> tuple[Piece, ...]:
    """What the rank at a place of the mesh `here` sends, in the order of those that it goes to."""
    return _pieces(tensor, here, there, place, True)


def received(tensor: Tensor, here: Mesh, there: Mesh, place: int) -> tuple[Piece, ...]:
    """What the rank at a place of the mesh `there` receives, in the order of those that it comes from."""
    return _pieces(tensor, here, there, place, False)


@lru_cache(maxsize=4096)
def _pieces(tensor: Tensor, here: Mesh, there: Mesh, place: int, is_sender: bool) -> tuple[Piece, ...]:
    own, other = (here, there) if is_sender else (there, here)
    if here == there:
        local = local_shape(tensor.shape, tensor.layouts, own.sizes)
        return (Piece(place, (None,) * len(local), local),)
    mine, found = own.coordinate(place), list[Piece]()
    ends = [
        [y for y in range(n) if _meet(layout, *((x, y) if is_sender else (y, x)), *sizes)]
        for layout, x, n, sizes in zip(
            tensor.layouts, mine, other.device_sizes, zip(here.sizes, there.sizes, strict=True), strict=True
        )
    ]
    for coordinate in product(*ends):
        common = _common(tensor, own, mine, other, coordinate)
        if common is not None:
            found.append(Piece(_place(other, coordinate), *common))
    return tuple(sorted(found))


def _meet(layout: Layout, x: int, y: int, k: int, m: int) -> bool:
    """Whether device x of the k that send gives something to device y of the m that receive, along an axis."""
    if layout.is_shard:
        return True
    if layout.kind == "P":
        return y == x * m // k
    return x == y * k // m


def _common(
    tensor: Tensor, own: Mesh, mine: tuple[int, ...], other: Mesh, its: tuple[int, ...]
) -> tuple[Where, tuple[int, ...]] | None:
    """Where this rank has what the other one has as well, and how much; None: nothing."""
    where, shape = list[Some](), list[int]()
    for dim in range(len(tensor.shape)):
        ours, theirs = _held(tensor, own.sizes, mine, dim), _held(tensor, other.sizes, its, dim)
        both = np.flatnonzero(np.isin(ours, theirs, assume_unique=True))
        if not len(both):
            return None
        where.append(None if len(both) == len(ours) else _shortly(both))
        shape.append(len(both))
    return tuple(where), tuple(shape)


def _shortly(indices: NDArray[np.int64]) -> Some:
    first, last = int(indices[0]), int(indices[-1])
    return range(first, last + 1) if last - first + 1 == len(indices) else tuple(indices.tolist())


def _held(tensor: Tensor, sizes: tuple[int, ...], coordinate: tuple[int, ...], dim: int) -> NDArray[np.int64]:
    """The indices of a dimension that a rank holds, as they lie in its part: in order."""
    order = shard_order(tensor.shape, tensor.layouts, sizes)
    assert not isinstance(order, str), order
    steps = tuple((sizes[axis], coordinate[axis], blocks) for axis, at, blocks in order if at == dim)
    return _indices(tensor.shape[dim], steps)


@lru_cache(maxsize=4096)
def _indices(extent: int, steps: tuple[tuple[int, int, int], ...]) -> NDArray[np.int64]:
    found = np.arange(extent)
    for size, number, blocks in steps:
        found = found.reshape(blocks, size, -1)[:, number].reshape(-1)
    return found


def _place(mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    """The number of a rank, by its coordinates; in the first microbatch."""
    place = 0
    for size, digit in zip(mesh.device_sizes, coordinate, strict=True):
        place = place * size + digit
    return place
