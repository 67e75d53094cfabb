"""What ranks really do is what the list of actions says, and what the cost model prices."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.cost.timeline.pool import pool_bytes
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import blocks, reducer
from shardwright.lowering.runtime.buffers import BufferSet
from shardwright.lowering.text.emit import emit
from shardwright.lowering.text.outside import find_outside
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.actions import Actions, actions
from shardwright.pcg.step.chunk import Chunk, whole_chunk
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.late import sink_reductions
from shardwright.pcg.step.verbs import VERBS, Verb, happens
from tests.each import some
from tests.lowering.runs import Batch, Case, Step, assert_same_step, entry_of, of_zoo, parallel_step, serial_step
from tests.lowering.test_training import TWO
from tests.lowering.test_zoo import graphs, stored
from tests.models import zoo
from tests.search.graphs import cluster

Events = dict[str, list[Any]]
"""By verb, what happens in order: blocks and units by what they consist of."""


def listed(chunk: Chunk, found: Actions, many: int) -> Events:
    """What a list says that others than the rank itself can see, of so many microbatches."""
    events: Events = defaultdict(list)
    own = list(chain(*found.forward, *found.backward))
    for microbatch in range(many):
        for verb, number, when in own:
            if not happens(when, first=microbatch == 0, last=microbatch == many - 1):
                continue
            if verb in ("gather", "free", "scatter"):
                events[verb].append([p.leaf for p in chunk.blocks[number].parameters])
            elif verb == "reduce":
                events[verb].append([chunk.uses[use].parameter.leaf for use in found.units[number]])
    return dict(events)


def priced(graph: Graph, execution: Execution = DEFAULT) -> Events:
    """What the cost model prices."""
    chunk = whole_chunk(Steps(graph, cluster(graph.mesh.num_devices), execution))
    return listed(chunk, actions(chunk), graph.mesh.num_microbatches)


def lowered(graph: Graph, execution: Execution = DEFAULT) -> Events:
    """What the program and its runtime are made from."""
    outside = find_outside(sink_reductions(graph).validate(), execution)
    return listed(outside.chunk, outside.actions, graph.mesh.num_microbatches)


def pooled(graph: Graph, execution: Execution) -> float:
    """Gathered memory as the cost model prices it."""
    chunk = whole_chunk(steps := Steps(graph, cluster(graph.mesh.num_devices), execution))
    return sum(pool_bytes(steps, chunk, actions(chunk)).values())


def num_bytes(memory: BufferSet) -> int:
    return sum(buffer.nbytes for buffer in (memory.send, memory.receive, *memory.buffers))


class Spy:
    """Notes what a rank does in a step. One for each process."""

    def __init__(self, parallel: ParallelModule, execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: Events = defaultdict(list)
        outside = find_outside(parallel.graph, execution)
        names = {leaf: str(parallel.graph.by_name[leaf].attr("target")) for leaf in outside.operations.parameters}
        held = entry_of(parallel).runner.held
        leaf_of = {id(held[name].inside): leaf for leaf, name in names.items()}
        bytes_of = {leaf: p.gradient_bytes for leaf, p in outside.operations.parameters.items()}

        def block(item: Any) -> list[str]:
            return [leaf_of[id(shard)] for shard in item.shards]

        def freed(item: Any) -> list[str] | None:
            return block(item) if item.memory is not None else None

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
        note(blocks.GatheredBlock, "drop", "free", freed)
        note(blocks.GatheredBlock, "take_gradients", "scatter", lambda item, _: block(item))
        note(reducer._Unit, "launch", "reduce", unit)

    def steps(self, parallel: ParallelModule, batch: Batch) -> list[Events]:
        """What is done in each of two steps."""
        found = list[Events]()
        for _ in range(2):
            self.events.clear()
            parallel.forward_backward(**batch)
            found.append(dict(self.events))
        return found


class Compared(nn.Module):
    """Reads a parameter where it gets no gradient before it reads it where it gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.edge = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.where(h > self.edge, h, h * self.edge).square().mean()


class LateBias(nn.Module):
    """A product whose bias is added after another product has read its own weight of the same block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.first(x), self.second(x)
        return torch.tanh(h + self.bias) * gate + x


class LateBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LateBias() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Adapter(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h) + self.b(self.a(h))))


class Adapters(nn.Module):
    """Frozen blocks alone, frozen ones with adapters, and an embedding that backward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 8)
        self.layers = nn.ModuleList(Adapter() for _ in range(6))
        for layer in self.layers[3:]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x > 0).long()).sum(1)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


OWN: dict[str, type[nn.Module]] = {"compared": Compared, "late biases": LateBiases, "adapters": Adapters}


@cache
def own_case(name: str) -> Case:
    """Captured once in this process. Nothing may change it."""
    torch.manual_seed(0)
    return Case(OWN[name](), {"x": torch.randn(8, 8)})


def own_graphs(found: Case) -> list[Graph]:
    """Data parallelism; ZeRO-3 of matrices alone, so that products have whole biases; and of everything."""
    matrices = {**stored(found, ("input",)), **stored(found, ("parameter",), 2)}
    data, everything, _ = graphs(found)
    return [data, found.graph(TWO, matrices, data_axes=(0,)), everything]


@pytest.mark.parametrize("name", some([*zoo(), *OWN], 5))
def test_lists_are_whole(name: str) -> None:
    """Every gradient that is to be summed is, once; no text reads a block after it is freed; one list for all."""
    found = own_case(name) if name in OWN else of_zoo(name)
    for graph in own_graphs(found) if name in OWN else graphs(found):
        ready = sink_reductions(graph).validate()
        outside = find_outside(ready)
        uses = outside.chunk.uses
        summed = [use for unit in outside.actions.units for use in unit]
        trained = [
            n for o in outside.chunk.occurrences if o.operation.is_differentiated for n in outside.chunk.trained(o)
        ]
        assert sorted(summed) == sorted({use for use in trained if uses[use].parameter.sums})
        assert_freed_after_reading(emit(ready, outside))
        assert priced(graph) == lowered(graph)


def test_lists_of_programs_have_no_action_that_nothing_runs() -> None:
    """What is only costed is not in them."""
    run = Execution.of(offload="full", recompute="selective")
    for graph in graphs(of_zoo("gpt")):
        found = find_outside(sink_reductions(graph).validate(), run).actions
        verbs: set[Verb] = {action.verb for action in chain(*found.forward, *found.backward)}
        assert {"again", "offload", "release", "fetch", "arrive"} <= verbs
        assert all(VERBS[verb].executor is not None for verb in verbs)


def assert_freed_after_reading(source: str) -> None:
    """In every function, after `block.free()` no statement reads what `block.gather()` gave."""
    for function in (s for s in ast.parse(source).body if isinstance(s, ast.FunctionDef)):
        given, freed = dict[str, set[str]](), set[str]()
        for statement in function.body:
            text = ast.unparse(statement)
            names = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
            assert not freed.intersection(n.id for n in names if isinstance(n.ctx, ast.Load)), text
            if gathered := re.search(r"= (blocks\[\d+\]|block\w*)\.gather\(\)", text):
                given[gathered[1]] = {n.id for n in names if isinstance(n.ctx, ast.Store)}
            elif text.endswith(".free()"):
                freed |= given.get(text.removesuffix(".free()"), set())


@pytest.mark.parametrize("name", OWN)
def test_awkward_orders_train_as_one_process_does(name: str) -> None:
    """Twice, so that memory of the first step is used again in the second."""
    found = own_case(name)
    expected = serial_step(found)

    def body(parallel: ParallelModule) -> Step:
        parallel_step(parallel, found.batch)
        parallel.zero_grad()
        return parallel_step(parallel, found.batch)

    todo = own_graphs(found)
    for steps in run_ranks(lambda: [body(found.lower(graph)) for graph in todo], 2, 60):
        for number, step in enumerate(steps):
            assert_same_step(step, expected, 1e-5, f"graph {number}")


RUNS = [
    pytest.param(name, recompute, marks=pytest.mark.xdist_group(name))
    for name, recompute in [
        *((name, "none") for name in ("mlp", "gpt", "t5", "dlrm", "bert", "mixtral", "adapters")),
        ("gpt", "selective"), ("t5", "full"),
    ]
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recompute"), some(RUNS, 3))
def test_ranks_do_what_the_list_says(name: str, recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps, under data parallelism, ZeRO-3 storage and split weights; with the gathered memory of the list."""
    found, run = own_case(name) if name in OWN else of_zoo(name), Execution(recompute=recompute)
    todo = own_graphs(found) if name in OWN else graphs(found)

    def body() -> list[tuple[list[Events], float]]:
        seen = list[tuple[list[Events], float]]()
        for graph in todo:
            parallel = found.lower(graph, run)
            steps = Spy(parallel, run, monkeypatch).steps(parallel, found.batch)
            monkeypatch.undo()
            seen.append((steps, sum(map(num_bytes, chain(*entry_of(parallel).runner.blocks.pool.free.values())))))
        return seen

    for graph in todo:
        assert priced(graph, run) == lowered(graph, run)
    ranks = run_ranks(body, 2, 60)
    for number, graph in enumerate(todo):
        wanted = [lowered(graph, run)] * 2, pooled(graph, run)
        assert [seen[number] for seen in ranks] == [wanted] * 2, f"graph {number}"


def test_blocks_and_units_have_one_size_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step has several of each."""
    monkeypatch.setattr("shardwright.pcg.step.buckets.BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr("shardwright.pcg.step.buckets.BUCKET_BYTES", 1 << 14)
    monkeypatch.setattr("shardwright.pcg.step.buckets.LARGE_BYTES", 1 << 12)
    for graph in graphs(of_zoo("gpt"))[:2]:
        found = lowered(graph)
        assert priced(graph) == found
        assert len(found.get("gather", found.get("reduce", []))) > 4
