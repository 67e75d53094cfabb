"""Balanced rings: which part of a graph lies in stripes, what cannot, and that the faster plan is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from bench.plans import CERTIFIED, fast_links
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.graph import Graph, make_attrs
from shardwright.pcg.interpret import run_devices, run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import difference, uncertified
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.striping import balanced, in_stripes, unbalanced
from shardwright.search.tree.planner import Planner
from tests.lowering.parallelize import parallelize

SEQ = 8


def model(seq: int = SEQ, *, causal: bool = True) -> Graph:
    return towers((seq, causal))


def towers(*each: tuple[int, bool]) -> Graph:
    """For each length, causal or not, attention of a batch of tokens behind a product and a dropout; a sum of all."""
    b, sums = GraphBuilder(), list[str]()
    for number, (seq, causal) in enumerate(each):
        x = b.leaf(f"x{number}", "input", (2, seq, 4), "float32", f"x{number}")
        w = b.leaf(f"w{number}", "parameter", (4, 4), "float32", f"w{number}", grad=True)
        heads = b.op("reshape", b.op("linear", x, w), shape=(2, seq, 2, 2))
        q = b.op("dropout", b.op("permute", heads, dims=(0, 2, 1, 3)), p=0.5)
        y = b.op("permute", b.op("sdpa", q, q, q, causal=causal, scale=None), dims=(0, 2, 1, 3))
        flat = b.op("reshape", b.op("cos", y), shape=(2 * seq, 4))
        sums.append(b.op("sum", flat, dims=(0, 1), keepdim=False))
    return b.graph([("loss", reduce(lambda x, y: b.op("add", x, y), sums))])


def ringed(graph: Graph, mesh: Mesh) -> Graph:
    """The layouts as they are found, which are of consecutive positions."""
    solver = Planner(fast_links(mesh.num_devices), CERTIFIED).solver
    return solver.fastest_layouts(Folded(graph), mesh, ("ring",))


def splits(graph: Graph, op: str) -> set[tuple[str, ...]]:
    return {node.split for node in graph.nodes if node.op == op}


@pytest.mark.parametrize("size", [2, 4])
def test_all_that_lies_with_the_queries_is_in_stripes(size: int) -> None:
    """Also a dimension in which the batch and the sequence are one; and it denotes what it did."""
    graph = ringed(model(), Mesh.of(cp=size))
    (part,) = unbalanced(graph)
    assert (part.axis, blocks := part.blocks) == (0, SEQ // size)
    found = in_stripes(graph, part)
    assert found is not None
    assert list(unbalanced(found)) == []
    assert splits(found, "sdpa") == {(f"q@k/{blocks}",)}
    assert {str(found.types[n.name].layouts[0]) for n in found.nodes if n.op == "cos"} == {f"S(1,{blocks})"}
    assert {str(found.types[n.name].layouts[0]) for n in found.nodes if n.op == "linear"} == {f"S(1,{blocks})"}
    assert difference(found.erased(), graph.erased()) is None
    assert uncertified(found, CERTIFIED) is None
    rng = np.random.default_rng(0)
    leaves = {n.name: rng.standard_normal(graph.types[n.name].shape) for n in graph.nodes if n.is_leaf}
    whole = run_serial(erased := graph.erased(), leaves)[erased.loss]
    assert np.allclose(run_devices(found, leaves)[found.loss], whole)


def test_one_device_has_nothing_to_balance() -> None:
    graph = ringed(model(), Mesh.of(cp=1))
    assert splits(graph, "sdpa") == {("q@k",)}
    assert list(unbalanced(graph)) == []


def test_what_cannot_lie_in_stripes() -> None:
    """With an axis that shares the sequence; with values that are stored in parts."""
    solver = Planner(fast_links(4), CERTIFIED).solver
    shared = solver.fastest_layouts(Folded(model()), Mesh.of(cp=2, sp=2), ("ring", "ulysses"))
    assert [in_stripes(shared, part) for part in unbalanced(shared)] == [None]
    graph = ringed(model(), Mesh.of(cp=2))
    cut = next(n for n in graph.nodes if n.op == "partition" and n.inputs == ("x0",))
    stored = [replace(n, attrs=make_attrs(**{**dict(n.attrs), "layouts": ("S(1)",)})) if n.name == "x0"
              else replace(n, inputs=tuple("x0" if i == cut.name else i for i in n.inputs))
              for n in graph.nodes if n is not cut]  # fmt: skip
    graph = replace(graph, nodes=tuple(stored)).validate()
    assert [in_stripes(graph, part) for part in unbalanced(graph)] == [None]


def test_towers_of_unlike_lengths_are_balanced_each() -> None:
    graph = ringed(towers((SEQ, True), (3 * SEQ, True), (2 * SEQ, False)), Mesh.of(cp=2))
    assert splits(graph, "sdpa") == {("q@k",)}
    found = balanced(graph, CERTIFIED)
    assert [n.split for n in found.nodes if n.op == "sdpa"] == [("q@k/4",), ("q@k/12",), ("q@k",)]
    assert difference(found.erased(), graph.erased()) is None


def test_uneven_positions_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"sdpa counts positions along 'q', and split \(q@k/2\) gives a device"):
        parallelize(model(), Mesh.of(cp=2), lambda node, axis, operands: "q@k/2" if node.op == "sdpa" else "R")


@pytest.mark.parametrize(("causal", "expected"), [(True, {("q@k/2048",)}), (False, {("q@k",)})])
def test_the_search_balances_causal_rings(causal: bool, expected: set[tuple[str, ...]]) -> None:
    """All devices then wait for less work; without a mask there is nothing to balance."""
    planner = Planner(Cluster.local(2), CERTIFIED)
    graph, mesh = model(4096, causal=causal), Mesh.of(cp=2)
    plan = planner.plan(graph, mesh=mesh, roles=("ring",), compared=False, microbatches=1, recompute="none")
    assert splits(plan.graph, "sdpa") == expected
    unbalanced = predict(ringed(graph, mesh), Cluster.local(2))
    assert (plan.prediction.step_s < 0.8 * unbalanced.step_s) == causal
    assert plan.prediction.communication_bytes == unbalanced.communication_bytes
