"""Cuts, leaves, and backtracking over algebraic rules on them."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import run_devices, run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan, difference
from shardwright.search.leaves import degrees, expand, replay
from shardwright.search.plan import Plan, Rewrite
from shardwright.search.planner import Planner
from shardwright.search.restrict import TENSOR
from shardwright.search.splits import cuts, leaves, transplant
from shardwright.substitutions.catalogue import CATALOGUE
from shardwright.substitutions.match import places
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


def test_cuts_are_what_every_path_passes() -> None:
    graph = mlp(layers=3, residual=True)
    chain = cuts(graph)
    assert chain[-1] == dict(graph.outputs)["loss"]
    assert all(a in graph.by_name for a in chain)
    inner = [n.name for n in graph.nodes if n.op == "relu"]
    assert inner[0] in chain
    assert not {inner[1], inner[2]} & set(chain), "inside a residual branch there is no cut"


def test_equal_blocks_have_equal_leaves() -> None:
    parts = leaves(stack(4))
    signatures = [part.signature for part in parts]
    assert len(set(signatures)) < len(signatures)
    assert all(part.graph.validate() for part in parts)


@pytest.mark.parametrize("blocks", [1, 3])
def test_transplanting_a_leaf_onto_itself_changes_nothing(blocks: int) -> None:
    graph = stack(blocks)
    for part in leaves(graph):
        assert difference(transplant(graph, part, part.graph), graph) is None


def test_every_rewrite_of_a_leaf_keeps_the_loss() -> None:
    graph = stack(2)
    tried = 0
    for part in leaves(graph):
        for _, new in expand(part.graph, list(CATALOGUE.values())):
            assert loss(transplant(graph, part, new)) == pytest.approx(loss(graph), rel=1e-9)
            tried += 1
    assert tried > 5


def plan_of(graph: Graph, rules: bool = True) -> Plan:
    return Planner(cluster(2), every_choice, rules=CATALOGUE if rules else None).plan(graph, "stack", mesh=Mesh.of(x=2))


def test_the_search_finds_the_cheaper_form_in_every_block_and_the_plan_proves_it() -> None:
    graph = stack(3)
    plain, plan = plan_of(graph, rules=False), plan_of(graph)
    assert plan.prediction.step_s < plain.prediction.step_s
    assert sum(n.op == "linear" for n in plan.graph.nodes) == 1 + 3
    assert len(plan.report.rewrites) == 3
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
        (Rewrite("", "end", (("add_commutes", 99),)), "rule 'add_commutes' has no match number 99; make the plan"),
    ],
)
def test_rewrites_that_do_not_apply_are_refused(rewrite: Rewrite, message: str) -> None:
    graph = stack(2)
    end = leaves(graph)[0].end
    where = Rewrite(rewrite.start, end if rewrite.end == "end" else rewrite.end, rewrite.steps)
    with pytest.raises(PlanError, match=message):
        replay(graph, [where], CATALOGUE, Mesh.of(x=2))


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
