"""Chunks of a tensor in a checkpoint, where ranks hold the tensor in more than one way.

A weight that two pipeline stages share lies on each as the stage splits it. `torch.distributed.checkpoint` saves equal
chunks once, and refuses chunks that overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

_Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""The place of a chunk's first element in the tensor, and the chunk's shape."""


class OneTiling(DefaultSavePlanner):
    """It saves each tensor in chunks that do not overlap, the largest that there are."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes, and the description of the whole."""
        held = defaultdict[str, dict[_Chunk, int]](dict)
        for item in (item for plan in all_plans for item in plan.items):
            if (chunk := _chunk(item)) is not None and item.tensor_data is not None:
                held[item.index.fqn][chunk] = prod(item.tensor_data.size)
        left_out = {(name, chunk) for name, chunks in held.items() for chunk in _overlapping(chunks)}
        if left_out:
            all_plans = [
                replace(plan, items=[own for own in plan.items if (own.index.fqn, _chunk(own)) not in left_out])
                for plan in all_plans
            ]
        return super().create_global_plan(all_plans)


def _chunk(item: WriteItem) -> _Chunk | None:
    of = item.tensor_data and item.tensor_data.chunk
    return (tuple(of.offsets), tuple(of.sizes)) if of else None


def _overlapping(chunks: dict[_Chunk, int]) -> Iterable[_Chunk]:
    """Return the chunks, from the largest, that overlap one before them. Given: by chunk, the tensor's elements."""
    if sum(prod(sizes) for _, sizes in chunks) <= max(chunks.values()):
        return ()
    kept, left = list[_Chunk](), list[_Chunk]()
    for chunk in sorted(chunks, key=lambda own: -prod(own[1])):
        (left if any(_overlap(chunk, other) for other in kept) else kept).append(chunk)
    return left


def _overlap(one: _Chunk, other: _Chunk) -> bool:
    return all(
        max(start, other_start) < min(start + size, other_start + other_size)
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )
