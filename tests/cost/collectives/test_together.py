"""The groups of ranks that run collectives together: along axes of a mesh, over stages, and all."""

from __future__ import annotations

from dataclasses import replace

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.schedules import Schedules
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.groups import AxisGroup
from shardwright.cost.collectives.together import Group, group_of_all, group_of_stages, groups_of_mesh
from shardwright.pcg.mesh import TIME, Mesh

LEVELS = (Level("box", 4, 1e10, 1e-6), Level("net", 6, 1e9, 1e-5))
CLUSTER = replace(Cluster.local(2), name="boxes", levels=LEVELS, collectives=())


def of(group: Group) -> AxisGroup:
    return group.communication.groups[group.axis]


def test_axes_that_are_neighbours_are_one() -> None:
    mesh = Mesh.of(**{TIME: 3}, a=3, one=1, b=2, c=4)
    groups = groups_of_mesh(CLUSTER, mesh)
    real = {name for name in groups if "one" not in name}
    assert real == {("a",), ("b",), ("c",), ("a", "b"), ("b", "c"), ("a", "b", "c")}  # not a and c: b lies between
    assert {name: of(group).size for name, group in groups.items() if name in real} == {
        ("a",): 3, ("b",): 2, ("c",): 4, ("a", "b"): 6, ("b", "c"): 8, ("a", "b", "c"): 24,
    }  # fmt: skip
    assert groups["one", "b"].picks("all_reduce") == groups["b",].picks("all_reduce")
    assert of(groups["a", "b"]).splits == (1, 6)
    assert of(groups["b", "c"]).splits == (4, 2)
    alone = Communication(CLUSTER, mesh.device_sizes)
    for axis, name in enumerate(mesh.names):
        if mesh.device_sizes[axis] > 1:
            assert groups[name,].library("all_reduce") == alone.library("all_reduce", axis)


def test_what_is_too_large_has_no_links_made() -> None:
    """All ranks of a cluster are a group, however many there are."""
    large = replace(CLUSTER, levels=(LEVELS[0], replace(LEVELS[1], size=1 << 20))).with_schedules(Schedules())
    group = group_of_all(large, large.num_devices)
    assert group.picks("all_reduce").curve == group.library("all_reduce")


def test_all_ranks_and_places_of_stages() -> None:
    assert of(group_of_all(CLUSTER, 24)).splits == (4, 6)
    four = Mesh.of(a=4)
    assert group_of_stages(CLUSTER, [four] * 5, (0, 1, 4)) is None  # not evenly spaced
    assert group_of_stages(CLUSTER, [four, Mesh.of(a=2)], (0, 1)) is None  # unlike meshes
    for num_devices, stages, splits in (
        (4, (0, 1), (1, 2)), (4, (0, 5), (1, 2)), (2, (0, 1), (2, 1)), (2, (0, 11), (1, 2)), (4, (1, 3, 5), (1, 3)),
    ):  # fmt: skip
        group = group_of_stages(CLUSTER, [Mesh.of(a=num_devices)] * 12, stages)
        assert group is not None
        assert of(group).splits == splits, stages
