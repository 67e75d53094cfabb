"""One dimension after the other: hierarchies, meshes and tori, from an all-gather of a line.

Ranks are the places of a grid, neighbours in the last dimension one after the other. First every line of one dimension
gathers what its ranks have, then every line of the next. Which algorithm a line uses is the caller's choice: `direct`
inside of a node, a ring across nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from math import prod

from shardwright.pcg.collectives.builders.lines import line_all_gather, two_way_ring_all_gather
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer

Line = Callable[[int], Schedule]
"""An all-gather of so many ranks."""


def nested_all_gather(
    dims: Sequence[int], lines: Sequence[Line], orders: Sequence[Sequence[int]], pieces: int = 1
) -> Schedule:
    """Return an all-gather over the dimensions in an order; with several orders, equal parts of the pieces take each.

    `lines`: of each dimension the algorithm. `pieces`: of each part, times those that the lines themselves need.
    """
    made = [line(dim) for line, dim in zip(lines, dims, strict=True)]
    inside = prod({len(line.collective.chunks) // line.num_ranks for line in made})
    total = len(orders) * inside * pieces
    transfers = list[Transfer]()
    for index, order in enumerate(orders):
        transfers += _gathered(dims, made, order, range(index, total, len(orders)), total)
    name = f"nested all_gather {'x'.join(map(str, dims))}"
    return Schedule(name, collective("all_gather", prod(dims), total), tuple(transfers))


def mesh_all_gather(dims: Sequence[int], pieces: int = 1) -> Schedule:
    """Return a mesh: equal parts of the data take the dimensions in every order, so that all links are used."""
    return nested_all_gather(dims, [line_all_gather] * len(dims), _cyclic(len(dims)), pieces)


def torus_all_gather(dims: Sequence[int], pieces: int = 1) -> Schedule:
    """Return a torus: rings both ways, and equal parts of the data beginning in each dimension."""
    return nested_all_gather(dims, [two_way_ring_all_gather] * len(dims), _cyclic(len(dims)), pieces)


def xy_all_gather(dims: Sequence[int], pieces: int = 1) -> Schedule:
    """Return a mesh whose dimensions come one after the other, as X-Y routing has it."""
    return nested_all_gather(dims, [line_all_gather] * len(dims), [range(len(dims))], pieces)


def tidal_all_reduce(dims: Sequence[int], pieces: int = 2) -> Schedule:
    """Return an all-reduce of a mesh whose pieces follow each other: one is gathered while the next one is summed.

    On a line, a reduce-scatter uses few links at first and an all-gather few at the end. If the all-gather is one step
    ahead, no link is used by both: in step t the sums go right over links 0 to t, and the copies over the others. Every
    piece is as many chunks as there are ranks, and pieces take the dimensions in turn. After the idea of TidalMesh
    (HPCA 2025).
    """
    orders, n = _cyclic(len(dims)), prod(dims)
    wave = sum(dim - 1 for dim in dims)
    transfers = list[Transfer]()
    for piece in range(pieces):
        gather = nested_all_gather(dims, [line_all_gather] * len(dims), [orders[piece % len(orders)]])
        start = piece // len(orders) * (wave + 1)
        for part, delay in ((gather.reversed(), 0), (gather, wave)):
            transfers += (t._replace(step=t.step + start + delay, chunk=piece * n + t.chunk) for t in part.transfers)
    name = f"tidal all_reduce {'x'.join(map(str, dims))}"
    return Schedule(name, collective("all_reduce", n, pieces * n), tuple(transfers))


def grid_all_to_all(dims: Sequence[int], pieces: int = 1, *, wrap: bool = False) -> Schedule:
    """Return an all-to-all whose chunks go link by link, dimension after dimension, the shorter way round a torus."""
    dims = _longer(dims)
    n, strides = prod(dims), _strides(dims)
    longest = [dim // 2 if wrap else dim - 1 for dim in dims]
    transfers = list[Transfer]()
    for source in range(n):
        for target in range(n):
            chunk, here, start = (source * n + target) * pieces, source, 0
            for dim, stride, hops in zip(dims, strides, longest, strict=True):
                for step, there in enumerate(_walk(here, target, dim, stride, wrap)):
                    transfers += (Transfer(start + step, here, there, chunk + j) for j in range(pieces))
                    here = there
                start += hops
    name = f"{'torus' if wrap else 'mesh'} all_to_all {'x'.join(map(str, dims))}"
    return Schedule(name, collective("all_to_all", n, pieces), tuple(transfers))


def nested_all_to_all(dims: Sequence[int], pieces: int = 1) -> Schedule:
    """Return an all-to-all in a step for each dimension: a chunk goes to where that coordinate is right."""
    dims = _longer(dims)
    n, strides = prod(dims), _strides(dims)
    transfers = list[Transfer]()
    for source in range(n):
        for target in range(n):
            chunk, here = (source * n + target) * pieces, source
            for step, (dim, stride) in enumerate(zip(dims, strides, strict=True)):
                there = here + (target // stride % dim - here // stride % dim) * stride
                if there != here:
                    transfers += (Transfer(step, here, there, chunk + j) for j in range(pieces))
                here = there
    name = f"nested all_to_all {'x'.join(map(str, dims))}"
    return Schedule(name, collective("all_to_all", n, pieces), tuple(transfers))


def _gathered(
    dims: Sequence[int], lines: Sequence[Schedule], order: Sequence[int], pieces: range, total: int
) -> Iterator[Transfer]:
    held, start, strides = [[rank] for rank in range(prod(dims))], 0, _strides(dims)
    for dim in order:
        line, stride = lines[dim], strides[dim]
        inside = len(line.collective.chunks) // line.num_ranks
        before = held
        held = [list[int]() for _ in before]
        for first in (rank for rank in range(len(before)) if rank // stride % dims[dim] == 0):
            members = [first + place * stride for place in range(dims[dim])]
            for step, src, dst, chunk, _, _ in line.transfers:
                for owner in before[members[chunk // inside]]:
                    for piece in pieces[chunk % inside :: inside]:
                        yield Transfer(start + step, members[src], members[dst], owner * total + piece)
            everything = [owner for member in members for owner in before[member]]
            for member in members:
                held[member] = everything
        start += line.num_steps


def _walk(here: int, target: int, dim: int, stride: int, wrap: bool) -> Iterator[int]:
    place, goal = here // stride % dim, target // stride % dim
    ahead = (goal - place) % dim
    sign = (1 if ahead <= dim - ahead else -1) if wrap else (1 if goal > place else -1)
    while place != goal:
        after = (place + sign) % dim
        here += (after - place) * stride
        place = after
        yield here


def _longer(dims: Sequence[int]) -> list[int]:
    """Return the dimensions along which ranks have neighbours."""
    return [dim for dim in dims if dim > 1] or [1]


def _strides(dims: Sequence[int]) -> list[int]:
    return [prod(dims[i + 1 :]) for i in range(len(dims))]


def _cyclic(count: int) -> list[tuple[int, ...]]:
    """Return the orders of dimensions that begin with each: all of them for two."""
    return [
        order for order in permutations(range(count)) if order == tuple((order[0] + i) % count for i in range(count))
    ]
