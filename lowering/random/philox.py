"""Random bits by position: Philox-4x32-7 in plain torch operators.

A counter-based generator has no state to step through: its bits at a place are a function of the place and a key. So a
rank computes only the bits of its own part of a tensor, in any order, any number of times, and on any device.
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.lowering.private import FakeTensor

WORDS = 4
"""The number of 32-bit words that one counter gives."""

NUM_ROUNDS = 7
"""The fewest rounds in which the paper found no flaw (BigCrush); ten are usual where a round costs next to nothing."""

_LOW = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_CHUNK = {"cpu": 2**16}
_CHUNK_ELSEWHERE = 2**22
"""The number of counters processed at once: on a CPU as many as its caches hold, elsewhere as memory allows."""

Stretch = tuple[int, int]
"""A range [start, stop) of one dimension."""


class Slice(NamedTuple):
    """A cut of a dimension into `blocks` equal blocks, each into `size` equal slices, of which slice `rank` is held."""

    size: int
    rank: int
    blocks: int


def philox(
    counters: Iterable[Tensor], scratch: Iterable[Tensor], key: tuple[int, int], num_rounds: int = NUM_ROUNDS
) -> Sequence[Tensor]:
    """Return four words for each counter of four words: int64 tensors of one shape that hold 32 bits each.

    The counters are overwritten, as are the two tensors of `scratch`, which have the same shape.
    Products are taken modulo 2⁶⁴; a word that the next round does not multiply keeps all bits of its product.
    """
    (a, b, c, d), (first, second) = counters, scratch
    for number in range(num_rounds):
        left, right = ((k + number * step) & _LOW for k, step in zip(key, _KEY_STEPS, strict=True))
        torch.mul(a, _MULTIPLIERS[0], out=first)
        torch.mul(c, _MULTIPLIERS[1], out=second)
        torch.bitwise_right_shift(second, 32, out=a).bitwise_xor_(b).bitwise_xor_(left).bitwise_and_(_LOW)
        torch.bitwise_right_shift(first, 32, out=c).bitwise_xor_(d).bitwise_xor_(right).bitwise_and_(_LOW)
        b, second = second, b
        d, first = first, d
    return a, b.bitwise_and_(_LOW), c, d.bitwise_and_(_LOW)


def keep_mask(
    shape: Sequence[int],
    keep: float,
    seed: int,
    number: int,
    device: torch.device,
    cuts: Sequence[Sequence[Slice]] | None = None,
) -> Tensor:
    """Return this rank's part of a mask whose elements are independently True with probability `keep`.

    Args:
        shape: the shape of the logical tensor. Dimensions of size 1 have no influence on the mask.
        keep: the probability, rounded to a multiple of 2⁻³².
        seed: the seed of the whole run, 64 bits.
        number: the number of the mask, 64 bits.
        device: the device on which the mask is made; its values are the same on every device.
        cuts: for each dimension the slices that are held, outermost first. By default the whole dimension is held.

    An element's word depends on its place: the last dimension is padded to a multiple of four words, and each four
    words have a counter, numbered in row-major order.
    """
    held = [stretches(extent, cut) for extent, cut in zip(shape, cuts or [()] * len(shape), strict=True)]
    local = [sum(stop - start for start, stop in pieces) for pieces in held]
    if not prod(local):
        return torch.empty(local, dtype=torch.bool, device=device)
    dims = [d for d, extent in enumerate(shape) if extent > 1] or [len(shape) - 1]
    *lead, last = ((shape[d], held[d]) for d in dims) if shape else [(1, [(0, 1)])]
    covered = [(start // WORDS, -(-stop // WORDS)) for start, stop in last[1]]
    sizes = [(extent, pieces) for extent, pieces in lead] + [(-(-last[0] // WORDS), covered)]
    bits = _compare(_places(sizes, device), keep, seed, number)
    mask = bits.view(-1, WORDS * sum(stop - start for start, stop in covered))
    return _trimmed(mask, last[1]).view(local)


def stretches(extent: int, cuts: Sequence[Slice]) -> list[Stretch]:
    """Return the ranges that these cuts leave of a dimension, in order."""
    ranges = [(0, extent)]
    for cut in cuts:
        block = sum(stop - start for start, stop in ranges) // cut.blocks
        part = block // cut.size
        ranges = [s for b in range(cut.blocks) for s in _within(ranges, b * block + cut.rank * part, part)]
    return ranges


def _within(pieces: Sequence[Stretch], skipped: int, length: int) -> list[Stretch]:
    """Return `length` places of these pieces, after the first `skipped`."""
    ranges: list[Stretch] = []
    for start, stop in pieces:
        first = start + skipped
        last = min(stop, first + length)
        if first < last:
            ranges.append((first, last))
            length -= last - first
        skipped = max(0, first - stop)
    return ranges


def _places(sizes: Sequence[tuple[int, Sequence[Stretch]]], device: torch.device) -> Tensor:
    """Return the row-major numbers, in a grid of these extents, of the places that are held along each dimension."""
    strides = [prod([extent for extent, _ in sizes[d + 1 :]]) for d in range(len(sizes))]
    lines = [
        torch.cat([torch.arange(start * stride, stop * stride, stride, device=device) for start, stop in pieces])
        for (_, pieces), stride in zip(sizes, strides, strict=True)
    ]
    return reduce(lambda outer, line: (outer.unsqueeze(-1) + line).flatten(), lines)


def _compare(places: Tensor, keep: float, seed: int, number: int) -> Tensor:
    """Return [places, words]: True where a word is below the share `keep` of 2³²."""
    limit, key = round(keep * 2**32), (seed & _LOW, seed >> 32)
    out = torch.empty(len(places), WORDS, dtype=torch.bool, device=places.device)
    chunk = len(places) if torch.compiler.is_compiling() else _CHUNK.get(places.device.type, _CHUNK_ELSEWHERE)
    num_rounds = 0 if isinstance(places, FakeTensor) else NUM_ROUNDS  # without data they do nothing
    memory = torch.empty(6, min(chunk, len(places)), dtype=torch.int64, device=places.device)
    for place, rows in zip(places.split(chunk), out.split(chunk), strict=True):
        a, b, c, d, *scratch = memory[:, : len(place)]
        torch.bitwise_and(place, _LOW, out=a)
        torch.bitwise_right_shift(place, 32, out=b)
        words = philox((a, b, c.fill_(number & _LOW), d.fill_(number >> 32)), scratch, key, num_rounds)
        for word, bits in zip(rows.unbind(1), words, strict=True):
            word.copy_(bits < limit)
    return out


def _trimmed(rows: Tensor, pieces: Sequence[Stretch]) -> Tensor:
    """Return the words of these pieces from rows of whole groups of words along the last dimension."""
    words, start = [], 0
    for first, stop in pieces:
        words.append(rows[:, start + first % WORDS :][:, : stop - first])
        start += (-(-stop // WORDS) - first // WORDS) * WORDS
    return words[0] if len(words) == 1 else torch.cat(words, 1)
