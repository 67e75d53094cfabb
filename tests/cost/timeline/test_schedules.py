"""Schedules on the timeline: bubbles, and what microbatches in flight keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cost.timeline import timeline
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.schedules import most_in_flight, orders
from tests.cost.programs import uniform
from tests.each import each
from tests.pcg.step.executions import executions, name

ALL = list(executions((1, 2, 3, 4, 8), (1, 2, 4, 5, 8, 16), (2, 3)))
every = each("execution", ALL, ids=name)


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


@every
def test_microbatches_in_flight(execution: Execution) -> None:
    for number, stage in enumerate(simulate(uniform(execution)).stages):
        assert stage.memory.activations_bytes == most_in_flight(execution, number)


@each("p", [2, 4, 8])
def test_interleaving_keeps_as_much_as_the_field_says(p: int) -> None:
    """p · (1 + (p − 1) / (p · v)) microbatches of the whole stage, on the first one."""
    v = 2
    run = Execution(num_stages=p, num_microbatches=4 * p, schedule="interleaved", chunks_per_stage=v)
    kept = simulate(uniform(run)).stages[0].memory.activations_bytes / v
    assert kept == pytest.approx(p * (1 + (p - 1) / (p * v)))


@each("execution", [e for e in ALL if e.num_microbatches >= e.num_stages], ids=name)
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
    with pytest.raises(PlanError, match=r"schedule: stage 1 waits for ever for .*; the orders have a cycle"):
        simulate(uniform(run))
