"""Choose the encodings of the moves of a plan's parameters, among those that a request allows (`pcg.encodings`).

Layouts are known. They were chosen for one of the ways to send that are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.pcg.encodings import ENCODINGS, Encodings
from shardwright.search.effort import WORTH_ENCODING
from shardwright.search.exact.solving import Candidate, Solver
from shardwright.search.request.encodings import Allowed, combinations
from shardwright.search.tree.pieces import run_with


def encoded(solver: Solver, candidate: Candidate, of: Allowed | None) -> Candidate:
    """Return a plan of the whole graph that sends what is allowed: the most exact of those that are as good as fastest.

    None: it sends what it does.
    """
    if of is None:
        return candidate
    tried = [run_with(solver, candidate, encodings=encodings) for encodings in most_exact_first(of)]
    best = min(tried, key=lambda one: (not one.fits, one.prediction.step_s))
    most_s = best.prediction.step_s * (1 + WORTH_ENCODING)
    return next(one for one in tried if one.fits == best.fits and one.prediction.step_s <= most_s)


def most_exact_first(of: Allowed) -> list[Encodings]:
    """Return the ways to send that are allowed."""
    return sorted(combinations(of), key=lambda pairs: (sum(ENCODINGS[name].bound for _, name in pairs), pairs))


def extremes(of: Allowed | None) -> Sequence[Encodings]:
    """Return the ways to send for which layouts are searched: in most bytes, and in fewest."""
    if of is None:
        return ((),)
    ways = sorted(combinations(of), key=lambda pairs: -sum(32 - ENCODINGS[name].bits for _, name in pairs))
    return list(dict.fromkeys((ways[-1], ways[0])))
