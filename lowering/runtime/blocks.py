"""ZeRO at run time: parameters stored in slices, gathered for one block of the model at a time.

A block is gathered into pooled memory before its first use and freed after its last. Autograd does not keep gathered
parameters: it saves handles of them, and backward gathers the block again when it opens the first handle. Autograd
drops a handle when its operator's backward is done; the block is freed with the last handle. Once all gradients of a
block exist, they are reduce-scattered together. They are sent in the dtype of the slices, in another one
(`reduce_dtype`) or encoded, and delivered in the dtype of the slices. The list of actions (`schedule`) decides which
blocks are gathered ahead, and when gradients are waited for.

This is ZeRO-3. A block with another lifetime stays for the backward of its microbatch, or for all microbatches of a
step. If whole gradients are accumulated, the gathered parameters are leaves for autograd, which adds up their gradients
until the last microbatch; the sums have the dtype of the slices if that is wider.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering import private
from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.movement import take
from shardwright.lowering.runtime.buffers import BufferPool, BufferSet, SlicedParameter
from shardwright.lowering.runtime.schedule import BlockSchedule
from shardwright.lowering.runtime.views import View
from shardwright.pcg.encodings import Encoding
from shardwright.pcg.step.verbs import Microbatch, happens

# pyright: reportIncompatibleMethodOverride=false

Encodings = tuple[Encoding | None, Encoding | None]
"""The encodings in which a block is gathered, and its gradients are reduce-scattered."""


class _Gather(Function):
    """The identity from slices to whole parameters, as autograd sees it."""

    @staticmethod
    def forward(ctx: AutogradContext, block: GatheredBlock, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.block = block
        ctx.set_materialize_grads(False)
        wholes = tuple(whole.view_as(whole) for whole in block.open(backward=block.all.runs_again).wholes)
        ctx.mark_non_differentiable(*(w for w, s in zip(wholes, block.shards, strict=True) if not s.requires_grad))
        return wholes

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.block.take_gradients(gradients)
        return (None,) * (1 + len(gradients))


class _Handle:
    """A handle of a tensor that autograd saved: its place in a block."""

    def __init__(self, block: GatheredBlock, buffer: int, tensor: Tensor) -> None:
        self.block, self.buffer = block, buffer
        self.view = View.of(tensor)
        block.handles += 1

    def __del__(self) -> None:
        self.block.drop_handle()

    def tensor(self) -> Tensor:
        return self.view.on(self.block.open(backward=True).buffers[self.buffer])


class GatheredBlock:
    """A block: its shards, and its whole parameters while they are gathered."""

    def __init__(
        self,
        blocks: Blocks,
        number: int,
        shards: Sequence[Tensor],
        shares: Sequence[SlicedParameter],
        sent: torch.dtype,
        encodings: Encodings = (None, None),
    ) -> None:
        """Make a block that is not gathered. `sent`: the dtype in which gradients are reduce-scattered."""
        self.all, self.number = blocks, number
        self.frees: Microbatch = blocks.schedule.frees.get(number, "every")
        self.scatters: Microbatch = blocks.schedule.scatters.get(number, "every")
        self.shards, self.shares = list(shards), list(shares)
        self.gathered_as, self.summed_as = encodings
        self.sums = [replace(share, dtype=sent, in_blocks=self.summed_as is not None) for share in shares]
        self.memory: BufferSet | None = None
        self.ready, self.handles = False, 0
        self.leaves: list[Tensor] = []
        self.wide: list[Tensor | None] = [None] * len(self.shards)  # sums of gradients of narrower leaves

    # ---- called by the program ----

    def gather(self) -> tuple[Tensor, ...]:
        """Return the whole parameters, in order."""
        if not happens(self.scatters, first=self.all.first, last=self.all.last):
            return tuple(self._as_leaves())
        return _Gather.apply(self, *self.shards)

    def free(self) -> None:
        """Give the memory back, if the schedule frees the block in this microbatch; later readers gather it again.

        While backward recomputes a part of forward, the block stays, as backward reads it next.
        """
        if not self.all.runs_again and happens(self.frees, first=self.all.first, last=self.all.frees):
            self.drop()

    def drop(self) -> None:
        """Give the memory back unconditionally."""
        if self.memory is None:
            return
        if not self.ready:
            self.memory.finish_gather()
        self.all.forget(self.memory)
        self.all.pool.give(self.memory)
        self.memory, self.ready = None, False

    def drop_handle(self) -> None:
        """Count a handle as dropped; with the last one, free the block if this backward has read it."""
        self.handles -= 1
        if not self.handles and (self.number, True) in self.all.begun:
            self.free()

    # ---- gathering ----

    def start(self) -> None:
        """Launch the gather, unless it is running or done."""
        if self.memory is None:
            self.memory = self.all.pool.get(self.shares)
            self.memory.start_gather(self.shards, self.gathered_as)

    def open(self, *, backward: bool = False) -> BufferSet:
        """Return the gathered block, and launch the gathers that the schedule starts meanwhile."""
        if not self.ready:
            self.start()
            assert self.memory is not None
            self.memory.finish_gather()
            self.ready = True
            self.all.remember(self, self.memory)
        self.all.launch_ahead(self.number, backward=backward)
        assert self.memory is not None
        return self.memory

    def _as_leaves(self) -> Sequence[Tensor]:
        """Return the whole parameters as leaves, in which autograd accumulates gradients."""
        wholes = self.open(backward=self.all.runs_again).wholes
        if not self.leaves:
            pairs = zip(wholes, self.shards, strict=True)
            self.leaves = [whole.detach().requires_grad_(shard.requires_grad) for whole, shard in pairs]
            for member, (leaf, shard) in enumerate(zip(self.leaves, self.shards, strict=True)):
                if leaf.requires_grad and leaf.dtype != shard.dtype:
                    leaf.register_post_accumulate_grad_hook(partial(self._widen, member))
        return self.leaves

    def _widen(self, member: int, leaf: Tensor) -> None:
        """Add a microbatch's gradient to the sum in the dtype of the shards; a sum in 16 bits would lose small ones."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        total = self.wide[member]
        self.wide[member] = gradient.to(self.shards[member].dtype) if total is None else total.add_(gradient)

    def forget_leaves(self) -> None:
        """Drop the leaves and their accumulated gradients."""
        self.leaves, self.wide = [], [None] * len(self.shards)

    # ---- gradients ----

    def take_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Launch the reduce-scatter of the whole gradients; deliver those that need none at once."""
        self.all.launch_ahead(self.number, backward=True)
        self.all.finish_gradients(self.all.schedule.scatter.get(self.number, ()))
        self.free()
        if self.leaves:
            pairs = zip(self.leaves, self.wide, strict=True)
            gradients = private.add_all([leaf.grad if wide is None else wide for leaf, wide in pairs], gradients)
            self.forget_leaves()
        memory = self.all.pool.get(self.sums)
        summed = [g if share.copied else None for g, share in zip(gradients, self.shares, strict=True)]
        memory.start_scatter(summed, self.summed_as)
        self.all.pending.append((self, memory, summed))
        for member, (gradient, share) in enumerate(zip(gradients, self.shares, strict=True)):
            if gradient is not None and not share.copied:
                part = take(gradient, share.axis, share.dim, share.blocks).to(self.shards[member].dtype)
                shared = private.storage_key(part) == private.storage_key(gradient)
                self.all.deliver(self, member, part.clone() if shared else part)


class Blocks:
    """The blocks of a program, with the memory that they share."""

    def __init__(self, deliver: Callable[[Tensor, Tensor], None], schedule: BlockSchedule) -> None:
        """Start without blocks. `deliver(shard, gradient)` accepts a finished gradient."""
        self.schedule = schedule
        self.begun: set[tuple[int, bool]] = set()
        self.items: list[GatheredBlock] = []
        self.pool = BufferPool()
        self._deliver = deliver
        self.pending: list[tuple[GatheredBlock, BufferSet, list[Tensor | None]]] = []
        self.owners: dict[int, tuple[GatheredBlock, int]] = {}
        self.runs_again = False
        self.first = self.last = self.frees = True

    def add(
        self,
        shards: Sequence[Tensor],
        shares: Sequence[SlicedParameter],
        sent: torch.dtype,
        encodings: Encodings = (None, None),
    ) -> None:
        self.items.append(GatheredBlock(self, len(self.items), shards, shares, sent, encodings))

    def begin(self, *, first: bool = True, last: bool = True, frees: bool | None = None) -> None:
        """Prepare for a microbatch; before the first one, forget a step that did not end.

        `frees`: whether blocks that stay for all microbatches are freed after their last use; by default in the last.
        """
        self.first, self.last, self.frees = first, last, last if frees is None else frees
        self.begun.clear()
        if first:
            self.reset()

    def reset(self) -> None:
        """Forget a step that did not end; its reduce-scatters may still write to their memory, so it is not reused."""
        self.pending.clear()
        self.begun.clear()
        for block in self.items:
            block.drop()
            block.forget_leaves()

    def finish(self) -> None:
        """End a backward: deliver the last gradients, and free every block whose microbatch or step ends."""
        self.finish_gradients()
        self.begun.clear()
        for block in self.items:
            block.free()
            if self.last:
                block.forget_leaves()

    @contextmanager
    def again(self) -> Generator[None]:
        """Mark that backward recomputes a part of forward."""
        before, self.runs_again = self.runs_again, True
        try:
            yield
        finally:
            self.runs_again = before

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        """Return the object that autograd keeps: a handle for a gathered tensor, else the tensor."""
        found = self.owners.get(private.storage_key(tensor)) if self.owners else None
        return tensor if found is None else _Handle(*found, tensor)

    def remember(self, block: GatheredBlock, memory: BufferSet) -> None:
        for i, buffer in enumerate(b for b in memory.buffers if b.numel()):
            self.owners[private.storage_key(buffer)] = (block, i)

    def forget(self, memory: BufferSet) -> None:
        for buffer in memory.buffers:
            self.owners.pop(private.storage_key(buffer), None)

    def launch_ahead(self, number: int, *, backward: bool) -> None:
        """Launch the gathers that the schedule has after the first use of a block."""
        if (number, backward) not in self.begun:
            self.begun.add((number, backward))
            for following in self.schedule.opened.get((number, backward), ()):
                self.items[following].start()

    def deliver(self, block: GatheredBlock, member: int, gradient: Tensor) -> None:
        self._deliver(block.shards[member], gradient)

    def finish_gradients(self, numbers: Collection[int] | None = None) -> None:
        """Wait for the running reduce-scatters of these blocks, or of all, and deliver their gradients."""
        running, self.pending = self.pending, []
        for one in running:
            block, memory, summed = one
            if numbers is not None and block.number not in numbers:
                self.pending.append(one)
                continue
            for member, gradient in memory.finish_scatter(summed, block.shards[0].dtype):
                self.deliver(block, member, gradient)
            self.pool.give(memory)
