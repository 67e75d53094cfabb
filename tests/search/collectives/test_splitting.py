"""Relays that only pass data on: their links are paired, and no link is used twice."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.topology import Link, Resource, Topology, joined
from shardwright.search.collectives.sketch import Sketch
from shardwright.search.collectives.splitting import may_split, split
from shardwright.search.collectives.synthesis import synthesize
from tests.each import each
from tests.search.collectives.right import assert_right

SIZE = 2**28


def scattered() -> Topology:
    """Every second node of a 4 × 4 torus, as on a chessboard; the others pass data on."""
    whole = preset_topology("torus:4x4")
    order = sorted(range(16), key=lambda node: (node // 4 + node % 4) % 2)
    at = {node: place for place, node in enumerate(order)}
    links = (replace(link, src=at[link.src], dst=at[link.dst]) for link in whole.links)
    return Topology("8 of 16", 8, tuple(links), tuple(f"node {node}" for node in order[8:]))


def test_links_are_paired_without_loss() -> None:
    whole = scattered()
    network, paths = split(whole) or pytest.fail("not split")
    assert (network.num_ranks, network.relays) == (8, ())
    links = Counter(edge for own in paths.values() for path in own for edge in pairwise(path))
    assert max(links.values()) == 1
    assert set(links) <= set(whole.by_edge)
    rate = whole.links[0].rate_bytes_per_s
    assert {edge: link.rate_bytes_per_s for edge, link in network.by_edge.items()} == {
        edge: rate * len(own) for edge, own in paths.items()
    }
    gather = collective("all_gather", 8)
    assert least_seconds_per_byte(network, gather)[0] == least_seconds_per_byte(whole, gather)[0]


@each("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_scattered_ranks_come_near_the_bound(kind: str) -> None:
    every = synthesize(scattered(), kind, SIZE, sketch=Sketch(pieces=(8,)), exact=False)
    near = next((found for found in every if found.gap < 0.03), None)
    assert near is not None
    assert_right(near.schedule, scattered())


def test_links_back_to_where_they_come_from_are_left_out() -> None:
    star = preset_topology("star:2")
    network, paths = split(star) or pytest.fail("not split")
    assert set(network.by_edge) == set(paths) == {(0, 1), (1, 0)}
    assert network.latency_s([(0, 1)]) == pytest.approx(star.latency_s(star.path(0, 1)))


def test_links_that_only_parts_of_would_pair_are_left_to_other_schedules() -> None:
    """One link leads from rank 0 to relay 4, and three on; only one of these would be reached."""
    edges = [(0, 4), (1, 0), (1, 3), (2, 4), (3, 1), (4, 0), (4, 2), (4, 3)]
    odd = Topology("odd", 2, tuple(Link(*edge, Fraction(10**9), 1e-6) for edge in edges), ("2", "3", "4"))
    assert may_split(odd)
    assert split(odd) is None
    *_, best = synthesize(odd, "all_gather", SIZE, sketch=Sketch(pieces=(1,)), exact=False)
    assert_right(best.schedule, odd)


def test_what_is_not_split() -> None:
    whole = scattered()
    assert may_split(whole)
    assert not may_split(preset_topology("torus:4x4"))  # no relay
    assert not may_split(replace(whole, relays=(*whole.relays, *map(str, range(113)))))  # 129 nodes
    first, *others = whole.links
    assert not may_split(replace(whole, links=(replace(first, rate_bytes_per_s=Fraction(1)), *others)))
    shared = Resource("bus", Fraction(1), frozenset({(first.src, first.dst)}))
    assert not may_split(replace(whole, resources=(shared,)))
    assert not may_split(Topology("wide", 9, tuple(joined((rank, 9, 10, 0.0) for rank in range(9))), ("switch",)))
