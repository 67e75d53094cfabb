"""NCCL's buffers: what its source and its logs say, and that they grow with what a group does and nothing else."""

from __future__ import annotations

from itertools import combinations

import pytest

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, Collective
from shardwright.cost.clusters.presets import PRESETS
from shardwright.cost.collectives import nccl
from shardwright.cost.collectives.buffers import (
    RECEIVE_BYTES,
    SEND_BYTES,
    axes_bytes,
    collectives_of,
    group_bytes,
    stages_bytes,
)
from shardwright.cost.collectives.communication import Communication
from tests.cost.programs import planned
from tests.each import each
from tests.search.graphs import cluster

MIB = 2**20
GATHERS: tuple[Collective, ...] = ("all_gather", "reduce_scatter")


def kept(cluster: Cluster, *collectives: Collective, mesh: tuple[int, ...] = (), axis: int = 0) -> float:
    links = Communication(cluster, mesh or (cluster.num_devices,)).links(axis)
    return group_bytes(set(collectives), links, nccl.generation(cluster.device.name))


def test_connections_have_the_sizes_that_nccl_logged() -> None:
    """NVIDIA/nccl, issue 1685: allocations of 10485760 and of 2097152 bytes."""
    assert (RECEIVE_BYTES, SEND_BYTES) == (10_485_760, 2_097_152)


@each(
    ("machine", "nodes", "collectives", "mib"),
    [
        ("dgx-a100", 1, GATHERS, 256 + 24 * 12),  # shared, ring
        ("dgx-a100", 1, ("all_reduce",), 256 + 24 * 12),  # trees are never chosen within a node
        ("dgx-h100", 1, ("all_reduce",), 256 + 24 * 12 + 16 * 2 * 8),  # NVLS: channels · directions · devices · 1 MiB
        ("dgx-h100", 2, GATHERS, 64 + 24 * (12 * 7 / 8 + 20 / 8)),  # one device of a node sends to the next node
        ("dgx-a100", 2, ("all_reduce",), 64 + 2 * 18 * (12 * 7 / 8 + 20 / 8)),  # a ring and trees, of one peer
        ("dgx-a100", 32, ("all_reduce",), 64 + 18 * (2 * 12 * 7 / 8 + 20 / 8 + 2 * 20 / 8)),  # trees of two peers
        ("dgx-h100", 1, ("all_to_all",), 256 + 7 * 32 * 12),  # 32 channels to each peer
        ("dgx-h100", 2, ("all_to_all",), 2 * 64 + 7 * 2 * 12),  # received over the network: shared too
    ],
)
def test_what_groups_keep(machine: str, nodes: int, collectives: tuple[Collective, ...], mib: float) -> None:
    assert kept(Cluster.preset(machine, nodes), *collectives) == mib * MIB


def test_the_first_all_to_all_takes_what_a_user_saw() -> None:
    """NVIDIA/nccl, issue 1685: 1.06 GB before and 4.34 GB after it on 8 H100, PyTorch's memory apart."""
    h100 = Cluster.preset("dgx-h100")
    assert kept(h100, "all_to_all") - kept(h100) == pytest.approx((4.34 - 1.06) * 1e9, rel=0.1)


@each("nodes", [1, 2, 16])
@each("machine", PRESETS)
def test_more_collectives_never_keep_less(machine: str, nodes: int) -> None:
    if nodes > 1 and (pod := PRESETS[machine].pod):
        nodes = pod.nodes
    full = Cluster.preset(machine, nodes)
    for some in combinations(COLLECTIVES, 2):
        parts, both = [kept(full, one) for one in some], kept(full, *some)
        assert 0 < max(parts) <= both < min(sum(parts) + 1, full.device.memory_bytes / 4)


def test_who_communicates_with_nobody_keeps_nothing() -> None:
    h100 = Cluster.preset("dgx-h100")
    assert kept(h100) == 0
    assert kept(h100, *COLLECTIVES, mesh=(8, 1), axis=1) == 0
    assert stages_bytes(h100, 1, 8) == 0


def test_gloo_is_in_the_memory_of_the_host() -> None:
    assert axes_bytes(planned("data"), cluster(4)) == 0
    assert stages_bytes(cluster(4), 2, 2) == 0


@pytest.mark.parametrize(
    ("role", "collectives"),
    [
        ("data", {"all_reduce"}),
        ("zero", {"all_reduce", "all_gather", "reduce_scatter"}),
        ("tensor", {"all_reduce", "all_gather"}),
    ],
)
def test_an_axis_runs_what_its_moves_are(role: str, collectives: set[Collective]) -> None:
    graph, machine = planned(role), Cluster.preset("dgx-h100", 1, 4)
    assert collectives_of(graph) == {0: collectives}
    assert axes_bytes(graph, machine) == kept(machine, *collectives)


@pytest.mark.parametrize(
    ("stages", "size", "mib"),
    [
        (2, 4, 256 + 32 * 12),  # one neighbour, within the node
        (4, 2, 256 + 2 * 32 * 12),  # two
        (16, 1, 2 * 64 + 2 * 2 * 12),  # eight in each of two nodes
        (2, 8, 2 * 128 * 16 * 4 / 1024),  # in the other node: two rails of 45 GB/s are four channels
    ],
)
def test_stages_keep_connections_with_their_neighbours(stages: int, size: int, mib: float) -> None:
    assert stages_bytes(Cluster.preset("dgx-h100", 2 if stages * size == 16 else 1), stages, size) == mib * MIB
