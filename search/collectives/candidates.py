"""The planner's choice for a group: schedules of builders that suit its network, and synthesized ones.

They depend on the group's network alone, so groups of one shape share them, and a search makes them once. Nothing here
depends on time: the same network has the same candidates on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.schedules import Synthesized
from shardwright.cost.clusters.shapes import of_levels
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.scheduled import fits
from shardwright.cost.collectives.simulation import busiest_s_per_byte, simulate
from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.builders.table import BUILDERS, build
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.sums import adds_alike
from shardwright.pcg.collectives.topology import Topology
from shardwright.search.collectives.sketch import Sketch
from shardwright.search.collectives.synthesis import synthesize

MOST_RANKS = 16
"""The most ranks for which schedules are synthesized, or built with several pieces."""
MOST_TRANSFERS = 4096
"""The most transfers of a synthesized schedule: plans hold them, and each costs a rank microseconds."""
PIECES = (1, 4)
SIZE_BYTES = float(1 << 26)
NEAR = 1.03
"""Where a builder's schedule takes at most so many times the bound, none is synthesized."""


class PlannersOwn(Synthesized):
    """Schedules that are made for each group's network when its price is asked for."""

    def candidates(self, kind: str, levels: tuple[Level, ...], num_ranks: int) -> tuple[Schedule, ...]:
        return _candidates(kind, levels)


def for_planner(cluster: Cluster) -> Cluster:
    """Return the cluster with the schedules that it wishes for; any other cluster as it is."""
    is_wish = cluster.schedules is not None and cluster.schedules.is_synthesized
    return replace(cluster, schedules=PlannersOwn()) if is_wish else cluster


@lru_cache(maxsize=256)
def _candidates(kind: str, levels: tuple[Level, ...]) -> tuple[Schedule, ...]:
    topology = of_levels("group", levels)
    built, by_transfers = _built(kind, levels), dict[tuple[Transfer, ...], Schedule]()
    for one in (*built, *_made(kind, topology, built)):
        by_transfers.setdefault(one.transfers, one)
    return tuple(one for one in by_transfers.values() if kind != "all_reduce" or adds_alike(one))


@lru_cache(maxsize=256)
def _built(kind: str, levels: tuple[Level, ...]) -> tuple[Schedule, ...]:
    """Return the schedules of all builders for the grid of ranks, the outermost level first, and for a flat one."""
    grid = tuple(dim for level in reversed(levels) for dim in level.dims or (level.size,))
    schedules = list[Schedule]()
    for name, builder in BUILDERS.items():
        for dims in dict.fromkeys((grid, (prod(grid),))):
            if kind in builder.makes and builder.sizes.fit(dims):
                schedules += (
                    build(name, kind, dims, pieces) for pieces in (PIECES if prod(dims) <= MOST_RANKS else (1,))
                )
    return tuple(schedules)


def _made(kind: str, topology: Topology, built: tuple[Schedule, ...]) -> Iterator[Schedule]:
    bound = float(least_seconds_per_byte(topology, built[0].collective).seconds_per_byte)
    if topology.num_ranks > MOST_RANKS or any(_is_near(one, topology, bound) for one in built):
        return
    sketch = Sketch(pieces=PIECES)
    for synthesis in synthesize(topology, kind, SIZE_BYTES, sketch=sketch, exact=False):
        if len(synthesis.schedule.transfers) > MOST_TRANSFERS:
            return
        yield synthesis.schedule


def _is_near(schedule: Schedule, topology: Topology, bound: float) -> bool:
    """Return whether a schedule takes hardly longer than `bound` seconds per byte."""
    if not fits(schedule, topology) or busiest_s_per_byte(schedule, topology) > NEAR * bound:
        return False
    return simulate(schedule, topology, SIZE_BYTES).seconds <= NEAR * bound * SIZE_BYTES
