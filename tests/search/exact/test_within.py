"""The fastest layouts within memory, against an integer program (HiGHS)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np
import pytest

from bench.integer import integer_program
from shardwright.pcg.mesh import Mesh
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Prices, Problem
from shardwright.search.exact import within
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.within import kept_bytes, least_bytes, time_and_bytes, within_memory
from tests.search.graphs import cluster, every_choice, mlp


def shared_tables(seed: int) -> Problem:
    """Twelve variables along a chain with some longer links, of which many share costs, as equal blocks do."""
    rng = np.random.default_rng(seed)
    problem, kinds = Problem(mlp(), Mesh()), rng.integers(3, size=12)
    times, kept, pairs = rng.random((3, 4)), rng.random((3, 4)), rng.random((3, 3, 4, 4))
    problem.time_s = [Interned(times[k]) for k in kinds]
    problem.kept_bytes = [Interned(kept[k] * (1 + 9 * (i == 5))) for i, k in enumerate(kinds)]
    problem.edges = {
        (i, j): Interned(pairs[kinds[i], kinds[j]])
        for i, j in product(range(12), repeat=2) if j == i + 1 or (j == i + 4 and i % 3 == 0)
    }  # fmt: skip
    return problem


def problems() -> Iterator[tuple[Problem, Eliminator]]:
    builder = ProblemBuilder(cluster(4), Mesh.of(x=4), every_choice)
    yield builder.build(mlp(64, 16, 32, layers=2)), Eliminator(builder.interner)
    for seed in range(10):
        yield shared_tables(seed), Eliminator(Interner())


def limits(problem: Problem, eliminator: Eliminator) -> list[float]:
    fastest = eliminator.solve(problem)
    most = kept_bytes(problem, fastest)
    least = kept_bytes(problem, eliminator.solve(problem, Prices(1e6 * fastest.objective / most)))
    return [least + share * (most - least) for share in (0.2, 0.5, 0.8)]


def test_layouts_within_memory_are_the_integer_programs() -> None:
    """Within the gap that ends the search, and the bound is never above; prices alone are often far from it."""
    hull_gaps = list[float]()
    for problem, eliminator in problems():
        for limit in limits(problem, eliminator):
            found = within_memory(problem, eliminator, limit, inf)
            best, _ = integer_program(problem, limit=limit)
            assert best is not None
            seconds, num_bytes = time_and_bytes(problem, found.solution)
            assert found.fits
            assert num_bytes <= limit
            assert best * (1 - 1e-6) <= seconds <= best / (1 - within.GAP)
            assert found.bound_s <= best * (1 + 1e-6)
            assert found.bound_s >= seconds * (1 - within.GAP) * (1 - 1e-9)
            hull = within_memory(problem, eliminator, limit, inf, hull=True)
            hull_gaps.append(time_and_bytes(problem, hull.solution)[0] / best - 1)
            assert hull.bound_s <= found.bound_s * (1 + 1e-12)
    assert max(hull_gaps) > 0.1


def test_bounds_hold_where_the_search_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(within, "MOST_WORK", 20 * 12 * within.WORK_OF_VARIABLE)
    for seed in range(4):
        problem, eliminator = shared_tables(seed), Eliminator(Interner())
        for limit in limits(problem, eliminator):
            best, _ = integer_program(problem, limit=limit)
            assert best is not None
            found = within_memory(problem, eliminator, limit, inf)
            assert found.bound_s <= best * (1 + 1e-6) <= time_and_bytes(problem, found.solution)[0] * (1 + 2e-6)
            known_s = 1.05 * best
            cut = within_memory(problem, eliminator, limit, known_s)
            assert cut.bound_s <= max(best, known_s) * (1 + 1e-6)


def test_a_price_that_is_near_leads_to_the_same_layouts() -> None:
    """From wherever the walk begins, and with fewer models solved from where it ends."""
    fewer = 0
    for problem, eliminator in problems():
        for limit in limits(problem, eliminator):
            problem.solved.clear()
            cold = within_memory(problem, eliminator, limit, inf, hull=True)
            many = len(problem.solved)
            for times in (0.1, 1.0, 10.0):
                problem.solved.clear()
                warm = within_memory(problem, eliminator, limit, inf, hull=True, near=times * cold.prices.byte)
                assert warm.fits == cold.fits
                assert time_and_bytes(problem, warm.solution) == pytest.approx(time_and_bytes(problem, cold.solution))
                assert warm.bound_s == pytest.approx(cold.bound_s, rel=1e-3)
                fewer += (len(problem.solved) < many) if times == 1.0 else 0
    assert fewer > 10


def test_a_limit_below_the_least_leaves_the_smallest() -> None:
    problem, eliminator = shared_tables(0), Eliminator(Interner())
    found = within_memory(problem, eliminator, 1e-3, inf)
    assert not found.fits
    assert kept_bytes(problem, found.solution) == pytest.approx(least_bytes(problem), rel=1e-6)
    warm = within_memory(problem, eliminator, 1e-3, inf, near=1.0)
    assert (warm.fits, warm.solution) == (False, found.solution)
