"""Ring attention on one rank (`pcg.ring`): its queries stay, and blocks of keys and values travel around the ranks.

A block is sent on while it is attended to. Which of its keys a query sees follows from their positions in the sequence;
ranks whose queries come before a block pass it on all the same. Positions on a rank are neighbours, or as far apart as
there are ranks: then all ranks have the same work in each round, if a query sees the keys before it. What blocks give
is merged by the log-sum-exp of their scores, which forward keeps beside the result, so that backward finds the
gradients of each block from that block alone.

Backward sends blocks around again. The gradients of a block follow it: each rank adds its summand and sends them on, so
they end with the block's owner. A rank's own block is the first. A part of its queries waits until the gradients of the
last block have been sent, so that these travel beside compute, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.movement import Axis, Started
from shardwright.lowering.ranks.shifts import start_shift
from shardwright.lowering.ranks.untraced import untraced
from shardwright.lowering.runtime.partial_attention import (
    kernel_for,
    merge,
    nothing_seen,
    wide_dtype,
    without_any,
)

# pyright: reportIncompatibleMethodOverride=false


@untraced
def ring_attention(
    causal: bool, scale: float | None, start: int, q: Tensor, k: Tensor, v: Tensor, axis: Axis, step: int = 1,
    mask: Tensor | None = None,
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

    Returns:
        [..., h·r, m, e].
    """
    lead = q.shape[:-3]
    flat = (_by_rows(x.reshape(lead.numel(), *x.shape[-3:])) for x in (q, k, v))
    plan = _Plan(axis, causal, q.shape[-1] ** -0.5 if scale is None else scale, start, step, q.shape[-2], k.shape[-2])
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


class Tile(NamedTuple):
    """Queries and keys, as slices of a rank's own and of a block's, of which all pairs see each other.

    `causal`: or those that are not above the diagonal.
    """

    queries: slice
    keys: slice
    causal: bool = False


def tiles(queries: range, num_keys: int, last: int | None) -> Iterator[Tile]:
    """Yield the tiles of all pairs of a query and a key that it sees.

    Args:
        queries: some of the rank's, by their number.
        num_keys: of the block.
        last: query i sees the keys of the block up to number i + `last`; None: all.
    """

    def tile(q0: int, q1: int, k1: int, *, diagonal: bool = False) -> Iterator[Tile]:
        if q0 < q1 and k1 > 0:
            yield Tile(slice(q0, q1), slice(k1 - (q1 - q0) if diagonal else 0, k1), diagonal)

    if last is None:
        yield from tile(queries.start, queries.stop, num_keys)
        return
    first, everything = max(queries.start, -last), num_keys - last
    full = max(queries.start, min(queries.stop, everything))
    yield from tile(first, full, first + last)
    yield from tile(first, full, full + last, diagonal=True)
    yield from tile(full, queries.stop, num_keys)


@dataclass(frozen=True)
class _Plan:
    """Where this rank's queries lie, and how they attend.

    start               the position of the first query
    step                from each query to the next, and from each key of a block to the next
    num_queries         of this rank
    num_keys            of each rank
    """

    axis: Axis
    causal: bool
    scale: float
    start: int
    step: int
    num_queries: int
    num_keys: int

    @property
    def queries(self) -> range:
        """The numbers of the queries."""
        return range(self.num_queries)

    def tiles(self, queries: range, number: int, most: int | None) -> Iterator[Tile]:
        """Yield the tiles of some of the queries and the block of a rank; `most`: the most queries of a tile."""
        first_key = number * (self.num_keys if self.step == 1 else 1)
        last = (self.start - first_key) // self.step if self.causal else None
        for at in range(queries.start, queries.stop, most or max(1, len(queries))):
            yield from tiles(range(at, min(queries.stop, at + (most or len(queries)))), self.num_keys, last)

    def of_mask(self, mask: Tensor, rows: slice, number: int, columns: slice) -> Tensor:
        """Return a mask's part for some of the queries, and for some of the keys of a rank; a view."""
        if mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        if mask.shape[-1] == 1:
            return mask
        own = slice(number, None, self.step) if self.step > 1 else slice(number * self.num_keys, None)
        return mask[..., own][..., columns]

    def hiding(self, mask: Tensor | None, rows: slice, number: int, columns: slice, dtype: torch.dtype) -> list[Tensor]:
        """Return what is added to scores of some of the queries and of some of the keys of a rank, if anything is."""
        if mask is None:
            return []
        own = self.of_mask(mask, rows, number, columns)
        if own.dtype != torch.bool:
            return [own.to(dtype)]
        return [torch.zeros(own.shape, dtype=dtype, device=own.device).masked_fill_(~own, float("-inf"))]


class _Blocks(NamedTuple):
    """The shapes of a block of keys and of values, which are sent as one run of memory."""

    keys: torch.Size
    values: torch.Size

    def parts(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.keys.numel(), self.values.numel()])
        return k.view(self.keys), v.view(self.values)


def around(axis: Axis, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each rank with its keys and values, this one's first. While a block is used, it is sent on."""
    shapes, block = _Blocks(k.shape, v.shape), None
    for step in range(axis.size):
        arriving = None
        if step + 1 < axis.size:
            arriving = start_shift(torch.cat([k.reshape(-1), v.reshape(-1)]) if block is None else block, axis)
        yield (axis.rank - step) % axis.size, *((k, v) if block is None else shapes.parts(block))
        if arriving is not None:
            block = arriving()


class _Ring(Function):
    @staticmethod
    def forward(ctx: AutogradContext, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        attend = kernel_for(q, v, mask)
        found, log_sum = nothing_seen(q, v)
        for number, keys, values in around(plan.axis, k, v):
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


class _Sum:
    """The gradients of a block: those of the ranks before, which arrive, and this rank's."""

    def __init__(self, shapes: _Blocks, like: Tensor, arriving: Started | None) -> None:
        self.shapes, self.like, self.arriving = shapes, like, arriving

    @cached_property
    def block(self) -> Tensor:
        """The sum so far; waits for what arrives."""
        if self.arriving is not None:
            return self.arriving()
        return self.like.new_zeros(self.shapes.keys.numel() + self.shapes.values.numel())

    def add(self, columns: slice, of_keys: Tensor, of_values: Tensor) -> None:
        keys, values = self.shapes.parts(self.block)
        keys[..., columns, :] += of_keys
        values[..., columns, :] += of_values


class _Gradients:
    """The gradients of a rank's queries and of its mask, and of the blocks that it sees."""

    def __init__(
        self, plan: _Plan, q: Tensor, grad: Tensor, result: Tensor, log_sum: Tensor, mask: Tensor | None, *,
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
        own, arriving = _Sum(shapes, k.new_empty(0, dtype=wide_dtype(k.dtype)), None), None
        for number, keys, values in around(axis, k, v):
            if number == axis.rank:
                self.add(keys, values, number, late, own)
                continue
            total = _Sum(shapes, k, arriving)
            self.add(keys, values, number, plan.queries, total)
            arriving = start_shift(total.block, axis) if send else None
            del keys, values, total
        self.add(k, v, axis.rank, early, own)
        if arriving is not None:
            own.block.add_(arriving())
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
