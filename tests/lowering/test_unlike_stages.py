"""Stages of unlike sizes: steps are those of one process, and dry runs as predicted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.cli.dryrun import DryRunReport
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import take
from shardwright.lowering.runtime.inputs import NUM_FIRST
from shardwright.lowering.store.storage import slices
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.errors import DistributedError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.search.plan import Plan, SearchReport
from tests.each import in_whole_grids, some
from tests.lowering.pipelines import evenly, in_one_process, in_stages, of_one_stage, step, worst_error
from tests.lowering.runs import Case, doubled, hang
from tests.lowering.test_microbatches import case

Cell = tuple[tuple[int, ...], ScheduleName, int, tuple[str, ...], int, Zero]
CELLS: list[Cell] = [
    ((2, 1), "1f1b", 1, ("data",), 2, "kept"), ((1, 2), "gpipe", 1, ("data",), 4, "kept"),
    ((1, 2), "1f1b", 1, ("tensor",), 2, "kept"), ((2, 1, 1), "zero-bubble", 1, ("data",), 4, "kept"),
    ((2, 1), "interleaved", 2, ("data",), 2, "kept"), ((2, 1), "eager-1f1b", 1, ("tensor",), 1, "kept"),
    ((2, 1), "1f1b", 1, ("zero",), 2, "zero-3"), ((1, 2), "zero-bubble", 1, ("zero",), 4, "zero-2"),
    ((2, 1), "1f1b", 1, ("zero",), 2, "zero-1"),
    ((2, 1), "1f1b", 1, ("data", "tensor"), 2, "kept"), ((1, 2), "1f1b", 1, ("tensor", "data"), 2, "kept"),
]  # fmt: skip
"""Sizes of the stages, schedule, chunks, roles of the axes of the largest stage, microbatches, lifetimes."""


@pytest.mark.parametrize(
    ("name", "cells"), [("gpt", some(CELLS, 7)), ("llama", some(CELLS[:2], 1))], ids=["gpt", "llama"]
)
def test_steps_are_those_of_one_process(name: str, cells: list[Cell]) -> None:
    """Dropout on."""
    assert_steps_are_those_of_one_process(case(name), cells)


def assert_steps_are_those_of_one_process(found: Case, cells: list[Cell], **options: Any) -> None:
    expected, plans = in_one_process(found), list[tuple[Graph, Execution]]()
    for sizes, schedule, chunks, roles, many, zero in cells:
        graph = of_one_stage(found, roles, many, zero)
        plans.append((graph, evenly(graph, len(sizes), schedule, chunks, sizes, **options)))
    for cell, by_rank in zip(cells, in_stages(found, plans), strict=True):
        assert worst_error(by_rank, expected) < 1e-11, cell


MORE: list[Cell] = [
    ((2, 2, 1), "1f1b", 1, ("tensor",), 4, "kept"), ((1, 2), "zero-bubble", 1, ("tensor", "data"), 4, "zero-2"),
    ((1, 2), "gpipe", 1, ("zero", "tensor"), 1, "zero-3"), ((2, 1), "interleaved", 2, ("tensor",), 4, "kept"),
]  # fmt: skip


@in_whole_grids
@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bert", "vit"])
def test_steps_of_more_models(name: str) -> None:
    """Encoders, of which one is read by all blocks of a decoder."""
    assert_steps_are_those_of_one_process(doubled(name), MORE, recompute="full")


@pytest.mark.parametrize(("sizes", "roles"), some([((2, 1), ("tensor",)), ((1, 2), ("data",))], 1))
def test_dry_runs_of_all_ranks_are_as_predicted(sizes: tuple[int, ...], roles: tuple[str, ...]) -> None:
    """What ranks of a stage send is what those of the next one receive."""
    found = case("gpt")
    graph = of_one_stage(found, roles, 4)
    execution = evenly(graph, 2, sizes=sizes)
    prediction = predict(graph, Cluster.local(3), execution)
    plan = Plan(graph, Cluster.local(3), "GPT", "", prediction, (), SearchReport(0.0, 1, 0.0, 1 << 60), execution)
    both: dict[str, Counter[tuple[str, int]]] = {"send": Counter(), "receive": Counter()}
    for rank in range(3):
        report = DryRunReport(plan, dry_run(graph, rank, execution))
        assert not [f for f in report.findings if not f.startswith("memory in all")], rank
        assert f"dry run of GPT on mesh [mb=4, x={sizes[int(rank >= sizes[0])]}]\n" in str(report)
        for message, times in report.run.messages.items():
            if message.collective in both:
                both[message.collective][message.axis, message.num_bytes] += times
    assert len(both["send"]) > 1
    assert both["send"] == both["receive"]


def test_ranks_may_pass_their_own_shards_of_the_batch() -> None:
    """Those of a stage along whose axis there is one rank have the global tensor; who could pass a shard has to."""
    found = case("gpt")
    expected = in_one_process(found)
    graph = of_one_stage(found, ("data",), 2)
    execution = evenly(graph, 2, sizes=(2, 1))

    def body(whole: int) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        parallel, own = found.lower(graph, execution), dict(found.batch)
        for key, layouts in parallel.input_layouts.items():
            for axis, dim, blocks in (
                slices(own[key].shape, layouts, parallel.ranks) if dist.get_rank() != whole else ()
            ):
                own[key] = take(own[key], axis, dim, blocks)
        return step(parallel, own)

    assert worst_error(run_ranks(lambda: body(-1), 3, 60), expected) < 1e-11
    with pytest.raises(DistributedError, match="rank 0 passed the global tensor, rank 1 a shard of it; pass the same"):
        run_ranks(lambda: body(0), 3, 60)


def test_a_rank_that_fails_is_named_by_those_that_wait_for_it(tmp_path: Path) -> None:
    """The one rank of the first stage waits for gradients of both of the second, of which one never begins."""
    found, done = case("gpt"), tmp_path / "done"
    graph = of_one_stage(found, ("data",), 2)
    execution = evenly(graph, 2, sizes=(1, 2))

    def body() -> str:
        own: dict[str, Any] = {"constants": found.captured.constants, "check_inputs": "never"}
        parallel = lower(graph, found.model, timeout_s=2, execution=execution, **own)
        for _ in range(NUM_FIRST):  # in these, ranks compare how they draw
            parallel.forward_backward(**found.batch)
        if dist.get_rank() == 2:
            hang(done, 6)
            return ""
        with pytest.raises(DistributedError) as error:
            parallel.forward_backward(**found.batch)
        if dist.get_rank() == 0:
            done.touch()
        return str(error.value)

    said = run_ranks(body, 3, 60)[0]
    assert said.startswith("rank 0, pipeline stage 0: waited for what ")
    assert "stage 1 (rank 2): " in said
