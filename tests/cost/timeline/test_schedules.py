"""Schedules: every microbatch once, and the closed forms of bubbles and of microbatches in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwright.cost.timeline import timeline
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import SCHEDULES, Execution
from shardwright.pcg.step.schedules import Item, orders
from tests.cost.programs import uniform
from tests.each import each


def executions(*schedules: str) -> Iterator[Execution]:
    for schedule in schedules or SCHEDULES:
        for p in (1, 2, 3, 4, 8):
            for m in (1, 2, 4, 5, 8, 16):
                if schedule != "interleaved":
                    yield Execution(num_stages=p, num_microbatches=m, schedule=schedule)  # type: ignore[arg-type]
                elif m % p == 0:
                    for v in (2, 3):
                        yield Execution(num_stages=p, num_microbatches=m, schedule="interleaved", chunks_per_stage=v)


def name(execution: Execution) -> str:
    e = execution
    return f"{e.schedule}-p{e.num_stages}-m{e.num_microbatches}-v{e.chunks_per_stage}"


every = each("execution", list(executions()), ids=name)


@every
def test_every_stage_runs_every_microbatch_once_each_way_in_order(execution: Execution) -> None:
    ways = ("forward", "backward", "weights") if execution.schedule == "zero-bubble" else ("forward", "backward")
    wanted = Counter(
        Item(c, i, way)
        for c in range(execution.chunks_per_stage) for i in range(execution.num_microbatches) for way in ways
    )  # fmt: skip
    for items in orders(execution):
        assert Counter(items) == wanted
        position = {item: number for number, item in enumerate(items)}
        for item in items:
            if (after := ways.index(item.direction)) > 0:
                before = item._replace(direction=ways[after - 1])
                assert position[before] < position[item]


@every
@each("hop_s", [0.0, 0.25, 3.0])
def test_no_schedule_waits_for_ever_and_no_stage_overlaps_itself(execution: Execution, hop_s: float) -> None:
    found = simulate(uniform(execution, hop_s=hop_s))
    serial_s = 3.0 * execution.num_microbatches * execution.chunks_per_stage
    assert found.step_s >= serial_s + 2 * hop_s * (execution.num_stages - 1) * (execution.num_microbatches == 1)
    for stage in found.stages:
        assert stage.compute_s == pytest.approx(serial_s)
        assert stage.compute_s + stage.exposed_s + stage.bubble_s == pytest.approx(found.step_s)
        ends = [place.start_s + place.timeline.seconds for place in stage.placed]
        starts = [place.start_s for place in stage.placed]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))


def in_flight(execution: Execution, stage: int) -> int:
    """Chunk inputs kept at once."""
    p, m, v = execution.num_stages, execution.num_microbatches, execution.chunks_per_stage
    match execution.schedule:
        case "gpipe":
            return m
        case "1f1b":
            return min(m, p - stage)
        case "zero-bubble":
            return min(m, p)
        case "interleaved":
            return v * m if m == p else min(v * m, 2 * (p - 1 - stage) + (v - 1) * p + 1)


@every
def test_microbatches_in_flight(execution: Execution) -> None:
    for number, stage in enumerate(simulate(uniform(execution)).stages):
        assert stage.memory.activations_bytes == in_flight(execution, number)


@each("p", [2, 4, 8])
def test_interleaving_keeps_as_much_as_the_field_says(p: int) -> None:
    """p · (1 + (p − 1) / (p · v)) microbatches of the whole stage, on the first one."""
    v = 2
    run = Execution(num_stages=p, num_microbatches=4 * p, schedule="interleaved", chunks_per_stage=v)
    kept = simulate(uniform(run)).stages[0].memory.activations_bytes / v
    assert kept == pytest.approx(p * (1 + (p - 1) / (p * v)))


@each("execution", [e for e in executions() if e.num_microbatches >= e.num_stages], ids=name)
def test_bubbles_over_ideal(execution: Execution) -> None:
    p, m, v = execution.num_stages, execution.num_microbatches, execution.chunks_per_stage
    found = simulate(uniform(execution))
    share = {"interleaved": (p - 1) / (v * m), "zero-bubble": (p - 1) / (3 * m)}.get(execution.schedule, (p - 1) / m)
    for stage in found.stages:
        assert stage.bubble_s / stage.at_work_s == pytest.approx(share)


def test_a_sender_that_does_not_overlap_is_held_up() -> None:
    run = Execution(num_stages=2, num_microbatches=4, schedule="gpipe")
    assert simulate(uniform(replace(run, overlap=False), hop_s=0.5)).step_s > simulate(uniform(run, hop_s=0.5)).step_s


def test_an_order_with_a_cycle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Execution(num_stages=2, num_microbatches=1)
    monkeypatch.setattr(timeline, "orders", lambda execution: [list(reversed(items)) for items in orders(execution)])
    with pytest.raises(PlanError, match=r"schedule: stage 0 waits for ever before Item.*; its order has a cycle"):
        simulate(uniform(run))
