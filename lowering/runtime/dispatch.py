"""A dispatch on one rank (`pcg.dispatch`): rows are sent to the ranks with the items they name, and results come back.

An item is, for example, an expert. A row is sent once to every rank of an axis that has an item that the row names,
even if it names several there; no row is dropped. The parts of a row, one for each operand, are sent as one run of
bytes. The numbers of rows are known only when a step runs, so ranks tell each other. A dry run has no such numbers and
sends as many rows as the graph expects.

Backward uses the same routes: the gradients of results travel to the ranks that computed them, and the gradients of
rows come back. As a row is sent to each rank at most once, its results and gradients are added up by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering.private import AutogradContext, FakeTensor
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.rows import Counts, exchange_rows, tell_counts
from shardwright.pcg.dispatch import aligned

# pyright: reportIncompatibleMethodOverride=false


class To(NamedTuple):
    """A route along an axis: its ranks have `width` items each, numbered from `first` on.

    `rows`: the number of rows that a rank sends to each rank in a dry run.
    """

    axis: Axis
    first: int
    width: int
    rows: int


class Sent(NamedTuple):
    """The rows that a rank sends along a route, and how many go where.

    `rows` are the indices of the rows sent, out of `num_rows`.
    """

    to: To
    num_rows: int
    rows: Tensor
    counts: Counts


Local = Callable[..., Tensor]
"""A computation on rows: from the items that they name [n, k], and parts of real numbers [n, …], it returns [n, o]."""


def dispatch(local: Local, to: Sequence[To], index: Tensor, *parts: Tensor) -> Tensor:
    """Return [n, o]: the sum, by row, of `local` on the ranks with the items `index` [n, k]; `parts` travel along."""
    ways = list[Sent]()
    for each in to:
        sent = sent_rows(index.detach(), each)
        index, *floats = _There.apply(sent, index, *parts)
        parts = tuple(floats)
        ways.append(sent)
    y = local(index, *parts)
    del index, parts  # free them before the results are sent back
    for sent in reversed(ways):
        y = _Back.apply(sent, y)
    return y


def sent_rows(index: Tensor, to: To) -> Sent:
    """Return the rows to send along a route, rank by rank, in their order."""
    axis, size = to.axis, to.axis.size
    if isinstance(index, FakeTensor):
        exchange_rows(index.new_empty(size), axis, Counts([1] * size, [1] * size), 1)  # the counts
        return Sent(to, len(index), index.new_empty(size * to.rows), Counts([to.rows] * size, [to.rows] * size))
    rank = (index - to.first).div(to.width, rounding_mode="floor")
    rank = rank.masked_fill((rank < 0) | (rank >= size), size)  # items of other ranks
    named = index.new_zeros(len(index), size + 1, dtype=torch.bool).scatter_(1, rank, True)[:, :size]
    return Sent(to, len(index), named.t().nonzero()[:, 1], tell_counts(named.sum(0), axis))


def _send(sent: Sent, parts: Sequence[Tensor], *, rows: Tensor | None = None) -> list[Tensor]:
    """Send several parts, of these `rows` to other ranks, or of all received rows back; each part takes whole words."""
    widths = [aligned(part.shape[1] * part.itemsize) for part in parts]
    packed = parts[0].new_empty(len(parts[0] if rows is None else rows), sum(widths), dtype=torch.uint8)
    for part, seen in zip(parts, _parts(packed, widths, parts), strict=True):
        seen.copy_(part if rows is None else part[rows])
    counts = sent.counts.reversed if rows is None else sent.counts
    return _parts(exchange_rows(packed, sent.to.axis, counts, sent.to.rows), widths, parts)


def _parts(rows: Tensor, widths: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of rows of bytes, viewed in the dtypes of the tensors `like`."""
    cut = zip(rows.split(list(widths), 1), like, strict=True)
    return [seen.narrow(1, 0, part.shape[1] * part.itemsize).view(part.dtype) for seen, part in cut]


def _added(sent: Sent, part: Tensor) -> Tensor:
    """Add up returned rows: rank by rank, each with a row at most once, so that the order of summands is fixed."""
    total, there = part.new_zeros(sent.num_rows, part.shape[1]), sent.counts.there
    for rows, own in zip(sent.rows.split(there), part.split(there), strict=True):
        total.index_add_(0, rows, own)
    return total


class _There(Function):
    """The way out: the items that rows name, and the rows' parts, on the ranks with these items."""

    @staticmethod
    def forward(ctx: AutogradContext, sent: Sent, index: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.sent = sent
        *arrived, named = _send(sent, [*(part.detach() for part in parts), index.to(torch.int32)], rows=sent.rows)
        named = named.to(index.dtype)
        ctx.mark_non_differentiable(
            named, *(p for p, needed in zip(arrived, ctx.needs_input_grad[2:], strict=True) if not needed)
        )
        return named, *arrived

    @staticmethod
    def backward(ctx: AutogradContext, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [i for i in range(len(grads)) if ctx.needs_input_grad[2 + i]]
        home = _send(ctx.sent, [grads[i] for i in wanted])
        summed = dict(zip(wanted, (_added(ctx.sent, part) for part in home), strict=True))
        return None, None, *(summed.get(i) for i in range(len(grads)))


class _Back(Function):
    """The way back: results of rows, sent back and added up by row."""

    @staticmethod
    def forward(ctx: AutogradContext, sent: Sent, y: Tensor) -> Tensor:
        ctx.sent = sent
        ctx.save_for_backward(sent.rows)  # the dispatch is recomputed only as a whole
        (home,) = _send(sent, [y.detach()])
        return _added(sent, home)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[None, Tensor]:
        (there,) = _send(ctx.sent, [grad], rows=ctx.saved_tensors[0])
        return None, there
