"""Graphs cut into pipeline stages: what is sent denotes what it denotes without, and each stage is a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.pcg.errors import PlanError
from shardwright.pcg.stages import cut
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.time import as_run
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.search.check import difference
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.runs import Case
from tests.lowering.test_microbatches import case


@pytest.mark.parametrize("name", ["gpt", "llama", "t5"])
def test_a_graph_with_sends_denotes_what_it_denotes_without(name: str) -> None:
    """Types are those on both sides of a boundary; text and stages lose nothing."""
    found = case(name)
    for roles in ((), ("tensor",)):
        graph = as_run(of_one_stage(found, roles, 2))
        for stages in (2, 4):
            parts = cut(graph, evenly(graph, stages))
            sent = parts.with_sends()
            assert "types" in vars(sent)  # so it is checked, whatever is asked of it
            sent.validate()
            assert difference(sent.erased(), graph.erased()) is None
            assert all(replace(typed).types == typed.types for typed in (graph, sent))  # as if nothing were known
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
        cut(graph, Execution.of(num_stages=2))
    with pytest.raises(PlanError, match=r"split: expected 2 positive numbers that add up to 4, got \[2, 3\]"):
        cut(graph, Execution.of(num_stages=2, split=(2, 3)))


def test_a_stage_need_not_have_what_is_made_again() -> None:
    """A pattern is checked against the whole graph; the stage of the embedding has no attention."""
    graph = as_run(of_one_stage(case("gpt"), (), 1))
    for recompute in ("selective", "full", {"blocks.1": "full"}, {"blocks.0": ["qkv"]}):
        execution = evenly(graph, 4, recompute=recompute)
        assert [bool(made_again(part, execution).regions) for part in cut(graph, execution).graphs].count(True) >= 1
    with pytest.raises(PlanError, match=r"'blocks\.7'.*no repeated block of the model is so named"):
        cut(graph, evenly(graph, 4, recompute={"blocks.7": "full"}))
    with pytest.raises(PlanError, match="no operation of such a block is there"):
        cut(graph, evenly(graph, 4, recompute={"blocks.0": ["nothing"]}))


class Remembering(nn.Module):
    """What the last layer gives is written into a buffer that the first reads, or is only counted."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h, state = x, self.get_buffer("state")
        for layer in self.layers:
            h = layer(h) + state
        state.copy_(h.detach().mean(0) if self.what == "result" else state + 1)
        return h.pow(2).mean()


def test_buffers_that_stages_would_not_agree_on_are_refused() -> None:
    graphs = {}
    for what in ("result", "count"):
        graphs[what] = as_run(of_one_stage(Case(Remembering(what), {"x": torch.randn(8, 4)}), (), 1))
    with pytest.raises(PlanError, match=r"buffer 'state' is read in virtual stages \[0, 1\], and written in \[1\]"):
        cut(graphs["result"], evenly(graphs["result"], 2))
    graph = graphs["count"]
    with pytest.raises(PlanError, match=r"buffer 'state' is written in virtual stages \[0, 1, 2, 3\].*interleaved"):
        cut(graph, evenly(graph, 2, "interleaved", 2))
    assert all("state" in dict(part.outputs) for part in cut(graph, evenly(graph, 4)).graphs)
