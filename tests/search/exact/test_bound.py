"""The bound that a plan reports: none of what it speaks of lies below it, and it is not below all of them by much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.search.choices.interning import Interned
from shardwright.search.exact import within
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Candidate, NoLayoutsError, Solver
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice, mlp

Way = tuple[int, object]
GRAPHS = {"blocks": blocks(16, 16, layers=4, seq=8), "mlp": mlp(16, 16, 64, layers=2)}
ASKED: list[Mapping[str, Any]] = [
    {"microbatches": 4, "recompute": "full"}, {"microbatches": 2}, {"microbatches": 1}, {},
    {"mesh": Mesh.of(x=2, y=2), "roles": ("zero", "tensor"), "microbatches": 2},
]  # fmt: skip


COSTED = list[tuple[Candidate, float]]()
"""By all solvers of a search."""


class Recorded(Solver):
    """A solver that notes every plan it finishes: the way it is run, and the sum by the search's model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.costed = COSTED

    def finished(self, draft: Any, folded: Folded, zeros: Any) -> Candidate:
        found = super().finished(draft, folded, zeros)
        for zero in zeros:
            problem, _ = self.problem(folded, found.mesh, found.roles, found.execution, zero)
            if [len(t.value) for t in problem.time_s] == [len(t.value) for t in draft.solved[0].time_s]:
                self.costed.append((found, within.time_and_bytes(problem, draft.solved[1])[0]))
        return found


@each("name", list(GRAPHS))
def test_nothing_that_the_search_costs_lies_below_the_bound(name: str) -> None:
    """By the search's own sum, for each lifetime that a plan was finished with, and by the timeline."""
    graph, num_compared, longer = GRAPHS[name], 0, 0
    for link, share in ((1e9, 0.5), (1e7, 1.0)):
        search = Planner(cluster(4, link_bytes_per_s=link), every_choice)
        free = search.plan(graph, recompute="none", microbatches=1)
        search.solver = solver = Recorded(search.cluster, every_choice)
        solver.limit_bytes = search.limit_bytes = int(share * free.prediction.memory.total_bytes)
        for asked in (a for a in ASKED if name == "blocks" or "recompute" not in a):
            solver.costed.clear()
            plan = search.plan(graph, **asked)
            bound_s, given = plan.report.bound_s, asked.get("mesh")
            assert bound_s > 0 or not isinstance(plan.execution.recompute, str)
            way = plan.mesh.num_microbatches, plan.execution
            for found, sum_s in solver.costed:
                if (found.mesh.num_microbatches, found.execution) == way and given in (None, devices(found)):
                    assert bound_s <= sum_s * (1 + 1e-9), (asked, found.name, found.priced, found.lifetimes)
                    assert bound_s <= found.prediction.step_s * (1 + 1e-9), (asked, found.name)
                    num_compared, longer = num_compared + 1, longer + (found.lifetimes != "zero-3")
            for other in plan.alternatives:
                if given is None and other.mesh.num_microbatches == way[0] and "recompute" in asked:
                    assert bound_s <= other.prediction.step_s * (1 + 1e-9), (asked, other.name)
            assert bound_s <= plan.prediction.step_s
    assert num_compared > 30
    assert longer > 10


def devices(candidate: Candidate) -> Mesh:
    own = candidate.mesh
    return Mesh(own.names[1:], own.sizes[1:]) if own.num_microbatches > 1 else own


# ---- no finite solution ----


class Refusing(Solver):
    """A solver by which nothing is run in microbatches: one operator's choices exclude those of all its neighbours."""

    def problem(self, folded: Folded, mesh: Mesh, *rest: Any, **options: Any) -> Any:
        found, eliminator = super().problem(folded, mesh, *rest, **options)
        edge = min(found.edges)
        if mesh.num_microbatches > 1:
            found.edges[edge] = Interned(np.full_like(found.edges[edge].value, np.inf))
        return found, eliminator


def test_what_has_no_layouts_is_refused_by_name_and_left_out_of_a_search() -> None:
    graph, search = GRAPHS["blocks"], Planner(cluster(2), every_choice)
    search.solver = Refusing(search.cluster, every_choice)
    told = r"mesh \[mb=2, x=2\] with roles zero and zero-3: no layouts of this model can be run so, as the choices of '"
    with pytest.raises(NoLayoutsError, match=told):
        search.solve(graph, Mesh.of(mb=2, x=2), ("zero",), "test")
    plan = search.plan(graph)
    assert plan.mesh.num_microbatches == 1
    assert "no layouts of this model can be run so" in plan.report.obstacle
    assert all(a.mesh.num_microbatches == 1 for a in plan.alternatives)
    with pytest.raises(PlanError, match="no layouts of this model can be run so"):
        search.plan(graph, microbatches=2)
