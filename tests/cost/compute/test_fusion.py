"""What a compiler fuses, from graphs written by hand."""

from __future__ import annotations

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.compute.fusion import UNFUSED, Fusion, fuse, fusions
from shardwright.cost.compute.work import Passes, Work
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.tree.planner import Planner
from tests.search.graphs import every_choice

CLUSTER = Cluster.preset("dgx-h100", devices_per_node=1)
SIZE = 1 << 20
BYTES = 4.0 * SIZE


def chain() -> Graph:
    """linear, neg, exp, sum: exp keeps its result for backward, neg keeps nothing."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (SIZE // 64, 64), "float32", "x")
    w = b.leaf("w", "parameter", (64, 64), "float32", "w", grad=True)
    curved = b.op("exp", b.op("neg", b.op("linear", x, w)))
    graph = b.graph([("loss", b.op("sum", curved, dims=(0, 1), keepdim=False))])
    return Planner(CLUSTER, every_choice).solve(graph, Mesh.of(x=1), ("free",), "test").graph


def by_op(graph: Graph) -> dict[str, Fusion]:
    return {graph.by_name[name].op: fusion for name, fusion in fusions(graph).items()}


def test_a_chain_is_one_kernel() -> None:
    assert by_op(chain()) == {
        "neg": Fusion((), absorbed=True, unwritten=True),
        "exp": Fusion((0,), absorbed=True, unwritten=False),
        "sum": Fusion((0,), absorbed=False, unwritten=False),
    }


def test_what_others_read_too_is_written() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "parameter", (8, 8), "float32", "x", grad=True)
    negative = b.op("neg", x)
    product = b.op("linear", negative, negative)
    total = b.op("add", b.op("exp", negative), product)
    graph = b.graph([("loss", b.op("sum", total, dims=(0, 1), keepdim=False))])
    assert by_op(graph) == {
        "exp": Fusion((), absorbed=True, unwritten=False),
        "add": Fusion((0,), absorbed=True, unwritten=True),
        "sum": Fusion((0,), absorbed=False, unwritten=False),
    }


def test_traffic_that_stays_in_registers() -> None:
    work = Work("pointwise", (10,), 10.0, 100.0, "float32")
    passes = Passes((work,), (work,), gradients=0.5)
    assert fuse(passes, UNFUSED, (40.0, 40.0), 20.0) == passes
    inside = fuse(passes, Fusion((0,), absorbed=True, unwritten=True), (40.0, 40.0), 20.0)
    assert [w.num_bytes for w in (*inside.forward, *inside.backward)] == pytest.approx([40.0, 40.0])
    assert inside.gradients == 0.5
    assert fuse(passes, Fusion((0, 1), absorbed=True), (90.0, 90.0), 20.0).forward[0].num_bytes == 0


def test_what_is_computed_once_is_in_no_kernel_of_a_step() -> None:
    """A table of positions, whose logarithm is added to the batch: the addition reads it from memory."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (64,), "float32", "x")
    table = b.op("cast", b.op("arange", start=1, stop=65, step=1, dtype="int64"), dtype="float32")
    graph = b.graph([("y", b.op("neg", b.op("add", x, b.op("log", table))))])
    assert {graph.by_name[name].op: f.inside for name, f in fusions(graph).items()} == {"add": (), "neg": (0,)}


def test_compiled_steps_save_traffic_and_launches() -> None:
    graph = chain()
    eager, compiled = (
        {graph.by_name[n].op: s for n, s in Steps(graph, CLUSTER, Execution.of(compiled=c)).costs.items()}
        for c in (False, True)
    )
    rate, least = CLUSTER.device.memory_bytes_per_s, CLUSTER.device.kernel_s
    assert eager["neg"].forward_s == pytest.approx(max(2 * BYTES / rate + least, CLUSTER.device.op_overhead_s))
    assert compiled["neg"].forward_s == pytest.approx(BYTES / rate)
    assert compiled["exp"].forward_s == pytest.approx(BYTES / rate)
    assert compiled["linear"] == eager["linear"]
    times = [simulate(program(graph, CLUSTER, Execution.of(compiled=c))).step_s for c in (False, True)]
    assert times[1] < times[0]
