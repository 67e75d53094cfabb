"""The operators of real models are covered by certificates, from the shipped store."""

from __future__ import annotations

import time

import pytest

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import OPAQUE, Graph
from shardwright.pcg.offers import alone
from shardwright.pcg.optable import ROWS
from shardwright.search.choices.blocks import blocked_choices
from shardwright.verifier.catalogue import Catalogue
from shardwright.verifier.choices import Certified
from tests.each import some
from tests.verifier.collect import zoo_graphs


@pytest.mark.slow
@pytest.mark.parametrize("model", some(["gpt", "llama", "dlrm", "resnext"], 1))
def test_the_shipped_store_covers_real_models(model: str) -> None:
    graph, certified = zoo_graphs(model)[model], Certified()
    shipped = set(Catalogue.load().certificates)
    blocked = blocked_choices(graph, constant_nodes(graph))
    for node in graph.nodes:
        if not node.is_leaf:
            certified(node, [graph.types[name] for name in node.inputs], blocked.get(node.name, ()))
    missing = [c.name for c in certified.used.values() if c.rule not in shipped]
    assert not missing, "run `python -m tests.verifier.collect`"
    _only_guards_exclude(graph, certified)
    _asking_is_fast(graph)


def _only_guards_exclude(graph: Graph, certified: Certified) -> None:
    """Every choice that the op table offers is certified, but for those that a guard excludes."""
    for node in graph.nodes:
        if node.is_leaf or node.op == OPAQUE:
            continue
        operands = [graph.types[i] for i in node.inputs]
        factors = [f.name for f in graph.signature(node).factors if f.role != "fixed"]
        for choice in set(alone(ROWS[node.op], factors)) - certified(node, operands):
            reason = certified.reason(node, operands, choice)
            assert str(reason).startswith("guard "), f"{node}: {choice}: {reason}"


def _asking_is_fast(graph: Graph) -> None:
    certified = Certified()
    start = time.perf_counter()
    for node in graph.nodes:
        certified.of(graph, node)
    assert time.perf_counter() - start < 0.3
