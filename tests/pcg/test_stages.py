"""Graphs cut into pipeline stages: what is sent denotes what it denotes without, and each stage is a graph."""

from __future__ import annotations

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.stages import cut
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.time import as_run
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.search.check import difference
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.test_microbatches import case


@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
def test_a_graph_with_sends_denotes_what_it_denotes_without(name: str) -> None:
    """Types are those on both sides of a boundary; text and stages lose nothing."""
    found = case(name)
    for roles in ((), ("tensor",)):
        graph = as_run(of_one_stage(found, roles, 2))
        for stages in (2, 4):
            parts = cut(graph, evenly(graph, stages))
            sent = parts.with_sends().validate()
            assert difference(sent.erased(), graph.erased()) is None
            assert parse_graph(print_graph(sent)) == sent
            for node in sent.nodes:
                if node.op == "send":
                    assert sent.types[node.name] == sent.types[node.inputs[0]]
            made = [(n.name, k) for k, part in enumerate(parts.graphs) for n in part.nodes if n.op != "received"]
            assert {(name, k) for name, k in made if name in parts.where} == set(parts.where.items())
            for number, part in enumerate(parts.graphs):
                received = [n.name for n in part.leaves("received")]
                assert set(received) == set(parts.received(number))
                assert all(part.types[name] == graph.types[name] for name in part.by_name)
            assert all(len(names) <= 2 for names in parts.sent)  # the residual stream, and T5's encoder output


def test_a_split_that_does_not_fit_is_refused() -> None:
    graph = as_run(of_one_stage(case("gpt"), (), 1))
    with pytest.raises(PlanError, match="2 virtual stages without a split"):
        cut(graph, Execution(num_stages=2))
    with pytest.raises(PlanError, match=r"split: expected 2 positive numbers that add up to 4, got \[2, 3\]"):
        cut(graph, Execution(num_stages=2, split=(2, 3)))
