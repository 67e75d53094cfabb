"""Transfers between the ranks of two pipeline stages, for a tensor in equal layouts on meshes of unlike sizes.

Layouts are by axis, so both stages have the same ones; along an axis of k devices here and m there:

    S       a receiver gets the elements that it has in common with each sender, along all axes together
    R, C    a receiver gets the copy of one sender: device j there that of device ⌊j·k/m⌋ here
    P       device i here gives its summand to device ⌊i·m/k⌋ there, which adds up its summands; others there have 0

This is the identity on the logical tensor, in every layout. Cuts are found by dimension, in runs of indices
that no rank divides, so that nothing grows with the number of elements, and the load of the busiest ranks follows
without looking at any rank (`busiest`). Gradients come back by the same rule in the dual layouts:
a value in R is copied both ways; a value in C is copied, and all summands of its gradient, P, come back once.
If both meshes are equal, each rank sends its whole part to the rank at its place.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import ceil, gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pcg.layout import Layout, Layouts, local_shape, shard_order
from shardwright.pcg.mesh import Mesh

Some = range | tuple[int, ...] | None
"""The indices of a dimension of a rank's own part; None: all of them."""
Where = tuple[Some, ...]


class Piece(NamedTuple):
    """The part of a tensor that goes to the rank at a place of another stage's mesh, or comes from there.

    where   its indices in this rank's part of the tensor
    shape   its shape
    """

    place: int
    where: Where
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether it is all of this rank's part."""
        return not any(self.where)


class Busiest(NamedTuple):
    """The load of the ranks that send and receive most.

    sent, received  amounts, in multiples of a rank's own part of the tensor
    messages        the number that one rank sends or receives
    """

    sent: int
    received: int
    messages: int


class Tensor(NamedTuple):
    """A logical shape, with its layouts on the ranks that send it and on those that receive it."""

    shape: tuple[int, ...]
    layouts: Layouts

    @property
    def dual(self) -> Tensor:
        """The tensor's gradient."""
        return self._replace(layouts=tuple(layout.dual for layout in self.layouts))


def busiest(tensor: Tensor, here: Mesh, there: Mesh) -> Busiest:
    """Return the load of the busiest ranks in a microbatch; for meshes of any size."""
    into = out = copies = summands = 1
    many = here.num_microbatches if tensor.layouts and tensor.layouts[0].is_shard else 1
    for dim in range(len(tensor.shape)):
        meet = _cut(tensor, dim, here.sizes, there.sizes).table > 0
        if many > 1 and tensor.layouts[0].dim == dim:  # parts of the first microbatch come first
            meet = meet[: len(meet) // many, : len(meet[0]) // many]
        into, out = into * int(meet.sum(axis=0).max()), out * int(meet.sum(axis=1).max())
    for layout, k, m in zip(tensor.layouts, here.device_sizes, there.device_sizes, strict=True):
        if layout.kind == "P":
            summands *= ceil(k / m)
        elif not layout.is_shard:
            copies *= ceil(m / k)
    return Busiest(copies, summands, max(into * summands, out * copies))


def sent(tensor: Tensor, here: Mesh, there: Mesh, place: int) -> tuple[Piece, ...]:
    """Return the pieces that the rank at a place of the mesh `here` sends, in the order of their receivers."""
    return _pieces(tensor, here, there, place, True)


def received(tensor: Tensor, here: Mesh, there: Mesh, place: int) -> tuple[Piece, ...]:
    """Return the pieces that the rank at a place of the mesh `there` receives, in the order of their senders."""
    return _pieces(tensor, here, there, place, False)


@lru_cache(maxsize=4096)
def _pieces(tensor: Tensor, here: Mesh, there: Mesh, place: int, is_sender: bool) -> tuple[Piece, ...]:
    mesh, other = (here, there) if is_sender else (there, here)
    if here == there:
        local = local_shape(tensor.shape, tensor.layouts, mesh.sizes)
        return (Piece(place, (None,) * len(local), local),)
    mine, pieces = mesh.coordinate(place), list[Piece]()
    ends = [
        [y for y in range(n) if _meet(layout, *((x, y) if is_sender else (y, x)), *sizes)]
        for layout, x, n, sizes in zip(
            tensor.layouts, mine, other.device_sizes, zip(here.sizes, there.sizes, strict=True), strict=True
        )
    ]
    for coordinate in product(*ends):
        common = _common(tensor, mesh, mine, other, coordinate)
        if common is not None:
            pieces.append(Piece(_place(other, coordinate), *common))
    return tuple(sorted(pieces))


def _meet(layout: Layout, x: int, y: int, k: int, m: int) -> bool:
    """Return whether device x of k senders gives something to device y of m receivers, along an axis."""
    if layout.is_shard:
        return True
    if layout.kind == "P":
        return y == x * m // k
    return x == y * k // m


def _common(
    tensor: Tensor, mesh: Mesh, mine: tuple[int, ...], other: Mesh, its: tuple[int, ...]
) -> tuple[Where, tuple[int, ...]] | None:
    """Return the indices and the shape of the elements that this rank shares with another; None: no elements."""
    where, shape = list[Some](), list[int]()
    for dim in range(len(tensor.shape)):
        cut = _cut(tensor, dim, mesh.sizes, other.sizes)
        i, j = _number(tensor, dim, mesh.sizes, mine), _number(tensor, dim, other.sizes, its)
        if not cut.table[i, j]:
            return None
        both = cut.there[cut.here == i] == j
        where.append(None if both.all() else _shortly(np.repeat(both, cut.run)))
        shape.append(int(cut.table[i, j]) * cut.run)
    return tuple(where), tuple(shape)


def _shortly(held: NDArray[np.bool_]) -> Some:
    indices = np.flatnonzero(held)
    first, last = int(indices[0]), int(indices[-1])
    return range(first, last + 1) if last - first + 1 == len(indices) else tuple(indices.tolist())


class _Cut(NamedTuple):
    """A dimension on two meshes, in runs of `run` neighbouring indices, which no rank divides.

    here, there  the part that each run belongs to; a rank has the runs of its part in their order
    table        the number of runs that part i here and part j there have in common, [i, j]
    """

    run: int
    here: NDArray[np.int64]
    there: NDArray[np.int64]
    table: NDArray[np.int64]


@lru_cache(maxsize=4096)
def _cut(tensor: Tensor, dim: int, sizes: tuple[int, ...], others: tuple[int, ...]) -> _Cut:
    run = gcd(_smallest_run(tensor, dim, sizes), _smallest_run(tensor, dim, others))
    rows, num_rows = _parts(tensor, dim, sizes, run)
    columns, num_columns = _parts(tensor, dim, others, run)
    counts = np.bincount(rows * num_columns + columns, minlength=num_rows * num_columns)
    return _Cut(run, rows, columns, counts.reshape(num_rows, num_columns))


def _steps(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the axes that cut a dimension, the outermost cut first, each with the number of blocks that it cuts."""
    order = shard_order(tensor.shape, tensor.layouts, sizes)
    assert not isinstance(order, str), order
    return [(axis, blocks) for axis, at, blocks in order if at == dim]


def _smallest_run(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> int:
    """Return a length that divides every run of neighbouring indices that one rank holds."""
    left = run = tensor.shape[dim]
    for axis, blocks in _steps(tensor, dim, sizes):
        run = gcd(run, left // (blocks * sizes[axis]))
        left //= sizes[axis]
    return max(run, 1)


def _parts(tensor: Tensor, dim: int, sizes: tuple[int, ...], run: int) -> tuple[NDArray[np.int64], int]:
    """Return the part that each run belongs to, and the number of parts."""
    extent = tensor.shape[dim] // run
    left, position, digits = extent, np.arange(extent), dict[int, NDArray[np.int64]]()
    for axis, blocks in _steps(tensor, dim, sizes):
        inside = left // (blocks * sizes[axis])
        digits[axis] = position // inside % sizes[axis]
        position = position // (inside * sizes[axis]) * inside + position % inside
        left //= sizes[axis]
    part = np.zeros(extent, dtype=np.int64)
    for axis in sorted(digits):
        part = part * sizes[axis] + digits[axis]
    return part, prod(sizes[axis] for axis in digits)


def _number(tensor: Tensor, dim: int, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """Return the number of the part of a dimension that a rank has."""
    number = 0
    for axis in sorted(axis for axis, _ in _steps(tensor, dim, sizes)):
        number = number * sizes[axis] + coordinate[axis]
    return number


def _place(mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    """Return the number of a rank, by its coordinates; in the first microbatch."""
    place = 0
    for size, digit in zip(mesh.device_sizes, coordinate, strict=True):
        place = place * size + digit
    return place
