"""Ways of chunks in all-to-alls that are right for any number of ranks: an induction over the steps, by Z3.

A `ChunkPaths` says at which rank the chunk from rank c to rank d is before step t. In the step it goes to where
it is before the next one, if that is another rank. Four claims are proven for all numbers n of ranks, steps, c and d:

    starts   before the first step it is at c
    inside   it is always at a rank
    ends     there are at most n steps
    done     after the last one it is at d

Nothing else is written where a chunk is, and it is sent from where it arrived, so an all-to-all claims no more.
On a grid a chunk takes one dimension after the other. A dimension changes one coordinate, from that of c to that of d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import z3

from shardwright.pcg.collectives.schedule import Transfer
from shardwright.verifier.collectives.families import (
    PROVEN,
    WORD_BITS,
    Claim,
    Refuted,
    Term,
    around,
    bit,
    counterexample,
    hops,
    pick,
)


class ChunkPaths(NamedTuple):
    """The ways of an all-to-all's chunks among n ranks. Every function takes n, and the number t of a step.

    runs    (n, t): whether there is such a step; the first is 0
    at      (n, t, c, d): where the chunk from rank c to rank d is before the step
    words   n is at most 2¹⁸, and terms are words of bits
    """

    runs: Callable[[Term, Term], Term]
    at: Callable[[Term, Term, Term, Term], Term]
    words: bool = False


def _up_to(there: Term, steps: Term) -> Term:
    return pick(steps < there, steps, there)


WAYS: Mapping[str, ChunkPaths] = {
    "direct": ChunkPaths(runs=lambda n, t: t < 1, at=lambda n, t, c, d: pick(t < 1, c, d)),
    "line": ChunkPaths(
        runs=lambda n, t: t < n - 1,
        at=lambda n, t, c, d: pick(d > c, c + _up_to(d - c, t), c - _up_to(c - d, t)),
    ),
    "short-ring": ChunkPaths(
        runs=lambda n, t: 2 * (t + 1) <= n,
        at=lambda n, t, c, d: pick(
            2 * hops(n, c, d) <= n,
            around(n, c, _up_to(hops(n, c, d), t)),
            around(n, d, n - hops(n, c, d) - _up_to(n - hops(n, c, d), t)),
        ),
    ),
    "bruck": ChunkPaths(
        runs=lambda n, t: bit(t) < n,
        at=lambda n, t, c, d: around(n, c, hops(n, c, d) & (bit(t) - 1)),
        words=True,
    ),
}
BUILDERS: Mapping[str, tuple[str, bool]] = {
    "direct": ("direct", False),
    "bruck": ("bruck", False),
    "hierarchical": ("direct", True),
    "xy": ("line", True),
    "torus": ("short-ring", True),
}
"""The way that chunks of a builder's all-to-all take, and whether it does in each dimension of a grid."""


def refuted(way: ChunkPaths, *claims: Claim) -> list[Refuted]:
    """Return which claims are not proven, of these or of all."""
    answers: list[tuple[Claim, Mapping[str, int] | None]] = [
        (claim, counterexample(*given)) for claim, given in _claims(way) if claim in claims or not claims
    ]
    return [Refuted(claim, example) for claim, example in answers if example is not None]


def _claims(way: ChunkPaths) -> Iterator[tuple[Claim, tuple[list[Term], Term]]]:
    """Yield each claim as premises and a conclusion, about free variables."""
    free: list[Term] = [z3.BitVec(name, WORD_BITS) if way.words else z3.Int(name) for name in "ntcd"]
    n, t, c, d = free
    steps = [n >= 2, c >= 0, c < n, d >= 0, d < n, t >= 0]
    if way.words:
        steps += [n <= bit(WORD_BITS - 2), t <= WORD_BITS - 2]
    at = way.at(n, t, c, d)
    yield "starts", ([*steps, t == 0], at == c)
    yield "inside", (steps, z3.And(at >= 0, at < n))
    yield "ends", ([*steps, way.runs(n, t)], t < n)
    yield "done", ([*steps, z3.Not(way.runs(n, t))], at == d)


def moved(dims: Sequence[int], name: str) -> Iterator[Transfer]:
    """Yield the transfers of an all-to-all of a grid; chunk c · ranks + d goes from rank c to rank d."""
    size, start, way = prod(dims), 0, WAYS[name]
    for dim, n in enumerate(dims):
        stride, step = prod(dims[dim + 1 :]), 0
        while n > 1 and way.runs(n, step):
            for c in range(size):
                for d in range(size):
                    outer = d // (stride * n) * n + c // stride % n  # in dimensions before, it is where it goes
                    first = outer * stride + c % stride - c // stride % n * stride
                    here, there = (way.at(n, t, c // stride % n, d // stride % n) for t in (step, step + 1))
                    if here != there:
                        yield Transfer(start + step, first + here * stride, first + there * stride, c * size + d)
            step += 1
        start += step


def proven_kinds(builder: str, kinds: Iterable[str]) -> list[str]:
    """Return which of a builder's collectives are of proven families: all-gathers, what these make, all-to-alls.

    Tests prove the families, and compare what builders build with them on small grids.
    """
    gathers = ("all_gather", "reduce_scatter", "all_reduce") if builder in PROVEN else ()
    return [kind for kind in kinds if kind in gathers or (kind == "all_to_all" and builder in BUILDERS)]
