"""What a search is told to keep to: a mesh with roles, a number of microbatches, what is made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.recompute import RECOMPUTES, GivenByBlock, Recompute, RecomputeByBlock
from shardwright.search.restrict import FREE, ROLES
from shardwright.search.spaces import batch_size, degrees

RecomputeMode = Recompute | RecomputeByBlock | GivenByBlock
_MOST_NAMED = 8


@dataclass(frozen=True)
class Pins:
    """`None`: free. `mesh` is one of devices.

    Attributes:
        roles: of its axes.
        microbatches: how many in a step.
        recompute: what backward makes again.
        size: that of the batch.
    """

    mesh: Mesh | None
    roles: tuple[str, ...] | None
    microbatches: int | None
    recompute: RecomputeMode | None
    size: int

    @property
    def guided(self) -> bool:
        """Whether it is said on which mesh to search: then no other plan takes the place of what is found."""
        return self.mesh is not None

    @property
    def by_block(self) -> bool:
        """Whether equal blocks may be run in different ways."""
        return self.recompute is not None and not isinstance(self.recompute, str)

    @property
    def recomputes(self) -> Sequence[RecomputeMode]:
        """What may be made again, what takes least time first."""
        return RECOMPUTES if self.recompute is None else (self.recompute,)

    @classmethod
    def of(
        cls,
        graph: Graph,
        cluster: Cluster,
        mesh: Mesh | None,
        roles: Sequence[str] | None,
        microbatches: int | None,
        recompute: RecomputeMode | None,
    ) -> Pins:
        """Checked: a `PlanError` says which of them contradict each other, the cluster or the batch."""
        size = batch_size(graph)
        if mesh is not None and TIME in mesh.names:
            if microbatches not in (None, mesh.num_microbatches):
                raise PlanError(
                    f"microbatches={microbatches} contradicts the axis {TIME!r} of mesh {mesh}; give one of the two"
                )
            microbatches = mesh.num_microbatches
            mesh = Mesh(mesh.names[1:], mesh.sizes[1:]) if len(mesh) > 1 else Mesh(("x",), (1,))
        if mesh is not None and mesh.num_devices != cluster.num_devices:
            raise PlanError(
                f"mesh {mesh} has {mesh.num_devices} devices, cluster {cluster.name} has {cluster.num_devices}"
            )
        if mesh is not None and roles is not None and len(roles) != len(mesh):
            raise PlanError(f"{len(roles)} axis roles for mesh {mesh}; give one role per axis of devices")
        unknown = [role for role in roles or () if role not in ROLES]
        if unknown:
            raise PlanError(f"unknown axis role {unknown[0]!r}; choose one of {list(ROLES)}")
        if microbatches is not None:
            _check_count(microbatches, size)
        if recompute is not None:
            recompute = Execution(recompute=recompute).recompute
        own = (tuple(roles) if roles else (FREE,) * len(mesh)) if mesh is not None else None
        return cls(mesh, own, microbatches, recompute, size)


def _check_count(count: int, size: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(f"microbatches={count!r}: expected a positive number of microbatches in a step")
    if count > 1 and size == 0:
        raise PlanError(f"microbatches={count}: no input has examples, so there is no batch to cut; leave it out")
    if size % count:
        good = [1, *(degrees(size) if size > 1 else ())]
        shown = ", ".join(map(str, good[:_MOST_NAMED])) + (", …" if len(good) > _MOST_NAMED else "")
        raise PlanError(f"microbatches={count} does not divide the batch of {size}; choose one of {shown}")
