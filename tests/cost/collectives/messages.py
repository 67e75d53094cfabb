"""Every message of the direct way between two stages, of which `resharding.ways` has the busiest ranks' sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np

from shardwright.cost.collectives.resharding import StageLayout, _check, _overlaps, _stacked


def messages(shape: tuple[int, ...], source: StageLayout, target: StageLayout) -> Iterator[tuple[int, int, int]]:
    """(source rank, target rank, elements) of every message of the direct way."""
    _check(shape, source, target)
    shape, source, target = _stacked(shape, source, target)
    tables = _overlaps(shape, source, target)
    axes = [[_axes(placed, dim) for dim in range(len(shape))] for placed in (source, target)]
    for pairs in product(*([(int(i), int(j)) for i, j in np.argwhere(table > 0)] for table in tables)):
        elements = prod(int(table[pair]) for table, pair in zip(tables, pairs, strict=True))
        here, there = ({}, {})
        for side, (digits, placed) in enumerate(((here, source), (there, target))):
            for dim, pair in enumerate(pairs):
                names = axes[side][dim]
                parts = np.unravel_index(pair[side], [placed.sizes[a] for a in names]) if names else ()
                digits.update(zip(names, (int(part) for part in parts), strict=True))
        for replica in range(target.replicas):
            serving = replica * source.replicas // target.replicas
            yield rank_of(source, here, serving), rank_of(target, there, replica), elements


def _axes(placed: StageLayout, dim: int) -> list[int]:
    """Axes that shard a dimension, in mesh order."""
    return [axis for axis, layout in enumerate(placed.layouts) if layout.is_shard and layout.dim == dim]


def rank_of(placed: StageLayout, digits: dict[int, int], replica: int) -> int:
    """The rank with these digits on the axes that shard the tensor, and the replica's on the others."""
    rank, free = 0, list(np.unravel_index(replica, [s for a, s in enumerate(placed.sizes) if a not in digits]))
    for axis, size in enumerate(placed.sizes):
        rank = rank * size + (digits[axis] if axis in digits else int(free.pop(0)))
    return placed.first_rank + rank
