"""Families of all-gathers that are right for any number of ranks: an induction over the steps, by Z3.

A `Family` says in arithmetic what a rank holds before a step, what it gets in the step, and from whom. Chunk c is what
rank c gives. Six claims are proven for all numbers n of ranks, steps t, ranks r and chunks c:

    first   before the first step, rank r holds chunk c exactly if r = c
    there   who sends a chunk is another rank, and holds it
    new     who gets a chunk does not hold it yet
    grows   after a step, a rank holds what it held before and what it got, and nothing else
    ends    there are at most n steps
    done    after the last one, every rank holds every chunk

`first` and `grows` say that `held` is what ranks hold, so by `done` the all-gather is complete. By `new` a rank gets a
chunk once, so the ways of a chunk are a tree that grows from its owner. Backwards they add along the same tree: a
reduce-scatter. Both make an all-reduce.

    whole   a rank gets all that one other rank holds

Where this is true as well, one can read chunks as summands: ranks add up whole buffers, and `new` says that no summand
counts twice.

On a grid, a family for each dimension, one dimension after the other, makes an all-gather. A rank then holds a chunk
whose owner has the same coordinates in the dimensions to come, if the family of the current dimension says so of that
coordinate. Others do not change meanwhile, so all claims carry over. `Phase` says which dimension, `members` lists the
transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import z3

from shardwright.pcg.collectives.schedule import Transfer
from shardwright.verifier.solver import STEPS, answer, limited

Term = Any
"""A number or a truth: Python's own, or a term of Z3."""
Claim = Literal["first", "there", "new", "grows", "ends", "done", "whole", "starts", "inside"]
WORD_BITS = 20
"""Of terms that are words: of at most 2¹⁸ ranks, more than a topology may have."""


class Family(NamedTuple):
    """All-gathers of n ranks, where `sizes` claims n. Every function takes n, and the number t of a step.

    runs      (n, t): whether there is such a step; `first`, `after(t)`: the first number and the one after t
    held      (n, t, r, c): whether rank r holds chunk c before the step
    gets      (n, t, r, c): whether rank r gets chunk c in the step
    sender    (n, t, r, c): from whom
    powers    n is a power of two, at most 2¹⁸, and terms are words of bits
    """

    runs: Callable[[Term, Term], Term]
    held: Callable[[Term, Term, Term, Term], Term]
    gets: Callable[[Term, Term, Term, Term], Term]
    sender: Callable[[Term, Term, Term, Term], Term]
    first: int = 0
    after: Callable[[Term], Term] = lambda t: t + 1
    powers: bool = False


def pick(condition: Term, yes: Term, no: Term) -> Term:
    """Return one of two terms."""
    return (yes if condition else no) if isinstance(condition, bool) else z3.If(condition, yes, no)


def all_of(*truths: Term) -> Term:
    """Return whether all are true."""
    return all(truths) if all(isinstance(truth, bool) for truth in truths) else z3.And(*truths)


def around(n: Term, r: Term, hops: Term) -> Term:
    """Return the rank that is so many hops, less than n, after rank r on a ring."""
    return pick(r + hops < n, r + hops, r + hops - n)


def hops(n: Term, start: Term, end: Term) -> Term:
    """Return the number of hops from a rank on a ring to another one."""
    return pick(end >= start, end - start, end - start + n)


def shorter(n: Term, start: Term, end: Term) -> Term:
    """Return the number of hops the shorter way round."""
    ahead = hops(n, start, end)
    return pick(2 * ahead <= n, ahead, n - ahead)


def distance(r: Term, c: Term) -> Term:
    """Return the number of hops along a line."""
    return pick(r > c, r - c, c - r)


def bit(t: Term) -> Term:
    """Return 2ᵗ."""
    return 1 << t if isinstance(t, int) else z3.BitVecVal(1, WORD_BITS) << t


FAMILIES: Mapping[str, Family] = {
    "direct": Family(
        runs=lambda n, t: t < 1,
        held=lambda n, t, r, c: pick(t < 1, r == c, r >= 0),
        gets=lambda n, t, r, c: r != c,
        sender=lambda n, t, r, c: c,
    ),
    "ring": Family(
        runs=lambda n, t: t < n - 1,
        held=lambda n, t, r, c: hops(n, c, r) <= t,
        gets=lambda n, t, r, c: hops(n, c, r) == t + 1,
        sender=lambda n, t, r, c: around(n, r, n - 1),
    ),
    "short-ring": Family(
        runs=lambda n, t: 2 * (t + 1) <= n,
        held=lambda n, t, r, c: shorter(n, c, r) <= t,
        gets=lambda n, t, r, c: shorter(n, c, r) == t + 1,
        sender=lambda n, t, r, c: pick(2 * hops(n, c, r) <= n, around(n, r, n - 1), around(n, r, 1)),
    ),
    "line": Family(
        runs=lambda n, t: t < n - 1,
        held=lambda n, t, r, c: distance(r, c) <= t,
        gets=lambda n, t, r, c: distance(r, c) == t + 1,
        sender=lambda n, t, r, c: pick(r > c, r - 1, r + 1),
    ),
    "bruck": Family(  # t is the number of chunks that a rank holds
        runs=lambda n, t: t < n,
        held=lambda n, t, r, c: hops(n, r, c) < t,
        gets=lambda n, t, r, c: all_of(t <= hops(n, r, c), hops(n, r, c) < 2 * t),
        sender=lambda n, t, r, c: around(n, r, t),
        first=1,
        after=lambda t: 2 * t,
    ),
    "doubling": Family(
        runs=lambda n, t: bit(t) < n,
        held=lambda n, t, r, c: r >> t == c >> t,
        gets=lambda n, t, r, c: (r >> t) ^ 1 == c >> t,
        sender=lambda n, t, r, c: r ^ bit(t),
        powers=True,
    ),
}


class Refuted(NamedTuple):
    """A claim that is not proven, and where it fails; nothing where Z3 does not know."""

    claim: Claim
    example: Mapping[str, int]


def refuted(family: Family, *claims: Claim) -> list[Refuted]:
    """Return which claims are not proven: by default those of an all-gather."""
    wanted: tuple[Claim, ...] = claims or ("first", "there", "new", "grows", "ends", "done")
    answers: list[tuple[Claim, Mapping[str, int] | None]] = [
        (claim, counterexample(*given)) for claim, given in _claims(family) if claim in wanted
    ]
    return [Refuted(claim, example) for claim, example in answers if example is not None]


def _claims(family: Family) -> Iterator[tuple[Claim, tuple[list[Term], Term]]]:
    """Yield each claim as premises and a conclusion, about free variables."""
    free: list[Term] = [z3.BitVec(name, WORD_BITS) if family.powers else z3.Int(name) for name in "ntrc"]
    n, t, r, c = free
    ranks = [n >= 2, r >= 0, r < n, c >= 0, c < n]
    if family.powers:
        ranks += [n & (n - 1) == 0, n <= bit(WORD_BITS - 2), t <= WORD_BITS - 2]
    steps = [*ranks, t >= family.first]
    step = [*steps, family.runs(n, t)]
    held, gets = family.held(n, t, r, c), family.gets(n, t, r, c)
    sender, then = family.sender(n, t, r, c), family.after(t)
    its = family.held(n, t, sender, c)
    yield "first", ([*ranks, t == family.first], held == (r == c))
    yield "there", ([*step, gets], z3.And(sender >= 0, sender < n, sender != r, its))
    yield "new", ([*step, gets], z3.Not(held))
    yield "grows", (step, family.held(n, then, r, c) == z3.Or(held, gets))
    yield "ends", (step, z3.And(t < n, then > t))
    yield "done", ([*steps, z3.Not(family.runs(n, t))], held)
    yield "whole", (step, z3.And(its == gets, sender == family.sender(n, t, r, r)))


def counterexample(premises: Sequence[Term], conclusion: Term) -> Mapping[str, int] | None:
    """Return where premises are true and a conclusion is not: values, none where Z3 does not know; None: nowhere."""
    solver = limited(z3.Solver(), STEPS)
    solver.add(*premises, z3.Not(conclusion))
    if (verdict := answer(solver)) == z3.unsat:
        return None
    model: Any = solver.model() if verdict == z3.sat else []
    return {str(name): model[name].as_long() for name in model}


class Phase(NamedTuple):
    """A dimension of a grid, and the family of its lines; `back`: with the ranks of a line in reverse."""

    dim: int
    family: str
    back: bool = False


def members(dims: Sequence[int], phases: Sequence[Phase]) -> Iterator[Transfer]:
    """Yield the transfers of an all-gather of one chunk of each rank of a grid, phase after phase."""
    size, start = prod(dims), 0
    for number, (dim, name, back) in enumerate(phases):
        n, stride, family = dims[dim], prod(dims[dim + 1 :]), FAMILIES[name]
        place = [n - 1 - rank // stride % n if back else rank // stride % n for rank in range(size)]
        to_come = [_coordinates(dims, rank, {phase.dim for phase in phases[number + 1 :]}) for rank in range(size)]
        pairs = [(r, c) for r in range(size) for c in range(size) if to_come[r] == to_come[c]]
        t = family.first
        while family.runs(n, t):
            for rank, chunk in pairs:
                at = n, t, place[rank], place[chunk]
                if family.gets(*at):
                    away = family.sender(*at) - place[rank]
                    yield Transfer(start, rank + (-away if back else away) * stride, rank, chunk)
            t, start = family.after(t), start + 1


def _coordinates(dims: Sequence[int], rank: int, wanted: set[int]) -> list[int]:
    return [rank // prod(dims[dim + 1 :]) % dims[dim] for dim in sorted(wanted)]


def of_builder(name: str, dims: Sequence[int], piece: int = 0) -> list[Phase]:
    """Return how a builder's all-gather on a grid treats a piece: families, dimension after dimension."""
    last, half = len(dims) - 1, piece // len(dims) % 2 == 1
    turned = [(piece + number) % len(dims) for number in range(len(dims))]
    phases: Mapping[str, Callable[[], list[Phase]]] = {
        "two-way-ring": lambda: [Phase(0, "ring", piece % 2 == 1)],
        "halving-doubling": lambda: [Phase(0, "doubling")],
        "hierarchical": lambda: [Phase(dim, "direct" if dim == last else "ring") for dim in range(len(dims))],
        "xy": lambda: [Phase(dim, "line") for dim in range(len(dims))],
        "mesh": lambda: [Phase(dim, "line") for dim in turned],
        "torus": lambda: [Phase(dim, "ring", half) for dim in turned],
    }
    return phases[name]() if name in phases else [Phase(0, name)]


PROVEN: tuple[str, ...] = ("direct", "ring", "two-way-ring", "short-ring", "line", "bruck", "doubling",
                           "halving-doubling", "hierarchical", "xy", "mesh", "torus")  # fmt: skip
"""The builders whose all-gathers are members of families, as tests compare on small grids."""
