"""Rows that are sent to the ranks which have what they name, and back: what a dispatch is on one rank (`pcg.dispatch`).

A row goes to every rank of an axis that has something which it names, once, whatever number of them it names; none is
dropped. What a row has of several operands is sent as one run of bytes. How many rows go where is known when a step
runs, and ranks tell each other; in a dry run, which knows no numbers, as many as the graph expects.

Backward sends along the same ways: gradients of what came back go there, and those of what was sent come back. As a
row was sent from several places at most once to each rank, gradients and results are added up by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering.private import AutogradContext, FakeTensor
from shardwright.lowering.ranks.movement import Axis
from shardwright.pcg.dispatch import aligned

# pyright: reportIncompatibleMethodOverride=false


class To(NamedTuple):
    """Rows are sent along an axis: what is named lies there from number `first` on, `width` behind each rank.

    `rows`: how many a rank sends to each in a dry run.
    """

    axis: Axis
    first: int
    width: int
    rows: int


class Sent(NamedTuple):
    """The `rows` of a rank, of so many, that are sent: `there` to each rank of the axis, of which `back` are sent."""

    axis: Axis
    num_rows: int
    rows: Tensor
    there: list[int]
    back: list[int]


Local = Callable[..., Tensor]
"""What is computed of rows: of what they name [n, k] and of parts of real numbers, each [n, …], it gives [n, o]."""


def dispatch(local: Local, to: Sequence[To], index: Tensor, *parts: Tensor) -> Tensor:
    """`local` of rows where what they name is, summed up by row: [n, o]. They name `index` [n, k], and have `parts`."""
    ways = list[Sent]()
    for each in to:
        sent = _sent(index.detach(), each)
        index, *floats = _There.apply(sent, index, *parts)
        parts = tuple(floats)
        ways.append(sent)
    y = local(index, *parts)
    del index, parts  # before as much is sent home
    for sent in reversed(ways):
        y = _Back.apply(sent, y)
    return y


def _sent(index: Tensor, to: To) -> Sent:
    """Which rows go where: those of each rank in their order."""
    axis, size = to.axis, to.axis.size
    if isinstance(index, FakeTensor):
        rows, there = index.new_empty(size * to.rows), [to.rows] * size
        _exchange(index.new_empty(size), axis)
        return Sent(axis, len(index), rows, there, there)
    rank = (index - to.first).div(to.width, rounding_mode="floor")
    rank = rank.masked_fill((rank < 0) | (rank >= size), size)  # what others have
    named = index.new_zeros(len(index), size + 1, dtype=torch.bool).scatter_(1, rank, True)[:, :size]
    rows = named.t().nonzero()[:, 1]
    counts = named.sum(0)
    there, back = torch.stack([counts, _exchange(counts, axis)]).tolist()
    return Sent(axis, len(index), rows, there, back)


def _exchange(x: Tensor, axis: Axis, there: list[int] | None = None, back: list[int] | None = None) -> Tensor:
    """What the ranks of an axis send this one: as many rows as it sends them, or `back` for `there`."""
    received = x.new_empty(sum(back) if back is not None else len(x), *x.shape[1:])
    if axis.size == 1:
        return received.copy_(x)
    assert axis.group is not None
    dist.all_to_all_single(received, x.contiguous(), back, there, group=axis.group)
    return received


def _send(sent: Sent, parts: Sequence[Tensor], *, rows: Tensor | None = None) -> list[Tensor]:
    """Several parts of these `rows` sent there, or of all that came sent home; each part takes whole words."""
    widths = [aligned(part.shape[1] * part.itemsize) for part in parts]
    packed = parts[0].new_empty(len(parts[0] if rows is None else rows), sum(widths), dtype=torch.uint8)
    for part, seen in zip(parts, _parts(packed, widths, parts), strict=True):
        seen.copy_(part if rows is None else part[rows])
    there, back = (sent.back, sent.there) if rows is None else (sent.there, sent.back)
    return _parts(_exchange(packed, sent.axis, there, back), widths, parts)


def _parts(rows: Tensor, widths: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of rows of bytes, seen in the dtypes of others."""
    cut = zip(rows.split(list(widths), 1), like, strict=True)
    return [seen.narrow(1, 0, part.shape[1] * part.itemsize).view(part.dtype) for seen, part in cut]


def _added(sent: Sent, part: Tensor) -> Tensor:
    """What came home, added up by row: rank by rank, of which each has a row at most once, so that the order is one."""
    total = part.new_zeros(sent.num_rows, part.shape[1])
    for rows, own in zip(sent.rows.split(sent.there), part.split(sent.there), strict=True):
        total.index_add_(0, rows, own)
    return total


class _There(Function):
    """What rows name, and their parts, where that is."""

    @staticmethod
    def forward(ctx: AutogradContext, sent: Sent, index: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.sent = sent
        *found, named = _send(sent, [*(part.detach() for part in parts), index.to(torch.int32)], rows=sent.rows)
        named = named.to(index.dtype)
        ctx.mark_non_differentiable(
            named, *(p for p, needed in zip(found, ctx.needs_input_grad[2:], strict=True) if not needed)
        )
        return named, *found

    @staticmethod
    def backward(ctx: AutogradContext, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [i for i in range(len(grads)) if ctx.needs_input_grad[2 + i]]
        home = _send(ctx.sent, [grads[i] for i in wanted])
        found = dict(zip(wanted, (_added(ctx.sent, part) for part in home), strict=True))
        return None, None, *(found.get(i) for i in range(len(grads)))


class _Back(Function):
    """What was computed of rows, sent home and added up by row."""

    @staticmethod
    def forward(ctx: AutogradContext, sent: Sent, y: Tensor) -> Tensor:
        ctx.sent = sent
        ctx.save_for_backward(sent.rows)  # made again as a whole, where it is made again
        (home,) = _send(sent, [y.detach()])
        return _added(sent, home)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[None, Tensor]:
        (there,) = _send(ctx.sent, [grad], rows=ctx.saved_tensors[0])
        return None, there
