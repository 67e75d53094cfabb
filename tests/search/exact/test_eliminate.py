"""The exact solver against brute force and against an integer program (HiGHS)."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from bench.integer import integer_program
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Prices, Problem, Solution
from shardwright.search.exact import eliminate
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator, improved, minimize_last
from shardwright.search.exact.model import Model
from shardwright.search.exact.pruning import Reparametrization
from tests.each import each
from tests.search.graphs import cluster, every_choice, mlp, num_made


def objective(problem: Problem, choices: tuple[int, ...], price: float = 0.0) -> float:
    own = sum(
        t.value[c] + price * k.value[c] for t, k, c in zip(problem.time_s, problem.kept_bytes, choices, strict=True)
    )
    return float(own + sum(table.value[choices[i], choices[j]] for (i, j), table in problem.edges.items()))


def tables(problem: Problem) -> dict[tuple[int, int], np.ndarray]:
    return {scope: table.value for scope, table in problem.edges.items()}


def optimum(problem: Problem, price: float = 0.0) -> float:
    found, _ = integer_program(problem, price)
    assert found is not None
    return found


def solve(graph: Graph, mesh: Mesh, price: float = 0.0, **link: float) -> tuple[Problem, Solution]:
    builder = ProblemBuilder(cluster(mesh.num_devices, **link), mesh, every_choice)  # type: ignore[arg-type]
    problem = builder.build(graph)
    return problem, Eliminator(builder.interner).solve(problem, Prices(price))


@each("link_bytes_per_s", [1e6, 1e9, 1e12])
@each("mesh", [Mesh.of(x=4), Mesh.of(x=2, y=2)], ids=str)
@each("residual", [False, True])
def test_the_optimum_is_the_integer_programs(mesh: Mesh, link_bytes_per_s: float, residual: bool) -> None:
    problem, solution = solve(mlp(64, 16, 32, layers=2, residual=residual), mesh, link_bytes_per_s=link_bytes_per_s)
    assert objective(problem, solution.choices) == pytest.approx(solution.objective, rel=1e-12)
    assert solution.objective == pytest.approx(optimum(problem), rel=1e-6)


@pytest.mark.parametrize("price", [1e-12, 1e-9, 1e-6])
def test_the_optimum_with_a_price_on_memory_is_the_integer_programs(price: float) -> None:
    problem, solution = solve(mlp(64, 16, 32, layers=2), Mesh.of(x=2, y=2), price)
    assert solution.objective == pytest.approx(optimum(problem, price), rel=1e-6)


def random_problem(rng: np.random.Generator, sizes: list[int], density: float) -> Problem:
    """Random tables on a random graph, infinities included."""
    problem = Problem(mlp(), Mesh())
    problem.time_s = [Interned(rng.random(s)) for s in sizes]
    problem.kept_bytes = [Interned(rng.random(s)) for s in sizes]
    for i, j in product(range(len(sizes)), repeat=2):
        if i < j and rng.random() < density:
            table = rng.random((sizes[i], sizes[j]))
            table[rng.random(table.shape) < 0.2] = np.inf
            table[0, 0] = 1.0
            problem.edges[i, j] = Interned(table)
    return problem


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_random_models_are_solved_as_by_brute_force(seed: int, bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By elimination alone, and after dropping choices by bounds."""
    if bounded:
        monkeypatch.setattr(eliminate, "LARGE_TABLE", 1)
    rng = np.random.default_rng(seed)
    sizes = list(rng.integers(2, 4, size=7))
    problem = random_problem(rng, [int(s) for s in sizes], rng.choice([0.2, 0.5, 0.9]))
    price = float(rng.choice([0.0, 0.7]))
    best = min(objective(problem, c, price) for c in product(*(range(len(t.value)) for t in problem.time_s)))
    solution = Eliminator(Interner()).solve(problem, Prices(price))
    assert solution.objective == pytest.approx(best)
    assert objective(problem, solution.choices, price) == pytest.approx(best)


@each("seed", range(20))
def test_what_costs_little_beside_a_known_solution_has_one_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what another price's solution costs, only rounding may be left for a part."""
    monkeypatch.setattr(eliminate, "LARGE_TABLE", 100)
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, [4] * 18, 0.0)
    problem.kept_bytes = [Interned(np.zeros(4)) for _ in range(18)]
    problem.time_s[12:] = [Interned(rng.random(4) * 1e-16) for _ in range(6)]
    problem.edges = {(v, v + 1): Interned(rng.random((4, 4))) for v in range(11)}
    problem.edges |= {scope: Interned(rng.random((4, 4)) * 1e-16) for scope in combinations(range(12, 18), 2)}
    eliminator = Eliminator(Interner())
    first = eliminator.solve(problem, Prices(0.0))
    assert eliminator.solve(problem, Prices(0.7)).objective == pytest.approx(first.objective)


def reparametrized(problem: Problem, clip: float) -> Reparametrization:
    model = Reparametrization([t.value for t in problem.time_s], tables(problem), clip)
    for sweep in range(4):
        model.sweep(forward=sweep % 2 == 0)
    return model


@each("clip", [1.5, 4.0, 100.0])
@each("seed", range(10))
def test_bounds_are_below_every_solution(seed: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, [3] * 6, 0.6)
    model = reparametrized(problem, clip)
    for choices in product(range(3), repeat=6):
        value = objective(problem, choices)
        assert model.constant <= value + 1e-12
        assert all(model.bounds[v][c] <= value + 1e-12 for v, c in enumerate(choices))


def test_bounds_are_tight_on_a_chain() -> None:
    """What sweeps compute on a chain is the dynamic program's least cost through every choice."""
    rng = np.random.default_rng(0)
    problem = random_problem(rng, [4] * 5, 0.0)
    problem.edges = {(v, v + 1): Interned(rng.random((4, 4))) for v in range(4)}
    bounds = reparametrized(problem, 100.0).bounds
    every = [(objective(problem, c), c) for c in product(range(4), repeat=5)]
    for v in range(5):
        through = [min(value for value, c in every if c[v] == x) for x in range(4)]
        assert max(bounds[v] - through) < 1e-12
        assert bounds[v].min() == pytest.approx(min(through))


def test_many_neighbours_do_not_make_large_tables() -> None:
    """Five hubs of 30 states, each read by all of 8 operators: 30^5 entries without bounds."""
    rng = np.random.default_rng(0)
    problem = random_problem(rng, [30] * 13, 0.0)
    for hub, operator in product(range(5), range(5, 13)):
        problem.edges[hub, operator] = Interned(rng.random((30, 30)) * 0.02)
    eliminator = Eliminator(Interner())
    solution = eliminator.solve(problem)
    assert problem.order is not None
    assert problem.order.largest_table >= 30**6
    assert objective(problem, solution.choices) == pytest.approx(solution.objective)
    assert solution.objective == pytest.approx(optimum(problem), rel=1e-6)


def test_repeated_blocks_are_eliminated_once() -> None:
    """Inside equal blocks nothing is computed twice; only the chain of the cuts between them grows with depth."""
    made, variables = [], []
    for layers in (8, 16):
        builder = ProblemBuilder(cluster(4), Mesh.of(x=2, y=2), every_choice)
        problem = builder.build(mlp(64, 16, 32, layers=layers))
        Eliminator(builder.interner).solve(problem)
        made.append(num_made(builder.interner, minimize_last))
        variables.append(len(problem.states))
    assert made[1] - made[0] <= 0.65 * (variables[1] - variables[0])
    assert made[1] < variables[1] / 1.5


def test_what_is_too_large_is_improved_part_by_part() -> None:
    """Never worse, often better, and the optimum where a part is the whole."""
    better = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, [3] * 8, 0.5)
        model = Model(Interner(), list(problem.time_s), dict(problem.edges))
        small = improved(model, (0,) * 8, lambda part: exact(part) if len(part.unary) <= 8 else None)
        assert model.cost(small) == pytest.approx(exact_cost(problem))
        chain = Model(Interner(), [Interned(t) for t in rng.random((40, 3))],
                      {(v, v + 1): Interned(rng.random((3, 3))) for v in range(39)})  # fmt: skip
        found = improved(chain, (0,) * 40, lambda part: exact(part) if len(part.unary) <= 8 else None)
        assert chain.cost(found) <= chain.cost((0,) * 40)
        better += chain.cost(found) < chain.cost((0,) * 40)
    assert better == 20


def exact(part: Model) -> tuple[int, ...]:
    return eliminate.Elimination(part).run(part.min_fill().variables).choices


def exact_cost(problem: Problem) -> float:
    return Eliminator(Interner()).solve(problem).objective
