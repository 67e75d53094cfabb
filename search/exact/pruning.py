"""Choices that no optimum needs, a bound of the optimum, and a solution near it, without a table of three variables.

A choice is *dominated* where another one of the same variable costs no more whatever the neighbours do. Beyond that, a
choice is dropped where a lower bound of every solution that holds it exceeds the cost of a solution that is known. The
bounds come from sequential reparametrization (Kolmogorov, "Convergent tree-reweighted message passing", 2006): cost is
moved between a variable and its edges such that no solution's sum changes, and

    bound        = constant                                         all other parts being at least 0
    bound(v, x)  = constant + what is left at choice x of v

A solution is read off by choosing one variable after the other, each for the least remaining cost: edges to chosen
neighbours count at the neighbour's choice, all others at their least. Where the bound is tight and has no ties, that is
the optimum.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nextafter

import numpy as np

Edges = Mapping[tuple[int, int], np.ndarray]
_CLIPS = 4
_SWEEPS = 24
_STALLED = 3
_RISES = 1e-4
"""The share by which the bound has to rise, unless a better solution is found, to make more sweeps worth their time."""
_FEWER = 0.8
"""The largest share of choices left at which the others are dropped between sweeps."""
MOST_COMPARED = 2**16
"""The number of entries that are compared in one step, about."""
TOLERANCE = 1e-9
"""A tolerance relative to the costs that bounds are made of: far above their rounding, far below what matters."""


def undominated(unary: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the choices that no other choice beats or equals everywhere; of equal ones the first stays.

    `tables` are those of the variable's edges, with its own choices along the first dimension.
    """
    rows = np.concatenate([unary[:, None], *tables], axis=1)
    keep = np.flatnonzero(np.isfinite(unary))
    left = keep[np.argsort(rows[keep].sum(1, where=np.isfinite(rows[keep])), kind="stable")]
    rows, winners = rows[left], list[int]()
    if len(set(rows.argmin(0).tolist())) == len(left):  # the first choice of least cost somewhere is never beaten
        return np.sort(left)
    while len(left):
        first = max(1, MOST_COMPARED // rows.size)
        beats = np.logical_and.reduce(rows[:first, None] <= rows, axis=2)
        beaten: np.ndarray = np.triu(beats, 1).any(0)  # by an earlier one that is left, or that one left beats
        winners += left[:first][~beaten[:first]].tolist()
        beaten[:first] = True
        left, rows = left[~beaten], rows[~beaten]
    return np.array(sorted(winners), dtype=np.intp)


@dataclass(frozen=True)
class Relaxed:
    """A solution and its cost, a lower bound of all solutions, and for every choice a bound of those that hold it.

    `slack`: by how much rounding may have made the bounds too high. `ceiling`: the least known cost, of this solution
    or of another one.
    """

    choices: tuple[int, ...]
    objective: float
    bound: float
    bounds: list[np.ndarray]
    slack: float
    ceiling: float

    @property
    def left(self) -> list[np.ndarray]:
        """The choices of every variable that an optimum may hold."""
        return [np.flatnonzero(bounds <= self.ceiling + self.slack) for bounds in self.bounds]

    @property
    def is_tight(self) -> bool:
        return self.objective <= self.bound + self.slack


def relax(
    unary: Sequence[np.ndarray], edges: Edges, ceiling: float = inf, check: Callable[[], None] = lambda: None
) -> Relaxed:
    """Sweep until the bound meets the cost of a solution, or rises no more. Costs are not negative.

    `ceiling`: some solution, which need not be known here, costs no more. Choices that cost more are left out of
    further sweeps, which then take less time; the bounds of the choices that are left are higher. `check` is called
    before each variable of a sweep.
    """
    best, bound, left = ((0,) * len(unary), inf), 0.0, _Left(unary, edges)
    clip = 1.5 * ceiling if isfinite(ceiling) else _some_scale(unary, edges)
    for number in range(1, _CLIPS + 1):
        model, stalled, slack = left.reparametrization(clip, check), 0, TOLERANCE * clip
        orders = (range(len(unary)), model.growing())
        for _ in range(_SWEEPS):
            before, known = model.constant, best[1]
            model.sweep(forward=True)
            model.sweep(forward=False)
            solutions = [left.choices(model.read_off(order)) for order in orders]
            best = min((best, *((x, _cost(unary, edges, x)) for x in solutions)), key=lambda pair: pair[1])
            ceiling = min(ceiling, best[1])
            bound = max(bound, min(model.constant, ceiling))
            left.drop(model, ceiling + slack)
            rises = model.constant > before + _RISES * model.constant or best[1] < known
            stalled = 0 if rises else stalled + 1
            if best[1] <= bound + slack or stalled == _STALLED:
                break
            if isfinite(best[1]) and not _is_apt(clip, best[1]) and number < _CLIPS:  # sweep more only with an apt clip
                break
        if _is_apt(clip, best[1]):
            break
        clip = 1.5 * best[1] if isfinite(best[1]) else 10 * clip
    return Relaxed(*best, bound, left.bounds, TOLERANCE * clip, ceiling)


class _Left:
    """The choices that are left, by number; the bounds of all choices, dropped ones too.

    `most`: later bounds are raised no higher, as a solution with dropped choices may cost as little.
    """

    def __init__(self, unary: Sequence[np.ndarray], edges: Edges) -> None:
        self.unary, self.edges = unary, edges
        self.kept = [np.arange(len(table)) for table in unary]
        self.bounds, self.most = [np.zeros(len(table)) for table in unary], inf

    def reparametrization(self, clip: float, check: Callable[[], None]) -> Reparametrization:
        """Return a new reparametrization of what is left."""
        ids = self.kept
        unary = [_taken(table, left, 0) for table, left in zip(self.unary, ids, strict=True)]
        between = {(i, j): _taken(_taken(table, ids[i], 0), ids[j], 1) for (i, j), table in self.edges.items()}
        return Reparametrization(unary, between, clip, check)

    def choices(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the choices that have these numbers among those that are left."""
        return tuple(int(left[number]) for left, number in zip(self.kept, numbers, strict=True))

    def drop(self, model: Reparametrization, most: float) -> None:
        """Drop the choices whose bound is above `most`, if there are enough of them to be worth the copies."""
        for bounds, left, new in zip(self.bounds, self.kept, model.bounds, strict=True):
            bounds[left] = np.maximum(bounds[left], np.minimum(new, self.most))
        stay = [bounds[left] <= most for bounds, left in zip(self.bounds, self.kept, strict=True)]
        if sum(map(np.count_nonzero, stay)) < _FEWER * sum(map(len, stay)):
            self.kept = [left[stays] for left, stays in zip(self.kept, stay, strict=True)]
            model.keep(stay)
            self.most = min(self.most, nextafter(most, inf))


def _taken(table: np.ndarray, left: np.ndarray, axis: int) -> np.ndarray:
    """Return the table with these choices along an axis, in order; the table itself where that is all of them."""
    return table if len(left) == table.shape[axis] else table.take(left, axis)


def _is_apt(clip: float, cost: float) -> bool:
    """Return whether costs may be clipped at `clip`, where a solution of this cost is known."""
    return cost <= clip <= 3 * cost


def _some_scale(unary: Sequence[np.ndarray], edges: Edges) -> float:
    """Return a cost of about the size of a solution's, where none is known yet."""
    least = sum(float(table.min()) for table in unary)
    return 2 * least + max((float(t.max(where=np.isfinite(t), initial=0.0)) for t in edges.values()), default=0.0)


def _cost(unary: Sequence[np.ndarray], edges: Edges, choices: Sequence[int]) -> float:
    total = sum(float(table[c]) for table, c in zip(unary, choices, strict=True))
    return total + sum(float(table[choices[i], choices[j]]) for (i, j), table in edges.items())


class Reparametrization:
    """Costs that move between variables and edges; `constant` bounds all solutions, `bounds` those with each choice.

    Costs above `clip` count as `clip`: infinities cannot be moved, and lower costs only make lower bounds. Choose a
    little more than the cost of a known solution.
    """

    def __init__(
        self, unary: Sequence[np.ndarray], edges: Edges, clip: float, check: Callable[[], None] = lambda: None
    ) -> None:
        self.check = check
        self.unary = [np.minimum(table, clip) for table in unary]
        self.edges = [np.minimum(table, clip) for table in edges.values()]
        self.ends = list(edges)
        self.constant = 0.0
        self.bounds = [np.zeros(len(table)) for table in unary]
        self.around: list[list[tuple[int, int]]] = [[] for _ in unary]  # of each variable: (neighbour, edge)
        self.pulled = [-1] * len(edges)  # of each edge: the variable to which it has nothing left to give
        for e, (i, j) in enumerate(edges):
            self.around[i].append((j, e))
            self.around[j].append((i, e))

    def keep(self, stay: Sequence[np.ndarray]) -> None:
        """Keep only these choices, a mask for each variable."""
        self.unary = [table[stays] for table, stays in zip(self.unary, stay, strict=True)]
        self.bounds = [table[stays] for table, stays in zip(self.bounds, stay, strict=True)]
        for e, (i, j) in enumerate(self.ends):
            if not (stay[i].all() and stay[j].all()):
                self.edges[e], self.pulled[e] = self.edges[e].compress(stay[i], 0).compress(stay[j], 1), -1

    def sweep(self, *, forward: bool) -> None:
        """Move costs along the order of the variables, or against it."""
        for v in range(len(self.unary)) if forward else reversed(range(len(self.unary))):
            self.check()
            self._pull(v)
            self.bounds[v] = np.maximum(self.bounds[v], self.constant + self.unary[v])
            self._push(v, [(n, e) for n, e in self.around[v] if (n > v) == forward])

    def _pull(self, v: int) -> None:
        """Move each edge's least cost per choice into the variable, and the variable's least cost into the constant."""
        total = self.unary[v]
        for n, e in self.around[v]:
            if self.pulled[e] == v:
                continue
            least = np.minimum.reduce(self.edges[e], axis=1 if v < n else 0)
            self.edges[e] -= least[:, None] if v < n else least
            total = total + least
            self.pulled[e] = v
        least = np.minimum.reduce(total)
        self.constant += float(least)
        self.unary[v] = total - least

    def _push(self, v: int, later: Sequence[tuple[int, int]]) -> None:
        """Share the costs that are left among the edges to variables that are still to come."""
        if not later:
            return
        most = max(len(later), len(self.around[v]) - len(later))
        share = self.unary[v] / most
        for n, e in later:
            self.edges[e] += share[:, None] if v < n else share
            self.pulled[e] = -1
        self.unary[v] = share * (most - len(later))

    def growing(self) -> list[int]:
        """Return an order in which the next variable always has the most neighbours before it."""
        before, order, seen = [0] * len(self.unary), list[int](), set[int]()
        heap = [(0, v) for v in range(len(self.unary))]
        while heap:
            num, v = heapq.heappop(heap)
            if v in seen or -num != before[v]:
                continue
            seen.add(v)
            order.append(v)
            for n, _ in self.around[v]:
                before[n] += 1
                heapq.heappush(heap, (-before[n], n))
        return order

    def read_off(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return choices that are made in this order."""
        chosen = [-1] * len(self.unary)
        for v in order:
            total = self.unary[v]
            for n, e in self.around[v]:
                table = self.edges[e] if v < n else self.edges[e].T
                if chosen[n] >= 0:
                    total = total + table[:, chosen[n]]
                elif self.pulled[e] != v:
                    total = total + np.minimum.reduce(table, axis=1)
            chosen[v] = int(total.argmin())
        return tuple(chosen)
