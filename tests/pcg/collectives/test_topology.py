"""Topologies: what is refused, paths, rates that links share."""

from fractions import Fraction

import pytest

from shardwright.pcg.collectives.topology import Link, Resource, Topology, joined
from shardwright.pcg.errors import ClusterError
from tests.each import each

PAIR = (Link(0, 1, Fraction(10)), Link(1, 0, Fraction(10)))


def star(relays: int = 1) -> Topology:
    """Three ranks around a relay; further relays stand in a row behind it."""
    links = [(rank, 3, 6, 1e-6) for rank in range(3)] + [(2 + i, 3 + i, 6, 1e-6) for i in range(1, relays)]
    return Topology("star", 3, tuple(joined(links)), tuple(f"switch {i}" for i in range(relays)))


@each(
    ("num_ranks", "links", "problem"),
    [
        (2, (Link(0, 1, Fraction(1)),), "no path to rank 0 from rank 1"),
        (3, PAIR, "no path from rank 0 to rank 2"),
        (2, (*PAIR, Link(0, 1, Fraction(2))), "expected one link from 0 to 1, got two"),
        (2, (*PAIR, Link(1, 1, Fraction(2))), "expected two nodes, got 1 twice"),
        (2, (*PAIR, Link(1, 2, Fraction(2))), "expected nodes from 0 to 1, got 1 to 2"),
        (0, (), "expected a positive integer, got 0"),
        (1 << 20, (), "expected at most 65536 nodes"),
    ],
)
def test_what_is_no_network(num_ranks: int, links: tuple[Link, ...], problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        Topology("t", num_ranks, links)


@each("rate", [0, -1, float("nan"), float("inf"), "fast", True])
def test_a_rate_is_positive(rate: object) -> None:
    with pytest.raises(ClusterError, match=rf"Link.rate_bytes_per_s: expected a positive number, got {rate!r};"):
        Link(0, 1, rate)  # pyright: ignore[reportArgumentType]


def test_a_resource_names_links() -> None:
    for edges, found in ((frozenset({(0, 2)}), "got 0 to 2"), (frozenset[tuple[int, int]](), "got none")):
        with pytest.raises(ClusterError, match=rf"resources\[0\].edges: expected links of the topology, {found}"):
            Topology("t", 2, PAIR, resources=(Resource("nic", Fraction(1), edges),))


def test_paths_pass_relays_and_no_ranks() -> None:
    line = Topology("line", 3, tuple(joined([(0, 1, 1, 0.0), (1, 2, 1, 0.0)])))
    assert line.path(0, 1) == ((0, 1),)
    with pytest.raises(ClusterError, match="no link from 0 to 2; send over links"):
        line.path(0, 2)
    with pytest.raises(ClusterError, match="only relays pass data on"):
        line.path(0, 2, (1,))
    assert star().path(0, 2) == ((0, 3), (3, 2))
    assert star().latency_s(star().path(0, 2)) == 2e-6
    with pytest.raises(ClusterError, match="no link from 0 to 4 on the way from 0 to 2"):
        star(2).path(0, 2, (4, 3))


def test_the_busiest_link_or_resource_counts() -> None:
    edges = frozenset({(0, 1), (1, 0)})
    shared = Topology("t", 2, PAIR, resources=(Resource("bridge", Fraction(15), edges),))
    one, both = {(0, 1): Fraction(3)}, {(0, 1): Fraction(3), (1, 0): Fraction(3)}
    assert (shared.busy_s_per_byte(one), shared.busy_s_per_byte(both)) == (Fraction(3, 10), Fraction(2, 5))
    assert shared.busy_s_per_byte({}) == 0


def test_the_unit_rate_divides_every_rate() -> None:
    links = tuple(joined([(0, 1, Fraction(3, 2), 0.0), (1, 2, Fraction(5, 2), 0.0)]))
    topology = Topology("t", 3, links, resources=(Resource("nic", Fraction(1, 3), frozenset({(0, 1)})),))
    assert topology.unit_rate == Fraction(1, 6)
    assert [topology.multiplicity(entry) for entry in (links[0], links[2], topology.resources[0])] == [9, 15, 2]


def test_reversed_twice_is_the_same() -> None:
    ring = Topology("t", 3, tuple(Link(a, (a + 1) % 3, Fraction(1), 1e-6) for a in range(3)))
    back = ring.reversed()
    assert back.path(1, 0) == ((1, 0),)
    assert back.reversed() == ring
