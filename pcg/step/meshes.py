"""The mesh of each pipeline stage.

Stages may differ in size: along the first axis of devices, each has as many devices as `Schedule.stage_sizes` says;
the plan's mesh is that of the largest stage. As layouts are by axis, one graph serves all: its types hold under every
mesh whose sizes divide those of the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution


def stage_meshes(mesh: Mesh, execution: Execution) -> tuple[Mesh, ...]:
    """Return the meshes of all stages, in order; the first has the first ranks.

    Raises:
        PlanError: `stage_sizes` do not fit the mesh of a plan.
    """
    sizes = execution.schedule.stage_sizes
    if not sizes:
        return (mesh,) * execution.schedule.num_stages
    first = int(TIME in mesh.names)
    if len(mesh) == first:
        raise PlanError(f"stage_sizes {list(sizes)}: mesh {mesh} has no axis of devices; give it one")
    whole, axis = mesh.sizes[first], mesh.names[first]
    if max(sizes) != whole or any(whole % size for size in sizes):
        raise PlanError(
            f"stage_sizes {list(sizes)}: expected divisors of the {whole} devices along {axis!r} of mesh {mesh}, the "
            f"largest of them {whole}; give the mesh of the largest stage, and sizes that divide it"
        )
    return tuple(replace(mesh, sizes=(*mesh.sizes[:first], size, *mesh.sizes[first + 1 :])) for size in sizes)


def first_ranks(meshes: Sequence[Mesh]) -> tuple[int, ...]:
    """Return the number of the first rank of each stage, and as the last entry the number of ranks."""
    return tuple(accumulate((mesh.num_devices for mesh in meshes), initial=0))


def num_devices(mesh: Mesh, execution: Execution) -> int:
    """Return the number of devices of all stages."""
    return first_ranks(stage_meshes(mesh, execution))[-1]


def stage_of(meshes: Sequence[Mesh], rank: int) -> int:
    """Return the stage that a rank is in."""
    ends = first_ranks(meshes)[1:]
    return next(stage for stage, end in enumerate(ends) if rank < end)


def in_words(meshes: Sequence[Mesh]) -> str:
    """Return the meshes in words: `[x=4]`, `2 stages of mesh [x=4]`, or `stages of meshes [x=4] and [x=2]`."""
    if len(set(meshes)) == 1:
        return f"{meshes[0]}" if len(meshes) == 1 else f"{len(meshes)} stages of mesh {meshes[0]}"
    *most, last = map(str, meshes)
    return f"stages of meshes {', '.join(most)} and {last}"
