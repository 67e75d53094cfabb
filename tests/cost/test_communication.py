"""Collectives: which links a group uses, and what the α-β lines promise."""

import csv
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.cluster import COLLECTIVES, Cluster, CollectiveLine, Level
from shardwright.cost.communication import BASE_LATENCY_S, Communication, Line
from shardwright.cost.device import Device
from shardwright.pcg.errors import ClusterError

DEVICE = Device("gpu", 10**9, 1e12, {"fp32": 1e12}, 0.8, 0, "cuda")
INSIDE, OUTSIDE = 1e-6, 1e-5  # latencies
FAST, SLOW = 1e11, 1e10  # bandwidths
BASE = BASE_LATENCY_S["nccl"]


def machine(*sizes: int) -> Cluster:
    """Nodes of `sizes[0]`, pods of `sizes[1]` nodes, and so on."""
    levels = tuple(Level(f"level{i}", size, FAST / 10**i, INSIDE * 10**i) for i, size in enumerate(sizes))
    return Cluster("toy", DEVICE, levels, "nccl", "test")


def splits(cluster: Cluster, *mesh: int) -> list[tuple[int, ...]]:
    return [group.splits for group in Communication(cluster, mesh).groups]


# ------------------------------------------------------------------------------------------------ which links are used


def test_the_last_axis_is_innermost() -> None:
    assert splits(machine(8, 4), 4, 8) == [(1, 4), (8, 1)]
    assert splits(machine(8, 4), 8, 4) == [(2, 4), (4, 1)]
    assert splits(machine(8, 4), 2, 16) == [(1, 2), (8, 2)]
    assert splits(machine(8, 4), 2, 2, 8) == [(1, 2), (1, 2), (8, 1)]
    assert splits(machine(8, 4), 32) == [(8, 4)]
    assert splits(machine(4, 2, 2), 2, 8) == [(1, 1, 2), (4, 2, 1)]
    assert splits(machine(4, 2, 2), 16) == [(4, 2, 2)]
    assert [group.stride for group in Communication(machine(8, 4), (2, 2, 8)).groups] == [16, 8, 1]


def test_a_mesh_may_leave_devices_idle() -> None:
    assert splits(machine(8, 4), 2, 4) == [(2, 1), (4, 1)]
    assert splits(machine(8, 4), 1) == [(1, 1)]
    assert splits(machine(8, 4)) == []


def test_uneven_groups_count_as_leaving_the_node() -> None:
    assert splits(machine(8, 4), 4, 6) == [(1, 4), (1, 6)]  # ranks 6…11 lie on two nodes
    assert splits(machine(8, 4), 6) == [(6, 1)]
    assert splits(machine(8, 4), 12) == [(1, 12)]  # 8 here, 4 there
    assert splits(machine(6, 2), 4, 3) == [(2, 2), (3, 1)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_splits_multiply_to_the_size(sizes: list[int], mesh: list[int]) -> None:
    cluster = machine(*sizes)
    if prod(mesh) > cluster.num_devices:
        with pytest.raises(ClusterError, match=r"needs .* devices"):
            Communication(cluster, mesh)
        return
    for size, group in zip(mesh, Communication(cluster, mesh).groups, strict=True):
        assert prod(group.splits) == group.size == size


# ------------------------------------------------------------------------------------------------------------- formulas


def test_inside_a_node() -> None:
    inside = Communication(machine(8, 4), (4, 8))
    ring = Line(BASE + 7 * INSIDE, 7 / 8 / FAST)
    assert inside.all_gather_s(1, 1e9) == pytest.approx(ring.time_s(1e9))
    assert inside.reduce_scatter_s(1, 1e9) == pytest.approx(ring.time_s(1e9))
    assert inside.all_reduce_s(1, 1e9) == pytest.approx(BASE + 2 * (ring.time_s(1e9) - BASE))
    assert inside.all_to_all_s(1, 1e9) == pytest.approx(BASE + 7 * INSIDE + 7 / 64 * 1e9 / FAST)
    assert inside.broadcast_s(1, 1e9) == pytest.approx(BASE + 7 * INSIDE + 1e9 / FAST)


def test_across_nodes_alone() -> None:
    across = Communication(machine(8, 4), (4, 8))
    assert across.all_gather_s(0, 1e9) == pytest.approx(BASE + 2 * OUTSIDE + 3 / 4 * 1e9 / SLOW)
    assert across.all_reduce_s(0, 1e9) == pytest.approx(BASE + 4 * OUTSIDE + 6 / 4 * 1e9 / SLOW)


def test_within_and_across_nodes() -> None:
    both = Communication(machine(8, 4), (32,))
    ring_hops_s = 28 * INSIDE + 3 * OUTSIDE
    by_level = Line(BASE + 7 * INSIDE + 2 * OUTSIDE, 7 / 8 / FAST + 3 / 4 / 8 / SLOW)
    ring = Line(BASE + ring_hops_s, 31 / 32 / min(FAST, 8 * SLOW))
    assert both.lines("all_gather", 0) == (pytest.approx(ring), pytest.approx(by_level))
    assert both.all_gather_s(0, 1e9) == pytest.approx(min(ring.time_s(1e9), by_level.time_s(1e9)))
    exchange_s = BASE + 7 * INSIDE + 24 * OUTSIDE + 24 / 32**2 * 1e9 / SLOW
    assert both.all_to_all_s(0, 1e9) == pytest.approx(exchange_s)


def test_the_published_8_gpu_times_are_met_roughly() -> None:
    """Azure/msccl@050b4a1 README, ND H100 v5, NCCL; only NVLink's share is fitted to it."""
    table = """KiB,all_reduce,all_gather
        64,20,12.87
        1024,31.94,18.33
        16384,116,67.19
        65536,317.4,192.4
        262144,1079,699.5"""
    one = Communication(Cluster.preset("dgx-h100"), (8,))
    for row in csv.DictReader(line.strip() for line in table.splitlines()):
        num_bytes = 1024 * float(row["KiB"])
        assert one.all_reduce_s(0, num_bytes) * 1e6 == pytest.approx(float(row["all_reduce"]), rel=0.3)
        assert one.all_gather_s(0, num_bytes) * 1e6 == pytest.approx(float(row["all_gather"]), rel=0.25)


# ----------------------------------------------------------------------------------------------------------- properties

CLUSTERS = [
    machine(8, 4),
    machine(4, 2, 4),
    machine(6, 4),
    Cluster.preset("dgx-h100", nodes=4),
    replace(machine(32), backend="gloo"),
    Cluster(
        "measured",
        DEVICE,
        (Level("rank", 32, 1e9, 1e-4),),
        "gloo",
        "test",
        (
            CollectiveLine("all_reduce", 2, 4e-4, 0.8e-9),
            CollectiveLine("all_gather", 2, 2e-4, 0.6e-9),
            CollectiveLine("reduce_scatter", 4, 5e-4, 1.1e-9),
            CollectiveLine("all_to_all", 2, 2e-4, 0.2e-9),
            CollectiveLine("broadcast", 2, 2e-4, 0.3e-9),
        ),
    ),
]
MESHES = [(2,), (24,), (2, 3), (3, 4), (4, 6), (2, 2, 6), (1, 8), (8, 1, 2)]
sizes = st.floats(0, 1e12)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@given(a=sizes, b=sizes)
def test_more_bytes_take_longer(cluster: Cluster, mesh: tuple[int, ...], a: float, b: float) -> None:
    model = Communication(cluster, mesh)
    for axis, size in enumerate(mesh):
        for collective in COLLECTIVES:
            fewer, more = (model.time_s(collective, axis, x) for x in sorted([a, b]))
            assert (0 < fewer <= more) if size > 1 else (fewer == more == 0)


@pytest.mark.parametrize("cluster", CLUSTERS[:-1], ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@given(num_bytes=sizes)
def test_order_of_the_collectives(cluster: Cluster, mesh: tuple[int, ...], num_bytes: float) -> None:
    model = Communication(cluster, mesh)
    for axis in range(len(mesh)):
        all_reduce, all_gather = model.all_reduce_s(axis, num_bytes), model.all_gather_s(axis, num_bytes)
        assert all_gather <= all_reduce * (1 + 1e-12)
        assert all_reduce <= all_gather + model.reduce_scatter_s(axis, num_bytes)
        assert model.reduce_scatter_s(axis, num_bytes) == all_gather
        assert model.broadcast_s(axis, num_bytes) <= all_reduce * (1 + 1e-12)


def test_leaving_the_node_takes_longer() -> None:
    model = Communication(machine(8, 8), (8, 8))
    for collective in COLLECTIVES:
        assert model.time_s(collective, 0, 1e9) > model.time_s(collective, 1, 1e9)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda cluster: cluster.name)
def test_arrays_are_costed_at_once(cluster: Cluster) -> None:
    model = Communication(cluster, (3, 8))
    num_bytes = np.array([[0, 1e3, 1e5], [1e7, 1e9, 1e11]])
    for collective in COLLECTIVES:
        times = model.time_s(collective, 1, num_bytes)
        assert times.shape == (2, 3)
        assert times.tolist() == [[model.time_s(collective, 1, x) for x in row] for row in num_bytes.tolist()]


def test_an_axis_of_one_device_costs_nothing() -> None:
    model = Communication(machine(8), (1, 8))
    assert model.all_reduce_s(0, 1e9) == 0
    assert model.all_reduce_s(0, np.array([1e9, 2e9])).tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------------ measured lines


def test_measured_lines_are_used_as_they_are() -> None:
    model = Communication(CLUSTERS[-1], (2, 2, 8))
    assert model.lines("all_reduce", 0) == model.lines("all_reduce", 1) == (Line(4e-4, 0.8e-9),)


def test_other_group_sizes_are_scaled_from_the_nearest() -> None:
    model = Communication(CLUSTERS[-1], (2, 8))
    assert model.lines("all_reduce", 1) == (pytest.approx(Line(7 * 4e-4, 7 / 4 * 0.8e-9)),)
    assert model.lines("reduce_scatter", 1) == (pytest.approx(Line(7 / 3 * 5e-4, 7 / 6 * 1.1e-9)),)
    assert model.lines("reduce_scatter", 0) == (pytest.approx(Line(1 / 3 * 5e-4, 2 / 3 * 1.1e-9)),)
    assert model.lines("all_to_all", 1) == (pytest.approx(Line(7 * 2e-4, 7 / 16 * 0.2e-9)),)
    assert model.lines("broadcast", 1) == (pytest.approx(Line(3 * 2e-4, 0.3e-9)),)


def test_what_was_not_measured_is_modelled() -> None:
    only_reduce = replace(CLUSTERS[-1], collectives=CLUSTERS[-1].collectives[:1])
    modelled = replace(CLUSTERS[-1], collectives=())
    assert Communication(only_reduce, (4,)).lines("all_gather", 0) == Communication(modelled, (4,)).lines(
        "all_gather", 0
    )


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ((4, 16), r"mesh \[4, 16\] needs 64 devices, cluster 'toy' has 32; choose sizes whose product is at most 32"),
        ((4, 0), r"mesh \[4, 0\]: axis 1: expected a positive integer, got 0; give the number of devices along it"),
        ((True,), r"mesh \[True\]: axis 0: expected a positive integer, got True"),
        ((2.0,), r"mesh \[2\.0\]: axis 0: expected a positive integer, got 2\.0"),
    ],
)
def test_bad_meshes(mesh: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ClusterError, match=f"^{problem}"):
        Communication(machine(8, 4), mesh)


@pytest.mark.parametrize("axis", [-1, 2])
def test_bad_axes(axis: int) -> None:
    with pytest.raises(ClusterError, match=rf"^mesh \[4, 8\] has no axis {axis}; choose 0 to 1"):
        Communication(machine(8, 4), (4, 8)).all_reduce_s(axis, 1.0)
