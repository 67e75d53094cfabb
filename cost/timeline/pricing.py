"""A chunk's actions as tasks and memory: the seconds of each on its stream, and the tasks that free memory.

* Forward: kept values stay; others are freed after their last reader.
* A gradient lives from its first contribution until the backward of the operation that made its value. Further
  contributions are added.
* Parameters' gradients are accumulated; small ones in flat buckets that are always there. Whole gradients of a gathered
  block are freed when those of the next block are there.
* In two parts (zero-bubble): the gradients of weights are left to a second segment, with the values that they need.

Sources: lowering/runtime/reducer.py, lowering/runtime/blocks.py; Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

from shardwright.cost.timeline.gathers import Gathering
from shardwright.cost.timeline.passes import Readers, gradient_of
from shardwright.cost.timeline.pieces import Ran
from shardwright.cost.timeline.steps import OperationCost, Steps
from shardwright.cost.timeline.sums import Summing
from shardwright.cost.timeline.tasks import COMPUTE, Fold, Recorder, Segment
from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.chunk import Allocation, Chunk, Occurrence
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.verbs import Action


def price_forward(steps: Steps, chunk: Chunk, actions: Actions) -> Segment:
    """Return the segment of one microbatch's forward."""
    made = _Forward(steps, chunk)
    made.run(actions)
    return made.recorder.segment()


def price_backward(steps: Steps, chunk: Chunk, actions: Actions, *, two: bool) -> tuple[Segment, Segment]:
    """Return backward and, if it has `two` parts, the part for gradients of weights (else an empty one)."""
    made = _Backward(steps, chunk, actions, two)
    made.run()
    return made.recorder.segment(), made.later.segment() if two else Segment()


class _Forward(Gathering):
    def __init__(self, steps: Steps, chunk: Chunk) -> None:
        super().__init__(steps, chunk)
        self.taken: dict[Allocation, int] = {}
        self.released: dict[int, int] = {}  # allocation -> the kernel after which its memory is given back

    def run(self, actions: Actions) -> None:
        starts: list[int] = []
        for group in actions.forward:
            starts.append(len(self.recorder.tasks))
            for action in group:
                self.act(action)
        starts.append(len(self.recorder.tasks))
        self.recorder.folds += (Fold(starts[s.start], starts[s.end], s.more) for s in self.chunk.spans if s.more)
        self._memory()

    def run_operation(self, action: Action) -> None:
        occurrence = self.occurrence(action)
        if not (pair := self.pair(occurrence)):
            self._ran(occurrence, self.emit(occurrence, microbatch=action.microbatch))
        elif occurrence is pair[-1]:
            self.emit_pair(pair)
            for member in pair:
                for task in self.ran[member.number][1:]:
                    self._ran(member, task)

    def start_sum(self, action: Action) -> None:
        occurrence = self.occurrence(action)
        self.started[action.number] = task = self.emit(occurrence, blocks=False)
        self._ran(occurrence, task)

    def release(self, action: Action) -> None:
        self.await_copy(action)
        self.released[action.number] = self.recorder.last

    def _ran(self, occurrence: Occurrence, task: int) -> None:
        touched, taken = (*occurrence.reads, occurrence.result, *occurrence.keeps), self.taken
        for memory in touched:
            if memory not in taken:
                taken[memory] = task
        stored = Fate.KEPT  # kept values stay, whoever reads them
        self.readers.note([m for m in touched if m.fate is not stored], task)

    def _memory(self) -> None:
        for memory, task in self.taken.items():
            freed, number = self.readers.of(memory), memory.number
            if number in self.released:
                freed = *freed, self.copies[number], self.released[number]
            category = "activations" if memory.fate.is_stored else "temporary"
            self.recorder.take(category, memory.num_bytes, task, freed, name=memory.name)


class _Backward(Summing):
    """Backward: `recorder` records the first part, `later` the second, or the same one."""

    def __init__(self, steps: Steps, chunk: Chunk, actions: Actions, two: bool) -> None:
        super().__init__(steps, chunk, actions)
        self.apart = frozenset(actions.of("weights"))
        self.put_off_s = steps.cluster.device.put_off_s / 2 if two else 0.0  # in each part
        if two:
            self.later = Recorder(steps.execution.assumed.overlap)
        self.later_readers = Readers(self.later) if two else self.readers
        self.gradients: dict[Allocation, int] = {}  # the task that made each
        self.again: dict[Allocation, int] = {}  # the task that recomputed each
        self.waiting: list[Occurrence] = []  # operations of a pair that are to be made again

    def run(self) -> None:
        starts: dict[int, tuple[int, int]] = {}
        if self.later is not self.recorder and not self.apart:
            self.later.compute("no weights", 0.0)  # a task that takes over gradients that are made early
        numbers = [*reversed(range(len(self.chunk.occurrences))), -1]
        for number, group in zip(numbers, self.actions.backward, strict=True):
            starts[number] = len(self.recorder.tasks), len(self.later.tasks)
            for action in group:
                self.act(action)
        for span in self.chunk.spans:
            if span.more:
                begin, end = starts[span.end - 1], starts[span.start - 1]
                self.recorder.folds.append(Fold(begin[0], end[0], span.more))
                if self.later is not self.recorder:
                    self.later.folds.append(Fold(begin[1], end[1], span.more))
        self.later.verb = "reduce"
        self.put_off_sums()
        self._memory()

    # ---- operations ----

    def run_again(self, action: Action) -> None:
        """Price an operation; those of a pair when the last of them is made again, or no further one is."""
        occurrence = self.occurrence(action)
        pair = self.pair(occurrence)
        if self.waiting and occurrence.number > self.pair(self.waiting[0])[-1].number:
            self._all_again()
        if not pair:
            self._again(occurrence, self.emit(occurrence, " again"))
            return
        self.waiting.append(occurrence)
        if occurrence is pair[-1]:
            self._all_again()

    def _all_again(self) -> None:
        if not self.waiting:
            return
        verb, self.recorder.verb = self.recorder.verb, "again"
        self.emit_pair(self.waiting, suffix=" again")
        for occurrence in self.waiting:
            for task in self.ran[occurrence.number][1:]:
                self._again(occurrence, task)
        self.waiting.clear()
        self.recorder.verb = verb

    def _again(self, occurrence: Occurrence, task: int) -> None:
        touched = *occurrence.reads, occurrence.result, *occurrence.keeps
        for memory in touched:
            if memory.rerun is occurrence.rerun:
                self.again.setdefault(memory, task)
        self.readers.note(touched, task)

    def run_backward(self, action: Action) -> None:
        """Price the part of an operation's backward that gives gradients to activations, or all of it."""
        occurrence = self.occurrence(action)
        name, cost = f"{occurrence.operation.name} backward", self.steps.costs[occurrence.operation.name]
        self._all_again()
        if pair := self.pair(occurrence):
            differentiated = [o for o in reversed(pair) if o.operation.is_differentiated]
            if occurrence is differentiated[0]:
                self.emit_pair(differentiated, backward=True, suffix=" backward")
            ran = self.ran[occurrence.number]
        else:
            ran = Ran(*[self._backward_of(occurrence, name, cost)] * 3)
        self._note(occurrence, ran.last, self.readers)
        for memory in occurrence.gradients:
            if memory is occurrence.result:
                continue
            if memory in self.gradients:  # it takes separate memory until it is added
                self.recorder.take("temporary", memory.num_bytes, ran.made, (ran.last,), name=gradient_of(memory.name))
            else:
                self.gradients[memory] = ran.made
        if occurrence.number not in self.apart:  # made early, as for a norm: the second part takes it over at its start
            self._contribute(occurrence, ran.first if self.later is self.recorder else 0)
            self.task = max(self.task, ran.last) if pair else self.task

    def _backward_of(self, occurrence: Occurrence, name: str, cost: OperationCost) -> int:
        if cost.back_stream == COMPUTE:
            of_weights_s = self.put_off_s if occurrence.number in self.apart else cost.weight_s
            task = self.among(name, cost.ways_back, cost.backward_s + of_weights_s)
        else:
            task = self.recorder.launch(name, cost.back_stream, cost.backward_s, blocks=True, messages=cost.sent_back)
        if cost.scratch.backward:
            self.recorder.take("temporary", cost.scratch.backward, task, (task,), name=f"scratch of {name}")
        return task

    def run_weights(self, action: Action) -> None:
        occurrence = self.occurrence(action)
        name, cost = occurrence.operation.name, self.steps.costs[occurrence.operation.name]
        task = self.later.compute(f"{name} weights", cost.weight_s + self.put_off_s)
        self._note(occurrence, task, self.later_readers)
        self._contribute(occurrence, task)

    def _note(self, occurrence: Occurrence, task: int, readers: Readers) -> None:
        """Note that a part of backward reads the values kept for it, and the gradient of the result."""
        readers.note((*occurrence.keeps, ("gradient", occurrence.result)), task)

    def _contribute(self, occurrence: Occurrence, task: int) -> None:
        self.task = task
        for use in self.chunk.trained(occurrence):
            self.made.setdefault(use, task)
        for use in occurrence.views:  # a view shares the memory of its parameter
            if self.chunk.uses[use].parameter.grad:
                self.made.setdefault(use, task)

    # ---- memory ----

    def _memory(self) -> None:
        """Take and free memory of kept and rebuilt activations, and of activations' gradients."""
        if not self.recorder.tasks and not self.later.tasks:
            return
        for memory in self.chunk.allocations:
            if memory.fate.is_stored:
                self._take("activations", memory, memory, self.launched.get(memory.number))
        for memory, task in self.again.items():
            self._take("temporary" if memory.fate.is_stored else "activations", memory, memory, task)
        for memory, task in self.gradients.items():
            self._take("temporary", memory, ("gradient", memory), task)

    def _take(self, category: str, memory: Allocation, what: object, taken: int | None) -> None:
        """Take memory until its readers have ended, in the second part if it has readers there."""
        here, later = self.readers.of(what), self.later_readers.of(what) if self.later is not self.recorder else ()
        name = memory.name if what is memory else gradient_of(memory.name)
        if later:
            self.recorder.take(category, memory.num_bytes, taken, name=name)
            self.later.take(category, memory.num_bytes, None, later, name=name)
        else:
            freed = here or (taken if taken is not None else 0,)
            self.recorder.take(category, memory.num_bytes, taken, freed, name=name)
