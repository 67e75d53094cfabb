"""Slices of the keys of a ring: of each device's keys, those that any query of another device can see.

A band (`bounds`) says how far before and after its own position a query sees keys. A device's queries are evenly
spaced, and so are its keys. So the keys that some query of another device can see follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from shardwright.pcg.bounds import NONE, Band
from shardwright.pcg.layout import Layouts, positions

Numbers = int | np.ndarray

TILE_ROWS = 256
"""The fewest queries that a kernel takes under a band: fewer would take more calls than they leave out work."""

CUT = 0.75
"""Keys go straight to the devices that see them where that sends at most this share of all keys to all."""


class Sees(NamedTuple):
    """The keys from `first` to `last` places after a query's own position.

    `apart`: from the first query of a device to that of the next one of the ring.
    """

    first: int
    last: int
    apart: int


@dataclass(frozen=True, slots=True)
class Slices:
    """The devices of one ring, of which each has its part of queries and keys.

    size                    of the ring
    start                   the position of the first device's first query
    step                    from each query of a device to the next, and from each of its keys to the next
    num_queries, num_keys   of one device
    """

    size: int
    sees: Sees
    start: int
    step: int
    num_queries: int
    num_keys: int

    def of(self, owner: int, reader: int) -> slice:
        """Return the slice of a device's keys that another one's queries can see; an empty one: none."""
        begin, end = self._ends(owner, reader)
        return slice(int(begin), int(end))

    def seen(self, owner: int, first: int, last: int) -> slice:
        """Return the slice of a device's keys that queries from position `first` to position `last` can see."""
        begin, end = self._between(owner, first, last)
        return slice(int(begin), int(end))

    def rounds(self) -> dict[int, int]:
        """Return how many devices on some keys go, around the ring, and the most keys that a device sends so far."""
        return _rounds(self)

    @property
    def tile_rows(self) -> int:
        """The number of queries that a kernel takes at once, with all keys that any of them can see."""
        return max(TILE_ROWS, (self.sees.last - self.sees.first) // self.step)

    def num_parts(self) -> int:
        """Return of how many devices, itself included, a device sees keys, at most."""
        return int((_widths(self) > 0).sum(0).max())

    def num_pairs(self) -> int:
        """Return the number of pairs of a query and a key that a device computes with, at most."""
        return _num_pairs(self)

    def _ends(self, owner: Numbers, reader: Numbers) -> tuple[Numbers, Numbers]:
        first = self.start + reader * self.sees.apart
        return self._between(owner, first, first + self.step * (self.num_queries - 1))

    def _between(self, owner: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
        begins = owner * (self.num_keys if self.step == 1 else 1)
        begin = np.clip(-((begins - self.sees.first - first) // self.step), 0, self.num_keys)
        end = np.clip((last + self.sees.last - begins) // self.step + 1, 0, self.num_keys)
        return begin, np.maximum(begin, end)


@lru_cache(maxsize=256)
def _widths(slices: Slices) -> np.ndarray:
    """Return how many keys of a device, by row, another one sees, by column."""
    owners, readers = np.ogrid[: slices.size, : slices.size]
    begin, end = slices._ends(owners, readers)
    return np.asarray(end - begin)


@lru_cache(maxsize=256)
def _rounds(slices: Slices) -> dict[int, int]:
    numbers, widths = np.arange(slices.size), _widths(slices)
    most = {n: int(widths[numbers, (numbers + n) % slices.size].max()) for n in range(1, slices.size)}
    return {n: width for n, width in most.items() if width}


@lru_cache(maxsize=256)
def _num_pairs(slices: Slices) -> int:
    owners, readers = np.ogrid[: slices.size, : slices.size]
    pairs, most = np.zeros(slices.size, np.int64), slices.tile_rows
    for at in range(0, slices.num_queries, most):
        first, end = (slices.start + readers * slices.sees.apart + slices.step * n for n in (at, at + most - 1))
        rows = min(most, slices.num_queries - at)
        begin, stop = slices._between(owners, first, end - slices.step * (most - rows))
        pairs += rows * np.asarray(stop - begin).sum(0)
    return int(pairs.max())


@lru_cache(maxsize=1024)
def slices_along(
    axis: int, band: Band, numbers: tuple[int, int], layouts: Layouts, sizes: tuple[int, ...]
) -> tuple[Slices, ...]:
    """Return the slices of devices along an axis, for each place along the other axes that split queries.

    Nothing: slices would be most of the keys, or positions are not evenly spaced. So blocks go around.

    Args:
        axis: of the ring.
        band: which keys a query can see.
        numbers: of queries and of keys, on all devices.
        layouts: of the queries, as a tensor of one dimension.
        sizes: of the axes.
    """
    (num_queries, num_keys), size, far = numbers, sizes[axis], sum(numbers)
    step = 1 if layouts[axis].blocks == 1 else size
    first, last = (int(max(-far, min(far, end))) for end in (NONE if band.is_empty else band))
    places = list[Slices]()
    others = (size if x.is_shard and i != axis else 1 for i, (size, x) in enumerate(zip(sizes, layouts, strict=True)))
    for place in product(*map(range, others)):
        own, following = (
            positions(num_queries, layouts, sizes, (*place[:axis], n, *place[axis + 1 :])) for n in (0, 1)
        )
        if own is None or following is None or own.step != step:
            return ()
        sees = Sees(first, last, following[0] - own[0])
        places.append(Slices(size, sees, own[0], step, len(own), num_keys // size))
    return tuple(places) if _share_sent(places) <= CUT else ()


def _share_sent(every: Iterable[Slices]) -> float:
    """Return the share of all keys that devices send straight to those that see them, in place of all keys to all."""
    sent = whole = 0
    for slices in every:
        widths = _widths(slices)
        sent += int(widths.sum() - widths.trace())
        whole += slices.size * (slices.size - 1) * slices.num_keys
    return sent / whole if whole else 1.0
