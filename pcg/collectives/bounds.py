"""Bounds that no schedule can beat: steps and latency, from distances; seconds per byte, from cuts that flows find.

The bandwidth bound of all-gather and broadcast, and so of reduce-scatter and reduce, is the exact optimum: trees can be
packed that meet it (Edmonds 1973), also over relays into which as much goes as comes out (ForestColl, arXiv 2402.06787,
theorem 1). The others' are bounds alone.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from shardwright.pcg.collectives.collective import Chunk, Collective
from shardwright.pcg.collectives.flows import Network
from shardwright.pcg.collectives.topology import Edge, Topology, reachable

MOST_ENUMERATED = 12
"""The most nodes of a topology of which all cuts are tried."""
MOST_LATENCIES = 64
"""The most chunks whose latencies are looked at."""


class Bound(NamedTuple):
    """A bound: no schedule takes fewer seconds per byte of the whole, latencies left out; and what makes it so."""

    seconds_per_byte: Fraction
    reason: str

    def rounds(self, topology: Topology, share: Fraction) -> Fraction:
        """Return the rounds that are needed where a round carries `share` of all bytes over a link of the unit rate."""
        return self.seconds_per_byte * topology.unit_rate / share


def least_steps(topology: Topology, collective: Collective) -> int:
    """Return the least number of steps: each crosses from one rank to the next, through any number of relays."""
    hops = Hops(topology)
    return max((_steps(hops, chunk, collective.reduces) for chunk in set(collective.chunks)), default=0)


def least_latency_s(topology: Topology, collective: Collective) -> float:
    """Return the seconds that no schedule can beat, however few the bytes: the latencies of the fastest ways.

    Of large collectives some chunks alone are looked at, which leaves it a bound.
    """
    chunks = [(one.sources, one.targets) for one in dict.fromkeys(collective.chunks) if one.size and one.targets]
    far, away = (max if collective.reduces else min), Latencies(topology)
    latencies_s = (
        max(far(away[src][dst] for src in sources) for dst in targets) for sources, targets in chunks[:MOST_LATENCIES]
    )
    return max(latencies_s, default=0.0)


def least_seconds_per_byte(topology: Topology, collective: Collective) -> Bound:
    """Return the largest bound that is known."""
    if collective.reduces and not all(len(chunk.targets) <= 1 for chunk in collective.chunks):
        return _all_reduce_bound(topology, collective)
    if collective.reduces:
        return _gather_bound(topology.reversed(), _turned(collective.chunks))
    bound = _gather_bound(topology, collective.chunks)
    if all(len(chunk.targets) <= 1 for chunk in collective.chunks):
        single = [chunk for chunk in collective.chunks if len(chunk.sources) == 1]  # of several, one is enough
        back = _gather_bound(topology.reversed(), _turned(single))
        bound = max(bound, back, _point_bound(topology, collective), key=lambda one: one.seconds_per_byte)
    return bound


class Hops(dict[int, Mapping[int, int]]):
    """The steps from each rank to every other: a step crosses relays, but no rank."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology

    def __missing__(self, src: int) -> Mapping[int, int]:
        num_ranks, neighbours = self.topology.num_ranks, self.topology.successors
        steps_to, queue = dict[int, int](), deque([(src, 0)])
        while queue:
            node, steps = queue.popleft()
            if node in steps_to:
                continue
            steps_to[node] = steps
            for after in neighbours[node]:
                if node < num_ranks:  # a step begins at a rank, and entering relays or ranks costs it
                    queue.append((after, steps + 1))
                else:
                    queue.appendleft((after, steps))
        self[src] = {rank: steps_to[rank] for rank in range(num_ranks)}
        return self[src]


class Latencies(dict[int, Mapping[int, float]]):
    """The least latency from each rank to every other (Dijkstra 1959)."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology

    def __missing__(self, src: int) -> Mapping[int, float]:
        topology, latency_of, heap = self.topology, dict[int, float](), [(0.0, src)]
        while heap:
            latency_s, node = heapq.heappop(heap)
            if node not in latency_of:
                latency_of[node] = latency_s
                for after in topology.successors[node]:
                    if after not in latency_of:
                        heapq.heappush(heap, (latency_s + topology.by_edge[node, after].latency_s, after))
        self[src] = latency_of
        return latency_of


def _steps(hops: Hops, chunk: Chunk, reduces: bool) -> int:
    """A copy comes from its nearest source; a sum needs all of them."""
    far = max if reduces else min
    return max((far(hops[src][dst] for src in chunk.sources) for dst in chunk.targets), default=0)


def _turned(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    return tuple(chunk._replace(sources=chunk.targets, targets=chunk.sources) for chunk in chunks if chunk.targets)


def _gather_bound(topology: Topology, chunks: Iterable[Chunk]) -> Bound:
    """The largest bound of a cut: the chunks needed beyond it that start before it, over the rates across it.

    Newton's method on the ratio (Dinkelbach 1967): a time is too short if what a rank needs cannot flow to it, and the
    least cut then gives a longer time. The last time is the largest ratio, exactly.
    """
    graph, best = FlowGraph(topology), Bound(Fraction(0), "nothing is moved")
    for target, supply in sorted(supplies(chunks).items()):
        while (cut := graph.cut(target, supply, best.seconds_per_byte)) is not None:
            best = cut
    return best


def supplies(chunks: Iterable[Chunk]) -> dict[int, dict[tuple[int, ...], Fraction]]:
    """Return what each rank needs from elsewhere: the bytes that start at each set of sources."""
    needed: dict[int, dict[tuple[int, ...], Fraction]] = defaultdict(lambda: defaultdict(Fraction))
    for chunk in chunks:
        for target in chunk.targets:
            if target not in chunk.sources and chunk.size:
                needed[target][chunk.sources] += chunk.size
    return needed


class FlowGraph:
    """A topology as a network for flows, in which what links share at one end is a node of its own.

    A resource whose links neither begin nor end at one node is left out, so bounds stay true, but may be less sharp.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.num_nodes = topology.num_nodes
        self.edges, self.rooms = list[Edge](), list[int]()
        after, before = self._shared(tail=True), self._shared(tail=False)
        for link in topology.links:
            src, dst = after.get((link.src, link.dst), link.src), before.get((link.src, link.dst), link.dst)
            self._add((src, dst), topology.multiplicity(link))

    def _add(self, edge: Edge, room: int) -> None:
        self.edges.append(edge)
        self.rooms.append(room)

    def _shared(self, *, tail: bool) -> dict[Edge, int]:
        """Add a node for each resource whose links begin (`tail`) or end at one node; return the node of each link."""
        node_of = dict[Edge, int]()
        for one in self.topology.resources:
            ends = {edge[0 if tail else 1] for edge in one.edges}
            if len(ends) != 1 or any(edge in node_of for edge in one.edges):
                continue
            (end,), node = ends, self.num_nodes
            self.num_nodes += 1
            self._add((end, node) if tail else (node, end), self.topology.multiplicity(one))
            node_of |= dict.fromkeys(one.edges, node)
        return node_of

    def cut(self, target: int, supply: Mapping[tuple[int, ...], Fraction], time: Fraction) -> Bound | None:
        """Return the bound of a cut that a time per byte violates; None if all that the target needs flows to it."""
        units, needs = whole(list(supply.values()))
        per_unit = time * units * self.topology.unit_rate  # the units that a link of the unit rate carries in the time
        network, entries, num_free = self._supplied(tuple(supply))
        unlimited = sum(needs) * per_unit.denominator
        rooms = [room * per_unit.numerator for room in self.rooms] + [need * per_unit.denominator for need in needs]
        if network.max_flow(self.num_nodes, target, rooms + [unlimited] * num_free, unlimited) == unlimited:
            return None
        side = network.source_side(self.num_nodes)
        inside = sum(need for need, entry in zip(needs, entries, strict=True) if entry in side)
        across = sum(room for room, (a, b) in zip(self.rooms, self.edges, strict=True) if a in side and b not in side)
        beyond = [rank for rank in range(self.topology.num_ranks) if rank not in side]
        return _entering(Fraction(inside, units), across * self.topology.unit_rate, beyond)

    def _supplied(self, keys: Sequence[tuple[int, ...]]) -> tuple[Network, list[int], int]:
        """Return the network with a source, where its supplies enter, and the number of unlimited edges at the end.

        Bytes that several ranks hold enter at a node of their own, which has a free edge to each of them.
        """
        entries, free = list[int](), list[Edge]()
        for number, key in enumerate(keys):
            node = key[0] if len(key) == 1 else self.num_nodes + 1 + number
            entries.append(node)
            free += [] if len(key) == 1 else [(node, rank) for rank in key]
        edges = [*self.edges, *((self.num_nodes, entry) for entry in entries), *free]
        return Network(self.num_nodes + 1 + len(keys), edges), entries, len(free)


def whole(shares: Sequence[Fraction]) -> tuple[int, list[int]]:
    """Return a number of units, and each share as a whole number of them."""
    units = lcm(*(share.denominator for share in shares))
    return units, [int(share * units) for share in shares]


def _entering(share: Fraction, rate: Fraction, ranks: Sequence[int]) -> Bound:
    return Bound(share / rate, f"{share} of the bytes enter {_named(ranks)} at {float(rate) / 1e9:g} GB/s")


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


# ---- every chunk from one rank to one rank


def _point_bound(topology: Topology, collective: Collective) -> Bound:
    """The largest of: cuts, all of them in small networks, and the bytes times the links that they must pass."""
    demand = _demand(collective)
    bounds = [_distance_bound(topology, demand)]
    bounds += [_cut_bound(topology, demand, side) for side in _sides(topology)]
    bounds += [_flow_bound(topology, demand, ranks) for ranks in _runs(topology)]
    return max(bounds, key=lambda bound: bound.seconds_per_byte)


def _demand(collective: Collective) -> dict[Edge, Fraction]:
    demand: dict[Edge, Fraction] = defaultdict(Fraction)
    for chunk in collective.chunks:
        for dst in chunk.targets:
            if dst not in chunk.sources:
                demand[chunk.sources[0], dst] += chunk.size if len(chunk.sources) == 1 else 0
    return demand


def _distance_bound(topology: Topology, demand: Mapping[Edge, Fraction]) -> Bound:
    """All links together carry every byte once for each link of its shortest path."""
    links = {src: _links_to(topology, src) for src in {src for src, _ in demand}}
    passed = sum((share * links[src][dst] for (src, dst), share in demand.items()), Fraction(0))
    rate = sum((link.rate_bytes_per_s for link in topology.links), Fraction(0))
    return Bound(
        passed / rate, f"bytes pass {float(passed):g} links on average, all links have {float(rate) / 1e9:g} GB/s"
    )


def _links_to(topology: Topology, src: int) -> Mapping[int, int]:
    num_links, queue = {src: 0}, [src]
    for node in queue:
        for after in topology.successors[node]:
            if after not in num_links:
                num_links[after] = num_links[node] + 1
                queue.append(after)
    return num_links


def _sides(topology: Topology) -> Iterator[frozenset[int]]:
    """Yield nodes to be cut off: every half of a small network; else those that fast links join."""
    nodes = topology.num_nodes
    if nodes <= MOST_ENUMERATED:
        yield from (frozenset(n for n in range(nodes) if mask >> n & 1) for mask in range(1, (1 << nodes) - 1))
        return
    for rate in sorted({link.rate_bytes_per_s for link in topology.links}):
        yield from islands(topology, rate)


def _runs(topology: Topology) -> Iterator[frozenset[int]]:
    """Yield halves, quarters and eighths of the ranks in their order, such as machines or planes of a grid."""
    ranks = topology.num_ranks
    for size in {ranks // part for part in (2, 4, 8) if ranks % part == 0}:
        yield from (frozenset(range(start, start + size)) for start in range(0, ranks, size))


def islands(topology: Topology, rate: Fraction) -> list[frozenset[int]]:
    """Return the parts of a network that hang together by links faster than `rate`."""
    near: dict[int, list[int]] = {node: [] for node in range(topology.num_nodes)}
    for link in topology.links:
        if link.rate_bytes_per_s > rate:
            near[link.src].append(link.dst)
            near[link.dst].append(link.src)
    parts, seen = list[frozenset[int]](), set[int]()
    for node in near:
        if node not in seen:
            parts.append(frozenset(reachable(node, near)))
            seen |= parts[-1]
    return parts


def _cut_bound(topology: Topology, demand: Mapping[Edge, Fraction], side: frozenset[int]) -> Bound:
    share = sum((one for (src, dst), one in demand.items() if src in side and dst not in side), Fraction(0))
    beyond = [rank for rank in range(topology.num_ranks) if rank not in side]
    return _entering(share, rate_out_of(topology, side), beyond) if share else Bound(Fraction(0), "")


def _flow_bound(topology: Topology, demand: Mapping[Edge, Fraction], ranks: frozenset[int]) -> Bound:
    """Bound the rate out of some ranks by the largest flow from them to the others, over any relays."""
    graph = FlowGraph(topology)
    source, sink, most = graph.num_nodes, graph.num_nodes + 1, sum(graph.rooms)
    ends = [(source, rank) if rank in ranks else (rank, sink) for rank in range(topology.num_ranks)]
    network = Network(graph.num_nodes + 2, [*graph.edges, *ends])
    rate = network.max_flow(source, sink, [*graph.rooms, *[most] * len(ends)]) * topology.unit_rate
    share = sum((one for (src, dst), one in demand.items() if src in ranks and dst not in ranks), Fraction(0))
    beyond = [rank for rank in range(topology.num_ranks) if rank not in ranks]
    return _entering(share, rate, beyond) if share else Bound(Fraction(0), "")


def rate_out_of(topology: Topology, side: frozenset[int]) -> Fraction:
    """Return the most bytes per second that leave a set of nodes: links alone, or with all that a resource limits."""
    leaving = {edge for edge in topology.by_edge if edge[0] in side and edge[1] not in side}
    rates = {edge: topology.by_edge[edge].rate_bytes_per_s for edge in leaving}
    total, taken = Fraction(0), set[Edge]()
    for one in topology.resources:
        shared = (one.edges & leaving) - taken
        together = sum((rates[edge] for edge in shared), Fraction(0))
        if shared and one.rate_bytes_per_s < together:
            total += one.rate_bytes_per_s
            taken |= shared
    return total + sum((rates[edge] for edge in leaving - taken), Fraction(0))


# ---- sums that several ranks need


def _all_reduce_bound(topology: Topology, collective: Collective) -> Bound:
    """The larger of: least cuts, which every sum of all ranks enters; and messages between parts of the network."""
    everyone = tuple(range(topology.num_ranks))
    share = sum((c.size for c in collective.chunks if c.sources == c.targets == everyone), Fraction(0))
    if not share or len(everyone) == 1:
        return Bound(Fraction(0), "no bound is known for sums that some ranks need")
    parts = [[frozenset((rank,)) for rank in everyone]]
    parts += [_with_ranks(topology, rate) for rate in {link.rate_bytes_per_s for link in topology.links}]
    bounds = [_message_bound(topology, share, part) for part in parts if len(part) > 1]
    return max([*bounds, _crossing_bound(topology, share)], key=lambda bound: bound.seconds_per_byte)


def _with_ranks(topology: Topology, rate: Fraction) -> list[frozenset[int]]:
    return [part for part in islands(topology, rate) if any(node < topology.num_ranks for node in part)]


def _message_bound(topology: Topology, share: Fraction, parts: Sequence[frozenset[int]]) -> Bound:
    """A sum over k parts that all of them need takes 2 (k − 1) messages, each of which leaves its sender's part.

    Harary and Schwenk, "The communication problem on graphs and digraphs" (1974).
    """
    messages = 2 * (len(parts) - 1)
    rate = sum((rate_out_of(topology, part) for part in parts), Fraction(0))
    reason = f"{messages} messages between {len(parts)} parts, which send at {float(rate) / 1e9:g} GB/s together"
    return Bound(share * messages / rate, reason)


def _crossing_bound(topology: Topology, share: Fraction) -> Bound:
    graph = FlowGraph(topology)
    network, least, beyond = Network(graph.num_nodes, graph.edges), sum(graph.rooms), [0]
    for rank in range(1, topology.num_ranks):
        for src, dst in ((0, rank), (rank, 0)):
            flow = network.max_flow(src, dst, graph.rooms, least)
            if flow < least:
                side = network.source_side(src)
                least, beyond = flow, [one for one in range(topology.num_ranks) if one not in side]
    return _entering(share, least * topology.unit_rate, beyond)
