"""Which links a group uses, and what it has of them."""

from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.clusters.topology import TOPOLOGIES, Level, LinkKind, Topology
from shardwright.cost.collectives.groups import AxisGroup, Link, between, check_mesh, group_of, links_of
from shardwright.pcg.errors import ClusterError
from tests.each import each

HOP, BYTES = 1e-6, 1e9


def levels(*sizes: int) -> tuple[Level, ...]:
    return tuple(Level(f"level{i}", size, BYTES / 10**i, HOP * 10**i) for i, size in enumerate(sizes))


def groups(shape: tuple[Level, ...], *mesh: int) -> list[AxisGroup]:
    return [group_of(mesh, axis, shape) for axis in range(len(mesh))]


def splits(shape: tuple[Level, ...], *mesh: int) -> list[tuple[int, ...]]:
    return [group.splits for group in groups(shape, *mesh)]


def link(topology: Topology, *mesh: int, axis: int = 0, dims: tuple[int, ...] = (), ratio: float = 1.0) -> Link:
    """What the groups of `axis` have of one level that all devices of `mesh` fill."""
    level = Level("links", prod(mesh), BYTES, HOP, "nvlink", topology, ratio, dims)
    (found,) = links_of(group_of(mesh, axis, (level,)), (level,))
    return found


# ------------------------------------------------------------------------------------------------ which links are used


def test_the_last_axis_is_innermost() -> None:
    assert splits(levels(8, 4), 4, 8) == [(1, 4), (8, 1)]
    assert splits(levels(8, 4), 8, 4) == [(2, 4), (4, 1)]
    assert splits(levels(8, 4), 2, 16) == [(1, 2), (8, 2)]
    assert splits(levels(8, 4), 2, 2, 8) == [(1, 2), (1, 2), (8, 1)]
    assert splits(levels(8, 4), 32) == [(8, 4)]
    assert splits(levels(4, 2, 2), 2, 8) == [(1, 1, 2), (4, 2, 1)]
    assert splits(levels(4, 2, 2), 16) == [(4, 2, 2)]
    assert [group.stride for group in groups(levels(8, 4), 2, 2, 8)] == [16, 8, 1]


def test_a_mesh_may_leave_devices_idle() -> None:
    assert splits(levels(8, 4), 2, 4) == [(2, 1), (4, 1)]
    assert splits(levels(8, 4), 1) == [(1, 1)]
    assert splits(levels(8, 4)) == []


def test_uneven_groups_count_as_leaving_the_node() -> None:
    assert splits(levels(8, 4), 4, 6) == [(1, 4), (1, 6)]  # ranks 6…11 lie on two nodes
    assert splits(levels(8, 4), 6) == [(6, 1)]
    assert splits(levels(8, 4), 12) == [(1, 12)]  # 8 here, 4 there
    assert splits(levels(6, 2), 4, 3) == [(2, 2), (3, 1)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_splits_multiply_to_the_size(sizes: list[int], mesh: list[int]) -> None:
    shape = levels(*sizes)
    if prod(mesh) > prod(sizes):
        with pytest.raises(ClusterError, match=r"mesh .* needs .* devices, cluster 'toy' has .*; choose sizes"):
            check_mesh(mesh, prod(sizes), "toy")
        return
    check_mesh(mesh, prod(sizes), "toy")
    for size, group in zip(mesh, groups(shape, *mesh), strict=True):
        assert prod(group.splits) == group.size == size
        found = links_of(group, shape)
        assert prod(x.split for x in found) == size
        assert [x.inside for x in found] == [prod(y.split for y in found[:i]) for i in range(len(found))]


def listed(mesh: list[int], axis: int, capacity: int) -> int:
    """Members that each group has in each of its units, by listing all ranks; 0 where they are not equally many."""
    ranks = np.moveaxis(np.arange(prod(mesh)).reshape(mesh), axis, -1).reshape(-1, mesh[axis])
    counts = {tuple(Counter((group // capacity).tolist()).values()) for group in ranks}
    (first, *others) = counts
    return first[0] if not others and len(set(first)) == 1 else 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 100), st.data())
def test_members_are_those_of_all_ranks_listed(mesh: list[int], capacity: int, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(mesh) - 1))
    level = Level("level", capacity, BYTES, HOP)
    rest = Level("rest", prod(mesh), BYTES, HOP)
    members = group_of(tuple(mesh), axis, (level, rest)).splits[0]
    assert members == (listed(mesh, axis, capacity) or 1)


def test_groups_of_clusters_too_large_to_list() -> None:
    shape = (Level("node", 8, BYTES, HOP), Level("pod", 2**20, BYTES, HOP), Level("site", 2**20, BYTES, HOP))
    assert splits(shape, 2**40, 8) == [(1, 2**20, 2**20), (8, 1, 1)]
    assert splits(shape, 2**30, 2**13) == [(1, 2**10, 2**20), (8, 2**10, 1)]


@each("mesh", [(0, 4), (-1,), (2.0, 4), (True, 4), ("2",)], ids=str)
def test_sizes_that_are_none(mesh: tuple[object, ...]) -> None:
    with pytest.raises(ClusterError, match=r"mesh .*: axis 0: expected a positive integer, got .*; give the number"):
        check_mesh(mesh, 8, "toy")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- what a group has


@pytest.mark.parametrize("topology", ["switch", "rail", "fat-tree", "pcie"])
def test_switches_give_everyone_his_bandwidth(topology: Topology) -> None:
    for axis in (0, 1):
        found = link(topology, 4, 2, axis=axis)
        assert found.bytes_per_s == found.exchange_bytes_per_s == BYTES
        assert found.hop_s == HOP
    assert link(topology, 8, ratio=4.0).bytes_per_s == (BYTES if topology == "rail" else BYTES / 4)


def test_a_mesh_gives_the_links_between_the_members() -> None:
    assert link("mesh", 8).bytes_per_s == BYTES
    assert link("mesh", 2, 4, axis=1).bytes_per_s == pytest.approx(BYTES * 3 / 7)
    assert link("mesh", 2, 4, axis=0).bytes_per_s == pytest.approx(BYTES / 7)
    # the groups of all axes have disjoint links, and not more than there are
    assert sum(link("mesh", 2, 2, 2, axis=axis).bytes_per_s for axis in range(3)) <= BYTES


def test_a_ring_is_whole_halved_or_shared() -> None:
    whole = link("ring", 8)
    assert (whole.bytes_per_s, whole.hop_s) == (BYTES, HOP)
    assert link("ring", 2, 4, axis=1).bytes_per_s == BYTES / 2  # a line
    apart = link("ring", 4, 2, axis=0)  # every second one: two groups share every link
    assert (apart.bytes_per_s, apart.hop_s) == (BYTES / 2, 2 * HOP)


def crossings(k: int, closed: bool) -> float:
    """The busiest directed link's messages, where each of k members sends one to every other, by the shorter way."""
    load = dict.fromkeys([(i, step) for i in range(k) for step in (1, -1)], 0.0)
    for source in range(k):
        for target in range(k):
            ways = [(target - source) % k, -((source - target) % k)] if closed else [target - source]
            shortest = min(abs(way) for way in ways)
            best = [way for way in ways if abs(way) == shortest and way]
            for way in best:
                step = 1 if way > 0 else -1
                for i in range(abs(way)):
                    load[(source + i * step) % k, step] += 1 / len(best)
    return max(load.values())


@each("k", range(2, 10))
def test_an_exchange_on_a_ring_takes_what_its_busiest_link_takes(k: int) -> None:
    per_link = BYTES / 2  # both directions together are the device's bandwidth
    ring = link("ring", k)
    assert (k - 1) / ring.exchange_bytes_per_s == pytest.approx(crossings(k, closed=True) / per_link)
    line = link("mesh", k, dims=(k,))
    assert (k - 1) / line.exchange_bytes_per_s == pytest.approx(crossings(k, closed=False) / per_link)


def test_a_torus_adds_its_dimensions() -> None:
    torus = link("torus", 16, dims=(4, 4))
    assert (torus.dims, torus.grid, torus.bytes_per_s) == ((4, 4), True, BYTES)
    one = link("torus", 4, 4, axis=1, dims=(4, 4))
    other = link("torus", 4, 4, axis=0, dims=(4, 4))
    assert one == other
    assert (one.dims, one.bytes_per_s) == ((4,), BYTES / 2)
    assert link("torus", 8, 8, axis=0, dims=(4, 4, 4)).dims == (2, 4)
    assert link("mesh", 16, dims=(4, 4)).bytes_per_s == BYTES / 2


def test_a_ring_is_a_torus_of_one_dimension() -> None:
    for axis in (0, 1):
        ring, torus = link("ring", 4, 2, axis=axis), link("torus", 4, 2, axis=axis, dims=(8,))
        assert (ring.bytes_per_s, ring.exchange_bytes_per_s) == (torus.bytes_per_s, torus.exchange_bytes_per_s)


def test_two_ranks_meet_at_a_level() -> None:
    shape = levels(8, 4)
    assert between(3, 3, shape) is None
    inside, outside = between(0, 7, shape), between(7, 8, shape)
    assert inside
    assert outside
    assert (inside.name, outside.name) == ("level0", "level1")


@each(
    ("topology", "dims", "share"),
    [("switch", (), 1), ("mesh", (), 1 / 7), ("ring", (), 1 / 2), ("torus", (2, 4), 1 / 4), ("mesh", (2, 4), 1 / 4)],
)
def test_a_pair_has_its_own_link(topology: Topology, dims: tuple[int, ...], share: float) -> None:
    found = between(0, 1, (Level("links", 8, BYTES, HOP, "nvlink", topology, 1.0, dims),))
    assert found
    assert found.bytes_per_s == pytest.approx(BYTES * share)


# ------------------------------------------------------------------------------ leaves, rails and root complexes

KINDS: tuple[LinkKind, ...] = ("nvlink", "pcie")


def machines(topology: Topology, kind: LinkKind, ratio: float) -> tuple[Level, ...]:
    """16 nodes of 8 devices; the network carries a tenth of what a node does."""
    return Level("node", 8, 10 * BYTES, HOP, kind), Level("net", 16, BYTES, HOP, "network", topology, ratio)


def outermost(topology: Topology, kind: LinkKind, ratio: float, *mesh: int, axis: int = 0) -> Link:
    shape = machines(topology, kind, ratio)
    return links_of(group_of(mesh, axis, shape), shape)[-1]


meshes = st.sampled_from([(16, 8), (128,), (32, 4), (8, 2, 8), (10, 12), (4, 24), (3, 5, 8), (2, 64)])


@given(
    meshes, st.integers(0, 2), st.sampled_from(TOPOLOGIES), st.sampled_from(KINDS), st.floats(1, 16), st.floats(1, 4)
)
def test_no_topology_is_faster_than_a_switch_and_oversubscription_never_helps(
    mesh: tuple[int, ...], axis: int, topology: Topology, kind: LinkKind, ratio: float, more: float
) -> None:
    axis %= len(mesh)
    dims = (16,) if topology == "torus" else ()
    found: list[tuple[Link, ...]] = []
    for name, times in ((topology, ratio), (topology, ratio * more), ("switch", 1.0)):
        node, net = machines("switch", kind, times)
        shape = node, replace(net, topology=name, dims=dims if name == "torus" else ())
        found.append(links_of(group_of(mesh, axis, shape), shape))
    for ours, worse, switch in zip(*found, strict=True):
        for rate in ("bytes_per_s", "exchange_bytes_per_s"):
            assert getattr(worse, rate) <= getattr(ours, rate) <= getattr(switch, rate) * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rings_along_rails_do_not_pay_for_the_spine(kind: LinkKind) -> None:
    for mesh in ((16, 8), (128,), (32, 4)):
        assert outermost("rail", kind, 4.0, *mesh).bytes_per_s == BYTES
        assert outermost("fat-tree", kind, 4.0, *mesh).bytes_per_s == BYTES / 4
    for mesh in ((16, 8), (8, 2, 8)):  # the same device of every node: all pairs are on one rail
        assert outermost("rail", kind, 4.0, *mesh).exchange_bytes_per_s == BYTES


def test_what_changes_rails_goes_by_the_spine_or_by_nvlink() -> None:
    exchange = outermost("rail", "pcie", 4.0, 32, 4).exchange_bytes_per_s  # half of it: 2 members in each of 16 nodes
    assert exchange == pytest.approx(BYTES / (4 * 1 / 2))
    assert outermost("rail", "pcie", 4.0, 128).exchange_bytes_per_s == pytest.approx(BYTES / (4 * 7 / 8))
    assert outermost("rail", "pcie", 1.0, 128).exchange_bytes_per_s == BYTES
    assert outermost("rail", "nvlink", 4.0, 128).exchange_bytes_per_s == BYTES
    assert outermost("rail", "pcie", 4.0, 10, 12).bytes_per_s == BYTES / 4  # devices 0, 12, 24: on two rails
    assert outermost("rail", "nvlink", 4.0, 10, 12).bytes_per_s == BYTES


def test_the_nvlinks_of_a_node_carry_what_changes_rails_too() -> None:
    """NVLinks of half the network's rate: of 128 devices each sends 120 messages by the network and 112 by them."""
    node, net = machines("rail", "nvlink", 4.0)
    shape = replace(node, bandwidth_bytes_per_s=BYTES / 2), net
    inner, outer = links_of(group_of((128,), 0, shape), shape)
    assert 120 / outer.exchange_bytes_per_s == pytest.approx((7 + 105) / inner.exchange_bytes_per_s)


@pytest.mark.parametrize(("kind", "off_rail"), [("nvlink", 1), ("pcie", 4)])
def test_pairs_on_a_rail_and_off_it(kind: LinkKind, off_rail: int) -> None:
    shape = machines("rail", kind, 4.0)
    on, off = between(1, 9, shape), between(1, 10, shape)
    assert on
    assert off
    assert (on.bytes_per_s, off.bytes_per_s) == (BYTES, BYTES / off_rail)
    alone = between(0, 3, (shape[1],))
    assert alone
    assert alone.bytes_per_s == BYTES  # devices that are units themselves have one rail


def test_a_leaf_or_a_root_complex_is_a_level() -> None:
    """Only what leaves the leaf pays, and of a ring over it only one member's part does."""
    leaf = Level("leaf", 4, BYTES, HOP, "network", "fat-tree")
    spine = Level("spine", 2, BYTES, HOP, "network", "fat-tree", oversubscription=4)
    shape = leaf, spine
    (inside,) = links_of(group_of((2, 4), 1, shape), shape)
    (across,) = links_of(group_of((2, 4), 0, shape), shape)
    assert (inside.bytes_per_s, across.bytes_per_s) == (BYTES, BYTES / 4)
    whole = links_of(group_of((8,), 0, shape), shape)
    assert [x.inside * x.bytes_per_s for x in whole] == [BYTES, BYTES]
