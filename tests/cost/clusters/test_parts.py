"""Clusters of several kinds of devices, joined clusters, and parts of clusters."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.clusters.cluster import Cluster, ClusterPart
from shardwright.cost.clusters.device import _LEAST, _MOST, Device, slowest_device
from shardwright.cost.clusters.presets import GPUS, gpu_device
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.errors import ClusterError
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import every_choice, mlp

H100, A100 = Cluster.preset("dgx-h100", nodes=4), Cluster.preset("dgx-a100-40", nodes=4)
MIXED = Cluster.mixed([("dgx-h100", 4), ("dgx-a100-40", 4)])
A100_64 = Cluster.preset("dgx-a100-40", nodes=8)
WAN = Level("wan", 2, 1e8, 20e-3)


def reached_flops_per_s(device: Device, dtype: str) -> float:
    return device.peak_flops_per_s(dtype) * device.matmul_efficiency


def test_mixed_machines() -> None:
    assert [(level.name, level.size) for level in MIXED.levels] == [("nvlink", 8), ("network", 8)]
    assert [part.num_devices for part in MIXED.parts] == [32, 32]
    assert MIXED.device.name == "H100-SXM + A100-40"
    assert MIXED.summary().startswith(
        "dgx-h100 + dgx-a100-40: 8 nvlink × 8 network, 32 H100-SXM (79 GiB) + 32 A100-40 (39 GiB), nccl; datasheet: "
    )


def test_work_on_all_ranks_has_the_slowest_rate_and_the_least_memory() -> None:
    assert MIXED.device.memory_bytes == A100.device.memory_bytes
    assert MIXED.device.memory_bytes_per_s == A100.device.memory_bytes_per_s
    for dtype in ("float32", "bfloat16", "float16", "tf32"):
        rates = [reached_flops_per_s(cluster.device, dtype) for cluster in (MIXED, H100, A100)]
        assert rates[0] == pytest.approx(min(rates[1:]))
        assert rates[0] < rates[1]


@each("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_collectives_over_all_ranks_have_the_slowest_links(collective: str) -> None:
    uniform = [Cluster.preset(name, nodes=8) for name in ("dgx-h100", "dgx-a100-40")]
    for mesh in ((64,), (8, 8)):
        for axis in range(len(mesh)):
            mixed, *alone = (
                Communication(cluster, mesh).time_s(collective, axis, 1e8)  # type: ignore[arg-type]
                for cluster in (MIXED, *uniform)
            )
            assert mixed >= max(alone) * (1 - 1e-9)


def test_plans_for_all_ranks_are_those_for_the_slower_kind() -> None:
    """An A100-40 is slower than an H100 in everything, and so are its links: plan for it, and for its memory."""
    made = [Planner(cluster, every_choice).plan(mlp(64, 4096, 16384)) for cluster in (MIXED, A100_64)]
    assert made[0].prediction.step_s == pytest.approx(made[1].prediction.step_s, rel=1e-3)
    assert str(made[0].mesh) == str(made[1].mesh)
    limits = [Planner(cluster, every_choice).limit_bytes for cluster in (MIXED, H100, A100)]
    assert limits[0] == limits[2] < limits[1]


# ---------------------------------------------------------------------------------------------------------- devices


@each("one", GPUS)
@each("other", GPUS)
def test_the_binding_device_is_never_faster(one: str, other: str) -> None:
    kinds = [gpu_device(one), gpu_device(other)]
    binding = slowest_device(kinds)
    assert binding == slowest_device(kinds) == slowest_device([binding])
    for dtype in ("float32", "bfloat16", "float16", "fp8"):
        slowest = min(reached_flops_per_s(device, dtype) for device in kinds)
        assert reached_flops_per_s(binding, dtype) == pytest.approx(slowest)
    for name in ("memory_bytes", "memory_bytes_per_s"):
        assert getattr(binding, name) == min(getattr(device, name) for device in kinds)
    assert free_bytes(binding) == min(map(free_bytes, kinds))


def free_bytes(device: Device) -> int:
    return device.memory_bytes - device.context_bytes


@pytest.mark.parametrize(
    ("kinds", "binding"),
    [
        (((80, 10), (40, 5)), (40, 5)),
        (((80, 50), (40, 0)), (40, 10)),  # more of the large device's context than the small device has memory
        (((80, 10), (80, 0)), (80, 10)),
    ],
)
def test_the_binding_context_leaves_what_the_fullest_device_has_free(
    kinds: Sequence[tuple[int, int]], binding: tuple[int, int]
) -> None:
    slow = gpu_device("T4")
    devices = [replace(slow, memory_bytes=memory, context_bytes=context) for memory, context in kinds]
    found = slowest_device(devices)
    assert (found.memory_bytes, found.context_bytes) == binding


def test_every_field_of_a_device_has_a_rule() -> None:
    """A new rate must say whether the least or the most of it binds."""
    made = {"name", "flops_per_s", "kind", "context_bytes"}
    alone = {
        "vector_flops_per_s",
        "num_units",
        "operators",
        "kernels",
        "paces",
        "first_uses",
    }  # of one kind only: left out
    assert {field.name for field in fields(Device)} <= made | alone | set(_LEAST) | set(_MOST)


def test_one_kind_of_device_is_itself() -> None:
    assert slowest_device([gpu_device("T4")] * 3) == gpu_device("T4")


def test_a_cpu_among_gpus() -> None:
    cpu = Device("cpu", 10**9, 1e10, {"fp32": 1e11}, 0.9, 3e-6, "cpu")
    assert slowest_device([gpu_device("T4"), cpu]).kind == "cpu"


# ------------------------------------------------------------------------------------------------------------- joins


def test_equal_clusters_make_a_cluster_of_one_kind() -> None:
    sites = Cluster.join([H100, H100], WAN, "two sites")
    assert sites.parts == ()
    assert sites.levels == (*H100.levels, WAN)
    assert sites.summary().startswith("two sites: 8 nvlink × 4 network × 2 wan, H100-SXM (79 GiB), nccl; datasheet")
    assert Cluster.join([sites, sites], WAN).levels == (*H100.levels, WAN, WAN)


def test_sites_of_different_kinds() -> None:
    sites = Cluster.join([H100, A100], WAN)
    assert [level.size for level in sites.levels] == [8, 4, 2]
    assert sites.part(range(32)).levels == H100.levels
    assert sites.part(range(32, 64)).device == A100.device
    assert sites.levels[1].bandwidth_bytes_per_s == A100.levels[1].bandwidth_bytes_per_s


def test_sites_of_different_sizes_are_joined_by_their_nodes() -> None:
    small = Cluster.preset("dgx-a100-40", nodes=2)
    sites = Cluster.join([H100, small], replace(WAN, size=6))
    assert [level.size for level in sites.levels] == [8, 6]
    assert sites.num_devices == 48
    problem = (
        r"^Cluster\.join: 'wan' joins 2 equal units, 48 devices do not make them \(dgx-h100: 8 × 4, "
        r"dgx-a100-40: 8 × 2\); give link\.size as the number of clusters where these are equal, else of their nodes"
    )
    with pytest.raises(ClusterError, match=problem):
        Cluster.join([H100, small], WAN)


def test_mixed_clusters_can_be_joined() -> None:
    both = Cluster.join([MIXED, MIXED], WAN)
    assert [part.num_devices for part in both.parts] == [32] * 4
    assert both.device == MIXED.device


@each(
    ("clusters", "problem"),
    [
        ([], r"expected at least two clusters, got 0; one needs no joining"),
        ([H100], r"expected at least two clusters, got 1"),
        ([H100, replace(H100, backend="gloo")], r"expected one backend, got gloo and nccl; they do not reach others"),
        ([H100, Cluster.preset("gh200-quad", nodes=4)], r"'wan' joins 2 equal units, 48 devices do not make them"),
        (
            [replace(H100, levels=tuple(replace(WAN, size=size) for size in sizes)) for sizes in ((2, 3), (3, 2))],
            r"units of 2 and of 3 devices do not nest, so no level joins both; give clusters whose levels join numbers",
        ),
    ],
)
def test_what_cannot_be_joined(clusters: list[Cluster], problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Cluster\.join: {problem}"):
        Cluster.join(clusters, WAN)


@each(
    ("machines", "problem"),
    [
        ([], r"^Cluster\.mixed: expected machines, got none; give pairs such as"),
        ([("dgx-h100", 4)], r"^Cluster\.join: expected at least two clusters, got 1"),
        ([("dgx-h100", 4), ("z100", 4)], r"^Cluster\.mixed: unknown machine 'z100'; choose one of dgx-1-v100, "),
        ([("dgx-h100", 4), ("dgx-a100", 0)], r"^Cluster\.mixed\.nodes: expected a positive integer, got 0"),
        ([("dgx-h100", 4), ("t4-box", 1, 5)], r"^Cluster\.mixed: 't4-box' has 4 devices per node, got 5; take more"),
    ],
)
def test_what_cannot_be_mixed(machines: list[tuple[str, int]], problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        Cluster.mixed(machines)


@each(
    ("machines", "sizes", "stages"),
    [
        ([("dgx-h100", 1), ("dgx-a100", 1, 4)], [4, 3], [(range(8), [8]), (range(8, 12), [4])]),
        ([("dgx-h100", 2), ("t4-box", 1)], [4, 5], [(range(16), [8, 2]), (range(16, 20), [4])]),
        ([("dgx-h100", 1), ("l40s-box", 1, 6)], [14], [(range(8), [8]), (range(8, 14), [3, 2])]),
        ([("dgx-h100", 1), ("a10-box", 1, 3)], [11], [(range(8), [8]), (range(8, 11), [3])]),
        ([("dgx-h100", 1), ("l40s-box", 1)], [4, 2, 2], [(range(8), [8]), (range(8, 16), [4, 2])]),
    ],
)
def test_nodes_of_unlike_sizes_join_in_units_that_divide_them(
    machines: list[Any], sizes: list[int], stages: list[tuple[range, list[int]]]
) -> None:
    mixed = Cluster.mixed(machines)
    assert [level.size for level in mixed.levels] == sizes
    for ranks, own in stages:
        assert [level.size for level in mixed.part(ranks).levels if level.size > 1] == own
    of_nodes = [Cluster.preset(name, count, *used) for name, count, *used in machines]
    if len({cluster.levels[0].size for cluster in of_nodes}) > 1:
        joined = Cluster.join(of_nodes, replace(mixed.levels[-1], name="wan"))
        assert (joined.num_devices, joined.device) == (mixed.num_devices, mixed.device)


# ------------------------------------------------------------------------------------------------------------- parts


def test_a_stage_on_one_kind_has_its_own_devices_and_links() -> None:
    assert MIXED.part(range(32)).levels == H100.levels
    assert MIXED.part(range(32)).device == H100.device
    assert MIXED.part(range(32, 64)).device == A100.device
    assert MIXED.part(range(32)).name == "dgx-h100 + dgx-a100-40[0:32]"
    assert MIXED.part(range(64)) is MIXED


def test_a_stage_across_kinds_is_mixed() -> None:
    across = MIXED.part(range(28, 36))
    assert across.device == MIXED.device
    assert [level.size for level in across.levels] == [4, 2]
    assert [part.device.name for part in across.parts] == ["H100-SXM", "A100-40"]


@given(st.data())
def test_every_part_has_its_ranks_and_no_faster_links(data: st.DataObject) -> None:
    cluster = data.draw(st.sampled_from([H100, MIXED, Cluster.preset("superpod-h100", 64), Cluster.preset("t4-box")]))
    start = data.draw(st.integers(0, cluster.num_devices - 1))
    ranks = range(start, data.draw(st.integers(start + 1, cluster.num_devices)))
    part = cluster.part(ranks)
    assert part.num_devices == len(ranks)
    assert prod(level.size for level in part.levels) == len(ranks)
    assert Cluster.from_json(json.loads(json.dumps(part.to_json()))) == part
    if not cluster.parts:
        known = {level.name: level.bandwidth_bytes_per_s for level in cluster.levels}
        assert all(level.bandwidth_bytes_per_s <= known[level.name] for level in part.levels)
    inside = data.draw(st.integers(0, len(ranks) - 1))
    assert cluster.part(range(start + inside, start + inside + 1)).device == part.part(range(inside, inside + 1)).device


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (range(3, 3), r"a part needs ranks of it, got no ranks; give consecutive ranks from 0 to 31"),
        (range(-1, 4), r"a part needs ranks of it, got range\(-1, 4\); give"),
        (range(28, 33), r"a part needs ranks of it, got range\(28, 33\); give"),
        (range(0, 8, 2), r"a part needs ranks of it, got range\(0, 8, 2\); give consecutive ranks"),
    ],
)
def test_parts_that_are_none(ranks: range, problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^cluster 'dgx-h100': {problem}"):
        H100.part(ranks)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"levels": MIXED.levels[:1]},
            r"parts: expected 8 devices, as the levels join, got 32 \+ 32 = 64; devices that no level joins are disc",
        ),
        (
            {"device": H100.device},
            r"device: expected the slowest of the parts' devices, got 'H100-SXM'; use Cluster\.mi",
        ),
        ({"parts": (H100,)}, r"parts: expected a tuple of ClusterPart, got "),
    ],
)
def test_contradictory_parts(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Cluster\.{problem}"):
        replace(MIXED, **change)


def test_parts_are_checked() -> None:
    with pytest.raises(
        ClusterError, match=r"^ClusterPart\.levels: expected at least one level, got none; give the innermost"
    ):
        ClusterPart(H100.device, ())
    with pytest.raises(ClusterError, match=r"^ClusterPart\.device: expected a Device, got 'h100'; construct one"):
        ClusterPart("h100", H100.levels)  # type: ignore[arg-type]


def test_units_of_equal_size_may_be_joined_whatever_joins_their_devices() -> None:
    """8 GPUs on one switch beside 4 under each of two processors: 2 times 4 of both, at the slower's pace."""
    mixed = Cluster.mixed([("dgx-h100", 1), ("l40s-box", 1)])
    box = Cluster.preset("l40s-box")
    assert [level.size for level in mixed.levels] == [4, 2, 2]
    assert mixed.levels[:2] == box.levels
    assert mixed.part(range(8)).levels == Cluster.preset("dgx-h100").levels
