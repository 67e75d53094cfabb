"""Sources: the origin of the values of parameters and buffers, before a rank has its parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.ranks.agreement import share_values
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.storage import Slices, part_of
from shardwright.pcg.errors import PlanError


class Source(Protocol):
    """A source of a rank's parts of parameters and buffers.

    `parameters` and `buffers` have the tensors under all of their names; a tied one has several. The store reads only
    their shapes, dtypes and `requires_grad`, so they may have no data.
    """

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    def agree(self, ranks: Ranks, others: Mapping[str, Tensor]) -> None:
        """Replace all values, and the `others` in place, by rank 0's. Every rank calls this before it takes a part.

        Raises `PlanError` if there are no values.
        """
        ...

    def parts(self, wanted: Mapping[str, Slices], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every wanted value, on the device, in memory of its own, in any order."""
        ...


class ModelValues:
    """The values of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.buffers: Mapping[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))

    @property
    def _all(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    def agree(self, ranks: Ranks, others: Mapping[str, Tensor]) -> None:
        """Copy rank 0's values into the model where they differ, as DDP does."""
        values = self._all
        hollow = (n for n, v in values.items() if v.device.type == "meta" or isinstance(v, private.FakeTensor))
        if not ranks.is_dry and (name := next(hollow, None)) is not None:
            raise PlanError(
                f"{name}: the model has no data (it is on fake tensors or on device meta), so that it can be planned "
                "but not trained; build it with real tensors, or load a checkpoint into it"
            )
        share_values({**others, **values}, ranks)

    def parts(self, wanted: Mapping[str, Slices], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield parts, copied if they shared memory with the model, so that the model can be freed."""
        values = self._all
        return ((name, own_part(values[name], slices, device)) for name, slices in wanted.items())


def own_part(value: Tensor, slices: Slices, device: torch.device) -> Tensor:
    """Return a rank's part of a logical tensor, on the device, in memory of its own."""
    part = part_of(value.detach(), slices).to(device)
    is_shared = private.storage_key(part) == private.storage_key(value)
    return part.clone(memory_format=torch.contiguous_format) if is_shared else part
