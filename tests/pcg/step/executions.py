"""Executions of all schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.pipelining import SCHEDULES, Schedule


def executions(stages: Iterable[int], microbatches: Iterable[int], chunks: Iterable[int]) -> Iterator[Execution]:
    """Those that there are of these numbers; interleaved ones have the chunks."""
    for schedule in SCHEDULES:
        for p in stages:
            for m in microbatches:
                if schedule != "interleaved":
                    yield Execution.of(num_stages=p, num_microbatches=m, schedule=schedule)
                elif m <= p or m % p == 0:
                    for v in chunks:
                        yield Execution.of(num_stages=p, num_microbatches=m, schedule=schedule, chunks_per_stage=v)


def name(execution: Execution) -> str:
    e = execution
    return f"{e.schedule.name}-p{e.schedule.num_stages}-m{e.assumed.num_microbatches}-v{e.schedule.chunks_per_stage}"


def counted(execution: Execution) -> tuple[Schedule, int]:
    """Its schedule, and how many microbatches go through it."""
    return execution.schedule, execution.assumed.num_microbatches
