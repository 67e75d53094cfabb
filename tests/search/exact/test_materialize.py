"""From choices to parallel operators: what the search priced apart stays apart."""

from __future__ import annotations

from dataclasses import replace

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.layout import Layout, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import fused_moves
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.materialize import materialize
from tests.search.graphs import cluster, every_choice


def moves_of(made: Layout, hub: Layout, read: Layout) -> list[str]:
    """How a value comes from where it is made, through its hub, to its two readers."""
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 8), "float32", "x"), b.leaf("w", "parameter", (8, 8), "float32", "w", grad=True)
    h = b.op("linear", x, w)
    readers = [b.op("exp", h), b.op("neg", h)]
    graph = b.graph([("loss", b.op("sum", b.op("add", *readers), dims=(0, 1), keepdim=False))])
    builder = ProblemBuilder(cluster(2), Mesh.of(x=2), every_choice)
    problem = builder.build(graph)
    solution = Eliminator(builder.interner).solve(problem)
    choices = list(solution.choices)
    for kind, name, layout in (("node", h, made), ("hub", h, hub), *(("node", r, read) for r in readers)):
        variable = problem.index[kind, name]
        choices[variable] = problem.states[variable].index((layout,))
    parallel = materialize(problem, replace(solution, choices=tuple(choices)), every_choice)
    return [f"{m.before} to {m.after}" for _, start, m in fused_moves(parallel) if start.split(".")[0] == h][::-1]


def test_moves_to_a_hub_and_from_it_are_priced_apart_and_run_apart() -> None:
    assert moves_of(S(0), R, S(1)) == ["S(0) to R", "R to S(1)"]
    assert moves_of(S(0), S(1), S(1)) == ["S(0) to S(1)"]
