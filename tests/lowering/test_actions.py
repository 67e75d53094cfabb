"""What ranks really do is what the list of actions says, and what the cost model prices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from examples.zoo import ZOO
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering import blocks, reducer
from shardwright.lowering.late import sink_reductions
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.outside import find_outside
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.actions import Actions, actions
from shardwright.pcg.step.chunk import Chunk, whole_chunk
from shardwright.pcg.step.execution import DEFAULT
from tests.lowering.runs import Case
from tests.lowering.test_zoo import graphs
from tests.search.graphs import cluster

Events = dict[str, list[Any]]
"""By verb, what happens in order: blocks and units by what they consist of."""


def case(name: str) -> Case:
    torch.manual_seed(0)
    return Case(*ZOO[name]())


def listed(chunk: Chunk, found: Actions) -> Events:
    """What a list says that others than the rank itself can see."""
    events: Events = defaultdict(list)
    for own in (*found.forward, *found.backward):
        for verb, number, _ in own:
            if verb in ("gather", "free", "scatter"):
                events[verb].append([p.leaf for p in chunk.blocks[number].parameters])
            elif verb == "reduce":
                events[verb].append([chunk.uses[use].parameter.leaf for use in found.units[number]])
    return dict(events)


def priced(graph: Graph) -> Events:
    """What the cost model prices."""
    chunk = whole_chunk(Steps(graph, cluster(graph.mesh.num_devices), DEFAULT))
    return listed(chunk, actions(chunk))


def lowered(graph: Graph) -> Events:
    """What the program and its runtime are made from."""
    outside = find_outside(sink_reductions(graph).validate())
    return listed(outside.chunk, outside.actions)


class Spy:
    """Notes what a rank does in a step. One for each process."""

    def __init__(self, parallel: ParallelModule, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: Events = defaultdict(list)
        outside = find_outside(parallel.graph)
        leaf_of = {id(parallel._of(leaf).inside): leaf for leaf in outside.operations.parameters}
        bytes_of = {leaf: p.gradient_bytes for leaf, p in outside.operations.parameters.items()}

        def block(item: Any) -> list[str]:
            return [leaf_of[id(shard)] for shard in item.shards]

        def note(owner: type, method: str, verb: str, what: Callable[..., list[str] | None]) -> None:
            real = getattr(owner, method)

            def spied(item: Any, *args: Any, **kwargs: Any) -> Any:
                if (found := what(item, *args)) is not None:
                    self.events[verb].append(found)
                return real(item, *args, **kwargs)

            monkeypatch.setattr(owner, method, spied)

        def unit(item: Any) -> list[str]:
            leaves = [leaf_of[id(held.inside)] for held in item.members]
            assert sum(held.inside.nbytes for held in item.members) == sum(bytes_of[leaf] for leaf in leaves)
            return leaves

        note(blocks.GatheredBlock, "start", "gather", lambda item: block(item) if item.memory is None else None)
        note(blocks.GatheredBlock, "free", "free", lambda item: block(item) if item.memory is not None else None)
        note(blocks.GatheredBlock, "take_gradients", "scatter", lambda item, _: block(item))
        note(reducer._Unit, "launch", "reduce", unit)


@pytest.mark.parametrize("kind", range(3), ids=["data", "zero", "tensor"])
@pytest.mark.parametrize("name", ZOO)
def test_the_cost_model_prices_what_is_lowered(name: str, kind: int) -> None:
    graph = graphs(case(name))[kind]
    assert priced(graph) == lowered(graph)
    assert kind == 2 or ("scatter" in lowered(graph)) == (kind == 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt", "t5", "dlrm", "bert", "mixtral"])
def test_ranks_do_what_the_list_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps, one after the other, under data parallelism, ZeRO-3 storage and split weights."""
    found = case(name)
    for graph in graphs(found):

        def body(parallel: ParallelModule) -> list[Events]:
            spy = Spy(parallel, monkeypatch)
            steps: list[Events] = []
            for _ in range(2):
                spy.events.clear()
                parallel.forward_backward(**found.batch)
                steps.append(dict(spy.events))
            monkeypatch.undo()
            return steps

        assert found.on_ranks(graph, body) == [[lowered(graph)] * 2] * 2


def test_blocks_and_units_have_one_size_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step has several of each."""
    monkeypatch.setattr("shardwright.pcg.step.buckets.BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr("shardwright.pcg.step.buckets.BUCKET_BYTES", 1 << 14)
    monkeypatch.setattr("shardwright.pcg.step.buckets.LARGE_BYTES", 1 << 12)
    for graph in graphs(case("gpt"))[:2]:
        found = lowered(graph)
        assert priced(graph) == found
        assert len(found.get("gather", found.get("reduce", []))) > 4
