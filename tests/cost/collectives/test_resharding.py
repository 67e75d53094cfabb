"""What resharding between stages takes."""

from itertools import product
from math import prod

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.resharding import Resharding, StageMesh, resharding_s, ways
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


def moved(layouts: Layouts, *sizes: int, shape: tuple[int, ...] = (64, 1024)) -> tuple[float, Resharding]:
    """From a stage to an equal one on the next node; of the whole tensor there are 1e8 bytes."""
    many = prod(size for size, layout in zip(sizes, layouts, strict=True) if layout.is_shard)
    return resharding_s(DGX, Tensor(shape, layouts), 1e8 / many, stage(0, *sizes), stage(8, *sizes))


@each("layouts", list(product([R, C, P, S(0), S(1)], repeat=2)))
def test_scattered_pieces_are_gathered_to_the_part(layouts: Layouts) -> None:
    tensor, sizes = Tensor((48, 48), layouts), mesh(2, 3)
    replicas = prod(n for n, layout in zip(sizes.sizes, layouts, strict=True) if layout in (R, C))
    direct, *rest = ways(tensor, 96.0, mesh(4, 3), sizes)
    assert len(rest) == (replicas > 1)
    for scattered in rest:
        assert prod(sizes.sizes[axis] for axis in scattered.gather_axes) == replicas
        assert scattered.received_bytes * replicas == pytest.approx(scattered.gathered_bytes) == direct.received_bytes
        assert scattered.sent_bytes * replicas == pytest.approx(direct.sent_bytes)


def test_megatrons_trick_wins_between_nodes() -> None:
    """Replicas receive 1/8 over the network and gather over NVLink."""
    seconds, way = moved((R,), 8)
    assert way == Resharding("scatter-gather", 1e8 / 8, 1e8 / 8, 1, (0,), 1e8)
    model = Communication(DGX, (8,))
    assert seconds == pytest.approx(model.send_s(0, 15, 1e8 / 8) + model.time_s("all_gather", 0, 1e8))
    assert seconds < model.send_s(0, 8, 1e8)


def test_equal_shards_go_straight_across() -> None:
    seconds, way = moved((S(0),), 8)
    assert way == Resharding("direct", 1e8 / 8, 1e8 / 8, 1)
    assert seconds == pytest.approx(Communication(DGX, (8,)).send_s(0, 15, 1e8 / 8))


def test_inside_a_node_the_links_are_faster() -> None:
    shards = Tensor((64, 64), (S(0),)), 1e8 / 4
    inside, _ = resharding_s(DGX, *shards, stage(0, 4), stage(4, 4))
    outside, _ = resharding_s(DGX, *shards, stage(4, 4), stage(8, 4))
    assert inside < outside


def test_gathering_along_two_axes() -> None:
    seconds, way = moved((R, R), 2, 4, shape=(64, 64))
    assert way.gather_axes == (0, 1)
    model = Communication(DGX, (2, 4))
    gathers = model.time_s("all_gather", 0, 1e8 / 4) + model.time_s("all_gather", 1, 1e8)
    assert seconds == pytest.approx(model.send_s(0, 15, 1e8 / 8) + gathers)


def test_a_partial_sum_goes_on_as_one() -> None:
    """Every device sends its own summand, whole; nothing is a replica that others could bring."""
    seconds, way = moved((P,), 8)
    assert way == Resharding("direct", 1e8, 1e8, 1)
    assert seconds == pytest.approx(Communication(DGX, (8,)).send_s(0, 15, 1e8))
    seconds, way = moved((P, R), 2, 4)
    assert way == Resharding("scatter-gather", 1e8 / 4, 1e8 / 4, 1, (1,), 1e8)
    links = Communication(DGX, (2, 8)), Communication(DGX, (2, 4))
    assert seconds == pytest.approx(links[0].send_s(0, 15, 1e8 / 4) + links[1].time_s("all_gather", 1, 1e8))


def test_stages_of_a_mixed_cluster_have_their_own_links() -> None:
    """Two nodes with H100 and two with V100: what stays among the H100 nodes is as fast as there alone."""
    mixed, alone = Cluster.mixed([("dgx-h100", 2), ("dgx-1-v100", 2)]), Cluster.preset("dgx-h100", nodes=2)
    whole = Tensor((64, 1024), (R,)), 1e8
    ends = stage(0, 8), stage(8, 8)
    assert resharding_s(mixed, *whole, *ends) == resharding_s(alone, *whole, *ends)
    forth, back = stage(8, 8), stage(16, 8)
    slow = Cluster.preset("dgx-1-v100", nodes=2)
    (into_slow, way), (into_fast, _) = (resharding_s(mixed, *whole, *p) for p in ((forth, back), (back, forth)))
    assert way.name == "scatter-gather"
    piece_s = Communication(mixed, ()).send_s(8, 23, 1e8 / 8)
    for seconds, machine in ((into_slow, slow), (into_fast, alone)):
        assert seconds == pytest.approx(
            piece_s + Communication(machine.part(range(8)), (8,)).time_s("all_gather", 0, 1e8)
        )
    assert into_slow > into_fast


def test_large_stages_cost_no_more_to_ask() -> None:
    """8,192 ranks a stage, 10⁹ elements: tables of parts, not of elements or pairs of ranks."""
    cluster = Cluster.preset("dgx-h100", nodes=2048)
    tensor = Tensor((128, 8192, 1024), (S(0), S(1), R))
    seconds, way = resharding_s(cluster, tensor, 2e9 / 1024, stage(0, 128, 8, 8), stage(8192, 128, 8, 8))
    assert way.name == "scatter-gather"
    assert 0 < seconds < 1


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
    direct = ways(Tensor(SHAPE, (layout,)), 1.0, *map(mesh, sizes))[0]
    assert (direct.sent_bytes, direct.received_bytes, direct.messages) == expected
