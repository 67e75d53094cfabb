"""Copies of a checkpoint's tensors, from which it is written beside further steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from shardwright.lowering.private import tree_leaves


class HostStager(BlockingAsyncStager):
    """It copies tensors of the host into the copies of the save before; torch's own makes new ones, twice.

    Nothing is staged before the save before is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies = dict[str, tuple[object, Tensor, Tensor]]()  # the kind of each, the copy, and its part here

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state with copies of its tensors."""
        leaves = tree_leaves(state_dict)
        if any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves):
            return super().stage(state_dict)
        with torch.no_grad():
            return self._copied("", state_dict)

    def _copied(self, key: str, value: Any) -> Any:  # noqa: ANN401
        match value:
            case dict():
                return {name: self._copied(f"{key}.{name}", own) for name, own in value.items()}
            case list() | tuple():
                copies = [self._copied(f"{key}.{number}", own) for number, own in enumerate(value)]
                return copies if isinstance(value, list) else tuple(copies)
            case Tensor():
                return self._copy(key, value)
            case _:
                return copy.deepcopy(value)

    def _copy(self, key: str, leaf: Tensor) -> Tensor:
        kind, local = _kind(leaf), _local(leaf)
        known, copy, part = self._copies.get(key, (None, leaf, local))
        if known == kind:
            part.copy_(local)
            return copy
        copy = leaf.detach().clone()
        self._copies[key] = kind, copy, _local(copy)
        return copy


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _kind(value: Tensor) -> object:
    placements = value.placements if isinstance(value, DTensor) else None
    return type(value), value.shape, value.dtype, placements, _local(value).shape
