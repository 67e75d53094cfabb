"""What lies between parts of a network: the residual stream, and not what tensor parallelism splits."""

from __future__ import annotations

from collections import Counter

from bench.accuracy import prepare
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.request.limited import residual
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice, mlp


def found(graph: Graph) -> Counter[str]:
    return Counter(graph.by_name[name].op for name in residual(graph))


def test_sums_that_skip_a_part_with_all_up_to_the_products_beside_them() -> None:
    assert found(blocks(layers=3)) == {"add": 3, "rms_norm": 3, "mul": 1, "sum": 1}
    assert not found(mlp())
    assert found(mlp(layers=3, residual=True)) == {"add": 2, "mul": 1, "sum": 1}
    gpt = prepare("gpt").captured.graph
    assert found(gpt) == {"add": 9, "dropout": 5, "layer_norm": 5}  # 4 sums that skip, 4 biases before them, positions


def test_a_bias_of_attention_skips_nothing() -> None:
    """T5 adds the positions of the first layer to the scores of each, which were made of the first layer too."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 8, 16), "float32", "x", grad=True)
    bias = b.leaf("bias", "input", (4, 8, 8), "float32", "bias", grad=True)
    w = b.leaf("w", "parameter", (16, 16), "float32", "w", grad=True)
    sums = list[str]()
    for _ in range(2):
        y = b.op("linear", x, w)
        scores = b.op("add", b.op("matmul", y, b.op("permute", y, dims=(0, 2, 1))), bias)
        x = b.op("add", x, b.op("linear", b.op("matmul", b.op("softmax", scores, dim=2), y), w))
        sums += [scores, x]
    graph = b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1, 2), keepdim=False))])
    assert residual(graph).isdisjoint(sums[::2])
    assert residual(graph).issuperset(sums[1::2])


def test_tensor_parallelism_without_the_sequence_leaves_norms_whole() -> None:
    """Megatron without `sequence_parallel`: each part ends with a sum of all devices, and norms see all of it."""
    planner = Planner(cluster(2, link_bytes_per_s=1e12, latency_s=1e-9), every_choice)
    for pins, kinds in (("no residual", {"R", "C"}), (None, {"S"})):
        plan = planner.plan(
            blocks(8, 64, seq=512), mesh=Mesh.of(tp=2), roles=("tensor",), pins=pins, compared=False, recompute="none"
        )
        norms = [plan.graph.types[n.name].layouts[0].kind for n in plan.graph.nodes if n.op == "rms_norm"]
        assert set(norms) <= kinds
        assert {n.split for n in plan.graph.nodes if n.op == "linear"} == {("o",), ("i",)}
