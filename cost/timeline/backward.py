"""Backward of one microbatch through a chunk, as tasks and memory.

* A gradient lives from its first contribution until the backward of what made its value. Further contributions are
  added.
* Parameters' gradients are accumulated. When one is complete, in a step's last microbatch, it is summed over devices:
  large ones alone and in place, small ones in flat buckets that are always there.
* The gradients of a gathered block are reduce-scattered together, in every microbatch, and freed when those of the
  next block are.
* What was not kept is made again, region by region, right before the first line that needs it.
* In two parts (zero-bubble): the gradients of weights are left to a second segment, with what they need.

Sources: lowering/reducer.py, lowering/blocks.py; Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.cost.timeline.forward import Gathers, Readers, copy_s, emit_forward, groups_of
from shardwright.cost.timeline.lines import Chunk, Line, Reading, Region, Storage
from shardwright.cost.timeline.memory import gradient_bytes
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Fold, Microbatch, Recorder, Segment

LARGE_BYTES = 2 << 20
BUCKET_BYTES = 25 << 20
"""As `lowering/reducer.py`: gradients from LARGE_BYTES on are summed alone, others in buckets of BUCKET_BYTES."""


Sum = tuple[str, str, float]
"""A collective, the axis, the bytes."""


def build_backward(chunk: Chunk, held: frozenset[int], *, two: bool) -> tuple[Segment, Segment]:
    """Backward, and, if it is in `two` parts, the part that makes the gradients of weights."""
    builder = _Backward(chunk, held, two)
    builder.run()
    return builder.recorder.segment(), builder.later.segment() if two else Segment()


class _Backward:
    """`recorder` makes the first part, `later` the second, or the same one."""

    def __init__(self, chunk: Chunk, held: frozenset[int], two: bool) -> None:
        self.chunk, self.execution = chunk, chunk.steps.execution
        self.recorder = Recorder(self.execution.overlap)
        self.later = Recorder(self.execution.overlap) if two else self.recorder
        order = sorted(range(len(chunk.groups)), key=lambda g: -chunk.groups[g].last)
        late = self.execution.late_gathers
        self.gathers = Gathers(chunk, self.recorder, order, held, frozenset(), late=late)
        self.sums = _Sums(chunk, self.later)
        self.fetches = _Fetches(chunk, self.recorder) if self.execution.offload else None
        self.readers, self.later_readers = Readers(self.recorder), Readers(self.later)
        self.gradients: dict[Storage, int] = {}  # the task that made each
        self.again: dict[Storage, int] = {}  # and what was made again
        self.rebuilt: set[Region] = set()

    def run(self) -> None:
        starts: dict[int, tuple[int, int]] = {}
        for number in reversed(range(len(self.chunk.lines))):
            starts[number] = len(self.recorder.tasks), len(self.later.tasks)
            line = self.chunk.lines[number]
            if self.fetches is not None:
                self.fetches.enter(number)
            if line.step.grad and (line.gradients or line.weights):
                self._line(number, line)
        starts[-1] = len(self.recorder.tasks), len(self.later.tasks)
        self.sums.finish()
        for span in self.chunk.spans:
            if span.more:
                begin, end = starts[span.end - 1], starts[span.start - 1]
                self.recorder.folds.append(Fold(begin[0], end[0], span.more))
                if self.later is not self.recorder:
                    self.later.folds.append(Fold(begin[1], end[1], span.more))
        self._memory()

    def _line(self, number: int, line: Line) -> None:
        for storage in line.keeps:
            self._rebuild(storage)
        groups = groups_of(self.chunk, line)
        for group in groups:
            self.gathers.use(group)
        trained = [w for w in line.weights if self.chunk.readings[w].weight.grad]
        task = self._input_part(line, bool(trained))
        in_part, last = self.recorder, task
        if trained and line.step.weight_s:
            in_part, last = self.later, self.later.compute(f"{line.step.name} weights", line.step.weight_s)
        for storage in line.keeps:
            self._note(storage, last, in_part)
        self._note(("gradient", line.result), last, in_part)
        if task is not None:
            self._note(("gradient", line.result), task, self.recorder)
            for storage in line.gradients:
                self._contribute(storage, line, task)
        if last is not None:
            for weight in trained:
                self.sums.contribute(number, weight, last, in_part)
        for group in groups:
            if self.chunk.groups[group].first == number:
                self.gathers.free(group, len(self.recorder.tasks) - 1)
                self.sums.scatter([r for r in self.chunk.groups[group].readings if r.weight.grad], in_part)

    def _input_part(self, line: Line, trained: bool) -> int | None:
        """The task that makes the gradients of activations; None where the gradients of weights are all there is."""
        step = line.step
        if step.back_stream != COMPUTE:
            return self.recorder.launch(f"{step.name} backward", step.back_stream, step.backward_s, blocks=True)
        if trained and step.weight_s and not line.gradients:
            return None
        return self.recorder.compute(f"{step.name} backward", step.backward_s)

    def _note(self, what: object, task: int | None, recorder: Recorder) -> None:
        if task is not None:
            (self.readers if recorder is self.recorder else self.later_readers).note(what, task)

    def _contribute(self, storage: Storage, line: Line, task: int) -> None:
        """The first contribution is the gradient; another takes memory of its own until it is added."""
        if storage is line.result:
            return
        if storage in self.gradients:
            self.recorder.take("temporary", storage.num_bytes, task, (task,))
        else:
            self.gradients[storage] = task

    def _rebuild(self, storage: Storage) -> None:
        """Run the storage's region again, unless it is kept or there already."""
        region = storage.region
        if region is None or storage.kept or region in self.rebuilt:
            return
        self.rebuilt.add(region)
        for line in region.needed():
            for group in groups_of(self.chunk, line):
                self.gathers.use(group)
            task = emit_forward(self.recorder, line, " again")
            for other in (*line.reads, line.result, *line.keeps):
                if other.region is region:
                    self.again.setdefault(other, task)
                self._note(other, task, self.recorder)

    def _memory(self) -> None:
        """Who frees what: kept and rebuilt activations, and gradients of activations."""
        if not self.recorder.tasks and not self.later.tasks:
            return
        fetched = self.fetches.task_of if self.fetches is not None else {}
        for storage in self.chunk.storages:
            if storage.kept:
                self._take("activations", storage.num_bytes, storage, fetched.get(storage))
        for storage, task in self.again.items():
            self._take("temporary" if storage.kept else "activations", storage.num_bytes, storage, task)
        for storage, task in self.gradients.items():
            self._take("temporary", storage.num_bytes, ("gradient", storage), task)

    def _take(self, category: str, num_bytes: float, what: object, taken: int | None) -> None:
        """Freed after its readers, in the second part if it has readers there."""
        here, later = self.readers.of(what), self.later_readers.of(what)
        if later and self.later is not self.recorder:
            self.recorder.take(category, num_bytes, taken)
            self.later.take(category, num_bytes, None, later)
        else:
            self.recorder.take(category, num_bytes, taken, here or (taken if taken is not None else 0,))


class _Sums:
    """Gradients of parameters: accumulated, and summed over devices, in the part of backward that `recorder` makes."""

    def __init__(self, chunk: Chunk, recorder: Recorder) -> None:
        self.chunk, self.recorder = chunk, recorder
        self.made: dict[int, int] = {}  # weight -> the first task that gave it a gradient
        self.by_reading: dict[Reading, int] = {}
        self.buckets: dict[tuple[tuple[str, str], ...], list[tuple[Reading, int]]] = {}
        self.scattered: list[tuple[float, int, int]] = []  # whole gradients: bytes, made by, scattered by

    def contribute(self, number: int, weight: int, task: int, part: Recorder) -> None:
        """A task of line `number` gave the weight a gradient; the line that reads it first, forward, is the last."""
        reading = self.chunk.readings[weight]
        if part is not self.recorder:  # made early, as a norm's: taken over at the start of the second part
            task = 0
        made = self.by_reading.setdefault(reading, task)
        if number == reading.first and reading.group is None:
            self._complete(reading, made, task)

    def _complete(self, reading: Reading, made: int, task: int) -> None:
        weight, recorder = reading.weight, self.recorder
        num_bytes = gradient_bytes(self.chunk.steps.leaves[weight.leaf], self.chunk.steps.execution)
        task = min(task, len(recorder.tasks) - 1)
        if bucketed(weight.sums, num_bytes):  # the bucket's memory is always there
            bucket = self.buckets.setdefault(tuple((c, a) for c, a, _ in weight.sums), [])
            bucket.append((reading, made))
            full = sum((1 + r.more) * r.weight.used_bytes for r, _ in bucket) >= BUCKET_BYTES
            if full and not reading.more:  # what is launched within a fold happens once for each of its blocks
                self._close(bucket)
            return
        recorder.take("gradients", num_bytes, made, (), "first")
        recorder.take(
            "temporary", weight.used_bytes, made, (task,), "every" if num_bytes != weight.used_bytes else "later"
        )
        if weight.sums:
            self._launch(f"gradient {weight.leaf}", weight.sums, "last")

    def _close(self, bucket: list[tuple[Reading, int]]) -> None:
        """Sum a bucket of small gradients, which were kept until now; those of a fold are seen at this moment only."""
        end = self.recorder.last
        for reading, made in bucket:
            num_bytes = (1 + reading.more) * reading.weight.used_bytes
            self.recorder.take("temporary", num_bytes, end if reading.more else made, (max(made, end),))
        self._launch("gradients in a bucket", _joined([r for r, _ in bucket], lambda r: 1 + r.more), "last")
        bucket.clear()

    def scatter(self, readings: Sequence[Reading], part: Recorder) -> None:
        """Sum the gradients of a gathered block, those that go the same way together; each device keeps its slice."""
        self._free_scattered()
        chains: dict[tuple[tuple[str, str], ...], list[Reading]] = {}
        for reading in readings:
            chains.setdefault(tuple((c, a) for c, a, _ in reading.weight.sums), []).append(reading)
        for chain in chains.values():
            tasks = self._launch(f"gradients of {chain[0].weight.home}", _joined(chain), "every")
            end = tasks[-1] if tasks else len(self.recorder.tasks) - 1
            for reading in chain:
                made = self.by_reading.get(reading, end)
                leaf = self.chunk.steps.leaves[reading.weight.leaf]
                self.scattered.append((reading.weight.used_bytes, made, max(made, end)))
                self.recorder.take("gradients", gradient_bytes(leaf, self.chunk.steps.execution), end, (), "first")

    def _free_scattered(self) -> None:
        """Whole gradients are let go of when the next block's are there, or backward ends."""
        for num_bytes, made, scattered in self.scattered:
            self.recorder.take("temporary", num_bytes, made, (max(scattered, self.recorder.last),))
        self.scattered.clear()

    def finish(self) -> None:
        """At the end of backward: the last block's gradients, and buckets that are not full."""
        self._free_scattered()
        for bucket in self.buckets.values():
            if bucket:
                self._close(bucket)

    def _launch(self, name: str, sums: Sequence[Sum], microbatch: Microbatch) -> list[int]:
        steps, tasks = self.chunk.steps, list[int]()
        for collective, axis, num_bytes in sums:
            sharded = steps.execution.shard_optimizer and collective == "all_reduce"
            kind = "reduce_scatter" if sharded else collective
            seconds = steps.costs.collective_s(kind, steps.graph.mesh.index(axis), num_bytes)
            if kind == "slice":
                tasks.append(self.recorder.compute(name, seconds, tasks[-1:]))
            else:
                tasks.append(
                    self.recorder.launch(name, axis, seconds, blocks=False, after=tasks[-1:], microbatch=microbatch)
                )
        return tasks


def bucketed(sums: Sequence[Sum], num_bytes: float) -> bool:
    """Whether a gradient is summed in a bucket with others."""
    return bool(sums) and num_bytes < LARGE_BYTES and all(collective == "all_reduce" for collective, _, _ in sums)


def _joined(readings: Sequence[Reading], times: Callable[[Reading], int] = lambda reading: 1) -> list[Sum]:
    """The sums of gradients that go the same way, as one; each counts `times`."""
    first = readings[0].weight.sums
    return [(c, a, sum(times(r) * r.weight.sums[i][2] for r in readings)) for i, (c, a, _) in enumerate(first)]


class _Fetches:
    """Offloaded activations on their way back: those of a block while the block before it, in backward order, runs."""

    def __init__(self, chunk: Chunk, recorder: Recorder) -> None:
        self.recorder = recorder
        self.task_of: dict[Storage, int] = {}
        self.runs: list[list[Storage]] = []
        self.run_of: dict[int, int] = {}
        place, seen = None, set[Storage]()
        for number in reversed(range(len(chunk.lines))):
            line = chunk.lines[number]
            occurrence = next(i for i, span in enumerate(chunk.spans) if span.start <= number < span.end)
            if (occurrence, line.step.block) != place:
                place = (occurrence, line.step.block)
                self.run_of[number] = len(self.runs)
                self.runs.append([])
            inside = line.region.lines if line.region is not None else ()
            for storage in (*line.keeps, *(s for other in inside for s in other.reads)):
                if storage.kept and storage not in seen:
                    seen.add(storage)
                    self.runs[-1].append(storage)

    def enter(self, number: int) -> None:
        """Where a line begins a block: wait for what the block needs, launch what the next one needs."""
        if (run := self.run_of.get(number)) is None:
            return
        self._launch(run)
        self.recorder.await_(self.task_of[storage] for storage in self.runs[run])
        if run + 1 < len(self.runs):
            self._launch(run + 1)

    def _launch(self, run: int) -> None:
        for storage in self.runs[run]:
            if storage not in self.task_of:
                seconds = copy_s(storage.num_bytes)
                self.task_of[storage] = self.recorder.launch("fetch", COPY, seconds, blocks=False)
