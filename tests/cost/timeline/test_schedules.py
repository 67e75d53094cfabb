"""Schedules on the timeline: bubbles, and what microbatches in flight keep."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from shardwright.cost.timeline import timeline
from shardwright.cost.timeline.segments import Stage, StepProgram
from shardwright.cost.timeline.tasks import COMPUTE, Buffer, Segment, Task
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.schedules import Item, most_in_flight, orders, progress, source
from tests.cost.programs import uniform
from tests.each import each
from tests.pcg.step.executions import counted, executions, name

ALL = list(executions((1, 2, 3, 4, 8), (1, 2, 4, 5, 8, 16), (2, 3)))
every = each("execution", ALL, ids=name)


@every
@each("hop_s", [0.0, 0.25, 3.0])
def test_no_schedule_waits_for_ever_and_no_stage_overlaps_itself(execution: Execution, hop_s: float) -> None:
    found = simulate(uniform(execution, hop_s=hop_s))
    serial_s = 3.0 * execution.assumed.num_microbatches * execution.schedule.chunks_per_stage
    assert found.step_s >= serial_s + 2 * hop_s * (execution.schedule.num_stages - 1) * (
        execution.assumed.num_microbatches == 1
    )
    for stage in found.stages:
        assert stage.compute_s == pytest.approx(serial_s)
        assert stage.compute_s + stage.exposed_s + stage.bubble_s == pytest.approx(found.step_s)
        ends = [place.start_s + place.timeline.seconds for place in stage.placed]
        starts = [place.start_s for place in stage.placed]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts[1:], strict=False))


@every
def test_microbatches_in_flight(execution: Execution) -> None:
    for number, stage in enumerate(simulate(uniform(execution)).stages):
        assert stage.memory.activations_bytes == most_in_flight(*counted(execution), number)


@each("p", [2, 4, 8])
def test_interleaving_keeps_as_much_as_the_field_says(p: int) -> None:
    """p · (1 + (p − 1) / (p · v)) microbatches of the whole stage, on the first one."""
    v = 2
    run = Execution.of(num_stages=p, num_microbatches=4 * p, schedule="interleaved", chunks_per_stage=v)
    kept = simulate(uniform(run)).stages[0].memory.activations_bytes / v
    assert kept == pytest.approx(p * (1 + (p - 1) / (p * v)))


@each("execution", [e for e in ALL if e.assumed.num_microbatches >= e.schedule.num_stages], ids=name)
def test_bubbles_over_ideal(execution: Execution) -> None:
    p, m, v = execution.schedule.num_stages, execution.assumed.num_microbatches, execution.schedule.chunks_per_stage
    found = simulate(uniform(execution))
    share = {"interleaved": (p - 1) / (v * m), "zero-bubble": (p - 1) / (3 * m)}.get(
        execution.schedule.name, (p - 1) / m
    )
    for stage in found.stages:
        assert stage.bubble_s / stage.at_work_s == pytest.approx(share)


def test_a_sender_that_does_not_overlap_is_held_up() -> None:
    run = Execution.of(num_stages=2, num_microbatches=4, schedule="gpipe")
    assert simulate(uniform(run.having(overlap=False), hop_s=0.5)).step_s > simulate(uniform(run, hop_s=0.5)).step_s


def test_an_order_with_a_cycle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Execution.of(num_stages=2, num_microbatches=1)
    monkeypatch.setattr(timeline, "orders", lambda *given: [list(reversed(items)) for items in orders(*given)])
    with pytest.raises(PlanError, match=r"schedule: stage 1 waits for ever for .*; the orders have a cycle"):
        simulate(uniform(run))


def unlike(execution: Execution, random: Random) -> StepProgram:
    """Stages whose chunks take and keep unlike much, a little longer in the first and the last microbatch."""

    def segment(kept: float) -> Segment:
        tasks = (Task("all", COMPUTE, random.random()), Task("first", COMPUTE, 0.1, microbatch="first"),
                 Task("last", COMPUTE, 0.2, microbatch="last"))  # fmt: skip
        own = Buffer("activations", abs(kept), 0 if kept > 0 else None, () if kept > 0 else (0,))
        return Segment(tasks, (own, Buffer("temporary", random.random(), 0, (0,))))

    plain, ways = (
        uniform(execution),
        ("forward", "backward", "weights")[: 2 + (execution.schedule.name == "zero-bubble")],
    )
    stages = list[Stage]()
    for stage in plain.stages:
        kept = random.random()
        pieces = (replace(p, **{way: segment(kept if way == "forward" else -kept / (len(ways) - 1)) for way in ways})
                  for p in stage.pieces)  # fmt: skip
        stages.append(replace(stage, pieces=tuple(pieces), end=segment(0.0)))
    return replace(plain, stages=tuple(stages), hops_s=tuple(random.random() for _ in plain.hops_s))


@every
def test_segments_start_and_keep_as_when_they_are_walked_one_by_one(execution: Execution) -> None:
    program, (p, v) = unlike(execution, Random(3)), (execution.schedule.num_stages, execution.schedule.chunks_per_stage)
    found = simulate(program)
    placed = [{place.item: place for place in stage.placed} for stage in found.stages]
    ends, clocks = dict[tuple[int, Item], float](), [0.0] * p
    totals, peaks = [[0.0] * p for _ in range(2)]
    for stage, item in progress(orders(*counted(execution)), execution.schedule):
        before, start, own = source(item, stage, p, v), clocks[stage], placed[stage][item]
        if before is not None and before[1].direction == item.direction:
            hop = min(before[1].chunk * p + before[0], item.chunk * p + stage)
            start = max(start, ends[before] + program.hops_s[hop] * (before[0] != stage))
        assert own.start_s == pytest.approx(start, abs=1e-12)
        assert (item.microbatch == 0) == ("first" in [t.name for t in own.timeline.segment.tasks if t.seconds])
        clocks[stage] = ends[stage, item] = start + own.timeline.ready_s
        peaks[stage] = max(peaks[stage], totals[stage] + own.timeline.peak_bytes)
        totals[stage] += sum(own.timeline.net.values())
    for stage, own in enumerate(found.stages):
        assert own.placed[-1].start_s == pytest.approx(clocks[stage])
        peak, before = own.placed[own.peak_place], own.placed[: own.peak_place]
        total = sum(sum(place.timeline.net.values()) for place in before) + peak.timeline.peak_bytes
        assert total == pytest.approx(max(peaks[stage], totals[stage] + own.placed[-1].timeline.peak_bytes))
    assert found.step_s == pytest.approx(
        max(c + s.placed[-1].timeline.seconds for c, s in zip(clocks, found.stages, strict=True))
    )
