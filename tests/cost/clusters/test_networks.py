"""Networks link by link: machines as published, shapes by their counts, clusters by their levels."""

from fractions import Fraction
from math import prod

import numpy as np
import pytest

from shardwright.cost.clusters.networks import DGX1_NVLINKS, GB, MI250_XGMI, PRESETS, preset_topology
from shardwright.cost.clusters.presets import PRESETS as MACHINES
from shardwright.cost.clusters.presets import preset_cluster
from shardwright.cost.clusters.shapes import dragonfly, fat_tree, grid, of_cluster, ring
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.errors import ClusterError
from tests.each import each


def rates_into(topology: Topology, node: int) -> Fraction:
    return sum((topology.by_edge[src, node].rate_bytes_per_s for src in topology.predecessors[node]), Fraction(0))


def all_gather_bound(topology: Topology) -> float:
    """The least over cuts between ranks of what leaves a side, over that side's share; no relays."""
    n = topology.num_ranks
    inside = (np.arange(1, 2**n - 1)[:, None] >> np.arange(n)) & 1
    cut = sum(inside[:, e.src] * (1 - inside[:, e.dst]) * float(e.rate_bytes_per_s) for e in topology.links)
    return float(np.min(cut * n / inside.sum(1)))


@each("name", PRESETS)
def test_every_preset_is_a_network(name: str) -> None:
    assert preset_topology(name).num_ranks >= 2


def test_six_nvlinks_for_each_gpu_of_a_dgx1() -> None:
    dgx1 = preset_topology("dgx1")
    assert dgx1.unit_rate == 25 * GB
    assert {dgx1.multiplicity(link) for link in dgx1.links} == {1, 2}
    assert {rates_into(dgx1, rank) for rank in range(8)} == {150 * GB}
    # two hops reach everyone: SCCL's least number of steps
    assert all({b for a in dgx1.successors[rank] for b in dgx1.successors[a]} | {*dgx1.successors[rank]} == {*range(8)}
               for rank in range(8))  # fmt: skip
    assert all_gather_bound(dgx1) / (25 * GB) == pytest.approx(8 * 6 / 7)  # seven rounds for six chunks
    sockets = sum(many for (a, b), many in DGX1_NVLINKS.items() if a < 4 <= b)
    assert Fraction(16, sockets) == Fraction(8, 3)  # an all-to-all's rounds for each chunk of a pair


def test_seven_xgmi_links_for_each_die_of_an_mi250() -> None:
    mi250 = preset_topology("mi250")
    assert {rates_into(mi250, die) for die in range(16)} == {350 * GB}
    assert len(MI250_XGMI) == 28
    assert all_gather_bound(mi250) / GB == pytest.approx(342.857, rel=1e-5)  # ForestColl's optimum


def test_a_ring_of_eight_is_the_bound_of_the_z52() -> None:
    z52 = preset_topology("amd-z52")
    assert all_gather_bound(z52) / float(z52.unit_rate) == pytest.approx(8 / 3.5)


def test_nics_are_shared() -> None:
    ndv2 = preset_topology("ndv2:2")
    (out,) = (one for one in ndv2.resources if one.name == "NIC of rank 8 out")
    assert out.edges == {(rank, 16) for rank in range(8, 16)}
    assert float(1e6 / out.rate_bytes_per_s) == pytest.approx(105e-6)
    assert len(preset_topology("dgx2:3").resources) == 3 * 8 * 2
    assert not preset_topology("dgx-a100:2").resources


def test_unlike_nodes_have_their_own_rates() -> None:
    unlike = preset_topology("unlike:2")
    assert [rates_into(unlike, rank) // GB for rank in (0, 8)] == [500, 325]


@each("dims", [(2,), (5,), (2, 2), (3, 4), (4, 4, 4), (2, 3, 5)])
def test_the_links_of_grids(dims: tuple[int, ...]) -> None:
    size = prod(dims)
    assert len(grid(dims, 1).links) == 2 * sum((dim - 1) * size // dim for dim in dims)
    assert len(grid(dims, 1, wrap=True).links) == 2 * sum((dim if dim > 2 else 1) * size // dim for dim in dims)
    assert all(abs(link.src - link.dst) <= prod(dims[1:]) for link in grid(dims, 1).links)


def test_one_way_and_both() -> None:
    assert len(ring(5, 1, both_ways=False).links) == 5
    assert len(ring(5, 1).links) == 10
    assert len(ring(2, 1).links) == 2


def test_uplinks_are_oversubscribed() -> None:
    tree = fat_tree(3, 4, 10, 2e-6, 2)
    assert rates_into(tree, 15) == 3 * 20
    assert tree.path(0, 11) == ((0, 12), (12, 15), (15, 14), (14, 11))
    assert tree.latency_s(tree.path(0, 11)) == pytest.approx(4e-6)


def test_each_pair_of_groups_has_a_cable() -> None:
    topology = dragonfly(5, 2, 2, 10, 1e-6, global_rate=4)
    cables = [e for e in topology.links if e.rate_bytes_per_s == 4]
    assert {((e.src - 20) // 2, (e.dst - 20) // 2) for e in cables} == {
        (a, b) for a in range(5) for b in range(5) if a != b
    }


@each("name", MACHINES)
def test_levels_become_links(name: str) -> None:
    for nodes in (1, 2, 4):
        cluster = preset_cluster(name, nodes)
        if cluster.num_devices > 1:
            topology = of_cluster(cluster)
            assert topology.num_ranks == cluster.num_devices
            total = sum(level.bandwidth_bytes_per_s for level in cluster.levels if level.size > 1)
            assert float(rates_into(topology, 0)) == pytest.approx(total)


def test_a_device_alone_has_no_links() -> None:
    with pytest.raises(ClusterError, match="expected at least two devices, got one"):
        of_cluster(preset_cluster("dgx-h100", 1, 1))


@each(
    ("text", "problem"),
    [
        ("dgx3", "unknown name 'dgx3'; choose one of dgx1"),
        ("mesh:4x", "expected numbers such as 4x4, got '4x'"),
        ("mesh:0x4", "expected a positive integer, got 0"),
        ("mesh:9999999", "expected numbers such as 4x4"),
        ("ring:2x2", "expected 1 numbers, got 2; say ring:8"),
        ("ring:1", "ring: expected at least 2, got 1"),
        ("fat-tree:1x4x1", "fat_tree: expected at least 2, got 1"),
        ("torus:1", "grid: expected at least 2, got 1"),
        ("mesh:1000x1000", "expected at most 65536 nodes"),
    ],
)
def test_what_is_no_preset(text: str, problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        preset_topology(text)
