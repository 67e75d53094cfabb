"""Process groups along the axes of meshes, each made once for all modules of a process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import gcd, prod
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.meshes import first_ranks, stage_of


def grids_of(meshes: Sequence[Mesh]) -> list[NDArray[np.int64]]:
    """Return, for each stage, the numbers of its ranks in the shape of its mesh."""
    firsts = first_ranks(meshes)
    return [
        np.arange(first, first + mesh.num_devices).reshape(mesh.device_sizes or (1,))
        for first, mesh in zip(firsts, meshes, strict=False)
    ]


Line = tuple[int, ...]


def lines(meshes: Sequence[Mesh], dims: Sequence[int]) -> list[Line]:
    """Return the groups of ranks that differ only along these axes of their stage's mesh."""
    groups = list[Line]()
    for grid in grids_of(meshes):
        size = prod(grid.shape[dim] for dim in dims)
        groups += map(tuple, np.moveaxis(grid, dims, range(-len(dims), 0)).reshape(-1, size).tolist())
    return groups


def columns(meshes: Sequence[Mesh], stages: Sequence[int]) -> list[Line]:
    """Divide the ranks of some stages into as many columns as possible, each with equally many ranks of a stage.

    In a column, the ranks of the first stage come first. If all meshes are equal, a column has one rank of each stage.
    """
    grids = grids_of(meshes)
    axis = min(int(TIME in meshes[0].names), grids[0].ndim - 1)
    sizes = [grids[stage].shape[axis] for stage in stages]
    many = gcd(*sizes)
    parted = [grids[stage].reshape(many, size // many, -1) for stage, size in zip(stages, sizes, strict=True)]
    joined = np.concatenate(parted, 1).swapaxes(1, 2)
    return list(map(tuple, joined.reshape(-1, joined.shape[-1]).tolist()))


def across(meshes: Sequence[Mesh], stages: Sequence[int]) -> list[Line]:
    """Return the ranks that may send to each other, in groups: one for each place if meshes are equal, else one."""
    by_place = columns(meshes, stages)
    return (
        by_place
        if len({meshes[stage] for stage in stages}) == 1
        else [tuple(rank for line in by_place for rank in line)]
    )


def first_in(meshes: Sequence[Mesh], stages: Sequence[int], rank: int, stage: int) -> int:
    """Return the first rank of a stage in the column of this rank."""
    line = next(line for line in columns(meshes, stages) if rank in line)
    return next(other for other in line if stage_of(meshes, other) == stage)


_Key = tuple[str, tuple[Line, ...], float]
_GROUPS: WeakValueDictionary[_Key, dist.ProcessGroup] = WeakValueDictionary()
"""The groups of this process. Each costs three threads under gloo, and buffers on the device under NCCL."""
_OF_OTHERS: WeakKeyDictionary[dist.ProcessGroup, set[_Key]] = WeakKeyDictionary()
"""The groups that other processes made without this one, by the group of all ranks."""


def my_group(lines: Sequence[Line], timeout_s: float, use: str = "") -> dist.ProcessGroup | None:
    """Return the group of the line that contains this rank, or None if no line does; all modules share groups.

    All ranks make the groups of all lines together. (If only its members made a group, its name would depend on the
    number of groups that each of them is in, and members might not find each other.) torch's registry keeps groups
    alive until they are destroyed, on all ranks alike, so either all ranks find a group or none does.
    """
    key = use, tuple(lines), timeout_s
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
    """Return whether a group still exists."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True
