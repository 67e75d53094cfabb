"""What 8-bit matrix multiplications take beside themselves."""

from __future__ import annotations

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution

TOKENS, WIDTH = 8192, 4096


def twice_read() -> Graph:
    """An activation that two products read."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (TOKENS, WIDTH), "float32", "x")
    scale, w1, w2 = (
        b.leaf(n, "parameter", shape, "float32", n, grad=True)
        for n, shape in (("s", (WIDTH,)), ("w1", (WIDTH, WIDTH)), ("w2", (WIDTH, WIDTH)))
    )
    y = b.op("mul", x, scale)
    z = b.op("add", b.op("linear", y, w1), b.op("linear", y, w2))
    return b.graph([("loss", b.op("sum", z, dims=(0, 1), keepdim=False))])


def test_activations_are_cast_once_and_every_gradient_of_a_result() -> None:
    """Six bytes an element: read twice in 16 bits, written twice in 8."""
    cluster = Cluster.preset("dgx-h100", 1, 1)
    graph = twice_read()
    wide, narrow = (Steps(graph, cluster, Execution(precision=p)) for p in ("amp_bf16", "fp8"))
    cast_s = 6 * TOKENS * WIDTH / cluster.device.memory_bytes_per_s + cluster.device.kernel_s
    half, full = ([s for n, s in steps.costs.items() if graph.by_name[n].op == "linear"] for steps in (narrow, wide))
    matmul_s = [step.forward_s / 2 for step in full]
    extra = [step.forward_s - s for step, s in zip(half, matmul_s, strict=True)]
    assert extra == pytest.approx([cast_s, 0.0], abs=0.02 * cast_s)
    for step, other in zip(half, full, strict=True):
        assert step.backward_s - other.backward_s / 2 == pytest.approx(cast_s, rel=0.02)
        assert step.weight_s == pytest.approx(other.weight_s / 2, rel=0.02)
