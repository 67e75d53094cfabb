"""A lower bound of a step by the timeline, over all layouts that are run in one way on one mesh.

Let a second of communication that compute can run beside count as b, and every other second as 1. In each second of a
step at most `Sharing.pace(b)` of this sum is done, whatever runs beside what. So for every b, the least sum divided by
the pace is a lower bound; elimination finds the least sum. A small b suits layouts whose communication is hidden, a
large b those that wait for it; the walk over prices looks for the best b.
"""

from __future__ import annotations

from shardwright.cost.timeline.clock import Sharing
from shardwright.search.choices.problem import Prices, Problem, Solution
from shardwright.search.exact.eliminate import Eliminator

_STEPS = 4
_TOLERANCE = 1e-4


def least_s(problem: Problem, eliminator: Eliminator, sharing: Sharing) -> float:
    """Return a lower bound of a step. `problem`: a relaxed one, with the lifetime for which least is sent."""

    def bound_s(weight: float) -> tuple[float, Solution]:
        solution = eliminator.solve(problem, Prices(overlap_weight=weight))
        return solution.bound / sharing.pace(weight), solution

    weight, most = sharing.least, sharing.most
    best_s, solution = bound_s(weight)
    waits = seconds(problem, solution)
    if waits[1] * sharing.compute <= waits[0] * sharing.communication:  # compute is enough to run beside all of it
        return best_s
    if most <= weight:
        return best_s
    top_s, solution = bound_s(most)
    hides, best_s = seconds(problem, solution), max(best_s, top_s)
    for _ in range(_STEPS):
        if hides[0] <= waits[0] or waits[1] <= hides[1]:
            break
        weight = (hides[0] - waits[0]) / (waits[1] - hides[1])  # both solutions cost the same at this price
        new_s, solution = bound_s(weight)
        sums = seconds(problem, solution)
        best_s = max(best_s, new_s)
        if sums[0] + weight * sums[1] >= (waits[0] + weight * waits[1]) * (1 - _TOLERANCE):
            break
        if sums[1] * sharing.compute > sums[0] * sharing.communication:
            waits = sums
        else:
            hides = sums
    return best_s


def seconds(problem: Problem, solution: Solution) -> tuple[float, float]:
    """Return a solution's seconds of compute and waits, and those of communication that compute can run beside."""
    chosen, hidden_s = solution.choices, 0.0
    total = sum(float(t.value[c]) for t, c in zip(problem.time_s, chosen, strict=True))
    for edge, table in problem.edges.items():
        edge_s = float(table.value[chosen[edge[0]], chosen[edge[1]]])
        if edge in problem.overlapped:
            hidden_s += edge_s
        else:
            total += edge_s
    return total, hidden_s
