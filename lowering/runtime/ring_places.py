"""Positions of a rank's queries and keys in a ring: the pairs that see each other, and the way that keys are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.lowering.ranks.movement import Axis
from shardwright.pcg.ring import Sees, reach


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
class Places:
    """The positions of this rank's queries, and the way that they attend.

    start               the position of the first query
    step                from each query to the next, and from each key of a block to the next
    num_queries         of this rank
    num_keys            of each rank
    sees                of which ranks' keys
    """

    axis: Axis
    causal: bool
    scale: float
    start: int
    step: int
    num_queries: int
    num_keys: int
    sees: Sees

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Return how many ranks on, around the ring, a rank's keys are seen for the last time."""
        return reach(self.axis.size, self.sees)

    @property
    def next(self) -> int:
        return (self.axis.rank + 1) % self.axis.size

    @property
    def previous(self) -> int:
        return (self.axis.rank - 1) % self.axis.size

    def goes_on(self, number: int, step: int) -> bool:
        """Return whether a rank's keys, and their gradients, go on from where they are after so many steps."""
        return self.reach[number % self.axis.size] > step

    @property
    def queries(self) -> range:
        """The numbers of the queries."""
        return range(self.num_queries)

    def tiles(self, queries: range, number: int, most: int | None) -> Iterator[Tile]:
        """Yield the tiles of some of the queries and the block of a rank; `most`: the most queries of a tile."""
        before, after = self.sees
        if not -after <= self.axis.rank - number <= before:
            return
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
