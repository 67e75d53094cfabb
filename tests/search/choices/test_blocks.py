"""Fused projections: the search splits them in blocks, as a person would split q, k and v apart."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import Split
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph, Node, infer, make_attrs
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.layout import R
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.pcg.types import TensorType
from shardwright.search.check import uncertified
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified
from tests.search.graphs import cluster


def attention(batch: int = 4, length: int = 6, heads: int = 4, size: int = 8) -> Graph:
    """Attention whose q, k and v come from one projection with a bias."""
    b, width = GraphBuilder(), heads * size
    x = b.leaf("x", "input", (batch, length, width), "float32", "x")
    stem = b.leaf("stem", "parameter", (width,), "float32", "stem", grad=True)
    fused = b.leaf("fused", "parameter", (3 * width, width), "float32", "attn.fused", grad=True)
    bias = b.leaf("bias", "parameter", (3 * width,), "float32", "attn.bias", grad=True)
    out = b.leaf("out", "parameter", (width, width), "float32", "attn.out", grad=True)
    projected = b.op("add", b.op("linear", b.op("mul", x, stem), fused), bias)
    parts = [b.op("slice", projected, dim=2, start=i * width, stop=(i + 1) * width, step=1) for i in range(3)]
    split = [b.op("permute", b.op("reshape", p, shape=(batch, length, heads, size)), dims=(0, 2, 1, 3)) for p in parts]
    mixed = b.op("permute", b.op("sdpa", *split, causal=True, scale=None), dims=(0, 2, 1, 3))
    y = b.op("linear", b.op("reshape", mixed, shape=(batch, length, width)), out)
    return b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1, 2), keepdim=False))])


def test_the_projection_is_offered_in_three_blocks() -> None:
    graph = attention()
    wanted = blocked_choices(graph, constant_nodes(graph))
    (projection,) = [n.name for n in graph.nodes if n.op == "linear" and "fused" in n.inputs]
    assert "o/3" in wanted[projection]


def test_tensor_parallel_attention_is_megatrons_on_a_fused_weight() -> None:
    """Every device holds its heads' q, k and v; one all-reduce, no gathering of activations."""
    planner = Planner(cluster(2, link_bytes_per_s=1e9), Certified())
    graph = planner.solve(attention(), Mesh.of(tp=2), ("tensor",), "tp").graph
    layouts = {str(n.attr("target")): str(graph.types[n.name].layouts[0]) for n in graph.leaves("parameter")}
    assert layouts["attn.fused"] == "S(0,3)"
    assert layouts["attn.bias"] == "S(0,3)"
    assert layouts["attn.out"] == "S(1)"
    assert sum(n.op == "reduce" for n in graph.nodes) == 1
    assert not any(n.op == "combine" for n in graph.nodes)
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(dp=2, tp=2)], ids=str)
def test_it_computes_what_one_device_computes(mesh: Mesh) -> None:
    roles = ("data", "tensor")[-len(mesh) :]
    graph = Planner(cluster(mesh.num_devices), Certified()).solve(attention(), mesh, roles, "tp").graph
    rng = np.random.default_rng(0)
    leaves = {n.name: rng.normal(size=graph.types[n.name].shape) for n in graph.nodes if n.is_leaf}
    certified = Certified()
    assert uncertified(graph, certified) is None
    assert "the split 'o/3' on axis 'tp' is not certified" in str(
        uncertified(graph, lambda n, t, b=(): certified(n, t))
    )
    loss = dict(graph.outputs)["loss"]
    parallel = denote(run_devices(graph, leaves)[loss], graph.types[loss], mesh)
    assert float(parallel) == pytest.approx(float(run_serial(graph, leaves)[loss]), rel=1e-10)


def test_what_cannot_fall_into_blocks_is_refused() -> None:
    mesh = Mesh.of(tp=2)
    table = TensorType((12, 4), "float32", (), True)
    index = TensorType((5,), "int64")
    certified = Certified()
    lookup = Node("e", "embedding", ("w", "i"), make_attrs(padding_idx=None), (Split("v", 2),))
    assert "v/2" not in certified(lookup, [table, index], (Split("v", 2), Split("h", 2)))
    reason = certified.reason(lookup, [table, index], Split("v", 2))
    assert reason == "embedding needs consecutive parts; it is not split in blocks"
    held = [t._replace(layouts=(R,)) for t in (table, index)]
    with pytest.raises(LayoutError, match="embedding needs consecutive parts along 'v'; split it without blocks"):
        infer(lookup, held, mesh)


def test_experts_that_no_axis_divides_are_split_by_their_hidden_units() -> None:
    """Each device has its units of gate and value, which one parameter holds, transposed: `S(1,2)` of it."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (12, 8), "float32", "x")
    index, weights = (
        b.leaf("index", "input", (12, 2), "int64", "index"),
        b.leaf("weights", "input", (12, 2), "float32", "weights"),
    )
    up = b.leaf("up", "parameter", (3, 32, 8), "float32", "up", grad=True)
    down = b.leaf("down", "parameter", (3, 8, 16), "float32", "down", grad=True)
    turned = [b.op("permute", name, dims=(0, 2, 1)) for name in (up, down)]
    y = b.op("experts", x, index, weights, *turned, activation="silu")
    graph = b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1), keepdim=False))])
    found = Planner(cluster(4), Certified()).solve(graph, Mesh.of(tp=4), ("tensor",), "tp").graph
    assert next(found.leaves("experts")).split == ("f",)
    layouts = [str(found.types[node.name].layouts[0]) for node in found.leaves("parameter")]
    assert layouts == ["S(1,2)", "S(2)"]
