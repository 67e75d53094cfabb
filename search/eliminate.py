"""Exact minimization of a pairwise model by variable elimination (Bertele and Brioschi, 1972).

Eliminating a variable replaces it by a table over its neighbours that holds the cost of its best choice. In a series-
parallel graph no table ever spans more than two variables: eliminating along a chain is the dynamic program over cut
layouts, eliminating parallel branches is the parallel split. Every table is interned by how it was made, so repeated
blocks are eliminated once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from shardwright.search.interning import Interned, Interner
from shardwright.search.problem import Costs, Order, Problem
from shardwright.search.pruning import lower_bounds, undominated


@dataclass(frozen=True)
class Solution:
    """The choice of every variable, and the objective's value."""

    choices: tuple[int, ...]
    objective: float


@dataclass(frozen=True)
class _Factor:
    scope: tuple[int, ...]
    table: Costs


@dataclass(frozen=True)
class _Eliminated:
    variable: int
    scope: tuple[int, ...]
    best: np.ndarray


LARGE_TABLE = 2**20
"""Entries from which a table is worth dropping choices by bounds first; below, equal blocks sharing tables wins."""
_ROUNDS = 3
_BEAM = 4
_TOLERANCE = 1e-9
"""Relative to the costs that bounds are made of: far above their rounding, far below what matters."""


class Eliminator:
    """Solves problems that share interned tables. Problems must come from builders that use the same interner."""

    def __init__(self, interner: Interner) -> None:
        self.interner = interner

    def solve(self, problem: Problem, price_per_byte: float = 0.0) -> Solution:
        """The exact minimum of time + price · kept bytes."""
        model = _Model.of(problem, price_per_byte, self.interner)
        if model.drop_dominated():
            model.drop_dominated()
        if problem.order is None:
            problem.order = model.min_fill()
        if problem.order.largest_table < LARGE_TABLE:
            return _Elimination(model).run(problem.order.variables)
        model = _within_bounds(model)
        return _Elimination(model).run(model.min_fill().variables)


class _Model:
    """Own costs and edge tables; `kept[v]` are the choices that are left of a variable."""

    def __init__(
        self,
        interner: Interner,
        unary: list[Costs],
        edges: dict[tuple[int, int], Costs],
        kept: list[Interned[np.ndarray]],
    ) -> None:
        self.interner, self.unary, self.edges, self.kept = interner, unary, edges, kept
        self.neighbours: list[set[int]] = [set() for _ in unary]
        for i, j in edges:
            self.neighbours[i].add(j)
            self.neighbours[j].add(i)

    @classmethod
    def of(cls, problem: Problem, price: float, interner: Interner) -> _Model:
        pairs = zip(problem.time_s, problem.kept_bytes, strict=True)
        unary = [t if price == 0.0 else interner.call(_priced, t, b, price) for t, b in pairs]
        kept = [interner.call(np.arange, len(u.value)) for u in unary]
        return cls(interner, unary, dict(problem.edges), kept)

    def drop_dominated(self) -> bool:
        """Drop choices that another choice of the same variable beats whatever the neighbours do; whether any did."""
        before = list(self.unary)
        for v in range(len(self.unary)):
            around = sorted(self.neighbours[v])
            tables = [self.edges[min(v, n), max(v, n)] for n in around]
            first = tuple(v < n for n in around)
            self.keep(v, self.interner.call(_undominated, self.unary[v], first, *tables))
        return any(now is not then for now, then in zip(self.unary, before, strict=True))

    def keep(self, v: int, choices: Interned[np.ndarray]) -> None:
        """Keep only these of a variable's choices."""
        if len(choices.value) == len(self.unary[v].value):
            return
        cut = partial(self.interner.call, _cut)
        self.unary[v], self.kept[v] = cut(self.unary[v], choices, 0), cut(self.kept[v], choices, 0)
        for n in self.neighbours[v]:
            edge = (min(v, n), max(v, n))
            self.edges[edge] = cut(self.edges[edge], choices, 0 if v < n else 1)

    def left_with(self, keep: Sequence[np.ndarray]) -> _Model:
        """This model with fewer choices."""
        model = _Model(self.interner, list(self.unary), dict(self.edges), list(self.kept))
        for v, choices in enumerate(keep):
            model.keep(v, self.interner.call(np.array, tuple(choices.tolist())))
        return model

    def min_fill(self) -> Order:
        """The order in which next is always the variable whose table spans the fewest others."""
        around = [set(n) for n in self.neighbours]
        heap = [(self._fill(around[v], v), v) for v in range(len(around))]
        heapq.heapify(heap)
        order: list[int] = []
        largest = 0
        done: set[int] = set()
        while heap:
            fill, v = heapq.heappop(heap)
            if v in done:
                continue
            if fill != (now := self._fill(around[v], v)):
                heapq.heappush(heap, (now, v))
                continue
            done.add(v)
            order.append(v)
            largest = max(largest, fill[1])
            for n in around[v]:
                around[n] |= around[v]
                around[n] -= {v, n}
                heapq.heappush(heap, (self._fill(around[n], n), n))
        return Order(tuple(order), largest)

    def _fill(self, around: set[int], v: int) -> tuple[int, int]:
        return (len(around), prod(len(self.unary[n].value) for n in (v, *around)))

    def bounds(self, clip: float) -> list[np.ndarray]:
        """Of every choice of every variable, a lower bound of all solutions that hold it: see `lower_bounds`."""
        edges = {scope: table.value for scope, table in self.edges.items()}
        return lower_bounds([u.value for u in self.unary], edges, clip)


def _priced(time_s: np.ndarray, kept_bytes: np.ndarray, price: float) -> np.ndarray:
    return time_s + price * kept_bytes


def _undominated(unary: np.ndarray, first: Sequence[bool], *tables: np.ndarray) -> np.ndarray:
    """`undominated`, of tables in which the variable comes first or second."""
    return undominated(unary, [t if f else t.T for f, t in zip(first, tables, strict=True)])


def _cut(table: np.ndarray, keep: np.ndarray, axis: int) -> np.ndarray:
    return np.ascontiguousarray(np.take(table, keep, axis))


def _within_bounds(model: _Model) -> _Model:
    """The model without the choices whose lower bound exceeds the cost of a solution.

    That solution is the best one that holds the few choices of lowest bound at every variable.
    """
    best = float("inf")
    clip = _some_scale(model)
    for round_ in range(_ROUNDS):
        bounds = model.bounds(clip)
        beam = _BEAM << round_
        few = model.left_with([np.sort(np.argsort(b, kind="stable")[:beam]) for b in bounds])
        best = min(best, _Elimination(few).run(few.min_fill().variables).objective)
        if not np.isfinite(best):
            continue
        model = model.left_with([np.flatnonzero(b <= best + _TOLERANCE * max(best, clip)) for b in bounds])
        if model.min_fill().largest_table < LARGE_TABLE:
            break
        clip = 1.5 * best
    return model


def _some_scale(model: _Model) -> float:
    """A cost of about the size of a solution's, where none is known yet."""
    least = sum(float(u.value.min()) for u in model.unary)
    tables = (t.value for t in model.edges.values())
    largest = max((float(t.max(where=np.isfinite(t), initial=0.0)) for t in tables), default=0.0)
    return 2 * least + largest


class _Elimination:
    def __init__(self, model: _Model) -> None:
        self.interner, self.kept = model.interner, model.kept
        self.unary = list(model.unary)
        self.factors: dict[int, _Factor] = {}
        self.touching: dict[int, set[int]] = defaultdict(set)
        self.num_factors = 0
        self.constant = 0.0
        for scope, table in model.edges.items():
            self._add_factor(_Factor(scope, table))

    def run(self, order: Sequence[int]) -> Solution:
        return self._decode([self._eliminate(v) for v in order])

    def _add_factor(self, factor: _Factor) -> None:
        key, self.num_factors = self.num_factors, self.num_factors + 1
        self.factors[key] = factor
        for v in factor.scope:
            self.touching[v].add(key)

    def _eliminate(self, v: int) -> _Eliminated:
        scope = sorted({n for f in self.touching[v] for n in self.factors[f].scope} - {v})
        positions = {n: i for i, n in enumerate(scope)} | {v: len(scope)}
        used = sorted(self.touching[v], key=lambda f: ([positions[n] for n in self.factors[f].scope], f))
        factors = [self.factors[f] for f in used]
        places = tuple(tuple(positions[n] for n in f.scope) for f in factors)
        table, best = self.interner.call(minimize_last, self.unary[v], places, *(f.table for f in factors)).value
        for f in used:
            for n in self.factors.pop(f).scope:
                self.touching[n].discard(f)
        if not scope:
            self.constant += float(table.value)
        elif len(scope) == 1:
            self.unary[scope[0]] = self.interner.call(np.add, self.unary[scope[0]], table)
        else:
            self._merge(tuple(scope), table)
        return _Eliminated(v, tuple(scope), best)

    def _merge(self, scope: tuple[int, ...], table: Costs) -> None:
        """Add a table to a factor that spans the same variables, if there is one."""
        for f in self.touching[scope[0]]:
            if self.factors[f].scope == scope:
                self.factors[f] = _Factor(scope, self.interner.call(np.add, self.factors[f].table, table))
                return
        self._add_factor(_Factor(scope, table))

    def _decode(self, order: Sequence[_Eliminated]) -> Solution:
        chosen: dict[int, int] = {}
        for step in reversed(order):
            chosen[step.variable] = int(step.best[tuple(chosen[n] for n in step.scope)])
        choices = tuple(int(self.kept[v].value[chosen[v]]) for v in range(len(self.unary)))
        return Solution(choices, self.constant)


def minimize_last(
    unary: np.ndarray, places: Sequence[tuple[int, ...]], *tables: np.ndarray
) -> tuple[Costs, np.ndarray]:
    """min over the last variable of unary + Σ tables, and where it is attained.

    `places` says which variables each table spans; every variable but the last is in one of them.
    """
    extents = {pair for at, table in zip(places, tables, strict=True) for pair in zip(at, table.shape, strict=True)}
    shape = tuple(extent for _, extent in sorted(extents)) or unary.shape
    total = unary.reshape((1,) * (len(shape) - 1) + (-1,))
    for at, table in zip(places, tables, strict=True):
        wide = [extent if p in at else 1 for p, extent in enumerate(shape)]
        total = total + np.transpose(table, np.argsort(at)).reshape(wide)
    total = np.broadcast_to(total, shape)
    best = total.argmin(axis=-1)
    return Interned(np.take_along_axis(total, best[..., None], -1)[..., 0]), best
