"""Ring attention on one rank (`pcg.ring`): its queries stay, and blocks of keys and values travel around the ranks.

A block is sent on while it is attended to. Which of its keys a query sees follows from their positions in the sequence.
A block that no later rank sees is sent no further. Positions on a rank are neighbours, or as far apart as
there are ranks: then all ranks have the same work in each round, if a query sees the keys before it. What blocks give
is merged by the log-sum-exp of their scores, which forward keeps beside the result, so that backward finds the
gradients of each block from that block alone.

Backward sends blocks around again. The gradients of a block follow it: each rank adds its summand and sends them on,
and the last one sends them to the block's owner. A rank's own block is the first. A part of its queries waits until the
gradients of the last block have been sent, so that these travel beside compute, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.shifts import start_shift
from shardwright.lowering.ranks.untraced import untraced
from shardwright.lowering.runtime.partial_attention import (
    kernel_for,
    merge,
    nothing_seen,
    wide_dtype,
    without_any,
)
from shardwright.lowering.runtime.ring_places import Places
from shardwright.pcg.ring import Sees

# pyright: reportIncompatibleMethodOverride=false


@untraced
def ring_attention(
    causal: bool, scale: float | None, start: int, q: Tensor, k: Tensor, v: Tensor, axis: Axis, step: int = 1,
    mask: Tensor | None = None, *, sees: Sees | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(q kᵀ · scale + mask) v, of all keys of the axis.

    Args:
        causal: a query sees the keys up to its own position.
        scale: None: 1 / √d.
        start: the position of the first query.
        q: this rank's queries, [..., h·r, m, d].
        k: its part of the keys, [..., h, l, d].
        v: of the values, [..., h, l, e].
        axis: along which keys and values travel.
        step: how far apart neighbouring queries are, and keys. If it is 1, the ranks' parts of the keys follow each
            other in the sequence. Else it is the number of ranks, and rank i has the keys i, i + step, i + 2·step, …
        mask: for this rank's queries and the keys of all ranks; it is added to scores, or says what a query sees. Of
            a shape that broadcasts to [..., h·r, m, number of keys].
        sees: the ranks outside which the mask, or `causal`, hides all keys from a rank; None: not known of any.

    Returns:
        [..., h·r, m, e].
    """
    lead = q.shape[:-3]
    flat = (_by_rows(x.reshape(lead.numel(), *x.shape[-3:])) for x in (q, k, v))
    factor, ranks = q.shape[-1] ** -0.5 if scale is None else scale, sees or (axis.size, axis.size)
    plan = Places(axis, causal, factor, start, step, q.shape[-2], k.shape[-2], ranks)
    result = _Ring.apply(plan, *flat, None if mask is None else _flattened(mask, lead))
    return result.view(*lead, *q.shape[-3:-1], v.shape[-1])


def _flattened(mask: Tensor, lead: torch.Size) -> Tensor:
    """Return a mask with four dimensions, of which the first is one for all of `lead`."""
    mask = mask[(None,) * (len(lead) + 3 - mask.ndim)]
    own = mask.shape[:-3]
    return (mask if own.numel() == 1 else mask.expand(*lead, *mask.shape[-3:])).reshape(-1, *mask.shape[-3:])


def _by_rows(x: Tensor) -> Tensor:
    """Return the same with the numbers of each row next to each other, as torch's fused kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Blocks(NamedTuple):
    """The shapes of a block of keys and of values, which are sent as one run of memory."""

    keys: torch.Size
    values: torch.Size

    @property
    def numel(self) -> int:
        return self.keys.numel() + self.values.numel()

    def parts(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.keys.numel(), self.values.numel()])
        return k.view(self.keys), v.view(self.values)


def around(plan: Places, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor] | None]]:
    """Yield each rank around the ring, this one first, with its keys and values. While they are used, they are sent on.

    None: they do not come so far, as no rank from here on sees them.
    """
    axis, shapes, block = plan.axis, _Blocks(k.shape, v.shape), None
    for step in range(axis.size):
        number = (axis.rank - step) % axis.size
        send = receive = None
        if plan.goes_on(number, step):
            send = (torch.cat([k.reshape(-1), v.reshape(-1)]) if block is None else block), plan.next
        if plan.goes_on(number - 1, step):
            receive = k.new_empty(shapes.numel), plan.previous
        wait = start_shift(axis, send, receive)
        yield number, (k, v) if step == 0 else None if block is None else shapes.parts(block)
        if wait is not None:
            wait()
        block = None if receive is None else receive[0]


class _Ring(Function):
    @staticmethod
    def forward(ctx: AutogradContext, plan: Places, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        attend = kernel_for(q, v, mask)
        found, log_sum = nothing_seen(q, v)
        for number, block in around(plan, k, v):
            if block is None:
                continue
            keys, values = block
            for rows, columns, causal in plan.tiles(plan.queries, number, attend.most_rows):
                given = q[..., rows, :], keys[..., columns, :], values[..., columns, :]
                hiding = plan.hiding(mask, rows, number, columns, q.dtype)
                merge(found[..., rows, :], log_sum[..., rows], *attend.forward(*given, causal, plan.scale, *hiding))
        result = found.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, mask, result, log_sum if mask is None else without_any(log_sum))
        return result

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[None, *tuple[Tensor | None, ...]]:
        q, k, v, mask, result, log_sum = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad
        found = _Gradients(ctx.plan, q, grad, result, log_sum, mask, trains_mask=needed[3])
        own = *found.everywhere(k, v, send=any(needed[1:3])), found.of_mask
        gradients = zip((q, k, v, mask), own, needed, strict=True)
        return None, *(own.to(x.dtype) if is_needed and own is not None else None for x, own, is_needed in gradients)


def _nothing() -> None:
    """Wait for nothing."""


class _Sum:
    """The gradients of a block: those of the ranks before, which arrive, and this rank's.

    `wait`: until they are there.
    """

    def __init__(
        self, shapes: _Blocks, like: Tensor, arriving: Tensor | None = None, wait: Callable[[], None] = _nothing
    ) -> None:
        self.shapes, self.like, self.arriving, self.wait = shapes, like, arriving, wait

    @cached_property
    def block(self) -> Tensor:
        """The sum so far."""
        self.wait()
        return self.like.new_zeros(self.shapes.numel) if self.arriving is None else self.arriving

    def add(self, columns: slice, of_keys: Tensor, of_values: Tensor) -> None:
        keys, values = self.shapes.parts(self.block)
        keys[..., columns, :] += of_keys
        values[..., columns, :] += of_values


class _Gradients:
    """The gradients of a rank's queries and of its mask, and of the blocks that it sees."""

    def __init__(
        self, plan: Places, q: Tensor, grad: Tensor, result: Tensor, log_sum: Tensor, mask: Tensor | None, *,
        trains_mask: bool,
    ) -> None:  # fmt: skip
        self.plan, self.q, self.grad, self.result, self.log_sum, self.mask = plan, q, grad, result, log_sum, mask
        self.attend = kernel_for(q, result, mask, trains_mask=trains_mask)
        self.queries = torch.zeros_like(q, dtype=wide_dtype(q.dtype))
        self.of_mask = torch.zeros_like(mask, dtype=self.queries.dtype) if mask is not None and trains_mask else None

    def everywhere(self, k: Tensor, v: Tensor, *, send: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, and of this rank's keys and values by all ranks' queries.

        `send`: the latter are needed.
        """
        plan, axis, shapes = self.plan, self.plan.axis, _Blocks(k.shape, v.shape)
        middle = plan.num_queries // 2
        late, early = plan.queries[middle:], plan.queries[:middle]
        own = _Sum(shapes, k.new_empty(0, dtype=wide_dtype(k.dtype)))
        arriving, home, wait = None, None, _nothing
        for step, (number, block) in enumerate(around(plan, k, v)):
            if step == 0:
                self.add(k, v, number, late, own)
                continue
            gradients = None
            if block is not None:
                total = _Sum(shapes, k, arriving, wait)
                self.add(*block, number, plan.queries, total)
                gradients = total.block, plan.next if plan.goes_on(number, step) else number
                del total
            wait()
            arriving = k.new_empty(shapes.numel) if send and plan.goes_on(number - 1, step) else None
            if send:
                onward = None if arriving is None else (arriving, plan.previous)
                back = None
                if plan.reach[axis.rank] == step:
                    home = k.new_empty(shapes.numel)
                    back = home, (axis.rank + step) % axis.size
                wait = start_shift(axis, gradients, onward, back) or _nothing
            del block, gradients
        self.add(k, v, axis.rank, early, own)
        wait()
        if home is not None:
            own.block.add_(home)
        return self.queries, *shapes.parts(own.block)

    def add(self, keys: Tensor, values: Tensor, number: int, queries: range, total: _Sum) -> None:
        """Add the gradients of a block, by some of the queries, to `total`, and to theirs."""
        for rows, columns, causal in self.plan.tiles(queries, number, self.attend.most_rows):
            grad, q, result = (x[..., rows, :] for x in (self.grad, self.q, self.result))
            given = grad, q, keys[..., columns, :], values[..., columns, :], result, self.log_sum[..., rows]
            hiding = self.plan.hiding(self.mask, rows, number, columns, self.q.dtype)
            of_queries, of_keys, of_values, *of_mask = self.attend.backward(*given, causal, self.plan.scale, *hiding)
            self.queries[..., rows, :] += of_queries
            if self.of_mask is not None:
                self.plan.of_mask(self.of_mask, rows, number, columns).add_(*of_mask)
            del of_queries  # before the sum takes memory
            total.add(columns, of_keys, of_values)
