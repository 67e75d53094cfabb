"""Tensors in a folder of torch.distributed.checkpoint, and parts of them, read as slices of the shards.

torch's checkpoints take 0.1 s to import, so whoever needs no such folder does not import this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwright.lowering.store.files import Kind, told
from shardwright.lowering.store.slice_reader import SliceReader
from shardwright.lowering.store.spans import Box
from shardwright.pcg.errors import PlanError


class Checkpoint:
    """A folder that torch.distributed.checkpoint has written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, SliceReader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata
        self.others = {name for name, own in stored.items() if not isinstance(own, TensorStorageMetadata)}
        self.stored = {name: own for name, own in stored.items() if isinstance(own, TensorStorageMetadata)}
        self.kinds = {name: Kind(tuple(own.size), own.properties.dtype) for name, own in self.stored.items()}

    def fill(self, part: Tensor, name: str, at: Iterator[tuple[Box, Box]]) -> None:
        """Read boxes from the shards in which they are."""
        pairs = list(at)
        chunks = [
            ChunkStorageMetadata(torch.Size(s.start for s in there), torch.Size(s.stop - s.start for s in there))
            for there, _ in pairs
        ]
        items = create_read_items_for_chunk_list(name, self.stored[name], chunks)
        if (num_elements := sum(prod(item.lengths) for item in items)) != part.numel():
            raise PlanError(
                f"{name}: the checkpoint has {num_elements} of {part.numel()} elements that are needed here"
            )
        planner = _IntoBoxes([part[here] for _, here in pairs])
        self._reader.read_data(LoadPlan(items), planner).wait()

    def value(self, name: str) -> object:
        """Return a value that is no tensor. Raises `PlanError` for what torch.load(weights_only=True) refuses."""
        nowhere, index = torch.Size([0]), MetadataIndex(name)
        item = ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)
        planner = PlainValues()
        with told(f"{name} cannot be read"):
            self._reader.read_data(LoadPlan([item]), planner).wait()
        return planner.values[name]


class PlainValues(DefaultLoadPlanner):
    """A planner that keeps values that are no tensors: plain ones, as files may be anybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.values = dict[str, Any]()

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _IntoBoxes(DefaultLoadPlanner):
    """A planner by which a reader fills boxes, in their order."""

    def __init__(self, targets: list[Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index.index
        target = self._targets[index or 0]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the box is a view of the part."""
