"""A reader of torch.distributed.checkpoint that reads the slices that are needed, where torch's reads whole shards.

    shard = an archive of torch.save within a file ──its head──▶ strides ──▶ a box of the mapped bytes ──▶ target

The archive's checksum is over all of it, so it is not compared.
"""

from __future__ import annotations

from dataclasses import replace
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardwright.lowering import private


class SliceReader(FileSystemReader):
    """A reader of a folder. What is no plain tensor, or was transformed when it was written, torch reads whole."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        left = [item for item in plan.items if not self._has_read(item, planner)]
        return super().read_data(replace(plan, items=left), planner)

    def _has_read(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read one slice into its target, if it can be read without the rest of its shard."""
        place = self.storage_data[item.storage_index]
        if item.type != LoadItemType.TENSOR or place.transform_descriptors:
            return False
        box = _box(Path(self.path) / place.relative_path, place.offset, place.length, item)
        target = planner.resolve_tensor(item).detach()
        if box is None or box.size() != target.size():
            return False
        target.copy_(box)
        planner.commit_tensor(item, target)
        return True


def _box(file: Path, offset: int, length: int, item: ReadItem) -> Tensor | None:
    """Return a slice of the tensor that lies at this place of a file; None for one that its bytes alone do not say.

    It is copied byte by byte, as archives lie anywhere in a file.
    """
    start = offset // ALLOCATIONGRANULARITY * ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        mapped = mmap(opened.fileno(), offset - start + length, access=ACCESS_COPY, offset=start)
    mapped.seek(offset - start)
    stored = torch.load(cast("IO[bytes]", mapped), map_location="meta", weights_only=True)
    record = private.record_offset(stored)
    is_as_stored = type(stored) is Tensor and not stored.is_conj() and not stored.is_neg()
    if not is_as_stored or record is None or not stored.nbytes:
        return None
    size = stored.itemsize
    data = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - start + record)
    strides = [stride * size for stride in stored.stride()]
    box = data.as_strided([*stored.shape, size], [*strides, 1], int(stored.storage_offset()) * size)
    for dim, (first, many) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        box = box.narrow(dim, first, many)
    return box.clone(memory_format=torch.contiguous_format).view(stored.dtype).squeeze(-1)
