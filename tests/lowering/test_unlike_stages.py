"""Stages of unlike sizes: steps are those of one process, and dry runs as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.pcg.step.execution import Schedule
from shardwright.pcg.step.lifetimes import Zero
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
        execution = replace(evenly(graph, len(sizes), schedule, chunks), stage_sizes=sizes)
        by_rank = in_stages(found, graph, execution)
        print(sizes, schedule, roles, worst_error(by_rank, expected))
        assert worst_error(by_rank, expected) < 1e-11, (sizes, schedule, roles, many, zero)
