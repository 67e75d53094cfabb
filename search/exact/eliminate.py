"""Minimization of a pairwise model by variable elimination (Bertele and Brioschi, 1972), within bounded memory.

Eliminating a variable replaces it by a table over its neighbours that holds the cost of its best choice. In a series-
parallel graph no table ever spans more than two variables: eliminating along a chain is the dynamic program over cut
layouts, eliminating parallel branches is the parallel split. Every table is interned by how it was made, so repeated
blocks are eliminated once. That is exact.

Where tables would be larger (recurrent cells that share weights, dense blocks, meshes of many axes), only variables
with at most two neighbours are eliminated that way. Bounds on the rest (`search.exact.pruning`) drop choices; often one
solution is left. Otherwise the rest is eliminated if all its tables together stay under `MOST_ENTRIES`. Beyond that,
the best solution found is improved part by part, and `Solution.bound` says how far it can be from the optimum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np

from shardwright.search.choices.interning import Forgetful, Interned, Interner
from shardwright.search.choices.problem import SERIAL, Costs, Order, Prices, Problem, Solution
from shardwright.search.exact.model import Edges, Model
from shardwright.search.exact.pruning import TOLERANCE, relax

LARGE_TABLE = 2**20
"""The size of a table from which bounds first drop choices; below, tables that equal blocks share are faster."""
LARGE_RESULT = 2**14
"""The same limit for what is left of a table: shared results stay in memory as long as the solver."""
MOST_ENTRIES = 2**25
"""The most entries of an elimination's unshared tables; so many take about as long as the search without them."""
_PART_ENTRIES = 2**23
"""The same limit for a part of a model that is solved alone: there are many parts."""
LARGEST = 10**7
"""The most entries of one of these tables: 80 MB."""
MANY_VARIABLES = 2**12
"""The number of variables from which solutions share no tables: all of them would stay in memory."""
_TRIES = 24
"""The number of parts of a large model that are solved."""
_PATIENCE = 6
"""The number of parts in a row without an improvement after which no more are solved."""
_ROUNDS = 1
_FEWER = 0.5
"""The largest share of choices left at which another round of bounds is worth its time."""

Exact = Callable[[Model], Sequence[int] | None]
"""The choices of a model's optimum, or None where its tables would be too large."""


@dataclass(frozen=True)
class _Factor:
    scope: tuple[int, ...]
    table: Costs


@dataclass(frozen=True)
class _Eliminated:
    variable: int
    scope: tuple[int, ...]
    best: np.ndarray


class Eliminator:
    """A solver of problems that share interned tables; their builders must use the same interner."""

    def __init__(self, interner: Interner) -> None:
        self.interner = interner

    def solve(self, problem: Problem, prices: Prices = SERIAL) -> Solution:
        """Return the minimum of seconds and kept bytes at these prices; for large models a near one, and a bound."""
        if prices not in problem.solved:
            problem.solved[prices] = self._solve(problem, prices)
        return problem.solved[prices]

    def _solve(self, problem: Problem, prices: Prices) -> Solution:
        return self.solve_with(problem, prices, {})

    def solve_with(self, problem: Problem, prices: Prices, allowed: Mapping[int, np.ndarray]) -> Solution:
        """Return the solution where some variables have only these choices; it is not remembered."""
        interner = self.interner if len(problem.time_s) < MANY_VARIABLES else Interner(self.interner.check)
        model = Model.of(problem, prices, interner)
        known = () if allowed else problem.solved.values()  # solutions at other prices
        ceiling = min((model.cost(solution.choices) for solution in known), default=inf)
        order = problem.order = problem.order or model.min_fill()
        for variable, choices in allowed.items():
            model.keep(variable, choices.tolist())
        return _solve(model, order, _ROUNDS, ceiling)


def _is_small(order: Order) -> bool:
    """Return whether eliminating takes less time than looking for bounds first."""
    return order.largest_table < LARGE_TABLE and order.largest_result <= LARGE_RESULT


def _solve(model: Model, order: Order, rounds: int, ceiling: float) -> Solution:
    """Solve by elimination if tables are small; else eliminate what is in series or parallel, and bound the rest.

    `ceiling`: some solution costs no more.
    """
    elimination = Elimination(model)
    if _is_small(order):
        return elimination.run(order.variables)
    for v in order.variables:
        if elimination.is_series(v):
            elimination.eliminate(v)
    most = ceiling * (1 + TOLERANCE) - elimination.constant  # the constant may be nearly all of it, but for rounding
    return elimination.with_rest(within_bounds(elimination.rest(), rounds, most))


def within_bounds(model: Model, rounds: int, ceiling: float) -> Solution:
    """Solve without the choices whose lower bound exceeds the cost of a solution."""
    tables = {scope: table.value for scope, table in model.edges.items()}
    relaxed = relax([u.value for u in model.unary], tables, ceiling, model.interner.check)
    first = Solution(relaxed.choices, relaxed.objective, min(relaxed.bound, relaxed.objective))
    if relaxed.is_tight:
        return first
    left = model.left_with(relaxed.left)
    left.drop_dominated()
    if (exact := eliminated(left, MOST_ENTRIES)) is not None:
        return exact
    if rounds and sum(left.sizes) < _FEWER * sum(model.sizes):
        best = min(_solve(left, left.min_fill(), rounds - 1, relaxed.ceiling), first, key=lambda s: s.objective)
    else:
        choices = improved(model, relaxed.choices, _solved_alone)
        best = replace(first, choices=choices, objective=model.cost(choices))
    return replace(best, bound=min(max(first.bound, best.bound), best.objective))


def _solved_alone(part: Model) -> tuple[int, ...] | None:
    """Return the choices of the optimum of a part of a model, or None where its tables are too large."""
    solution = eliminated(part, _PART_ENTRIES)
    return None if solution is None else solution.choices


def eliminated(model: Model, most: int) -> Solution | None:
    """Return the optimum, or None where tables are too large or have more than `most` entries; they are not kept."""
    order = model.min_fill()
    if order.entries > most or order.largest_table > LARGEST:
        return None
    return Elimination(model, Forgetful(model.interner.check)).run(order.variables)


class Elimination:
    """A model whose variables are eliminated, one after the other."""

    def __init__(self, model: Model, interner: Interner | None = None) -> None:
        self.interner, self.kept = interner or model.interner, model.kept
        self.unary = list(model.unary)
        self.factors: dict[int, _Factor] = {}
        self.touching: dict[int, set[int]] = defaultdict(set)
        self.num_factors = 0
        self.constant = 0.0
        self.steps: list[_Eliminated] = []
        for scope, table in model.edges.items():
            self._add_factor(_Factor(scope, table))

    def run(self, order: Sequence[int]) -> Solution:
        """Return the optimum, by eliminating all variables."""
        for v in order:
            self.eliminate(v)
        return self._decode({}, 0.0, 0.0)

    def rest(self) -> Model:
        """Return the model of the variables that are left; no table may span more than two of them."""
        at = {v: i for i, v in enumerate(self._left())}
        edges = {(at[f.scope[0]], at[f.scope[1]]): f.table for f in self.factors.values()}
        return Model(self.interner, [self.unary[v] for v in at], edges)

    def with_rest(self, rest: Solution) -> Solution:
        """Return the solution of all variables, from that of `rest`."""
        return self._decode(dict(zip(self._left(), rest.choices, strict=True)), rest.objective, rest.bound)

    def _left(self) -> list[int]:
        gone = {step.variable for step in self.steps}
        return [v for v in range(len(self.unary)) if v not in gone]

    def is_series(self, v: int) -> bool:
        """Return whether eliminating a variable leaves a small table over at most two others."""
        scope = self._around(v)
        result = prod(len(self.unary[n].value) for n in scope)
        return len(scope) <= 2 and result <= LARGE_RESULT and result * len(self.unary[v].value) < LARGE_TABLE

    def _around(self, v: int) -> list[int]:
        return sorted({n for f in self.touching[v] for n in self.factors[f].scope} - {v})

    def _add_factor(self, factor: _Factor) -> None:
        key, self.num_factors = self.num_factors, self.num_factors + 1
        self.factors[key] = factor
        for v in factor.scope:
            self.touching[v].add(key)

    def eliminate(self, v: int) -> None:
        """Replace a variable by a table over its neighbours."""
        scope = self._around(v)
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
        self.steps.append(_Eliminated(v, tuple(scope), best))

    def _merge(self, scope: tuple[int, ...], table: Costs) -> None:
        """Add a table to a factor that spans the same variables, if there is one."""
        for f in self.touching[scope[0]]:
            if self.factors[f].scope == scope:
                self.factors[f] = _Factor(scope, self.interner.call(np.add, self.factors[f].table, table))
                return
        self._add_factor(_Factor(scope, table))

    def _decode(self, chosen: dict[int, int], cost: float, bound: float) -> Solution:
        for step in reversed(self.steps):
            chosen[step.variable] = int(step.best[tuple(chosen[n] for n in step.scope)])
        choices = tuple(int(self.kept[v].value[chosen[v]]) for v in range(len(self.unary)))
        return Solution(choices, self.constant + cost, self.constant + bound)


def minimize_last(
    unary: np.ndarray, places: Sequence[tuple[int, ...]], *tables: np.ndarray
) -> tuple[Costs, np.ndarray]:
    """Return the min over the last variable of unary + Σ tables, and where it is attained.

    `places` says which variables each table spans; every variable but the last is in one of them.
    """
    num_others = len({p for at in places for p in at}) - 1 if places else 0
    total = unary.reshape((1,) * num_others + (-1,))
    for at, table in zip(places, tables, strict=True):
        order = sorted(range(len(at)), key=at.__getitem__)
        wide = [1] * (num_others + 1)
        for place, extent in zip(at, table.shape, strict=True):
            wide[place] = extent
        total = total + np.ascontiguousarray(table.transpose(order)).reshape(wide)  # or the rest would be slow
    best, extent = total.argmin(axis=-1), total.shape[-1]
    least = total.take(best + np.arange(0, total.size, extent).reshape(best.shape))  # far quicker than another search
    return Interned(least), best.astype(np.min_scalar_type(extent))


# ---- models that are too large ----


def improved(model: Model, choices: Sequence[int], exact: Exact) -> tuple[int, ...]:
    """Return these choices, or better ones: parts around some variables are solved until that helps no more.

    A part grows from one variable to its neighbours and theirs for as long as its tables are small. Its solution is
    never worse than what was there (large neighbourhood search: Shaw, "Using constraint programming and local search
    methods to solve vehicle routing problems", 1998).
    """
    best, cost, failed = list(choices), model.cost(choices), 0
    for start in np.random.default_rng(0).permutation(len(choices))[:_TRIES]:
        improvement = _around(model, int(start), best, exact)
        failed = failed + 1
        if (now := model.cost(improvement)) < cost:
            best, cost, failed = improvement, now, 0
        if failed == _PATIENCE:
            break
    return tuple(best)


def _around(model: Model, start: int, choices: Sequence[int], exact: Exact) -> list[int]:
    """Return the choices with a part around a variable solved: the largest part tried whose tables are small."""
    better, reached, at, size = list(choices), [start], 0, 1
    while at < len(reached):
        while at < len(reached) < size:
            reached += sorted(model.neighbours[reached[at]].difference(reached))
            at += 1
        solved = exact(_part(model, part := reached[:size], choices))
        if solved is None:
            break
        better = list(choices)
        for v, choice in zip(part, solved, strict=True):
            better[v] = choice
        if len(reached) < size:
            break
        size *= 2
    return better


def _part(model: Model, part: Sequence[int], choices: Sequence[int]) -> Model:
    """Return the model of these variables where all others have these choices."""
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
    return Model(Interner(model.interner.check), [Interned(u) for u in unary], edges)
