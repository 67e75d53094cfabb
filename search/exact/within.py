"""The fastest layouts within memory: prices of a byte, and branch and bound where these leave a gap.

At each price of a byte the solution is optimal for the bytes it keeps, and its bound - price * limit is below every
solution within the limit (Lagrange). The price walks along the lower hull of (bytes, seconds) to the edge that crosses
the limit. No price finds a solution above the hull. So the choices of one variable are divided into those that keep few
bytes and those that keep many, such that each part lacks a solution of one end of that edge, and the walk is taken in
each part (Shapiro, "A survey of Lagrangean techniques for discrete optimization", 1979, on branch and bound with such
bounds). The search ends where no part can hold a solution faster by `GAP`, or at a number of solved models that falls
with their size: large models have so many solutions on the hull that little is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from shardwright.search.choices.interning import Interner
from shardwright.search.choices.problem import Prices, Problem, Solution
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.least import seconds

_HULL_STEPS = 8
HULL_TOLERANCE = 1e-4
_CLOSE = 1e-3
"""The share of the bound by which the best solution that fits may be slower, for a walk to end."""
_HIGHEST_PRICE = 1e6
_NEARBY = (1.0, 4.0, 16.0)
"""The factors on a likely price that are tried before the highest price."""
GAP = 0.01
"""The share by which another solution would have to be faster to be looked for."""
MOST_WORK = 2**24
"""The most entries of tables of all models together that are solved in branches."""
WORK_OF_VARIABLE = 512
"""The number of table entries that take as long as a variable does whatever its tables are."""

Solve = Callable[[Prices], Solution]
Allowed = Mapping[int, np.ndarray]
"""The choices of variables, where not all are allowed."""


class Within(NamedTuple):
    """The fastest solution found within a limit of bytes, or the smallest one, if that does not fit.

    bound_s   no solution within the limit takes less
    fits      whether the solution is within the limit
    prices    the prices at which it is optimal, or nearly so, in its branch
    """

    solution: Solution
    bound_s: float
    fits: bool
    prices: Prices


def within_memory(
    problem: Problem,
    eliminator: Eliminator,
    limit: float,
    cutoff_s: float,
    weight: float = 1.0,
    *,
    hull: bool = False,
    near: float = 0.0,
) -> Within:
    """Return the fastest solution found within `limit` bytes.

    The search ends early where the bound reaches `cutoff_s`, the time of a plan that is known already. A limit of zero
    or less leaves only the smallest solution. `hull`: look only for solutions that are optimal at some price. `near`: a
    price of a byte that is likely to be near the right one, or 0.
    """
    walk = _walk(problem, partial(eliminator.solve, problem), limit, cutoff_s, weight, near)
    if hull or walk.over is None:
        return walk.found
    return _Branches(problem, limit, cutoff_s, weight, eliminator.interner.check).run(walk)


class _Point(NamedTuple):
    """A solution with its seconds and bytes, and the prices at which it is optimal."""

    solution: Solution
    seconds: float
    num_bytes: float
    prices: Prices


@dataclass(frozen=True)
class _Walk:
    """The end of a walk: the best point, and the fastest one beyond the limit, if all of that edge is known."""

    best: _Point
    bound_s: float
    fits: bool
    over: _Point | None = None

    @property
    def found(self) -> Within:
        return Within(self.best.solution, self.bound_s, self.fits, self.best.prices)


def _walk(problem: Problem, solve: Solve, limit: float, cutoff_s: float, weight: float, near: float = 0.0) -> _Walk:
    """Walk along the hull of the solutions that `solve` gives, to the edge that crosses the limit."""

    def point(byte: float) -> _Point:
        prices = Prices(byte, weight)
        solution = solve(prices)
        return _Point(solution, *time_and_bytes(problem, solution, weight), prices)

    over = point(0.0)
    bound_s = over.solution.bound
    if over.num_bytes <= limit or bound_s >= cutoff_s:
        return _Walk(over, bound_s, over.num_bytes <= limit)
    prices = [near * more for more in _NEARBY] if near and least_bytes(problem) <= limit else []
    prices.append(_HIGHEST_PRICE * over.solution.objective / max(limit, 1.0))
    while True:
        best = point(prices.pop(0))
        bound_s = max(bound_s, best.solution.bound - best.prices.byte * limit)
        if best.num_bytes <= limit:
            break
        if not prices:
            return _Walk(best, bound_s, fits=False)
        over = best
    for _ in range(_HULL_STEPS):
        if best.seconds <= max(over.seconds, bound_s * (1 + _CLOSE)):  # also where solutions are no optima
            break
        price = (best.seconds - over.seconds) / (over.num_bytes - best.num_bytes)
        between = point(price)
        bound_s = max(bound_s, between.solution.bound - price * limit)
        known = over.seconds + price * over.num_bytes
        if between.solution.objective >= known - HULL_TOLERANCE * over.seconds or bound_s >= cutoff_s:
            break
        if between.num_bytes <= limit:
            best = between
        else:
            over = between
    return _Walk(best, bound_s, fits=True, over=over)


@dataclass(order=True)
class _Branch:
    """The choices that are left in a branch, and the walk among them; the least bound comes first."""

    bound_s: float
    number: int
    allowed: Allowed = field(compare=False)
    walk: _Walk = field(compare=False)


class _Branches:
    """Branch and bound, from a walk among all choices."""

    def __init__(
        self, problem: Problem, limit: float, cutoff_s: float, weight: float, check: Callable[[], None]
    ) -> None:
        self.problem, self.limit, self.cutoff_s, self.weight = problem, limit, cutoff_s, weight
        entries = problem.order.entries if problem.order is not None else 0
        self.most = MOST_WORK // (entries + WORK_OF_VARIABLE * len(problem.time_s))
        self.num_solved = 0
        self.eliminator = Eliminator(Interner(check))  # its tables, which others do not share, are soon forgotten

    def run(self, walk: _Walk) -> Within:
        """Return the best solution of all branches, with the least of their bounds."""
        best, numbers = walk.best, count()
        left, closed_s = [_Branch(walk.bound_s, next(numbers), {}, walk)], list[float]()
        while left and left[0].bound_s < self._enough(best) and self.num_solved < self.most:
            branch = heapq.heappop(left)
            parts = self._parts(branch)
            if not parts:
                closed_s.append(branch.bound_s)
            for allowed in parts:
                part = _walk(self.problem, partial(self._solve, allowed), self.limit, self._enough(best), self.weight)
                if part.fits and part.best.seconds < best.seconds:
                    best = part.best
                bound_s = max(branch.bound_s, part.bound_s)
                if part.over is None:
                    closed_s.append(bound_s)
                else:
                    heapq.heappush(left, _Branch(bound_s, next(numbers), allowed, part))
        bound_s = min([self._enough(best), *closed_s, *(branch.bound_s for branch in left)])
        return Within(best.solution, max(walk.bound_s, bound_s), fits=True, prices=best.prices)

    def _enough(self, best: _Point) -> float:
        """Return the time below which no branch has to go."""
        return min(self.cutoff_s, best.seconds * (1 - GAP))

    def _solve(self, allowed: Allowed, prices: Prices) -> Solution:
        self.num_solved += 1
        return self.eliminator.solve_with(self.problem, prices, allowed)

    def _parts(self, branch: _Branch) -> list[Allowed]:
        """Divide the choices of the variable whose bytes differ most between the edge's ends: few bytes, and many."""
        over, best = branch.walk.over, branch.walk.best
        assert over is not None
        tables = [table.value for table in self.problem.kept_bytes]
        pairs = enumerate(zip(tables, over.solution.choices, best.solution.choices, strict=True))
        gap, variable = max((abs(float(table[o] - table[b])), v) for v, (table, o, b) in pairs)
        if not gap:  # they differ only in variables that keep the same bytes
            return []
        table, numbers = tables[variable], branch.allowed.get(variable, np.arange(len(tables[variable])))
        middle = (table[over.solution.choices[variable]] + table[best.solution.choices[variable]]) / 2
        parts = (numbers[table[numbers] <= middle], numbers[table[numbers] > middle])
        return [{**branch.allowed, variable: part} for part in parts]


def least_bytes(problem: Problem, variables: Iterable[int] | None = None) -> float:
    """Return the least bytes that choices of some variables, or of all, keep on a device."""
    of = range(len(problem.kept_bytes)) if variables is None else variables
    return sum(float(problem.kept_bytes[v].value.min()) for v in of)


def stored_bytes(problem: Problem) -> float:
    """Return the least bytes that parameters, their gradients and moments take on a device."""
    return least_bytes(problem, problem.stored)


def kept_bytes(problem: Problem, solution: Solution, variables: Sequence[int] | None = None) -> float:
    """Return the bytes that a solution keeps on a device, of some variables or of all."""
    of = range(len(solution.choices)) if variables is None else variables
    return sum(float(problem.kept_bytes[v].value[solution.choices[v]]) for v in of)


def time_and_bytes(problem: Problem, solution: Solution, weight: float = 1.0) -> tuple[float, float]:
    """Return the seconds that a solution computes and sends, and its kept bytes; `weight`: `Prices.overlap_weight`."""
    blocks_s, hidden_s = seconds(problem, solution)
    return blocks_s + weight * hidden_s, kept_bytes(problem, solution)
