"""The table of verbs: lists keep to what its rows read and write, and are priced on the streams that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import get_args
from unittest import mock

from shardwright.cost.timeline import ending, pricing
from shardwright.cost.timeline import program as stages
from shardwright.cost.timeline.pricing import price_backward, price_forward
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering.runtime import apart, blocks, host, kernels, pipeline, reducer, saved
from shardwright.lowering.runtime import collectives as functions
from shardwright.lowering.runtime.schedule import spread_after
from shardwright.pcg.graph import Graph
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step import buckets
from shardwright.pcg.step.actions import Actions, actions
from shardwright.pcg.step.chunk import Chunk, whole_chunk
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import with_lifetimes
from shardwright.pcg.step.verbs import VERBS, Verb, happens
from tests.cost.programs import planned
from tests.each import each
from tests.search.graphs import cluster

ONCE = {"arriving", "scattering", "leaving", "fetching", "host", "sum"}
"""What is not made anew while it is there."""
WAYS = [
    Execution.of(recompute=recompute, offload=offload, late_gathers=late)
    for recompute in ("none", "full") for offload in ("none", "full") for late in (False, True)
]  # fmt: skip
ENCODED = Execution(encodings=(("weights", "int8"), ("gradients", "int4")))


def stored(lifetime: str) -> Graph:
    """Blocks in slices, which stay so long once they are gathered."""
    graph = planned("zero", 5)
    names = {leaf.name: lifetime for leaf in graph.leaves("parameter")}
    return with_lifetimes(graph, names)  # type: ignore[arg-type]


GRAPHS = {
    "data": planned("data", 5),
    "tensor": planned("tensor", 5),
    "zero-3": stored("zero-3"),
    "kept": stored("kept"),
}


def listed(graph: Graph, run: Execution) -> tuple[Chunk, Actions, Steps]:
    steps = Steps(graph, cluster(4, host_bytes_per_s=1e9), run)
    chunk = whole_chunk(steps)
    return chunk, actions(chunk, late=run.assumed.late_gathers), steps


def wrong(chunk: Chunk, found: Actions, many: int) -> Iterator[str]:
    """What a list does in so many microbatches that the rows of its verbs do not allow."""
    there = set[tuple[str, str, int]]()
    for microbatch in range(many):
        for number, own in enumerate(chain(found.forward, found.backward)):
            for verb, what, when in own:
                if not happens(when, first=microbatch == 0, last=microbatch == many - 1):
                    there.update({("value", "operation", what)} if verb == "total" else ())  # it is the summand
                    continue
                row, told = VERBS[verb], f"{verb} {what} of microbatch {microbatch}"
                yield from (f"{told}: no {r}" for r in row.reads if (r, row.counts, what) not in there)
                yield from (f"{told}: {w} twice" for w in ONCE & {*row.writes} if (w, row.counts, what) in there)
                if row.counts == "operation" and verb != "wait":
                    o, back = chunk.occurrences[what], number >= len(found.forward) and verb != "again"
                    read = chunk.blocks_of(o, backward=back)
                    yield from (f"{told}: block {b}" for b in read if ("gathered", "block", b) not in there)
                there.difference_update((end, row.counts, what) for end in row.ends)
                there.update((w, row.counts, what) for w in row.writes)
        there -= {(what, counts, n) for what, counts, n in there if counts == "unit"}
    yield from (f"{what} of {counts} {n} is left" for what, counts, n in there if what in ONCE)


@each("name", GRAPHS)
@each("run", [*WAYS, ENCODED], ids=str)
def test_lists_read_what_is_there_and_leave_nothing_on_its_way(name: str, run: Execution) -> None:
    chunk, found, _ = listed(GRAPHS[name], run)
    for many in (1, 3):
        assert not list(wrong(chunk, found, many))


def test_sums_of_codes_go_on_behind_the_next_unit() -> None:
    """Every unit that is sent encoded has a second leg, and no other."""
    assert not listed(GRAPHS["data"], WAYS[0])[1].of("spread")
    with mock.patch.object(buckets, "BUCKET_BYTES", 1):
        chunk, found, _ = listed(GRAPHS["data"], ENCODED)
    order = [(a.verb, a.number) for own in found.backward for a in own if a.verb in ("reduce", "spread")]
    last = len(found.units) - 1
    assert last > 1
    behind = [[("reduce", n + 1), ("spread", n)] for n in range(last)]
    assert order == [("reduce", 0), *chain(*behind), ("spread", last)]
    assert spread_after(found) == {n + 1: (n,) for n in range(last)}
    assert all(chunk.uses[unit[0]].parameter.summed_as for unit in found.units)


def test_what_is_not_there_is_told() -> None:
    chunk, found, _ = listed(GRAPHS["zero-3"], WAYS[0])
    for verb, said in (("gather", "await 0 of microbatch 0: no arriving"), ("await", ": block 0"), ("deliver", "left")):
        torn = [
            tuple(tuple(a for a in own if a.verb != verb) for own in side) for side in (found.forward, found.backward)
        ]
        assert any(said in text for text in wrong(chunk, replace(found, forward=torn[0], backward=torn[1]), 1))


@each("name", GRAPHS)
@each("run", WAYS, ids=str)
def test_tasks_run_on_the_streams_of_their_verbs(name: str, run: Execution) -> None:
    chunk, found, steps = listed(GRAPHS[name], run)
    axes = set(steps.graph.mesh.names)
    streams = {"compute": {"compute"}, "copy": {"copy"}, "axis": axes, "stages": {STAGES}, "own": {"compute", *axes}}
    segments = price_forward(steps, chunk, found), *price_backward(steps, chunk, found, two=False)
    tasks = [task for segment in segments for task in segment.tasks]
    assert {task.verb for task in tasks} <= {a.verb for a in chain(*found.forward, *found.backward)}
    for task in tasks:
        slices = task.verb == "scatter" and not task.messages  # what nobody has a summand of is cut alone
        assert task.stream in streams[VERBS[task.verb].stream] or slices, task


def test_the_end_of_a_step_is_a_list_too() -> None:
    run = Execution.of("amp_bf16", shard_optimizer=True)
    (stage,) = program(planned("data", 3), cluster(4), run).stages
    assert [(task.verb, task.stream) for task in stage.end.tasks] == [("update", "compute"), ("regather", "x")]


def test_every_verb_has_a_row_that_names_what_there_is() -> None:
    assert set(VERBS) == set(get_args(Verb))
    prices = (pricing._Forward, pricing._Backward, ending._End, stages)
    executors = (
        blocks.GatheredBlock, blocks.Blocks, reducer._Unit, apart, pipeline.Pipeline, functions, kernels, saved.Saved,
        host.Away,
    )  # fmt: skip
    for verb, row in VERBS.items():
        assert not row.price or any(hasattr(own, row.price) for own in prices), verb
        assert not row.executor or any(hasattr(own, row.executor) for own in executors), verb
        assert bool(row.stream) <= bool(row.price), verb
