"""The places of a rank's part within a whole tensor, for those who read the part alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from shardwright.lowering.ranks.movement import chunk
from shardwright.lowering.store.storage import Slices

Span = tuple[int, int]
"""The first index along a dimension, and the one after the last."""
Box = tuple[slice, ...]


def spans(shape: tuple[int, ...], slices: Slices) -> list[list[Span]]:
    """Return the spans of the whole along each dimension that follow each other in a rank's part."""
    by_dim: list[list[Span]] = [[(0, extent)] for extent in shape]
    for axis, dim, blocks in slices:
        if axis.size > 1:
            extent = sum(stop - start for start, stop in by_dim[dim]) // blocks
            start, stop = chunk(extent, axis)
            places = [(block * extent + start, block * extent + stop) for block in range(blocks)]
            by_dim[dim] = _joined([own for place in places for own in _within(by_dim[dim], *place)])
    return by_dim


def boxes(along: list[list[Span]]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of which a part is made: the place of each in the whole, and in the part."""
    for pairs in product(*(list(zip(own, _packed(own), strict=True)) for own in along)):
        yield tuple(slice(*there) for there, _ in pairs), tuple(slice(*here) for _, here in pairs)


def _within(outer: list[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the spans of the whole that lie at these places of the spans that follow each other."""
    for (first, _), (low, high) in zip(outer, _packed(outer), strict=True):
        if max(start, low) < min(stop, high):
            yield first + max(start, low) - low, first + min(stop, high) - low


def _packed(own: list[Span]) -> list[Span]:
    """Return where spans lie if they follow each other from 0."""
    ends = [0]
    for start, stop in own:
        ends.append(ends[-1] + stop - start)
    return list(pairwise(ends))


def _joined(own: list[Span]) -> list[Span]:
    joined = list[Span]()
    for start, stop in own:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
