"""The mesh as one rank sees it: axes with their groups, the rank's place and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.lowering import private
from shardwright.lowering.ranks.groups import Line, across, lines, my_group
from shardwright.lowering.ranks.movement import Axis, MeshAxis, Time
from shardwright.lowering.ranks.picked import AxisSchedules, ByGroup
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.stages import ALL_RANKS, STAGES, GroupName, of_stages
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
    _merged: dict[GroupName, Axis] = field(default_factory=dict, repr=False)
    _picked: list[ByGroup] = field(default_factory=list, repr=False)

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
        """The axes that may have a group: the mesh's, the axis of stages, and those made of several or of all ranks."""
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
            self._merged[names] = self._axis("_".join(names), names, lines(self.meshes, dims))
        return self._merged[names]

    @property
    def everyone(self) -> Axis:
        """All ranks of all stages as one axis, to sum over."""
        if ALL_RANKS not in self._merged:
            axis = self._axis("all ranks", ALL_RANKS, [tuple(range(self.world))], dist.group.WORLD)
            self._merged[ALL_RANKS] = axis
        return self._merged[ALL_RANKS]

    def across(self, stages: Sequence[int]) -> Axis | None:
        """Return the ranks of these stages that sum together (`groups.across`) as one axis; None: this one does not.

        Every rank, also of other stages, must ask for the same stages in the same order.
        """
        name, lines = of_stages(stages), across(self.meshes, stages)
        if name not in self._merged:
            if (group := self.group(lines, "shared")) is None:
                self._schedules(name, lines)
                return None
            self._merged[name] = self._axis(STAGES, name, lines, group)
        return self._merged[name]

    def _axis(self, label: str, name: GroupName, lines: Sequence[Line], group: dist.ProcessGroup | None = None) -> Axis:
        """Return the ranks of a line as an axis, with the schedules that are picked for it."""
        group = group or self.group(lines)
        assert group is not None
        return Axis(label, dist.get_world_size(group), dist.get_rank(group), group, self._schedules(name, lines))

    def group(self, lines: Sequence[Line], use: str = "") -> dist.ProcessGroup | None:
        """Return the group of the line that contains this rank, or None; each `use` has groups of its own.

        Every rank, also of other stages, must ask for the same groups in the same order.
        """
        with private.unset_fake_temporarily():
            return my_group(lines, self.timeout_s, use)

    def run_by(self, picked: Sequence[ByGroup]) -> None:
        """Let collectives run by schedules: for each stage what is picked, by group. Every rank must pass the same."""
        if self.is_dry:
            return
        self._picked.extend(picked)
        for axis in self.axes:
            if isinstance(axis, Axis):  # of any size: other stages may have another
                axis.schedules = self._schedules((axis.name,), lines(self.meshes, [self.mesh.index(axis.name)]))

    def _schedules(self, name: GroupName, lines: Sequence[Line]) -> AxisSchedules | None:
        """Return what a group's collectives run by, on process groups of their own, which all ranks make together."""
        picked = [stage.get(name) or {} for stage in self._picked]
        if not any(picked) or (group := self.group(lines, f"schedules {' '.join(name)}")) is None:
            return None
        return AxisSchedules(picked[self.stages.rank], group, self.timeout_s)

    def forget_groups(self) -> None:
        """Release all process groups."""
        for axis in self.all_axes:
            axis.group = None
            if isinstance(axis, Axis):
                axis.schedules = None
        private.forget_groups(self.device_mesh)
