"""What resharding between stages takes."""

from math import prod

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.resharding import StageMesh, resharding_s
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.pieces import Tensor
from tests.each import each

SHAPE = (8, 12)
DGX = Cluster.preset("dgx-h100", nodes=4)


def stage(first: int, *sizes: int) -> StageMesh:
    return StageMesh(mesh(*sizes), first)


def mesh(*sizes: int) -> Mesh:
    return Mesh(tuple("xyz"[: len(sizes)]), sizes)


def moved(layouts: Layouts, *sizes: int, shape: tuple[int, ...] = (64, 1024)) -> float:
    """From a stage to an equal one on the next node; of the whole tensor there are 1e8 bytes."""
    many = prod(size for size, layout in zip(sizes, layouts, strict=True) if layout.is_shard)
    return resharding_s(DGX, Tensor(shape, layouts), 1e8 / many, stage(0, *sizes), stage(8, *sizes))


@each(
    ("layouts", "sizes", "share"),
    [
        ((S(0),), (8,), 8),
        ((R,), (8,), 1),
        ((C,), (8,), 1),
        ((P,), (8,), 1),
        ((P, S(1)), (2, 4), 4),
        ((R, R), (2, 4), 1),
    ],
)
def test_equal_stages_send_every_part_straight_across(layouts: Layouts, sizes: tuple[int, ...], share: int) -> None:
    """Also what all ranks have, whole: a graph that sends pieces of it says so by its layouts."""
    expected = Communication(DGX, sizes[:1]).send_s(0, 15, 1e8 / share)
    assert moved(layouts, *sizes) == pytest.approx(expected)


def test_inside_a_node_the_links_are_faster() -> None:
    shards = Tensor((64, 64), (S(0),)), 1e8 / 4
    inside = resharding_s(DGX, *shards, stage(0, 4), stage(4, 4))
    assert inside < resharding_s(DGX, *shards, stage(4, 4), stage(8, 4))


def test_stages_of_a_mixed_cluster_have_their_own_links() -> None:
    """Two nodes with H100 and two with V100: what stays among the H100 nodes is as fast as there alone."""
    mixed, alone = Cluster.mixed([("dgx-h100", 2), ("dgx-1-v100", 2)]), Cluster.preset("dgx-h100", nodes=2)
    whole = Tensor((64, 1024), (R,)), 1e8
    ends = stage(0, 8), stage(8, 8)
    assert resharding_s(mixed, *whole, *ends) == resharding_s(alone, *whole, *ends)
    assert resharding_s(mixed, *whole, stage(8, 8), stage(16, 8)) > resharding_s(mixed, *whole, *ends)


def test_large_stages_cost_no_more_to_ask() -> None:
    """8,192 ranks a stage, 10⁹ elements: tables of parts, not of elements or pairs of ranks."""
    cluster = Cluster.preset("dgx-h100", nodes=2048)
    tensor = Tensor((128, 8192, 1024), (S(0), S(1), R))
    assert 0 < resharding_s(cluster, tensor, 2e9 / 1024, stage(0, 128, 8, 8), stage(8192, 128, 8, 8)) < 1


@each(
    "sizes, layout, expected",
    [
        ((8, 4), P, (1.0, 2.0, 2)), ((4, 8), P, (1.0, 1.0, 1)), ((3, 2), P, (1.0, 2.0, 2)),
        ((2, 4), C, (2.0, 1.0, 2)), ((4, 2), R, (1.0, 1.0, 1)),
        ((2, 4), S(0), (1.0, 0.5, 2)), ((4, 2), S(0), (1.0, 2.0, 2)),
    ],
)  # fmt: skip
def test_stages_of_unlike_sizes(sizes: tuple[int, int], layout: Layout, expected: tuple[float, float, int]) -> None:
    """Of twice as many summands, who receives gets two; a copy goes to all that have none."""
    sent, received, messages = expected
    links = Communication(DGX, ())
    start_s, sending_s = (links.send_s(0, sum(sizes) - 1, num_bytes) for num_bytes in (0.0, 1e8 * max(sent, received)))
    found = resharding_s(DGX, Tensor(SHAPE, (layout,)), 1e8, stage(0, sizes[0]), stage(sizes[0], sizes[1]))
    assert found == pytest.approx(sending_s + (messages - 1) * start_s)
