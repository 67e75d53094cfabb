"""Forward of one microbatch through a chunk, as tasks and memory; and gathered parameters, in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from shardwright.cost.timeline.lines import Chunk, Group, Line, Storage
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Fold, Recorder, Segment

HOST_BYTES_PER_S = 25e9
"""Between a GPU and its host's pinned memory, one way: assumed, four fifths of what PCIe 4.0 × 16 transfers (31.5
GB/s)."""


class Readers:
    """The last task of each stream that reads something: when all of these have ended, nobody needs it any more."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: dict[object, dict[str, int]] = {}

    def note(self, what: object, task: int) -> None:
        self._last.setdefault(what, {})[self._recorder.tasks[task].stream] = task

    def of(self, what: object) -> tuple[int, ...]:
        return tuple(self._last.get(what, {}).values())


class Gathers:
    """The gathered blocks of one pass through a chunk: launched one ahead of their use, freed after it.

    `order` are the groups as the pass needs them; those in `there` are gathered when it begins, those in `stay` stay.
    `late`: the next is launched after this one's use, not beside it.
    """

    def __init__(
        self, chunk: Chunk, recorder: Recorder, order: Sequence[int], there: frozenset[int], stay: frozenset[int],
        *, late: bool = False,
    ) -> None:  # fmt: skip
        self.chunk, self.recorder, self.there, self.stay, self.late = chunk, recorder, there, stay, late
        self.next = dict(pairwise(order))
        self.launched: dict[int, list[int]] = {}
        self.used: set[int] = set()

    def use(self, number: int) -> None:
        """Before a kernel that reads the group: wait for it, and launch the next."""
        if number in self.used:
            return
        self.used.add(number)
        self.recorder.await_(self._launch(number))
        if not self.late:
            self._launch_next(number)

    def _launch_next(self, number: int) -> None:
        if self.recorder.overlap and number in self.next:
            self._launch(self.next[number])

    def _launch(self, number: int) -> list[int]:
        if number not in self.launched:
            tasks: list[int] = []
            if number not in self.there:
                group, steps = self.chunk.groups[number], self.chunk.steps
                for axis, num_bytes in gathered_bytes(group):
                    seconds = steps.costs.collective_s("all_gather", steps.graph.mesh.index(axis), num_bytes)
                    name = f"gather {group.readings[0].weight.home}"
                    task = self.recorder.launch(name, axis, seconds, blocks=False, after=tasks[-1:])
                    if steps.cluster.backend == "gloo":  # torch's all-gather has it write to memory of its own first
                        self.recorder.take("communication", num_bytes, task, (task,))
                    tasks.append(task)
            self.launched[number] = tasks
        return self.launched[number]

    def free(self, number: int, task: int) -> None:
        """After the last kernel that reads it. The memory of a first gather is pooled, and always there."""
        taken = next(iter(self.launched[number]), None)
        freed = () if number in self.stay else (task,)
        readings = self.chunk.groups[number].readings
        num_bytes = sum(r.weight.used_bytes for r in readings if len(r.weight.gathers) > 1)
        self.recorder.take("gathered", num_bytes, taken, freed)
        if self.late:
            self._launch_next(number)


def gathered_bytes(group: Group) -> list[tuple[str, float]]:
    """Bytes to gather along each axis, in the order of the moves."""
    found: dict[str, float] = {}
    for reading in group.readings:
        for axis, num_bytes in reading.weight.gathers:
            found[axis] = found.get(axis, 0.0) + num_bytes
    return list(found.items())


def held_groups(chunk: Chunk) -> frozenset[int]:
    """Blocks that are in use when the last one is gathered: they stay, as backward begins with them."""
    if not chunk.groups:
        return frozenset()
    last_gather = max(group.first for group in chunk.groups)
    return frozenset(n for n, group in enumerate(chunk.groups) if group.last >= last_gather)


def emit_forward(recorder: Recorder, line: Line, suffix: str = "") -> int:
    """The task of one line, forward."""
    step = line.step
    if step.stream == COMPUTE:
        return recorder.compute(step.name + suffix, step.forward_s)
    return recorder.launch(step.name + suffix, step.stream, step.forward_s, blocks=True)


def copy_s(num_bytes: float) -> float:
    """Seconds to copy between a device and its host."""
    return num_bytes / HOST_BYTES_PER_S


def build_forward(chunk: Chunk, held: frozenset[int]) -> Segment:
    """Every line once, in order. Kept storages stay; others are freed after their last reader."""
    recorder = Recorder(chunk.steps.execution.overlap)
    gathers = Gathers(chunk, recorder, range(len(chunk.groups)), frozenset(), held)
    readers, taken, away = Readers(recorder), dict[Storage, int](), dict[Storage, int]()
    offload = chunk.steps.execution.offload
    starts: list[int] = []
    for number, line in enumerate(chunk.lines):
        starts.append(len(recorder.tasks))
        groups = groups_of(chunk, line)
        for group in groups:
            gathers.use(group)
        task = emit_forward(recorder, line)
        for storage in (*line.reads, line.result, *line.keeps):
            if storage.kept and offload and storage not in taken:
                seconds = copy_s(storage.num_bytes)
                away[storage] = recorder.launch("offload", COPY, seconds, blocks=False, after=(task,))
            taken.setdefault(storage, task)
            readers.note(storage, task)
        for group in groups:
            if chunk.groups[group].last == number:
                gathers.free(group, task)
    recorder.folds += folds(chunk, [*starts, len(recorder.tasks)])
    for storage, task in taken.items():
        if not storage.kept:
            recorder.take("temporary", storage.num_bytes, task, readers.of(storage))
        elif storage in away:
            recorder.take("activations", storage.num_bytes, task, (*readers.of(storage), away[storage]))
        else:
            recorder.take("activations", storage.num_bytes, task)
    return recorder.segment()


def groups_of(chunk: Chunk, line: Line) -> list[int]:
    """The gathered blocks that a line reads."""
    if not line.weights:
        return []
    found = (chunk.readings[w].group for w in line.weights)
    return list(dict.fromkeys(group for group in found if group is not None))


def folds(chunk: Chunk, starts: Sequence[int]) -> Iterable[Fold]:
    """`starts`: the first task of every line, and the end."""
    for span in chunk.spans:
        if span.more:
            yield Fold(starts[span.start], starts[span.end], span.more)
