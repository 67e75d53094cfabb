"""Ring attention on one rank (`pcg.ring`): its queries stay, and blocks of keys and values travel around the ranks.

A block is sent on while it is attended to. Which of its keys a query sees follows from their positions in the sequence.
Positions on a rank are neighbours, or as far apart as there are ranks: then all ranks have the same work in each round,
if a query sees the keys before it. What blocks give is merged by the log-sum-exp of their scores, which forward keeps
beside the result, so that backward finds the gradients of each block from that block alone.

Backward sends blocks around again. The gradients of a block follow it: each rank adds its summand and sends them on,
and the last one sends them to the block's owner. A rank's own block is the first. A part of its queries waits until the
gradients of the last block have been sent, so that these travel beside compute, too.

Where queries see few of the keys (`pcg.slices`), nothing goes around. In each round a rank sends a slice of its own
keys to the rank that sees it, and the gradients of a slice straight back to its owner.
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
from shardwright.pcg.slices import Sees, Slices

# pyright: reportIncompatibleMethodOverride=false


@untraced
def ring_attention(
    causal: bool, scale: float | None, start: int, q: Tensor, k: Tensor, v: Tensor, axis: Axis, step: int = 1,
    mask: Tensor | None = None, *, sees: tuple[int, int, int] | None = None,
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
        sees: the keys outside which the mask, or `causal`, hides all from a query (`pcg.slices.Sees`); None: nothing
            is known of them.

    Returns:
        [..., h·r, m, e].
    """
    lead = q.shape[:-3]
    flat = (_by_rows(x.reshape(lead.numel(), *x.shape[-3:])) for x in (q, k, v))
    factor, sizes, slices = q.shape[-1] ** -0.5 if scale is None else scale, (q.shape[-2], k.shape[-2]), None
    if sees is not None:
        band = Sees(*sees)
        slices = Slices(axis.size, band, start - axis.rank * band.apart, step, *sizes)
    plan = Places(axis, causal, factor, start, step, *sizes, slices)
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

    def cut(self, columns: slice) -> _Blocks:
        """Return the shapes of a slice of the block."""
        num_keys = columns.stop - columns.start
        return _Blocks(*(torch.Size((*shape[:-2], num_keys, shape[-1])) for shape in self))

    def parts(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.keys.numel(), self.values.numel()])
        return k.view(self.keys), v.view(self.values)


class Part(NamedTuple):
    """Keys and values of a rank that are here: of its block, the `columns`."""

    owner: int
    columns: slice
    keys: Tensor
    values: Tensor

    def packed(self, columns: slice) -> Tensor:
        """Return a slice of them as one run of memory."""
        return torch.cat([x[..., columns, :].reshape(-1) for x in (self.keys, self.values)])

    def of(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some columns of the block."""
        here = slice(columns.start - self.columns.start, columns.stop - self.columns.start)
        return self.keys[..., here, :], self.values[..., here, :]


def around(plan: Places, k: Tensor, v: Tensor) -> Iterator[Part | None]:
    """Yield this rank's keys and values, and those that come in each round; None: nothing comes in that one.

    While they are used, those of the next round are sent: what is here goes on to the next rank, or a slice of this
    rank's own to the one that sees it.
    """
    axis, shapes = plan.axis, _Blocks(k.shape, v.shape)
    part: Part | None = (own := Part(axis.rank, slice(0, plan.num_keys), k, v))
    block: Tensor | None = None
    for away in plan.rounds:
        owner, send, receive = plan.rank(-away), None, None
        if plan.slices is None:
            send, source = (own.packed(own.columns) if block is None else block, plan.rank(1)), plan.rank(-1)
        else:
            reader, source = plan.rank(away), owner
            there = plan.seen(axis.rank, reader)
            send = (own.packed(there), reader) if there.start < there.stop else None
        here = plan.seen(owner, axis.rank)
        if here.start < here.stop:
            receive = k.new_empty(shapes.cut(here).numel), source
        wait = start_shift(axis, send, receive)
        yield part
        if wait is not None:
            wait()
        part, block = None, None if receive is None else receive[0]
        if block is not None:
            part = Part(owner, here, *shapes.cut(here).parts(block))
    yield part


class _Ring(Function):
    @staticmethod
    def forward(ctx: AutogradContext, plan: Places, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        attend = kernel_for(q, v, mask)
        found, log_sum = nothing_seen(q, v)
        for part in around(plan, k, v):
            if part is None:
                continue
            for rows, columns, causal in plan.tiles(plan.queries, part.owner, attend.most_rows):
                given = q[..., rows, :], *part.of(columns)
                hiding = plan.hiding(mask, rows, part.owner, columns, q.dtype)
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
    """The gradients of some columns of a block: those of the ranks before, which arrive, and this rank's.

    `wait`: until they are there.
    """

    def __init__(
        self, shapes: _Blocks, columns: slice, like: Tensor, arriving: Tensor | None = None,
        wait: Callable[[], None] = _nothing,
    ) -> None:  # fmt: skip
        self.shapes, self.columns, self.like = shapes.cut(columns), columns, like
        self.arriving, self.wait = arriving, wait

    @cached_property
    def block(self) -> Tensor:
        """The sum so far."""
        self.wait()
        return self.like.new_zeros(self.shapes.numel) if self.arriving is None else self.arriving

    def add(self, columns: slice, of_keys: Tensor, of_values: Tensor) -> None:
        keys, values = self.shapes.parts(self.block)
        here = slice(columns.start - self.columns.start, columns.stop - self.columns.start)
        keys[..., here, :] += of_keys
        values[..., here, :] += of_values


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
        middle, whole = plan.num_queries // 2, slice(0, plan.num_keys)
        wide = k.new_empty(0, dtype=wide_dtype(k.dtype))
        own, mine = _Sum(shapes, whole, wide), Part(axis.rank, whole, k, v)
        arriving, wait = None, _nothing
        home = whole
        for away, part in zip((0, *plan.rounds), around(plan, k, v), strict=True):
            if away == 0:
                self.add(mine, plan.queries[middle:], own)
                continue
            gradients = None
            if part is not None:
                if plan.slices is None:
                    total, to = _Sum(shapes, whole, k, arriving, wait), plan.rank(1)
                else:
                    total, to = _Sum(shapes, part.columns, wide), part.owner
                self.add(part, plan.queries, total)
                gradients = total.block.to(k.dtype), to
                del total
            wait()
            if arriving is not None and plan.slices is not None:
                own.add(home, *shapes.cut(home).parts(arriving))
            arriving, wait, reader = None, _nothing, plan.rank(away)
            home = plan.seen(axis.rank, reader)
            if send:
                if home.start < home.stop:
                    arriving = k.new_empty(shapes.cut(home).numel)
                source = plan.rank(-1) if plan.slices is None else reader
                wait = start_shift(axis, gradients, None if arriving is None else (arriving, source)) or _nothing
            del part, gradients
        self.add(mine, plan.queries[:middle], own)
        wait()
        if arriving is not None:
            own.add(home, *shapes.cut(home).parts(arriving))
        return self.queries, *shapes.parts(own.block)

    def add(self, part: Part, queries: range, total: _Sum) -> None:
        """Add the gradients of keys and values, by some of the queries, to `total`, and to theirs."""
        for rows, columns, causal in self.plan.tiles(queries, part.owner, self.attend.most_rows):
            grad, q, result = (x[..., rows, :] for x in (self.grad, self.q, self.result))
            given = grad, q, *part.of(columns), result, self.log_sum[..., rows]
            hiding = self.plan.hiding(self.mask, rows, part.owner, columns, self.q.dtype)
            of_queries, of_keys, of_values, *of_mask = self.attend.backward(*given, causal, self.plan.scale, *hiding)
            self.queries[..., rows, :] += of_queries
            if self.of_mask is not None:
                self.plan.of_mask(self.of_mask, rows, part.owner, columns).add_(*of_mask)
            del of_queries  # before the sum takes memory
            total.add(columns, of_keys, of_values)
