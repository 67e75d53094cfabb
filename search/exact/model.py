"""A pairwise model as the solver works on it: own costs, tables between two variables, and the choices left."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import partial
from math import prod

import numpy as np

from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Costs, Order, Prices, Problem
from shardwright.search.exact.pruning import undominated

Edges = dict[tuple[int, int], Costs]


class Model:
    """Own costs and edge tables; `kept[v]` are the choices that are left of a variable."""

    def __init__(
        self, interner: Interner, unary: list[Costs], edges: Edges, left: list[Interned[np.ndarray]] | None = None
    ) -> None:
        self.interner, self.unary, self.edges = interner, unary, edges
        self.kept = left or [interner.call(np.arange, len(u.value)) for u in unary]
        self.neighbours: list[set[int]] = [set() for _ in unary]
        for i, j in edges:
            self.neighbours[i].add(j)
            self.neighbours[j].add(i)

    @classmethod
    def of(cls, problem: Problem, prices: Prices, interner: Interner) -> Model:
        pairs = zip(problem.time_s, problem.kept_bytes, strict=True)
        free = {b: prices.byte == 0.0 or not b.value.any() for b in set(problem.kept_bytes)}
        unary = [t if free[b] else interner.call(_priced, t, b, prices.byte) for t, b in pairs]
        edges = dict(problem.edges)
        if prices.overlap_weight != 1.0:
            weight = prices.overlap_weight
            edges |= {edge: interner.call(np.multiply, edges[edge], weight) for edge in problem.overlapped}
        return cls(interner, unary, edges)

    @property
    def sizes(self) -> list[int]:
        """The number of choices of every variable."""
        return [len(u.value) for u in self.unary]

    def cost(self, choices: Sequence[int]) -> float:
        """Return the sum of the costs of these choices, which are numbered as in this model."""
        total = sum(float(u.value[c]) for u, c in zip(self.unary, choices, strict=True))
        return total + sum(float(t.value[choices[i], choices[j]]) for (i, j), t in self.edges.items())

    def drop_dominated(self) -> None:
        """Drop choices that another choice of the same variable beats whatever the neighbours do.

        A second pass visits variables whose neighbours have lost choices: more of their choices may be dominated now.
        """
        lost = self._drop_dominated(range(len(self.unary)))
        self._drop_dominated(sorted({n for v in lost for n in self.neighbours[v]}))

    def _drop_dominated(self, variables: Iterable[int]) -> list[int]:
        """Drop dominated choices of these variables, and return the variables that have lost some."""
        lost: list[int] = []
        for v in variables:
            before = self.unary[v]
            if len(before.value) == 1:
                continue
            around = sorted(self.neighbours[v])
            tables = [self.edges[min(v, n), max(v, n)] for n in around]
            first = tuple(v < n for n in around)
            self.keep(v, self.interner.call(_undominated, before, first, *tables).value)
            if self.unary[v] is not before:
                lost.append(v)
        return lost

    def keep(self, v: int, left: Sequence[int]) -> None:
        """Keep only these of a variable's choices."""
        if len(left) == len(self.unary[v].value):
            return
        cut, choices = partial(self.interner.call, _cut), self.interner.of(tuple(left))
        self.unary[v], self.kept[v] = cut(self.unary[v], choices, 0), cut(self.kept[v], choices, 0)
        for n in self.neighbours[v]:
            edge = (min(v, n), max(v, n))
            self.edges[edge] = cut(self.edges[edge], choices, 0 if v < n else 1)

    def left_with(self, keep: Sequence[np.ndarray]) -> Model:
        """Return a separate model with fewer choices, whose `kept` are numbers of choices of this model."""
        model = Model(self.interner, list(self.unary), dict(self.edges))
        for v, choices in enumerate(keep):
            model.keep(v, choices.tolist())
        return model

    def min_fill(self) -> Order:
        """Return the order in which the next variable is always the one whose table spans the fewest others."""
        around, sizes = [set(n) for n in self.neighbours], self.sizes

        def fill(v: int) -> tuple[int, int]:
            return len(around[v]), prod(sizes[n] for n in (v, *around[v]))

        heap = [(fill(v), v) for v in range(len(around))]
        heapq.heapify(heap)
        order: list[int] = []
        largest = left = entries = 0
        done: set[int] = set()
        while heap:
            was, v = heapq.heappop(heap)
            if v in done:
                continue
            if was != (now := fill(v)):
                heapq.heappush(heap, (now, v))
                continue
            done.add(v)
            order.append(v)
            largest, left, entries = max(largest, now[1]), max(left, now[1] // sizes[v]), entries + now[1]
            for n in around[v]:
                around[n] |= around[v]
                around[n] -= {v, n}
                heapq.heappush(heap, (fill(n), n))
        return Order(tuple(order), largest, left, entries)


def _priced(time_s: np.ndarray, kept_bytes: np.ndarray, price: float) -> np.ndarray:
    return time_s + price * kept_bytes


def _undominated(unary: np.ndarray, first: Sequence[bool], *tables: np.ndarray) -> tuple[int, ...]:
    """Return `undominated` of tables in which the variable comes first or second."""
    return tuple(undominated(unary, [t if f else t.T for f, t in zip(first, tables, strict=True)]).tolist())


def _cut(table: np.ndarray, keep: Sequence[int], axis: int) -> np.ndarray:
    return np.ascontiguousarray(np.take(table, keep, axis))
