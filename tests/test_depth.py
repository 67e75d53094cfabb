"""Nothing that follows a graph goes as deep as it is long: Python's stack is a thousand calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator
from contextlib import contextmanager

from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.outside import find_outside
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.order import postorder
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.reports.plan import PlanReport
from shardwright.search.check import check_plan
from shardwright.search.choices.blocks import blocked_choices
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified
from tests.search.graphs import cluster

LENGTH, ROOM = 110, 90
"""Operators in a chain, and calls that a walk may nest."""


@contextmanager
def shallow() -> Generator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + ROOM)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def chains(length: int = LENGTH) -> Graph:
    """Attention over long chains: of its fused projection, of each part with its heads moved, and of its mask."""
    b = GraphBuilder()

    def chain(x: str, *operators: str) -> str:
        for i in range(length):
            x = b.op(operators[i % len(operators)], x)
        return x

    x = b.leaf("x", "input", (8, 16, 16), "float32", "x")
    fused = b.leaf("fused", "parameter", (48, 16), "float32", "fused", grad=True)
    projected = chain(b.op("linear", x, fused), "tanh", "sigmoid")
    parts = [b.op("slice", projected, dim=2, start=16 * i, stop=16 * (i + 1), step=1) for i in range(3)]
    heads = [b.op("permute", b.op("reshape", p, shape=(8, 16, 4, 4)), dims=(0, 2, 1, 3)) for p in parts]
    query, key, value = (chain(head, "sin", "tanh") for head in heads)
    mask = b.op("sum", chain(x, "cos", "sigmoid"), dims=(2,), keepdim=True)
    scores = b.op("softmax", chain(b.op("matmul", query, b.op("permute", key, dims=(0, 1, 3, 2))), "tanh"), dim=3)
    mixed = b.op("mul", b.op("matmul", scores, value), b.op("reshape", mask, shape=(8, 1, 16, 1)))
    return b.graph([("loss", b.op("sum", b.op("mul", mixed, mixed), dims=(0, 1, 2, 3), keepdim=False))])


def plan_and_print(graph: Graph, certified: Certified) -> None:
    """Plan, check, write and report."""
    plan = Planner(cluster(4), certified).plan(graph, "long", mesh=Mesh.of(dp=2, tp=2), recompute="selective")
    check_plan(plan, graph, certified, certified.by_name())
    assert emit(plan.graph, find_outside(plan.graph, plan.execution))
    assert parse_graph(print_graph(plan.graph)) == plan.graph
    assert str(PlanReport(plan))


def test_a_long_graph_needs_no_deep_stack() -> None:
    graph, certified = chains(), Certified()
    plan_and_print(chains(2), certified)  # Python's own imports, of what is loaded when it is first needed, go deep
    with shallow():
        plan_and_print(graph, certified)


def test_blocked_layouts_are_followed_down_a_long_graph() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 16), "float32", "x")
    v, w = (b.leaf(name, "parameter", (16, n * 16), "float32", name, grad=True) for name, n in (("v", 1), ("w", 2)))
    y = b.op("concat", b.op("linear", x, v), x, dim=1)
    for i in range(LENGTH):
        y = b.op(("tanh", "sin")[i % 2], y)
    graph = b.graph([("loss", b.op("sum", b.op("linear", y, w), dims=(0, 1), keepdim=False))])
    with shallow():
        assert len(blocked_choices(graph, frozenset())) == LENGTH + 1


def test_what_follows_comes_first_and_once() -> None:
    follow = {"a": "bc", "b": "d", "c": "d", "d": "", "e": "a"}
    assert list(postorder("ae", follow.__getitem__)) == ["d", "b", "c", "a", "e"]
