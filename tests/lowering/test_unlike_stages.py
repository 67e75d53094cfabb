"""Stages of unlike sizes: steps are those of one process, and dry runs as predicted."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwright.cli.dryrun import DryRunReport
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.lowering.dryrun import dry_run
from shardwright.pcg.step.execution import Schedule
from shardwright.pcg.step.lifetimes import Zero
from shardwright.search.plan import Plan, SearchReport
from tests.lowering.pipelines import evenly, in_one_process, in_stages, of_one_stage, worst_error
from tests.lowering.test_microbatches import case

Cell = tuple[tuple[int, ...], Schedule, int, tuple[str, ...], int, Zero]
CELLS: list[Cell] = [
    ((2, 1), "1f1b", 1, ("data",), 2, "kept"), ((1, 2), "gpipe", 1, ("data",), 4, "kept"),
    ((1, 2), "1f1b", 1, ("tensor",), 2, "kept"), ((2, 1, 1), "zero-bubble", 1, ("data",), 4, "kept"),
    ((2, 1), "interleaved", 2, ("data",), 2, "kept"), ((2, 1), "eager-1f1b", 1, ("tensor",), 1, "kept"),
    ((2, 1), "1f1b", 1, ("zero",), 2, "zero-3"), ((1, 2), "zero-bubble", 1, ("zero",), 4, "zero-2"),
    ((2, 1), "1f1b", 1, ("zero",), 2, "zero-1"),
    ((2, 1), "1f1b", 1, ("data", "tensor"), 2, "kept"), ((1, 2), "1f1b", 1, ("tensor", "data"), 2, "kept"),
]  # fmt: skip
"""Sizes of the stages, schedule, chunks, roles of the axes of the largest stage, microbatches, lifetimes."""


@pytest.mark.parametrize(("name", "cells"), [("gpt", CELLS), ("llama", CELLS[:2])], ids=["gpt", "llama"])
def test_steps_are_those_of_one_process(name: str, cells: list[Cell]) -> None:
    """Dropout on."""
    found = case(name)
    expected = in_one_process(found)
    for sizes, schedule, chunks, roles, many, zero in cells:
        graph = of_one_stage(found, roles, many, zero)
        execution = evenly(graph, len(sizes), schedule, chunks, sizes)
        assert worst_error(in_stages(found, graph, execution), expected) < 1e-11, (sizes, schedule, roles, many, zero)


@pytest.mark.parametrize(("sizes", "roles"), [((2, 1), ("tensor",)), ((1, 2), ("data",))])
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
        for message, times in report.run.messages.items():
            if message.collective in both:
                both[message.collective][message.axis, message.num_bytes] += times
    assert len(both["send"]) > 1
    assert both["send"] == both["receive"]
