"""Roles of axes: what data, context and tensor parallelism may split."""

from __future__ import annotations

import pytest

from bench.decoders import Decoder, captured
from bench.plans import CERTIFIED
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.choice import COPIED, WHOLE
from shardwright.pcg.graph import OPAQUE, Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import fused_moves
from shardwright.planning import certified_choices
from shardwright.search.request.limits import NO_LIMITS
from shardwright.search.request.restrict import (
    CONTEXT,
    DATA,
    EXPERT,
    RING,
    SEQUENCE,
    TENSOR,
    ULYSSES,
    ZERO,
    batch_factors,
    role_restriction,
)
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice, mixture

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


def test_ulysses_splits_attention_by_heads_and_all_else_by_sequence(llama: Graph) -> None:
    """Queries, keys, values and the result go by all-to-all; norms stay on the sequence."""
    graph = Planner(cluster(4), every_choice).solve(llama, Mesh.of(dp=2, sp=2), (DATA, ULYSSES), "test").graph
    (attention,) = (n for n in graph.nodes if n.op == "sdpa")
    assert attention.split == ("b0", "h")
    others = [graph.types[n.name].layouts for n in graph.nodes if n.op in ("linear", "rms_norm", "embedding", "silu")]
    assert {tuple(map(str, layouts)) for layouts in others} == {("S(0)", "S(1)")}
    moves = [(move.axis, move.before.dim, move.after.dim) for _, _, move in fused_moves(graph)
             if move.kind.function == "all_to_all"]  # fmt: skip
    assert set(moves) == {(1, 1, 2), (1, 2, 1)}


def test_ulysses_splits_attention_by_sequence_where_heads_do_not_divide(llama: Graph) -> None:
    """Four query heads of two key heads; eight devices have 2 positions each."""
    graph = Planner(cluster(8), every_choice).solve(llama, Mesh.of(sp=8), (ULYSSES,), "test").graph
    assert {n.split for n in graph.nodes if n.op == "sdpa"} == {("q",)}


def test_a_ring_splits_keys_by_sequence_too_where_no_mask_is_in_the_way(llama: Graph) -> None:
    """Along an axis that divides them; nothing is gathered there. Elsewhere it is context parallelism."""
    for size, own in ((2, "q@k"), (8, "q@k"), (3, "R")):
        planner, mesh = Planner(cluster(2 * size), CERTIFIED), Mesh.of(dp=2, cp=size)
        graph = planner.solve(llama, mesh, (DATA, RING), "test").graph
        (attention,) = (n for n in graph.nodes if n.op == "sdpa")
        assert attention.split == ("b0", own)
        assert {str(graph.types[name].layouts[1]) for name in attention.inputs} == {"R" if own == "R" else "S(2)"}


def test_parameters_under_sequence_parallelism_may_be_stored_in_slices(llama: Graph) -> None:
    for role in SEQUENCE:
        for pin, kind in (("*=whole", "R"), ("*=gathered", "S")):
            plan = Planner(cluster(2), every_choice).plan(
                llama, mesh=Mesh.of(x=2), roles=(role,), pins=pin, recompute="none", compared=False
            )
            assert {plan.graph.types[p.name].layouts[0].kind for p in plan.graph.leaves("parameter")} == {kind}, role
            assert {n.split for n in plan.graph.nodes if n.op == "linear"} == {("_1",)}, role


def test_an_axis_of_data_splits_nothing_of_a_single_example() -> None:
    """Nor does one that stores slices: what has no factor of the batch is not what penalties are made of."""
    for role in (DATA, ZERO):
        graph = Planner(cluster(4), every_choice).solve(blocks(1, seq=16), Mesh.of(dp=4), (role,), "test").graph
        assert {n.split for n in graph.nodes if n.op in ("linear", "rms_norm", "relu")} <= {("R",), ("C",)}


def test_an_operator_without_a_row_is_gathered_around() -> None:
    """What comes after it is split along the batch again, and so is the loss."""
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (4, 8), "float32", "x"), b.leaf("w", "parameter", (8, 8), "float32", "w", grad=True)
    attrs = {"args": (("$", 0),), "kwargs": (), "result": 0, "shape": (4, 8), "dtype": "float32"}
    whole = b.op(OPAQUE, b.op("linear", x, w), target="aten.erfinv.default", **attrs)
    after = b.op("linear", whole, w)
    graph = b.graph([("loss", b.op("sum", b.op("mul", after, after), dims=(0, 1), keepdim=False))])
    plan = Planner(cluster(2), every_choice).solve(graph, Mesh.of(dp=2), (DATA,), "test")
    assert {n.op: n.split for n in plan.graph.nodes if n.split} == {"linear": ("_0",), "mul": ("_0",), "sum": ("d0",)}
    assert str(plan.graph.types[whole].layouts[0]) == "R"


def test_expert_parallelism_sends_tokens_and_is_data_parallelism_elsewhere() -> None:
    """Experts are stored as they are used, where a cast or a view leads to them; where they do not divide, whole."""
    graph = Planner(cluster(8), certified_choices()).solve(mixture(), Mesh.of(dp=2, ep=4), (ZERO, EXPERT), "test").graph
    (network,) = graph.leaves("experts")
    assert network.split == ("_0", "e>_0")
    stored = {str(p.attr("target")): str(graph.types[p.name].layouts[1]) for p in graph.leaves("parameter")}
    assert stored == {"first": "R", "second": "R", "router": "R", "up": "S(0)", "down": "S(0)"}
    assert {n.split[1] for n in graph.nodes if n.op in ("linear", "mul", "softmax")} <= {"_0", "d0"}
    graph = Planner(cluster(16), certified_choices()).solve(mixture(), Mesh.of(ep=16), (EXPERT,), "test").graph
    assert next(graph.leaves("experts")).split == ("_0",)
    both = Planner(cluster(16), certified_choices()).solve(mixture(), Mesh.of(a=4, b=4), (EXPERT, EXPERT), "test").graph
    assert set(next(both.leaves("experts")).split) == {"e>_0", "_0"}  # all 16 have tokens, though not experts


def test_the_search_sends_tokens_where_that_is_less_than_what_weights_would_send() -> None:
    """Of large experts; of small ones gradients are summed. The sum that is minimized is the prediction."""
    for hidden, split in ((1024, "e>_0"), (2, "_0")):
        graph = mixture(tokens=4096, hidden=hidden, experts=16, used=1, dense=2048)
        found = Planner(cluster(8), certified_choices()).solve(graph, Mesh.of(x=8), ("free",), "test")
        assert next(found.graph.leaves("experts")).split == (split,), hidden
        assert found.prediction.serial_s == pytest.approx(found.solved[1].objective, rel=2e-3), hidden


def test_keys_that_heads_share_are_gathered_before_they_are_repeated() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (2, 8, 16), "float32", "x")
    w = b.leaf("w", "parameter", (8, 16), "float32", "w", grad=True)
    keys = b.op("permute", b.op("reshape", b.op("linear", x, w), shape=(2, 8, 2, 4)), dims=(0, 2, 1, 3))
    grouped = b.op("expand", b.op("reshape", keys, shape=(2, 2, 1, 8, 4)), shape=(2, 2, 3, 8, 4))
    repeated = b.op("reshape", grouped, shape=(2, 6, 8, 4))
    graph = b.graph([("loss", b.op("sum", repeated, dims=(0, 1, 2, 3), keepdim=False))])
    for role in SEQUENCE:
        allowed = role_restriction(graph, (role,), (2,))
        whole = {n.name for n in graph.nodes if not n.is_leaf and n.op != "sum" and allowed(n, 0, COPIED)}
        assert whole == {grouped, repeated}
        assert not any(allowed(graph.by_name[name], 0, WHOLE) for name in whole)
    assert not role_restriction(graph, (DATA,), (2,))(graph.by_name[grouped], 0, COPIED)


def test_buffers_that_stand_for_each_other_are_told_apart_by_nothing() -> None:
    """They are folded with their blocks, as DeepSeek-V3's corrections of scores are."""
    b = GraphBuilder()
    for name in ("a", "b"):
        b.leaf(name, "buffer", (4,), "float32", name)
    graph = b.graph([("loss", b.op("sum", b.op("mul", "a", "b"), dims=(0,), keepdim=False))])
    assert not NO_LIMITS.tell_apart(graph, {"b": "a"})
