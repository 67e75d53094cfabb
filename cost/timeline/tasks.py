"""The work of one device between two barriers: tasks on streams, and the memory that they take and give back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.verbs import VERBS, Microbatch, Verb, happening

_EVERY = frozenset[Microbatch]({"every"})
COMPUTE, COPY = "compute", "copy"
"""Two of the streams; the others are named after mesh axes, one for the collectives of each."""


class Task(NamedTuple):
    """A kernel, collective or copy.

    stream       tasks of one stream run one after the other, in the order of the segment
    after        tasks of other streams, by number, that must have ended before
    microbatch   where gradients are accumulated, they are summed over devices in the last microbatch only
    messages     sent by the task, which may stand for several collectives, timed as one
    blocks       whether the next kernel waits for it
    verb         of the action that it belongs to
    """

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    microbatch: Microbatch = "every"
    messages: tuple[Message, ...] = ()
    blocks: bool = False
    verb: Verb = "run"


class Buffer(NamedTuple):
    """Memory of one category.

    taken   at the start of this task; None: it is there already
    freed   when all of these have ended; none: it stays
    name    of the value, operator or parameter that it is for
    """

    category: str
    num_bytes: float
    taken: int | None
    freed: tuple[int, ...]
    microbatch: Microbatch = "every"
    name: str = ""


class Fold(NamedTuple):
    """A block that stands for more: tasks[start:end], the second of three equal ones, happen `more` further times."""

    start: int
    end: int
    more: int


@dataclass(frozen=True)
class Segment:
    """A list of tasks in the order of their launches; all have ended before the next segment begins."""

    tasks: tuple[Task, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    folds: tuple[Fold, ...] = ()

    def in_microbatch(self, *, first: bool, last: bool) -> Segment:
        """Return the segment in one microbatch. Tasks of other microbatches take no time and send nothing."""
        here = happening(first=first, last=last)
        tasks, buffers = self.tasks, self.buffers
        if not here.issuperset(self._tasks_in):
            tasks = tuple([t if t.microbatch in here else t._replace(seconds=0.0, messages=()) for t in tasks])
        if not here.issuperset(self._buffers_in):
            buffers = tuple([b for b in buffers if b.microbatch in here])
        return self if tasks is self.tasks and buffers is self.buffers else Segment(tasks, buffers, self.folds)

    @cached_property
    def _tasks_in(self) -> frozenset[Microbatch]:
        """The microbatches of the tasks."""
        return frozenset([task.microbatch for task in self.tasks])

    @cached_property
    def _buffers_in(self) -> frozenset[Microbatch]:
        return frozenset([buffer.microbatch for buffer in self.buffers])

    @property
    def has_last(self) -> bool:
        """True if a task runs in the last microbatch alone."""
        return "last" in self._tasks_in

    @property
    def is_alike(self) -> bool:
        """True if the segment is the same in all microbatches."""
        return _EVERY.issuperset(self._tasks_in) and _EVERY.issuperset(self._buffers_in)

    def copies(self) -> Iterator[int]:
        """Yield, for each task, the number of times it happens."""
        more = [0] * len(self.tasks)
        for fold in self.folds:
            more[fold.start : fold.end] = [fold.more] * (fold.end - fold.start)
        return (1 + m for m in more)

    def messages(self) -> Counter[Message]:
        """Count the messages that the tasks send."""
        sent = Counter[Message]()
        for times, task in zip(self.copies(), self.tasks, strict=True):
            for message in task.messages:
                sent[message._replace(kind=VERBS[task.verb].sends)] += times
        return sent

    def without(self, categories: Collection[str]) -> Segment:
        """Return the same without the memory of some categories."""
        return replace(self, buffers=tuple(b for b in self.buffers if b.category not in categories))

    def tasks_in_all(self) -> Iterator[Task]:
        """Yield every task with the total seconds of its runs."""
        return (t._replace(seconds=n * t.seconds) for n, t in zip(self.copies(), self.tasks, strict=True))


class Recorder:
    """Makes a segment. `overlap`: whether collectives that nothing waits for run beside compute.

    `verb`: of the action whose tasks come next.
    """

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap
        self.tasks: list[Task] = []
        self.buffers: list[Buffer] = []
        self.folds: list[Fold] = []
        self.last = -1
        self.verb: Verb = "run"
        self._awaited: list[int] = []

    def compute(self, name: str, seconds: float, after: Iterable[int] = (), microbatch: Microbatch = "every") -> int:
        """Record a kernel; it also waits for every blocking collective that was launched before."""
        if self._awaited:
            after = (*self._awaited, *after)
            self._awaited.clear()
        self.last = len(self.tasks)
        self.tasks.append(Task(name, COMPUTE, seconds, tuple(after), microbatch, verb=self.verb))
        return self.last

    def launch(
        self, name: str, stream: str, seconds: float, *, blocks: bool, after: Iterable[int] = (),
        microbatch: Microbatch = "every", messages: tuple[Message, ...] = (),
    ) -> int:  # fmt: skip
        """Record a collective or copy, launched by the last kernel before it; `blocks`: the next kernel waits."""
        launched_by = (self.last,) if self.last >= 0 else ()
        self.tasks.append(Task(name, stream, seconds, (*launched_by, *after), microbatch, messages, blocks, self.verb))
        if blocks or not self.overlap:
            self._awaited.append(len(self.tasks) - 1)
        return len(self.tasks) - 1

    def await_(self, tasks: Iterable[int]) -> None:
        """Make the next kernel wait for these tasks."""
        self._awaited.extend(tasks)

    def take(
        self, category: str, num_bytes: float, taken: int | None, freed: Iterable[int] = (),
        microbatch: Microbatch = "every", *, name: str = "",
    ) -> None:  # fmt: skip
        if num_bytes > 0:
            self.buffers.append(Buffer(category, num_bytes, taken, tuple(freed), microbatch, name))

    def segment(self) -> Segment:
        return Segment(tuple(self.tasks), tuple(self.buffers), tuple(self.folds))
