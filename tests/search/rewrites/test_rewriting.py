"""Rewrites of folded graphs, and which meshes are judged with them."""

from __future__ import annotations

from dataclasses import replace

from bench.plans import CERTIFIED, fast_links
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import difference
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Solver
from shardwright.search.request.restrict import CONTEXT, FREE, RING
from shardwright.search.rewrites.leaves import Leaves, Rewritten, expand
from shardwright.search.rewrites.replay import replay
from shardwright.search.rewrites.rewriting import Rewriter, applied
from shardwright.search.rewrites.splits import leaves
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.rules.catalogue import CATALOGUE
from tests.search.graphs import cluster, every_choice

RULES = {name: CATALOGUE[name] for name in ("sum_of_linears", "scale_of_scaled", "neg_of_neg")}


def layers(num: int) -> Graph:
    """Blocks, two of whose products could be one; what the next one reads has been negated twice."""
    b = GraphBuilder()
    x = b.op("linear", b.leaf("x", "input", (32, 16), "float32", "x"), weight(b, "stem"))
    halves = [b.op("full", shape=(), value=v, dtype="float32") for v in (0.5, 0.25)]
    for i in range(num):
        b.source = Source(f"layers.{i}")
        w = weight(b, f"layers.{i}.w")
        scaled = b.op("mul", b.op("mul", b.op("relu", x), halves[0]), halves[1])
        both = b.op("add", b.op("linear", b.op("tanh", scaled), w), b.op("linear", b.op("exp", x), w))
        x = b.op("neg", b.op("neg", b.op("tanh", both)))
    b.source = Source()
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])


def weight(b: GraphBuilder, name: str) -> str:
    return b.leaf(name, "parameter", (16, 16), "float32", name, grad=True)


def rewriter(graph: Graph, folded: Folded) -> Rewriter:
    return Rewriter(Solver(cluster(2), every_choice), graph, folded, RULES)


def test_a_folded_graph_is_rewritten_as_the_whole_one_is() -> None:
    graph, mesh = layers(6), Mesh.of(x=2)
    folded = fold(graph)
    assert folded.repeats == {"layers.0": 6}
    found, used = rewriter(graph, folded), set[str]()
    for part in leaves(folded.graph, folded.home):
        for step in expand(part.graph, list(RULES.values())):
            leaf = Rewritten(part, (step.step,), step.graph, 1.0)
            rewrites = list(found.in_all_blocks([leaf]))
            new = applied(folded, [leaf])
            assert difference(fold(replay(graph, rewrites, RULES, mesh)).graph, new.graph) is None
            assert set(new.home) <= set(new.graph.by_name)
            assert {new.times(n.name) for n in new.graph.nodes if n.source.module.startswith("layers")} == {6}
            assert all({tie.before, tie.after} <= set(new.graph.by_name) for tie in new.ties)
            assert len(rewrites) == 6
            used.add(step.step[0])
    assert used == set(RULES)


def test_a_plan_is_rewritten_in_turns_until_nothing_is_gained() -> None:
    graph, mesh = layers(6), Mesh.of(x=2)
    folded = fold(graph)
    found = rewriter(graph, folded)
    plain = found.solver.solve(folded, mesh, (FREE,), "plain")
    new = found.rewritten(plain)
    assert new is not None
    assert new.prediction.step_s < plain.prediction.step_s
    assert {step for rewrite in new.rewrites for step, _ in rewrite.steps} == set(RULES)
    whole = found.again_whole(new)
    assert whole.rewrites == new.rewrites
    assert difference(whole.graph.erased(), found.whole(new)) is None
    assert abs(whole.prediction.step_s / new.prediction.step_s - 1) < 1e-3
    assert found.rewritten(plain, needed_s=plain.prediction.step_s) is None


def test_meshes_that_cannot_win_are_not_judged() -> None:
    graph, mesh = layers(6), Mesh.of(x=2)
    found = rewriter(graph, fold(graph))
    plain = found.solver.solve(found.folded, mesh, (FREE,), "plain")
    slow = replace(plain, prediction=replace(plain.prediction, step_s=10 * plain.prediction.step_s), roles=("data",))
    unfit = replace(plain, fits=False, roles=("tensor",))
    new = list(found.best([slow, unfit, plain, plain], {}))
    assert [c.roles for c in new] == [plain.roles]
    likely = list(found.best([slow, plain], {id(slow): plain.prediction.step_s / 2}))
    assert likely[0].roles == slow.roles
    assert not list(Rewriter(found.solver, graph, found.folded, {}).best([plain], {}))


def test_places_are_counted_in_every_copy() -> None:
    graph = layers(3)
    found = rewriter(graph, Folded(graph))
    plain = found.solver.solve(found.folded, Mesh.of(x=2), (FREE,), "plain")
    assert not found.places
    assert found.rewritten(plain) is not None
    assert found.places.keys() == set(RULES)
    assert Leaves(Folded(graph), []).groups


def causal() -> Graph:
    """Attention of four heads, of which two share keys, between products with weights."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (2, 8, 16), "float32", "x")

    def heads(name: str, num: int) -> str:
        product = b.op("linear", x, b.leaf(name, "parameter", (8 * num, 16), "float32", name, grad=True))
        return b.op("permute", b.op("reshape", product, shape=(2, 8, num, 8)), dims=(0, 2, 1, 3))

    parts = heads("q", 4), heads("k", 2), heads("v", 2)
    y = b.op("sdpa", *parts, causal=True, scale=None)
    return b.graph([("loss", b.op("sum", b.op("mul", y, y), dims=(0, 1, 2, 3), keepdim=False))])


def test_attention_is_not_taken_apart_where_a_ring_is_asked_for() -> None:
    """Its parts would be in no ring, whatever they gain."""
    rules = {name: rule for name, rule in CATALOGUE.items() if "attention_in_parts" in name}
    left = dict[str, set[tuple[str, ...]]]()
    for role in (RING, CONTEXT):
        planner = Planner(fast_links(2), CERTIFIED, rules=rules)
        plan = planner.plan(causal(), mesh=Mesh.of(cp=2), roles=(role,), microbatches=1, compared=False)
        left[role] = {node.split for node in plan.graph.leaves("sdpa")}
    assert left == {RING: {("q@k/4",)}, CONTEXT: set()}
