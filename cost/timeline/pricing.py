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

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwright.cost.timeline.pieces import Pieces, Ran, record
from shardwright.cost.timeline.pool import is_direct
from shardwright.cost.timeline.steps import OperationCost, Steps, Timed
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Buffer, Fold, Recorder, Segment
from shardwright.pcg.choice import Transfers
from shardwright.pcg.encodings import ENCODED_TOGETHER, Encoding, padded
from shardwright.pcg.moves import SLICE
from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.buckets import LARGE_BYTES
from shardwright.pcg.step.chunk import Allocation, Block, Chunk, Occurrence
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.verbs import VERBS, Action, Microbatch

COPY_START_S = 10e-6
"""The time from the launch of a copy to its first byte: assumed."""

_PRICES = {verb: row.price for verb, row in VERBS.items()}


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


def is_bucketed(parameter: Parameter) -> bool:
    """Return whether a parameter's gradient is summed in a bucket with others."""
    return bool(parameter.sums) and parameter.gradient_bytes < LARGE_BYTES


def copy_s(steps: Steps, num_bytes: float) -> float:
    """Return the seconds of a copy to or from the host, by the rate of the device's link."""
    return COPY_START_S + num_bytes / steps.cluster.device.host_bytes_per_s


def quotient_bytes(num_bytes: float) -> float:
    """Return the bytes that encoding values of so many takes for quotients and codes, as in float32."""
    return 1.25 * min(num_bytes, 4.0 * ENCODED_TOGETHER)


def _gradient(name: str) -> str:
    """Return the name of the memory of a value's or parameter's gradient."""
    return f"gradient of {name}"


class _Readers:
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
        found = self._last.get(what)
        return tuple(found.values()) if found is not None else ()


class _Pass:
    """The common part of forward and backward: operators that run, and blocks that are gathered."""

    def __init__(self, steps: Steps, chunk: Chunk) -> None:
        self.steps, self.chunk = steps, chunk
        self.recorder = self.later = Recorder(steps.execution.assumed.overlap)
        self.readers = _Readers(self.recorder)
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
        found = self.chunk.occurrences[start : start + pieces.length]
        return found if len({o.rerun for o in found}) == 1 and len(found) == pieces.length else ()

    def _pieces(self, occurrence: Occurrence) -> Pieces | None:
        return self.steps.costs[occurrence.operation.name].pieces

    def emit_pair(self, own: Sequence[Occurrence], *, backward: bool = False, suffix: str = "") -> None:
        """Record operations of a pair in the order of their turns, and remember their tasks."""
        members = [(o.operation.name, pieces) for o in own if (pieces := self._pieces(o)) is not None]
        tasks = record(self.recorder, members, backward=backward, suffix=suffix)
        self.ran.update(zip((o.number for o in own), tasks, strict=True))
        for o, ran in zip(own, tasks, strict=True):
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
        parts, task = sent.beside or ((),), -1
        for beside in parts:
            begun = [
                self.recorder.launch(f"{name} round", way.axis, way.seconds, blocks=False, messages=way.messages)
                for way in beside
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

    # ---- gathered blocks, whose memory is pooled and always there ----

    def await_gather(self, action: Action) -> None:
        if action.number not in self.gathers:
            return
        self.recorder.await_([self.gathers[action.number]])
        block = self.chunk.blocks[action.number]
        if (encoding := block.parameters[0].gathered_as) is not None:
            seconds = self.steps.decode_s(block.used_bytes, encoding)
            self.recorder.compute(f"decode {block.parameters[0].home}", seconds, microbatch=self._gathered_in(block))

    def _gathered_in(self, block: Block) -> Microbatch:
        """Return the microbatches in which a block's values arrive; it may be there in others."""
        return "first" if block.slices.lifetime == "step" else "every"

    def launch_gather(self, action: Action) -> None:
        number, microbatch = action.number, action.microbatch
        block = self.chunk.blocks[number]
        axis, num_bytes, encoding = block.slices.axis, block.used_bytes, block.parameters[0].gathered_as
        collective, size = VERBS["gather"].collective, self.steps.size_of((block.slices.axis,))
        name, own_bytes = f"gather {block.parameters[0].home}", num_bytes / size
        if encoding is not None:
            num_bytes = sum(p.gathered_sent(size) for p in block.parameters)
            encode_s = self.steps.encode_s(own_bytes, encoding)
            encoded = self.recorder.compute(f"encode {block.parameters[0].home}", encode_s, microbatch=microbatch)
            self.recorder.take("temporary", quotient_bytes(own_bytes), encoded, (encoded,), microbatch, name=name)
        seconds = self.steps.sent_s(collective, axis, num_bytes, encoding)
        sent = self._messages(collective, block.parameters)
        task = self.recorder.launch(name, axis, seconds, blocks=False, messages=sent, microbatch=microbatch)
        if encoding is not None:  # the codes that are sent, and those that arrive
            codes = num_bytes * (1 + 1 / size)
            self.recorder.take("temporary", codes, task, (task,), microbatch, name=f"codes of {name}")
        if self.steps.cluster.backend == "gloo":  # torch's all-gather writes to separate memory first
            self.recorder.take("communication", num_bytes, task, (task,), microbatch, name=name)
        self.gathers[number] = task

    def _messages(self, collective: str, parameters: Sequence[Parameter]) -> tuple[Message, ...]:
        """Return the messages of a block: one per parameter that goes straight to its place, one for all others."""
        gathers = collective == VERBS["gather"].collective
        direct, packed, is_sent = list[float](), 0.0, False
        axes = {p.slices.axis for p in parameters if p.slices is not None}
        size, encoding = self.steps.size_of(axes), None
        for p in parameters:
            num_bytes = p.used_bytes if gathers else p.summed_bytes
            sent_bytes = p.gathered_sent(size) if gathers else p.scattered_sent(size)
            encoding = p.gathered_as if gathers else p.summed_as
            sent = gathers or (p.grad and p.slices is not None and p.slices.copied)
            if not is_direct(self.steps, p, num_bytes):
                packed, is_sent = packed + sent_bytes, is_sent or sent
            elif sent:
                direct.append(sent_bytes)
        return self.steps.sent_messages(collective, axes, [*direct, packed if is_sent else 0.0], encoding)


class _Forward(_Pass):
    def __init__(self, steps: Steps, chunk: Chunk) -> None:
        super().__init__(steps, chunk)
        self.taken: dict[Allocation, int] = {}
        self.released: dict[int, int] = {}  # allocation -> the kernel after which its memory is given back

    def run(self, actions: Actions) -> None:
        starts: list[int] = []
        for own in actions.forward:
            starts.append(len(self.recorder.tasks))
            for action in own:
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
            for own in pair:
                for task in self.ran[own.number][1:]:
                    self._ran(own, task)

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
        kept = Fate.KEPT  # kept values stay, whoever reads them
        self.readers.note([m for m in touched if m.fate is not kept], task)

    def _memory(self) -> None:
        for memory, task in self.taken.items():
            freed, number = self.readers.of(memory), memory.number
            if number in self.released:
                freed = *freed, self.copies[number], self.released[number]
            category = "activations" if memory.fate.is_stored else "temporary"
            self.recorder.take(category, memory.num_bytes, task, freed, name=memory.name)


class _Sum(NamedTuple):
    """A sum of gradients over devices, made `times` here, and `every` time that a fold stands for.

    num_bytes    as they are sent; `encoding`: in which they are
    held_bytes   of what is made to be sent, which stays until the sum is there; none where gradients are sent in place
    summed_bytes of the summands that a rank adds up
    ready_s      the seconds of making it, and of making a rank's piece of the sum; `back_s`: of making gradients of it
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: float
    encoding: Encoding | None = None
    held_bytes: float = 0.0
    summed_bytes: float = 0.0
    ready_s: float = 0.0
    back_s: float = 0.0
    times: int = 1
    every: int = 1


class _Backward(_Pass):
    """Backward: `recorder` records the first part, `later` the second, or the same one."""

    def __init__(self, steps: Steps, chunk: Chunk, actions: Actions, two: bool) -> None:
        super().__init__(steps, chunk)
        self.actions, self.apart = actions, frozenset(actions.of("weights"))
        self.put_off_s = steps.cluster.device.put_off_s / 2 if two else 0.0  # in each part
        if two:
            self.later = Recorder(steps.execution.assumed.overlap)
        self.later_readers = _Readers(self.later) if two else self.readers
        self.gradients: dict[Allocation, int] = {}  # the task that made each
        self.again: dict[Allocation, int] = {}  # the task that recomputed each
        self.waiting: list[Occurrence] = []  # operations of a pair that are to be made again
        self.made: dict[int, int] = {}  # use of a parameter -> the first task that gave it a gradient
        self.scattered: list[Buffer] = []  # whole gradients, freed by what scatters them
        self.arriving: list[tuple[str, float, Microbatch]] = []  # slices that arrive when a scatter is awaited
        self.arrived: tuple[int, str, float, Microbatch] | None = None  # a scatter of codes; the kernel that decodes
        self.task = -1  # in `later`, the last task that gave gradients to parameters
        self.cast: list[tuple[_Sum, int, int]] = []  # sums of what is cast or encoded, with their first and last task
        self.sums: list[_Sum] = []  # without overlap: the previous stage gets its gradients first

    def run(self) -> None:
        starts: dict[int, tuple[int, int]] = {}
        if self.later is not self.recorder and not self.apart:
            self.later.compute("no weights", 0.0)  # a task that takes over gradients that are made early
        numbers = [*reversed(range(len(self.chunk.occurrences))), -1]
        for number, own in zip(numbers, self.actions.backward, strict=True):
            starts[number] = len(self.recorder.tasks), len(self.later.tasks)
            for action in own:
                self.act(action)
        for span in self.chunk.spans:
            if span.more:
                begin, end = starts[span.end - 1], starts[span.start - 1]
                self.recorder.folds.append(Fold(begin[0], end[0], span.more))
                if self.later is not self.recorder:
                    self.later.folds.append(Fold(begin[1], end[1], span.more))
        self.later.verb = "reduce"
        for each in self.sums:
            self._sum(each)
        self._cast_back()
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
            own = [o for o in reversed(pair) if o.operation.is_differentiated]
            if occurrence is own[0]:
                self.emit_pair(own, backward=True, suffix=" backward")
            ran = self.ran[occurrence.number]
        else:
            ran = Ran(*[self._backward_of(occurrence, name, cost)] * 3)
        self._note(occurrence, ran.last, self.readers)
        for memory in occurrence.gradients:
            if memory is occurrence.result:
                continue
            if memory in self.gradients:  # it takes separate memory until it is added
                self.recorder.take("temporary", memory.num_bytes, ran.made, (ran.last,), name=_gradient(memory.name))
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

    def _note(self, occurrence: Occurrence, task: int, readers: _Readers) -> None:
        """Note that a part of backward reads the values kept for it, and the gradient of the result."""
        readers.note((*occurrence.keeps, ("gradient", occurrence.result)), task)

    def _contribute(self, occurrence: Occurrence, task: int) -> None:
        self.task = task
        for use in self.chunk.trained(occurrence):
            self.made.setdefault(use, task)
        for use in occurrence.views:  # a view shares the memory of its parameter
            if self.chunk.uses[use].parameter.grad:
                self.made.setdefault(use, task)

    # ---- gradients of parameters ----

    def accumulate(self, action: Action) -> None:
        use = self.chunk.uses[action.number]
        parameter, made = use.parameter, self.made[use.number]
        if use.block is not None:  # whole gradients of gathered parameters
            self.later.take("gradients", parameter.whole_bytes, made, (), "opening", name=parameter.leaf)
            return
        if is_bucketed(parameter):  # the bucket's memory is always there
            self.later.take("gradients", parameter.gradient_bytes, made, (), "opening", name=parameter.leaf)
            return
        used, num_bytes = parameter.used_bytes, parameter.gradient_bytes
        self.later.take("gradients", num_bytes, made, (), "first", name=parameter.leaf)
        self.later.take(
            "temporary", used, made, (min(self.task, len(self.later.tasks) - 1),),
            "every" if num_bytes != used else "later", name=_gradient(parameter.leaf),
        )  # fmt: skip

    def launch_reduce(self, action: Action) -> None:
        """Sum a unit. Gradients in a bucket were kept until now; a fold's appear at this moment only."""
        uses = [self.chunk.uses[use] for use in self.actions.units[action.number]]
        first, end = uses[0].parameter, self.later.last
        name, total, sent = f"gradient {first.leaf}", first.gradient_bytes, first.reduced_bytes
        if is_bucketed(first):
            name, total = "gradients in a bucket", sum((1 + u.more) * u.parameter.gradient_bytes for u in uses)
            sent = sum((1 + u.more) * u.parameter.reduced_bytes for u in uses)
            for use in uses:
                p, made = use.parameter, self.made[use.number]
                num_bytes = (1 + use.more) * (p.used_bytes if p.slices is None else p.gradient_bytes)
                taken, freed = end if use.more else made, (max(made, end),)
                self.later.take("temporary", num_bytes, taken, freed, "last", name=_gradient(p.leaf))
                if p.slices is None or not p.slices.summed:
                    total_bytes = (1 + use.more) * p.gradient_bytes
                    self.later.take("gradients", total_bytes, None, freed, "closing", name=p.leaf)
        every = 1 if is_bucketed(first) else 1 + uses[0].more
        unit = self._cast(_Sum(name, first.sums, sent, every=every), total)
        if first.summed_as is not None:
            codes = sum((1 + u.more * is_bucketed(first)) * u.parameter.reduced_sent for u in uses)
            unit = self._encoded(unit, codes, first)
        if self.steps.execution.assumed.overlap:
            self._sum(unit)
        else:  # behind the folds
            self.sums.append(unit._replace(times=every))

    def _cast(self, what: _Sum, total_bytes: float) -> _Sum:
        """Return a sum with the casts of gradients of so many bytes, where they are sent in another dtype."""
        if what.num_bytes == total_bytes:
            return what
        seconds = self.steps.cast_s(total_bytes, what.num_bytes)
        return what._replace(held_bytes=what.num_bytes, ready_s=seconds, back_s=seconds)

    def _encoded(self, what: _Sum, code_bytes: float, like: Parameter) -> _Sum:
        """Return a sum of encoded gradients: all are encoded, those of a piece decoded and encoded, the sum decoded."""
        steps, num_bytes, encoding, size = self.steps, what.num_bytes, like.summed_as, self.steps.size_of(what.axes)
        code_bytes = padded(code_bytes, size, encoding, like.reduced_dtype)
        piece_s = steps.decode_s(num_bytes, encoding) + steps.encode_s(num_bytes / size, encoding)
        return what._replace(
            num_bytes=code_bytes, encoding=encoding, summed_bytes=num_bytes,
            held_bytes=what.held_bytes + 2 * code_bytes,
            ready_s=what.ready_s + steps.encode_s(num_bytes, encoding) + piece_s,
            back_s=what.back_s + steps.decode_s(num_bytes, encoding),
        )  # fmt: skip

    def _sum(self, what: _Sum) -> None:
        collective = VERBS["scatter" if self.steps.execution.assumed.shard_optimizer else "reduce"].collective
        sent = self.steps.sent_messages(collective, what.axes, [what.num_bytes], what.encoding)  # timed along each axis
        tasks: list[int] = []
        if what.ready_s:
            name = f"{'cast' if what.encoding is None else 'encode'} of {what.name}"
            tasks.append(self.later.compute(name, what.times * what.ready_s, microbatch="last"))
            made = max(quotient_bytes(what.summed_bytes), what.summed_bytes * (1 + 1 / self.steps.size_of(what.axes)))
            self.later.take("temporary", made, tasks[-1], (tasks[-1],), "last", name=name)
        for axis in what.axes:
            one_s = self.steps.sent_s(collective, axis, what.num_bytes, what.encoding, merged=len(what.axes) > 1)
            seconds = what.times * one_s
            messages = sent * what.times if axis == what.axes[0] else ()
            task = self.later.launch(
                what.name, axis, seconds, blocks=False, after=tasks[-1:], microbatch="last", messages=messages
            )
            tasks.append(task)
        if what.ready_s:
            self.cast.append((what, tasks[0], tasks[-1]))

    def _cast_back(self) -> None:
        """Wait for sums at the end of backward, and make them gradients again, in the dtype of what is accumulated."""
        if not self.cast:
            return
        seconds = sum(what.every * what.back_s for what, _, _ in self.cast)
        end = self.later.compute("sums of gradients", seconds, {task for _, _, task in self.cast}, "last")
        for what, begin, _ in self.cast:  # a fold's gradients appear at this moment only
            num_bytes, taken = what.every * what.held_bytes, end if what.every > 1 else begin
            self.later.take("temporary", num_bytes, taken, (end,), "last", name=what.name)

    def launch_scatter(self, action: Action) -> None:
        """Sum the gradients of a gathered block, where ranks have summands; each keeps its slice."""
        number, microbatch = action.number, action.microbatch
        summed = self.chunk.blocks[number].slices.summed
        for copied in (True, False):
            uses = [u for u in self.chunk.blocks[number].uses if u.parameter.grad and u.parameter.slices
                    and u.parameter.slices.copied == copied]  # fmt: skip
            if not uses:
                continue
            slices, encoding = uses[0].parameter.slices, uses[0].parameter.summed_as if copied else None
            launch = max(self.later.last, 0)
            assert slices is not None
            name = f"gradients of {uses[0].parameter.home}"
            if copied:
                task = self._scatter(name, number, [u.parameter for u in uses], encoding, microbatch)
            else:
                seconds = self.steps.collective_s(SLICE, slices.axis, sum(u.parameter.summed_bytes for u in uses))
                task = self.later.compute(name, seconds, microbatch=microbatch)
            for use in uses:
                leaf, gradient = use.parameter.leaf, _gradient(use.parameter.leaf)
                made, used = self.made.get(use.number, task), use.parameter.used_bytes
                end, whole, sent_bytes = max(made, task), use.parameter.whole_bytes, use.parameter.summed_bytes
                if summed:  # the accumulated sum, and the last microbatch's gradient, which is added to it first
                    self.later.take("temporary", used, made, (max(made, launch),), "later", name=gradient)
                    self.scattered.append(Buffer("gradients", whole, None, (end,), "closing", leaf))
                elif copied:
                    self.scattered.append(Buffer("temporary", used, made, (end,), "every", gradient))
                    if sent_bytes != used and is_direct(self.steps, use.parameter, sent_bytes):  # cast to be sent
                        self.later.take("temporary", sent_bytes, task, (task,), name=f"{gradient}, to be sent")
                else:  # each rank takes its slice at once
                    self.later.take("temporary", used, made, (end,), name=gradient)
                self.made[use.number] = task
                if not is_bucketed(use.parameter):
                    when: Microbatch = "last" if summed else "first"
                    if copied and (encoding is not None or self.steps.cluster.backend == "gloo"):  # sums what arrived
                        self.arriving.append((leaf, use.parameter.gradient_bytes, when))
                    else:
                        self.later.take("gradients", use.parameter.gradient_bytes, task, (), when, name=leaf)
                elif not summed:
                    self.later.take("gradients", use.parameter.gradient_bytes, task, (), "opening", name=leaf)

    def _scatter(
        self, name: str, number: int, own: Sequence[Parameter], encoding: Encoding | None, microbatch: Microbatch
    ) -> int:
        """Record the reduce-scatter of a block's gradients, and return its task; their slices are decoded later."""
        steps, block, collective = self.steps, self.chunk.blocks[number], VERBS["scatter"].collective
        axis, whole_bytes = block.slices.axis, sum(p.summed_bytes for p in own)
        if encoding is not None:
            task = self.later.compute(f"encode {name}", steps.encode_s(whole_bytes, encoding), microbatch=microbatch)
            self.later.take("temporary", quotient_bytes(whole_bytes), task, (task,), microbatch, name=f"encode {name}")
        num_bytes = sum(p.scattered_sent(steps.size_of((axis,))) for p in own)
        seconds, sent = (
            steps.sent_s(collective, axis, num_bytes, encoding),
            self._messages(collective, block.parameters),
        )
        task = self.later.launch(name, axis, seconds, blocks=False, messages=sent, microbatch=microbatch)
        if encoding is not None:
            self.arrived = task, f"decode {name}", steps.decode_s(whole_bytes, encoding), microbatch
            self.later.take("temporary", 2 * num_bytes, task, (task,), microbatch, name=f"codes of {name}")
        return task

    def deliver(self, action: Action) -> None:
        """Free whole gradients once the next block's exist, or backward ends; their slices exist by then."""
        if self.arrived is not None:
            task, what, seconds, microbatch = self.arrived
            self.later.compute(what, seconds, (task,), microbatch)
            self.arrived = None
        for category, num_bytes, made, (scattered,), when, name in self.scattered:
            self.later.take(category, num_bytes, made, (max(scattered, self.later.last),), when, name=name)
        for leaf, num_bytes, when in self.arriving:
            self.later.take("gradients", num_bytes, self.later.last, (), when, name=leaf)
        self.scattered.clear()
        self.arriving.clear()

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
        name = memory.name if what is memory else _gradient(memory.name)
        if later:
            self.recorder.take(category, memory.num_bytes, taken, name=name)
            self.later.take(category, memory.num_bytes, None, later, name=name)
        else:
            freed = here or (taken if taken is not None else 0,)
            self.recorder.take(category, memory.num_bytes, taken, freed, name=name)
