"""The mesh as one rank sees it: its axes with their groups, its place, its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.lowering import private
from shardwright.lowering.ranks.groups import Line, lines, my_group
from shardwright.lowering.ranks.movement import Axis, MeshAxis, Time
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.meshes import first_ranks


@dataclass(frozen=True, eq=False)
class Ranks:
    """The mesh as this rank sees it, in its pipeline stage. `device_mesh` is the full one that its DTensors lie on.

    `time` is the axis of microbatches; `stages`: the ranks at this place of the mesh, one in each stage, or as many of
    each as `groups.columns` has. `meshes`: those of all stages. `is_dry`: the other ranks are not there, and nothing is
    really sent.
    """

    meshes: tuple[Mesh, ...]
    axes: tuple[MeshAxis, ...]
    device_mesh: DeviceMesh
    device: torch.device
    timeout_s: float
    stages: Axis
    is_dry: bool = False
    _merged: dict[tuple[str, ...], Axis] = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> Mesh:
        """That of this stage."""
        return self.meshes[self.stages.rank]

    @property
    def world(self) -> int:
        """How many ranks there are, in all stages."""
        return first_ranks(self.meshes)[-1]

    @property
    def place(self) -> int:
        """The number of this rank in its stage."""
        return dist.get_rank() - first_ranks(self.meshes)[self.stages.rank]

    @property
    def all_axes(self) -> tuple[MeshAxis, ...]:
        """Whatever has a group: of the mesh, several as one, and the stages."""
        return (*self.axes, *self._merged.values(), self.stages)

    @property
    def time(self) -> Time | None:
        return next((axis for axis in self.axes if isinstance(axis, Time)), None)

    def merged(self, names: tuple[str, ...]) -> Axis:
        """Several axes as one, to sum over. Every rank must ask for the same ones in the same order."""
        if len(names) == 1:
            axis = self.axes[self.mesh.index(names[0])]
            assert isinstance(axis, Axis)
            return axis
        if names not in self._merged:
            dims = [self.mesh.index(name) for name in names]
            group = self.group(lines(self.meshes, dims))
            assert group is not None
            self._merged[names] = Axis("_".join(names), dist.get_world_size(group), dist.get_rank(group), group)
        return self._merged[names]

    def group(self, lines: Sequence[Line], use: str = "") -> dist.ProcessGroup | None:
        """That of the line that this rank is in, if it is in one; a group of its own for each use.

        Every rank must ask for the same ones in the same order, also those of other stages.
        """
        with private.unset_fake_temporarily():
            return my_group(lines, self.timeout_s, use)

    def forget_groups(self) -> None:
        """Hold none any more."""
        for axis in self.all_axes:
            axis.group = None
        private.forget_groups(self.device_mesh)
