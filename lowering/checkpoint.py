"""Checkpoints of blocked shards with torch.distributed.checkpoint.

A DTensor whose local part is not one contiguous piece of the logical tensor (a blocked shard) cannot be saved as it is:
torch takes every local part for one chunk. But a DTensor asks its local tensor first, so the local tensor is given the
three methods of torch's checkpoint protocol, and lists the pieces that it really consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import groupby, product
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from shardwright.lowering import private

State = TypeVar("State", bound=Mapping[str, object])
HeldRange = tuple[int, int, int]
"""(global start, local start, length) of one stretch of a dimension."""


def make_checkpointable(state: State) -> State:
    """Prepare a state dict, of a model or of its optimizer, for `torch.distributed.checkpoint`; returns it."""
    for value in private.tree_iter(state):
        if isinstance(value, DTensor) and any(private.is_strided(p) for p in value.placements):
            _attach(value)
    return state


def runs(tensor: DTensor) -> list[list[HeldRange]]:
    """For each dimension, the stretches of the logical tensor that this rank holds."""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    found: list[list[HeldRange]] = []
    for dim, extent in enumerate(tensor.shape):
        held = torch.arange(extent)
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard(dim) or (private.is_strided(placement) and placement.dim == dim):  # pyright: ignore[reportAttributeAccessIssue]
                blocks = private.num_blocks(placement)
                size = tensor.device_mesh.size(axis)
                held = held.view(blocks, size, -1)[:, coordinate[axis]].flatten()
        offsets = enumerate((held - torch.arange(len(held))).tolist())
        stretches = [list(group) for _, group in groupby(offsets, key=lambda pair: pair[1])]
        found.append([(s[0][0] + s[0][1], s[0][0], len(s)) for s in stretches])
    return found


def _attach(tensor: DTensor) -> None:
    local = private.unwrap(tensor)
    pieces: dict[torch.Size, tuple[ChunkStorageMetadata, Tensor]] = {}
    for choice in product(*runs(tensor)):
        part = local.detach()
        for dim, (_, start, length) in enumerate(choice):
            part = part.narrow(dim, start, length)
        offsets = torch.Size(run[0] for run in choice)
        pieces[offsets] = (ChunkStorageMetadata(offsets, part.size()), part)
    methods = {
        "__create_write_items__": partial(_write_items, pieces, tensor.size()),
        "__create_chunk_list__": lambda: [chunk for chunk, _ in pieces.values()],
        "__get_tensor_shard__": lambda index: pieces[index.offset][1],
    }
    for name, method in methods.items():
        setattr(local, name, method)


def _write_items(
    pieces: Mapping[torch.Size, tuple[ChunkStorageMetadata, Tensor]], size: torch.Size, name: str, _: object
) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), size),
        )
        for offsets, (chunk, part) in pieces.items()
    ]
