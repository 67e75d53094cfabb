"""When the tasks of a segment run: streams side by side, slowed by each other, and the memory that is taken meanwhile.

Every stream works off its tasks in order. Where several streams are busy they share the device and its links:

* **Compute beside communication**: both run at `Sharing.compute` and `Sharing.communication` of their speeds. The
  shares add up to at least 1, so that overlap never loses.
* **Collectives of several axes at once** share the links that their groups cross: each runs at 1/n of its speed.
* Copies to and from the host disturb nobody.

Folds (`tasks.Fold`) are stretched: what the second of three equal blocks adds counts for every further one. So the cost
of a simulation does not grow with depth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.cost.timeline.clock import Sharing, times
from shardwright.cost.timeline.tasks import COMPUTE, Fold, Segment, Task


class Course(NamedTuple):
    """Something over time: its values from each time on."""

    times_s: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTimeline:
    """A simulated segment, with times from its start.

    Attributes:
        segment: what was simulated.
        seconds: until the last task has ended, folds included.
        ready_s: until the next segment can begin: sums of gradients over devices go on beside it.
        starts, ends: of every task, as if folds stood for nothing; `offsets`: how much later they are because of them.
        busy_s: by stream, while a task of it runs, slowed or not.
        waiting_s: while the compute stream has nothing to run, until the next segment can begin.
        peak: bytes by category at the moment at which most are in use, relative to the segment's start.
        peak_s: that moment.
        peak_task: the task that runs, or takes memory, then.
        net: bytes by category, the end compared with the start.
        memory: bytes in all, relative to the segment's start, at every change.
    """

    segment: Segment
    seconds: float
    ready_s: float
    starts: Sequence[float]
    ends: Sequence[float]
    offsets: Sequence[float]
    busy_s: Mapping[str, float]
    waiting_s: float
    peak: Mapping[str, float]
    peak_s: float
    peak_task: str
    net: Mapping[str, float]
    memory: Course

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak.values())


def run(segment: Segment, sharing: Sharing, alike: SegmentTimeline | None = None) -> SegmentTimeline:
    """Simulate a segment. `alike`: one of the same tasks, where only the memory differs."""
    starts, ends = (alike.starts, alike.ends) if alike else times(segment.tasks, sharing)
    windows = [_window(fold, segment.tasks, ends) for fold in segment.folds]
    offsets, seconds = _stretch(segment, starts, ends, windows)
    busy = defaultdict[str, float](float)
    for task, copies, start, end in zip(segment.tasks, segment.copies(), starts, ends, strict=True):
        busy[task.stream] += copies * (end - start)
    memory = _memory(segment, starts, ends, offsets)
    awaited = (e + o for t, e, o in zip(segment.tasks, ends, offsets, strict=True) if not _goes_on(t))
    ready_s = max(awaited, default=seconds)
    waiting_s = max(0.0, ready_s - busy.get(COMPUTE, 0.0))
    return SegmentTimeline(segment, seconds, ready_s, starts, ends, offsets, dict(busy), waiting_s, *memory)


def _goes_on(task: Task) -> bool:
    """Whether only the end of the step waits for it: sums over devices of gradients that are complete."""
    return task.microbatch == "last" and task.stream != COMPUTE and not task.blocks


# ---------------------------------------------------------------------------------------------------------------- folds


_Window = tuple[float, float]


def _stretch(
    segment: Segment, starts: Sequence[float], ends: Sequence[float], windows: Sequence[_Window]
) -> tuple[list[float], float]:
    """How much later each task is than simulated, as folds stand for more blocks; and the whole duration.

    One more block adds what compute takes for it. Communication that compute does not wait for and that takes longer
    piles up: what is left of it then comes on top for its stream.
    """
    tasks, offsets = segment.tasks, [0.0] * len(starts)
    for fold, (begin, end) in zip(segment.folds, windows, strict=True):
        left = _left(fold, tasks, starts, ends, (begin, end))
        piled_up = fold.more * sum(left.values())
        for number in range(fold.end, len(offsets)):
            offsets[number] += fold.more * (end - begin) + (piled_up if tasks[number].stream in left else 0.0)
    return offsets, max((end + offset for end, offset in zip(ends, offsets, strict=True)), default=0.0)


def _left(
    fold: Fold, tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], window: _Window
) -> dict[str, float]:
    """By stream, how much more a block launches than is done while compute runs one."""
    begin, end = window
    left = defaultdict[str, float](float)
    for number, task in enumerate(tasks):
        if task.stream == COMPUTE or not task.seconds:
            continue
        if fold.start <= number < fold.end:
            left[task.stream] += task.seconds
        inside = min(end, ends[number]) - max(begin, starts[number])
        if inside > 0:
            left[task.stream] -= task.seconds * inside / (ends[number] - starts[number])
    return {stream: seconds for stream, seconds in left.items() if seconds > 1e-9 * (end - begin)}


def _window(fold: Fold, tasks: Sequence[Task], ends: Sequence[float]) -> _Window:
    """When compute ends the first and the second of the three blocks: the tasks of one stream end in their order."""

    def computed(until: int) -> float:
        return next((ends[i] for i in reversed(range(until)) if tasks[i].stream == COMPUTE), 0.0)

    return computed(fold.start), computed(fold.end)


# --------------------------------------------------------------------------------------------------------------- memory


_Event = tuple[float, int, int, int, float]
"""Time, task, 1 if memory is given back, column of the category, bytes."""


def _memory(
    segment: Segment,
    starts: Sequence[float],
    ends: Sequence[float],
    offsets: Sequence[float],
) -> tuple[dict[str, float], float, str, dict[str, float], Course]:
    """Peak by category, its moment and task, the net change, and the whole course."""
    categories = list(dict.fromkeys(b.category for b in segment.buffers))
    columns = {category: column for column, category in enumerate(categories)}
    events: list[_Event] = []
    for category, num_bytes, taken, freed, _ in segment.buffers:
        column = columns[category]
        if taken is not None:
            events.append((starts[taken], taken, 0, column, num_bytes))
        if freed:
            last = freed[0] if len(freed) == 1 else max(freed, key=lambda i: (ends[i], i))
            events.append((ends[last], last, 1, column, -num_bytes))
    if not events:
        return {}, 0.0, "", {}, Course()
    events.sort()
    changes = np.zeros((len(events), len(categories)))
    moments, numbers, _, where, sizes = zip(*events, strict=True)
    changes[np.arange(len(events)), where] = sizes
    course = np.cumsum(changes, axis=0)
    order = np.array(numbers)
    for fold in segment.folds:  # further blocks change what is there as the second one does
        change = changes[(order >= fold.start) & (order < fold.end)].sum(axis=0)
        course += np.where(order[:, None] >= fold.end, fold.more * change, 0.0)
    totals = course.sum(axis=1)
    row = int(totals.argmax())
    net = dict(zip(categories, course[-1].tolist(), strict=True))
    at_s = tuple(moment + offsets[number] for moment, number in zip(moments, numbers, strict=True))
    memory = Course(at_s, tuple(totals.tolist()))
    if totals[row] <= 0:  # nothing is above what was there at the start
        return {}, 0.0, segment.tasks[0].name, net, memory
    peak = dict(zip(categories, course[row].tolist(), strict=True))
    return peak, memory.times_s[row], segment.tasks[events[row][1]].name, net, memory
