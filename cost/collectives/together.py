"""The groups of ranks that run collectives together, each as an axis of a mesh: so it has a network and prices.

Ranks along several mesh axes at once are a group where no other axis lies between these: then the group is one axis of
a mesh in which they are merged. The library runs what other groups sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress, pairwise, product
from math import prod
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster, Collective
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.curve import Curve
from shardwright.cost.collectives.scheduled import Picks
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.stages import GroupName


class Group(NamedTuple):
    """The groups of one axis of a mesh on a cluster."""

    communication: Communication
    axis: int

    def picks(self, collective: Collective) -> Picks:
        """Return what carries out a collective by size, and how long it takes."""
        return self.communication.picks(collective, self.axis)

    def library(self, collective: Collective) -> Curve:
        """Return the seconds over bytes of the library's own algorithms."""
        return self.communication.library(collective, self.axis)


def groups_of_mesh(cluster: Cluster, mesh: Mesh) -> Mapping[GroupName, Group]:
    """Return the groups of each axis, and of several at once, of a stage's mesh. Time has none."""
    names = [name for name in mesh.names if name != TIME]
    sizes = dict(zip(mesh.names, mesh.device_sizes, strict=True))
    along = {name: at for at, name in enumerate(name for name in names if sizes[name] > 1)}
    real, groups = list(along), dict[GroupName, Group]()
    for chosen in product((False, True), repeat=len(names)):
        along_axes = tuple(compress(names, chosen))
        places = [along[name] for name in along_axes if name in along]
        if not places or places[-1] - places[0] >= len(places):
            continue
        first, end = places[0], places[-1] + 1
        merged = [[name] for name in real[:first]], [real[first:end]], [[name] for name in real[end:]]
        mesh_sizes = [prod(sizes[name] for name in each) for part in merged for each in part]
        groups[along_axes] = Group(Communication(cluster, mesh_sizes), first)
    return groups


def group_of_all(cluster: Cluster, num_ranks: int) -> Group:
    """Return all ranks as one group."""
    return Group(Communication(cluster, (num_ranks,)), 0)


def group_of_stages(cluster: Cluster, meshes: Sequence[Mesh], stages: Sequence[int]) -> Group | None:
    """Return the groups of ranks at one place of several stages, if these are evenly spaced and have one mesh.

    Stages so far apart that the cluster has no room for more such groups count as nearer.

    `meshes`: of all stages; `stages`: those of the group, in order.
    """
    distances = {after - before for before, after in pairwise(stages)}
    if len(distances) != 1 or len({meshes[stage] for stage in stages}) != 1:
        return None
    num_devices = meshes[stages[0]].num_devices
    most = cluster.num_devices // (len(stages) * num_devices)
    return Group(Communication(cluster, (len(stages), min(distances.pop(), most) * num_devices)), 0)
