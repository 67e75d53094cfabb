"""A network as a directed graph: links with a rate and a latency, and resources that several links share.

Nodes 0 to num_ranks - 1 are ranks. The nodes after them are *relays*, such as switches: they pass data on and hold
none. Rates are exact fractions, so that an optimum can be compared with its bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, reduce
from itertools import pairwise
from math import gcd

from shardwright.pcg import checks

Edge = tuple[int, int]
"""A link's sender and receiver."""
MOST_NODES = 1 << 16
MOST_LINKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """A link from node `src` to node `dst`; parallel cables are one link with their rates added."""

    src: int
    dst: int
    rate_bytes_per_s: Fraction
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        checks.canonical(self, {
            "rate_bytes_per_s": (exact_rate, "bytes per second"),
            "latency_s": (checks.non_negative, "seconds"),
        })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that several links share, such as a NIC, a PCIe switch or a bridge of sockets. It has one rate."""

    name: str
    rate_bytes_per_s: Fraction
    edges: frozenset[Edge]

    def __post_init__(self) -> None:
        checks.canonical(self, {
            "name": (checks.text, "what the links share"),
            "rate_bytes_per_s": (exact_rate, "bytes per second"),
        })  # fmt: skip
        object.__setattr__(self, "edges", frozenset(self.edges))


@dataclass(frozen=True)
class Topology:
    """Ranks, relays and the links between them. Every rank reaches every other.

    Attributes:
        num_ranks: nodes 0 to num_ranks - 1; they hold data, and may pass on what they hold.
        relays: the names of the nodes after them.
        links: at most one from one node to another.
        resources: rates that several links share, on top of their own.

    Raises:
        ClusterError: a rate that is not positive, a link twice, to itself or to no node; ranks without a connection.
    """

    name: str
    num_ranks: int
    links: tuple[Link, ...]
    relays: tuple[str, ...] = ()
    resources: tuple[Resource, ...] = ()

    def __post_init__(self) -> None:
        checks.canonical(self, {
            "name": (checks.text, "what people call the network"),
            "num_ranks": (checks.positive_int, "the number of ranks"),
        })  # fmt: skip
        for field in ("links", "relays", "resources"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        if self.num_nodes > MOST_NODES or len(self.links) > MOST_LINKS:
            problem = f"expected at most {MOST_NODES} nodes and {MOST_LINKS} links"
            raise self._error("links", f"{problem}, got {self.num_nodes} and {len(self.links)}; describe a part of it")
        self._check_links()
        self._check_resources()
        self._check_connected()

    @property
    def num_nodes(self) -> int:
        return self.num_ranks + len(self.relays)

    @cached_property
    def by_edge(self) -> Mapping[Edge, Link]:
        return {(link.src, link.dst): link for link in self.links}

    @cached_property
    def successors(self) -> Mapping[int, tuple[int, ...]]:
        """The nodes that each node has a link to, in order of their numbers."""
        return _neighbours(self.num_nodes, self.by_edge)

    @cached_property
    def predecessors(self) -> Mapping[int, tuple[int, ...]]:
        """The nodes that have a link to each node, in order of their numbers."""
        return _neighbours(self.num_nodes, ((dst, src) for src, dst in self.by_edge))

    @cached_property
    def channels(self) -> Mapping[Edge, tuple[Edge, ...]]:
        """The pairs of ranks between which a transfer can pass, with the links of its `path`."""
        paths = dict[Edge, tuple[Edge, ...]]()
        for src in range(self.num_ranks):
            near = {*self.successors[src], *(self._relayed[src] if self.relays else ())}
            paths |= {(src, dst): self.path(src, dst) for dst in sorted(near) if dst < self.num_ranks and dst != src}
        return paths

    @cached_property
    def unit_rate(self) -> Fraction:
        """The largest rate, in bytes per second, of which every link and resource has a whole multiple."""
        return reduce(_gcd, (entry.rate_bytes_per_s for entry in (*self.links, *self.resources)), Fraction(0))

    def multiplicity(self, entry: Link | Resource) -> int:
        """Return how many chunks a link or resource carries in a round, in which the unit rate carries one."""
        return int(entry.rate_bytes_per_s / self.unit_rate)

    def node_name(self, node: int) -> str:
        return f"rank {node}" if node < self.num_ranks else self.relays[node - self.num_ranks]

    def path(self, src: int, dst: int, via: tuple[int, ...] = ()) -> tuple[Edge, ...]:
        """Return the links that a transfer passes: over the relays `via`, else the link, else the fewest relays.

        Raises:
            ClusterError: there is no such path.
        """
        if not via and (src, dst) in self.by_edge:
            return ((src, dst),)
        nodes = (src, *via, dst) if via else self._relayed[src].get(dst, (src, dst))
        edges = tuple(pairwise(nodes))
        missing = next((edge for edge in edges if edge not in self.by_edge), None)
        relays = all(self.num_ranks <= node < self.num_nodes for node in nodes[1:-1])
        if missing is None and relays:
            return edges
        problem = "only relays pass data on" if missing is None else f"no link from {missing[0]} to {missing[1]}"
        way = f" on the way from {src} to {dst}" if via else ""
        raise self._error("path", f"{problem}{way}; send over links of the topology, or synthesize a schedule for it")

    def busy_s_per_byte(self, shares: Mapping[Edge, Fraction]) -> Fraction:
        """Return the least seconds in which the links carry these bytes, all at once: the busiest link or resource."""
        links = (share / self.by_edge[edge].rate_bytes_per_s for edge, share in shares.items())
        shared = (
            sum((shares.get(edge, Fraction(0)) for edge in one.edges), Fraction(0)) / one.rate_bytes_per_s
            for one in self.resources
        )
        return max((*links, *shared), default=Fraction(0))

    def latency_s(self, path: Iterable[Edge]) -> float:
        """Return the latency of a path: the sum of its links'."""
        return sum(self.by_edge[edge].latency_s for edge in path)

    def reversed(self) -> Topology:
        """Return the topology with every link turned around."""
        links = tuple(Link(link.dst, link.src, link.rate_bytes_per_s, link.latency_s) for link in self.links)
        shared = tuple(
            Resource(one.name, one.rate_bytes_per_s, frozenset((dst, src) for src, dst in one.edges))
            for one in self.resources
        )
        return Topology(self.name, self.num_ranks, links, self.relays, shared)

    @cached_property
    def is_two_way(self) -> bool:
        """True if the network stays the same when every link is turned around."""
        back = self.reversed()
        return set(back.links) == set(self.links) and set(back.resources) == set(self.resources)

    @cached_property
    def _relayed(self) -> Mapping[int, Mapping[int, tuple[int, ...]]]:
        return _Paths(self)

    def _check_links(self) -> None:
        seen = set[Edge]()
        for index, link in enumerate(self.links):
            nodes = (link.src, link.dst)
            if not all(isinstance(node, int) and 0 <= node < self.num_nodes for node in nodes):
                problem = f"expected nodes from 0 to {self.num_nodes - 1}, got {link.src} to {link.dst}; correct them"
            elif link.src == link.dst:
                problem = f"expected two nodes, got {link.src} twice; remove the link"
            elif nodes in seen:
                problem = f"expected one link from {link.src} to {link.dst}, got two; add their rates"
            else:
                seen.add(nodes)
                continue
            raise self._error(f"links[{index}]", problem)

    def _check_resources(self) -> None:
        for index, one in enumerate(self.resources):
            unknown = next((edge for edge in sorted(one.edges) if edge not in self.by_edge), None)
            if unknown is not None or not one.edges:
                got = f"{unknown[0]} to {unknown[1]}" if unknown else "none"
                raise self._error(f"resources[{index}].edges", f"expected links of the topology, got {got}; name some")

    def _check_connected(self) -> None:
        for neighbours, there in ((self.successors, "from rank 0 to"), (self.predecessors, "to rank 0 from")):
            reached = reachable(0, neighbours)
            missing = next((rank for rank in range(self.num_ranks) if rank not in reached), None)
            if missing is not None:
                raise self._error(
                    "links", f"expected a connected network, got no path {there} rank {missing}; add links"
                )

    def _error(self, field: str, problem: str) -> checks.FieldError:
        return checks.FieldError(f"Topology {self.name!r}", field, problem)


class _Paths(dict[int, Mapping[int, tuple[int, ...]]]):
    """Shortest paths through relays alone, from the ranks that were asked about."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.topology = topology

    def __missing__(self, src: int) -> Mapping[int, tuple[int, ...]]:
        topology, queue = self.topology, deque([src])
        paths: dict[int, tuple[int, ...]] = {src: (src,)}
        while queue:
            node = queue.popleft()
            for after in topology.successors.get(node, ()):
                if after not in paths:
                    paths[after] = (*paths[node], after)
                    if after >= topology.num_ranks:
                        queue.append(after)
        self[src] = paths
        return paths


def exact_rate(value: object, owner: str, field: str, unit: str) -> Fraction:
    """Return `value` as an exact fraction; raise a `FieldError` unless it is positive."""
    checks.positive(value, owner, field, unit)
    return Fraction(value)  # pyright: ignore[reportCallIssue, reportArgumentType]


def reachable(start: int, neighbours: Mapping[int, Iterable[int]]) -> set[int]:
    """Return the nodes that a walk from `start` reaches."""
    reached, queue = {start}, [start]
    while queue:
        new = [node for node in neighbours[queue.pop()] if node not in reached]
        reached.update(new)
        queue.extend(new)
    return reached


def joined(links: Iterable[tuple[int, int, Fraction | int | float, float]]) -> Iterator[Link]:
    """Yield a link each way for (a, b, rate in bytes per second, latency in seconds)."""
    for a, b, rate, latency in links:
        yield Link(a, b, Fraction(rate), latency)
        yield Link(b, a, Fraction(rate), latency)


def _neighbours(num_nodes: int, edges: Iterable[Edge]) -> dict[int, tuple[int, ...]]:
    lists: dict[int, list[int]] = {node: [] for node in range(num_nodes)}
    for src, dst in edges:
        lists[src].append(dst)
    return {node: tuple(sorted(after)) for node, after in lists.items()}


def _gcd(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(gcd(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)
