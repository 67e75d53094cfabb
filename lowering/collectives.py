"""The parallel operators of a lowered program: autograd functions in which each one's backward is its adjoint.

They are the functions of `pcg.moves.MOVES`, which says what each one's forward and backward do.
The backward that torch gives its functional all-reduce sums once more and is wrong here; hence our own pairs.
`blocks` is as in `pcg.layout`. `inplace` lets the memory that is summed be overwritten: the operand of `reduce`, the
gradient of `replicate`. The lowering sets it where nobody else can read that memory.
"""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function

from shardwright.lowering import private
from shardwright.lowering.movement import Axis, all_sum, exchange, gather, sum_scatter, take
from shardwright.lowering.private import AutogradContext

# pyright: reportIncompatibleMethodOverride=false


class _Replicate(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, inplace: bool) -> Tensor:
        ctx.axis, ctx.inplace = axis, inplace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_sum(grad, ctx.axis, inplace=ctx.inplace), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, inplace: bool) -> Tensor:
        return all_sum(x.detach(), axis, inplace=inplace)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _ReduceCopy(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, inplace: bool) -> Tensor:
        ctx.axis = axis
        return all_sum(x.detach(), axis, inplace=inplace)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_sum(grad, ctx.axis), None, None


class _Partition(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, dim: int, blocks: int) -> Tensor:
        ctx.where = (axis, dim, blocks)
        return take(x.detach(), axis, dim, blocks)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather(grad, *ctx.where), None, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, dim: int, blocks: int) -> Tensor:
        ctx.where = (axis, dim, blocks)
        return gather(x.detach(), axis, dim, blocks)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return take(grad, *ctx.where), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, dim: int, blocks: int) -> Tensor:
        ctx.where = (axis, dim, blocks)
        return sum_scatter(x.detach(), axis, dim, blocks)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return gather(grad, *ctx.where), None, None, None


class _GatherCopy(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, dim: int, blocks: int) -> Tensor:
        ctx.where = (axis, dim, blocks)
        return gather(x.detach(), axis, dim, blocks)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return sum_scatter(grad, *ctx.where), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, axis: Axis, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
        ctx.where = (axis, new, old)
        return exchange(x.detach(), axis, old, new)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, *ctx.where), None, None, None


def replicate(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """R → C: used differently on each rank from here on."""
    return _Replicate.apply(x, axis, inplace)


def reduce(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """P → R: the sum of the ranks' summands."""
    return _Reduce.apply(x, axis, inplace)


def reduce_copy(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """P → R → C."""
    return _ReduceCopy.apply(x, axis, inplace)


def start_sum(x: Tensor, axis: Axis) -> Tensor:
    """P → R for what no gradient flows through, without waiting: `finish_sum` gives the sum."""
    x = x.detach()
    return x if axis.group is None else private.start_all_reduce(x, axis.group)


def finish_sum(x: Tensor) -> Tensor:
    """The sum that `start_sum` launched, once it is there."""
    return private.wait(x)


def partition(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """R → S(dim, blocks): my slice."""
    return _Partition.apply(x, axis, dim, blocks)


def combine(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """S(dim, blocks) → R: every rank's slice."""
    return _Combine.apply(x, axis, dim, blocks)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """P → R → S(dim, blocks): my slice of the sum."""
    return _ReduceScatter.apply(x, axis, dim, blocks)


def gather_copy(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """S(dim, blocks) → R → C: ZeRO-3's all-gather, whose gradient is reduce-scattered."""
    return _GatherCopy.apply(x, axis, dim, blocks)


def all_to_all(x: Tensor, axis: Axis, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """S(d, m) → R → S(e, n) with `old` = (d, m) and `new` = (e, n); where d = e, as `pcg.moves` says."""
    return _AllToAll.apply(x, axis, old, new)
