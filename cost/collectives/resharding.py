"""The time to move a tensor from the mesh of one pipeline stage to that of another.

`pcg.pieces` computes who sends which pieces to whom; a tensor has the same layouts on both meshes. Each target receives
its whole part, and a source may have to serve several replicas of it. A stage's mesh covers consecutive ranks.

All ranks of both stages send or receive at once: the time is that of the busiest rank, over the outermost level that
separates any two ranks of the stages (an upper bound where only some pairs are that far apart). In a mixed cluster the
links between two stages are those of their own parts.

Megatron-LM sends each replica a piece, which they gather inside their stage. A graph says this by layouts: a value that
is partitioned along the axis of the replicas before the boundary is sent in pieces, and combined after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.pieces import Tensor, busiest


@dataclass(frozen=True, slots=True)
class StageMesh:
    """The mesh of a stage, whose ranks begin at `first_rank`."""

    mesh: Mesh
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.mesh.num_devices)


def resharding_s(cluster: Cluster, tensor: Tensor, num_bytes: float, source: StageMesh, target: StageMesh) -> float:
    """Return the seconds to move a microbatch's part of a tensor; a device of the source has `num_bytes` of it."""
    most = busiest(tensor, source.mesh, target.mesh)
    shards = [axis for axis, layout in enumerate(tensor.layouts) if layout.is_shard]
    here, there = (prod(stage.mesh.device_sizes[axis] for axis in shards) for stage in (source, target))
    ranks = range(min(source.first_rank, target.first_rank), max(source.ranks.stop, target.ranks.stop))
    part, first = (cluster.part(ranks), ranks.start) if cluster.parts else (cluster, 0)
    links, ends = Communication(part, ()), (ranks[0] - first, ranks[-1] - first)
    start_s = links.send_s(*ends, 0.0)
    sending_s = links.send_s(*ends, num_bytes * max(most.sent, here / there * most.received)) - start_s
    return most.messages * start_s + sending_s
