"""Gradients of parameters: they are accumulated, summed over devices, in buckets or by blocks, and freed.

Sources: lowering/runtime/reducer.py, lowering/runtime/blocks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.cost.timeline.codes import scattered, summed
from shardwright.cost.timeline.gathers import Gathering
from shardwright.cost.timeline.passes import gradient_of
from shardwright.cost.timeline.pool import is_direct
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.tasks import Buffer
from shardwright.pcg.encodings import Encoding
from shardwright.pcg.moves import SLICE
from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.buckets import LARGE_BYTES
from shardwright.pcg.step.chunk import Chunk
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.verbs import VERBS, Action, Microbatch


def is_bucketed(parameter: Parameter) -> bool:
    """Return whether a parameter's gradient is summed in a bucket with others."""
    return bool(parameter.sums) and parameter.gradient_bytes < LARGE_BYTES


class Sum(NamedTuple):
    """A sum of gradients over devices, made `times` here, and `every` time that a fold stands for.

    num_bytes    as they are sent; `encoding`: in which they are
    held_bytes   of what is made to be sent, which stays until the sum is there; none where gradients are sent in place
    made_bytes   of memory while it is made
    ready_s      the seconds of making it, and of making a rank's piece of the sum; `back_s`: of making gradients of it
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: float
    encoding: Encoding | None = None
    held_bytes: float = 0.0
    made_bytes: float = 0.0
    ready_s: float = 0.0
    back_s: float = 0.0
    times: int = 1
    every: int = 1


class Summing(Gathering):
    """A pass that records the sums of gradients in `later`."""

    def __init__(self, steps: Steps, chunk: Chunk, actions: Actions) -> None:
        super().__init__(steps, chunk)
        self.actions = actions
        self.made: dict[int, int] = {}  # use of a parameter -> the first task that gave it a gradient
        self.scattered: list[Buffer] = []  # whole gradients, freed by what scatters them
        self.arriving: list[tuple[str, float, Microbatch]] = []  # slices that arrive when a scatter is awaited
        self.arrived: tuple[int, str, float, Microbatch] | None = None  # a scatter of codes; the kernel that decodes
        self.task = -1  # in `later`, the last task that gave gradients to parameters
        self.cast: list[tuple[Sum, int, int]] = []  # sums of what is cast or encoded, with their first and last task
        self.sums: list[Sum] = []  # without overlap: the previous stage gets its gradients first

    def put_off_sums(self) -> None:
        """Record what waits for the end of backward: all sums, without overlap, and that sums become gradients."""
        for each in self.sums:
            self._sum(each)
        self._cast_back()

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
            "every" if num_bytes != used else "later", name=gradient_of(parameter.leaf),
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
                self.later.take("temporary", num_bytes, taken, freed, "last", name=gradient_of(p.leaf))
                if p.slices is None or not p.slices.summed:
                    total_bytes = (1 + use.more) * p.gradient_bytes
                    self.later.take("gradients", total_bytes, None, freed, "closing", name=p.leaf)
        every = 1 if is_bucketed(first) else 1 + uses[0].more
        unit = self._cast(Sum(name, first.sums, sent, every=every), total)
        codes = sum((1 + u.more * is_bucketed(first)) * u.parameter.reduced_sent for u in uses)
        unit = self._encoded(unit, codes, first)
        if self.steps.execution.assumed.overlap:
            self._sum(unit)
        else:  # behind the folds
            self.sums.append(unit._replace(times=every))

    def _cast(self, what: Sum, total_bytes: float) -> Sum:
        """Return a sum with the casts of gradients of so many bytes, where they are sent in another dtype."""
        if what.num_bytes == total_bytes:
            return what
        seconds = self.steps.cast_s(total_bytes, what.num_bytes)
        return what._replace(held_bytes=what.num_bytes, ready_s=seconds, back_s=seconds)

    def _encoded(self, what: Sum, code_bytes: float, like: Parameter) -> Sum:
        """Return a sum of encoded gradients."""
        size = self.steps.size_of(what.axes)
        if (codes := summed(self.steps, what.num_bytes, code_bytes, like, size)) is None:
            return what
        return what._replace(
            num_bytes=codes.num_bytes, encoding=like.summed_as, made_bytes=codes.encode_bytes,
            held_bytes=what.held_bytes + codes.held_bytes, ready_s=what.ready_s + codes.encode_s,
            back_s=what.back_s + codes.decode_s,
        )  # fmt: skip

    def _sum(self, what: Sum) -> None:
        collective = VERBS["scatter" if self.steps.execution.assumed.shard_optimizer else "reduce"].collective
        sent = self.steps.sent_messages(collective, what.axes, [what.num_bytes], what.encoding)  # timed along each axis
        tasks: list[int] = []
        if what.ready_s:
            name = f"{'cast' if what.encoding is None else 'encode'} of {what.name}"
            tasks.append(self.later.compute(name, what.times * what.ready_s, microbatch="last"))
            self.later.take("temporary", what.made_bytes, tasks[-1], (tasks[-1],), "last", name=name)
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
                leaf, gradient = use.parameter.leaf, gradient_of(use.parameter.leaf)
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
        self, name: str, number: int, members: Sequence[Parameter], encoding: Encoding | None, microbatch: Microbatch
    ) -> int:
        """Record the reduce-scatter of a block's gradients, and return its task; their slices are decoded later."""
        steps, block, collective = self.steps, self.chunk.blocks[number], VERBS["scatter"].collective
        axis, size = block.slices.axis, steps.size_of((block.slices.axis,))
        if (codes := scattered(steps, members, encoding, size)) is not None:
            task = self.later.compute(f"encode {name}", codes.encode_s, microbatch=microbatch)
            self.later.take("temporary", codes.encode_bytes, task, (task,), microbatch, name=f"encode {name}")
        num_bytes = sum(p.scattered_sent(size) for p in members)
        seconds, sent = (
            steps.sent_s(collective, axis, num_bytes, encoding),
            self._messages(collective, block.parameters),
        )
        task = self.later.launch(name, axis, seconds, blocks=False, messages=sent, microbatch=microbatch)
        if codes is not None:
            self.arrived = task, f"decode {name}", codes.decode_s, microbatch
            self.later.take("temporary", codes.held_bytes, task, (task,), microbatch, name=f"codes of {name}")
        return task

    def deliver(self, action: Action) -> None:
        """Free whole gradients once the next block's exist, or backward ends; their slices exist by then."""
        if self.arrived is not None:
            task, what, seconds, microbatch = self.arrived
            self.later.compute(what, seconds, (task,), microbatch)
            self.arrived = None
        for category, num_bytes, made, (freed,), when, name in self.scattered:
            self.later.take(category, num_bytes, made, (max(freed, self.later.last),), when, name=name)
        for leaf, num_bytes, when in self.arriving:
            self.later.take("gradients", num_bytes, self.later.last, (), when, name=leaf)
        self.scattered.clear()
        self.arriving.clear()
