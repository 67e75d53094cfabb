"""Time of collectives along the axes of a mesh: latency + bandwidth lines per algorithm (α-β).

Mesh axes lie over the devices in row-major order, the **last axis innermost**: neighbours along it are neighbours in
the node. Every group of an axis communicates at once, so a device has its own share of the links and no more.

**Bytes** are always those of the full tensor of one group, of n devices:

    all_reduce       every device holds a summand of this size, and afterwards the sum
    all_gather       what every device holds afterwards; before, 1/n of it
    reduce_scatter   every device holds a summand of this size; afterwards 1/n of the sum
    all_to_all       the sharded tensor: 1/n of it on every device before and after
    broadcast        what every device holds afterwards

A group of n devices is described by its **splits**: n₀ members within a unit of the first level, n₁ such units within
one of the second, and so on, with n = n₀·n₁·…. With α_l the latency of a hop, B_l a device's bandwidth at level l and S
bytes, the algorithms are

    ring        α: n − 1 hops, each over its own level    β: (n−1)/n · S / min over used l of (n₀…n_{l−1}·B_l)
    levels      α: n₀ − 1 hops inside, log₂ n_l outside   β: Σ_l (n_l−1)/n_l · S / (n₀…n_{l−1}·B_l)
    tree        twice the α of levels                     β: 2·S / the ring's bandwidth   (all-reduce: double binary)

one pass for all-gather and reduce-scatter, two for all-reduce (reduce-scatter, then all-gather). A flat ring enters and
leaves a unit by the links of all its n₀ members; the hierarchical form sends 1/n₀ of the data outside. The least of
them is taken; NCCL does not always choose it, and its selector, its in-switch reduction (NVLS: large all-reduces within
8 H100 take a quarter less than said here) and oversubscribed networks are later work. All-to-all sends every pair's
share directly. Sources: Thakur et al., "Optimization of
Collective Communication Operations in MPICH" (2005); Sanders et al., "Two-tree algorithms" (2009); NVIDIA/nccl,
src/graph/tuning.cc.

Measured lines, where the cluster has them, take the place of all this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2, prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.cluster import COLLECTIVES, Backend, Cluster, Collective, CollectiveLine, Level
from shardwright.pcg.errors import ClusterError

Bytes = TypeVar("Bytes", float, NDArray[np.float64])
"""One number of bytes, or a numpy array of them; the time has the same form."""

# Start of a collective before its first hop. NCCL: tuning.cc, base latency of the LL protocol. gloo: our measurement of
# 4 bytes between two ranks of one machine (EPYC Zen 4, torch 2.13), less one hop.
BASE_LATENCY_S: dict[Backend, float] = {"nccl": 6.6e-6, "gloo": 100e-6}


class Line(NamedTuple):
    """latency_s + s_per_byte · bytes."""

    latency_s: float
    s_per_byte: float

    def time_s(self, num_bytes: Bytes) -> Bytes:
        return self.latency_s + self.s_per_byte * num_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one mesh axis. `splits` counts members by level, innermost first; their product is `size`."""

    size: int
    stride: int
    splits: tuple[int, ...]


class Communication:
    """Times of collectives along the axes of one mesh on one cluster.

    Raises:
        ClusterError: a size is not a positive integer, or the mesh has more devices than the cluster.
    """

    def __init__(self, cluster: Cluster, mesh_sizes: Sequence[int]) -> None:
        self.cluster = cluster
        self.mesh_sizes = tuple(mesh_sizes)
        _check_mesh(cluster, self.mesh_sizes)
        capacities = tuple(prod(level.size for level in cluster.levels[: i + 1]) for i in range(len(cluster.levels)))
        self.groups = tuple(_group(self.mesh_sizes, axis, capacities) for axis in range(len(self.mesh_sizes)))
        self._lines = {
            collective: tuple(_lines(cluster, collective, group) for group in self.groups) for collective in COLLECTIVES
        }

    def all_reduce_s(self, axis: int, num_bytes: Bytes) -> Bytes:
        """Seconds to sum over `axis` summands of `num_bytes` each."""
        return self.time_s("all_reduce", axis, num_bytes)

    def all_gather_s(self, axis: int, num_bytes: Bytes) -> Bytes:
        """Seconds to gather along `axis` a tensor that has `num_bytes` afterwards."""
        return self.time_s("all_gather", axis, num_bytes)

    def reduce_scatter_s(self, axis: int, num_bytes: Bytes) -> Bytes:
        """Seconds to sum over `axis` summands of `num_bytes` each and leave every device its slice."""
        return self.time_s("reduce_scatter", axis, num_bytes)

    def all_to_all_s(self, axis: int, num_bytes: Bytes) -> Bytes:
        """Seconds to reshard along `axis`, from one dimension to another, a tensor of `num_bytes` over the group."""
        return self.time_s("all_to_all", axis, num_bytes)

    def broadcast_s(self, axis: int, num_bytes: Bytes) -> Bytes:
        """Seconds to send `num_bytes` from one device to all along `axis`."""
        return self.time_s("broadcast", axis, num_bytes)

    def time_s(self, collective: Collective, axis: int, num_bytes: Bytes) -> Bytes:
        """Seconds of a collective along `axis`, an index into the mesh; zero where the axis has one device."""
        first, *others = self.lines(collective, axis)
        time_s = first.time_s(num_bytes)
        for line in others:
            time_s = _minimum(time_s, line.time_s(num_bytes))
        return time_s

    def lines(self, collective: Collective, axis: int) -> tuple[Line, ...]:
        """The algorithms' lines, of which the least counts; for closed forms and explanations."""
        if not 0 <= axis < len(self.groups):
            raise ClusterError(f"mesh {list(self.mesh_sizes)} has no axis {axis}; choose 0 to {len(self.groups) - 1}")
        return self._lines[collective][axis]


def _minimum(a: Bytes, b: Bytes) -> Bytes:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def _check_mesh(cluster: Cluster, sizes: tuple[int, ...]) -> None:
    for axis, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            problem = f"expected a positive integer, got {size!r}; give the number of devices along it"
            raise ClusterError(f"mesh {list(sizes)}: axis {axis}: {problem}")
    if prod(sizes) > cluster.num_devices:
        raise ClusterError(
            f"mesh {list(sizes)} needs {prod(sizes)} devices, cluster {cluster.name!r} has {cluster.num_devices}; "
            f"choose sizes whose product is at most {cluster.num_devices}"
        )


@lru_cache(maxsize=4096)
def _group(sizes: tuple[int, ...], axis: int, capacities: tuple[int, ...]) -> Group:
    """The splits of the groups of `axis` over units that hold `capacities` devices.

    Exact where every group spreads evenly over its units. Where one does not (6 devices here, 2 there), its hops count
    as leaving the unit: an upper bound.
    """
    size = sizes[axis]
    ranks = np.moveaxis(np.arange(prod(sizes)).reshape(sizes), axis, -1).reshape(-1, size)
    within = [1]  # members of a group in one unit, by level
    for capacity in capacities:
        units = ranks // capacity
        num_units = 1 + np.count_nonzero(np.diff(units, axis=1), axis=1)
        most = int(num_units.max())
        even = most == num_units.min() and size % most == 0
        chunks = units.reshape(len(units), most, -1) if even else units[:, None]
        even = even and bool((chunks[..., 0] == chunks[..., -1]).all())
        within.append(size // most if even else within[-1])
    splits = tuple(outer // inner for inner, outer in pairwise(within))
    return Group(size, prod(sizes[axis + 1 :]), splits)


def _lines(cluster: Cluster, collective: Collective, group: Group) -> tuple[Line, ...]:
    if group.size == 1:
        return (Line(0.0, 0.0),)
    measured = [line for line in cluster.collectives if line.collective == collective]
    if measured:
        return (_measured_line(measured, collective, group.size),)
    base_s = BASE_LATENCY_S[cluster.backend]
    return tuple(
        Line(base_s + line.latency_s, line.s_per_byte) for line in _algorithms(collective, cluster.levels, group.splits)
    )


# ------------------------------------------------------------------------------------------------------ measured lines


def _measured_line(measured: Sequence[CollectiveLine], collective: Collective, size: int) -> Line:
    """The line for groups of `size`: as measured, or scaled by a ring's hops and volume from the nearest."""
    nearest = min(measured, key=lambda line: abs(log2(line.group_size / size)))
    hops, volume = _ring_factors(collective, size)
    measured_hops, measured_volume = _ring_factors(collective, nearest.group_size)
    return Line(nearest.latency_s * hops / measured_hops, nearest.s_per_byte * volume / measured_volume)


def _ring_factors(collective: Collective, n: int) -> tuple[float, float]:
    """Hops, and the share of the full tensor that one device sends."""
    match collective:
        case "all_reduce":
            return 2 * (n - 1), 2 * (n - 1) / n
        case "all_gather" | "reduce_scatter":
            return n - 1, (n - 1) / n
        case "all_to_all":
            return n - 1, (n - 1) / n**2
        case "broadcast":
            return ceil(log2(n)), 1.0


# --------------------------------------------------------------------------------------------------- the links' lines


def _algorithms(collective: Collective, levels: Sequence[Level], splits: tuple[int, ...]) -> list[Line]:
    """The candidate algorithms of a collective; formulas in the module's docstring."""
    if collective == "all_to_all":
        return [_direct_exchange(levels, splits)]
    n = prod(splits)
    hops_s, narrowest = _ring(levels, splits)
    ring = Line(hops_s, (n - 1) / n / narrowest)
    by_level = _by_level(levels, splits)
    match collective:
        case "all_gather" | "reduce_scatter":
            return [ring, by_level]
        case "all_reduce":
            tree = Line(by_level.latency_s, 1 / narrowest)
            return [Line(2 * line.latency_s, 2 * line.s_per_byte) for line in (ring, by_level, tree)]
        case "broadcast":
            return [Line(by_level.latency_s, 1 / narrowest)]


def _ring(levels: Sequence[Level], splits: tuple[int, ...]) -> tuple[float, float]:
    """Latency of one trip round the ring but the last hop, and the bandwidth that its narrowest level leaves."""
    hops_s, narrowest = 0.0, float("inf")
    for index, (level, split) in enumerate(zip(levels, splits, strict=True)):
        if split > 1:
            hops_s += (split - 1) * prod(splits[index + 1 :]) * level.latency_s
            narrowest = min(narrowest, prod(splits[:index]) * level.bandwidth_bytes_per_s)
    return hops_s, narrowest


def _by_level(levels: Sequence[Level], splits: tuple[int, ...]) -> Line:
    """Reduce-scatter or all-gather one level after the other: a ring inside, halving or doubling outside."""
    latency_s = s_per_byte = 0.0
    for index, (level, split) in enumerate(zip(levels, splits, strict=True)):
        hops = split - 1 if index == 0 else ceil(log2(split))
        latency_s += hops * level.latency_s
        s_per_byte += (split - 1) / split / (prod(splits[:index]) * level.bandwidth_bytes_per_s)
    return Line(latency_s, s_per_byte)


def _direct_exchange(levels: Sequence[Level], splits: tuple[int, ...]) -> Line:
    """Every device sends 1/n of its share, 1/n² of the tensor, to every other, by the level that they meet at.

    The levels' links work at the same time, so the slowest counts.
    """
    n = prod(splits)
    latency_s = s_per_byte = 0.0
    for index, (level, split) in enumerate(zip(levels, splits, strict=True)):
        peers = (split - 1) * prod(splits[:index])
        latency_s += peers * level.latency_s
        s_per_byte = max(s_per_byte, peers / n**2 / level.bandwidth_bytes_per_s)
    return Line(latency_s, s_per_byte)
