"""The proof step: what is not a parallel form of the captured graph is refused, with the place named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import Choice, Split
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node, Source
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.types import TensorType
from shardwright.search.check import check_plan, difference
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.plan import Plan, fingerprint
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified
from tests.each import each
from tests.search.graphs import cluster, every_choice, mlp


def with_dropout(p: float = 0.1, swapped: bool = False) -> Graph:
    """Two dropouts, and a mask that no parameter reaches and that two operators read in different layouts."""
    b = GraphBuilder()
    b.at("y", Source("block", "model.py:7"))
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    w = b.leaf("w", "parameter", (16, 16), "float32", "block.w", grad=True)
    mask = b.op("cast", b.op("gt", x, 0), dtype="float32")
    h = b.op("linear", b.op("mul", x, mask), w)
    one, two = b.op("dropout", h, p=p), b.op("dropout", b.op("mul", h, mask), p=p)
    return b.graph(
        [("loss", b.op("sum", b.op("sub", *((two, one) if swapped else (one, two))), dims=(0, 1), keepdim=False))]
    )


def planned(graph: Graph, **axes: int) -> Plan:
    """A data-parallel plan, so that there are parallel operators however small the model is."""
    mesh = Mesh.of(**axes or {"dp": 2})
    return Planner(cluster(mesh.num_devices), every_choice).plan(
        graph, "test", mesh=mesh, roles=("data", "tensor")[: len(mesh)]
    )


def corrupted(plan: Plan, change: Callable[[Node], Node]) -> Plan:
    return replace(plan, graph=replace(plan.graph, nodes=tuple(map(change, plan.graph.nodes))))


@each("graph", [mlp(), mlp(layers=3, residual=True), with_dropout()])
@each("axes", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}])
def test_plans_pass(graph: Graph, axes: dict[str, int]) -> None:
    check_plan(planned(graph, **axes), graph, every_choice)


def test_nodes_computed_twice_are_one() -> None:
    graph = with_dropout()
    twice = replace(next(n for n in graph.nodes if n.op == "gt"), name="again")
    cast = next(n for n in graph.nodes if n.op == "cast")
    nodes = [*graph.nodes[:3], twice, *graph.nodes[3:]]
    other = [replace(n, inputs=("again",)) if n is cast else n for n in nodes]
    assert difference(Graph(tuple(other), graph.outputs).validate(), graph) is None


def test_names_and_order_do_not_matter() -> None:
    graph = mlp()
    renamed = tuple(replace(n, name=f"n.{n.name}", inputs=tuple(f"n.{i}" for i in n.inputs)) for n in graph.nodes)
    moved = (*renamed[1:3], renamed[0], *renamed[3:])
    assert difference(Graph(moved, (("loss", f"n.{graph.outputs[0][1]}"),)).validate(), graph) is None


def test_another_models_plan_names_both_fingerprints_and_the_difference() -> None:
    plan, other = planned(mlp()), mlp(hidden=64)
    with pytest.raises(PlanError) as error:
        check_plan(plan, other, every_choice)
    message = "is float32[32, 16] in the plan, float32[64, 16] in the model"
    for part in (plan.fingerprint, fingerprint(other), "'test'", message, "plan for this model"):
        assert part in str(error.value)


def test_the_same_computation_under_other_names_is_the_same_model() -> None:
    """As another process captures it, where the model loops over a set."""
    graph = mlp()
    renamed = tuple(replace(n, name=f"n.{n.name}", inputs=tuple(f"n.{i}" for i in n.inputs)) for n in graph.nodes)
    moved = Graph((*renamed[1:3], renamed[0], *renamed[3:]), (("loss", f"n.{graph.outputs[0][1]}"),))
    assert fingerprint(moved) == fingerprint(graph)
    check_plan(planned(graph), moved, every_choice)
    swapped = replace(with_dropout(), nodes=with_dropout(swapped=True).nodes)
    assert fingerprint(swapped) != fingerprint(with_dropout())
    check_plan(replace(planned(graph), fingerprint="of another version"), graph, every_choice)


def test_a_parameter_frozen_since_is_told() -> None:
    graph = mlp()
    frozen = replace(
        graph, nodes=tuple(replace(n, attrs=_set(n, "grad", False)) if n.name == "up0" else n for n in graph.nodes)
    )
    assert (
        "'layers.0.up' is float32[32, 16] in the plan, float32[32, 16] in the model and one of them is frozen"
        in str(difference(graph, frozen))
    )


def test_a_changed_attribute_is_found_where_it_is() -> None:
    graph = with_dropout()
    plan = corrupted(planned(graph), lambda n: replace(n, attrs=_set(n, "p", 0.2)) if n.op == "dropout" else n)
    with pytest.raises(
        PlanError, match=r"not the captured one: .*dropout\(p=0.2.*at block \(model.py:7\), the model .*p=0.1"
    ):
        check_plan(plan, graph, every_choice)


def test_swapped_operands_are_found() -> None:
    graph = with_dropout()
    plan = corrupted(planned(graph), lambda n: replace(n, inputs=n.inputs[::-1]) if n.op == "sub" else n)
    with pytest.raises(PlanError, match="not the captured one"):
        check_plan(plan, graph, every_choice)


def test_another_operator_is_found() -> None:
    graph = mlp()
    plan = corrupted(planned(graph), lambda n: replace(n, op="neg") if n.op == "relu" else n)
    with pytest.raises(PlanError, match=r"the plan has .*neg\(\).*the model .*relu\(\)"):
        check_plan(plan, graph, every_choice)


def test_an_ill_typed_graph_is_refused() -> None:
    graph = mlp()
    plan = planned(graph)
    steps = [n for n in plan.graph.nodes if n.is_parallel]
    broken = corrupted(plan, lambda n: replace(n, inputs=(steps[0].inputs[0],)) if steps[0].name in n.inputs else n)
    with pytest.raises(PlanError, match=r"ill-typed: .*make the plan again"):
        check_plan(broken, graph, every_choice)


def test_a_split_without_a_certificate_is_refused() -> None:
    """Well-typed by the factor strings alone; it is the certificates that judge, of a graph that was searched too."""
    graph = mlp()
    plan = planned(graph, dp=2, tp=2)

    def without(op: str, choice: str) -> CertifiedSplits:
        return lambda node, operands, blocked=(): (
            every_choice(node, operands, blocked) - ({choice} if node.op == op else set())
        )

    used = {(node.op, choice) for node in plan.graph.nodes for choice in node.split}
    assert len(used) > 3
    for op, choice in used:
        with pytest.raises(PlanError, match=rf"= {op}\(.*: the split '{choice}' on axis '\wp' is not certified; make"):
            check_plan(plan, graph, without(op, choice))
    check_plan(plan, graph, without("relu", "z"))


def test_a_split_into_pieces_without_a_certificate_is_refused() -> None:
    """The pin is in the plan and in its file. Rows that are not cut otherwise are, in pieces."""
    graph = mlp(batch=8)
    plan = Planner(cluster(2), every_choice).plan(graph, "test", mesh={"tp": 2}, roles="tensor", pieces=4)
    assert (plan.execution.pieces, plan.asked.pieces) == (4, 4)
    assert Plan.from_json(plan.to_json()) == plan
    check_plan(plan, graph, every_choice)

    def by_hidden(node: Node, operands: Sequence[TensorType], blocked: Sequence[Choice] = ()) -> frozenset[Choice]:
        return every_choice(node, operands, blocked) - ({Split("_0")} if node.op == "linear" else set())

    with pytest.raises(PlanError, match=r"= linear\(\).*: the split '_0' into pieces is not certified; make"):
        check_plan(plan, graph, by_hidden)
    check_plan(replace(plan, execution=replace(plan.execution, pieces=1)), graph, by_hidden)


def test_what_a_run_asks_for_has_to_be_there() -> None:
    plan = planned(mlp())
    asking = replace(plan, execution=Execution(recompute={"nope.*": "full"}))
    with pytest.raises(PlanError, match=r"plan for 'test': .*nope"):
        check_plan(asking, mlp(), every_choice)


def test_microbatches_that_need_each_other_are_refused() -> None:
    """Of a loss that is no sum over the batch."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    w = b.leaf("w", "parameter", (16, 16), "float32", "block.w", grad=True)
    graph = b.graph([("loss", b.op("exp", b.op("sum", b.op("linear", x, w), dims=(0, 1), keepdim=False)))])
    plan, search = planned(graph), Planner(cluster(2), every_choice)
    check_plan(plan, graph, every_choice)
    cut = replace(plan, graph=search.solve(graph, Mesh.of(mb=2, dp=2), ("data",), "test").graph)
    with pytest.raises(PlanError, match=r"plan for 'test': exp.* the loss is not a sum or mean over the batch"):
        check_plan(cut, graph, every_choice)


def test_draws_in_another_order_are_refused() -> None:
    graph = with_dropout()
    first, second = (n for n in graph.nodes if n.op == "dropout")
    without = [n for n in graph.nodes if n is not first]
    at = without.index(second)
    reordered = Graph((*without[: at + 1], first, *without[at + 1 :]), graph.outputs).validate()
    orders = "in the order ['dropout 1', 'dropout 0'], by the model in the order ['dropout 0', 'dropout 1']"
    assert difference(reordered, graph) == f"random numbers are drawn {orders}"


def test_a_draw_made_twice_is_refused() -> None:
    graph = with_dropout()
    last = [n for n in graph.nodes if n.op == "dropout"][-1]
    at = graph.nodes.index(last) + 1
    doubled = Graph((*graph.nodes[:at], replace(last, name="again"), *graph.nodes[at:]), graph.outputs)
    assert "drawn in the order ['dropout 0', 'dropout 1', 'dropout 1']" in str(difference(doubled, graph))


def test_other_outputs_are_refused() -> None:
    graph = mlp()
    other = replace(graph, outputs=(*graph.outputs, ("running_mean", graph.outputs[0][1])))
    assert difference(other, graph) == "the plan has the outputs ['loss', 'running_mean'], the model ['loss']"


def test_another_batch_is_refused() -> None:
    graph = mlp()
    unused = replace(graph.nodes[0], name="y", attrs=_set(graph.nodes[0], "target", "y"))
    assert difference(replace(graph, nodes=(unused, *graph.nodes)), graph) == (
        "the plan reads the batch ['x', 'y'], the model ['x']"
    )


def _set(node: Node, key: str, value: object) -> tuple[tuple[str, object], ...]:
    return tuple((k, value if k == key else v) for k, v in node.attrs)


def joined(count: int) -> Graph:
    """So many values of unequal sizes joined, as dense blocks do."""
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 4), "float32", "x"), b.leaf("w", "parameter", (16, 4), "float32", "w", grad=True)
    piece = b.op("reshape", b.op("linear", x, w), shape=(8, 2, 8))
    smaller = b.op("slice", piece, dim=1, start=0, stop=1, step=1)
    whole = b.op("concat", smaller, *[piece] * (count - 1), dim=1)
    return b.graph([("loss", b.op("sum", whole, dims=(0, 1, 2), keepdim=False))])


def test_what_is_joined_of_many_has_a_certified_plan() -> None:
    graph, certified = joined(30), Certified()
    check_plan(Planner(cluster(4), certified).plan(graph, mesh=Mesh.of(dp=2, tp=2)), graph, certified)


def test_what_no_certificate_lets_run_is_refused_before_the_search() -> None:
    with pytest.raises(PlanError, match=r"= concat of 513 operands at .*: it has no certificate, not even"):
        Planner(cluster(4), Certified()).plan(joined(513), mesh=Mesh.of(dp=2, tp=2), compared=False)
