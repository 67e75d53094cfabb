"""The mesh as one rank sees it: axes with their groups, the rank's place and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.lowering import private
from shardwright.lowering.ranks.groups import Line, lines, my_group
from shardwright.lowering.ranks.movement import Axis, MeshAxis, Time
from shardwright.lowering.ranks.picked import AxisSchedules, Picked
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.meshes import first_ranks


@dataclass(frozen=True, eq=False)
class Ranks:
    """The mesh of a pipeline stage as this rank sees it. Its DTensors lie on `device_mesh`, which has all axes.

    `time` is the axis of microbatches. `stages` is the axis over all stages, along this rank's column of
    `groups.columns`: one rank of each stage if their meshes are equal. `meshes` are the meshes of all stages. With
    `is_dry` the other ranks do not exist, and nothing is really sent.
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
        """The mesh of this stage."""
        return self.meshes[self.stages.rank]

    @property
    def world(self) -> int:
        """The number of ranks in all stages."""
        return first_ranks(self.meshes)[-1]

    @property
    def place(self) -> int:
        """The number of this rank in its stage."""
        return dist.get_rank() - first_ranks(self.meshes)[self.stages.rank]

    @property
    def all_axes(self) -> tuple[MeshAxis, ...]:
        """The axes that may have a group: the mesh's, merged ones, and the axis of stages."""
        return (*self.axes, *self._merged.values(), self.stages)

    @property
    def time(self) -> Time | None:
        return next((axis for axis in self.axes if isinstance(axis, Time)), None)

    def merged(self, names: tuple[str, ...]) -> Axis:
        """Return several axes as one, to sum over. Every rank must ask for the same axes in the same order."""
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
        """Return the group of the line that contains this rank, or None; each `use` has groups of its own.

        Every rank, also of other stages, must ask for the same groups in the same order.
        """
        with private.unset_fake_temporarily():
            return my_group(lines, self.timeout_s, use)

    def run_by(self, picked: Sequence[Mapping[str, Picked]]) -> None:
        """Let collectives run by schedules: for each stage, by axis, what is picked. Every rank must pass the same."""
        if self.is_dry:
            return
        for axis in self.axes:
            own = [stage.get(axis.name) or {} for stage in picked]
            if isinstance(axis, Axis) and axis.size > 1 and any(own):
                group = self.group(lines(self.meshes, [self.mesh.index(axis.name)]), "schedules")
                assert group is not None
                axis.schedules = AxisSchedules(own[self.stages.rank], group, self.timeout_s)

    def forget_groups(self) -> None:
        """Release all process groups."""
        for axis in self.all_axes:
            axis.group = None
            if isinstance(axis, Axis):
                axis.schedules = None
        private.forget_groups(self.device_mesh)
