"""The plan of another batch over stored parameters: rows are added where devices cannot share those of the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan, stored
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.reshaped import best_together, reshaped
from shardwright.substitutions.equations import Equation
from tests.each import each
from tests.search.graphs import cluster, every_choice

RULES: dict[str, Equation] = {}


def net(rows: int, width: int = 1024) -> Graph:
    """Two wide linears with dropout between them, and the mean of all squares."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (rows, 64, 8), "float64", "x")
    w = b.leaf("w", "parameter", (width, 8), "float64", "w", grad=True)
    v = b.leaf("v", "parameter", (width, width), "float64", "v", grad=True)
    h = b.op("linear", b.op("dropout", b.op("relu", b.op("linear", x, w)), p=0.1), v)
    squares = b.op("sum", b.op("mul", h, h), dims=(0, 1, 2), keepdim=False)
    return b.graph([("loss", b.op("mul", squares, 1 / (rows * 64 * width)))])


def first(devices: int, role: str = "zero", microbatches: int = 1, memory_bytes: int = 2**34) -> Plan:
    mesh = Mesh.of(x=devices)
    planner = Planner(cluster(devices, memory_bytes=memory_bytes), every_choice)
    return planner.plan(net(32), "test", mesh=mesh, roles=(role,), microbatches=microbatches)


@each("devices, rows, microbatches, more", [(4, 31, 1, 32), (4, 3, 1, 4), (2, 21, 2, 24), (4, 32, 1, 0), (2, 6, 1, 0)])
def test_rows_are_added_where_devices_could_not_share_them(
    devices: int, rows: int, microbatches: int, more: int
) -> None:
    graph = net(rows)
    plan = reshaped(first(devices, microbatches=microbatches), graph, every_choice, RULES)
    check_plan(plan, graph, every_choice, RULES)
    assert plan.report.rows == ((rows, more) if more else ())
    linears = [plan.graph.types[n.name].layouts[-1] for n in plan.graph.nodes if n.op == "linear"]
    assert all(layout.is_shard and layout.dim == 0 for layout in linears)
    assert Plan.from_json(plan.to_json()).report == plan.report


def test_a_parameter_that_the_plan_does_not_read_is_whole() -> None:
    b = GraphBuilder()
    x, w, own = (
        b.leaf("x", "input", (32, 64, 8), "float64", "x"),
        *(b.leaf(name, "parameter", (1024, 8), "float64", name, grad=True) for name in ("w", "own")),
    )
    h = b.op("mul", b.op("linear", x, w), b.op("linear", x, own))
    graph = b.graph([("loss", b.op("sum", h, dims=(0, 1, 2), keepdim=False))])
    plan = reshaped(first(4), graph, every_choice, RULES)
    assert stored(plan.graph) == {"w": (S(0),), "own": (R,)}


def test_a_larger_batch_has_more_examples_in_a_microbatch_only_where_it_fits() -> None:
    graph = net(128)
    large = reshaped(first(4), graph, every_choice, RULES)
    assert large.mesh.num_microbatches == 1
    memory_bytes = large.prediction.memory.total_bytes
    small = reshaped(first(4, memory_bytes=memory_bytes), graph, every_choice, RULES)
    assert small.mesh.num_microbatches == 4
    assert small.prediction.memory.total_bytes < memory_bytes


def test_devices_compute_what_one_does() -> None:
    graph, rng = net(3), np.random.default_rng(0)
    plan = reshaped(first(4), graph, every_choice, RULES)
    values = {n.name: rng.standard_normal(graph.types[n.name].shape) for n in graph.nodes if n.is_leaf}
    found = run_devices(plan.graph, {n.name: values[str(n.attr("target"))] for n in plan.graph.nodes if n.is_leaf})
    loss = plan.graph.loss
    one = denote(found[loss], plan.graph.types[loss], plan.mesh)
    np.testing.assert_allclose(one, run_serial(graph, values)[graph.loss], rtol=1e-9)


@each("rows", [(31, 4096), (31, 31), (7, 8), (31,)])
def test_other_numbers_of_rows_are_refused(rows: tuple[int, ...]) -> None:
    graph = net(31)
    plan = reshaped(first(4), graph, every_choice, RULES)
    with pytest.raises(PlanError, match="expected inputs of"):
        check_plan(replace(plan, report=replace(plan.report, rows=rows)), graph, every_choice, RULES)


def test_parameters_are_stored_for_the_least_sum_of_weighted_steps() -> None:
    graphs = [net(rows, width=128) for rows in (4, 64)]
    planner = Planner(cluster(4, link_bytes_per_s=1e8), every_choice)
    own = [planner.plan(graph, "test", mesh=Mesh.of(x=4)) for graph in graphs]
    rows = [[plan if plan is p else reshaped(plan, g, every_choice, RULES) for p, g in zip(own, graphs, strict=True)]
            for plan in own]  # fmt: skip
    steps = [[plan.prediction.step_s for plan in row] for row in rows]
    chosen = set[int]()
    for weights in ((1.0, 1e-6), (1.0, 1.0), (1e-6, 1.0)):
        shapes = list(zip(own, graphs, weights, strict=True))
        found = best_together(shapes, every_choice, RULES)
        assert len({tuple(sorted(stored(plan.graph).items())) for plan in found}) == 1
        sums = [sum(w * s for w, s in zip(weights, row, strict=True)) for row in steps]
        total = sum(w * plan.prediction.step_s for w, plan in zip(weights, found, strict=True))
        assert total == pytest.approx(min(sums))
        chosen.add(sums.index(min(sums)))
    assert chosen == {0, 1}  # each shape is best served by its own storage
