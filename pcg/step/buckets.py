"""Groups for the runtime and the cost model: parameters to gather together, gradients to sum together.

Gathering is by *block*: neighbours in the order of first use. Gradients are summed in *units*: a large one alone and in
place, small ones in flat buckets. All ranks launch units in the same order, each when all its gradients are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

BLOCK_BYTES = 128 << 20
"""A block is closed when its gathered parameters have reached this size."""
LARGE_BYTES = 2 << 20
"""Gradients of this size are summed in place: copying them would cost more than another launch (gloo on CPU, 2026-11:
a step with 256 KiB here and 4 MiB below took 1.07 × the CPU time of DDP, with these 1.01)."""
BUCKET_BYTES = 25 << 20
"""A bucket is closed when it has reached this size; DDP's default."""
PLACED_BYTES = 1 << 18
"""Slices of this size along the first dimension are gathered straight into place; others are packed and copied."""

T = TypeVar("T")


def blocks(members: Iterable[tuple[T, Hashable, float]]) -> list[list[T]]:
    """Return runs of neighbours with the same key, which can be gathered together. Members are (what, key, bytes)."""
    runs: list[list[T]] = []
    last, size = object(), 0.0
    for member, key, num_bytes in members:
        if not runs or key != last or size >= BLOCK_BYTES:
            runs.append([])
            last, size = key, 0.0
        runs[-1].append(member)
        size += num_bytes
    return runs


class Buckets(Generic[T]):
    """The units of gradients, made in the order in which gradients are complete."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Bucket[T]] = {}

    def add(self, gradient: T, key: Hashable, num_bytes: float, more: int = 0) -> list[T] | None:
        """Return the unit that this gradient completes, if any. Gradients of the same `key` can be summed together.

        A gradient of which a fold makes `more` completes none: a launch within a fold happens once for each of its
        blocks.
        """
        if num_bytes >= LARGE_BYTES:
            return [gradient]
        bucket = self._open.setdefault(key, _Bucket())
        bucket.members.append(gradient)
        bucket.num_bytes += (1 + more) * num_bytes
        if more or bucket.num_bytes < BUCKET_BYTES:
            return None
        return self._open.pop(key).members

    def rest(self) -> list[list[T]]:
        """Return the buckets that are not full when all gradients are complete."""
        return [bucket.members for bucket in self._open.values()]


@dataclass
class _Bucket(Generic[T]):
    members: list[T] = field(default_factory=list)
    num_bytes: float = 0.0
