"""Layout problems as integer programs, for HiGHS: an exact solver as judge of the search."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_matrix

from shardwright.search.choices.problem import Problem


def integer_program(
    problem: Problem, price: float = 0.0, limit: float = inf, seconds: float = inf, gap: float = 1e-6
) -> tuple[float | None, float]:
    """The least seconds and kept bytes at a price, within `limit` bytes, and a bound of it.

    One binary per choice, one continuous variable per pair of neighbouring choices. After so many `seconds`, or within
    a relative `gap`, what is known by then; None where no solution is known.
    """
    own = [t.value + price * k.value for t, k in zip(problem.time_s, problem.kept_bytes, strict=True)]
    tables = [(scope, table.value) for scope, table in problem.edges.items()]
    sizes = [table.size for table in (*own, *(table for _, table in tables))]
    places = [np.arange(a, b) for a, b in pairwise(np.cumsum([0, *sizes]).tolist())]
    every = np.concatenate([table.ravel() for table in (*own, *(table for _, table in tables))])
    rows = [(place, (), 1.0) for place in places[: len(own)]]
    for ((i, j), table), place in zip(tables, places[len(own) :], strict=True):
        pairs = place.reshape(table.shape)
        rows += [(pairs[a], (places[i][a],), 0.0) for a in range(table.shape[0])]
        rows += [(pairs[:, b], (places[j][b],), 0.0) for b in range(table.shape[1])]
    number = np.repeat(np.arange(len(rows)), [len(plus) + len(minus) for plus, minus, _ in rows])
    columns = np.concatenate([np.array([*plus, *minus]) for plus, minus, _ in rows])
    values = np.concatenate([[1.0] * len(plus) + [-1.0] * len(minus) for plus, minus, _ in rows])
    matrix = coo_matrix((values, (number, columns)), shape=(len(rows), len(every))).tocsr()
    right = np.array([r for _, _, r in rows])
    constraints = [LinearConstraint(matrix, right, right)]  # type: ignore[arg-type]  # its stubs want floats
    num_binaries = sum(len(table) for table in own)
    if limit < inf:
        kept = np.concatenate([k.value for k in problem.kept_bytes] + [np.zeros(len(every) - num_binaries)])
        constraints.append(LinearConstraint((kept / limit)[None], -np.inf, 1.0))
    finite = np.isfinite(every)
    scale = 1 / np.median(every[finite & (every > 0)])
    result = milp(
        np.where(finite, every, 0.0) * scale,
        constraints=constraints,
        integrality=(np.arange(len(every)) < num_binaries).astype(float),
        bounds=(0, finite.astype(float)),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    bound = -inf if result.mip_dual_bound is None else float(result.mip_dual_bound) / scale
    return None if result.x is None else float(result.fun) / scale, bound
