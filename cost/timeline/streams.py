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
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.timeline.clock import Sharing, times
from shardwright.cost.timeline.tasks import COMPUTE, Fold, Segment, Task


class Course(NamedTuple):
    """Something over time: its values from each time on."""

    times_s: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
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

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak.values())

    @cached_property
    def memory(self) -> Course:
        """Bytes in all, relative to the segment's start, at every change."""
        found = self.course()
        return Course(found.times_s, tuple(found.values.sum(axis=1).tolist()))

    def course(self) -> MemoryCourse:
        """The memory at every change, by category."""
        return course(self.segment, self.starts, self.ends, self.offsets)


def run(segment: Segment, sharing: Sharing, alike: SegmentTimeline | None = None) -> SegmentTimeline:
    """Simulate a segment. `alike`: one of the same tasks, where only the memory differs."""
    starts, ends = (alike.starts, alike.ends) if alike else times(segment.tasks, sharing)
    windows = [_window(fold, segment.tasks, ends) for fold in segment.folds]
    offsets, seconds = _stretch(segment, starts, ends, windows)
    busy = defaultdict[str, float](float)
    for task, copies, start, end in zip(segment.tasks, segment.copies(), starts, ends, strict=True):
        busy[task.stream] += copies * (end - start)
    memory = _memory(segment, _changes(segment, starts, ends), offsets)
    ready_s = seconds
    if segment.has_last:
        awaited = [e + o for t, e, o in zip(segment.tasks, ends, offsets, strict=True) if not _goes_on(t)]
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
    if not segment.folds:
        return offsets, max(ends, default=0.0)
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


class MemoryCourse(NamedTuple):
    """Memory over time, relative to the start of a segment.

    times_s      of every change, and `tasks` which take or give back then
    buffers      the number of the buffer that changes, with whether it is given back
    categories   columns of `values`, the bytes from each change on
    """

    times_s: tuple[float, ...]
    tasks: tuple[int, ...]
    buffers: tuple[tuple[int, bool], ...]
    categories: tuple[str, ...]
    values: NDArray[np.float64]

    @property
    def peak(self) -> int:
        """The change at which most is there; -1 where that is never more than at the start."""
        return _peak(self.values)


def _peak(values: NDArray[np.float64]) -> int:
    """The row of which the sum is the largest; -1 where none is above 0."""
    totals = values.sum(axis=1)
    row = int(totals.argmax()) if len(totals) else -1
    return row if row >= 0 and totals[row] > 0 else -1


def course(segment: Segment, starts: Sequence[float], ends: Sequence[float], offsets: Sequence[float]) -> MemoryCourse:
    """Every change of a segment's memory, in order."""
    events, categories, values = _changes(segment, starts, ends)
    times_s = tuple([moment + offsets[task] for moment, task, *_ in events])
    tasks, buffers = tuple([event[1] for event in events]), tuple([(event[5], event[2]) for event in events])
    return MemoryCourse(times_s, tasks, buffers, categories, values)


_Event = tuple[float, int, bool, int, float, int]
"""A change: its moment, not put off, and its task; whether something is given back; column and bytes; the buffer."""
_Changes = tuple[list[_Event], tuple[str, ...], NDArray[np.float64]]
"""All changes in order, the categories in the columns, and the bytes from each change on."""


def _changes(segment: Segment, starts: Sequence[float], ends: Sequence[float]) -> _Changes:
    categories = tuple(dict.fromkeys([buffer.category for buffer in segment.buffers]))
    columns = {category: column for column, category in enumerate(categories)}
    events: list[_Event] = [
        (starts[taken], taken, False, columns[category], num_bytes, number)
        for number, (category, num_bytes, taken, _, _, _) in enumerate(segment.buffers)
        if taken is not None
    ]
    events += [
        (ends[last], last, True, columns[category], -num_bytes, number)
        for number, (category, num_bytes, _, freed, _, _) in enumerate(segment.buffers)
        if freed
        for last in (freed if len(freed) == 1 else (max(freed, key=lambda i: (ends[i], i)),))
    ]
    events.sort()
    changes = np.zeros((len(events), len(categories)))
    if events:
        changes[np.arange(len(events)), [event[3] for event in events]] = [event[4] for event in events]
    values = changes.cumsum(axis=0)
    order = np.array([event[1] for event in events] if segment.folds else (), np.intp)
    for fold in segment.folds:  # further blocks change what is there as the second one does
        change = changes[(order >= fold.start) & (order < fold.end)].sum(axis=0)
        values += np.where(order[:, None] >= fold.end, fold.more * change, 0.0)
    return events, categories, values


def _memory(
    segment: Segment, found: _Changes, offsets: Sequence[float]
) -> tuple[dict[str, float], float, str, dict[str, float]]:
    """Peak by category, its moment and task, and the net change."""
    events, categories, values = found
    if not events:
        return {}, 0.0, "", {}
    net = dict(zip(categories, values[-1].tolist(), strict=True))
    if (row := _peak(values)) < 0:
        return {}, 0.0, segment.tasks[0].name, net
    peak = dict(zip(categories, values[row].tolist(), strict=True))
    moment, task, *_ = events[row]
    return peak, moment + offsets[task], segment.tasks[task].name, net
