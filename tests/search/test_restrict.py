"""Roles of axes: what data, context and tensor parallelism may split."""

from __future__ import annotations

import pytest

from bench.decoders import Decoder, captured
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.planner import Planner
from shardwright.search.restrict import CONTEXT, DATA, TENSOR, batch_factors
from tests.search.graphs import cluster, every_choice

TINY = Decoder("llama", 1, 32, 4, 2, 48, 80)


@pytest.fixture(scope="module")
def llama() -> Graph:
    return captured(TINY, batch=4, seq=16, even=True)


def test_the_batch_and_the_sequence_are_followed_to_the_loss(llama: Graph) -> None:
    """Through projections, heads and the `[b, s, v] -> [(b s), v]` of the loss, where the sequence lies in blocks."""
    batch, sequence = batch_factors(llama), batch_factors(llama, 1)
    (embedding,), (loss,), (attention,) = (
        [n.name for n in llama.nodes if n.op == op] for op in ("embedding", "cross_entropy_sum", "sdpa")
    )
    assert (batch[embedding], sequence[embedding]) == ("_0", "_1")
    assert (batch[attention], sequence[attention]) == ("b0", "q")
    assert (batch[loss], sequence[loss]) == ("n0", "n0/4")


def test_context_parallelism_splits_the_sequence_and_gathers_keys(llama: Graph) -> None:
    mesh = Mesh.of(dp=2, cp=2, tp=2)
    graph = Planner(cluster(8), every_choice).solve(llama, mesh, (DATA, CONTEXT, TENSOR), "test").graph
    (attention,) = (n for n in graph.nodes if n.op == "sdpa")
    assert attention.split == ("b0", "q", "h")
    q, k, _ = (graph.types[name].layouts for name in attention.inputs)
    assert [str(x) for x in q] == ["S(0)", "S(2)", "S(1)"]
    assert [str(x) for x in k] == ["S(0)", "C", "S(1)"]
    linears = [n for n in graph.nodes if n.op == "linear"]
    assert {n.split[:2] for n in linears} == {("_0", "_1")}
    assert {n.split[2] for n in linears} == {"o", "i"}
    assert all(graph.types[p.name].layouts[1].kind == "R" for p in graph.leaves("parameter"))
