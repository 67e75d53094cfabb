"""What a folded problem chose, said of all blocks: a plan of the same sum, in which copies are laid out alike."""

from __future__ import annotations

import pytest

from shardwright.cost.predict import node_costs
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.search.check import difference
from shardwright.search.choices.problem import Prices
from shardwright.search.exact.folding import fold, unfolded
from shardwright.search.exact.materialize import materialize
from shardwright.search.exact.solving import Solver, over_time
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice
from tests.search.rewrites.test_rewriting import layers, rewriter


def solver() -> Solver:
    return Solver(cluster(4, link_bytes_per_s=1e8), every_choice)


def laid_out(graph: Graph, name: str) -> object:
    return graph.by_name[name].split, graph.types[name].layouts


@each("roles", [("free", "free"), ("data", "tensor"), ("zero", "free")])
@each("count", [1, 2])
@each("byte", [0.0, 1e-9])
@each("serial", [blocks(8, layers=6), layers(6)])
def test_the_whole_graph_has_the_sum_of_the_folded_problem(
    roles: tuple[str, ...], count: int, byte: float, serial: Graph
) -> None:
    own, folded, mesh = solver(), fold(serial), over_time(Mesh.of(x=2, y=2), count)
    problem, eliminator = own.problem(folded, mesh, roles, Execution(), "zero-3")
    solution = eliminator.solve(problem, Prices(byte))
    whole = unfolded(problem, folded, serial)
    assert whole is not None
    graph = materialize(whole, solution, every_choice)
    assert difference(graph.erased(), serial) is None
    for block, copies in folded.copies.items():
        home: list[str] = [name for name, where in folded.home.items() if where == block and name in graph.by_name]
        assert home
        for names in copies:
            assert [laid_out(graph, names[name]) for name in home] == [laid_out(graph, name) for name in home]
    constants = constant_nodes(graph)
    costs = [cost for name, cost in node_costs(Steps(graph, own.cluster, DEFAULT)).items() if name not in constants]
    num_bytes = sum(problem.kept_bytes[v].value[c] for v, c in enumerate(solution.choices))
    spent_s = sum(c.compute_s + c.communication_s for c in costs)
    assert spent_s == pytest.approx(solution.objective - byte * num_bytes, rel=0.02)


def test_a_rewritten_graph_is_known_by_what_it_computes() -> None:
    """Its names are others than those of the folded graph that was rewritten; another graph is not taken for it."""
    serial, mesh = layers(6), Mesh.of(x=2)
    found = rewriter(serial, fold(serial))
    new = found.rewritten(found.solver.solve(found.folded, mesh, ("free",), "plain"))
    assert new is not None
    whole, problem = found.whole(new), new.solved[0]
    assert fold(whole).graph is not problem.graph
    all_blocks = unfolded(problem, fold(whole), whole)
    assert all_blocks is not None
    assert difference(materialize(all_blocks, new.solved[1], every_choice).erased(), whole) is None
    assert unfolded(problem, fold(serial), serial) is None
    num_problems = len(found.solver.known.problems)
    assert found.again_whole(new).rewrites == new.rewrites
    assert len(found.solver.known.problems) == num_problems


def test_what_the_first_copy_reads_in_other_layouts_is_handed_on_in_them() -> None:
    """Values between copies are laid out as what the first one reads, but for what their own copy reads too."""
    serial = blocks(8, layers=6)
    folded, own = fold(serial), solver()
    problem, _ = own.problem(folded, Mesh.of(x=4), ("free",), Execution(), "zero-3")
    whole = unfolded(problem, folded, serial)
    assert whole is not None
    ((before, after, _),) = folded.ties
    names = [copy[before] for copy in folded.copies["layers.0"]]
    assert names[0] == before
    assert len(set(names)) == 6
    assert {whole.index["hub", name] for name in names} == {problem.index["hub", before]}
    assert whole.index["hub", folded.last[after]] == problem.index["hub", after] != problem.index["hub", before]


def test_a_first_block_that_alone_has_constants_is_no_copy() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (32, 16), "float32", "x")
    for i in range(5):
        b.source = Source(f"layers.{i}")
        w = b.leaf(f"w{i}", "parameter", (16, 16), "float32", f"layers.{i}.w", grad=True)
        x = b.op("linear", b.op("tanh", x), w)
    b.source = Source()
    serial = b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])
    assert fold(serial).repeats == {"layers.1": 4}
    problem, _ = solver().problem(fold(serial), Mesh.of(x=4), ("free",), Execution(), "zero-3")
    assert unfolded(problem, fold(serial), serial) is not None
