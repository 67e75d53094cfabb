"""A move and products in pieces (`pcg.step.pairs`): one piece travels while another is computed.

    the move first    launch 0, wait 0, launch 1, compute 0, wait 1, launch 2, compute 1, …    put results together
    the move last     compute 0, launch 0, compute 1, wait 0, launch 1, compute 2, …           put what arrives together

Backward is the mirror: where forward waits for a piece, backward launches the move of its gradient, and the other way
round. Products are ordinary autograd, once per piece, which adds up the gradients of weights. One piece is in flight.

With gloo, threads send meanwhile. With NCCL a collective runs on the stream of its group, and a wait makes the stream
of kernels wait. `torch.compile` leaves all of it to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.movement import Axis, Started, start_all_sum, start_gather, start_sum_scatter, take
from shardwright.lowering.ranks.untraced import untraced
from shardwright.lowering.runtime import collectives

# pyright: reportIncompatibleMethodOverride=false

Start = Callable[[Tensor, Axis, int, int], Started]
"""A way to start the move of a piece along an axis; the last two arguments say where devices' parts lie in it."""


class Place(NamedTuple):
    """The pieces of a tensor: `count` slices of each of `blocks` equal blocks of a dimension."""

    dim: int
    blocks: int
    count: int

    def cut(self, x: Tensor) -> list[Tensor]:
        """Return the pieces, as views where strides can express it."""
        parts = x.unflatten(self.dim, (self.blocks, self.count, -1)).unbind(self.dim + 1)
        return [part.flatten(self.dim, self.dim + 1) for part in parts]

    def joined(self, pieces: Iterable[Tensor]) -> Tensor:
        """Return the tensor that has these pieces."""
        parts = [piece.unflatten(self.dim, (self.blocks, -1)) for piece in pieces]
        return torch.stack(parts, self.dim + 1).flatten(self.dim, self.dim + 2)


class _Traffic:
    """The pieces that are under way, or were, in one pass of a pair."""

    def __init__(self, start: Callable[[Tensor], Started], place: Place) -> None:
        self.start, self.place = start, place
        self.under_way: tuple[int, Started] | None = None
        self.waiting: Iterator[tuple[int, Tensor]] = iter(())
        self.arrived: dict[int, Tensor] = {}

    def launch_piece(self, number: int, piece: Tensor) -> None:
        """Start to move a piece as soon as the one before has arrived."""
        self._finish()
        self.under_way = number, self.start(piece)

    def launch_all(self, x: Tensor, *, backwards: bool) -> None:
        """Start to move the first piece of `x`; each other one follows when the one before is taken."""
        numbered = list(enumerate(self.place.cut(x)))
        self.waiting = iter(numbered[::-1] if backwards else numbered)
        self._launch_next()

    def take(self, number: int) -> Tensor:
        """Wait for a piece and return it."""
        while number not in self.arrived:
            self._finish()
            self._launch_next()
        return self.arrived.pop(number)

    def joined(self) -> Tensor:
        """Wait for all pieces, and return what they make up."""
        self._finish()
        arrived, self.arrived = self.arrived, {}
        return self.place.joined(arrived[number] for number in range(self.place.count))

    def _launch_next(self) -> None:
        for number, piece in self.waiting:
            self.under_way = number, self.start(piece)
            return

    def _finish(self) -> None:
        if self.under_way is not None:
            number, started = self.under_way
            self.under_way, self.arrived[number] = None, started()


class _Run:
    """The traffic of values, and that of their gradients, of one run of a pair."""

    def __init__(self, move: Callable[..., Tensor], axis: Axis, place: Place) -> None:
        there, back = _STARTED[move]
        self.values = _Traffic(lambda x: there(x, axis, place.dim, place.blocks), place)
        self.gradients = _Traffic(lambda x: back(x, axis, place.dim, place.blocks), place)
        self.numbers = range(place.count)


class _Begin(Function):
    """The launch of all pieces; backward puts their gradients together."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, run: _Run) -> tuple[Tensor, ...]:
        ctx.run = run
        run.values.launch_all(x.detach(), backwards=False)
        return tuple(x.new_zeros(()) for _ in run.numbers)  # only the order of autograd follows from them

    @staticmethod
    def backward(ctx: AutogradContext, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.run.gradients.joined(), None


class _Arrive(Function):
    """A piece that has arrived; backward launches its gradient."""

    @staticmethod
    def forward(ctx: AutogradContext, _: Tensor, run: _Run, number: int) -> Tensor:
        ctx.run, ctx.number = run, number
        return run.values.take(number)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.run.gradients.launch_piece(ctx.number, grad)
        return grad.new_zeros(()), None, None


class _Leave(Function):
    """The launch of a piece; backward waits for its gradient."""

    @staticmethod
    def forward(ctx: AutogradContext, y: Tensor, run: _Run, number: int) -> Tensor:
        ctx.run, ctx.number = run, number
        run.values.launch_piece(number, y.detach())
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: AutogradContext, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run.gradients.take(ctx.number), None, None


class _End(Function):
    """All pieces put together; backward launches the gradients."""

    @staticmethod
    def forward(ctx: AutogradContext, run: _Run, *_: Tensor) -> Tensor:
        ctx.run = run
        return run.values.joined()

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[None, *tuple[Tensor, ...]]:
        ctx.run.gradients.launch_all(grad, backwards=True)
        return None, *(grad.new_zeros(()) for _ in ctx.run.numbers)


@untraced
def move_then_products(
    move: Callable[..., Tensor],
    x: Tensor,
    axis: Axis,
    at: tuple[int, int],
    num_pieces: int,
    products: Callable[[Tensor], tuple[Tensor, ...]],
    *results: tuple[int, int],
) -> tuple[Tensor, ...]:
    """Move a value and compute products of it, piece by piece.

    Args:
        move: `combine`, `gather_copy` or `replicate`.
        x: this rank's part.
        axis: along which it moves.
        at: the dimension of pieces in `x`, and its number of blocks.
        num_pieces: how many there are.
        products: from a piece that has arrived, the results' pieces.
        results: the dimension of pieces in each result, and its number of blocks.
    """
    run, made = _Run(move, axis, Place(*at, num_pieces)), list[tuple[Tensor, ...]]()
    for number, sign in enumerate(_Begin.apply(x, run)):
        made.append(products(_Arrive.apply(sign, run, number)))
    pieces = zip(results, zip(*made, strict=True), strict=True)
    return tuple(Place(*place, num_pieces).joined(own) for place, own in pieces)


@untraced
def product_then_move(
    product: Callable[[Tensor], Tensor],
    x: Tensor,
    read: tuple[int, int],
    num_pieces: int,
    move: Callable[..., Tensor],
    axis: Axis,
    at: tuple[int, int],
) -> Tensor:
    """Compute a product and move it, piece by piece.

    Args:
        product: from a piece of `x`, the piece that moves.
        x: the operand that is cut.
        read: the dimension of pieces in it, and its number of blocks.
        num_pieces: how many there are.
        move: `reduce`, `reduce_scatter` or `reduce_copy`.
        axis: along which it moves.
        at: the dimension of pieces in the result, and its number of blocks.
    """
    run = _Run(move, axis, Place(*at, num_pieces))
    pieces = enumerate(Place(*read, num_pieces).cut(x))
    return _End.apply(run, *[_Leave.apply(product(piece), run, number) for number, piece in pieces])


# ---- moves of pieces; what products and their backward give is memory of its own, which a sum may overwrite ----


def _stay(x: Tensor, axis: Axis, dim: int, blocks: int) -> Started:
    return lambda: x


def _slice(x: Tensor, axis: Axis, dim: int, blocks: int) -> Started:
    return partial(take, x, axis, dim, blocks)


def _sum(x: Tensor, axis: Axis, dim: int, blocks: int) -> Started:
    return start_all_sum(x, axis)


def _sum_fresh(x: Tensor, axis: Axis, dim: int, blocks: int) -> Started:
    return start_all_sum(x, axis, inplace=True)


_STARTED: Mapping[Callable[..., Tensor], tuple[Start, Start]] = {
    collectives.combine: (start_gather, _slice),
    collectives.gather_copy: (start_gather, start_sum_scatter),
    collectives.replicate: (_stay, _sum_fresh),
    collectives.reduce: (_sum_fresh, _stay),
    collectives.reduce_scatter: (start_sum_scatter, start_gather),
    collectives.reduce_copy: (_sum_fresh, _sum),
}
"""How the moves of pieces, and of their gradients, are started."""
