"""The common part of forward and backward: operators that run, pairs in pieces, waits, copies to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.cost.timeline.pieces import Pieces, Ran, record
from shardwright.cost.timeline.steps import Steps, Timed
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Recorder
from shardwright.pcg.choice import Transfers
from shardwright.pcg.step.chunk import Chunk, Occurrence
from shardwright.pcg.step.verbs import VERBS, Action, Microbatch

COPY_START_S = 10e-6
"""The time from the launch of a copy to its first byte: assumed."""

_PRICES = {verb: row.price for verb, row in VERBS.items()}


def copy_s(steps: Steps, num_bytes: float) -> float:
    """Return the seconds of a copy to or from the host, by the rate of the device's link."""
    return COPY_START_S + num_bytes / steps.cluster.device.host_bytes_per_s


def gradient_of(name: str) -> str:
    """Return the name of the memory of a value's or parameter's gradient."""
    return f"gradient of {name}"


class Readers:
    """The last reader of memory on each stream; the memory is free when all of these tasks have ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: dict[object, dict[str, int]] = {}

    def note(self, what: Iterable[object], task: int) -> None:
        stream, last = self._recorder.tasks[task].stream, self._last
        for each in what:
            if each in last:
                last[each][stream] = task
            else:
                last[each] = {stream: task}

    def of(self, what: object) -> tuple[int, ...]:
        tasks = self._last.get(what)
        return tuple(tasks.values()) if tasks is not None else ()


class Pass:
    """The common part of forward and backward: operators that run, and blocks that are gathered."""

    def __init__(self, steps: Steps, chunk: Chunk) -> None:
        self.steps, self.chunk = steps, chunk
        self.recorder = self.later = Recorder(steps.execution.assumed.overlap)
        self.readers = Readers(self.recorder)
        self.gathers: dict[int, int] = {}  # block -> the task
        self.started: dict[int, int] = {}  # sum over ranks -> the task
        self.copies: dict[int, int] = {}  # allocation -> the task that copies it to the host, or from there
        self.launched: dict[int, int | None] = {}  # and the kernel before its launch, which takes the memory
        self.ran: dict[int, Ran] = {}  # operations of pairs -> their tasks

    def act(self, action: Action) -> None:
        """Price an action, by the method that its verb's row names."""
        if price := _PRICES[action.verb]:
            self.recorder.verb = self.later.verb = action.verb
            getattr(self, price)(action)

    def occurrence(self, action: Action) -> Occurrence:
        """Return the operation that the action is about."""
        return self.chunk.occurrences[action.number]

    def pair(self, occurrence: Occurrence) -> Sequence[Occurrence]:
        """Return the operations that run in pieces with this one; none if it does not, or if they are not all here."""
        pieces = self._pieces(occurrence)
        if pieces is None:
            return ()
        start = occurrence.number - pieces.number
        members = self.chunk.occurrences[start : start + pieces.length]
        return members if len({o.rerun for o in members}) == 1 and len(members) == pieces.length else ()

    def _pieces(self, occurrence: Occurrence) -> Pieces | None:
        return self.steps.costs[occurrence.operation.name].pieces

    def emit_pair(self, occurrences: Sequence[Occurrence], *, backward: bool = False, suffix: str = "") -> None:
        """Record operations of a pair in the order of their turns, and remember their tasks."""
        members = [(o.operation.name, pieces) for o in occurrences if (pieces := self._pieces(o)) is not None]
        tasks = record(self.recorder, members, backward=backward, suffix=suffix)
        self.ran.update(zip((o.number for o in occurrences), tasks, strict=True))
        for o, ran in zip(occurrences, tasks, strict=True):
            name, scratch = o.operation.name, self.steps.costs[o.operation.name].scratch
            needed = scratch.backward if backward else scratch.forward
            self.recorder.take("temporary", needed, ran.first, (ran.last,), name=f"scratch of {name}{suffix}")

    def emit(
        self, occurrence: Occurrence, suffix: str = "", *, blocks: bool = True, microbatch: Microbatch = "every"
    ) -> int:
        """Record the forward of an operation, and return its task."""
        name, cost = occurrence.operation.name + suffix, self.steps.costs[occurrence.operation.name]
        if cost.stream == COMPUTE:
            task = self.among(name, cost.ways, cost.forward_s)
        else:
            task = self.recorder.launch(
                name, cost.stream, cost.forward_s, blocks=blocks, messages=cost.sent, microbatch=microbatch
            )
        if cost.scratch.forward:
            self.recorder.take("temporary", cost.scratch.forward, task, (task,), name=f"scratch of {name}")
        return task

    def among(self, name: str, sent: Transfers[Timed], seconds: float) -> int:
        """Record a kernel, or its parts, among the transfers around it; return the last part's task."""
        for way in sent.before:
            self.recorder.launch(f"{name} dispatch", way.axis, way.seconds, blocks=True, messages=way.messages)
        parts, task = sent.during or ((),), -1
        for sent_meanwhile in parts:
            begun = [
                self.recorder.launch(f"{name} round", way.axis, way.seconds, blocks=False, messages=way.messages)
                for way in sent_meanwhile
            ]
            task = self.recorder.compute(name, seconds / len(parts))
            self.recorder.await_(begun)
        for way in sent.after:
            self.recorder.launch(f"{name} combine", way.axis, way.seconds, blocks=True, messages=way.messages)
        return task

    def wait_for_sum(self, action: Action) -> None:
        self.recorder.await_([self.started.pop(action.number)])

    def copy(self, action: Action) -> None:
        """Launch a copy to or from the host."""
        seconds = copy_s(self.steps, self.chunk.allocations[action.number].num_bytes)
        self.launched[action.number] = self.recorder.last if self.recorder.last >= 0 else None
        self.copies[action.number] = self.recorder.launch(action.verb, COPY, seconds, blocks=False)

    def await_copy(self, action: Action) -> None:
        self.recorder.await_([self.copies[action.number]])
