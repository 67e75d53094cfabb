"""Where lowering puts something of its own in the place of what torch does with DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.tensor import Placement
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.lowering.private import is_strided

# pyright: reportPrivateUsage=false

_DISTRIBUTE_TENSORS = state_dict_utils._distribute_tensors
_PLAN_REDISTRIBUTION = redistribution._gen_transform_infos_non_cached


def distribute_whole_tensors(distribute: Callable[[dict[str, Any], Sequence[str], torch.device], None]) -> None:
    """From now on, `distribute` comes first where whole tensors, broadcast from rank 0, go into those of a state dict.

    It is given pairs of both, by name, and replaces those that it has done; torch does the others.
    """

    def both(states: dict[str, Any], names: list[str], device: torch.device, group: Any = None) -> None:  # noqa: ANN401
        distribute(states, names, device)
        _DISTRIBUTE_TENSORS(states, names, device, group)

    state_dict_utils._distribute_tensors = both


Step = tuple[int, tuple[Placement, Placement], list[int]]


def plan_strided_redistributions(plan: Callable[[DTensorSpec, DTensorSpec], list[Step]]) -> None:
    """From now on, DTensors with a strided shard, before or after, are redistributed by what `plan` gives.

    A step is an axis, its placements before and after, and the shape that earlier axes leave of the logical tensor.
    """

    def chosen(source: DTensorSpec, target: DTensorSpec, *args: Any, **kwargs: Any) -> list[Any]:
        if not any(map(is_strided, (*source.placements, *target.placements))):
            return _PLAN_REDISTRIBUTION(source, target, *args, **kwargs)
        return [redistribution._TransformInfo(*step) for step in plan(source, target)]

    redistribution._gen_transform_infos_non_cached = chosen
    redistribution._gen_transform_infos.cache_clear()
