"""Positions of a rank's queries and keys in a ring: the pairs that see each other, and the keys that are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.lowering.ranks.movement import Axis
from shardwright.pcg.slices import Slices


class Tile(NamedTuple):
    """Queries and keys, as slices of a rank's own and of a block's, of which all pairs see each other.

    `causal`: or those that are not above the diagonal.
    """

    queries: slice
    keys: slice
    causal: bool = False

    def within(self, seen: slice) -> Iterator[Tile]:
        """Yield the tiles of the same pairs, without keys outside of a slice, none of which its queries see."""
        keys = slice(max(seen.start, self.keys.start), min(seen.stop, self.keys.stop))
        if keys.start >= keys.stop:
            return
        first, end = self.queries.start, self.queries.stop
        if self.causal:
            first, after = first + keys.start - self.keys.start, end - self.keys.stop + keys.stop
            yield Tile(slice(first, after), keys, True)
            first = after
        if first < end:
            yield Tile(slice(first, end), keys)


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
class Places:
    """The positions of this rank's queries, and the way that they attend.

    start               the position of the first query
    step                from each query to the next, and from each key of a block to the next
    num_queries         of this rank
    num_keys            of each rank
    slices              which keys go straight to which ranks; None: all go around
    """

    axis: Axis
    causal: bool
    scale: float
    start: int
    step: int
    num_queries: int
    num_keys: int
    slices: Slices | None

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """Return how many ranks away the owner of the keys is that come in each round after the first."""
        return tuple(range(1, self.axis.size)) if self.slices is None else tuple(sorted(self.slices.rounds()))

    def rank(self, away: int) -> int:
        """Return the rank that is so many further around the ring."""
        return (self.axis.rank + away) % self.axis.size

    def seen(self, owner: int, reader: int) -> slice:
        """Return which keys of a rank another one is sent."""
        return slice(0, self.num_keys) if self.slices is None else self.slices.of(owner, reader)

    @property
    def queries(self) -> range:
        """The numbers of the queries."""
        return range(self.num_queries)

    def tiles(self, queries: range, owner: int, most: int | None) -> Iterator[Tile]:
        """Yield the tiles of some of the queries and the block of a rank; `most`: the most queries of a tile."""
        first_key = owner * (self.num_keys if self.step == 1 else 1)
        last = (self.start - first_key) // self.step if self.causal else None
        if self.slices is not None:
            most = min(most or len(queries), self.slices.tile_rows)
        for at in range(queries.start, queries.stop, most or max(1, len(queries))):
            rows = range(at, min(queries.stop, at + (most or len(queries))))
            seen = slice(0, self.num_keys)
            if self.slices is not None:
                ends = (self.start + self.step * row for row in (rows[0], rows[-1]))
                seen = self.slices.seen(owner, *ends)
            for tile in tiles(rows, self.num_keys, last):
                yield from tile.within(seen)

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
