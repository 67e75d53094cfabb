"""Clusters as they would be with other machines, links or devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cost.clusters.changes import Change, ChangeLike, changed, num_nodes
from shardwright.cost.clusters.cluster import Cluster, CollectiveLine
from shardwright.cost.compute.kernels import Kernel
from shardwright.pcg.errors import ClusterError
from tests.each import each
from tests.search.graphs import cluster

DGX = Cluster.preset("dgx-h100", nodes=2)


def after(given: Cluster, **changes: ChangeLike) -> Cluster:
    found = changed(given, {name: Change.of(name, value) for name, value in changes.items()})
    return replace(found, provenance=given.provenance)


def test_more_machines_of_a_preset_are_the_preset() -> None:
    """Also of one alone, whose network the preset knows."""
    assert after(DGX, nodes="2x") == after(DGX, nodes=4) == Cluster.preset("dgx-h100", nodes=4)
    assert after(DGX, nodes="0.5x") == Cluster.preset("dgx-h100", nodes=1)
    assert after(Cluster.preset("dgx-h100"), nodes=8) == Cluster.preset("dgx-h100", nodes=8)
    fewer = Cluster.preset("dgx-h100", 2, devices_per_node=4)
    sockets = Cluster.preset("l40s-box", nodes=2)
    assert after(sockets, nodes="2x") == Cluster.preset("l40s-box", nodes=4)
    assert after(fewer, nodes="2x") == Cluster.preset("dgx-h100", 4, devices_per_node=4)


def test_more_machines_of_another_cluster_are_more_of_the_outermost_level() -> None:
    named = replace(DGX, name="ours")
    assert after(named, nodes="3x").levels == (DGX.levels[0], DGX.levels[1].resized(6))
    assert after(cluster(4), nodes=6).num_devices == 6
    two = (replace(DGX.levels[0], kind="network"), *DGX.levels)
    assert after(replace(DGX, name="ours", levels=two), nodes="2x").levels == (*two[:2], two[2].resized(4))
    assert (num_nodes(DGX), num_nodes(cluster(4)), num_nodes(Cluster.preset("dgx-h100"))) == (2, 4, 1)


def test_links_between_machines_or_all_of_one() -> None:
    speeds = [level.bandwidth_bytes_per_s for level in DGX.levels]
    assert [x.bandwidth_bytes_per_s for x in after(DGX, bandwidth="0.5x").levels] == [speeds[0], speeds[1] / 2]
    one = Cluster.preset("dgx-h100")
    assert after(one, bandwidth="2x").levels[0].bandwidth_bytes_per_s == 2 * one.levels[0].bandwidth_bytes_per_s
    lines = (CollectiveLine("all_reduce", 4, 1e-5, 1e-9),)
    measured = after(replace(cluster(4), collectives=lines), bandwidth="2x").collectives[0]
    assert (measured.latency_s, measured.s_per_byte) == (1e-5, 0.5e-9)


def test_devices_of_all_kinds_of_a_mixed_cluster() -> None:
    mixed = Cluster.mixed([("dgx-h100", 1), ("dgx-a100", 1)])
    more = after(mixed, memory="2x", flops="3x", bandwidth="0.5x")
    assert [p.device.memory_bytes for p in more.parts] == [2 * p.device.memory_bytes for p in mixed.parts]
    assert more.device.flops_per_s["bf16"] == pytest.approx(3 * mixed.device.flops_per_s["bf16"])
    assert after(DGX, memory="80GB").device.memory_bytes == 80 * 10**9
    assert after(DGX, flops="2x").device.memory_bytes_per_s == DGX.device.memory_bytes_per_s


def test_the_provenance_says_that_it_is_no_cluster_that_there_is() -> None:
    given = {"nodes": Change.of("nodes", "2x"), "flops": Change.of("flops", "2x")}
    assert changed(DGX, given).provenance == f"{DGX.provenance}; changed: nodes=2x, flops=2x"
    assert changed(DGX, {}) is DGX


KERNEL = Kernel("matmul", (1, 8, 8, 8), 1.0, 1.0, "float32", seconds=1e-6)
MEASURED = replace(cluster(2), device=replace(cluster(2).device, kernels=(KERNEL,)))


@each(
    "given, changes, message",
    [
        (DGX, {"nodes": "twice"}, "nodes=twice: give a factor or a number, such as nodes=2x or nodes=16"),
        (DGX, {"nodes": "0x"}, "nodes=0x: give a factor or a number"),
        (DGX, {"memory": "80"}, "memory=80: give a factor or bytes, such as memory=2x or memory=80GB"),
        (DGX, {"nodes": "8GB"}, "nodes=8GB: give a factor or a number"),
        (DGX, {"bandwidth": 3}, "bandwidth=3: give a factor, such as bandwidth=2x"),
        (DGX, {"flops": "3GB"}, "flops=3GB: give a factor, such as flops=2x"),
        (replace(cluster(4), levels=2 * cluster(4).levels), {"nodes": 18}, "has 4 in each unit of 'rank'; give"),
        (DGX, {"nodes": "0.3x"}, "nodes=0.3x: of 2 that would be 0.6; give what makes a whole number"),
        (Cluster.mixed([("dgx-h100", 1), ("dgx-a100", 1)]), {"nodes": "2x"}, "has machines of several kinds, and"),
        (Cluster.local(2), {"nodes": "2x"}, "local-2 is one machine, and nothing says what would join it to others"),
        (MEASURED, {"flops": "2x"}, "flops=2x: the kernels of test were measured, and nothing says what"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed(given: Cluster, changes: dict[str, ChangeLike], message: str) -> None:
    with pytest.raises(ClusterError) as raised:
        after(given, **changes)
    assert message in str(raised.value)
