"""The timeline of a step: every stage's microbatches in the order of the schedule, and the memory of every stage.

There are two levels. A segment (forward, backward or its second part, of one microbatch through one chunk) is simulated
once, task by task (`streams.py`). The schedule then moves whole segments: a segment begins when its stage is free and
its inputs from the neighbouring stages have arrived. So the cost of a timeline is that of the distinct segments, plus a
few operations per microbatch and stage.

Memory over time is the memory that is always there, plus the memory that earlier segments have left, plus the course
within the running segment. Its peak is a moment of one stage, with the task that runs then; no categories' maxima are
added up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.clusters.device import DeviceKind
from shardwright.cost.timeline.clock import SHARING, Sharing
from shardwright.cost.timeline.memory import Memory
from shardwright.cost.timeline.segments import ChunkSegments, SimulatedSegments, Stage, StepProgram
from shardwright.cost.timeline.streams import SegmentTimeline, run
from shardwright.cost.timeline.tasks import COMPUTE, Segment
from shardwright.pcg.step.pipelining import Schedule
from shardwright.pcg.step.schedules import Item, Phase, Transfer, orders, phases, progress, send

SLACK: dict[DeviceKind, float] = {"cuda": 0.05, "cpu": 0.0}
"""Memory that the allocator holds beyond the memory in use, as a share of it. cuda: assumed; blocks are rounded up, and
freed blocks do not always fit the next request. cpu: freed memory of this size goes back to the system."""
_MOST_COURSES = 8
"""The most courses in the cache: one of many stages and microbatches has a hundred thousand steps."""
NOT_ALLOCATED = ("context", "communication")
"""Categories of memory outside the allocator."""
_Seconds = NDArray[np.float64]
_Indices = NDArray[np.intp]


class PlacedSegment(NamedTuple):
    """A segment on a stage's clock. `item`: None for the end of the step."""

    item: Item | None
    start_s: float
    timeline: SegmentTimeline


@dataclass(frozen=True, slots=True, eq=False)
class StageTimeline:
    """The step of each device of one stage.

    Attributes:
        items: in order; the end of the step comes after them.
        starts_s: of the items, and of the end.
        timelines: of the kinds of items, and of the end; `which`: the number of each item's timeline, and of the end's.
        compute_s: while the compute stream runs, slowed by communication or not.
        exposed_s: while it waits for communication or copies.
        bubble_s: while the stage has nothing to do until the step ends everywhere; the three add up to the step.
        busy_s: by stream.
        memory: at the peak, by category, the allocator's slack included.
        peak_place: the number of the segment with the peak.
        peak_s: the moment of the peak.
        peak_at: a description of the task that runs then.
        state_bytes: memory at the start of the step.
        device_bytes: the memory of its devices.
    """

    items: Sequence[Item]
    starts_s: _Seconds
    timelines: Sequence[SegmentTimeline]
    which: _Indices
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
    def placed(self) -> tuple[PlacedSegment, ...]:
        """The stage's segments, in order."""
        chosen = (self.timelines[number] for number in self.which.tolist())
        return tuple(map(PlacedSegment, (*self.items, None), self.starts_s.tolist(), chosen))

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
        """The stage with the least bubble, which decides the duration of the step."""
        return max(self.stages, key=lambda stage: stage.at_work_s)

    @property
    def fullest(self) -> StageTimeline:
        """The stage whose peak is the largest share of its devices' memory."""
        return max(self.stages, key=lambda stage: stage.memory.total_bytes / stage.device_bytes)


def simulate(program: StepProgram, sharing: Mapping[DeviceKind, Sharing] = SHARING) -> Timeline:
    """Return the timeline of a program. `sharing`: how compute and communication slow each other, by device kind."""
    execution = program.execution
    course = _course(execution.schedule, execution.assumed.num_microbatches)
    known = dict[tuple[ChunkSegments, Sharing], list[SegmentTimeline]]()
    timelines = list[list[SegmentTimeline]]()
    for stage in program.stages:
        pace, of_stage = sharing[stage.device.kind], list[SegmentTimeline]()
        for piece in stage.pieces:
            if (piece, pace) not in known:
                known[piece, pace] = list(piece_timelines(piece, course.kinds, pace, program.simulated))
            of_stage += known[piece, pace]
        if (stage, pace) not in program.simulated:
            program.simulated[stage, pace] = run(stage.end, pace)
        timelines.append([*of_stage, program.simulated[stage, pace]])
    starts, waits = _place(program, course, timelines)
    placed = list(map(_Placed, course.orders, starts, timelines, course.which))
    step_s = max(stage.end_s for stage in placed)
    return Timeline(step_s, tuple(_stage(*facts, step_s) for facts in zip(program.stages, placed, waits, strict=True)))


def piece_timelines(
    piece: ChunkSegments, kinds: Sequence[Kind], sharing: Sharing, known: SimulatedSegments
) -> Iterator[SegmentTimeline]:
    """Yield the timeline of every kind of item of a chunk; equal ones are simulated once."""
    alike = {direction: getattr(piece, direction).is_alike for direction in {kind.direction for kind in kinds}}
    for direction, first, last in kinds:
        when = (False, False) if alike[direction] else (first, last)
        key = (piece, direction, *when, sharing)
        if key not in known:
            whole: Segment = getattr(piece, direction)
            segment = whole.in_microbatch(first=when[0], last=when[1])
            other = known.get((piece, direction, not when[0], when[1], sharing))
            same = other if other is not None and other.segment.tasks == segment.tasks else None  # but for its memory
            known[key] = run(segment, sharing, same)
        yield known[key]


# --------------------------------------------------------------------------------------------------- between the stages


class Kind(NamedTuple):
    """A kind of items of a chunk with the same segment: one direction, apart from the first and the last microbatch."""

    direction: Phase
    first: bool
    last: bool


class _Course(NamedTuple):
    """The items of every stage in order, and all of them as steps, each after its inputs: the same for any model.

    kinds     of the items of a chunk
    which     of each stage: for every item the number of its kind, offset by its chunk; last, the number of the end of
              the step
    numbers   of each stage: the place of every item among the steps
    steps     stage, the place among steps of the one on another stage that reads this one's result (-1: none), and the
              boundary between the two
    """

    orders: Sequence[Sequence[Item]]
    kinds: Sequence[Kind]
    which: Sequence[_Indices]
    numbers: Sequence[_Indices]
    steps: Sequence[tuple[int, int, int]]


@lru_cache(maxsize=_MOST_COURSES)
def _course(schedule: Schedule, many: int) -> _Course:
    chunks = schedule.chunks_per_stage
    listed, steps = orders(schedule, many), list[tuple[int, int, int]]()
    ends = [(True, False), (False, True), (False, False)][:many] if many > 1 else [(True, True)]
    kinds = [Kind(direction, *end) for direction in phases(schedule.name) for end in ends]
    numbers = {tuple(kind): number for number, kind in enumerate(kinds)}
    which, by_stage = list[_Indices](), [list[int]() for _ in listed]
    for items in listed:
        positions = [
            item.chunk * len(kinds) + numbers[item.direction, item.microbatch == 0, item.microbatch == many - 1]
            for item in items
        ]
        which.append(np.array([*positions, chunks * len(kinds)]))
    places = list(progress(listed, schedule))
    at = {place: number for number, place in enumerate(places)}
    sends = dict[tuple[int, int, Phase], Transfer | None]()  # alike for all microbatches
    for number, (stage, (chunk, microbatch, direction)) in enumerate(places):
        by_stage[stage].append(number)
        way = stage, chunk, direction
        if way not in sends:
            sends[way] = send(Item(chunk, microbatch, direction), stage, schedule)
        if (sent := sends[way]) is None:
            steps.append((stage, -1, 0))
        else:
            reader = Item(sent.reader.chunk, microbatch, sent.reader.direction)
            steps.append((stage, at[sent.target, reader], sent.boundary))
    return _Course(listed, kinds, which, list(map(np.array, by_stage)), steps)


def _place(
    program: StepProgram, course: _Course, timelines: Sequence[Sequence[SegmentTimeline]]
) -> tuple[list[_Seconds], list[float]]:
    """Return the starts of every stage's segments, the end of the step last.

    The second result is how long that end waits for sums that are still going on.
    """
    overlap, hops_s = program.execution.assumed.overlap, program.hops_s
    ready_s = [
        np.array([one.ready_s for one in segments])[w[:-1]] for segments, w in zip(timelines, course.which, strict=True)
    ]
    steps_s = np.empty(len(course.steps))
    steps_s[np.concatenate(course.numbers)] = np.concatenate(ready_s)
    arrived = [0.0] * len(course.steps)  # when inputs from other stages arrive; a stage's own are there before
    clocks, starts = [0.0] * len(timelines), list[float]()
    for (stage, reader, hop), come, seconds in zip(course.steps, arrived, steps_s.tolist(), strict=True):
        clock = clocks[stage]
        start = clock if clock > come else come
        starts.append(start)
        clocks[stage] = end = start + seconds
        if reader >= 0:
            arrived[reader] = end + hops_s[hop]
            if not overlap:
                clocks[stage] += hops_s[hop]
    starts_of, waits, all_starts = list[_Seconds](), list[float](), np.array(starts)
    for stage, (segments, clock) in enumerate(zip(timelines, clocks, strict=True)):
        starts_s, which = all_starts[course.numbers[stage]], course.which[stage][:-1]
        rest_s = np.array([one.seconds - one.ready_s for one in segments])[which]
        late, sums_s = np.flatnonzero(rest_s), 0.0  # when gradients are summed; without overlap, how long that takes
        for end_s, more_s in zip((starts_s + ready_s[stage])[late].tolist(), rest_s[late].tolist(), strict=True):
            sums_s = (max(sums_s, end_s) if overlap else sums_s) + more_s
        waits.append(max(0.0, sums_s - clock) if overlap else sums_s)
        starts_of.append(np.append(starts_s, clock + waits[-1]))
    return starts_of, waits


# ------------------------------------------------------------------------------------------------------------ one stage


class _Placed(NamedTuple):
    """A stage's items: the starts of these and of the end, the timelines of their kinds, and each one's timeline."""

    items: Sequence[Item]
    starts_s: _Seconds
    timelines: Sequence[SegmentTimeline]
    which: _Indices

    @property
    def end_s(self) -> float:
        return float(self.starts_s[-1]) + self.timelines[-1].seconds

    def counts(self, until: int | None = None) -> Mapping[SegmentTimeline, int]:
        """Count the occurrences of each timeline, by first occurrence, before item number `until` or in all."""
        occurrences = dict[SegmentTimeline, int]()
        kinds, firsts, times = np.unique(self.which[:until], return_index=True, return_counts=True)
        for at in np.argsort(firsts).tolist():
            timeline = self.timelines[int(kinds[at])]
            occurrences[timeline] = occurrences.get(timeline, 0) + int(times[at])
        return occurrences


def _stage(stage: Stage, placed: _Placed, wait_s: float, step_s: float) -> StageTimeline:
    """Return a stage's timeline. `wait_s`: at the end, for sums."""
    busy = defaultdict[str, float](float)
    waiting = wait_s
    for timeline, times in placed.counts().items():
        waiting += times * timeline.waiting_s
        for stream, seconds in timeline.busy_s.items():
            busy[stream] += times * seconds
    compute_s = busy.get(COMPUTE, 0.0)
    memory, number = _peak(stage, placed)
    peak = placed.timelines[placed.which[number]]
    return StageTimeline(
        *placed,
        compute_s=compute_s,
        exposed_s=waiting,
        bubble_s=max(0.0, step_s - compute_s - waiting),
        busy_s=dict(busy),
        memory=memory,
        peak_place=number,
        peak_s=float(placed.starts_s[number]) + peak.peak_s,
        peak_at=_moment(number, peak.peak_task, placed.items),
        state_bytes=sum(stage.state.values()),
        device_bytes=stage.device.memory_bytes,
    )


def _peak(stage: Stage, placed: _Placed) -> tuple[Memory, int]:
    """Return the memory at the peak, and the number of its segment."""
    nets = np.array([sum(timeline.net.values()) for timeline in placed.timelines])[placed.which]
    peaks = np.array([timeline.peak_bytes for timeline in placed.timelines])[placed.which]
    before = np.cumsum(np.concatenate(([sum(stage.state.values())], nets[:-1])))
    at = int((before + peaks).argmax())
    best, peak = float(before[at] + peaks[at]), placed.timelines[placed.which[at]]
    by_category = defaultdict[str, float](float, stage.state)
    for timeline, times in placed.counts(at).items():
        for category, num_bytes in timeline.net.items():
            by_category[category] += times * num_bytes
    for category, num_bytes in peak.peak.items():
        by_category[category] += num_bytes
    allocated = best - sum(stage.state.get(category, 0.0) for category in NOT_ALLOCATED)
    return Memory.of({**by_category, "slack": SLACK[stage.device.kind] * allocated}), at


def _moment(number: int, task: str, items: Sequence[Item]) -> str:
    """Return a description of a task: "backward of microbatch 3 of 4: h.0.attn backward", counted from 1."""
    if number == len(items):
        return f"end of the step: {task}" if task else "end of the step"
    item, count = items[number], 1 + max(item.microbatch for item in items)
    chunk = f", chunk {item.chunk}" if item.chunk else ""
    return f"{item.direction} of microbatch {item.microbatch + 1} of {count}{chunk}" + (f": {task}" if task else "")
