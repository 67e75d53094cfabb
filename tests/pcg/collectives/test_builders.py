"""Builders: each is proven for the sizes that it claims, has the steps and loads that it should, and refuses others."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, log2, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.clusters.shapes import grid, ring
from shardwright.pcg.collectives.builders.direct import direct
from shardwright.pcg.collectives.builders.lines import ring_all_gather
from shardwright.pcg.collectives.builders.table import BUILDERS, build
from shardwright.pcg.collectives.builders.trees import binary_tree, second_tree
from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.errors import ScheduleError
from shardwright.verifier.collectives import verify_schedule
from tests.each import each

GRIDS = [(2,), (3,), (4,), (5,), (7,), (8,), (13,), (16,), (2, 2), (3, 2), (4, 4), (1, 4), (3, 2, 4), (2, 4, 2)]


def steps_of(name: str, kind: str, *dims: int, pieces: int = 1) -> int:
    return build(name, kind, dims, pieces).num_steps


def busy(schedule: Schedule, dims: tuple[int, ...], *, wrap: bool = False) -> Fraction:
    """How long a grid with links of one byte per second is busy, as a share of the whole."""
    return sum(schedule.seconds_per_byte(grid(dims, 1, wrap=wrap)), Fraction(0))


@each("name", BUILDERS)
def test_every_claim_is_proven(name: str) -> None:
    builder = BUILDERS[name]
    claimed = [dims for dims in GRIDS if builder.sizes.fit(dims)]
    assert claimed
    for kind in builder.makes:
        for dims in claimed:
            for pieces in (1, 2) if prod(dims) < 9 else (1,):
                schedule = build(name, kind, dims, pieces)
                verdict = verify_schedule(schedule)
                assert verdict.is_certified, (kind, dims, pieces, verdict.refusals)
                assert schedule.collective.kind == kind


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_size_that_is_claimed(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(BUILDERS)))
    builder = BUILDERS[name]
    kind = data.draw(st.sampled_from(sorted(builder.makes)))
    dims = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    if builder.sizes.fit(dims) and prod(dims) <= 60:
        assert verify_schedule(build(name, kind, dims, data.draw(st.integers(1, 3)))).is_certified


def test_numbers_of_steps() -> None:
    for n in (2, 3, 5, 8, 16):
        assert steps_of("ring", "all_gather", n) == n - 1
        assert steps_of("ring", "all_reduce", n) == 2 * (n - 1)
        assert steps_of("short-ring", "all_gather", n) == n // 2
        assert steps_of("bruck", "all_gather", n) == steps_of("bruck", "all_to_all", n) == ceil(log2(n))
        assert steps_of("ring", "broadcast", n, pieces=5) == n + 3
        assert steps_of("tree", "gather", n) == ceil(log2(n))
        assert steps_of("direct", "all_reduce", n) == 2
    assert steps_of("doubling", "all_reduce", 16) == 4
    assert steps_of("halving-doubling", "all_reduce", 16) == 8
    assert steps_of("swing", "all_reduce", 4, 4) == 8
    assert steps_of("hierarchical", "all_reduce", 4, 8) == 2 * (3 + 1)


def test_chunks_are_what_the_families_need() -> None:
    chunks = {name: len(build(name, "all_reduce", (4,)).collective.chunks) for name in BUILDERS
              if "all_reduce" in BUILDERS[name].makes}  # fmt: skip
    assert chunks == {
        "direct": 4, "one-shot": 1, "ring": 4, "two-way-ring": 8, "short-ring": 4, "line": 4, "doubling": 1,
        "halving-doubling": 4, "bruck": 4, "double-tree": 2, "hierarchical": 4, "xy": 4, "mesh": 4, "tidal": 8,
        "torus": 8, "swing": 8,
    }  # fmt: skip


@each("n", [2, 3, 4, 7, 8])
def test_rings_meet_their_bound(n: int) -> None:
    for name, links in (("ring", 1), ("two-way-ring", 1 if n == 2 else 2)):
        schedule = build(name, "all_gather", (n,))
        assert sum(schedule.seconds_per_byte(ring(n, 1))) == Fraction(n - 1, n * links)


@each("dims", [(4, 4), (3, 5), (4, 4, 4)])
def test_grids_use_links_alone(dims: tuple[int, ...]) -> None:
    n = prod(dims)
    bound = Fraction(n - 1, n) / (2 * len(dims))
    assert busy(build("torus", "all_gather", dims), dims, wrap=True) >= bound
    assert busy(build("mesh", "all_gather", dims), dims) >= Fraction(n - 1, n) / len(dims)  # a corner's links
    assert busy(build("mesh", "all_gather", dims), dims) < busy(build("xy", "all_gather", dims), dims)
    assert verify_schedule(build("torus", "all_to_all", dims), grid(dims, 1, wrap=True)).is_certified
    assert verify_schedule(build("xy", "all_to_all", dims), grid(dims, 1)).is_certified


def test_a_square_torus_is_within_a_sixteenth_of_its_bound() -> None:
    assert busy(build("torus", "all_gather", (4, 4)), (4, 4), wrap=True) == Fraction(15, 16) / 4


def test_the_tide_fills_gaps() -> None:
    """Sums beside copies: the longer the train of pieces, the nearer to one pass of the mesh."""
    times = [busy(build("tidal", "all_reduce", (6,), pieces), (6,)) for pieces in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < Fraction(7, 10) * busy(build("line", "all_reduce", (6,)), (6,))


@each("n", range(2, 40))
def test_the_two_trees_have_other_leaves(n: int) -> None:
    """But for the ranks at the ends, nobody has two children in one tree and any in the other."""
    trees = binary_tree(n), second_tree(n)
    for tree, other in (trees, trees[::-1]):
        assert len(tree) == n - 1
        children = Counter(tree.values())
        assert max(children.values()) <= 2
        busy_in_both = [rank for rank in children if children[rank] == 2 and rank in other.values()]
        assert len(busy_in_both) <= 1, busy_in_both


def test_a_ring_goes_one_way_round() -> None:
    one_way = ring(5, 1, both_ways=False)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        assert verify_schedule(build("ring", kind, (5,)), one_way).is_certified


def test_an_order_of_the_ring() -> None:
    schedule = ring_all_gather(4, order=[2, 0, 3, 1])
    assert verify_schedule(schedule).is_certified
    assert {(t.src, t.dst) for t in schedule.transfers} == {(2, 0), (0, 3), (3, 1), (1, 2)}


def test_direct_takes_any_collective() -> None:
    uneven = collective("all_to_all", 3, weights=[1, 2, 3, 0, 5, 6, 7, 8, 9])
    assert verify_schedule(direct(uneven)).is_certified
    odd = Collective("custom", 3, (Chunk(Fraction(1), (0, 1), (2,)),), reduces=True)
    with pytest.raises(ScheduleError, match="chunk 0: rank 2 has no summand of its own"):
        direct(odd)


@each(
    ("name", "kind", "dims", "pieces", "problem"),
    [
        ("rings", "all_gather", (4,), 1, "expected one of direct, one-shot"),
        ("swing", "broadcast", (4,), 1, "expected one of all_gather, reduce_scatter, all_reduce, got 'broadcast'"),
        ("swing", "all_gather", (6,), 1, "expected 2, 4, 8, … ranks along every dimension, got 6"),
        ("halving-doubling", "all_reduce", (3, 2), 1, "expected 2, 4, 8, … ranks, got 3x2"),
        ("ring", "all_gather", (1,), 1, "expected any number of ranks from 2 on, got 1"),
        ("ring", "all_gather", (), 1, "expected any number of ranks from 2 on, got ;"),
        ("ring", "all_gather", (4, 0), 1, "got 4x0"),
        ("ring", "all_gather", (4,), 0, "expected at least one piece, got 0"),
    ],
)
def test_what_is_not_built(name: str, kind: str, dims: tuple[int, ...], pieces: int, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        build(name, kind, dims, pieces)
