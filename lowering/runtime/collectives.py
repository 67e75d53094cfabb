"""The parallel operators of a lowered program: autograd functions whose backward is the adjoint of their forward.

They are the functions of `pcg.moves.MOVES`, which defines the forward and backward of each.
The backward of torch's functional all-reduce sums once more and is wrong here; hence our own pairs.
`blocks` is as in `pcg.layout`. `inplace` allows the sum to overwrite its operand: the operand of `reduce`, the gradient
of `replicate`. The lowering sets it only if nothing else can read that memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.autograd import Function

from shardwright.lowering import private
from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.movement import (
    Axis,
    MeshAxis,
    Time,
    Work,
    all_sum,
    exchange,
    gather,
    launch_sum,
    sum_scatter,
    take,
)

# pyright: reportIncompatibleMethodOverride=false


Along = Callable[[Tensor], Tensor]
"""A change of a tensor, or of its gradient: a function of `movement` with all but its first argument."""


class _Move(Function):
    """A change of layout and its adjoint."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, change: Along, adjoint: Along) -> Tensor:
        ctx.adjoint = adjoint
        return change(x.detach())

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(grad), None, None


def _nothing(x: Tensor) -> Tensor:
    return x


def replicate(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """Carry out R → C: from here on each rank uses the tensor differently."""
    return _Move.apply(x, _nothing, partial(all_sum, axis=axis, inplace=inplace))


def reduce(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """Carry out P → R: return the sum of the ranks' summands."""
    return _Move.apply(x, partial(all_sum, axis=axis, inplace=inplace), _nothing)


def reduce_copy(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """Carry out P → R → C."""
    return _Move.apply(x, partial(all_sum, axis=axis, inplace=inplace), partial(all_sum, axis=axis))


def start_sum(x: Tensor, axis: Axis) -> Tensor:
    """Start P → R of a tensor without a gradient, and do not wait: `finish_sum` returns the sum.

    A schedule has ended when this returns: what it carries is small.
    """
    x = x.detach()
    if axis.schedules is not None and axis.schedules.has("all_reduce", x.numel() * x.element_size()):
        return all_sum(x, axis)
    return x if axis.group is None else private.start_all_reduce(x, axis.group)


def finish_sum(x: Tensor) -> Tensor:
    """Wait for the sum that `start_sum` launched, and return it."""
    return private.wait(x)


def start_total(total: Tensor, axis: Axis | None) -> Work | None:
    """Start to sum the loss over the ranks, in place."""
    return None if axis is None or axis.group is None else launch_sum(total, axis)


def partition(x: Tensor, axis: MeshAxis, dim: int, blocks: int = 1) -> Tensor:
    """Carry out R → S(dim, blocks): return this rank's slice.

    The gradient of a microbatch's slice is zero elsewhere; autograd adds up the gradients of all microbatches.
    """
    if isinstance(axis, Time):
        return take(x, axis, dim, blocks)
    return _sliced(x, take, gather, axis, dim, blocks)


def combine(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """Carry out S(dim, blocks) → R: gather every rank's slice."""
    return _sliced(x, gather, take, axis, dim, blocks)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """Carry out P → R → S(dim, blocks): return this rank's slice of the sum."""
    return _sliced(x, sum_scatter, gather, axis, dim, blocks)


def gather_copy(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """Carry out S(dim, blocks) → R → C: ZeRO-3's all-gather, whose gradient is reduce-scattered."""
    return _sliced(x, gather, sum_scatter, axis, dim, blocks)


def _sliced(
    x: Tensor, change: Callable[..., Tensor], adjoint: Callable[..., Tensor], axis: Axis, dim: int, blocks: int
) -> Tensor:
    where = {"axis": axis, "dim": dim, "blocks": blocks}
    return _Move.apply(x, partial(change, **where), partial(adjoint, **where))


def all_to_all(x: Tensor, axis: Axis, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Carry out S(d, m) → R → S(e, n) with `old` = (d, m) and `new` = (e, n); for d = e, see `pcg.moves`."""
    return _Move.apply(
        x, partial(exchange, axis=axis, old=old, new=new), partial(exchange, axis=axis, old=new, new=old)
    )
