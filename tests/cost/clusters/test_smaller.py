"""Parts of clusters that keep whole nodes."""

from __future__ import annotations

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.smaller import smaller_cluster


def _sizes(cluster: Cluster, num_devices: int) -> list[int] | None:
    part = smaller_cluster(cluster, num_devices)
    assert part is None or (part.num_devices == num_devices and part.device == cluster.device)
    return part and [level.size for level in part.levels]


def test_whole_nodes_come_first() -> None:
    """Of 3 nodes of 7: as many of a node as make equal shares; of one node no network is left."""
    cluster = Cluster.preset("dgx-h100", 3, 7)
    found = {n: _sizes(cluster, n) for n in (0, 1, 4, 7, 8, 12, 14, 15, 16, 21, 22)}
    assert found == {0: None, 1: [1], 4: [4], 7: [7], 8: [4, 2], 12: [6, 2], 14: [7, 2], 15: [5, 3], 16: None,
                     21: [7, 3], 22: None}  # fmt: skip
    assert smaller_cluster(cluster, 21) is cluster
    part = smaller_cluster(cluster, 8)
    assert part is not None
    assert part.name == "8 of dgx-h100"
    assert [level.name for level in part.levels] == [level.name for level in cluster.levels]


def test_of_several_kinds_the_first_machines_are_kept() -> None:
    cluster = Cluster.mixed([("dgx-h100", 1), ("dgx-a100", 2)])
    assert [smaller_cluster(cluster, n) is not None for n in (3, 8, 12, 16)] == [True, True, False, True]
    first, two = smaller_cluster(cluster, 8), smaller_cluster(cluster, 16)
    assert first is not None
    assert two is not None
    assert "H100" in first.device.name
    assert len(two.parts) == 2
