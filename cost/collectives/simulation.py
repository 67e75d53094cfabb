"""Seconds of a schedule on a network, by following every transfer over its links. Steps are not in lock-step.

A transfer starts as soon as what it reads is there, nobody needs what it replaces, and the one before it from the same
rank to the same rank has started: a connection keeps its order. It then passes the links of its
path, and what they share, one after the other. Each serves one transfer at a time, at its own rate; of those that wait,
the one of the earliest step. A latency later the head of a transfer is at the next link: it is on several at once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology

Cell = tuple[int, int]
Server = Edge | str
"""What a transfer passes: a link, or by its name a resource."""
Hop = tuple[Server, float, float]
"""A server, its rate in bytes per second, and the latency after it."""
Event = tuple[float, int, int, int, Server | None]
"""When, which turn, transfer and hop of its route; and the server that becomes free, else the head reaches the hop."""
_LAST = 1 << 62
"""Comes after all turns."""


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        seconds: until the last transfer has arrived.
        starts_s, arrivals_s: when each transfer of the schedule starts, and has arrived, in its order.
        busy_s: how long each link carries something.
    """

    seconds: float
    starts_s: tuple[float, ...]
    arrivals_s: tuple[float, ...]
    busy_s: Mapping[Edge, float]

    def utilisation(self, edge: Edge) -> float:
        """Return the share of the time in which a link carries something."""
        return self.busy_s.get(edge, 0.0) / self.seconds if self.seconds else 0.0


def simulate(schedule: Schedule, topology: Topology, num_bytes: float, *, in_order: bool = True) -> Simulated:
    """Return the times of a schedule that moves `num_bytes`, the size of the whole, on a topology.

    `in_order`: whether a connection keeps its order. Without, a transfer may overtake others that are not ready.

    Raises:
        ClusterError: a transfer has no path.
    """
    run = _Run(schedule, topology, num_bytes, in_order)
    run.follow()
    busy = {server: seconds for server, seconds in run.busy.items() if isinstance(server, tuple)}
    return Simulated(max(run.arrivals, default=0.0), tuple(run.starts), tuple(run.arrivals), busy)


def busiest_s_per_byte(schedule: Schedule, topology: Topology) -> float:
    """Return the seconds per byte of the busiest link or resource: no simulation takes less.

    Raises:
        ClusterError: a transfer has no path.
    """
    sizes = [float(chunk.size) for chunk in schedule.collective.chunks]
    sent, busy = defaultdict[tuple[int, int, tuple[int, ...]], float](float), defaultdict[Server, float](float)
    for _, src, dst, chunk, _, via in schedule.transfers:
        sent[src, dst, via] += sizes[chunk]
    routes = _Routes(topology)
    for key, share in sent.items():
        for server, rate, _ in routes[key]:
            busy[server] += share / rate
    return max(busy.values(), default=0.0)


class _Run:
    """The state of a simulation: what waits at each server, and what happens next."""

    def __init__(self, schedule: Schedule, topology: Topology, num_bytes: float, in_order: bool) -> None:
        self.transfers = schedule.transfers
        self.sizes = [float(chunk.size) * num_bytes for chunk in schedule.collective.chunks]
        self.routes, self.turns = _Routes(topology), _turns(schedule)
        self.followers, self.missing = _dependences(self.transfers)
        self.next_of = _next_of_connection(self.transfers) if in_order else {}
        for index in self.next_of.values():
            self.missing[index] += 1
        self.ready, self.starts, self.arrivals = ([0.0] * len(self.transfers) for _ in range(3))
        self.waiting: dict[Server, list[tuple[int, int, int]]] = defaultdict(list)
        self.serving, self.busy = set[Server](), defaultdict[Server, float](float)
        first = (index for index, many in enumerate(self.missing) if not many)
        self.events: list[Event] = [(0.0, self.turns[index], index, 0, None) for index in first]
        heapq.heapify(self.events)

    def follow(self) -> None:
        """Go from event to event. Of the same moment, transfers come before servers, which choose among them."""
        events = self.events
        while events:
            now, turn, index, hop, freed = heapq.heappop(events)
            if freed is None:
                server = self._route(index)[hop][0]
                heapq.heappush(self.waiting[server], (turn, index, hop))
                if server in self.serving:
                    continue
                self.serving.add(server)
                heapq.heappush(events, (now, _LAST, index, hop, server))
            elif self.waiting[freed]:
                self._serve(now, freed)
            else:
                self.serving.discard(freed)

    def _serve(self, now: float, server: Server) -> None:
        turn, index, hop = heapq.heappop(self.waiting[server])
        route = self._route(index)
        _, rate, latency_s = route[hop]
        duration = self.sizes[self.transfers[index].chunk] / rate
        self.busy[server] += duration
        self.arrivals[index] = max(self.arrivals[index], now + duration) + latency_s
        heapq.heappush(self.events, (now + duration, _LAST, index, hop, server))
        if hop == 0:
            self.starts[index] = now
            if index in self.next_of:
                self._release(self.next_of[index], now)
        if hop + 1 < len(route):
            heapq.heappush(self.events, (now + latency_s, turn, index, hop + 1, None))
            return
        for follower in self.followers[index]:
            self._release(follower, self.arrivals[index])

    def _release(self, index: int, when: float) -> None:
        self.ready[index] = max(self.ready[index], when)
        self.missing[index] -= 1
        if not self.missing[index]:
            heapq.heappush(self.events, (self.ready[index], self.turns[index], index, 0, None))

    def _route(self, index: int) -> list[Hop]:
        transfer = self.transfers[index]
        return self.routes[transfer.src, transfer.dst, transfer.via]


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


class _Routes(dict[tuple[int, int, tuple[int, ...]], list[Hop]]):
    """The hops of transfers: what serves them, resources before the link that has a part in them."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology
        self.shared: Mapping[Edge, list[Hop]] = defaultdict(list)
        for one in topology.resources:
            for edge in one.edges:
                self.shared[edge].append((one.name, float(one.rate_bytes_per_s), 0.0))

    def __missing__(self, key: tuple[int, int, tuple[int, ...]]) -> list[Hop]:
        self[key] = hops = list[Hop]()
        for edge in self.topology.path(*key):
            link = self.topology.by_edge[edge]
            hops += [*self.shared[edge], (edge, float(link.rate_bytes_per_s), link.latency_s)]
        return hops


def _next_of_connection(transfers: Sequence[Transfer]) -> dict[int, int]:
    last, following = dict[Edge, int](), dict[int, int]()
    for index, transfer in enumerate(transfers):
        edge = (transfer.src, transfer.dst)
        if edge in last:
            following[last[edge]] = index
        last[edge] = index
    return following


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
