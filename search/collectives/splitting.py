"""Networks whose nodes between ranks only pass data on: their links are paired, into links from rank to rank.

A link into a relay and one out of it become one link past the relay. Each pair is chosen so that the bound of an
all-gather grows least: with links in parts it need not grow at all (Bang-Jensen, Frank, Jackson 1995), and ForestColl
(arXiv 2402.06787) packs trees so. Here links stay whole, so it may grow a little.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import cycle, pairwise
from math import inf

from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Edge, Link, Topology
from shardwright.pcg.errors import ClusterError
from shardwright.search.collectives.timing import on

MOST_LINKS, MOST_NODES = 8, 128
"""The most links into a relay, and the most nodes: each choice asks for a bound of the network."""
Path = tuple[int, ...]
"""The nodes that a link of a split network passes."""


def may_split(topology: Topology) -> bool:
    """Return whether links can be paired whole, as all have one rate, and whether there are few enough."""
    rates = {link.rate_bytes_per_s for link in topology.links}
    into = Counter(link.dst for link in topology.links if link.dst >= topology.num_ranks)
    is_small = topology.num_nodes <= MOST_NODES and max(into.values(), default=0) <= MOST_LINKS
    return bool(into) and is_small and len(rates) == 1 and not topology.resources


@lru_cache(maxsize=16)
def split(topology: Topology) -> tuple[Topology, Mapping[Edge, Sequence[Path]]] | None:
    """Return the ranks with links of their own, and the paths that each stands for; `may_split` holds.

    None: whole links cannot be paired so that they join all ranks, as where a relay has fewer links in than out.
    """
    least = _bound(topology, paths := [(link.src, link.dst) for link in topology.links])
    for relay in range(topology.num_ranks, topology.num_nodes):
        while (into := [path for path in paths if path[-1] == relay]) and any(path[0] == relay for path in paths):
            paths = _paired(topology, paths, into[0], least)
        paths = [path for path in paths if relay not in (path[0], path[-1])]
    by_edge = defaultdict[Edge, list[Path]](list)
    for path in paths:
        by_edge[path[0], path[-1]].append(path)
    try:
        return Topology(topology.name, topology.num_ranks, _links(topology, paths)), by_edge
    except ClusterError:
        return None


def over_relays(topology: Topology, paths: Mapping[Edge, Sequence[Path]], schedule: Schedule) -> Schedule:
    """Return a schedule for a split network on the whole one: transfers take the paths of a link in turn."""
    turns = {edge: cycle([tuple(pairwise(path)) for path in among]) for edge, among in paths.items()}
    return on(topology, schedule, lambda src, dst: next(turns[src, dst]))


def _paired(topology: Topology, paths: Sequence[Path], into: Path, least: float | Fraction) -> list[Path]:
    """Return the paths with one that ends at a relay led on: so that the bound is `least`, else as low as can be."""
    best, best_bound = list[Path](), inf
    others = list(paths)
    others.remove(into)
    ends = Counter((path[0], path[-1]) for path in paths)
    onward = {path for path in others if path[0] == into[-1]}
    for path in sorted(onward, key=lambda path: (path[-1] == into[0], ends[into[0], path[-1]], path)):
        left = list(others)
        left.remove(path)
        if path[-1] != into[0]:
            left.append((*into, *path[1:]))
        if (bound := _bound(topology, left)) < best_bound or not best:
            best, best_bound = left, bound
        if best_bound <= least:
            break
    return best


def _bound(topology: Topology, paths: Sequence[Path]) -> float | Fraction:
    """Return the seconds per byte of an all-gather over paths; infinite where they do not join all ranks."""
    try:
        network = Topology(topology.name, topology.num_ranks, _links(topology, paths), topology.relays)
    except ClusterError:
        return inf
    return least_seconds_per_byte(network, collective("all_gather", topology.num_ranks)).seconds_per_byte


def _links(topology: Topology, paths: Sequence[Path]) -> tuple[Link, ...]:
    """Return a link for all paths between the same ends, as fast as these together."""
    rate, many, latency_s = topology.links[0].rate_bytes_per_s, Counter[Edge](), dict[Edge, float]()
    for path in paths:
        edge = path[0], path[-1]
        many[edge] += 1
        latency_s[edge] = max(latency_s.get(edge, 0.0), topology.latency_s(pairwise(path)))
    return tuple(Link(*edge, rate * count, latency_s[edge]) for edge, count in many.items())
