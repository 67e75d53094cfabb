"""Moves of a tensor from the mesh of one pipeline stage to that of another: their time, and the fastest way.

`pcg.pieces` computes who sends which pieces to whom; a tensor has the same layouts on both meshes. A stage's mesh
covers consecutive ranks. Two ways:

    direct           every target receives its whole part; a source may have to serve several replicas of it
    scatter-gather   the s target replicas of a part receive 1/s of it each, and gather it inside their stage, where
                     links are faster (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
                     Using Megatron-LM", 2021, section 4.1)

A partial sum stays partial: every device has a summand of its own, so that none is a replica.

All ranks of both stages send or receive at once: the time is that of the busiest rank, over the outermost level that
separates any two ranks of the stages (an upper bound where only some pairs are that far apart). In a mixed cluster the
links between two stages, and the links inside the stage that gathers, are those of their own parts.
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


@dataclass(frozen=True, slots=True)
class Resharding:
    """A way to move a tensor between stages, by its busiest ranks.

    Attributes:
        sent_bytes: by one rank of the source stage.
        received_bytes: by one rank of the target stage, before it gathers.
        messages: that one rank sends or receives.
        gather_axes: axes of the target mesh along which the part of `gathered_bytes` is gathered afterwards.
    """

    name: str
    sent_bytes: float
    received_bytes: float
    messages: int
    gather_axes: tuple[int, ...] = ()
    gathered_bytes: float = 0.0


def ways(tensor: Tensor, num_bytes: float, source: Mesh, target: Mesh) -> tuple[Resharding, ...]:
    """Return the ways to move a microbatch's part of a tensor; a device of the source has `num_bytes` of it."""
    most, sizes = busiest(tensor, source, target), target.device_sizes
    shards = [axis for axis, layout in enumerate(tensor.layouts) if layout.is_shard]
    own_bytes = num_bytes * prod(source.device_sizes[a] for a in shards) / prod(sizes[a] for a in shards)
    direct = Resharding("direct", num_bytes * most.sent, own_bytes * most.received, most.messages)
    axes = tuple(
        axis
        for axis, (size, layout) in enumerate(zip(sizes, tensor.layouts, strict=True))
        if size > 1 and not layout.is_shard and layout.kind != "P"
    )
    if not axes:
        return (direct,)
    replicas = prod(sizes[axis] for axis in axes)
    pieces = direct.sent_bytes / replicas, direct.received_bytes / replicas
    return direct, Resharding("scatter-gather", *pieces, direct.messages, axes, direct.received_bytes)


def resharding_s(
    cluster: Cluster, tensor: Tensor, num_bytes: float, source: StageMesh, target: StageMesh
) -> tuple[float, Resharding]:
    """Return the seconds of the fastest way and the way. `num_bytes`: per microbatch and source device."""
    ends = min(source.first_rank, target.first_rank), max(source.ranks.stop, target.ranks.stop)
    both, first = _own(cluster, range(*ends))
    sizes = target.mesh.device_sizes
    links, stage = Communication(both, ()), Communication(_own(cluster, target.ranks)[0], sizes)

    def send_s(num_bytes: float) -> float:
        return links.send_s(ends[0] - first, ends[1] - 1 - first, num_bytes)

    def time_s(way: Resharding) -> float:
        start_s = send_s(0.0)
        sending_s = send_s(max(way.sent_bytes, way.received_bytes)) - start_s
        inside = prod(sizes[axis] for axis in way.gather_axes)
        gathers_s = 0.0
        for axis in way.gather_axes:  # the outermost first: gathered bytes grow on the way in
            inside //= sizes[axis]
            gathers_s += stage.time_s("all_gather", axis, way.gathered_bytes / inside)
        return way.messages * start_s + sending_s + gathers_s

    found = ways(tensor, num_bytes, source.mesh, target.mesh)
    return min(((time_s(way), way) for way in found), key=lambda entry: entry[0])


def _own(cluster: Cluster, ranks: range) -> tuple[Cluster, int]:
    """Return the cluster that has the links of `ranks`, and its first rank: the part of a mixed cluster."""
    return (cluster.part(ranks), ranks.start) if cluster.parts else (cluster, 0)
