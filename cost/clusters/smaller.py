"""Clusters of fewer devices, for work that not all devices can share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.topology import Level


def smaller_cluster(cluster: Cluster, num_devices: int) -> Cluster | None:
    """Return the cluster of `num_devices` of its devices, the others idle; None if no equal shares make them.

    Nodes are filled first: 8 of 3 nodes of 7 are 4 on each of two. A cluster of several kinds of devices gives its
    first ranks, in whole innermost units or a part of one.
    """
    name = f"{num_devices} of {cluster.name}"
    if not 0 < num_devices < cluster.num_devices:
        return cluster if num_devices == cluster.num_devices else None
    if cluster.parts:
        inner = cluster.levels[0].size
        is_even = num_devices < inner or num_devices % inner == 0
        return replace(cluster.part(range(num_devices)), name=name) if is_even else None
    sizes = _sizes(cluster.levels, num_devices)
    if sizes is None:
        return None
    levels = [level.resized(size) for level, size in zip(cluster.levels, sizes, strict=True)]
    return replace(cluster, name=name, levels=(levels[0], *(level for level in levels[1:] if level.size > 1)))


def _sizes(levels: Sequence[Level], num_devices: int) -> tuple[int, ...] | None:
    """Return the number of units at each level that make `num_devices`, with as many innermost as possible, or None."""
    if not levels:
        return () if num_devices == 1 else None
    for size in range(min(levels[0].size, num_devices), 0, -1):
        if num_devices % size == 0 and (rest := _sizes(levels[1:], num_devices // size)) is not None:
            return (size, *rest)
    return None
