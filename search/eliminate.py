"""Exact minimization of a pairwise model by variable elimination (Bertele and Brioschi, 1972).

Eliminating a variable replaces it by a table over its neighbours that holds the cost of its best choice. In a series-
parallel graph no table ever spans more than two variables: eliminating along a chain is the dynamic program over cut
layouts, eliminating parallel branches is the parallel split. Every table is interned by how it was made, so repeated
blocks are eliminated once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.search.problem import Interner, Problem


@dataclass(frozen=True)
class Solution:
    """The choice of every variable, and the objective's value."""

    choices: tuple[int, ...]
    objective: float


@dataclass(frozen=True)
class _Factor:
    scope: tuple[int, ...]
    table: np.ndarray


@dataclass(frozen=True)
class _Eliminated:
    variable: int
    scope: tuple[int, ...]
    best: np.ndarray


class Eliminator:
    """Solves problems that share interned tables."""

    def __init__(self, interner: Interner) -> None:
        self.interner = interner

    def solve(self, problem: Problem, price_per_byte: float = 0.0) -> Solution:
        """The exact minimum of time + price · kept bytes."""
        return _Run(self.interner, problem, price_per_byte).run()


class _Run:
    def __init__(self, interner: Interner, problem: Problem, price: float) -> None:
        self.interner, self.problem = interner, problem
        self.unary = [self._priced(t, b, price) for t, b in zip(problem.time_s, problem.kept_bytes, strict=True)]
        self.edges = dict(problem.edges)
        self.kept: list[np.ndarray] = [self._made(("all", len(u)), lambda u=u: np.arange(len(u))) for u in self.unary]
        self.neighbours: dict[int, set[int]] = defaultdict(set)
        for i, j in self.edges:
            self.neighbours[i].add(j)
            self.neighbours[j].add(i)
        self.factors: dict[int, _Factor] = {}
        self.touching: dict[int, set[int]] = defaultdict(set)
        self.num_factors = 0
        self.constant = 0.0

    def _made(self, key: Hashable, make: object) -> np.ndarray:
        return self.interner.get(key, make)  # type: ignore[arg-type]

    def _priced(self, time_s: np.ndarray, kept: np.ndarray, price: float) -> np.ndarray:
        if price == 0.0:
            return time_s
        return self._made(("priced", id(time_s), id(kept), price), lambda: time_s + price * kept)

    def run(self) -> Solution:
        for _ in range(2):
            self._drop_dominated()
        for (i, j), table in self.edges.items():
            self._add_factor(_Factor((i, j), table))
        if self.problem.order is None:
            self.problem.order = self._min_fill()
        return self._decode([self._eliminate(v) for v in self.problem.order])

    def _min_fill(self) -> tuple[int, ...]:
        """An elimination order, decided once per problem: next is always the variable whose table spans the fewest."""
        around = {v: set(n) for v, n in self.neighbours.items()}
        heap = [(self._fill(around, v), v) for v in range(len(self.unary))]
        heapq.heapify(heap)
        order: list[int] = []
        done: set[int] = set()
        while heap:
            fill, v = heapq.heappop(heap)
            if v in done:
                continue
            if fill != (now := self._fill(around, v)):
                heapq.heappush(heap, (now, v))
                continue
            done.add(v)
            order.append(v)
            scope = around.pop(v, set())
            for n in scope:
                around[n] |= scope
                around[n] -= {v, n}
                heapq.heappush(heap, (self._fill(around, n), n))
        return tuple(order)

    def _fill(self, around: dict[int, set[int]], v: int) -> tuple[int, int]:
        scope = around.get(v, set())
        entries = len(self.unary[v])
        for n in scope:
            entries *= len(self.unary[n])
        return (len(scope), entries)

    def _scope(self, v: int) -> list[int]:
        return sorted({n for f in self.touching[v] for n in self.factors[f].scope} - {v})

    def _add_factor(self, factor: _Factor) -> None:
        key, self.num_factors = self.num_factors, self.num_factors + 1
        self.factors[key] = factor
        for v in factor.scope:
            self.touching[v].add(key)

    def _eliminate(self, v: int) -> _Eliminated:
        scope = self._scope(v)
        positions = {n: i for i, n in enumerate(scope)} | {v: len(scope)}
        used = sorted(self.touching[v], key=lambda f: ([positions[n] for n in self.factors[f].scope], f))
        factors = [self.factors[f] for f in used]
        key = ("eliminate", id(self.unary[v]), *((id(f.table), tuple(positions[n] for n in f.scope)) for f in factors))
        sizes = [len(self.unary[n]) for n in (*scope, v)]
        table, best = self.interner.get(
            key,
            lambda: self._minimize(
                sizes, self.unary[v], [(tuple(positions[n] for n in f.scope), f.table) for f in factors]
            ),
        )
        for f in used:
            for n in self.factors.pop(f).scope:
                self.touching[n].discard(f)
        if not scope:
            self.constant += float(table)
        elif len(scope) == 1:
            self.unary[scope[0]] = self._plus(self.unary[scope[0]], table)
        else:
            self._merge(tuple(scope), table)
        return _Eliminated(v, tuple(scope), best)

    def _plus(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._made(("plus", id(a), id(b)), lambda: a + b)

    def _merge(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        """Add a table to a factor that spans the same variables, if there is one."""
        for f in self.touching[scope[0]]:
            if self.factors[f].scope == scope:
                self.factors[f] = _Factor(scope, self._plus(self.factors[f].table, table))
                return
        self._add_factor(_Factor(scope, table))

    @staticmethod
    def _minimize(
        sizes: Sequence[int], unary: np.ndarray, factors: Sequence[tuple[tuple[int, ...], np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """min over the last variable of unary + Σ factors, and where it is attained."""
        rank = len(sizes)
        total = unary.reshape((1,) * (rank - 1) + (-1,))
        for positions, table in factors:
            arranged = np.transpose(table, np.argsort(positions))
            shape = [1] * rank
            for p in positions:
                shape[p] = sizes[p]
            total = total + arranged.reshape(shape)
        total = np.broadcast_to(total, tuple(sizes))
        best = total.argmin(axis=-1)
        return np.take_along_axis(total, best[..., None], -1)[..., 0], best

    def _decode(self, order: Sequence[_Eliminated]) -> Solution:
        chosen: dict[int, int] = {}
        for step in reversed(order):
            chosen[step.variable] = int(step.best[tuple(chosen[n] for n in step.scope)])
        choices = tuple(int(self.kept[v][chosen[v]]) for v in range(len(self.unary)))
        return Solution(choices, self.constant)

    # ---- dominated choices ----

    def _drop_dominated(self) -> None:
        """Drop choices that another choice of the same variable beats whatever the neighbours do. Exact."""
        for v in range(len(self.unary)):
            around = sorted(self.neighbours[v])
            tables = [(self.edges[min(v, n), max(v, n)], v < n) for n in around]
            key = ("undominated", id(self.unary[v]), *((id(t), first) for t, first in tables))
            keep = self._made(
                key, lambda v=v, tables=tables: _undominated(self.unary[v], [t if f else t.T for t, f in tables])
            )
            if len(keep) == len(self.unary[v]):
                continue
            self.unary[v] = self._cut(self.unary[v], keep, 0)
            self.kept[v] = self._cut(self.kept[v], keep, 0)
            for n in around:
                edge = (min(v, n), max(v, n))
                self.edges[edge] = self._cut(self.edges[edge], keep, 0 if v < n else 1)

    def _cut(self, table: np.ndarray, keep: np.ndarray, axis: int) -> np.ndarray:
        return self._made(("cut", id(table), id(keep), axis), lambda: np.ascontiguousarray(np.take(table, keep, axis)))


def _undominated(unary: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray:
    """The choices that no other choice beats or equals everywhere; of equal ones the first stays."""
    rows = np.concatenate([unary[:, None], *tables], axis=1)
    keep = np.flatnonzero(np.isfinite(unary))
    order = keep[np.argsort(rows[keep].sum(1, where=np.isfinite(rows[keep])), kind="stable")]
    winners: list[int] = []
    for i in order:
        if not np.isfinite(rows[i]).any():
            continue
        if not winners or not np.any(np.all(rows[winners] <= rows[i][None, :], axis=1)):
            winners.append(int(i))
    return np.array(sorted(winners))
