"""Layouts for which communication counts what it adds where compute runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.clock import SHARING, Sharing
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.choices.problem import SERIAL, Prices
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Solver
from shardwright.search.exact.within import kept_bytes, within_memory
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice

GRAPH = blocks(64, 2048, layers=4, seq=128)


def test_what_a_second_of_communication_adds_at_least() -> None:
    assert Sharing(0.84, 1.0).least == 1 - 0.84
    assert Sharing(0.5, 0.5).least == 1.0  # cores that share everything: nothing is won
    assert Sharing(1.0, 0.5).least == 0.0
    assert Solver(cluster(2), every_choice).besides == (1.0,)
    assert Solver(Cluster.preset("dgx-h100"), every_choice).besides == (1.0, SHARING["cuda"].least)


def test_what_overlaps_is_what_parameters_send() -> None:
    """Gathers and sums of gradients, but nothing of activations, whose readers wait."""
    solver = Solver(Cluster.preset("dgx-h100"), every_choice)
    problem, eliminator = solver.problem(Folded(GRAPH), Mesh.of(x=8), ("free",), Execution(), "zero-3")
    names = {number: (kind, name) for (kind, name), number in problem.index.items()}
    parameters = {leaf.name for leaf in GRAPH.leaves("parameter")}
    for i, j in problem.edges:
        assert ((i, j) in problem.overlapped) == bool({names[i][1], names[j][1]} & parameters)
    serial, free = (eliminator.solve(problem, prices) for prices in (SERIAL, Prices(overlap_weight=0.01)))
    again = sum(float(problem.edges[e].value[free.choices[e[0]], free.choices[e[1]]]) for e in problem.overlapped)
    assert free.objective < serial.objective <= free.objective + again * (1 + 1e-9)


class Serial(Solver):
    """A solver of layouts for a step in which nothing overlaps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.besides = (1.0,)


def test_plans_overlap_where_that_is_faster() -> None:
    """Of all meshes, faster than what is chosen for a step in which nothing overlaps; of one, never slower."""
    for mesh in (None, Mesh.of(x=8, y=2)):
        steps = list[float]()
        for solver in (Serial, Solver):
            planner = Planner(Cluster.preset("dgx-h100", nodes=2), every_choice)
            planner.solver = solver(planner.cluster, every_choice)
            plan = planner.plan(GRAPH, mesh=mesh, microbatches=1, recompute="none", compared=False)
            steps.append(plan.prediction.step_s)
        assert steps[1] <= (1 if mesh else 0.98) * steps[0], (mesh, steps)


def test_within_memory_at_any_price_of_what_overlaps() -> None:
    """The walk over prices of a byte minimizes the same sum at its end as at its start."""
    solver = Solver(Cluster.preset("dgx-h100"), every_choice)
    for beside in (1.0, 0.16, 0.01):
        problem, eliminator = solver.problem(Folded(GRAPH), Mesh.of(x=4, y=2), ("free",) * 2, Execution(), "zero-3")
        free, small = (eliminator.solve(problem, Prices(byte, beside)) for byte in (0.0, 1.0))
        most, least = (kept_bytes(problem, solution) for solution in (free, small))
        last = free.objective
        for share in (0.9, 0.5, 0.1):
            limit = least + share * (most - least)
            found, bound_s, feasible, prices = within_memory(problem, eliminator, limit, np.inf, beside)
            assert feasible
            assert prices.overlap_weight == beside
            seconds = found.objective - prices.byte * kept_bytes(problem, found)
            assert last * (1 - 1e-9) <= bound_s <= seconds * (1 + 1e-9)
            last = bound_s
