"""Where the values of parameters and buffers come from, before a rank has its parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwright.lowering import private
from shardwright.lowering.ranks.agreement import share_values
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.storage import Slices, part_of
from shardwright.pcg.errors import PlanError


class Source(Protocol):
    """Gives a rank its parts of parameters and buffers.

    `parameters` and `buffers` have the tensors under all of their names; a tied one has several. The store reads their
    shapes, dtypes and `requires_grad` alone, so they may have no data.
    """

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    def agree(self, ranks: Ranks, others: Mapping[str, Tensor]) -> None:
        """Make all values, and the `others` in place, those of rank 0; every rank calls it, before any part is taken.

        Raises `PlanError` where there are no values.
        """
        ...

    def part(self, name: str, slices: Slices, device: torch.device) -> Tensor:
        """This rank's part of a value, on the device, in memory of its own. Every rank asks for names in one order."""
        ...


class ModelValues:
    """The values that a model has."""

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

    def part(self, name: str, slices: Slices, device: torch.device) -> Tensor:
        """A copy where it would share memory with the model, which can then be freed."""
        value = self._all[name]
        return own_part(value, slices, device)


def own_part(value: Tensor, slices: Slices, device: torch.device) -> Tensor:
    """What slices leave of a logical tensor, on the device, in memory of its own."""
    part = part_of(value.detach(), slices).to(device)
    is_shared = private.storage_key(part) == private.storage_key(value)
    return part.clone(memory_format=torch.contiguous_format) if is_shared else part
