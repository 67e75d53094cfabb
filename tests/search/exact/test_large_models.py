"""Models whose tables would not fit any memory: a good plan, a true bound, and bounded memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest

from shardwright.pcg.mesh import Mesh
from shardwright.search.choices.interning import Interner
from shardwright.search.choices.problem import SERIAL, Prices, Problem
from shardwright.search.exact import eliminate, pruning
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.model import Model
from shardwright.search.exact.pruning import relax, undominated
from tests.search.exact.test_eliminate import objective, random_problem, tables
from tests.search.graphs import cluster, dense, every_choice, recurrent

IN_LITTLE_MEMORY = """
import resource
from itertools import combinations
import numpy as np
from shardwright.pcg.mesh import Mesh
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.tree.planner import Planner
from shardwright.search.choices.problem import Prices, Problem
from tests.search.graphs import cluster, dense, every_choice, mlp, recurrent

before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + 400 * 2**20,) * 2)
for graph, mesh in ((recurrent(8), None), (dense(14), Mesh.of(x=2, y=2))):
    plan = Planner(cluster(4), every_choice).plan(graph, mesh=mesh, microbatches=1, recompute="none")
    assert plan.report.bound_s <= plan.prediction.step_s * (1 + 1e-9)
    assert plan.prediction.step_s <= 1.1 * plan.report.bound_s, (plan.prediction.step_s, plan.report.bound_s)
    assert all(plan.prediction.step_s <= a.prediction.step_s * (1 + 1e-9) for a in plan.alternatives if a.fits)

rng = np.random.default_rng(0)  # nothing is left out by bounds, and every table would have 12^13 entries
own = [Interned(rng.random(12)) for _ in range(14)]
edges = {pair: Interned(rng.random((12, 12))) for pair in combinations(range(14), 2)}
found = Eliminator(Interner()).solve(Problem(mlp(), Mesh(), time_s=own, kept_bytes=own, edges=edges))
assert 0 < found.bound < found.objective < float("inf")

own = [Interned(rng.random(400)) for _ in range(4)]  # a ring: two neighbours each, and tables of 400^3 entries
edges = {pair: Interned(rng.random((400, 400))) for pair in ((0, 1), (1, 2), (2, 3), (0, 3))}
found = Eliminator(Interner()).solve(Problem(mlp(), Mesh(), time_s=own, kept_bytes=own, edges=edges))
assert 0 < found.bound <= found.objective < float("inf")
"""


def test_planning_takes_little_memory_where_tables_would_be_large() -> None:
    """400 MiB beside what Python has loaded; tables of gigabytes without bounds."""
    done = subprocess.run([sys.executable, "-c", IN_LITTLE_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def large(problem: Problem) -> int:
    """Entries of the largest table, if it were made."""
    assert problem.order is not None
    return problem.order.largest_table


def test_the_graphs_of_this_file_have_large_tables() -> None:
    for graph in (recurrent(16), dense(14)):
        builder = ProblemBuilder(cluster(4), Mesh.of(x=2, y=2), every_choice)
        Eliminator(builder.interner).solve(problem := builder.build(graph))
        assert large(problem) > 2**30


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table of three variables is made, however small."""
    monkeypatch.setattr(eliminate, "LARGE_TABLE", 1)
    monkeypatch.setattr(eliminate, "MOST_ENTRIES", 60)


@pytest.mark.parametrize("limit", ["MOST_ENTRIES", "LARGEST"])
def test_tables_that_are_too_large_are_not_made(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or together."""
    model = Model.of(random_problem(np.random.default_rng(0), [3] * 7, 0.9), SERIAL, Interner())
    order = model.min_fill()
    least = {"MOST_ENTRIES": order.entries, "LARGEST": order.largest_table}[limit]
    for most, is_solved in ((least, True), (least - 1, False)):
        monkeypatch.setattr(eliminate, limit, most)
        assert (eliminate.eliminated(model, eliminate.MOST_ENTRIES) is not None) == is_solved


@pytest.mark.usefixtures("small_tables")
def test_bounds_stay_below_the_optimum_and_solutions_above() -> None:
    """By brute force on random models, infinities included; better than by descent from a choice."""
    above, above_by_descent, gaps = list[float](), list[float](), list[float]()
    for seed in range(80):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, [int(s) for s in rng.integers(2, 4, size=7)], float(rng.choice([0.5, 0.9])))
        price = float(rng.choice([0.0, 0.7]))
        best = min(objective(problem, c, price) for c in product(*(range(len(t.value)) for t in problem.time_s)))
        found = Eliminator(Interner()).solve(problem, Prices(price))
        assert found.bound <= best + 1e-9, seed
        assert found.objective >= best - 1e-9, seed
        assert found.objective == pytest.approx(objective(problem, found.choices, price)), seed
        above.append(found.objective - best)
        above_by_descent.append(descent(problem, price) - best)
        gaps.append(found.objective - found.bound)
    assert sum(above) < 0.5 * sum(above_by_descent)
    assert sum(gap > 1e-9 for gap in gaps) > 10
    assert sum(a < 1e-9 for a in above) > 50


def descent(problem: Problem, price: float) -> float:
    """The cost that is reached from choice 0 of all by changing one at a time."""
    chosen, cost = [0] * len(problem.time_s), objective(problem, (0,) * len(problem.time_s), price)
    for v in list(range(len(chosen))) * 2:
        others = [(*chosen[:v], c, *chosen[v + 1 :]) for c in range(len(problem.time_s[v].value))]
        chosen = list(min(others, key=lambda c: objective(problem, c, price)))
        cost = objective(problem, tuple(chosen), price)
    return cost


@pytest.mark.parametrize("above", [np.inf, 1.5, 1.0])
def test_what_sweeps_say_is_true(above: float) -> None:
    """No bound is above a solution, of no choice above one that holds it; and what is tight is the optimum.

    Also where a cost is known beforehand, be it that of the optimum, and what is above it left out.
    """
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, [3] * 6, 0.7)
        every = [(objective(problem, c), c) for c in product(range(3), repeat=6)]
        best = min(value for value, _ in every)
        found = relax([t.value for t in problem.time_s], tables(problem), above * best)
        left = [set(choices.tolist()) for choices in found.left]
        assert all(value > best + 1e-12 or all(c in own for c, own in zip(choices, left, strict=True))
                   for value, choices in every)  # fmt: skip
        assert found.bound <= best + 1e-12
        assert all(found.bounds[v][c] <= value + 1e-12 for value, choices in every for v, c in enumerate(choices))
        assert not found.is_tight or found.objective == pytest.approx(best)


@pytest.mark.parametrize("compared", [1, 60, 2**16])
def test_what_is_left_of_choices_beats_the_rest(compared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties and infinities, some rows at a time; of choices that are infinite somewhere, more may be left."""
    monkeypatch.setattr(pruning, "MOST_COMPARED", compared)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        own, tables = rng.integers(0, 3, 9) * 1.0, [rng.integers(0, 3, (9, 2)) * 1.0 for _ in range(2)]
        for costs in (own, *tables):
            costs[rng.random(costs.shape) < 0.2] = np.inf
        left = undominated(own, tables).tolist()
        rows = np.concatenate([own[:, None], *tables], axis=1)
        beaten = [[bool(np.all(rows[w] <= rows[i])) for w in left if w != i] for i in range(9)]
        assert all(any(beaten[i]) for i in range(9) if i not in left and np.isfinite(own[i]))
        assert 0 < len(left) < 9
        assert compared == 1 or left == one_by_one(own, tables)


def one_by_one(own: np.ndarray, tables: list[np.ndarray]) -> list[int]:
    """The choices that no other beats, found with one comparison at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "MOST_COMPARED", 1)
        return undominated(own, tables).tolist()


def test_all_choices_stay_where_each_is_the_best_somewhere() -> None:
    tables = [1.0 - np.eye(5)]
    assert undominated(np.zeros(5), tables).tolist() == [0, 1, 2, 3, 4]
    assert undominated(np.array([0.0, 0.0, np.inf, 0.0, 0.0]), tables).tolist() == [0, 1, 3, 4]


def test_sweeps_are_spent_on_costs_that_are_clipped_aptly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that the first clip is far from: one sweep shows that, and the others are for one that is apt."""
    made = list[tuple[float, int]]()

    class Counted(pruning.Reparametrization):
        def __init__(
            self, unary: list[np.ndarray], edges: pruning.Edges, clip: float, check: Callable[[], None]
        ) -> None:
            super().__init__(unary, edges, clip, check)
            made.append((clip, 0))

        def sweep(self, *, forward: bool) -> None:
            super().sweep(forward=forward)
            made[-1] = (made[-1][0], made[-1][1] + 1)

    monkeypatch.setattr(pruning, "Reparametrization", Counted)
    rng = np.random.default_rng(1)
    edges = {pair: 1 + rng.random((4, 4)) for pair in combinations(range(12), 2)}
    found = relax([np.zeros(4) for _ in range(12)], edges)
    (first, tried), (apt, spent) = made
    assert (tried, first < found.objective) == (2, True)
    assert spent > 2
    assert found.objective <= apt <= 3 * found.objective
    assert found.bound <= found.objective
