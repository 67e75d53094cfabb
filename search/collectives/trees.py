"""All-reduce as a problem of its own: trees over which sums travel to a root, and back over the same links.

A tree uses each of its links once each way. So spanning trees that share the links evenly, as fractions of the data,
reach the bound of 2 (n − 1) messages (Tutte, Nash-Williams 1961), where a reduce-scatter and an all-gather of equal
shards do not: they are bound by the corner of a mesh. Trees are packed one after the other, each along the links that
are least used so far.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from shardwright.pcg.collectives.bounds import Hops
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology, reachable
from shardwright.pcg.errors import ScheduleError
from shardwright.search.collectives.timing import retimed, steps_of

SHALLOW = 1.0
"""How much more use of a link a tree takes to be one rank less deep."""
Parents = Mapping[int, int]
"""The parent of each rank of a tree but its root."""


def two_way(topology: Topology, num_trees: int, num_bytes: float) -> Schedule:
    """Return an all-reduce of a chunk for each tree, timed for `num_bytes`; the trees follow each other.

    Raises:
        ScheduleError: the channels that lead both ways do not join all ranks.
    """
    if not is_joined(topology):
        problem = "expected channels both ways that join all ranks, got others"
        raise ScheduleError(f"trees on {topology.name!r}: {problem}; use a reduce-scatter and an all-gather")
    trees = list(packed(topology, num_trees))
    whole = collective("all_reduce", topology.num_ranks, num_trees)
    uses = Counter(frozenset(edge) for _, parents in trees for edge in parents.items())
    spacing = max(uses.values(), default=1) / num_trees
    moves = [
        move
        for chunk, (root, parents) in enumerate(trees)
        for move in _moves(root, parents, int(chunk * spacing), chunk)
    ]
    schedule = steps_of(f"{topology.name} all_reduce, {num_trees} trees", whole, moves)
    return retimed(schedule, topology, num_bytes)


def is_joined(topology: Topology) -> bool:
    """Return whether the channels that lead both ways join all ranks."""
    return len(reachable(0, _neighbours(topology))) == topology.num_ranks


def packed(topology: Topology, num_trees: int) -> Iterator[tuple[int, Parents]]:
    """Yield spanning trees, each with its root, over channels that lead both ways.

    Each is a shallow one among those whose links are least used: Prim's algorithm (1957) from a central rank, by the
    use that a link would have, then by depth.
    """
    central = _central(topology)
    pace = {edge: 1 / float(link.rate_bytes_per_s) for edge, link in topology.by_edge.items()}
    used = dict(pace)  # seconds per byte on each link, if one more tree takes it
    neighbours = _neighbours(topology)
    both_ways = {
        (one, other): (*topology.channels[one, other], *topology.channels[other, one])
        for one, others in neighbours.items()
        for other in others
    }
    for number in range(num_trees):
        root = central[number % len(central)]
        parents = _grown(root, neighbours, both_ways, used, SHALLOW * min(pace.values()))
        for connection in parents.items():
            for edge in both_ways[connection]:
                used[edge] += pace[edge]
        yield root, parents


def _neighbours(topology: Topology) -> Mapping[int, list[int]]:
    neighbours: dict[int, list[int]] = {rank: [] for rank in range(topology.num_ranks)}
    for src, dst in topology.channels:
        if (dst, src) in topology.channels:
            neighbours[src].append(dst)
    return neighbours


def _grown(
    root: int,
    neighbours: Mapping[int, list[int]],
    both_ways: Mapping[Edge, Sequence[Edge]],
    used: Mapping[Edge, float],
    step: float,
) -> Parents:
    parents, depth = dict[int, int](), {root: 0}
    heap = list[tuple[float, int, int, int]]()

    def reach(rank: int) -> None:
        for other in neighbours[rank]:
            if other not in depth:
                use = max([used[edge] for edge in both_ways[rank, other]])
                heapq.heappush(heap, (use + step * depth[rank], depth[rank], rank, other))

    reach(root)
    while heap:
        _, _, parent, rank = heapq.heappop(heap)
        if rank not in depth:
            parents[rank], depth[rank] = parent, depth[parent] + 1
            reach(rank)
    return parents


def _central(topology: Topology) -> list[int]:
    hops = Hops(topology)
    farthest = [max(hops[rank].values()) for rank in range(topology.num_ranks)]
    return [rank for rank, far in enumerate(farthest) if far == min(farthest)]


def _moves(root: int, parents: Parents, first: int, chunk: int) -> Iterator[Transfer]:
    """Yield a tree's transfers from step `first` on: each rank sends its sum after its children, then copies return."""
    depth = {root: 0}
    for rank in parents:
        for child, parent in pairwise(_line(rank, parents, depth)[::-1]):
            depth[parent] = depth[child] + 1
    height = dict.fromkeys(depth, 0)
    for rank in sorted(parents, key=depth.__getitem__, reverse=True):
        height[parents[rank]] = max(height[parents[rank]], height[rank] + 1)
    for rank, parent in parents.items():
        yield Transfer(first + height[rank], rank, parent, chunk, "reduce")
        yield Transfer(first + height[root] + depth[rank] - 1, parent, rank, chunk)


def _line(rank: int, parents: Parents, known: Mapping[int, int]) -> list[int]:
    """Return the ranks from one up to the first whose depth is known."""
    line = [rank]
    while line[-1] not in known:
        line.append(parents[line[-1]])
    return line
