"""Resharding between stages, against the owners of every element."""

from collections import defaultdict
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.resharding import Resharding, StageLayout, resharding_s, ways
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S, shard_order
from tests.cost.collectives.messages import messages
from tests.each import each

SHAPE = (8, 12)
CHOICES = [R, C, S(0), S(1), S(0, 2), S(1, 2), S(1, 3)]
MESHES = [(1,), (2,), (4,), (2, 2), (1, 3), (4, 2), (2, 2, 2)]
DGX = Cluster.preset("dgx-h100", nodes=4)


def held(shape: tuple[int, ...], placed: StageLayout) -> dict[int, set[int]]:
    """By rank: the flat indices of the elements that it holds, cut as the slices of `shard_order` say."""
    order = shard_order(shape, placed.layouts, placed.sizes)
    assert not isinstance(order, str)
    found = {}
    for number, coordinates in enumerate(np.ndindex(placed.sizes)):
        part = np.arange(prod(shape)).reshape(shape)
        for axis, dim, blocks in order:
            chunks = np.split(part, blocks * placed.sizes[axis], axis=dim)
            part = np.concatenate(chunks[coordinates[axis] :: placed.sizes[axis]], axis=dim)
        found[placed.first_rank + number] = set(part.flat)
    return found


@st.composite
def placements(draw: st.DrawFn, first_rank: int) -> StageLayout:
    sizes = draw(st.sampled_from(MESHES))
    fitting = st.tuples(*[st.sampled_from(CHOICES)] * len(sizes)).filter(
        lambda layouts: not isinstance(shard_order(SHAPE, layouts, sizes), str)
    )
    return StageLayout(sizes, draw(fitting), first_rank)


@given(placements(0), placements(8))
def test_messages_are_what_the_owners_of_the_elements_say(source: StageLayout, target: StageLayout) -> None:
    """Everyone gets each element that it holds once, from one who has it; the closed form is the busiest rank's."""
    sources, targets = held(SHAPE, source), held(SHAPE, target)
    sent, received, count = (defaultdict[int, int](int) for _ in range(3))
    for here, there, elements in messages(SHAPE, source, target):
        assert elements == len(sources[here] & targets[there]) > 0
        sent[here] += elements
        received[there] += elements
        count[here] += 1
        count[there] += 1
    assert received == {rank: len(elements) for rank, elements in targets.items()}
    direct = ways(SHAPE, prod(SHAPE), source, target)[0]
    assert direct.received_bytes == max(received.values())
    assert direct.sent_bytes == max(sent.values())
    assert direct.messages == max(count.values())


@given(placements(0), placements(8))
def test_scattered_pieces_are_gathered_to_the_part(source: StageLayout, target: StageLayout) -> None:
    direct, *rest = ways(SHAPE, 96.0, source, target)
    assert len(rest) == (target.replicas > 1)
    for scattered in rest:
        gathered = scattered.received_bytes * prod(target.sizes[axis] for axis in scattered.gather_axes)
        assert gathered == pytest.approx(scattered.gathered_bytes) == direct.received_bytes
        assert scattered.sent_bytes * target.replicas == pytest.approx(direct.sent_bytes)


def stages(layouts: Layouts, first: int, sizes: tuple[int, ...] = (8,)) -> StageLayout:
    return StageLayout(sizes, layouts, first)


def test_megatrons_trick_wins_between_nodes() -> None:
    """Replicas receive 1/8 over the network and gather over NVLink."""
    seconds, way = resharding_s(DGX, (64, 1024), 1e8, stages((R,), 0), stages((R,), 8))
    assert way == Resharding("scatter-gather", 1e8 / 8, 1e8 / 8, 1, (0,), 1e8)
    model = Communication(DGX, (8,))
    assert seconds == pytest.approx(model.send_s(0, 15, 1e8 / 8) + model.time_s("all_gather", 0, 1e8))
    assert seconds < model.send_s(0, 8, 1e8)


def test_equal_shards_go_straight_across() -> None:
    seconds, way = resharding_s(DGX, (64, 1024), 1e8, stages((S(0),), 0), stages((S(0),), 8))
    assert way == Resharding("direct", 1e8 / 8, 1e8 / 8, 1)
    assert seconds == pytest.approx(Communication(DGX, (8,)).send_s(0, 15, 1e8 / 8))
    _, transposed = resharding_s(DGX, (64, 1024), 1e8, stages((S(0),), 0), stages((S(1),), 8))
    assert (transposed.messages, transposed.sent_bytes) == (8, 1e8 / 8)


def test_inside_a_node_the_links_are_faster() -> None:
    inside, _ = resharding_s(DGX, (64, 64), 1e8, stages((S(0),), 0, (4,)), stages((S(0),), 4, (4,)))
    outside, _ = resharding_s(DGX, (64, 64), 1e8, stages((S(0),), 4, (4,)), stages((S(0),), 8, (4,)))
    assert inside < outside


def test_gathering_along_two_axes() -> None:
    source, target = stages((R, R), 0, (2, 4)), stages((R, R), 8, (2, 4))
    seconds, way = resharding_s(DGX, (64, 64), 1e8, source, target)
    assert way.gather_axes == (0, 1)
    model = Communication(DGX, (2, 4))
    gathers = model.time_s("all_gather", 0, 1e8 / 4) + model.time_s("all_gather", 1, 1e8)
    assert seconds == pytest.approx(model.send_s(0, 15, 1e8 / 8) + gathers)


def test_a_partial_sum_goes_on_as_one() -> None:
    """Every device sends its own summand, whole; nothing is a replica that others could bring."""
    seconds, way = resharding_s(DGX, (64, 1024), 1e8, stages((P,), 0), stages((P,), 8))
    assert way == Resharding("direct", 1e8, 1e8, 1)
    assert seconds == pytest.approx(Communication(DGX, (8,)).send_s(0, 15, 1e8))
    both = stages((P, R), 0, (2, 4)), stages((P, R), 8, (2, 4))
    seconds, way = resharding_s(DGX, (64, 1024), 1e8, *both)
    assert way == Resharding("scatter-gather", 1e8 / 4, 1e8 / 4, 1, (1,), 1e8)
    links = Communication(DGX, (2, 8)), Communication(DGX, (2, 4))
    assert seconds == pytest.approx(links[0].send_s(0, 15, 1e8 / 4) + links[1].time_s("all_gather", 1, 1e8))
    moved = sorted(messages((2, 2), *(StageLayout((2, 2), (P, S(0)), first) for first in (0, 4))))
    assert moved == [(0, 4, 2), (1, 5, 2), (2, 6, 2), (3, 7, 2)]


def test_stages_of_a_mixed_cluster_have_their_own_links() -> None:
    """Two nodes with H100 and two with V100: what stays among the H100 nodes is as fast as there alone."""
    mixed, alone = Cluster.mixed([("dgx-h100", 2), ("dgx-1-v100", 2)]), Cluster.preset("dgx-h100", nodes=2)
    ends = stages((R,), 0), stages((R,), 8)
    assert resharding_s(mixed, (64, 1024), 1e8, *ends) == resharding_s(alone, (64, 1024), 1e8, *ends)
    forth, back = stages((R,), 8), stages((R,), 16)
    slow = Cluster.preset("dgx-1-v100", nodes=2)
    (into_slow, way), (into_fast, _) = (
        resharding_s(mixed, (64, 1024), 1e8, *p) for p in ((forth, back), (back, forth))
    )
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
    layouts = (S(0), S(1), R)
    source, target = (StageLayout((128, 8, 8), layouts, first) for first in (0, 8192))
    seconds, way = resharding_s(cluster, (128, 8192, 1024), 2e9, source, target)
    assert way.name == "scatter-gather"
    assert 0 < seconds < 1


def test_summands_go_to_more_devices_or_to_fewer() -> None:
    """Each goes to one: of twice as many, who receives gets two."""
    fewer = ways(SHAPE, 1.0, stages((P,), 0), stages((P,), 8, (4,)))[0]
    assert (fewer.sent_bytes, fewer.received_bytes, fewer.messages) == (1.0, 2.0, 2)
    more = ways(SHAPE, 1.0, stages((P,), 0, (4,)), stages((P,), 8))[0]
    assert max(more.sent_bytes, more.received_bytes) == 1.0


# ------------------------------------------------------------------------------------------------------------ bad input


@each(
    ("source", "target", "problem"),
    [
        (stages((P,), 0), stages((R,), 8), "the source is a sum of 8 parts, the target one of 1; reduce it inside"),
        (stages((R,), 0), stages((P,), 8), "the source is a sum of 1 parts, the target one of 8"),
        (stages((R,), 0), stages((R,), 4), "the stages overlap, both hold rank 4; inside one mesh a move"),
        (stages((R, R), 0), stages((R,), 8), r"the source has 2 layouts for the 1 axes of its mesh \[8\]; give one"),
        (stages((Layout("S", 5),), 0), stages((R,), 8), r"shape \[8, 12\] cannot lie on a mesh \[8\]: S\(5\) names"),
        (
            stages((R,), 0),
            stages((S(1),), 8),
            r"cannot lie on a mesh \[8\]: dimension 1 has size 12, not divisible by 8",
        ),
    ],
)
def test_what_cannot_be_moved(source: StageLayout, target: StageLayout, problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        ways(SHAPE, 1.0, source, target)
    with pytest.raises(ClusterError, match=problem):
        list(messages(SHAPE, source, target))
