"""All builders by name: the collectives that each builds, the sizes that it claims, and how many chunks it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from shardwright.pcg.collectives.builders.direct import bruck_all_gather, bruck_all_to_all, direct
from shardwright.pcg.collectives.builders.exchange import doubling_all_gather, doubling_all_reduce, swing_all_gather
from shardwright.pcg.collectives.builders.lines import (
    chain_broadcast,
    line_all_gather,
    ring_all_gather,
    short_ring_all_gather,
    two_way_ring_all_gather,
)
from shardwright.pcg.collectives.builders.nested import (
    grid_all_to_all,
    mesh_all_gather,
    nested_all_gather,
    nested_all_to_all,
    tidal_all_reduce,
    torus_all_gather,
    xy_all_gather,
)
from shardwright.pcg.collectives.builders.trees import binomial_gather, double_tree_all_reduce, tree_broadcast
from shardwright.pcg.collectives.collective import RULES, collective
from shardwright.pcg.collectives.schedule import Schedule, all_reduce_of
from shardwright.pcg.errors import ScheduleError

Dims = Sequence[int]
Make = Callable[[Dims, int], Schedule]
"""From the grid of ranks and the pieces, a schedule."""


class Sizes(NamedTuple):
    """The grids of ranks that a builder claims, in words and as a test of their sizes."""

    text: str
    fit: Callable[[Dims], bool]


class Builder(NamedTuple):
    """Schedules of a family: by collective, what makes them. `about`: the family, and how `pieces` are counted."""

    about: str
    sizes: Sizes
    makes: Mapping[str, Make]


def power_of_two(size: int) -> bool:
    """Return whether a size is 1, 2, 4, 8, …"""
    return size & (size - 1) == 0


ANY = Sizes("any number of ranks from 2 on", lambda dims: prod(dims) > 1)
POWERS = Sizes("2, 4, 8, … ranks", lambda dims: prod(dims) > 1 and power_of_two(prod(dims)))
GRID_OF_POWERS = Sizes(
    "2, 4, 8, … ranks along every dimension", lambda dims: min(dims) > 1 and all(map(power_of_two, dims))
)


def gathered(gather: Make, mirrored: Make | None = None) -> dict[str, Make]:
    """Return an all-gather, a reduce-scatter, the reverse of it or of another one, and the all-reduce of both."""
    back = mirrored or gather
    return {
        "all_gather": gather,
        "reduce_scatter": lambda dims, pieces: back(dims, pieces).reversed(),
        "all_reduce": lambda dims, pieces: all_reduce_of(back(dims, pieces).reversed(), gather(dims, pieces)),
    }


def both(kind: str, make: Make) -> dict[str, Make]:
    """Return a rooted collective and its dual: broadcast and reduce, gather and scatter."""
    dual = {"broadcast": "reduce", "gather": "scatter"}[kind]
    return {kind: make, dual: lambda dims, pieces: make(dims, pieces).reversed()}


def _flat(make: Callable[[int, int], Schedule]) -> Make:
    return lambda dims, pieces: make(prod(dims), pieces)


def _direct(kind: str) -> Make:
    return lambda dims, pieces: direct(collective(kind, prod(dims), pieces))


def _ring_back(num_ranks: int, pieces: int) -> Schedule:
    """Return a ring the other way round: its reverse goes the way of `ring_all_gather`."""
    return ring_all_gather(num_ranks, pieces, range(num_ranks)[::-1])


def hierarchical_all_gather(dims: Dims, pieces: int = 1) -> Schedule:
    """Return rings across, from the outermost level on, and all-pairs inside of the innermost."""
    inner = [lambda n: direct(collective("all_gather", n))]
    return nested_all_gather(dims, [ring_all_gather] * (len(dims) - 1) + inner, [range(len(dims))], pieces)


BUILDERS: Mapping[str, Builder] = {
    "direct": Builder("all-pairs, in one step; all-reduce as reduce-scatter and all-gather", ANY, {
        **{kind: _direct(kind) for kind in RULES}, **gathered(_direct("all_gather")),
    }),
    "one-shot": Builder("all-pairs of whole buffers, in one step", ANY, {"all_reduce": _direct("all_reduce")}),
    "ring": Builder("a ring one way; broadcast as a chain", ANY, {
        **gathered(_flat(ring_all_gather), _flat(_ring_back)), **both("broadcast", _flat(chain_broadcast)),
    }),
    "two-way-ring": Builder("a ring each way, pieces in either", ANY, gathered(_flat(two_way_ring_all_gather))),
    "short-ring": Builder("a ring half of the way round, both ways", ANY, gathered(_flat(short_ring_all_gather))),
    "line": Builder("a line without wraparound", ANY, gathered(_flat(line_all_gather))),
    "doubling": Builder("recursive doubling; all-reduce of whole buffers", POWERS, {
        "all_gather": _flat(doubling_all_gather), "all_reduce": _flat(doubling_all_reduce),
    }),
    "halving-doubling": Builder("recursive halving, then doubling", POWERS, gathered(_flat(doubling_all_gather))),
    "bruck": Builder("⌈log₂ n⌉ steps", ANY, {
        **gathered(_flat(bruck_all_gather)), "all_to_all": _flat(bruck_all_to_all),
    }),
    "tree": Builder("a binary tree; gather over a binomial one", ANY, {
        **both("broadcast", _flat(tree_broadcast)), **both("gather", _flat(binomial_gather)),
    }),
    "double-tree": Builder("two binary trees, pieces in each", ANY, {"all_reduce": _flat(double_tree_all_reduce)}),
    "hierarchical": Builder("rings across levels, outermost first; all-pairs in the innermost", ANY, {
        **gathered(hierarchical_all_gather), "all_to_all": nested_all_to_all,
    }),
    "xy": Builder("a mesh, dimension after dimension", ANY, {
        **gathered(xy_all_gather), "all_to_all": grid_all_to_all,
    }),
    "mesh": Builder("a mesh, pieces beginning in each dimension", ANY, gathered(mesh_all_gather)),
    "tidal": Builder("a mesh, pieces that follow each other; each is as many chunks as ranks", ANY, {
        "all_reduce": lambda dims, pieces: tidal_all_reduce(dims, 2 * pieces),
    }),
    "torus": Builder("a torus, two rings in each dimension, pieces in each", ANY, {
        **gathered(torus_all_gather), "all_to_all": lambda dims, pieces: grid_all_to_all(dims, pieces, wrap=True),
    }),
    "swing": Builder("a torus, partners at distances 1, 1, 3, 5, …; pieces for each port", GRID_OF_POWERS,
                     gathered(swing_all_gather)),
}  # fmt: skip


def build(name: str, kind: str, dims: Dims, pieces: int = 1) -> Schedule:
    """Return the schedule of a builder for a collective; `dims`: the number of ranks, or their grid.

    Raises:
        ScheduleError: an unknown builder, a collective that it does not build, or sizes that it does not claim.
    """
    if name not in BUILDERS:
        raise ScheduleError(f"builder: expected one of {', '.join(BUILDERS)}, got {name!r}; choose one of them")
    builder = BUILDERS[name]
    if kind not in builder.makes:
        raise ScheduleError(f"{name}: expected one of {', '.join(builder.makes)}, got {kind!r}; choose one of them")
    if not dims or min(dims) < 1 or not builder.sizes.fit(dims):
        raise ScheduleError(f"{name}: expected {builder.sizes.text}, got {'x'.join(map(str, dims))}; take other sizes")
    if pieces < 1:
        raise ScheduleError(f"{name}: expected at least one piece, got {pieces}; take more")
    return replace(builder.makes[kind](dims, pieces), name=f"{name} {kind} {'x'.join(map(str, dims))}")
