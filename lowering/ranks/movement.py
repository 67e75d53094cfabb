"""Data movement along one mesh axis, without gradients: the collectives that the parallel operators are made of.

Every function takes this rank's part of a tensor and the `Axis` to move along. `dim` and `blocks` describe a blocked
shard as in `pcg.layout`: the dimension is `blocks` equal blocks, and rank p holds slice p of each. What is
launched with an `encoding` is sent in codes, and has values again once it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from shardwright.lowering.ranks.encodings import decode, encode
from shardwright.lowering.ranks.picked import AxisSchedules, Work
from shardwright.pcg.encodings import Encoding, room


@dataclass(eq=False)
class Axis:
    """A mesh axis as this rank sees it. `group` is None if the axis has one rank, and after `forget_groups`.

    `schedules`: what some of its collectives run by, in place of the library's own algorithms.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    schedules: AxisSchedules | None = field(default=None, repr=False)


@dataclass(eq=False)
class Time:
    """The axis of microbatches: `rank` is the number of the current microbatch. Nothing is sent along it."""

    name: str
    size: int
    rank: int = 0
    group: None = field(default=None, init=False, repr=False)


MeshAxis = Axis | Time
Started = Callable[[], Tensor]
"""A collective that was started: it waits, and returns the result."""


def _group(axis: MeshAxis) -> dist.ProcessGroup:
    """Return an axis's group, which must exist: without a group, torch would send to all ranks."""
    assert axis.group is not None, f"{axis.name}: nothing is sent along an axis without a group"
    return axis.group


def all_sum(x: Tensor, axis: Axis, *, inplace: bool = False) -> Tensor:
    """Return the sum of every rank's `x`, on every rank. With `inplace` the memory of `x` may be overwritten."""
    return x if axis.size == 1 else start_all_sum(x, axis, inplace=inplace, async_op=False)()


def take(x: Tensor, axis: MeshAxis, dim: int, blocks: int = 1) -> Tensor:
    """Return this rank's, or this microbatch's, slice of a whole dimension, contiguous; it may be a view."""
    return seen(x, axis, dim, blocks).contiguous() if axis.size > 1 else x


def chunk(extent: int, axis: MeshAxis) -> tuple[int, int]:
    """Return the first index of this rank's consecutive part of a dimension, and the one after the last."""
    most = -(-extent // axis.size)
    start = min(extent, axis.rank * most)
    return start, min(extent, start + most)


def seen(x: Tensor, axis: MeshAxis, dim: int, blocks: int = 1) -> Tensor:
    """Return the slice as `take` does, but as a view wherever strides can express it.

    The last ranks have less, or nothing, of a dimension that the axis does not divide, as with `torch.chunk`.
    """
    if blocks == 1:
        start, stop = chunk(x.shape[dim], axis)
        return x.narrow(dim, start, stop - start)
    return x.unflatten(dim, (blocks, axis.size, -1)).select(dim + 1, axis.rank).flatten(dim, dim + 1)


def gather(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """Return the whole dimension from every rank's slice of it."""
    if axis.size == 1:
        return x
    if x.dtype == torch.bool:
        return gather(x.view(torch.uint8), axis, dim, blocks).view(torch.bool)
    return start_gather(x, axis, dim, blocks, async_op=False)()


def sum_scatter(x: Tensor, axis: Axis, dim: int, blocks: int = 1) -> Tensor:
    """Return this rank's slice of the sum of every rank's `x`."""
    return x if axis.size == 1 else start_sum_scatter(x, axis, dim, blocks, async_op=False)()


def exchange(x: Tensor, axis: Axis, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Return this rank's part under the shard `new` from its part under `old`; both are given as (dim, blocks).

    If both shard the same dimension, the larger number of blocks must be a multiple of the smaller times the number of
    ranks. Then a rank's slice under fewer blocks contains (more blocks / ranks) whole blocks of the other shard, which
    the rank divides among the ranks, or joins.
    """
    if axis.size == 1:
        return x
    if x.dtype == torch.bool:
        return exchange(x.view(torch.uint8), axis, old, new).view(torch.bool)
    if old[0] == new[0]:
        old, new = ((d, n // axis.size if n > min(old[1], new[1]) else n) for d, n in (old, new))
    pieces = _divide(x, axis, *new)
    received = torch.empty_like(pieces)
    _finish(_launch_exchange(received, pieces, axis, async_op=False))
    return _merge(received, *old)


# ---- started, and waited for by whoever needs the result ----


def start_all_sum(x: Tensor, axis: Axis, *, inplace: bool = False, async_op: bool = True) -> Started:
    """Start `all_sum` along an axis of several ranks."""
    y = x.clone() if x.is_contiguous() and not inplace else x.contiguous()
    return partial(_of_sum, y, launch_sum(y, axis, async_op=async_op))


def _of_sum(y: Tensor, work: Work | None) -> Tensor:
    _finish(work)
    return y


def start_gather(x: Tensor, axis: Axis, dim: int, blocks: int = 1, *, async_op: bool = True) -> Started:
    """Start `gather` along an axis of several ranks."""
    x = x.contiguous()
    pieces = x.new_empty((axis.size, *x.shape))
    return partial(_of_gather, x, pieces, dim, blocks, launch_gather(pieces, x, axis, async_op=async_op))


def _of_gather(_: Tensor, pieces: Tensor, dim: int, blocks: int, work: Work | None) -> Tensor:
    _finish(work)
    return _merge(pieces, dim, blocks)


def start_sum_scatter(x: Tensor, axis: Axis, dim: int, blocks: int = 1, *, async_op: bool = True) -> Started:
    """Start `sum_scatter` along an axis of several ranks."""
    pieces = _divide(x, axis, dim, blocks)
    work, summands = launch_scatter(pieces, axis, async_op=async_op)
    return partial(_of_scatter, pieces, summands, work)


def _of_scatter(_: Tensor, summands: Tensor, work: Work | None) -> Tensor:
    _finish(work)
    return added(summands)


def launch_sum(x: Tensor, axis: Axis, encoding: Encoding | None = None, *, async_op: bool = True) -> Work | None:
    """Start to sum a contiguous tensor over the ranks, in place."""
    if encoding is not None:
        return EncodedSum(x, axis, encoding)
    work = _by_schedule("all_reduce", axis, x, x, x.numel())
    return work or dist.all_reduce(x, group=_group(axis), async_op=async_op)


def launch_gather(
    whole: Tensor, part: Tensor, axis: Axis, encoding: Encoding | None = None, *, async_op: bool = True
) -> Work | None:
    """Start to gather every rank's part, one after the other; both are contiguous."""
    if encoding is not None:
        codes = encode(part.view(1, -1), encoding)
        received = codes.new_empty(axis.size, codes.shape[1])
        return _Codes(launch_gather(received, codes, axis), codes, received, encoding, whole.view(axis.size, -1))
    work = _by_schedule("all_gather", axis, part, whole, whole.numel())
    return work or dist.all_gather_single(whole.view(-1), part.view(-1), group=_group(axis), async_op=async_op)


def launch_scatter(
    pieces: Tensor,
    axis: Axis,
    room: Tensor | None = None,
    encoding: Encoding | None = None,
    *,
    async_op: bool = True,
) -> tuple[Work | None, Tensor]:
    """Start to sum the pieces for this rank, and return what `added` makes the sum of.

    `pieces`: [size, …], one for each rank; `room`: memory of that shape, which may be used. What remains are every
    rank's pieces with gloo or an encoding, their sum with NCCL or a schedule. gloo's own reduce-scatter is slower than
    its all-reduce; an all-to-all and a local sum take 0.7 × as long.
    """
    if encoding is not None:
        room = torch.empty_like(pieces) if room is None else room
        return _launch_codes(pieces.flatten(1), axis, encoding, room.flatten(1)), room
    group, size = _group(axis), pieces.numel()
    if axis.schedules is not None and axis.schedules.has("reduce_scatter", size * pieces.element_size()):
        part = torch.empty_like(pieces[:1])
        return _by_schedule("reduce_scatter", axis, pieces, part, size), part
    if dist.get_backend(group) == "gloo":
        room = torch.empty_like(pieces) if room is None else room
        return dist.all_to_all_single(room.view(-1), pieces.view(-1), group=group, async_op=async_op), room
    part = torch.empty_like(pieces[:1])
    return dist.reduce_scatter_single(part.view(-1), pieces.view(-1), group=group, async_op=async_op), part


def _launch_exchange(received: Tensor, pieces: Tensor, axis: Axis, *, async_op: bool = True) -> Work | None:
    """Start to send every rank its piece; both are contiguous, and equally large."""
    work = _by_schedule("all_to_all", axis, pieces, received, axis.size * pieces.numel())
    options: dict[str, Any] = {"group": _group(axis), "async_op": async_op}
    return work or dist.all_to_all_single(received.view(-1), pieces.view(-1), **options)


def _launch_codes(pieces: Tensor, axis: Axis, encoding: Encoding, into: Tensor | None = None) -> _Codes:
    """Start to send every rank its piece [size, elements], encoded."""
    codes = encode(pieces, encoding)
    received = torch.empty_like(codes)
    return _Codes(_launch_exchange(received, codes, axis), codes, received, encoding, into)


@dataclass(eq=False)
class _Codes:
    """A collective of codes, which are decoded `into` the place of their values once they have arrived."""

    work: Work | None
    codes: Tensor | None
    received: Tensor | None
    encoding: Encoding
    into: Tensor | None = None

    def wait(self) -> None:
        _finish(self.work)
        if self.received is not None and self.into is not None:
            decode(self.received, self.encoding, self.into)
        self.work = self.codes = self.received = self.into = None


class EncodedSum:
    """A sum over ranks in two legs: every rank adds up its piece, encodes the sum, and sends it to all."""

    def __init__(self, x: Tensor, axis: Axis, encoding: Encoding) -> None:
        """Send each rank its piece of `x`. The sum is in the place of `x` after `wait`."""
        self.x, self.axis, self.encoding = x.view(-1), axis, encoding
        missing = room(x.numel(), axis.size) - x.numel()
        self.whole = pad(self.x, (0, missing)) if missing else self.x
        self.scatter = _launch_codes(self.whole.view(axis.size, -1), axis, encoding)
        self.gather: Work | None = None

    def send_back(self) -> None:
        """Add up this rank's piece, once it is there, and send the sum to all; only the first call does."""
        if self.gather is None:
            self.gather = launch_gather(self.whole, self._piece(), self.axis, self.encoding)

    def _piece(self) -> Tensor:
        """Return the sum of this rank's piece."""
        self.scatter.into = summands = torch.empty_like(self.whole).view(self.axis.size, -1)
        self.scatter.wait()
        return added(summands)

    def wait(self) -> None:
        self.send_back()
        _finish(self.gather)
        if self.whole is not self.x:
            self.x.copy_(self.whole[: self.x.numel()])


def _by_schedule(collective: str, axis: Axis, given: Tensor, result: Tensor, num_elements: int) -> Work | None:
    """Start the schedule that is picked for a collective of `num_elements` of the whole; None: there is none."""
    if axis.schedules is None or not axis.schedules.has(collective, num_elements * given.element_size()):
        return None
    return axis.schedules.start(collective, given.view(-1), result.view(-1), num_elements)


def _finish(work: Work | None) -> None:
    if work is not None:
        work.wait()


def added(summands: Tensor) -> Tensor:
    """Return the sum along the first dimension. An addition of two takes half the time of a sum."""
    if len(summands) == 1:
        return summands[0]
    return torch.add(*summands) if len(summands) == 2 else summands.sum(0)


def _divide(x: Tensor, axis: Axis, dim: int, blocks: int) -> Tensor:
    """Return [size, *slice]: the part of `x` for each rank of the axis."""
    split = x.unflatten(dim, (blocks, axis.size, -1)).movedim(dim + 1, 0)
    return split.flatten(dim + 1, dim + 2).contiguous()


def _merge(pieces: Tensor, dim: int, blocks: int) -> Tensor:
    """Return `x` from its parts; the inverse of `_divide`."""
    if blocks == 1 and dim == 0:
        return pieces.flatten(0, 1)
    split = pieces.unflatten(dim + 1, (blocks, -1)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2)
