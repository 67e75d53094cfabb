"""Limits of transfers: the channels, from rank to rank, that pass the same link or share the same resource."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from shardwright.pcg.collectives.bounds import islands
from shardwright.pcg.collectives.topology import Edge, Topology, reachable
from shardwright.search.collectives.symmetry import Permutation


class Limit(NamedTuple):
    """Channels that together carry no more than a rate, in bytes per second; one that passes twice counts twice."""

    rate: Fraction
    channels: tuple[Edge, ...]


def limits(topology: Topology, group: Sequence[Permutation]) -> list[Limit]:
    """Return one limit of each orbit of links and resources; of those that limit the same channels the lowest."""
    passing: dict[Edge, list[Edge]] = defaultdict(list)
    for channel, path in topology.channels.items():
        for edge in path:
            passing[edge].append(channel)
    all_limits = [Limit(topology.by_edge[edge].rate_bytes_per_s, tuple(channels)) for edge, channels in passing.items()]
    for one in topology.resources:
        channels = tuple(channel for edge in one.edges for channel in passing[edge])
        all_limits.append(Limit(one.rate_bytes_per_s, channels))
    limits_in_order, seen = list[Limit](), set[tuple[Edge, ...]]()
    for limit in sorted(all_limits, key=lambda limit: limit.rate):
        if limit.channels and tuple(sorted(limit.channels)) not in seen:
            seen |= {tuple(sorted(moved(image, limit.channels))) for image in group}
            limits_in_order.append(limit)
    return limits_in_order


def orbits(topology: Topology, group: Sequence[Permutation]) -> dict[Edge, Edge]:
    """Return the channel that stands for the orbit of each."""
    orbit_of = dict[Edge, Edge]()
    for channel in topology.channels:
        if channel not in orbit_of:
            orbit_of |= dict.fromkeys((moved(image, [channel])[0] for image in group), channel)
    return orbit_of


def rails(topology: Topology, group: Sequence[Permutation]) -> frozenset[Edge] | None:
    """Return the channels within equal parts of a network, such as machines, and between ranks of the same place.

    The parts hang together without the slowest links. None where there are no such parts, where
    they are not connected so, or where the group mixes places. A
    switch between parts so becomes links of its own, without a loss in most networks: ForestColl (arXiv 2402.06787)
    splits its links off in the same way.
    """
    slowest = min(link.rate_bytes_per_s for link in topology.links)
    islands_of_ranks = [
        sorted(node for node in part if node < topology.num_ranks) for part in islands(topology, slowest)
    ]
    parts = [part for part in islands_of_ranks if part]
    if len(parts) == 1 or len({len(part) for part in parts}) != 1 or len(parts[0]) == 1:
        return None
    place = {rank: (number, index) for number, part in enumerate(parts) for index, rank in enumerate(part)}
    slow = {edge for edge, link in topology.by_edge.items() if link.rate_bytes_per_s == slowest}
    edges = {
        (a, b)
        for (a, b), path in topology.channels.items()
        if (place[a][1] == place[b][1] if place[a][0] != place[b][0] else slow.isdisjoint(path))
    }
    is_closed = all(set(moved(image, sorted(edges))) == edges for image in group)
    return frozenset(edges) if is_closed and _is_connected(topology.num_ranks, edges) else None


def _is_connected(num_ranks: int, channels: Collection[Edge]) -> bool:
    """Return whether channels lead from every rank to every other."""
    after, before = ({rank: list[int]() for rank in range(num_ranks)} for _ in range(2))
    for src, dst in channels:
        after[src].append(dst)
        before[dst].append(src)
    return all(len(reachable(0, neighbours)) == num_ranks for neighbours in (after, before))


def moved(image: Permutation, channels: Sequence[Edge]) -> list[Edge]:
    """Return where a permutation of ranks takes channels."""
    return [(image[src], image[dst]) for src, dst in channels]
