"""The batch: the check of the user's tensors, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.lowering.ranks.movement import Time, take
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.deferred import is_unreal
from shardwright.lowering.store.storage import part_of, slices
from shardwright.lowering.text.outside import Input
from shardwright.pcg.capture.importing import flat_batch
from shardwright.pcg.errors import BatchError
from shardwright.pcg.layout import Layout, Layouts, R, format_layouts
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.meshes import stage_of
from shardwright.pcg.types import TensorType


def without_time(layouts: Layouts, mesh: Mesh) -> Layouts:
    """Return the layouts, on the other axes, of the parts of all microbatches one after the other.

    A dimension that is sliced within each microbatch becomes one block per microbatch.
    """
    if mesh.num_microbatches == 1:
        return layouts
    time, many = layouts[mesh.index(TIME)], mesh.num_microbatches

    def of(layout: Layout) -> Layout:
        inside = time.is_shard and layout.is_shard and (layout.dim, layout.blocks) == (time.dim, time.blocks)
        return layout._replace(blocks=layout.blocks * many) if inside else layout

    return tuple(R if name == TIME else of(x) for name, x in zip(mesh.names, layouts, strict=True))


class BatchCheck:
    """A check of batches against the captured one, which also cuts out this rank's part of each microbatch."""

    def __init__(self, inputs: Mapping[str, Input], options: Mapping[str, Any], ranks: Ranks) -> None:
        self.inputs = {item.key: item.type for item in inputs.values()}
        self.options, self.ranks = dict(options), ranks
        self.slices = {key: slices(kind.shape, kind.layouts, ranks) for key, kind in self.inputs.items()}
        self.own_shapes = {key: self._own_shape(kind, ranks.mesh) for key, kind in self.inputs.items()}
        """The shapes of this rank's parts of inputs, all microbatches together."""
        self.dtypes: dict[str, torch.dtype] = {key: getattr(torch, kind.dtype) for key, kind in self.inputs.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the global batch."""
        return {key: kind.shape for key, kind in self.inputs.items()}

    @property
    def layouts(self) -> dict[str, Layouts]:
        """The layouts of a batch's tensors on the ranks."""
        return {key: without_time(kind.layouts, self.ranks.mesh) for key, kind in self.inputs.items()}

    def own_rows(self) -> Tensor | None:
        """Return the rows of a global batch that this rank has, in order: integers, shape [rows].

        None if not all tensors have the same rows, so that a rank's shards of them are of different examples.
        """
        rows_of = list[Tensor]()
        for key, kind in self.inputs.items():
            if not kind.shape:
                return None
            alone = tuple(x if x.is_shard and x.dim == 0 else R for x in self.layouts[key])
            rows_of.append(part_of(torch.arange(kind.shape[0]), slices(kind.shape[:1], alone, self.ranks)))
        return rows_of[0] if rows_of and all(torch.equal(rows, rows_of[0]) for rows in rows_of) else None

    def of_rows(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of a batch that has its rows alone: its parts of the other dimensions."""
        cut = dict(rows)
        for key, kind in self.inputs.items():
            for axis, dim, blocks in slices(kind.shape, self.layouts[key], self.ranks):
                if dim:
                    cut[key] = take(cut[key], axis, dim, blocks)
        return cut

    def is_whole(self, key: str, rank: int) -> bool:
        """Return whether a rank's own shard is the global tensor; with unlike meshes this depends on the stage."""
        mesh, kind = self.ranks.meshes[stage_of(self.ranks.meshes, rank)], self.inputs[key]
        return self._own_shape(kind, mesh) == kind.shape

    def _own_shape(self, kind: TensorType, mesh: Mesh) -> tuple[int, ...]:
        return kind._replace(layouts=without_time(kind.layouts, mesh)).local_shape(mesh)

    def local(self, batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return this rank's part of every input for each microbatch, on its device.

        Raises `BatchError` naming the key that does not fit.
        """
        return self.parts(self.values(batch))

    def values(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return every input as passed: the global tensor or this rank's own shard. Raises `BatchError`, as `local`."""
        inputs = batch if batch.keys() == self.inputs.keys() else self._select(flat_batch(batch))
        return {key: self._checked(key, kind, inputs[key]) for key, kind in self.inputs.items()}

    def parts(self, values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return this rank's part of these values for each microbatch."""
        return list(self._microbatches(values))

    def _microbatches(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        time = self.ranks.time
        for number in range(1 if time is None else time.size):
            if time is not None:
                time.rank = number
            yield {key: self._part(key, value) for key, value in values.items()}

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

    def _checked(self, key: str, kind: TensorType, value: object) -> Tensor:
        mesh, dtype, own_shape = self.ranks.mesh, self.dtypes[key], self.own_shapes[key]
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            raise BatchError(
                f"batch: {key!r} is a {type(value).__name__}, expected a plain tensor {kind.dtype}{list(kind.shape)}"
            )
        if is_unreal(value) and not self.ranks.is_dry:
            raise BatchError(
                f"batch: {key!r} has no values (it is a fake tensor, or on device meta); make it outside of "
                "`with shardwright.fake()`"
            )
        if value.dtype != dtype:
            raise BatchError(f"batch: {key!r} has dtype {value.dtype}, expected {dtype}; cast it with .to({dtype})")
        if value.requires_grad and torch.is_grad_enabled():
            raise BatchError(
                f"batch: {key!r} requires a gradient, and a plan has gradients of parameters alone; pass "
                "x.detach(), or make it a parameter of the model"
            )
        if value.shape in (kind.shape, own_shape):
            return value
        own = " on every rank, as this plan shards no part of it"
        if own_shape != kind.shape:
            own = f", or this rank's shard {list(own_shape)} ({format_layouts(self.layouts[key], mesh)})"
        raise BatchError(
            f"batch: {key!r} has shape {list(value.shape)}, expected the global shape {list(kind.shape)}"
            f"{own}; shapes are baked into the program, so pad or drop the last batch, or compile again for this shape"
        )

    def _part(self, key: str, value: Tensor) -> Tensor:
        """Return this rank's part in the current microbatch of a global tensor, or of the rank's own shard of it."""
        is_whole = value.shape == self.inputs[key].shape
        for axis, dim, blocks in self.slices[key]:
            if is_whole or isinstance(axis, Time):
                value = take(value, axis, dim, blocks)
        return value.to(self.ranks.device, non_blocking=True)
