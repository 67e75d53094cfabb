"""Moving a tensor from the mesh of one pipeline stage to that of the next: who sends what to whom, and in what time.

A stage's mesh covers consecutive ranks. A dimension of the tensor lies on the source mesh in p parts and on the target
mesh in q; part i overlaps part j in some of its elements, and the tensor's messages are the products of these overlaps
over its dimensions, so nothing grows with the number of elements. Axes that do not shard the tensor hold replicas: r on
the source, s on the target. Replica j of the target is served by replica ⌊j·r/s⌋ of the source. Two ways:

    direct           every target receives its whole part; the busiest source sends ⌈s/r⌉ times its own
    scatter-gather   the s target replicas of a part receive 1/s of it each, and gather it inside their stage, where
                     links are faster (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
                     Using Megatron-LM", 2021, section 4.1)

A partial sum goes on as one: it is a tensor with one more dimension, that of its summands. Where that lies on more
devices of the one stage than of the other, it is cut into as many as both have room for, so that what the busiest sends
or receives is right.

All ranks of both stages send or receive at once: the time is that of the busiest one, over the outermost level that
separates any two ranks of the stages (an upper bound where only some pairs are that far apart). In a mixed cluster the
links between two stages, and those inside the one that gathers, are those of their own parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from math import ceil, gcd, lcm, prod

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.layout import Layout, Layouts, shard_order


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layouts of a tensor on a mesh of consecutive ranks from `first_rank` on."""

    sizes: tuple[int, ...]
    layouts: Layouts
    first_rank: int

    @property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    @property
    def num_summands(self) -> tuple[int, ...]:
        """Sizes of the axes along which the tensor is a partial sum."""
        return tuple(size for size, layout in zip(self.sizes, self.layouts, strict=True) if layout.kind == "P")

    def stacked(self, num_dims: int) -> StageLayout:
        """The tensor with its summands as more dimensions behind its `num_dims`, sharded: every device has its own."""
        dims = count(num_dims)
        layouts = tuple(Layout("S", next(dims)) if layout.kind == "P" else layout for layout in self.layouts)
        return replace(self, layouts=layouts)

    @property
    def num_parts(self) -> int:
        """Different parts of the tensor; each is on `num_ranks / num_parts` ranks."""
        return prod(size for size, layout in zip(self.sizes, self.layouts, strict=True) if layout.is_shard)

    @property
    def replicas(self) -> int:
        return self.num_ranks // self.num_parts


@dataclass(frozen=True, slots=True)
class Resharding:
    """One way to move a tensor between stages, by its busiest ranks.

    Attributes:
        sent_bytes: by one rank of the source stage.
        received_bytes: by one rank of the target stage, before it gathers.
        messages: that one rank sends or receives.
        gather_axes: axes of the target mesh along which the part of `gathered_bytes` is gathered afterwards.
    """

    name: str
    sent_bytes: float
    received_bytes: float
    messages: int
    gather_axes: tuple[int, ...] = ()
    gathered_bytes: float = 0.0


def ways(shape: tuple[int, ...], num_bytes: float, source: StageLayout, target: StageLayout) -> tuple[Resharding, ...]:
    """The ways to move a tensor of logical `shape` and `num_bytes` from `source` to `target`.

    Raises:
        ClusterError: the meshes share ranks, the layouts do not fit, or only one end is a sum to be reduced.
    """
    _check(shape, source, target)
    num_bytes *= prod(source.num_summands)
    shape, source, target = _stacked(shape, source, target)
    into = out = 1
    for table in _overlaps(shape, source, target):
        into *= int((table > 0).sum(axis=0).max())
        out *= int((table > 0).sum(axis=1).max())
    served = ceil(target.replicas / source.replicas)
    sent, received = num_bytes / source.num_parts * served, num_bytes / target.num_parts
    direct = Resharding("direct", sent, received, max(into, out * served))
    if target.replicas == 1:
        return (direct,)
    axes = tuple(
        a for a, (n, x) in enumerate(zip(target.sizes, target.layouts, strict=True)) if n > 1 and not x.is_shard
    )
    pieces = target.replicas
    return direct, Resharding("scatter-gather", sent / pieces, received / pieces, direct.messages, axes, received)


def resharding_s(
    cluster: Cluster, shape: tuple[int, ...], num_bytes: float, source: StageLayout, target: StageLayout
) -> tuple[float, Resharding]:
    """Seconds of the fastest way, and which that is. `num_bytes` are those of the whole tensor, or of one summand."""
    ends = min(source.first_rank, target.first_rank), max(source.ranks.stop, target.ranks.stop)
    both, first = _own(cluster, range(*ends))
    links, stage = Communication(both, ()), Communication(_own(cluster, target.ranks)[0], target.sizes)

    def send_s(num_bytes: float) -> float:
        return links.send_s(ends[0] - first, ends[1] - 1 - first, num_bytes)

    def time_s(way: Resharding) -> float:
        start_s = send_s(0.0)
        sending_s = send_s(max(way.sent_bytes, way.received_bytes)) - start_s
        inside = prod(target.sizes[axis] for axis in way.gather_axes)
        gathers_s = 0.0
        for axis in way.gather_axes:  # the outermost first: what is gathered doubles on the way in
            inside //= target.sizes[axis]
            gathers_s += stage.time_s("all_gather", axis, way.gathered_bytes / inside)
        return way.messages * start_s + sending_s + gathers_s

    return min(((time_s(way), way) for way in ways(shape, num_bytes, source, target)), key=lambda entry: entry[0])


def _own(cluster: Cluster, ranks: range) -> tuple[Cluster, int]:
    """The cluster that has the links of `ranks`, and its first rank: in a mixed cluster it is that of these alone."""
    return (cluster.part(ranks), ranks.start) if cluster.parts else (cluster, 0)


def _stacked(
    shape: tuple[int, ...], source: StageLayout, target: StageLayout
) -> tuple[tuple[int, ...], StageLayout, StageLayout]:
    """The same without partial layouts."""
    summands = map(lcm, source.num_summands, target.num_summands)
    return (*shape, *summands), source.stacked(len(shape)), target.stacked(len(shape))


def _overlaps(shape: tuple[int, ...], source: StageLayout, target: StageLayout) -> list[NDArray[np.int64]]:
    """By dimension: how many of its indices lie in part i of the source and part j of the target, [i, j]."""
    sides = [(placed.layouts, placed.sizes) for placed in (source, target)]
    return [_overlap(shape, dim, *sides[0], *sides[1]) for dim in range(len(shape))]


@lru_cache(maxsize=4096)
def _overlap(
    shape: tuple[int, ...], dim: int, source: Layouts, sizes: tuple[int, ...], target: Layouts, others: tuple[int, ...]
) -> NDArray[np.int64]:
    unit = gcd(_smallest_run(shape, dim, source, sizes), _smallest_run(shape, dim, target, others))
    rows, num_rows = _parts(shape, dim, source, sizes, unit)
    columns, num_columns = _parts(shape, dim, target, others, unit)
    counts = np.bincount(rows * num_columns + columns, minlength=num_rows * num_columns)
    return counts.reshape(num_rows, num_columns) * unit


def _steps(shape: tuple[int, ...], dim: int, layouts: Layouts, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    order = shard_order(shape, layouts, sizes)
    if isinstance(order, str):
        raise ClusterError(f"a tensor of shape {list(shape)} cannot lie on a mesh {list(sizes)}: {order}")
    return [(axis, blocks) for axis, at, blocks in order if at == dim]


def _smallest_run(shape: tuple[int, ...], dim: int, layouts: Layouts, sizes: tuple[int, ...]) -> int:
    """Divides every run of neighbouring indices that one rank holds."""
    left, run = shape[dim], shape[dim]
    for axis, blocks in _steps(shape, dim, layouts, sizes):
        run = gcd(run, left // (blocks * sizes[axis]))
        left //= sizes[axis]
    return max(run, 1)


def _parts(
    shape: tuple[int, ...], dim: int, layouts: Layouts, sizes: tuple[int, ...], unit: int
) -> tuple[NDArray[np.int64], int]:
    """The part that each run of `unit` indices belongs to, numbered in mesh order of its axes, and their number."""
    left = shape[dim] // unit
    position, digits = np.arange(left), dict[int, NDArray[np.int64]]()
    for axis, blocks in _steps(shape, dim, layouts, sizes):
        run = left // (blocks * sizes[axis])
        digits[axis] = position // run % sizes[axis]
        position = position // (run * sizes[axis]) * run + position % run
        left //= sizes[axis]
    part = np.zeros(shape[dim] // unit, dtype=np.int64)
    for axis in sorted(digits):
        part = part * sizes[axis] + digits[axis]
    return part, prod(sizes[axis] for axis in digits)


def _check(shape: Sequence[int], source: StageLayout, target: StageLayout) -> None:
    for placed, side in ((source, "source"), (target, "target")):
        if len(placed.sizes) != len(placed.layouts):
            problem = f"{len(placed.layouts)} layouts for the {len(placed.sizes)} axes of its mesh {list(placed.sizes)}"
            raise ClusterError(f"resharding: the {side} has {problem}; give one for each axis")
        _steps(tuple(shape), 0, placed.layouts, placed.sizes)
    partial = [[layout.kind == "P" for layout in placed.layouts] for placed in (source, target)]
    if source.num_summands != target.num_summands and partial[0] != partial[1]:
        sums = [" × ".join(map(str, placed.num_summands)) or "1" for placed in (source, target)]
        problem = f"the source is a sum of {sums[0]} parts, the target one of {sums[1]}"
        raise ClusterError(f"resharding: {problem}; reduce it inside its stage, then move it")
    first, second = sorted((source, target), key=lambda placed: placed.first_rank)
    if first.first_rank + first.num_ranks > second.first_rank:
        shared = f"both hold rank {second.first_rank}"
        raise ClusterError(f"resharding: the stages overlap, {shared}; inside one mesh a move changes layouts")
