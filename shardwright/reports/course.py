"""The actions of each stage and its memory over time, as data that the page draws.

The same action list is simulated, run and drawn. Repeated items are listed once:

    labels      names of tasks in their blocks
    results     the result of each label's operator on a device, in words, and its bytes; null for no operator
    runs        tasks of one block after the other: [label, stream, block, gap, duration, …], where `block` is how many
                blocks on from the run's own, and `gap` since the task before it on the same stream, in ticks
    tasks       of a segment: [run, block, start, …], where `block` is how many blocks on from the segment's; a run
                without one counts from there too
    courses     of memory in a segment: moments in ticks, and by category bytes in units, relative to its start
    nets        by category, the bytes that a segment leaves behind, negative for those it frees
    segments    forward, backward or weights of a chunk, or the end of the step
    stages      [[times, [segment, gap, …]], …]: a sequence that comes `times` times, with the ticks since the segment
                before was ready

Items in no block have null as their block. Microbatches of a chunk and direction come in order, so they have no
numbers. A course with many changes keeps the one with the most memory in each of equal stretches of time, and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from shardwright.cost.timeline.streams import MemoryCourse, SegmentTimeline
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.cost.timeline.timeline import NOT_ALLOCATED, SLACK, StageTimeline
from shardwright.reports.facts import PlanFacts
from shardwright.reports.units import shape

TICK_S = 1e-9
MOST_MOMENTS = 400
"""The most moments of memory in one segment."""
ALL_MOMENTS = 12_000
"""The most moments of memory in all segments: where there are more, each segment has fewer."""
LEAST_MOMENTS = 25
LONGEST_PERIOD = 256
"""The longest sequence of schedule items that is recognised as repeated."""

_Numbers = tuple[int | None, ...]


def course_data(facts: PlanFacts) -> dict[str, Any]:
    """Return the data of the timeline and of memory over time."""
    return _Drawn(facts).data()


class _Drawn:
    def __init__(self, facts: PlanFacts) -> None:
        self.facts, self.timeline = facts, facts.timeline
        self.blocks = {block: number for number, block in enumerate(facts.names.blocks)}
        self.labels, self.streams = dict[str, int](), {COMPUTE: 0}
        self.results = dict[str, tuple[str, int] | None]()
        self.runs, self.tasks, self.nets = dict[_Numbers, int](), dict[_Numbers, int](), dict[_Numbers, int]()
        self.segments: dict[tuple[SegmentTimeline, int, str], int] = {}
        self.unit_bytes = max(1.0, self.timeline.fullest.memory.total_bytes / 1e5)
        self.memory: dict[SegmentTimeline, MemoryCourse] = {}

    def data(self) -> dict[str, Any]:
        stages = [self._stage(number, stage) for number, stage in enumerate(self.timeline.stages)]
        self.memory = {timeline: timeline.course() for timeline, _, _ in self.segments}
        states = (program.state for program in self.facts.program.stages)
        courses = (course.categories for course in self.memory.values())
        categories = list(dict.fromkeys(chain(*states, *courses)))
        most, drawn = self._drawn(categories)
        courses = {course: number for number, course in enumerate(dict.fromkeys(drawn.values()))}
        segments = [self._segment(*each, courses[drawn[each[0]]], categories) for each in self.segments]
        return {
            "tick_s": TICK_S,
            "unit_bytes": self.unit_bytes,
            "step_s": self.timeline.step_s,
            "fullest": self.timeline.stages.index(self.timeline.fullest),
            "not_allocated": NOT_ALLOCATED,
            "most_moments": most if max(len(course.times_s) for course in self.memory.values()) > most else 0,
            "blocks": list(self.blocks),
            "streams": list(self.streams),
            "categories": categories,
            "segments": segments,
            "stages": stages,
            "labels": list(self.labels),
            "results": list(self.results.values()),
            "runs": list(self.runs),
            "tasks": list(self.tasks),
            "courses": list(courses),
            "nets": list(self.nets),
        }

    def _stage(self, number: int, stage: StageTimeline) -> dict[str, Any]:
        program, items, ready_s = self.facts.program.stages[number], list[tuple[int, int]](), 0.0
        for place in stage.placed:
            chunk, direction = (place.item.chunk, place.item.direction) if place.item else (0, "end")
            segment = self.segments.setdefault((place.timeline, chunk, direction), len(self.segments))
            items.append((segment, round((place.start_s - ready_s) / TICK_S)))
            ready_s = place.start_s + place.timeline.ready_s
        return {
            "items": repeated(items),
            "state": program.state,
            "slack": SLACK[program.device.kind],
            "device_bytes": stage.device_bytes,
            "memory": stage.memory.by_category(),
            "peak_s": stage.peak_s,
            "peak_at": self.facts.names.moment(stage.peak_at),
        }

    def _segment(
        self, timeline: SegmentTimeline, chunk: int, direction: str, course: int, categories: Sequence[str]
    ) -> dict[str, Any]:
        base, tasks = self._tasks(timeline)
        net = tuple(round(timeline.net.get(category, 0.0)) for category in categories)
        seconds = {"ready_s": timeline.ready_s, "compute_s": timeline.busy_s.get(COMPUTE, 0.0),
                   "waiting_s": timeline.waiting_s}  # fmt: skip
        return {
            "direction": direction,
            "chunk": chunk,
            "block": base,
            "tasks": self.tasks.setdefault(tasks, len(self.tasks)),
            "course": course,
            "net": self.nets.setdefault(net, len(self.nets)),
            **{name: float(f"{value:.9g}") for name, value in seconds.items()},
        }

    # ---- tasks ----

    def _tasks(self, timeline: SegmentTimeline) -> tuple[int, _Numbers]:
        """Return the segment's first block, and runs of tasks, each with its block and its start.

        Tasks of no time are left out. A plan's graph has all its blocks, so it has no folds.
        """
        blocks, coded = list[tuple[_Numbers, int, float]](), list[int | None]()
        home, begin_s, ended_s = -1, 0.0, dict[str, float]()
        listed = zip(timeline.segment.tasks, timeline.starts, timeline.ends, strict=True)
        tasks = [(t, *self.facts.names.of(t.name), start, end) for t, start, end in listed if end > start]
        base = next((self.blocks[name] for _, name, *_ in tasks if name), 0)
        for task, name, label, start_s, end_s in tasks:
            block = self.blocks[name]
            if home < 0 or (task.stream == COMPUTE and block != home):
                blocks.append((tuple(coded), home, begin_s))
                coded, home, begin_s, ended_s = [], block, start_s, {}
            gap_s = start_s - ended_s.get(task.stream, begin_s)
            if label not in self.labels:
                result = self.facts.names.result(task.name)
                self.results[label] = result and (f"{shape(result.shape)} {result.dtype}", result.num_bytes)
            coded += (
                self.labels.setdefault(label, len(self.labels)),
                self.streams.setdefault(task.stream, len(self.streams)),
                block - (home or base) if block else None,
                round(gap_s / TICK_S),
                round((end_s - start_s) / TICK_S),
            )
            ended_s[task.stream] = end_s
        numbers = list[int | None]()
        for run, block, start_s in [*blocks[1:], (tuple(coded), home, begin_s)] if coded else []:
            number = self.runs.setdefault(run, len(self.runs))
            numbers += (number, block - base if block else None, round(start_s / TICK_S))
        return base, tuple(numbers)

    # ---- memory ----

    def _drawn(self, categories: Sequence[str]) -> tuple[int, dict[SegmentTimeline, tuple[_Numbers, ...]]]:
        """Return the most moments of a segment, and each segment's course."""
        most = 2 * MOST_MOMENTS
        while True:
            most //= 2
            courses = {timeline: self._course(course, categories, most) for timeline, course in self.memory.items()}
            if most <= LEAST_MOMENTS or sum(len(c[0]) for c in set(courses.values())) <= ALL_MOMENTS:
                return most, courses

    def _course(self, course: MemoryCourse, categories: Sequence[str], most: int) -> tuple[_Numbers, ...]:
        """Return the moments, and the bytes of each category from then on."""
        rows = _moments(np.array(course.times_s), course.values.sum(axis=1), most)
        numbers = np.rint(course.values[rows] / self.unit_bytes).astype(np.int64)
        moments = tuple(round(course.times_s[row] / TICK_S) for row in rows)
        of = {category: tuple(numbers[:, column].tolist()) for column, category in enumerate(course.categories)}
        return (moments, *(of.get(category, ()) for category in categories))


def _moments(times_s: np.ndarray, totals: np.ndarray, most: int) -> list[int]:
    """Return the change with the highest total in each of equal stretches of time, and the last change."""
    if len(times_s) <= most:
        return list(range(len(times_s)))
    stretch = (most - 1) * (times_s - times_s[0]) / max(times_s[-1] - times_s[0], TICK_S)
    best = dict[int, int]()
    for row, number in enumerate(stretch.astype(int).tolist()):
        if number not in best or totals[row] > totals[best[number]]:
            best[number] = row
    return sorted({*best.values(), len(times_s) - 1})


def repeated(items: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Return items as [[times, [item, item, …]], …]: a repeated sequence is listed once, the longest first."""
    runs: list[tuple[int, list[int]]] = []
    at, alone = 0, list[int]()
    while at < len(items):
        period, times = _period(items, at)
        if times == 1:
            alone += items[at]
        else:
            runs += [(1, alone)] if alone else []
            alone = []
            runs.append((times, [number for item in items[at : at + period] for number in item]))
        at += period * times
    return [*runs, (1, alone)] if alone else runs


def _period(items: Sequence[tuple[int, int]], at: int) -> tuple[int, int]:
    """Return the length and count of the repeated sequence at `at`: the longest stretch, and the shortest sequence."""
    best = 1, 1
    for period in range(1, min(LONGEST_PERIOD, (len(items) - at) // 2) + 1):
        if items[at] != items[at + period]:
            continue
        first, times = items[at : at + period], 1
        while items[at + times * period : at + (times + 1) * period] == first:
            times += 1
        if times > 1 and times * period > best[0] * best[1]:
            best = period, times
    return best
