"""Networks by their shape: rings, grids, switches, fat trees, dragonflies, and the levels of a `Cluster`.

Rates are bytes per second one way, latencies seconds of a hop. Ranks of a grid are numbered with neighbours in the last
dimension one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, product
from math import prod

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.topology import Level
from shardwright.pcg import checks
from shardwright.pcg.collectives.topology import Link, Resource, Topology, joined
from shardwright.pcg.errors import ClusterError

Rate = Fraction | int | float


def ring(num_ranks: int, rate: Rate, latency_s: float = 0.0, *, both_ways: bool = True) -> Topology:
    """Return a ring of at least two ranks; one way, each sends to the next alone."""
    _at_least(2, num_ranks, "ring")
    pairs = {(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)}
    pairs |= {(b, a) for a, b in pairs} if both_ways else set()
    return Topology(
        f"ring {num_ranks}", num_ranks, tuple(Link(a, b, Fraction(rate), latency_s) for a, b in sorted(pairs))
    )


def grid(dims: Sequence[int], rate: Rate, latency_s: float = 0.0, *, wrap: bool = False) -> Topology:
    """Return a mesh of any number of dimensions, or a torus, which wraps around in each dimension of more than two."""
    _at_least(2, prod(dims), "grid")
    pairs = sorted(_grid_pairs(tuple(dims), wrap))
    name = f"{'torus' if wrap else 'mesh'} {'x'.join(map(str, dims))}"
    return Topology(name, prod(dims), tuple(joined((a, b, Fraction(rate), latency_s) for a, b in pairs)))


def complete(num_ranks: int, rate: Rate, latency_s: float = 0.0) -> Topology:
    """Return ranks with a link of their own to every other."""
    _at_least(2, num_ranks, "complete")
    links = joined((a, b, Fraction(rate), latency_s) for a, b in combinations(range(num_ranks), 2))
    return Topology(f"complete {num_ranks}", num_ranks, tuple(links))


def star(num_ranks: int, rate: Rate, latency_s: float = 0.0) -> Topology:
    """Return ranks around one switch; half of a hop's latency is on either side of it."""
    _at_least(2, num_ranks, "star")
    links = joined((rank, num_ranks, Fraction(rate), latency_s / 2) for rank in range(num_ranks))
    return Topology(f"star {num_ranks}", num_ranks, tuple(links), ("switch",))


def fat_tree(
    leaves: int, ranks_per_leaf: int, rate: Rate, latency_s: float = 0.0, oversubscription: Rate = 1
) -> Topology:
    """Return leaf switches under one spine; a leaf's uplink has the rates of its ranks over the oversubscription."""
    _at_least(2, leaves, "fat_tree")
    _at_least(1, ranks_per_leaf, "fat_tree")
    checks.positive(oversubscription, "fat_tree", "oversubscription", "times what an uplink carries")
    num_ranks = leaves * ranks_per_leaf
    up = Fraction(rate) * ranks_per_leaf / Fraction(oversubscription)
    links = [(rank, num_ranks + rank // ranks_per_leaf, Fraction(rate), latency_s / 2) for rank in range(num_ranks)]
    links += [(num_ranks + leaf, num_ranks + leaves, up, latency_s / 2) for leaf in range(leaves)]
    relays = (*(f"leaf {leaf}" for leaf in range(leaves)), "spine")
    name = f"fat tree {leaves}x{ranks_per_leaf}, {oversubscription}:1"
    return Topology(name, num_ranks, tuple(joined(links)), relays)


def dragonfly(
    groups: int,
    routers: int,
    ranks_per_router: int,
    rate: Rate,
    latency_s: float = 0.0,
    *,
    global_rate: Rate | None = None,
) -> Topology:
    """Return groups of routers: all routers of a group are joined, and each pair of groups by one cable.

    Cables between groups end at the routers in turn. Kim, Dally, Scott, Abts, "Technology-Driven, Highly-Scalable
    Dragonfly Topology" (ISCA 2008) has the arrangement.
    """
    _at_least(2, groups, "dragonfly")
    num_ranks, far = groups * routers * ranks_per_router, Fraction(global_rate or rate)
    links = [(rank, num_ranks + rank // ranks_per_router, Fraction(rate), latency_s / 2) for rank in range(num_ranks)]
    first = [num_ranks + group * routers for group in range(groups)]
    for group in first:
        links += [(group + a, group + b, Fraction(rate), latency_s / 2) for a, b in combinations(range(routers), 2)]
    for a, b in combinations(range(groups), 2):
        links.append((first[a] + (b - 1) % routers, first[b] + a % routers, far, latency_s))
    relays = tuple(f"router {group}.{router}" for group in range(groups) for router in range(routers))
    return Topology(f"dragonfly {groups}x{routers}x{ranks_per_router}", num_ranks, tuple(joined(links)), relays)


def of_cluster(cluster: Cluster) -> Topology:
    """Return the links of a cluster's levels: of each level, those that its kind of network has.

    A device's bandwidth out of its unit is its links' together, as `Level.bandwidth_bytes_per_s` says. A level of
    switches is one switch to its devices, or one for each rail; where it is oversubscribed, units share what passes it.
    A mixed cluster has the binding links, as `Cluster.levels`.
    """
    if cluster.num_devices == 1:
        raise ClusterError(f"cluster {cluster.name!r}: expected at least two devices, got one; it needs no collectives")
    return of_levels(cluster.name, cluster.levels)


def of_levels(name: str, levels: Sequence[Level]) -> Topology:
    """Return the links of levels, innermost first, which join at least two devices."""
    builder, unit = _Levels(prod(level.size for level in levels)), 1
    for level in levels:
        builder.add(level, unit)
        unit *= level.size
    return Topology(name, unit, tuple(builder.merged()), tuple(builder.relays), tuple(builder.shared))


class _Levels:
    """The links, relays and resources of a cluster, level by level."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.links: list[Link] = []
        self.relays: list[str] = []
        self.shared: list[Resource] = []

    def add(self, level: Level, unit: int) -> None:
        """Add the links of one level, whose units have `unit` devices each."""
        if level.size == 1:
            return
        for start in range(0, self.num_devices, unit * level.size):
            if level.topology in ("switch", "pcie", "fat-tree", "rail"):
                self._switches(level, unit, start)
            else:
                self._direct(level, unit, start)

    def merged(self) -> Iterator[Link]:
        """Yield the links, those of two levels between the same devices as one."""
        by_ends = dict[tuple[int, int], Link]()
        for link in self.links:
            old = by_ends.get((link.src, link.dst))
            rate = link.rate_bytes_per_s + old.rate_bytes_per_s if old else link.rate_bytes_per_s
            latency_s = min(link.latency_s, old.latency_s) if old else link.latency_s
            by_ends[link.src, link.dst] = Link(link.src, link.dst, rate, latency_s)
        yield from by_ends.values()

    def _switches(self, level: Level, unit: int, start: int) -> None:
        rails, rate = (unit if level.topology == "rail" else 1), Fraction(level.bandwidth_bytes_per_s)
        first = self.num_devices + len(self.relays)
        self.relays += [f"{level.name} {start}" + (f" rail {rail}" if rails > 1 else "") for rail in range(rails)]
        devices = range(start, start + unit * level.size)
        self.links += joined((device, first + device % rails, rate, level.latency_s / 2) for device in devices)
        if rails > 1:
            self._spine(level, first, rails, unit)
        elif level.oversubscription > 1:
            self._uplinks(level, unit, devices, first)

    def _spine(self, level: Level, first: int, rails: int, unit: int) -> None:
        up = Fraction(level.bandwidth_bytes_per_s) * level.size / Fraction(level.oversubscription)
        spine = self.num_devices + len(self.relays)
        self.relays.append(f"{level.name} spine {first}")
        self.links += joined((first + rail, spine, up, level.latency_s / 2) for rail in range(rails))

    def _uplinks(self, level: Level, unit: int, devices: range, switch: int) -> None:
        rate = Fraction(level.bandwidth_bytes_per_s) * unit / Fraction(level.oversubscription)
        for start in devices[::unit]:
            inside = range(start, start + unit)
            self.shared.append(Resource(f"{level.name} out of {start}", rate, frozenset((d, switch) for d in inside)))
            self.shared.append(Resource(f"{level.name} into {start}", rate, frozenset((switch, d) for d in inside)))

    def _direct(self, level: Level, unit: int, start: int) -> None:
        """Join the devices of neighbouring units, first with first; a device's links share its bandwidth evenly."""
        dims = level.dims or (level.size,)
        full = level.topology == "mesh" and not level.dims
        pairs = combinations(range(level.size), 2) if full else _grid_pairs(dims, level.topology != "mesh")
        degree = level.size - 1 if full else sum(min(2, dim - 1) for dim in dims)
        rate = Fraction(level.bandwidth_bytes_per_s) / degree
        for a, b in sorted(pairs):
            ends = ((start + a * unit + place, start + b * unit + place) for place in range(unit))
            self.links += joined((one, other, rate, level.latency_s) for one, other in ends)


def _grid_pairs(dims: tuple[int, ...], wrap: bool) -> set[tuple[int, int]]:
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    pairs = set[tuple[int, int]]()
    for place in product(*map(range, dims)):
        here = sum(x * stride for x, stride in zip(place, strides, strict=True))
        for x, dim, stride in zip(place, dims, strides, strict=True):
            if x + 1 < dim:
                pairs.add((here, here + stride))
            elif wrap and dim > 2:
                pairs.add((here - x * stride, here))
    return pairs


def _at_least(least: int, value: int, owner: str) -> None:
    if checks.positive_int(value, owner, "size", "a number of ranks or switches") < least:
        raise ClusterError(f"{owner}: expected at least {least}, got {value}; take more")
