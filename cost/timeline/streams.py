"""The run of a segment's tasks on parallel streams that slow each other, and its memory over time.

Every stream works off its tasks in order. Where several streams are busy they share the device and its links:

* **Compute beside communication**: both run at `Sharing.compute` and `Sharing.communication` of their speeds. The
  shares add up to at least 1, so that overlap never loses.
* **Collectives of several axes at once** share the links that their groups cross: each runs at 1/n of its speed.
* Copies to and from the host disturb nobody.

Folds (`tasks.Fold`) are stretched: the time that the second of three equal blocks adds counts for every further block,
once tasks that were launched before it are done. So the cost of a simulation does not grow with depth. Where tasks of
several collective streams are left from before, each is taken to go on at its pace beside the others, also when it has
become the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.timeline.clock import Sharing, times
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Fold, Segment, Task


class Course(NamedTuple):
    """A quantity over time: its values from each time on."""

    times_s: tuple[float, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class SegmentTimeline:
    """A simulated segment, with times from its start.

    Attributes:
        segment: the segment that was simulated.
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
        """The bytes in all, relative to the segment's start, at every change."""
        by_category = self.course()
        return Course(by_category.times_s, tuple(by_category.values.sum(axis=1).tolist()))

    def course(self) -> MemoryCourse:
        """Return the memory at every change, by category."""
        return course(self.segment, self.starts, self.ends, self.offsets)


def run(segment: Segment, sharing: Sharing, alike: SegmentTimeline | None = None) -> SegmentTimeline:
    """Simulate a segment. `alike`: a simulated segment of the same tasks, from which only the memory differs."""
    starts, ends, offsets, seconds, busy = (
        (alike.starts, alike.ends, alike.offsets, alike.seconds, alike.busy_s) if alike else _timed(segment, sharing)
    )
    memory = _memory(segment, _changes(segment, starts, ends), offsets)
    ready_s = seconds
    if segment.has_last:
        awaited = [e + o for t, e, o in zip(segment.tasks, ends, offsets, strict=True) if not _goes_on(t)]
        ready_s = max(awaited, default=seconds)
    waiting_s = max(0.0, ready_s - busy.get(COMPUTE, 0.0))
    return SegmentTimeline(segment, seconds, ready_s, starts, ends, offsets, busy, waiting_s, *memory)


def _goes_on(task: Task) -> bool:
    """Return whether only the end of the step waits for a task: a sum over devices of complete gradients."""
    return task.microbatch == "last" and task.stream != COMPUTE and not task.blocks


# ---------------------------------------------------------------------------------------------------------------- folds


_Window = tuple[float, float]
_MOST_COPIES = 8
"""The most copies of a fold's block that are simulated until tasks from before it are done."""
_DRAINS = 1e-2
"""The share of a window: if less of the tasks from before runs in it, one block is taken to be like the next."""


class _Timed(NamedTuple):
    """The times of `SegmentTimeline`, before its memory is known."""

    starts: Sequence[float]
    ends: Sequence[float]
    offsets: Sequence[float]
    seconds: float
    busy_s: Mapping[str, float]


def _timed(segment: Segment, sharing: Sharing) -> _Timed:
    """Return the times of every task; a folded block is simulated until its copies are all alike.

    A further block adds its time in compute. Communication that compute does not wait for and that takes longer piles
    up: the rest of it then adds to its stream's time. Rest from before the fold is reduced by the same account.
    """
    copies = [0] * len(segment.folds)
    copied = _Copied(segment, copies)
    starts, ends = times(copied.tasks, sharing)
    if segment.folds:
        done = _Done(copied.tasks, starts, ends, sharing)
        copies = [_until_alike(fold, done) for fold in segment.folds]
        if any(copies):
            copied = _Copied(segment, copies)
            starts, ends = times(copied.tasks, sharing)
    return _stretched(segment, copied, starts, ends, sharing)


class _Copied:
    """The tasks of a segment with further copies of each fold's block behind it.

    Attributes:
        tasks: all of them.
        at: by the number of a segment's task, its number among `tasks`; for a copied block, in the first copy.
        copies: the number of further copies of each fold, as given.
    """

    def __init__(self, segment: Segment, copies: Sequence[int]) -> None:
        self.copies, self.tasks, self.at = copies, list(segment.tasks), list(range(len(segment.tasks)))
        if not any(copies):
            return
        last, self.tasks, begin = list(self.at), [], 0  # `last`: as `at`, but of the last copy
        ordered = sorted(zip(segment.folds, copies, strict=True), key=lambda pair: pair[0].start)
        for fold, number in ordered:
            self._add(segment.tasks, range(begin, fold.end), last)
            size, begin = fold.end - fold.start, fold.end
            for _ in range(number):
                before = {fold.start - size + i: last[fold.start + i] for i in range(size)}  # the block before a copy
                start = len(self.tasks)
                inside = {fold.start + i: start + i for i in range(size)}
                for task in segment.tasks[fold.start : fold.end]:
                    after = tuple([inside.get(i, before.get(i, last[i])) for i in task.after])
                    self.tasks.append(task._replace(after=after))
                last[fold.start : fold.end] = inside.values()
        self._add(segment.tasks, range(begin, len(segment.tasks)), last)

    def _add(self, tasks: Sequence[Task], block: range, last: list[int]) -> None:
        for number in block:
            self.at[number] = last[number] = len(self.tasks)
            self.tasks.append(tasks[number]._replace(after=tuple([last[i] for i in tasks[number].after])))


def _stretched(
    segment: Segment, copied: _Copied, starts: Sequence[float], ends: Sequence[float], sharing: Sharing
) -> _Timed:
    """Return the segment's tasks as in the copies, put off by the copies and by all blocks that are not copied."""
    at, count, done = copied.at, len(segment.tasks), _Done(copied.tasks, starts, ends, sharing)
    own_starts, own_ends, offsets = [starts[i] for i in at], [ends[i] for i in at], [0.0] * count
    lasting = [end - start for start, end in zip(own_starts, own_ends, strict=True)]
    for fold, number in zip(segment.folds, copied.copies, strict=True):
        size, more = fold.end - fold.start, fold.more - number
        if not size:
            continue
        first = at[fold.start]
        last = Fold(first + number * size, first + (number + 1) * size, more)
        _, begun = _window(Fold(first, first + size, 0), copied.tasks, ends)
        window = _window(last, copied.tasks, ends)
        left = _left(last, done, window)
        later_s = dict.fromkeys(left, more * sum(left_s for left_s in left.values() if left_s > 0))
        shift = window[1] - begun
        put_off = shift + more * (window[1] - window[0])
        for stream in (stream for stream, left_s in left.items() if left_s < 0):  # until tasks from before are done
            rest_s = _rest_s(stream, last.end, done, window[1])
            later_s[stream] = max(more * left[stream], -rest_s)
            if stream != COPY:  # which disturbs nobody
                put_off -= sharing.least * (later_s[stream] - more * left[stream])
        for i in range(fold.end, count):
            own_starts[i] -= shift
            own_ends[i] -= shift
            offsets[i] += put_off + later_s.get(segment.tasks[i].stream, 0.0)
        computed = (put_off - shift) / (window[1] - window[0]) if window[1] > window[0] else more
        for i in range(size):
            copies = [ends[j] - starts[j] for j in range(first + i, last.end, size)]
            further = computed if segment.tasks[fold.start + i].stream == COMPUTE else more
            lasting[fold.start + i] = sum(copies) + further * copies[-1]
    seconds = max((end + offset for end, offset in zip(own_ends, offsets, strict=True)), default=0.0)
    busy = defaultdict[str, float](float)
    for task, own_s in zip(segment.tasks, lasting, strict=True):
        busy[task.stream] += own_s
    return _Timed(own_starts, own_ends, offsets, seconds, dict(busy))


def _until_alike(fold: Fold, done: _Done) -> int:
    """Return how many further copies of a block run until tasks from before are done, and one is like the next."""
    begin, end = window = _window(fold, done.tasks, done.ends)
    blocks = 0
    for stream, left_s in _left(fold, done, window).items():
        if left_s > -_DRAINS * (end - begin):
            continue
        blocks = max(blocks, 1 + ceil(_rest_s(stream, fold.end, done, end) / -left_s))
    return min(blocks, fold.more, _MOST_COPIES)


class _Done:
    """Answers how many seconds of a task are done between two moments."""

    def __init__(self, tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float], sharing: Sharing) -> None:
        self.tasks, self.starts, self.ends, self.slower = tasks, starts, ends, 1 - sharing.communication

    @cached_property
    def computed(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The moments at which kernels start and end, and the seconds that compute has run until then."""
        computing = [i for i, task in enumerate(self.tasks) if task.stream == COMPUTE and self.ends[i] > self.starts[i]]
        moments = np.array([(self.starts[i], self.ends[i]) for i in computing]).reshape(-1)
        lengths = np.diff(moments, prepend=moments[:1])
        lengths[::2] = 0.0  # before each start
        return moments, np.cumsum(lengths)

    def seconds(self, number: int, begin: float, end: float) -> float:
        start, stop = self.starts[number], self.ends[number]
        begin, end = max(begin, start), min(end, stop)
        if end <= begin:
            return 0.0
        task = self.tasks[number]
        if (begin, end) == (start, stop):
            return task.seconds
        return task.seconds * self._pace(task, begin, end) / self._pace(task, start, stop)

    def _pace(self, task: Task, begin: float, end: float) -> float:
        if not self.slower or task.stream == COPY:
            return end - begin
        computed_s = np.interp((begin, end), *self.computed)
        return end - begin - self.slower * float(computed_s[1] - computed_s[0])


def _rest_s(stream: str, until: int, done: _Done, moment: float) -> float:
    """Return a stream's remaining seconds, at a moment, of the tasks launched before task `until`."""
    return sum(done.seconds(i, moment, inf) for i, task in enumerate(done.tasks[:until]) if task.stream == stream)


def _left(fold: Fold, done: _Done, window: _Window) -> dict[str, float]:
    """Return, by stream, the seconds that a block launches less those done while compute runs one block."""
    begin, end = window
    left = defaultdict[str, float](float)
    for number, task in enumerate(done.tasks):
        if task.stream == COMPUTE or not task.seconds:
            continue
        if fold.start <= number < fold.end:
            left[task.stream] += task.seconds
        left[task.stream] -= done.seconds(number, begin, end)
    return {stream: seconds for stream, seconds in left.items() if abs(seconds) > 1e-9 * (end - begin)}


def _window(fold: Fold, tasks: Sequence[Task], ends: Sequence[float]) -> _Window:
    """Return when compute ends the first and the second of the three blocks: a stream's tasks end in their order."""

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
        """The change at which memory is largest; -1 if it never exceeds the start."""
        return _peak(self.values)


def _peak(values: NDArray[np.float64]) -> int:
    """Return the row with the largest sum; -1 where none is above 0."""
    totals = values.sum(axis=1)
    row = int(totals.argmax()) if len(totals) else -1
    return row if row >= 0 and totals[row] > 0 else -1


def course(segment: Segment, starts: Sequence[float], ends: Sequence[float], offsets: Sequence[float]) -> MemoryCourse:
    """Return every change of a segment's memory, in order."""
    events, categories, values = _changes(segment, starts, ends)
    times_s = tuple([moment + offsets[task] for moment, task, *_ in events])
    tasks, buffers = tuple([event[1] for event in events]), tuple([(event[5], event[2]) for event in events])
    return MemoryCourse(times_s, tasks, buffers, categories, values)


_Event = tuple[float, int, bool, int, float, int]
"""A change: its moment, not put off, and its task; whether something is given back; column and bytes; the buffer."""
_Changes = tuple[list[_Event], tuple[str, ...], NDArray[np.float64]]
"""The changes in order, the categories in the columns, and the bytes from each change on."""


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
    for fold in segment.folds:  # further blocks change the memory as the second one does
        change = changes[(order >= fold.start) & (order < fold.end)].sum(axis=0)
        values += np.where(order[:, None] >= fold.end, fold.more * change, 0.0)
    return events, categories, values


def _memory(
    segment: Segment, changes: _Changes, offsets: Sequence[float]
) -> tuple[dict[str, float], float, str, dict[str, float]]:
    """Return the peak by category, its moment and task, and the net change."""
    events, categories, values = changes
    if not events:
        return {}, 0.0, "", {}
    net = dict(zip(categories, values[-1].tolist(), strict=True))
    if (row := _peak(values)) < 0:
        return {}, 0.0, segment.tasks[0].name, net
    peak = dict(zip(categories, values[row].tolist(), strict=True))
    moment, task, *_ = events[row]
    return peak, moment + offsets[task], segment.tasks[task].name, net
