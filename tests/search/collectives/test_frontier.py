"""Exact synthesis: the frontiers that SCCL publishes, their proofs, and what no schedule can do."""

import time
from fractions import Fraction
from itertools import product

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.shapes import ring
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.topology import Link, Resource, Topology
from shardwright.search.collectives import frontier
from shardwright.search.collectives.exact import Answer, solve
from shardwright.search.collectives.frontier import Walk
from shardwright.search.collectives.paced import paced_bound
from tests.each import each
from tests.search.collectives.right import assert_right

DGX1 = preset_topology("dgx1")


# (pieces, steps, rounds). SCCL (PPoPP 2021, table 4) has the same all-gather and all-to-all; its gather takes a step
# more for the same rounds.
@each(
    ("name", "kind", "points"),
    [
        ("dgx1", "all_gather", [(2, 2, 3), (6, 3, 7)]),
        ("dgx1", "reduce_scatter", [(2, 2, 3), (6, 3, 7)]),
        ("dgx1", "all_reduce", [(2, 4, 6), (6, 6, 14)]),
        ("dgx1", "all_to_all", [(3, 2, 8)]),
        ("dgx1", "gather", [(6, 2, 7)]),
        ("amd-z52", "all_gather", [(2, 4, 7)]),
        ("amd-z52", "all_to_all", [(1, 4, 8)]),
        ("dgx-a100:1", "all_gather", [(1, 1, 7)]),
    ],
)
def test_frontiers_that_meet_their_bound(name: str, kind: str, points: list[tuple[int, int, int]]) -> None:
    topology = preset_topology(name)
    found = list(Walk(topology, kind, most_pieces=6).points())
    assert [(point.pieces, point.steps, point.rounds) for point in found] == points
    assert [point.meets_bound for point in found] == [False] * (len(points) - 1) + [True]
    assert all(point.is_best for point in found if kind != "all_reduce")
    for point in found:
        assert_right(point.schedule, topology)
        used = sum(point.schedule.seconds_per_byte(topology))
        assert used <= point.seconds_per_byte
        assert not point.meets_bound or used == point.bound.seconds_per_byte


def test_a_broadcast_ends_where_its_steps_do() -> None:
    found = list(Walk(DGX1, "broadcast", most_pieces=6, most_steps=4).points())
    assert [(point.pieces, point.steps, point.rounds) for point in found] == [(2, 2, 2), (6, 3, 3)]
    assert [(point.is_best, point.is_best_of_pieces) for point in found] == [(True, True), (False, True)]
    for point in found:
        assert_right(point.schedule, DGX1)


def test_what_cannot_be_done_is_proven() -> None:
    for pieces, steps, rounds in ((1, 1, 9), (3, 2, 4), (1, 3, 2)):
        assert solve(DGX1, collective("all_gather", 8, pieces), steps, rounds) == (None, True)


def test_flows_over_time() -> None:
    gather = collective("all_gather", 8)
    bounds = [paced_bound(DGX1, gather, steps) for steps in (1, 2, 3)]
    assert [bound and bound.rounds(DGX1, gather.unit) for bound in bounds] == [None, Fraction(3, 2), Fraction(7, 6)]
    line = Topology("line", 3, tuple(Link(a, b, Fraction(1)) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))))
    bound = paced_bound(line, collective("broadcast", 3), 2)
    assert bound is not None
    assert bound.seconds_per_byte == 2  # each link waits for the one before it


def test_uneven_chunks_and_shared_resources() -> None:
    uneven = Walk(ring(4, 10), "all_gather", weights=[1, 2, 0, 1], most_pieces=2)
    found = list(uneven.points())
    assert found
    assert found[-1].gap < 0.5
    both = frozenset(product((0,), (1, 2)))
    links = tuple(Link(a, b, Fraction(10)) for a in range(3) for b in range(3) if a != b)
    nic = Topology("nic", 3, links, resources=(Resource("NIC", Fraction(10), both),))
    for topology, walk in ((ring(4, 10), uneven), (nic, Walk(nic, "broadcast", most_pieces=2))):
        for point in walk.points():
            assert_right(point.schedule, topology)


def test_a_question_that_takes_too_long_stays_open() -> None:
    answer = solve(DGX1, collective("all_gather", 8, 6), 3, 7, timeout_s=0.001)
    assert answer == (None, False)
    assert not list(Walk(DGX1, "all_gather", budget_s=0.0).points())


def test_an_open_question_leaves_a_point_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Answer(None, is_proven=False)])
    monkeypatch.setattr(frontier, "solve", lambda *args, **options: next(answers, None) or solve(*args, **options))
    (point, *_) = Walk(DGX1, "broadcast", most_pieces=4, most_steps=3).points()
    assert not point.is_best_of_pieces


def test_links_one_way_alone_make_other_sums() -> None:
    topology = ring(3, 10, both_ways=False)
    (point,) = Walk(topology, "all_reduce", most_pieces=2).points()
    assert_right(point.schedule, topology)
    assert (point.steps, point.rounds) == (4, 4)


def test_building_a_question_counts_against_its_time() -> None:
    begin, torus = time.process_time(), preset_topology("torus:8x8")
    answer = solve(torus, collective("all_to_all", 64), 8, 40, timeout_s=0.5)
    assert answer == Answer(None, is_proven=False)
    assert time.process_time() - begin < 5


def test_bounds_are_not_sharpened_after_the_end() -> None:
    whole = collective("all_gather", 8)
    rough, sharp = paced_bound(DGX1, whole, 2, end=time.monotonic() - 1), paced_bound(DGX1, whole, 2)
    assert rough is not None
    assert sharp is not None
    assert rough.seconds_per_byte < sharp.seconds_per_byte


def test_a_question_without_time_is_left_open() -> None:
    topology, whole = preset_topology("dgx1"), collective("all_gather", 8)
    assert solve(topology, whole, 2, 4, end=time.monotonic()) == Answer(None, is_proven=False)
    assert solve(topology, whole, 2, 4).schedule
