"""What ranks of stages of unlike sizes send each other, on NumPy: the same logical tensor, in the same layouts."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwright.pcg.layout import C, Layout, Layouts, P, R, S, local_shape, shard_order
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.pieces import Piece, Tensor, Where, busiest, received, sent

Parts = list[NDArray[np.float64]]
SHAPE = (24, 12)
SIZES = (1, 2, 3, 4, 6)
CHOICES = (R, C, P, S(0), S(1), S(0, 2), S(1, 3), S(0, 12))


def mesh_of(sizes: tuple[int, ...], time: int = 1) -> Mesh:
    names = tuple("xyz"[: len(sizes)])
    return Mesh((TIME, *names), (time, *sizes)) if time > 1 else Mesh(names, sizes)


def laid_out(whole: NDArray[np.float64], layouts: Layouts, mesh: Mesh) -> Parts:
    """By rank, in the first microbatch. Summands are of random numbers."""
    random, found = np.random.default_rng(0), Parts()
    order = shard_order(whole.shape, layouts, mesh.sizes)
    assert not isinstance(order, str)
    partial = [axis for axis, layout in enumerate(layouts) if layout.kind == "P"]
    for rank in range(mesh.num_devices):
        coordinate, part = mesh.coordinate(rank), whole
        for axis, dim, blocks in order:
            chunks = np.split(part, blocks * mesh.sizes[axis], axis=dim)
            part = np.concatenate(chunks[coordinate[axis] :: mesh.sizes[axis]], axis=dim)
        found.append(part)
    if not partial:
        return found
    summed = {rank: found[rank].copy() for rank in range(mesh.num_devices)}
    for rank in range(mesh.num_devices):  # the last of each group of summands has what is left
        coordinate = mesh.coordinate(rank)
        if any(coordinate[axis] + 1 < mesh.device_sizes[axis] for axis in partial):
            own = random.standard_normal(found[rank].shape)
            last = tuple(mesh.device_sizes[a] - 1 if a in partial else c for a, c in enumerate(coordinate))
            summed[_rank(mesh, last)] -= own
            summed[rank] = own
    return [summed[rank] for rank in range(mesh.num_devices)]


def _rank(mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    return int(np.ravel_multi_index(coordinate, mesh.device_sizes))


def total(parts: Parts, layouts: Layouts, mesh: Mesh) -> Parts:
    """Where there are summands, by rank their sum."""
    partial = [axis for axis, layout in enumerate(layouts) if layout.kind == "P"]
    grid = np.empty(mesh.device_sizes, dtype=object)
    for rank, part in enumerate(parts):
        grid[mesh.coordinate(rank)] = part
    for axis in partial:
        grid = np.broadcast_to(grid.sum(axis=axis, keepdims=True), grid.shape)
    return list(grid.reshape(-1))


def at(where: Where, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], ...]:
    return np.ix_(*(list(range(n) if own is None else own) for own, n in zip(where, shape, strict=True)))


def send(parts: Parts, tensor: Tensor, here: Mesh, there: Mesh, shape: tuple[int, ...]) -> Parts:
    """`shape`: of what each receives. What both sides say of a piece has to be the same."""
    out = {(x, p.place): p for x in range(here.num_devices) for p in sent(tensor, here, there, x)}
    into: dict[tuple[int, int], Piece] = {
        (p.place, y): p for y in range(there.num_devices) for p in received(tensor, here, there, y)
    }
    assert out.keys() == into.keys()
    found = [np.zeros(shape) for _ in range(there.num_devices)]
    for (x, y), piece in out.items():
        part = parts[x][at(piece.where, parts[x].shape)]
        assert part.shape == piece.shape == into[x, y].shape
        found[y][at(into[x, y].where, shape)] += part
    return found


@cache
def fitting(here: Mesh, there: Mesh, choices: tuple[Layout, ...]) -> list[Layouts]:
    """All layouts of a tensor that are possible on both meshes. Time has any but P."""
    axes = [[x for x in CHOICES if x != P] if name == TIME else choices for name in here.names]
    shard_orders = ((own, [shard_order(SHAPE, own, mesh.sizes) for mesh in (here, there)]) for own in product(*axes))
    return [own for own, orders in shard_orders if not any(isinstance(order, str) for order in orders)]


@st.composite
def cases(
    draw: st.DrawFn, choices: tuple[Layout, ...] = CHOICES, *, divides: bool = False
) -> tuple[Layouts, Mesh, Mesh]:
    """Along the first axis one of both sizes may be any divisor of 12, those of the others are the same."""
    rest, time, size = (
        draw(st.sampled_from([(), (2,), (3,)])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from(SIZES)),
    )
    other = draw(st.sampled_from([n for n in SIZES if not divides or n % size == 0 or size % n == 0]))
    here, there = (mesh_of((own, *rest), time) for own in (size, other))
    return draw(st.sampled_from(fitting(here, there, choices))), here, there


@given(cases())
def test_the_logical_tensor_stays_as_it_is(case: tuple[Layouts, Mesh, Mesh]) -> None:
    layouts, here, there = case
    whole = np.arange(prod(SHAPE), dtype=np.float64).reshape(SHAPE)
    wanted = laid_out(whole, layouts, there)
    found = send(laid_out(whole, layouts, here), Tensor(SHAPE, layouts), here, there, wanted[0].shape)
    for own, expected in zip(total(found, layouts, there), total(wanted, layouts, there), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-10)


@given(cases(tuple(x for x in CHOICES if x != R), divides=True))
def test_the_way_back_is_the_adjoint(case: tuple[Layouts, Mesh, Mesh]) -> None:
    """⟨send x, g⟩ = ⟨x, send back g⟩, where one size divides the other; not of R, which is the same everywhere."""
    layouts, here, there = case
    random, tensor = np.random.default_rng(1), Tensor(SHAPE, layouts)
    shapes = [laid_out(np.zeros(SHAPE), layouts, mesh)[0].shape for mesh in (here, there)]
    x = [random.standard_normal(shapes[0]) for _ in range(here.num_devices)]
    g = [random.standard_normal(shapes[1]) for _ in range(there.num_devices)]
    forward, back = send(x, tensor, here, there, shapes[1]), send(g, tensor.dual, there, here, shapes[0])
    ours, theirs = (sum(float((a * b).sum()) for a, b in zip(*pair, strict=True)) for pair in ((forward, g), (x, back)))
    assert ours == pytest.approx(theirs, abs=1e-9)


@given(cases())
def test_the_busiest_ranks_are_those_that_send_and_receive_most(case: tuple[Layouts, Mesh, Mesh]) -> None:
    layouts, here, there = case
    tensor = Tensor(SHAPE, layouts)
    out = [sent(tensor, here, there, place) for place in range(here.num_devices)]
    into = [received(tensor, here, there, place) for place in range(there.num_devices)]
    own = [prod(local_shape(SHAPE, layouts, mesh.sizes)) for mesh in (here, there)]
    most = busiest(tensor, here, there)
    found = [max(sum(prod(piece.shape) for piece in pieces) for pieces in side) for side in (out, into)]
    assert found == [most.sent * own[0], most.received * own[1]]
    assert most.messages == max(map(len, [*out, *into]))


@pytest.mark.parametrize("layout", [R, C, S(0)])
def test_on_equal_meshes_all_goes_to_the_same_place(layout: Layout) -> None:
    mesh, tensor = mesh_of((4,)), Tensor(SHAPE, (layout,))
    shape = (6, 12) if layout.is_shard else SHAPE
    assert sent(tensor, mesh, mesh, 2) == received(tensor, mesh, mesh, 2) == (Piece(2, (None, None), shape),)
