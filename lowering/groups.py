"""Process groups along the axes of meshes: each is made once for all modules of a process."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from shardwright.pcg.mesh import Mesh


def grid_of(mesh: Mesh, num_stages: int) -> torch.Tensor:
    """The numbers of all ranks, by stage and place of the mesh."""
    return torch.arange(num_stages * mesh.num_devices).reshape(num_stages, *(mesh.device_sizes or (1,)))


_Key = tuple[str, tuple[tuple[int, ...], ...], float]
_GROUPS: WeakValueDictionary[_Key, dist.ProcessGroup] = WeakValueDictionary()
"""Groups that this process is in. Every one costs three threads under gloo, and buffers of the device under NCCL."""
_OF_OTHERS: WeakKeyDictionary[dist.ProcessGroup, set[_Key]] = WeakKeyDictionary()
"""Groups that this process is not in, which others find again: by the group of all ranks."""


def my_group(grid: torch.Tensor, timeout_s: float, use: str = "") -> dist.ProcessGroup | None:
    """The group of the ranks that differ from this one along the last dimension of the grid only; one for all modules.

    None where this rank is not in the grid, once all ranks have made the others' groups. torch's registry keeps groups
    alive until they are destroyed, on all ranks alike: all find one, or none does. (A group that only its members make
    has a name that depends on how many groups each of them is in, so that members may not find each other.)
    """
    lines = tuple(map(tuple, grid.reshape(-1, grid.shape[-1]).tolist()))
    key = use, lines, timeout_s
    known = _GROUPS.get(key)
    assert dist.group.WORLD is not None
    of_others = _OF_OTHERS.setdefault(dist.group.WORLD, set())
    if key not in of_others and (known is None or not _is_registered(known)):
        made, _ = dist.new_subgroups_by_enumeration(list(map(list, lines)), timeout=timedelta(seconds=timeout_s))
        if not isinstance(made, dist.ProcessGroup):
            of_others.add(key)
            return None
        known = _GROUPS[key] = made
    return known


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether it has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True
