"""The batch: what the program's inputs are, and the check of what the user passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.lowering.launch import Ranks
from shardwright.lowering.movement import take
from shardwright.lowering.storage import slices
from shardwright.pcg.capture import flat_batch
from shardwright.pcg.errors import BatchError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, format_layouts
from shardwright.pcg.parallel import PARTITION
from shardwright.pcg.types import TensorType


@dataclass(frozen=True)
class Input:
    """One tensor of the batch: its key, its type with the layouts that the program reads it in."""

    key: str
    type: TensorType


def find_inputs(graph: Graph) -> tuple[dict[str, Input], dict[str, str]]:
    """The inputs by leaf name, and the partitions that are done on the batch itself, as aliases of their leaf.

    Where an input is read through one chain of partitions only, a rank may pass just its own shard of it.
    """
    inputs: dict[str, Input] = {}
    aliases: dict[str, str] = {}
    results = {name for _, name in graph.outputs}
    for leaf in graph.leaves("input"):
        name = leaf.name
        while len(users := graph.users[name]) == 1 and name not in results:
            if graph.by_name[users[0]].op != PARTITION:
                break
            name = users[0]
            aliases[name] = leaf.name
        inputs[leaf.name] = Input(str(leaf.attr("target")), graph.types[name])
    return inputs, aliases


class BatchCheck:
    """Checks a batch against what was captured and cuts out this rank's part."""

    def __init__(self, inputs: Mapping[str, Input], options: Mapping[str, Any], ranks: Ranks) -> None:
        self.inputs = {item.key: item.type for item in inputs.values()}
        self.options, self.ranks = dict(options), ranks
        self.slices = {key: slices(kind.shape, kind.layouts, ranks) for key, kind in self.inputs.items()}
        self.dtypes: dict[str, torch.dtype] = {key: getattr(torch, kind.dtype) for key, kind in self.inputs.items()}

    @property
    def layouts(self) -> dict[str, Layouts]:
        return {key: kind.layouts for key, kind in self.inputs.items()}

    def local(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """This rank's part of every input, on its device. Raises `BatchError` naming the key that does not fit."""
        found = batch if batch.keys() == self.inputs.keys() else self._select(flat_batch(batch))
        return {key: self._part(key, kind, found[key]) for key, kind in self.inputs.items()}

    def _select(self, batch: dict[str, Any]) -> dict[str, Any]:
        missing = [key for key in self.inputs if key not in batch]
        if missing:
            raise BatchError(f"batch: {missing[0]!r} is missing; pass exactly the tensors {sorted(self.inputs)}")
        for key, value in batch.items():
            if key in self.inputs:
                continue
            if key not in self.options:
                raise BatchError(
                    f"batch: {key!r} was not in the batch that the model was captured with; "
                    f"pass exactly the tensors {sorted(self.inputs)}, or compile again with it"
                )
            if value != self.options[key]:
                raise BatchError(
                    f"batch: {key!r} is {value!r}, but {self.options[key]!r} was captured and is part of the program; "
                    "leave it out, or compile again with it"
                )
        return batch

    def _part(self, key: str, kind: TensorType, value: object) -> Tensor:
        mesh, dtype = self.ranks.mesh, self.dtypes[key]
        if not isinstance(value, Tensor):
            raise BatchError(f"batch: {key!r} is a {type(value).__name__}, expected a tensor {kind.erased()}")
        if value.dtype != dtype:
            raise BatchError(f"batch: {key!r} has dtype {value.dtype}, expected {dtype}; cast it with .to({dtype})")
        if value.shape == kind.shape:
            for axis, dim, blocks in self.slices[key]:
                value = take(value, axis, dim, blocks)
            return value.to(self.ranks.device, non_blocking=True)
        if value.shape == kind.local_shape(mesh):
            return value.to(self.ranks.device, non_blocking=True)
        own = f", or this rank's shard {list(kind.local_shape(mesh))} ({format_layouts(kind.layouts, mesh)})"
        raise BatchError(
            f"batch: {key!r} has shape {list(value.shape)}, expected the global shape {list(kind.shape)}"
            + (own if kind.local_shape(mesh) != kind.shape else "")
            + "; shapes are baked into the program, so pad or drop the last batch, or compile again for this shape"
        )
