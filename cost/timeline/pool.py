"""The memory that gathered parameters lie in: a pool of buffer sets, one for each block that is there at a time.

A set fits blocks of the same parameters' shapes only, and the pool keeps every set that it has once made: from the
second step on all of them are there all the time. A block takes one when its gather is launched, gives it back after
its last reader, and takes one again for the reduce-scatter of its gradients, until that of the next block is launched.

Sources: lowering/buffers.py, lowering/blocks.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shardwright.cost.timeline.lines import Chunk, Group
from shardwright.cost.timeline.steps import Steps, Weight
from shardwright.pcg.layout import shard_order

LARGE_BYTES = 1 << 18
"""Slices of this size along the first dimension are gathered into place; others by way of two staging buffers."""

Kind = tuple[object, ...]
"""What decides whether two blocks can use the same set."""


def pool_bytes(chunk: Chunk, held: frozenset[int]) -> dict[Kind, float]:
    """Bytes of all the sets that a step's forward and backward through a chunk need, by kind.

    `held`: blocks that stay gathered between forward and backward.
    """
    kinds = [tuple(_kind(chunk.steps, reading.weight) for reading in group.readings) for group in chunk.groups]
    use = _Use(kinds)
    first: dict[int, list[int]] = {}
    last: dict[int, list[int]] = {}
    for number, group in enumerate(chunk.groups):
        first.setdefault(group.first, []).append(number)
        last.setdefault(group.last, []).append(number)
    for line in sorted({*first, *last}):
        for number in first.get(line, []):
            use.take(number)
            use.take(number + 1)
        for number in last.get(line, []):
            if number not in held:
                use.give(number)
    for line in sorted({*first, *last}, reverse=True):
        for number in last.get(line, []):
            use.take(number)
            use.take(number - 1)
        for number in first.get(line, []):
            use.scatter(number)
    sizes = {kind: _set_bytes(chunk.steps, group) for kind, group in zip(kinds, chunk.groups, strict=True)}
    return {kind: use.most[kind] * num_bytes for kind, num_bytes in sizes.items()}


def joined(pools: Mapping[Kind, float], others: Mapping[Kind, float]) -> dict[Kind, float]:
    """What two chunks of one device need that run one after the other."""
    return {kind: max(pools.get(kind, 0.0), others.get(kind, 0.0)) for kind in {**pools, **others}}


class _Use:
    """Which blocks have a set now, and the most sets of each kind that were in use at once."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = kinds
        self.there: set[int] = set()
        self.scattered: int | None = None
        self.now, self.most = Counter[Kind](), Counter[Kind]()

    def take(self, number: int) -> None:
        if 0 <= number < len(self.kinds) and number not in self.there:
            self.there.add(number)
            self._count(number, 1)

    def give(self, number: int) -> None:
        if number in self.there:
            self.there.remove(number)
            self._count(number, -1)

    def scatter(self, number: int) -> None:
        if self.scattered is not None:
            self._count(self.scattered, -1)
        self.give(number)
        self.scattered = number
        self._count(number, 1)

    def _count(self, number: int, change: int) -> None:
        kind = self.kinds[number]
        self.now[kind] += change
        self.most[kind] = max(self.most[kind], self.now[kind])


def _kind(steps: Steps, weight: Weight) -> Kind:
    stored = steps.graph.types[weight.leaf]
    return stored.shape, stored.dtype, stored.layouts, weight.gathers[0], tuple((c, a) for c, a, _ in weight.sums)


def _set_bytes(steps: Steps, group: Group) -> float:
    return sum(_buffers(steps, r.weight) * r.weight.gathers[0][1] for r in group.readings)


def _buffers(steps: Steps, weight: Weight) -> int:
    """How often a parameter is in a set: in its place only, or in the buffers that are sent and received too."""
    stored, mesh = steps.graph.types[weight.leaf], steps.graph.mesh
    axis, num_bytes = weight.gathers[0]
    order = shard_order(stored.shape, stored.layouts, mesh.sizes)
    number = mesh.index(axis)
    along = next((dim, blocks) for a, dim, blocks in order if a == number)
    return 1 if along == (0, 1) and num_bytes / mesh.sizes[number] >= LARGE_BYTES else 3
