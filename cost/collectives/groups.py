"""The links that the groups of a mesh axis use, and a group's share of them.

Mesh axes lie over the devices in row-major order, the **last axis innermost**: neighbours along it are neighbours in
the node. Every group of an axis communicates at once, so a device has its own share of the links and no more.

A group of n devices is described by its **splits**: n₀ members within a unit of the first level, n₁ such units within
one of the second, and so on, with n = n₀·n₁·…. A level that is a grid is split further, by its dimensions.

With B a device's bandwidth out of its unit, k members of a group at the level's `size` units and s groups side by side
between two of them, a group has

    switch, fat-tree, pcie         B / oversubscription: every unit is a leaf of its own; larger ones are a level more
    rail                           B along the rail; B / oversubscription for traffic that changes rails, by the spine;
                                   or B by the unit's NVLinks, which take it to the device on the right rail (PXN)
    mesh                           B·(k−1)/(size−1): the links between the members, and no others
    ring, torus of r dimensions    B/r a dimension, shared by s groups; half of it where the members do not close the
                                   ring (a line has nothing to return by); together over the dimensions used
    mesh with dims                 as a torus that is never closed

for neighbours, and the same for all pairs, but

    ring, torus    a byte of an exchange passes over several links: k members of a dimension have ⌊k²/4⌋/(k−1) times
                   the traffic on each link that a switch would have
    rail           with m members in each of k units, (m−1)/m of the bytes that an exchange sends to other units change
                   rails; a device's NVLinks then carry k·(m−1) messages beside the (k−1)·m of its network link

Rings and trees keep to their rail where the members have the same places in all units: NCCL enters and leaves a node by
one NIC (NCCL_CROSS_NIC). Sources: NVIDIA, "Doubling all2all Performance with NVIDIA Collective Communication Library
2.12" (2022), for PXN; Wang et al., "Rail-only" (2023), for the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from shardwright.cost.clusters.topology import Level, LinkKind
from shardwright.pcg.errors import ClusterError

MAX_DEVICES = 2**24
"""The most devices of a mesh: more than any machine has."""


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The groups of one mesh axis. `splits` counts members by level, innermost first; their product is `size`.

    `grids` has the same counts by dimension of each level, innermost first: (n,) for a level that is no grid.
    """

    size: int
    stride: int
    splits: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A group's share of one level: `split` units of `inside` members each, and the bandwidth of each member.

    Attributes:
        dims: the split by dimension of a grid, innermost first; `grid` says whether the level is one.
        switched: every two units can send at the full bandwidth.
        bytes_per_s: one way, of one device, while it sends to its neighbour in a ring.
        exchange_bytes_per_s: the same while it sends to all others.
        hop_s: latency from one unit to the next one of the group.
    """

    name: str
    kind: LinkKind
    switched: bool
    split: int
    inside: int
    dims: tuple[int, ...]
    grid: bool
    bytes_per_s: float
    exchange_bytes_per_s: float
    hop_s: float


def check_mesh(sizes: Sequence[int], num_devices: int, cluster: str) -> None:
    """Raise `ClusterError` unless `sizes` are positive integers and their product is at most `num_devices`."""
    for axis, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            problem = f"expected a positive integer, got {size!r}; give the number of devices along it"
            raise ClusterError(f"mesh {list(sizes)}: axis {axis}: {problem}")
    if prod(sizes) > num_devices:
        raise ClusterError(
            f"mesh {list(sizes)} needs {prod(sizes)} devices, cluster {cluster!r} has {num_devices}; "
            f"choose sizes whose product is at most {num_devices}"
        )
    if prod(sizes) > MAX_DEVICES:
        raise ClusterError(
            f"mesh {list(sizes)} has {prod(sizes)} devices, expected at most {MAX_DEVICES}; correct the sizes of the "
            f"levels of cluster {cluster!r}"
        )


@lru_cache(maxsize=4096)
def group_of(sizes: tuple[int, ...], axis: int, levels: tuple[Level, ...]) -> AxisGroup:
    """Return the groups of `axis` on a mesh of `sizes` over the devices of `levels`.

    The result is exact where every group spreads evenly over its units. Where one does not (6 devices here, 2 there),
    its hops count as leaving the unit: an upper bound.
    """
    grids = [tuple(reversed(level.dims)) or (level.size,) for level in levels]
    capacities = tuple(np.cumprod([extent for grid in grids for extent in grid]).tolist())
    splits = iter(_splits(sizes, axis, capacities))
    by_grid = tuple(tuple(next(splits) for _ in grid) for grid in grids)
    return AxisGroup(sizes[axis], prod(sizes[axis + 1 :]), tuple(prod(grid) for grid in by_grid), by_grid)


def _splits(sizes: tuple[int, ...], axis: int, capacities: tuple[int, ...]) -> tuple[int, ...]:
    """Return the members of a group of `axis` by level, where a unit of a level holds `capacities` devices."""
    size, stride = sizes[axis], prod(sizes[axis + 1 :])
    within = [1]  # members of a group in one unit, by level
    for capacity in capacities:
        within.append(_members(size, stride, prod(sizes[:axis]), capacity) or within[-1])
    return tuple(outer // inner for inner, outer in pairwise(within))


def _members(size: int, stride: int, outer: int, capacity: int) -> int:
    """Return how many members every group has in each unit of `capacity` devices; 0 if the counts are unequal.

    Groups begin at a·size·stride + b, a < outer, b < stride, and their members are `stride` apart. The units of a group
    depend only on its first place x in a unit, and each condition on x is strictest at its least value, 0, or its
    greatest.
    """
    if stride >= capacity:
        return 1
    if size * stride * outer <= capacity:
        return size
    greatest = min(_greatest_rest(size * stride, outer, capacity) + stride - 1, capacity - 1)
    units = (size - 1) * stride // capacity + 1
    if (greatest + (size - 1) * stride) // capacity + 1 != units or size % units:
        return 0
    members = size // units
    drift = (units - 1) * (members * stride - capacity)  # of the last unit's first member, from its place in the first
    last = greatest + (members - 1) * stride
    return members if drift >= 0 and last + drift < capacity else 0


def _greatest_rest(step: int, count: int, modulus: int) -> int:
    """Return the greatest of a·step mod modulus, a < count."""
    shared = gcd(step, modulus)
    if count >= modulus // shared:  # a·step takes all multiples of `shared`
        return modulus - shared
    return int((np.arange(count) * step % modulus).max())


@lru_cache(maxsize=4096)
def links_of(group: AxisGroup, levels: tuple[Level, ...]) -> tuple[Link, ...]:
    """Return the group's link at each level that it spans, innermost first; no links for a group of one device."""
    links, inside, capacity, below = list[Link](), 1, 1, None
    for level, split, grid in zip(levels, group.splits, group.grids, strict=True):
        if split > 1:
            neighbours = max(1, group.stride // capacity)
            link = _link(level, split, inside, grid, neighbours)
            if level.topology == "rail":
                aligned = group.stride % capacity == 0 or inside * group.stride == capacity
                link = _on_rails(link, level, below, aligned=aligned)
            links.append(link)
        below = level
        inside *= split
        capacity *= level.size
    return tuple(links)


def one_switch(n: int) -> Link:
    """Return the link of n devices of one switch, at one byte per second and without latency."""
    return Link("switch", "network", True, n, 1, (n,), False, 1.0, 1.0, 0.0)


def between(source: int, target: int, levels: Sequence[Level]) -> Link | None:
    """Return the link of two ranks at the level where they meet, or None where they are one rank."""
    if source == target:
        return None
    capacities = np.cumprod([level.size for level in levels]).tolist()
    at = next(i for i, size in enumerate(capacities) if source // size == target // size)
    level, below = levels[at], levels[at - 1] if at else None
    bandwidth = level.shared_bytes_per_s
    if level.topology == "rail":
        unit = capacities[at - 1] if at else 1
        bandwidth = _off_rail(level, below, float((source - target) % unit > 0))
    elif level.topology == "mesh" and not level.dims:
        bandwidth /= level.size - 1
    elif level.topology in ("mesh", "torus", "ring"):
        bandwidth /= 2 * max(1, len(level.dims))
    return Link(level.name, level.kind, False, 2, 1, (2,), bool(level.dims), bandwidth, bandwidth, level.latency_s)


def _link(level: Level, split: int, inside: int, grid: tuple[int, ...], neighbours: int) -> Link:
    full, hop_s = level.shared_bytes_per_s, level.latency_s
    near = far = full
    if level.topology == "ring" or level.dims:
        near, far, hop_s = _grid(level, grid, neighbours)
    elif level.topology == "mesh":
        near = far = full * (split - 1) / (level.size - 1)
    dims = tuple(k for k in grid if k > 1)
    switched = level.topology == "switch" and level.oversubscription == 1
    return Link(level.name, level.kind, switched, split, inside, dims, bool(level.dims), near, far, hop_s)


def _on_rails(link: Link, level: Level, below: Level | None, *, aligned: bool) -> Link:
    """Return a group's link on a rail-optimised level; `aligned` if its members have the same places in all units."""
    k, m = link.split, link.inside
    near = _off_rail(level, below, 0.0 if aligned else 1.0)
    far = _off_rail(level, below, (m - 1) / m if aligned else 1.0)
    if below is not None and below.kind == "nvlink" and m > 1:
        far = min(far, below.shared_bytes_per_s * (k - 1) * m / (k * (m - 1)))
    return replace(link, bytes_per_s=near, exchange_bytes_per_s=far)


def _off_rail(level: Level, below: Level | None, share: float) -> float:
    """Return a device's bandwidth if `share` of its bytes go to other rails, by its unit's NVLinks or the spine."""
    if below is not None and below.kind == "nvlink":
        return level.bandwidth_bytes_per_s
    return min(level.bandwidth_bytes_per_s, level.shared_bytes_per_s / share) if share else level.bandwidth_bytes_per_s


class _Span(NamedTuple):
    """A group along one dimension of a grid: of `extent` units every `spacing`-th is a member, `k` in all.

    `near`: a member's bytes per second to its neighbours. `closed`: whether the members are a ring.
    """

    extent: int
    k: int
    spacing: int
    closed: bool
    near: float


def _spans(level: Level, grid: tuple[int, ...], neighbours: int) -> list[_Span]:
    """Return the dimensions along which a group spreads on a ring, a torus or a grid, innermost first."""
    extents = tuple(reversed(level.dims)) or (level.size,)
    each, spans = level.shared_bytes_per_s / len(extents), list[_Span]()
    for extent, k in zip(extents, grid, strict=True):
        if k > 1:
            spacing = max(1, min(neighbours, extent // k))
            closed = level.topology != "mesh" and k * spacing == extent
            spans.append(_Span(extent, k, spacing, closed, each / spacing / (1 if closed else 2)))
        neighbours = max(1, neighbours // extent)
    return spans


def _grid(level: Level, grid: tuple[int, ...], neighbours: int) -> tuple[float, float, float]:
    """Return bandwidth to neighbours, bandwidth in an exchange, and hop latency, on a ring, a torus or a grid."""
    spans, split = _spans(level, grid, neighbours), prod(grid)
    crossing_s = max(span.k**2 // 4 / span.k / span.near for span in spans)
    steps = max(1, *(span.spacing for span in spans))
    return len(spans) * min(span.near for span in spans), (split - 1) / split / crossing_s, level.latency_s * steps


@lru_cache(maxsize=4096)
def network_of(group: AxisGroup, levels: tuple[Level, ...], *, exchanges: bool = False) -> tuple[Level, ...]:
    """Return the levels of a group's own network: its members alone, each with its share of the links.

    `exchanges`: for members that send to all others, which matters where some of them are on other rails.
    """
    own_levels, capacity = list[Level](), 1
    links = iter(links_of(group, levels))
    for level, split, grid in zip(levels, group.splits, group.grids, strict=True):
        if split > 1:
            link = next(links)
            if level.topology == "ring" or level.dims:
                own_levels.append(_own_grid(level, link, _spans(level, grid, max(1, group.stride // capacity))))
            else:
                rate = link.exchange_bytes_per_s if exchanges else link.bytes_per_s
                kind = "mesh" if level.topology == "mesh" else "switch"
                own_levels.append(Level(level.name, split, rate, link.hop_s, level.kind, kind))
        capacity *= level.size
    return tuple(own_levels)


def _own_grid(level: Level, link: Link, spans: list[_Span]) -> Level:
    """Return the grid of a group's members; all its links have the rate of the slowest."""
    closed = all(span.closed for span in spans)
    rate = min(span.near / (2 if span.closed and span.k > 2 else 1) for span in spans)
    num_links, dims = sum(min(2, span.k - 1) for span in spans), tuple(span.k for span in reversed(spans))
    return Level(
        level.name, link.split, rate * num_links, link.hop_s, level.kind, "torus" if closed else "mesh", 1.0, dims
    )
