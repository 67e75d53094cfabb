"""Executions of all schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.pcg.step.execution import SCHEDULES, Execution


def executions(stages: Iterable[int], microbatches: Iterable[int], chunks: Iterable[int]) -> Iterator[Execution]:
    """Those that there are of these numbers; interleaved ones have the chunks."""
    for schedule in SCHEDULES:
        for p in stages:
            for m in microbatches:
                if schedule != "interleaved":
                    yield Execution(num_stages=p, num_microbatches=m, schedule=schedule)
                elif m <= p or m % p == 0:
                    for v in chunks:
                        yield Execution(num_stages=p, num_microbatches=m, schedule=schedule, chunks_per_stage=v)


def name(execution: Execution) -> str:
    e = execution
    return f"{e.schedule}-p{e.num_stages}-m{e.num_microbatches}-v{e.chunks_per_stage}"
