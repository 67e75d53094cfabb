"""Collectives along the axes of meshes: whose time it is, what it promises, and that it is quick to ask."""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tuning import Tuning
from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, Collective, CollectiveLine, Level
from shardwright.cost.clusters.device import Device
from shardwright.cost.collectives import algorithms, gloo, nccl
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.curve import CostLine
from shardwright.cost.collectives.groups import links_of
from shardwright.pcg.errors import ClusterError
from tests.cost.formulas import text_of
from tests.each import each

DEVICE = Device("H100-SXM", 10**9, 1e12, {"fp32": 1e12}, 0.8, 0, "cuda")
FAST, SLOW = 1e11, 1e10


def machine(*sizes: int) -> Cluster:
    """Nodes of `sizes[0]`, pods of `sizes[1]` nodes, and so on."""
    levels = tuple(
        Level(f"level{i}", size, FAST / 10**i, 1e-6 * 10**i, "network" if i else "nvlink")
        for i, size in enumerate(sizes)
    )
    return Cluster("toy", DEVICE, levels, "nccl", "test")


def torus(*dims: int) -> Cluster:
    return Cluster("torus", DEVICE, (Level("ici", prod(dims), FAST, 1e-6, "network", "torus", 1.0, dims),), "nccl", "x")


MEASURED = (
    CollectiveLine("all_reduce", 2, 4e-4, 0.8e-9),
    CollectiveLine("all_gather", 2, 2e-4, 0.6e-9),
    CollectiveLine("reduce_scatter", 4, 5e-4, 1.1e-9),
    CollectiveLine("all_to_all", 2, 2e-4, 0.2e-9),
    CollectiveLine("broadcast", 2, 2e-4, 0.3e-9),
)
LOCAL = Cluster("measured", DEVICE, (Level("rank", 32, 1e9, 1e-4, "host"),), "gloo", "test", MEASURED)
CLUSTERS = [
    machine(8, 4),
    machine(4, 2, 4),
    machine(6, 4),
    Cluster.preset("dgx-h100", nodes=4),
    Cluster.preset("dgx-1-v100", nodes=4),
    Cluster.preset("mi300x-box", nodes=4),
    torus(4, 8),
    torus(2, 4, 4),
    replace(LOCAL, name="gloo", collectives=()),
    LOCAL,
]
MESHES = [(2,), (24,), (32,), (2, 3), (3, 4), (4, 6), (2, 2, 6), (1, 8), (8, 1, 2)]
sizes = st.floats(0, 1e12)
CASES = [(cluster, mesh) for cluster in CLUSTERS for mesh in MESHES if prod(mesh) <= cluster.num_devices]
each_case = each(("cluster", "mesh"), CASES, ids=[f"{cluster.name}{mesh}" for cluster, mesh in CASES])
each_cluster = each("cluster", CLUSTERS, ids=lambda cluster: cluster.name)


# ------------------------------------------------------------------------------------------------------------ promises


@each_case
@given(a=sizes, b=sizes)
@settings(max_examples=25)
def test_more_bytes_take_longer(cluster: Cluster, mesh: tuple[int, ...], a: float, b: float) -> None:
    model = Communication(cluster, mesh)
    for axis, size in enumerate(mesh):
        for collective in COLLECTIVES:
            fewer, more = (model.time_s(collective, axis, x) for x in sorted([a, b]))
            assert (0 < fewer <= more * (1 + 1e-9)) if size > 1 else (fewer == more == 0)


@each_case
def test_no_collective_beats_the_links(cluster: Cluster, mesh: tuple[int, ...]) -> None:
    """What a device must send of the tensor passes over what its group has of the narrowest level."""
    if cluster.collectives:
        return
    model = Communication(cluster, mesh)
    for axis, n in enumerate(mesh):
        for collective in COLLECTIVES if n > 1 else ():
            each = max(x.bytes_per_s * x.inside for x in model.links(axis))
            share = (n - 1) / n**2 if collective == "all_to_all" else (n - 1) / n
            for num_bytes in (1.0, 1e6, 1e12):
                assert model.time_s(collective, axis, num_bytes) >= share * num_bytes / each


@each_case
def test_order_of_the_collectives(cluster: Cluster, mesh: tuple[int, ...]) -> None:
    """An all-reduce takes no longer than its halves, but for the selector's slack."""
    if cluster.collectives or cluster.backend == "gloo":  # gloo's reduce-scatter is an all-reduce
        return
    model = Communication(cluster, mesh)
    for axis, num_bytes in product(range(len(mesh)), np.logspace(0, 12, 500).tolist()):
        half = model.time_s("all_gather", axis, num_bytes)
        assert model.time_s("reduce_scatter", axis, num_bytes) == half
        assert model.time_s("all_reduce", axis, num_bytes) <= 1.5 * 2 * half


def test_leaving_the_node_takes_longer() -> None:
    model = Communication(machine(8, 8), (8, 8))
    for collective in COLLECTIVES:
        assert model.time_s(collective, 0, 1e9) > model.time_s(collective, 1, 1e9)


@each("collective", COLLECTIVES)
def test_groups_that_are_alike_cost_alike(collective: Collective) -> None:
    """Axes can change places, and more devices elsewhere change nothing."""
    one = machine(8)
    meshes = [((2, 4), 0), ((4, 2), 1), ((1, 2), 1), ((2, 2, 2), 1), ((2,), 0)]
    assert len({Communication(one, mesh).time_s(collective, axis, 1e7) for mesh, axis in meshes}) == 1
    small, large = Communication(machine(8, 4), (4, 8)), Communication(machine(8, 2048), (2048, 8))
    assert small.time_s(collective, 1, 1e7) == large.time_s(collective, 1, 1e7)
    assert small.curve(collective, 1) is large.curve(collective, 1)


def test_a_torus_is_equal_in_its_dimensions() -> None:
    model = Communication(torus(4, 4), (4, 4))
    for collective in COLLECTIVES:
        assert model.time_s(collective, 0, 1e8) == model.time_s(collective, 1, 1e8)


def test_what_is_cached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 16,384 devices too: a curve is made for the first question alone."""
    made: list[object] = []
    real = nccl.curve
    monkeypatch.setattr(nccl, "curve", lambda *arguments: made.append(arguments) or real(*arguments))
    model = Communication(Cluster.preset("dgx-h100", nodes=2048), (16, 128, 8))
    for num_bytes in (1.0, 1e3, 1e9):
        model.time_s("all_reduce", 1, num_bytes)
    assert len(made) == 1


# ----------------------------------------------------------------------------------------------------- whose time it is


def test_the_backend_chooses() -> None:
    links = links_of(Communication(machine(8), (8,)).groups[0], machine(8).levels)
    assert Communication(machine(8), (8,)).curve("all_reduce", 0) == nccl.curve("all_reduce", links, nccl.HOPPER)
    local = replace(LOCAL, collectives=())
    links = links_of(Communication(local, (8,)).groups[0], local.levels)
    assert Communication(local, (8,)).curve("all_reduce", 0) == gloo.curve("all_reduce", links)


def test_on_a_torus_the_least_counts() -> None:
    model = Communication(torus(4, 8), (32,))
    assert model.curve("all_reduce", 0).at(1.0).name in ("tree", "halving-doubling")
    assert model.curve("all_reduce", 0).at(1e10).name in ("hierarchical", "halving-doubling", "ring")


def test_tuning_goes_to_nccl() -> None:
    plain, tuned = (Communication(machine(8), (8,), t.factors) for t in (Tuning(), Tuning((("", 2.0),), (("", 2.0),))))
    assert tuned.time_s("all_reduce", 0, 1e9) == pytest.approx(2 * plain.time_s("all_reduce", 0, 1e9))


def formula(model: Communication, collective: Collective, axis: int, num_bytes: float, size: str = "S") -> str:
    """What runs at `num_bytes`, and its cost as text in the bytes `size`; protocols scale α and B."""
    links, name = model.links(axis), model.curve(collective, axis).at(num_bytes).name
    if not links:
        return "nothing: one device"
    forms = [form for form in algorithms.candidates(collective, links) if name.startswith(form.name)]
    return f"{name}: {text_of(max(forms, key=lambda form: len(form.name)), size)}" if forms else name


def test_formulas() -> None:
    both = Communication(Cluster.preset("dgx-h100", nodes=2), (2, 8))
    assert formula(both, "all_reduce", 1, 1e9, "b·s·h·2") == "nvls: 1·α(nvlink) + 9/8·b·s·h·2/B(nvlink)"
    assert formula(both, "all_gather", 1, 10.0) == "ring LL, opening: 7·α(nvlink) + 7/8·S/B(nvlink)"
    assert formula(both, "broadcast", 0, 1.0) == "chain LL, opening: 1·α(network) + 1·S/B(network)"
    assert formula(both, "all_to_all", 1, 1.0) == "direct exchange: 7·α(nvlink) + 7/64·S/B(nvlink)"
    assert formula(Communication(machine(8), (1, 8)), "all_reduce", 0, 1.0) == "nothing: one device"
    assert formula(Communication(LOCAL, (2,)), "all_reduce", 0, 1.0) == "measured"
    whole = Communication(Cluster.preset("dgx-b200", nodes=2), (16,))
    assert formula(whole, "all_reduce", 0, 3e7) == (
        "nvls tree: 1·α(nvlink) + 2·α(network) + max(9/8·S/B(nvlink), 1/4·S/B(network))"
    )


@each_cluster
@each("collective", COLLECTIVES)
def test_everything_that_is_chosen_has_a_formula(cluster: Cluster, collective: Collective) -> None:
    model = Communication(cluster, (24,))
    for piece in model.curve(collective, 0).pieces:
        text = formula(model, collective, 0, piece.start_bytes)
        assert text.startswith(piece.name)
        assert cluster.collectives or "S/B(" in text


# ------------------------------------------------------------------------------------------------------ measured lines


@lru_cache
def measured(size: int) -> Communication:
    return Communication(LOCAL, (32 // size, size))


def test_measured_lines_take_the_models_place() -> None:
    assert measured(2).time_s("all_reduce", 1, 1e6) == pytest.approx(CostLine(4e-4, 0.8e-9).time_s(1e6))
    eight = {c: measured(8).curve(c, 1).pieces[0].line for c in COLLECTIVES}
    assert eight["all_reduce"] == pytest.approx(CostLine(7 * 4e-4, 7 / 4 * 0.8e-9))
    assert eight["reduce_scatter"] == pytest.approx(CostLine(7 / 3 * 5e-4, 7 / 6 * 1.1e-9))
    assert eight["all_to_all"] == pytest.approx(CostLine(7 * 2e-4, 7 / 16 * 0.2e-9))
    assert eight["broadcast"] == pytest.approx(CostLine(3 * 2e-4, 3 * 0.3e-9))  # gloo: rounds of the whole tensor
    assert measured(2).curve("reduce_scatter", 1).pieces[0].line == pytest.approx(CostLine(5e-4 / 3, 2 / 3 * 1.1e-9))


def test_the_rest_is_modelled() -> None:
    only_reduce, modelled = replace(LOCAL, collectives=MEASURED[:1]), replace(LOCAL, collectives=())
    gathers = [Communication(cluster, (4,)).curve("all_gather", 0) for cluster in (only_reduce, modelled)]
    assert gathers[0] == gathers[1]


def test_of_several_lines_the_greatest_counts() -> None:
    pieces = (CollectiveLine("all_reduce", 2, 4e-4, 1e-18), CollectiveLine("all_reduce", 2, 1e-4, 1e-9))
    model = Communication(replace(LOCAL, collectives=pieces), (2,))
    assert model.time_s("all_reduce", 0, 1e3) == pytest.approx(4e-4)
    assert model.time_s("all_reduce", 0, 1e9) == pytest.approx(1 + 1e-4)


# -------------------------------------------------------------------------------------------------------------- sending


def test_a_permutation_takes_the_slowest_link_of_its_ring() -> None:
    """Inside of a machine, across machines, and of one device alone."""
    model = Communication(machine(8, 4), (4, 8, 1))
    assert model.permute_s(1, 1e9) == pytest.approx(model.send_s(0, 1, 1e9))
    assert model.permute_s(0, 1e9) == pytest.approx(model.send_s(7, 8, 1e9))
    assert Communication(machine(8, 4), (32,)).permute_s(0, 1e9) == pytest.approx(model.send_s(7, 8, 1e9))
    assert model.permute_s(2, 1e9) == 0
    with pytest.raises(ClusterError, match="num_bytes: expected a finite number"):
        model.permute_s(0, -1.0)


def test_sending_takes_the_level_where_two_ranks_meet() -> None:
    model = Communication(machine(8, 4), (4, 8))
    assert model.send_s(3, 3, 1e9) == 0
    assert model.send_s(0, 7, 1e9) == pytest.approx(8.4e-6 + 1e-6 + 1e9 / FAST)
    assert model.send_s(7, 8, 1e9) == pytest.approx(8.4e-6 + 1e-5 + 1e9 / SLOW)
    local = Communication(LOCAL, (2,))
    assert local.send_s(0, 1, 1e6) == pytest.approx(gloo.SEND_S + 1e6 * 0.3e-9)  # as of a measured broadcast
    one = replace(LOCAL, collectives=MEASURED[:1])
    assert Communication(one, (2,)).send_s(0, 1, 1e6) == pytest.approx(gloo.SEND_S + 1e6 / 1e9)
    apart = Communication(replace(one, levels=tuple(replace(own, kind="network") for own in LOCAL.levels)), (2,))
    assert apart.send_s(0, 1, 0.0) == pytest.approx(gloo.SEND_S + 1e-4)
    measured = Communication(replace(apart.cluster, collectives=LOCAL.collectives), (2,))
    assert measured.send_s(0, 1, 1e6) == pytest.approx(gloo.SEND_S + 1e-4 + 1e6 * 0.3e-9)  # between machines, a hop too


# ------------------------------------------------------------------------------------------------------------ bad input


@each("axis", [-1, 2, 100])
def test_axes_that_are_none(axis: int) -> None:
    with pytest.raises(ClusterError, match=rf"mesh \[4, 8\] has no axis {axis}; choose 0 to 1"):
        Communication(machine(8, 4), (4, 8)).time_s("all_reduce", axis, 1.0)


def test_a_mesh_without_axes() -> None:
    with pytest.raises(ClusterError, match=r"^mesh \[\] has no axis 0; it has no axes: one device communicates with"):
        Communication(machine(8, 4), ()).time_s("all_reduce", 0, 1.0)


@each("num_bytes", [-1.0, float("nan"), float("inf")])
def test_bytes_that_are_none(num_bytes: float) -> None:
    for model in (Communication(machine(8, 4), (8, 4)), Communication(LOCAL, (2, 1))):
        times = [partial(model.time_s, collective, axis) for collective in COLLECTIVES for axis in range(2)]
        for time_s in (*times, partial(model.send_s, 0, 1), partial(model.send_s, 0, 0)):
            with pytest.raises(ClusterError, match=r"^num_bytes: expected a finite number of at least 0, got .*; give"):
                time_s(num_bytes)


def test_meshes_that_do_not_fit() -> None:
    with pytest.raises(ClusterError, match=r"mesh \[5, 8\] needs 40 devices, cluster 'toy' has 32; choose sizes"):
        Communication(machine(8, 4), (5, 8))


def test_collectives_that_are_none() -> None:
    with pytest.raises(ClusterError, match=r"unknown collective 'scatter'; choose one of all_reduce, all_gather"):
        Communication(machine(8), (8,)).time_s("scatter", 0, 1.0)  # type: ignore[arg-type]


@each("rank", [-1, 32])
def test_ranks_that_are_none(rank: int) -> None:
    with pytest.raises(ClusterError, match=rf"cluster 'toy' has no rank {rank}; choose 0 to 31"):
        Communication(machine(8, 4), (4, 8)).send_s(0, rank, 1.0)
