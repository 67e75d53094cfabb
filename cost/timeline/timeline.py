"""The timeline of a step: every stage's microbatches in the order of the schedule, and the memory of every stage.

Two levels. A segment (forward, backward or its second part, of one microbatch through one chunk) is simulated once,
task by task (`streams.py`). The schedule then moves whole segments: one begins when its stage is free and what it needs
from the neighbouring stages has arrived. So the cost of a timeline is that of the distinct segments, plus a few
operations per microbatch and stage.

Memory over time is what is there always, plus what every segment has left behind, plus the course within the one that
runs. Its peak is a moment of one stage, with the task that runs then; no categories' maxima are added up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwright.cost.clusters.device import DeviceKind
from shardwright.cost.timeline.clock import SHARING, Sharing
from shardwright.cost.timeline.memory import Memory
from shardwright.cost.timeline.segments import Stage, StepProgram
from shardwright.cost.timeline.streams import SegmentTimeline, run
from shardwright.cost.timeline.tasks import COMPUTE, Segment
from shardwright.pcg.step.execution import Execution, Schedule
from shardwright.pcg.step.schedules import Item, orders, progress, target

SLACK: dict[DeviceKind, float] = {"cuda": 0.05, "cpu": 0.0}
"""What the allocator holds beyond what is in use, as a share of it. cuda: assumed; blocks are rounded up, and freed
ones do not always fit what is asked for next. cpu: freed memory of this size goes back to the system."""
_MOST_COURSES = 8
"""That are kept: of many stages and microbatches one has a hundred thousand steps."""
NOT_ALLOCATED = ("context", "communication")
"""What a stage keeps beside the allocator."""


class PlacedSegment(NamedTuple):
    """A segment on a stage's clock. `item`: None for the end of the step."""

    item: Item | None
    start_s: float
    timeline: SegmentTimeline


@dataclass(frozen=True, slots=True, eq=False)
class StageTimeline:
    """What each device of one stage does in a step.

    Attributes:
        placed: its segments, in order.
        compute_s: while the compute stream runs, slowed by communication or not.
        exposed_s: while it waits for communication or copies.
        bubble_s: while the stage has nothing to do until the step ends everywhere; the three add up to the step.
        busy_s: by stream.
        memory: at the peak, by category, the allocator's slack included.
        peak_place: the number of the segment in which the peak is.
        peak_s: the moment of the peak.
        peak_at: what runs then.
        state_bytes: what is there when the step begins.
        device_bytes: the memory of its devices.
    """

    placed: tuple[PlacedSegment, ...]
    compute_s: float
    exposed_s: float
    bubble_s: float
    busy_s: Mapping[str, float]
    memory: Memory
    peak_place: int
    peak_s: float
    peak_at: str
    state_bytes: float
    device_bytes: int

    @property
    def at_work_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A simulated step."""

    step_s: float
    stages: tuple[StageTimeline, ...]

    @property
    def busiest(self) -> StageTimeline:
        """The stage with the least bubble: the one that decides how long the step takes."""
        return max(self.stages, key=lambda stage: stage.at_work_s)

    @property
    def fullest(self) -> StageTimeline:
        """The stage whose peak is the largest part of its devices' memory, of which plans may use a part."""
        return max(self.stages, key=lambda stage: stage.memory.total_bytes / stage.device_bytes)


def simulate(program: StepProgram, sharing: Mapping[DeviceKind, Sharing] = SHARING) -> Timeline:
    """The timeline of a program. `sharing`: how compute and communication slow each other, by kind of device."""
    own = program.execution
    course = _course(own.schedule, own.num_stages, own.chunks_per_stage, own.num_microbatches)
    schedules = course.orders
    timelines = [
        _stage_timelines(stage, items, sharing[stage.device.kind], program.simulated)
        for stage, items in zip(program.stages, schedules, strict=True)
    ]
    all_starts, waits = _place(program, course, timelines)
    placed = [
        tuple(map(PlacedSegment, (*items, None), starts, own))
        for items, starts, own in zip(schedules, all_starts, timelines, strict=True)
    ]
    step_s = max(own[-1].start_s + own[-1].timeline.seconds for own in placed)
    return Timeline(step_s, tuple(_stage(*own, step_s) for own in zip(program.stages, placed, waits, strict=True)))


def _stage_timelines(
    stage: Stage, items: Sequence[Item], sharing: Sharing, known: dict[tuple[object, ...], SegmentTimeline]
) -> list[SegmentTimeline]:
    """Those of every item of a stage, and of the end; equal ones are simulated once."""
    last = {(item.chunk, item.direction): number for number, item in enumerate(items)}
    seen: set[tuple[int, str]] = set()
    found: list[SegmentTimeline] = []
    between = dict[tuple[int, str], SegmentTimeline]()  # of what is neither the first nor the last of its kind
    for number, item in enumerate(items):
        way = (item.chunk, item.direction)
        is_between = way in seen and number != last[way]
        if is_between and way in between:
            found.append(between[way])
            continue
        piece = stage.pieces[item.chunk]
        whole: Segment = getattr(piece, item.direction)
        when = (False, False) if whole.is_alike else (way not in seen, number == last[way])
        seen.add(way)
        key = (piece, item.direction, *when, sharing)
        if key not in known:
            segment = whole.in_microbatch(first=when[0], last=when[1])
            other = known.get((piece, item.direction, not when[0], when[1], sharing))
            alike = other if other is not None and other.segment.tasks == segment.tasks else None  # but for its memory
            known[key] = run(segment, sharing, alike)
        found.append(known[key])
        if is_between:
            between[way] = known[key]
    if (stage, sharing) not in known:
        known[stage, sharing] = run(stage.end, sharing)
    return [*found, known[stage, sharing]]


# --------------------------------------------------------------------------------------------------- between the stages


class _Step(NamedTuple):
    """An item on its stage, the place among all steps of the one that reads what it gives (-1: none), and its hop."""

    stage: int
    reader: int
    hop: int


class _Course(NamedTuple):
    """The items of every stage in order, and all of them, each after what it needs: the same for any model."""

    orders: Sequence[Sequence[Item]]
    steps: Sequence[_Step]


@lru_cache(maxsize=_MOST_COURSES)
def _course(schedule: Schedule, stages: int, chunks: int, many: int) -> _Course:
    run = Execution(schedule=schedule, num_stages=stages, chunks_per_stage=chunks, num_microbatches=many)
    schedules, steps = orders(run), list[_Step]()
    places = list(progress(schedules, run))
    numbers = {place: number for number, place in enumerate(places)}
    for stage, item in places:
        reader = target(item, stage, stages, chunks)
        hop = item.chunk * stages + stage - (item.direction == "backward")
        steps.append(_Step(stage, -1 if reader is None else numbers[reader], hop))
    return _Course(schedules, steps)


def _place(
    program: StepProgram, course: _Course, timelines: Sequence[Sequence[SegmentTimeline]]
) -> tuple[list[list[float]], list[float]]:
    """When every segment of every stage starts, the last one of each being the end of the step.

    And for how long that end waits for sums that are still going on.
    """
    num_stages, overlap, hops_s = program.execution.num_stages, program.execution.overlap, program.hops_s
    arrived = [0.0] * len(course.steps)  # what a step reads of another; what it reads of its own stage is there before
    clocks, starts = [0.0] * num_stages, [list[float]() for _ in range(num_stages)]
    sums = [0.0] * num_stages  # when each stage has summed its gradients; without overlap, how long it does
    for number, (stage, reader, hop) in enumerate(course.steps):
        own = starts[stage]
        timeline = timelines[stage][len(own)]
        start = max(clocks[stage], arrived[number])
        end = clocks[stage] = start + timeline.ready_s
        own.append(start)
        sums[stage] = (max(sums[stage], end) if overlap else sums[stage]) + timeline.seconds - timeline.ready_s
        if reader >= 0:
            arrived[reader] = end + hops_s[hop]
            clocks[stage] += 0.0 if overlap else hops_s[hop]
    waits = [max(0.0, s - clock) if overlap else s for s, clock in zip(sums, clocks, strict=True)]
    for own, clock, wait_s in zip(starts, clocks, waits, strict=True):
        own.append(clock + wait_s)
    return starts, waits


# ------------------------------------------------------------------------------------------------------------ one stage


def _stage(stage: Stage, placed: tuple[PlacedSegment, ...], wait_s: float, step_s: float) -> StageTimeline:
    """`wait_s`: at the end, for sums."""
    busy = defaultdict[str, float](float)
    waiting = wait_s
    for timeline, times in Counter(place.timeline for place in placed).items():
        waiting += times * timeline.waiting_s
        for stream, seconds in timeline.busy_s.items():
            busy[stream] += times * seconds
    compute_s = busy.get(COMPUTE, 0.0)
    memory, number = _peak(stage, placed)
    peak = placed[number]
    return StageTimeline(
        placed=placed,
        compute_s=compute_s,
        exposed_s=waiting,
        bubble_s=max(0.0, step_s - compute_s - waiting),
        busy_s=dict(busy),
        memory=memory,
        peak_place=number,
        peak_s=peak.start_s + peak.timeline.peak_s,
        peak_at=_moment(peak.item, peak.timeline.peak_task, placed),
        state_bytes=sum(stage.state.values()),
        device_bytes=stage.device.memory_bytes,
    )


def _peak(stage: Stage, placed: Sequence[PlacedSegment]) -> tuple[Memory, int]:
    """Memory at the peak, and the number of the segment in which it is."""
    nets = {place.timeline: sum(place.timeline.net.values()) for place in placed}
    total, best, at = sum(stage.state.values()), -1.0, 0
    for number, (_, _, timeline) in enumerate(placed):
        if total + timeline.peak_bytes > best:
            best, at = total + timeline.peak_bytes, number
        total += nets[timeline]
    found = defaultdict[str, float](float, stage.state)
    for timeline, times in Counter(place.timeline for place in placed[:at]).items():
        for category, num_bytes in timeline.net.items():
            found[category] += times * num_bytes
    for category, num_bytes in placed[at].timeline.peak.items():
        found[category] += num_bytes
    allocated = best - sum(stage.state.get(category, 0.0) for category in NOT_ALLOCATED)
    return Memory.of({**found, "slack": SLACK[stage.device.kind] * allocated}), at


def _moment(item: Item | None, task: str, placed: Sequence[PlacedSegment]) -> str:
    """What runs, in words: "backward of microbatch 3 of 4: h.0.attn backward"; the first one is number 1."""
    if item is None:
        return f"end of the step: {task}" if task else "end of the step"
    chunk = f", chunk {item.chunk}" if item.chunk else ""
    count = 1 + max(place.item.microbatch for place in placed if place.item is not None)
    return f"{item.direction} of microbatch {item.microbatch + 1} of {count}{chunk}" + (f": {task}" if task else "")
