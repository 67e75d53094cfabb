"""Chunks with one source and one target, as of an all-to-all: each takes a path that evens out the load of links.

Paths are chosen again and again, one chunk after the other, where a link costs the more the more it carries: so the
busiest link becomes less busy. Chunks may be of any sizes, so an all-to-all of experts needs nothing else.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.search.collectives.channels import limits, orbits
from shardwright.search.collectives.greedy import greedy
from shardwright.search.collectives.symmetry import Permutation, chunk_images, fitting

PASSES = (0.5, 1, 2, 4, 8, 8)
"""All paths are chosen anew so many times. In each pass, a link that is as busy as the bound allows costs more than an
idle one by this power of two; were it steep at first, chunks would never leave the long ways that they took early.
"""


def routed(
    topology: Topology, collective: Collective, num_bytes: float, group: Sequence[Permutation], seed: int = 0
) -> Schedule:
    """Return a schedule of chunks with one source and at most one target each, timed for `num_bytes`."""
    group = fitting(collective, group)
    paths = _Routes(topology, collective, group, seed).paths()
    return greedy(topology, collective, num_bytes, group, seed, paths)


class _Routes:
    """The load of each limit, in seconds per byte, and the path of each chunk that stands for its orbit."""

    def __init__(
        self,
        topology: Topology,
        collective: Collective,
        group: Sequence[Permutation],
        seed: int,
    ) -> None:
        self.topology, self.collective = topology, collective
        self.draw = random.Random(seed)
        all_limits = limits(topology, group)
        self.rates = [float(limit.rate) for limit in all_limits]
        self.loads = [0.0] * len(all_limits)
        stands = orbits(topology, group)
        taken: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
        for number, limit in enumerate(all_limits):
            for channel, times in Counter(stands[channel] for channel in limit.channels).items():
                taken[channel].append((number, times))
        self.taken = {channel: taken[stands[channel]] for channel in topology.channels}
        self.after: dict[int, list[int]] = defaultdict(list)
        for src, dst in topology.channels:
            self.after[src].append(dst)
        self.bound = float(least_seconds_per_byte(topology, collective).seconds_per_byte) or 1.0
        images = chunk_images(collective, group) or []
        self.chunks = sorted({min(moved) for moved in zip(*images, strict=True)})

    def paths(self) -> dict[int, list[int]]:
        """Return the ranks that each chunk passes."""
        ends = {chunk: self._ends(chunk) for chunk in self.chunks}
        moved = [chunk for chunk, (src, dst) in ends.items() if src != dst]
        path_of = dict[int, list[int]]()
        for power in PASSES:
            self.draw.shuffle(moved)
            for chunk in moved:
                if chunk in path_of:
                    self._load(chunk, path_of[chunk], -1)
                path_of[chunk] = self._path(*ends[chunk], power / self.bound)
                self._load(chunk, path_of[chunk], 1)
        return path_of

    def _ends(self, chunk: int) -> Edge:
        _, sources, targets = self.collective.chunks[chunk]
        return (sources[0], targets[0]) if targets else (sources[0], sources[0])

    def _load(self, chunk: int, path: Sequence[int], sign: int) -> None:
        size = float(self.collective.chunks[chunk].size) * sign
        for channel in pairwise(path):
            for number, times in self.taken[channel]:
                self.loads[number] += size * times / self.rates[number]

    def _path(self, src: int, dst: int, steep: float) -> list[int]:
        """Return a cheapest path (Dijkstra 1959)."""
        prices = [2 ** min(steep * load, 60) / rate for load, rate in zip(self.loads, self.rates, strict=True)]
        before, heap, done = dict[int, int](), [(0.0, self.draw.random(), src, src)], set[int]()
        while dst not in done:
            cost, _, node, came = heapq.heappop(heap)
            if node in done:
                continue
            done.add(node)
            before[node] = came
            for after in self.after[node]:
                if after not in done:
                    price = sum(prices[number] for number, _ in self.taken[node, after])
                    heapq.heappush(heap, (cost + price, self.draw.random(), after, node))
        return list(_back(dst, src, before))[::-1]


def _back(node: int, src: int, before: dict[int, int]) -> Iterator[int]:
    while node != src:
        yield node
        node = before[node]
    yield src
