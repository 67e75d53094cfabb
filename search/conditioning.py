"""Better solutions of models that are too large to be solved: parts are solved exactly, the rest stays as it is.

A part grows from one variable to its neighbours and theirs for as long as its tables are small. Its solution is never
worse than what was there (large neighbourhood search: Shaw, "Using constraint programming and local search methods to
solve vehicle routing problems", 1998).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwright.search.interning import Interned, Interner
from shardwright.search.model import Edges, Model

Exact = Callable[[Model], Sequence[int] | None]
"""The choices of a model's optimum, or None where its tables would be too large."""
_TRIES = 24
_PATIENCE = 6


def improved(model: Model, choices: Sequence[int], exact: Exact) -> tuple[int, ...]:
    """These choices, or better ones: parts around some variables are solved until that helps no more."""
    best, cost, failed = list(choices), model.cost(choices), 0
    for start in np.random.default_rng(0).permutation(len(choices))[:_TRIES]:
        found = _around(model, int(start), best, exact)
        failed = failed + 1
        if (now := model.cost(found)) < cost:
            best, cost, failed = found, now, 0
        if failed == _PATIENCE:
            break
    return tuple(best)


def _around(model: Model, start: int, choices: Sequence[int], exact: Exact) -> list[int]:
    """With the largest part around a variable solved that can be, of those that are tried."""
    found, reached, at, size = list(choices), [start], 0, 1
    while at < len(reached):
        while at < len(reached) < size:
            reached += sorted(model.neighbours[reached[at]].difference(reached))
            at += 1
        solved = exact(_part(model, part := reached[:size], choices))
        if solved is None:
            break
        found = list(choices)
        for v, choice in zip(part, solved, strict=True):
            found[v] = choice
        if len(reached) < size:
            break
        size *= 2
    return found


def _part(model: Model, part: Sequence[int], choices: Sequence[int]) -> Model:
    """The model of these variables where all others have these choices."""
    at = {v: i for i, v in enumerate(part)}
    edges: Edges = {}
    unary = [model.unary[v].value for v in part]
    for v, i in at.items():
        for n in model.neighbours[v]:
            table = model.edges[min(v, n), max(v, n)].value
            if n not in at:
                unary[i] = unary[i] + (table[:, choices[n]] if v < n else table[choices[n]])
            elif i < at[n]:
                edges[i, at[n]] = Interned(table if v < n else table.T)
    return Model(Interner(), [Interned(u) for u in unary], edges)
