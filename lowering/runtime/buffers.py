"""The memory that blocks of sharded parameters are gathered into and scattered from.

A large parameter that is sliced along its first dimension is gathered directly from its storage into its place. Others
are packed into one send and one receive buffer, and copied from there into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.ranks.movement import Axis, added, launch_gather, launch_scatter
from shardwright.pcg.encodings import Encoding, room
from shardwright.pcg.step.buckets import PLACED_BYTES


@dataclass(frozen=True)
class SlicedParameter:
    """A parameter of a block: the shape of a slice, and the way in which slices form the whole, as in `pcg.layout`.

    `dtype`: the dtype in which it is gathered, or its gradient reduce-scattered; slices may be stored in another.
    `in_blocks`: whether what is sent with others takes whole blocks of an encoding. The shares of a set agree in that.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: Axis
    dim: int
    blocks: int
    copied: bool
    in_blocks: bool = False

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.shape[self.dim] * self.axis.size, *self.shape[self.dim + 1 :])

    @property
    def direct(self) -> bool:
        """True if slices lie one after the other in the whole, and are large enough for a message of their own."""
        return self.dim == 0 and self.blocks == 1 and prod(self.shape) * self.dtype.itemsize >= PLACED_BYTES

    def split(self, whole: Tensor) -> Tensor:
        """Return a whole parameter viewed as [size, *slice with a separate dimension of blocks]."""
        return whole.unflatten(self.dim, (self.blocks, self.axis.size, -1)).movedim(self.dim + 1, 0)

    def pieces(self, flat: Tensor) -> Tensor:
        """Return packed slices [size, elements] viewed in the shape that `split` gives the whole."""
        return flat.unflatten(1, self.shape).unflatten(self.dim + 1, (self.blocks, -1))


class BufferSet:
    """Memory for one block at a time: its whole parameters, or the buffers to scatter their gradients."""

    def __init__(self, shares: Sequence[SlicedParameter]) -> None:
        first = shares[0]
        self.shares, self.axis = list(shares), first.axis
        self.options: dict[str, Any] = {"dtype": first.dtype, "device": first.device}
        self.direct = [i for i, share in enumerate(shares) if share.direct]
        self.packed = [i for i, share in enumerate(shares) if not share.direct]
        sizes = [prod(shares[i].shape) for i in self.packed]
        self.rooms = [room(size) if first.in_blocks else size for size in sizes]
        new = torch.zeros if first.in_blocks else torch.empty
        self.send = new(self.axis.size, sum(self.rooms), **self.options)
        self.receive = torch.empty_like(self.send)
        self.place = torch.empty(sum(sizes) * self.axis.size, **self.options)
        self.sizes = sizes
        self.buffers = [torch.empty(shares[i].whole, **self.options) for i in self.direct] + [self.place]
        self.works: list[Any] = []
        self.sums: list[tuple[int, Tensor]] = []
        self._views(sizes)

    def _views(self, sizes: Sequence[int]) -> None:
        """Make the views of every member's whole, and of the packed members' parts of send and receive buffers."""
        wholes = dict(zip(self.direct, self.buffers, strict=False))
        parts = self.place.split([size * self.axis.size for size in sizes])
        for i, part in zip(self.packed, parts, strict=True):
            wholes[i] = part.view(self.shares[i].whole)
        self.wholes = [wholes[i] for i in range(len(self.shares))]
        self.targets = [self.shares[i].split(wholes[i]) for i in self.packed]
        self.arrivals = [self.shares[i].pieces(part) for i, part in self._parts(self.receive)]
        self.departures = [self.shares[i].pieces(part) for i, part in self._parts(self.send)]
        self.mine = [part.view(self.shares[i].shape) for i, part in self._parts(self.send[0])]

    def _parts(self, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the packed members, by number, with their parts of a message [..., elements]."""
        rooms = buffer.split(self.rooms, dim=-1)
        for i, size, part in zip(self.packed, self.sizes, rooms, strict=True):
            yield i, part[..., :size]

    # ---- slices to wholes ----

    def start_gather(self, shards: Sequence[Tensor], encoding: Encoding | None = None) -> None:
        with torch.no_grad():
            for i, buffer in zip(self.direct, self.buffers, strict=False):
                self.works.append(launch_gather(buffer, shards[i].detach().to(buffer.dtype), self.axis, encoding))
            if self.packed:
                private.copy_all(self.mine, [shards[i].detach() for i in self.packed])
                self.works.append(launch_gather(self.receive, self.send[0], self.axis, encoding))

    def finish_gather(self) -> None:
        self._wait()
        if self.packed:
            with torch.no_grad():
                private.copy_all(self.targets, self.arrivals)

    # ---- whole gradients to slices ----

    def start_scatter(self, gradients: Sequence[Tensor | None], encoding: Encoding | None = None) -> None:
        """Launch the exchange of the gradients' slices. A missing gradient counts as zero if it is packed."""
        self.sums = []
        for i, buffer in zip(self.direct, self.buffers, strict=False):
            if (gradient := gradients[i]) is not None:
                out = buffer.view(self.axis.size, *self.shares[i].shape)
                self.sums.append((i, self._launch_scatter(out, gradient.to(out.dtype).contiguous(), encoding)))
        packed = [None if (g := gradients[i]) is None else self.shares[i].split(g) for i in self.packed]
        if any(gradient is not None for gradient in packed):
            private.copy_all(self.departures, packed)
            self.sums.append((-1, self._launch_scatter(self.receive, self.send, encoding)))

    def _launch_scatter(self, room: Tensor, pieces: Tensor, encoding: Encoding | None) -> Tensor:
        """Launch one exchange, and return the summands that remain."""
        work, summands = launch_scatter(pieces.view(room.shape), self.axis, room, encoding)
        self.works.append(work)
        return summands

    def finish_scatter(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """Wait, and return this rank's slice of each summed gradient, in this dtype, with the member's number."""
        self._wait()
        done: list[tuple[int, Tensor]] = []
        sums, self.sums = self.sums, []
        for i, summands in sums:
            total = added(summands).to(dtype)
            if i >= 0:
                done.append((i, total))
                continue
            parts = self._parts(total)
            done += [(k, part.view(self.shares[k].shape)) for k, part in parts if gradients[k] is not None]
        return done

    def _wait(self) -> None:
        with torch.no_grad():  # what is encoded is decoded now
            for work in self.works:
                work.wait()
        self.works.clear()


class BufferPool:
    """The buffer sets that are not in use, by the parameters that they can hold."""

    def __init__(self) -> None:
        self.free: dict[tuple[SlicedParameter, ...], list[BufferSet]] = {}

    def get(self, shares: Sequence[SlicedParameter]) -> BufferSet:
        free = self.free.get(tuple(shares))
        return free.pop() if free else BufferSet(shares)

    def give(self, memory: BufferSet) -> None:
        self.free.setdefault(tuple(memory.shares), []).append(memory)
