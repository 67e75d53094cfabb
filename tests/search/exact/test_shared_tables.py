"""Elimination where tables are shared: by edges in both orientations, by variables, by problems of one interner.

Equal blocks of a network share their tables, so a key that forgets where a table stands, or which way round, gives one
block the solution of another. Random models seldom share anything; these share nearly everything.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from shardwright.pcg.mesh import Mesh
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Costs, Prices, Problem, RunFacts, Solution
from shardwright.search.exact import eliminate
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator, minimize_last
from shardwright.search.exact.model import Model
from tests.search.graphs import cluster, every_choice, mlp, num_made

Array = np.ndarray


def brute_force(model: Problem, price: float) -> Array:
    """The cost of every combination of choices, one dimension per variable."""
    sizes = [len(plain(t)) for t in model.time_s]
    total = np.zeros(sizes)
    for v, (time_s, kept) in enumerate(zip(model.time_s, model.kept_bytes, strict=True)):
        total = total + along(plain(time_s) + price * plain(kept), (v,), len(sizes))
    for scope, table in model.edges.items():
        total = total + along(plain(table), scope, len(sizes))
    return total


def along(table: Array, scope: tuple[int, ...], rank: int) -> Array:
    shape = [1] * rank
    for v, size in zip(scope, table.shape, strict=True):
        shape[v] = size
    return table.reshape(shape)


def plain(table: Costs) -> Array:
    return table.value


def interned(table: Array) -> Costs:
    """As the builder hands tables to the solver."""
    return Interned(table)


class Shared:
    """A few tables, from which any number of models are made."""

    def __init__(self, rng: np.random.Generator, size: int, num_tables: int = 2) -> None:
        self.rng, self.size = rng, size
        self.own = [interned(rng.integers(0, 9, size).astype(float)) for _ in range(num_tables)]
        self.kept = [interned(rng.integers(0, 9, size).astype(float)) for _ in range(num_tables)]
        self.tables: list[Costs] = []
        for _ in range(num_tables):
            table = rng.integers(0, 20, (size, size)).astype(float)
            table[rng.random(table.shape) < 0.1] = np.inf
            table[0, 0] = 3.0
            self.tables += [interned(table), interned(np.ascontiguousarray(table.T))]

    def model(self, num_variables: int, density: float) -> Problem:
        made = Problem(mlp(), Mesh())
        made.variables = [None] * num_variables  # type: ignore[list-item]  # a solver looks at tables alone
        made.time_s = [self.own[i] for i in self.rng.integers(len(self.own), size=num_variables)]
        made.kept_bytes = [self.kept[i] for i in self.rng.integers(len(self.kept), size=num_variables)]
        for edge in combinations(range(num_variables), 2):
            if self.rng.random() < density:
                made.edges[edge] = self.tables[int(self.rng.integers(len(self.tables)))]
        return made


def check(solver: Eliminator, model: Problem, price: float, about: str) -> None:
    every = brute_force(model, price)
    solution = solver.solve(model, Prices(price))
    assert solution.objective == pytest.approx(every.min(), rel=1e-9), about
    assert every[solution.choices] == pytest.approx(every.min(), rel=1e-9), about


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("large", [eliminate.LARGE_TABLE, 1, 20])
def test_models_of_shared_tables_are_solved_as_by_brute_force(
    size: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One interner for all, by elimination alone and after dropping choices by bounds, at several prices."""
    monkeypatch.setattr(eliminate, "LARGE_TABLE", large)
    rng = np.random.default_rng(size)
    solver = Eliminator(Interner())
    for group in range(8):
        shared = Shared(rng, size)
        for number in range(40):
            model = shared.model(int(rng.integers(2, 8 if size == 2 else 7)), float(rng.choice([0.3, 0.6, 1.0])))
            for price in (0.0, 0.5, 2.0):
                check(solver, model, price, f"model {number} of group {group} at price {price}")


def test_a_table_is_not_its_transpose() -> None:
    """Two models that differ in which way round one table stands."""
    solver = Eliminator(Interner())
    own = interned(np.zeros(3))
    table = interned(np.array([[5.0, 1.0, 7.0], [2.0, 8.0, 3.0], [9.0, 4.0, 6.0]]))
    biased = interned(np.array([[0.0, 9.0, 9.0], [9.0, 0.0, 9.0], [9.0, 9.0, 0.0]]))
    first = interned(np.array([0.0, 50.0, 50.0]))
    for edges in ({(0, 1): table, (1, 2): biased}, {(0, 1): biased, (1, 2): table}, {(0, 2): table, (1, 2): biased}):
        for special in range(3):
            made = Problem(mlp(), Mesh())
            made.variables = [None] * 3  # type: ignore[list-item]
            made.time_s = [first if v == special else own for v in range(3)]
            made.kept_bytes = [own] * 3
            made.edges = dict(edges)
            check(solver, made, 0.0, f"{sorted(edges)}, {special}")


def test_dropping_by_bounds_keeps_an_optimum_that_ties() -> None:
    """All solutions cost the same, so that every bound is tight and rounding decides."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        model = Problem(mlp(), Mesh())
        model.variables = [None] * 6  # type: ignore[list-item]
        shift = rng.random((6, 3)) * 1e3
        model.time_s = [interned(row) for row in shift]
        model.kept_bytes = [interned(np.zeros(3)) for _ in range(6)]
        for v in range(5):
            left, right = shift[v] * (1 if v == 0 else 0.5), shift[v + 1] * (1 if v == 4 else 0.5)
            model.edges[v, v + 1] = interned(2e3 - left[:, None] - right)
        check(Eliminator(Interner()), model, 0.0, "ties")


# ---- what is eliminated when, and what is dropped before ----


def chain(num_variables: int, size: int = 4) -> Problem:
    made = Problem(mlp(), Mesh())
    made.variables = [None] * num_variables  # type: ignore[list-item]
    rng = np.random.default_rng(0)
    made.time_s = [interned(rng.random(size)) for _ in range(num_variables)]
    made.kept_bytes = [interned(np.zeros(size)) for _ in range(num_variables)]
    made.edges = {(v, v + 1): interned(rng.random((size, size))) for v in range(num_variables - 1)}
    return made


def order_of(model: Problem) -> tuple[tuple[int, ...], int]:
    """The order in which variables are eliminated, and the largest table on the way."""
    Eliminator(Interner()).solve(model)
    assert model.order is not None
    return model.order.variables, model.order.largest_table


def test_a_chain_is_eliminated_from_its_ends() -> None:
    """No table spans more than a variable and its neighbour; from the middle it would be two."""
    model = chain(6)
    order, largest = order_of(model)
    assert sorted(order) == list(range(6))
    assert largest == 4 * 4
    assert order[0] in (0, 5)
    assert all(v in (min(left), max(left)) for i, v in enumerate(order) for left in [order[i:]])


def test_the_middle_of_a_star_is_eliminated_last_but_one() -> None:
    made = chain(6)
    table = next(iter(made.edges.values()))
    made.edges = {(0, v): table for v in range(1, 6)}
    order, largest = order_of(made)
    assert 0 in order[-2:]
    assert largest == 4 * 4


def test_a_ring_needs_tables_of_three() -> None:
    """Eliminating a variable joins its neighbours, so that the next one has both."""
    made = chain(6)
    made.edges[0, 5] = interned(np.random.default_rng(1).random((4, 4)))
    order, largest = order_of(made)
    assert sorted(order) == list(range(6))
    assert largest == 4**3
    for far in ((0, 3), (1, 4)):
        made.edges[far] = made.edges[0, 5]
    made.order, made.solved = None, {}
    assert order_of(made)[1] == 4**4


def test_dominated_choices_are_dropped() -> None:
    """The first choice of each beats the others; then, where only a choice that is gone spoke for another, that too."""

    def left(made: Problem) -> list[int]:
        model = Model.of(made, Prices(), Interner())
        model.drop_dominated()
        return model.sizes

    made = chain(5)
    made.time_s = [interned(np.array([0.0, 50.0, 60.0, 70.0])) for _ in range(5)]
    made.edges = dict.fromkeys(made.edges, interned(np.zeros((4, 4))))
    assert left(made) == [1] * 5
    made = chain(2, size=2)
    made.time_s = [interned(np.zeros(2)) for _ in range(2)]
    made.edges = {(0, 1): interned(np.array([[0.0, 9.0], [1.0, 5.0]]))}
    assert left(made) == [1, 1]
    made.edges = {(0, 1): interned(np.array([[0.0, 9.0], [9.0, 0.0]]))}
    assert left(made) == [2, 2]


def test_bounds_are_sought_only_where_tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are eliminated sooner than what can be dropped of them is found."""
    bounded, within = list[int](), eliminate.within_bounds

    def seen(model: Model, rounds: int, ceiling: float) -> Solution:
        bounded.append(sum(model.sizes))
        return within(model, rounds, ceiling)

    monkeypatch.setattr(eliminate, "within_bounds", seen)
    for large, expected in ((4 * 4 + 1, []), (4 * 4, [6 * 4])):
        monkeypatch.setattr(eliminate, "LARGE_TABLE", large)
        order_of(chain(6))
        assert bounded[:1] == expected


def test_lifetimes_of_weights_share_the_tables_of_all_else() -> None:
    """Of a model with activations that move: what is not gathered costs the same under each lifetime."""
    builder = ProblemBuilder(cluster(2), Mesh.of(x=2), every_choice)
    first, second = (builder.build(mlp(), way=RunFacts(zero=zero)) for zero in ("kept", "zero-3"))
    differ = {name for name in first.closures if first.closures[name] is not second.closures[name]}
    stored = {node.name for node in mlp().leaves("parameter")}
    assert differ == stored & set(first.closures)


def test_prices_of_a_byte_share_the_tables_of_what_keeps_nothing() -> None:
    """Of a chain in which only the last variable keeps bytes, what is far from it is eliminated once."""
    model, interner, made = chain(6), Interner(), list[int]()
    model.kept_bytes[5] = interned(np.arange(4.0))
    solver = Eliminator(interner)
    for price in (0.1, 0.2):
        check(solver, model, price, f"price {price}")
        made.append(num_made(interner, minimize_last))
    assert made[0] >= 5
    assert made[1] - made[0] <= 3


def test_tables_of_large_problems_do_not_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = ProblemBuilder(cluster(4), Mesh.of(x=2, y=2), every_choice)
    problem, eliminator = builder.build(mlp(layers=6)), Eliminator(builder.interner)
    before, objectives = len(builder.interner.made), list[float]()
    for most, stays in ((0, False), (2**12, True)):
        monkeypatch.setattr(eliminate, "MANY_VARIABLES", most)
        objectives.append(eliminator.solve_with(problem, Prices(overlap_weight=0.5), {}).objective)
        assert (len(builder.interner.made) > before) == stays
    assert objectives[0] == objectives[1]
