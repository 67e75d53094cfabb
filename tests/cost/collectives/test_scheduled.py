"""Schedules priced for groups: a group's own network, what is picked for a size, and the library elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.schedules import Schedules
from shardwright.cost.clusters.shapes import of_levels
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.communication import SCHEDULED, Communication
from shardwright.cost.collectives.groups import group_of, network_of
from shardwright.cost.collectives.scheduled import MOST_RANKS, SIZES, WORTH, picks, time_s
from shardwright.cost.collectives.simulation import busiest_s_per_byte, simulate
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Topology
from shardwright.search.collectives.candidates import PlannersOwn
from tests.each import each

HOST = Level("host", 4, 1e9, 50e-6, "host")
NET = Level("net", 2, 2.5e7, 100e-6)
TWO_LEVELS = Cluster("two nodes", Cluster.local(2).device, (HOST, NET), "gloo", "default", schedules=PlannersOwn())
TORUS = (Level("ici", 64, 6e9, 1e-6, "network", "torus", 1.0, (8, 8)),)


@each(
    "levels, sizes, axis, rates",
    [
        ((HOST, NET), (2, 4), 0, {2.5e7}),  # pairs across the network, each with its own share
        ((HOST, NET), (2, 4), 1, {1e9}),
        ((HOST, NET), (8,), 0, {1e9, 2.5e7}),
        (TORUS, (8, 8), 1, {1.5e9}),  # a ring: two of four links
        (TORUS, (8, 8), 0, {1.5e9}),
        (TORUS, (16, 4), 1, {1.5e9}),  # half of a ring is a line
        (TORUS, (2, 32), 1, {1.5e9}),  # four rows: lines one way, rings the other
        (TORUS, (64,), 0, {1.5e9}),
        ((Level("xgmi", 8, 7e9, 1e-6, "nvlink", "mesh"),), (2, 4), 1, {1e9}),
    ],
)
def test_members_have_their_share_of_the_links(
    levels: tuple[Level, ...], sizes: tuple[int, ...], axis: int, rates: set[float]
) -> None:
    topology = of_levels("group", network_of(group_of(sizes, axis, levels), levels))
    assert topology.num_ranks == sizes[axis]
    assert {round(float(link.rate_bytes_per_s), 3) for link in topology.links} == rates


def test_a_rail_takes_the_rate_of_exchanges_for_them() -> None:
    levels = (HOST, Level("net", 4, 1e9, 1e-6, "network", "rail", 4.0))
    group = group_of((16,), 0, levels)
    near, far = (network_of(group, levels, exchanges=own)[1].bandwidth_bytes_per_s for own in (False, True))
    assert far < near


def test_a_schedule_is_picked_where_it_is_worth_it() -> None:
    """On two levels a hierarchy sends less over the slow one; inside a node the library stays."""
    across, inside = Communication(TWO_LEVELS, (8,)), Communication(TWO_LEVELS, (2, 4))
    for name in SCHEDULED:
        found, library = across.picks(name, 0), across.library(name, 0)
        for num_bytes in (1e3, 5e4, 3e6, 8e7, 5e9):
            own, seconds = found.at(num_bytes), found.curve.time_s(num_bytes)
            assert (own is None) == (found.curve.at(num_bytes).name == library.at(num_bytes).name)
            assert seconds <= library.time_s(num_bytes)
            if own is not None:
                assert seconds >= busiest_s_per_byte(own, _network(across)) * num_bytes
    assert across.picks("all_reduce", 0).at(1e7) is not None
    assert across.curve("all_reduce", 0).time_s(1e7) < 0.7 * across.library("all_reduce", 0).time_s(1e7)
    assert inside.picks("all_gather", 1).at(1e8) is None
    assert across.picks("broadcast", 0).schedules == (None,)


def test_a_picked_time_is_the_simulated_one() -> None:
    across = Communication(TWO_LEVELS, (8,))
    for num_bytes in SIZES[1:-1]:
        own = across.picks("all_gather", 0).at(num_bytes)
        assert own is not None
        simulated = time_s(own, _network(across), "gloo", num_bytes)
        assert across.curve("all_gather", 0).time_s(num_bytes) == pytest.approx(simulated, rel=1e-3)
        assert simulated > simulate(own, _network(across), num_bytes).seconds


def _network(communication: Communication) -> Topology:
    return of_levels("group", network_of(communication.groups[0], communication.cluster.levels))


def test_groups_of_one_shape_are_priced_once() -> None:
    """However large the cluster is; a group that is too large keeps its library."""
    small, large = (
        Communication(replace(TWO_LEVELS, levels=(HOST, replace(NET, size=size))), (size, 4)) for size in (2, 4096)
    )
    first = small.picks("all_reduce", 1)
    known = picks.cache_info().misses
    assert large.picks("all_reduce", 1) is first
    assert picks.cache_info().misses == known
    assert large.picks("all_reduce", 0).schedules == (None,)
    assert MOST_RANKS < 4096


def test_given_schedules_serve_groups_of_their_size() -> None:
    """What the network has no way for, what is of other sizes, and what is slower than the library is left."""
    ring = build("ring", "all_reduce", (8,))
    hierarchy = build("hierarchical", "all_reduce", (2, 4))

    def found(*own: Schedule) -> set[Schedule | None]:
        given = replace(TWO_LEVELS, schedules=Schedules(own))
        return set(Communication(given, (8,)).picks("all_reduce", 0).schedules)

    assert found(hierarchy, build("hierarchical", "all_reduce", (2, 2))) >= {hierarchy}
    assert found(build("ring", "all_reduce", (4,))) == {None}
    assert found() == {None}
    line = (Level("line", 8, 1e8, 1e-6, "network", "mesh", 1.0, (8,)),)
    wrapped = replace(TWO_LEVELS, levels=line, schedules=Schedules([ring]))
    assert Communication(wrapped, (8,)).picks("all_reduce", 0).schedules == (None,)  # no link closes the ring
    assert 0.5 < WORTH < 1
