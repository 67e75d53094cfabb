"""Seconds of a schedule on a network, by following every transfer over its links. Steps are not in lock-step.

A transfer starts as soon as what it reads is there and nobody needs what it replaces. It then passes the links of its
path, and what they share, one after the other. Each serves transfers in the order in which they come, at its own rate,
and its latency later the head of a transfer is at the next: so a transfer is on several links at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology

Cell = tuple[int, int]


@dataclass(frozen=True)
class Simulated:
    """What a simulation found.

    Attributes:
        seconds: until the last transfer has arrived.
        arrivals_s: when each transfer of the schedule has arrived, in its order.
        busy_s: how long each link carries something.
    """

    seconds: float
    arrivals_s: tuple[float, ...]
    busy_s: Mapping[Edge, float]

    def utilisation(self, edge: Edge) -> float:
        """Return the share of the time in which a link carries something."""
        return self.busy_s.get(edge, 0.0) / self.seconds if self.seconds else 0.0


def simulate(schedule: Schedule, topology: Topology, num_bytes: float) -> Simulated:
    """Return the times of a schedule that moves `num_bytes`, the size of the whole, on a topology.

    Raises:
        ClusterError: a transfer has no path.
    """
    transfers = schedule.transfers
    followers, missing = _dependences(transfers)
    routes = _Routes(topology)
    sizes = [float(chunk.size) * num_bytes for chunk in schedule.collective.chunks]
    ready = [0.0] * len(transfers)
    arrivals = [0.0] * len(transfers)
    free, busy = defaultdict[object, float](float), defaultdict[Edge, float](float)
    # An event: a transfer's head reaches a hop of its route.
    turns = _turns(schedule)
    events = [(0.0, turns[index], index, 0) for index, count in enumerate(missing) if not count]
    heapq.heapify(events)
    while events:
        now, turn, index, hop = heapq.heappop(events)
        transfer = transfers[index]
        route = routes[transfer.src, transfer.dst, transfer.via]
        edge, servers, latency_s = route[hop]
        for server, rate in servers:
            duration = sizes[transfer.chunk] / rate
            now = max(now, free[server])
            free[server] = now + duration
            arrivals[index] = max(arrivals[index], now + duration) + (latency_s if server == edge else 0.0)
            busy[edge] += duration if server == edge else 0.0
        if hop + 1 < len(route):
            heapq.heappush(events, (now + latency_s, turn, index, hop + 1))
            continue
        for follower in followers[index]:
            ready[follower] = max(ready[follower], arrivals[index])
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(events, (ready[follower], turns[follower], follower, 0))
    return Simulated(max(arrivals, default=0.0), tuple(arrivals), busy)


def _turns(schedule: Schedule) -> list[int]:
    """Return the order of transfers that come at the same time: by steps, and each rank begins with the one after it.

    So ranks that send to all others in a step do not all begin with the first, as if links were shared evenly.
    """
    keys = [(one.step, (one.dst - one.src) % schedule.num_ranks) for one in schedule.transfers]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    turns = [0] * len(order)
    for turn, index in enumerate(order):
        turns[index] = turn
    return turns


class _Routes(dict[tuple[int, int, tuple[int, ...]], list[tuple[Edge, list[tuple[object, float]], float]]]):
    """The hops of transfers: of each link what serves it, the shared resources first, with rates, and its latency."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.shared: Mapping[Edge, list[tuple[object, float]]] = defaultdict(list)
        for one in topology.resources:
            for edge in one.edges:
                self.shared[edge].append((one.name, float(one.rate_bytes_per_s)))

    def __missing__(
        self, key: tuple[int, int, tuple[int, ...]]
    ) -> list[tuple[Edge, list[tuple[object, float]], float]]:
        links = [self.topology.by_edge[edge] for edge in self.topology.path(*key)]
        self[key] = found = [
            (edge, [*self.shared[edge], (edge, float(link.rate_bytes_per_s))], link.latency_s)
            for link in links
            for edge in [(link.src, link.dst)]
        ]
        return found


def _dependences(transfers: Sequence[Transfer]) -> tuple[list[list[int]], list[int]]:
    """Return which transfers wait for each, and for how many each waits."""
    followers: list[list[int]] = [[] for _ in transfers]
    missing = [0] * len(transfers)
    for index, before in enumerate(_before(transfers)):
        missing[index] = len(before)
        for one in before:
            followers[one].append(index)
    return followers, missing


def _before(transfers: Sequence[Transfer]) -> Iterator[set[int]]:
    """Yield the transfers of earlier steps that each has to wait for.

    It reads what the last copy and the sums after it have left, and writes when those before have been read; sums may
    be added in any order.
    """
    writes, reads = defaultdict[Cell, list[int]](list), defaultdict[Cell, list[int]](list)
    waiting, step = list[int](), 0
    for index, transfer in enumerate(transfers):
        if transfer.step != step:
            for earlier in waiting:
                _note(transfers[earlier], earlier, writes, reads)
            waiting, step = [], transfer.step
        waiting.append(index)
        target = (transfer.dst, transfer.chunk)
        before = {*writes[transfer.src, transfer.chunk], *reads[target]}
        yield before | ({*writes[target]} if transfer.op == "copy" else set())


def _note(transfer: Transfer, index: int, writes: dict[Cell, list[int]], reads: dict[Cell, list[int]]) -> None:
    source, target = (transfer.src, transfer.chunk), (transfer.dst, transfer.chunk)
    reads[source].append(index)
    if transfer.op == "copy":
        writes[target], reads[target] = [index], []
    else:
        writes[target].append(index)
