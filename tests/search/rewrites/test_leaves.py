"""Leaves, and backtracking over algebraic rules on them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import run_devices, run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan, difference
from shardwright.search.plan import Plan, Rewrite
from shardwright.search.request.restrict import TENSOR
from shardwright.search.rewrites.leaves import expand
from shardwright.search.rewrites.replay import degrees, replay
from shardwright.search.rewrites.splits import MOST_OPERATORS, between, leaves, signature, transplanted
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.match import places
from shardwright.substitutions.rules.catalogue import CATALOGUE
from tests.search.graphs import cluster, every_choice, mlp


def stack(blocks: int) -> Graph:
    """Blocks in which the same weight multiplies two tensors that are then added: one product would do."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (32, 16), "float32", "x")
    stem = b.leaf("stem", "parameter", (16, 16), "float32", "stem", grad=True)
    x = b.op("linear", x, stem)
    for i in range(blocks):
        w = b.leaf(f"w{i}", "parameter", (16, 16), "float32", f"blocks.{i}.w", grad=True)
        left, right = b.op("tanh", b.op("relu", x)), b.op("exp", b.op("tanh", x))
        x = b.op("relu", b.op("tanh", b.op("add", b.op("linear", left, w), b.op("linear", right, w))))
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])


def values(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n.name: rng.normal(size=graph.types[n.name].shape) for n in graph.nodes if n.is_leaf}


def loss(graph: Graph) -> float:
    return float(run_serial(graph, values(graph))[dict(graph.outputs)["loss"]])


def statistics(layers: int = 2) -> Graph:
    """Layers without a value that all paths pass, whose sums are results of the model, as batch norm's are."""
    b, outputs = GraphBuilder(), list[tuple[str, str]]()
    x = b.leaf("x", "input", (32, 16), "float32", "x")
    stem = b.leaf("stem", "parameter", (16, 16), "float32", "stem", grad=True)
    left, right = b.op("relu", x), b.op("linear", x, stem)
    for i in range(layers):
        w = b.leaf(f"w{i}", "parameter", (16, 16), "float32", f"w{i}", grad=True)
        c, d = (b.op("full", shape=(), value=v, dtype="float32") for v in (0.5, 0.25))
        left, right = b.op("linear", left, w), b.op("exp", b.op("mul", b.op("mul", right, c), d))
        outputs.append((f"sum{i}", b.op("sum", left, dims=(0,), keepdim=False)))
        left = b.op("add", b.op("relu", left), right)
    loss = b.op("sum", b.op("mul", left, right), dims=(0, 1), keepdim=False)
    return b.graph([("loss", loss), *outputs])


def results(graph: Graph) -> dict[str, np.ndarray]:
    found = run_serial(graph, values(graph))
    return {key: np.asarray(found[name]) for key, name in graph.outputs}


def assert_same_results(graph: Graph, expected: Graph) -> None:
    found = results(graph)
    for key, value in results(expected).items():
        np.testing.assert_allclose(found[key], value, rtol=1e-9)


def test_leaves_have_every_operator_once_and_as_many_results_as_are_read() -> None:
    for graph in (stack(12), statistics(12), mlp(layers=3, residual=True)):
        parts = leaves(graph)
        operators = [name for part in parts for name in part.operators]
        assert len(operators) == len(set(operators))
        assert {n.name for n in graph.nodes if not n.is_leaf and n.name not in constant_nodes(graph)} <= set(operators)
        assert all(len(part.operators) <= MOST_OPERATORS for part in parts)
        assert all(between(graph, part.starts, part.ends) == part and part.graph.validate() for part in parts)
    several = [part for part in leaves(statistics(12)) if len(part.ends) > 2]
    assert several
    assert all(name in part.ends for part in several for _, name in part.graph.outputs)


def test_leaves_end_where_few_values_pass_and_with_their_block() -> None:
    assert all(len(part.ends) == 1 for part in leaves(stack(20)))
    graph = stack(6)
    home = {n.name: "in" if i % 2 else "" for i, n in enumerate(n for n in graph.nodes if not n.is_leaf)}
    assert all(len({home[name] for name in part.operators}) == 1 for part in leaves(graph, home))


def named(graph: Graph, op: str) -> list[str]:
    return [node.name for node in graph.nodes if node.op == op]


def test_parts_of_equal_blocks_have_equal_signatures() -> None:
    graph = stack(4)
    sums = named(graph, "add")
    parts = [between(graph, (start,), (end,)) for start, end in pairwise(sums)]
    assert len({signature(part.graph) for part in parts if part is not None}) == 1 < sum(map(bool, parts))
    assert signature(graph) != signature(stack(3))


def test_what_something_outside_reads_is_an_end() -> None:
    graph = stack(2)
    first, second = named(graph, "linear")[1:3]
    assert between(graph, (), (second,)) is None
    both = between(graph, (), (first, second))
    assert both is not None
    assert {first, second} <= both.operators


def test_transplanting_leaves_onto_themselves_changes_nothing() -> None:
    for graph in (stack(1), stack(3), statistics()):
        found = transplanted(graph, [(part, part.graph) for part in leaves(graph)])
        assert difference(found.graph, graph) is None
        assert not found.instead
        assert list(found.added) == [part.operators for part in leaves(graph)]


def test_every_rewrite_of_a_leaf_keeps_all_results() -> None:
    for graph in (stack(2), statistics()):
        tried = 0
        for part in leaves(graph):
            for step in expand(part.graph, list(CATALOGUE.values())):
                assert_same_results(transplanted(graph, [(part, step.graph)]).graph, graph)
                tried += 1
        assert tried > 5


def test_an_end_that_is_there_already_is_read_where_it_is() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 4), "float32", "x", grad=True)
    y = b.op("neg", b.op("neg", b.op("neg", b.op("neg", b.op("exp", x)))))
    graph = b.graph([("loss", b.op("sum", y, dims=(0, 1), keepdim=False)), ("again", y)])
    _, second, _, fourth = named(graph, "neg")
    rewrites = [Rewrite(second, fourth, (("neg_of_neg", 0),))]
    new = replay(graph, rewrites, CATALOGUE, Mesh.of(x=2))
    assert [n.op for n in new.nodes] == ["input", "exp", "neg", "neg", "sum"]
    assert_same_results(new, graph)
    (start,) = named(graph, "exp")
    rewrites = [Rewrite(start, second, (("neg_of_neg", 0),)), Rewrite(second, fourth, (("neg_of_neg", 0),))]
    assert [n.op for n in replay(graph, rewrites, CATALOGUE, Mesh.of(x=2)).nodes] == ["input", "exp", "sum"]
    assert_same_results(replay(graph, rewrites, CATALOGUE, Mesh.of(x=2)), graph)


def test_what_nothing_reads_does_not_keep_a_leaf_from_being_rewritten() -> None:
    graph = statistics()
    plain, plan = (
        Planner(cluster(2), every_choice, rules=rules).plan(graph, "statistics", mesh=Mesh.of(x=2))
        for rules in ({}, CATALOGUE)
    )
    assert plan.prediction.step_s < plain.prediction.step_s
    (rewrite,) = plan.report.rewrites
    assert len(rewrite.end.split()) >= 3
    check_plan(Plan.from_json(plan.to_json()), graph, every_choice, CATALOGUE)
    assert_same_results(plan.graph.erased(), graph)


def plan_of(graph: Graph, rules: bool = True) -> Plan:
    return Planner(cluster(2), every_choice, rules=CATALOGUE if rules else None).plan(graph, "stack", mesh=Mesh.of(x=2))


def test_the_search_finds_the_cheaper_form_in_every_block_and_the_plan_proves_it() -> None:
    graph = stack(3)
    plain, plan = plan_of(graph, rules=False), plan_of(graph)
    assert plan.prediction.step_s < plain.prediction.step_s
    assert sum(n.op == "linear" for n in plan.graph.nodes) == 1 + 3
    assert [step for rewrite in plan.report.rewrites for step, _ in rewrite.steps] == ["sum_of_linears"] * 3
    check_plan(plan, graph, every_choice, CATALOGUE)
    assert Plan.from_json(plan.to_json()) == plan
    assert loss(plan.graph.erased()) == pytest.approx(loss(graph), rel=1e-9)


def test_a_plan_whose_rule_is_not_certified_is_refused() -> None:
    graph = stack(2)
    plan = plan_of(graph)
    with pytest.raises(PlanError, match="is not certified here; make the plan again"):
        check_plan(plan, graph, every_choice, {})


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (Rewrite("", "nowhere", ()), "the model has no such part; make the plan again"),
        (Rewrite("", "", ()), "the model has no such part; make the plan again"),
        (Rewrite("", "end", ()), "another one has operators of it; make the plan again"),
        (Rewrite("", "end", (("add_commutes", 99),)), "rule 'add_commutes' has no match number 99; make the plan"),
    ],
)
def test_rewrites_that_do_not_apply_are_refused(rewrite: Rewrite, message: str) -> None:
    graph = stack(2)
    end = leaves(graph)[0].ends[0]
    where = Rewrite(rewrite.start, end if rewrite.end == "end" else rewrite.end, rewrite.steps)
    with pytest.raises(PlanError, match=message):
        replay(graph, [where, *[where] * (not rewrite.steps)], CATALOGUE, Mesh.of(x=2))


def classifier(classes: int = 64) -> Graph:
    """Logits of many classes from few features, so many that gathering them costs more than all else."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (16, 4), "float32", "x")
    targets = b.leaf("targets", "input", (16,), "int64", "targets")
    w = b.leaf("w", "parameter", (classes, 4), "float32", "w", grad=True)
    loss = b.op("cross_entropy_sum", b.op("linear", x, w), targets, ignore_index=-100, label_smoothing=0.0)
    return b.graph([("loss", loss)])


def test_parameters_are_chosen_from_the_axes_and_their_products() -> None:
    assert degrees(Mesh.of(x=2, y=4)) == (2, 4, 8)
    assert degrees(Mesh.of(x=1)) == ()
    rule = CATALOGUE["cross_entropy_in_parts"]
    sizes = [match.sizes["k"] for match in places(rule, classifier(), degrees(Mesh.of(x=2, y=4)))]
    assert sizes == [2, 4, 8]
    assert len(places(rule, classifier(classes=12), degrees(Mesh.of(x=2, y=4)))) == 2


@pytest.mark.parametrize("mesh", [Mesh.of(x=4), Mesh.of(x=2, y=2)], ids=str)
def test_a_plan_with_a_parameter_is_replayed_from_its_mesh(mesh: Mesh) -> None:
    graph = classifier()
    links = cluster(4, link_bytes_per_s=1e6, latency_s=0.0)
    roles = (TENSOR,) * len(mesh)
    plain, plan = (
        Planner(links, every_choice, rules=rules).plan(graph, "classifier", mesh=mesh, roles=roles)
        for rules in ({}, CATALOGUE)
    )
    assert plan.prediction.step_s < plain.prediction.step_s
    steps = [step[0] for rewrite in plan.report.rewrites for step in rewrite.steps]
    assert steps[0] == "cross_entropy_in_parts"
    assert set(steps[1:]) <= {"maximum_in_blocks"}  # one stage more for the second axis
    check_plan(Plan.from_json(plan.to_json()), graph, every_choice, CATALOGUE)
    numbers = {
        "x": np.ones((16, 4)),
        "w": np.arange(256.0).reshape(64, 4) % 7,
        "targets": np.array([-100, *range(4, 64, 4)]),
    }
    expected = run_serial(graph, numbers)[dict(graph.outputs)["loss"]]
    found = run_devices(plan.graph, numbers)[dict(plan.graph.outputs)["loss"]]
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6)


def test_a_rewrite_that_moves_a_draw_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    w = b.leaf("w", "parameter", (16, 16), "float32", "w", grad=True)
    left, right = b.op("dropout", x, p=0.5), b.op("dropout", b.op("relu", x), p=0.5)
    y = b.op("add", b.op("linear", left, w), b.op("linear", right, w))
    graph = b.graph([("loss", b.op("sum", y, dims=(0, 1), keepdim=False))])
    rules = list(CATALOGUE.values())
    assert list(expand(graph, rules))
    first, second = (graph.by_name[name] for name in (left, right))
    inputs = [node for node in graph.nodes if node.name in {*second.inputs, x}]
    moved = [*inputs, second, first, *(node for node in graph.nodes if node not in (*inputs, first, second))]
    swapped = Graph(tuple(moved), graph.outputs).validate()
    monkeypatch.setattr("shardwright.search.rewrites.leaves.apply", lambda *_: swapped)
    assert not list(expand(graph, rules))
