"""Clusters made of others: joined by one more level of links, of one kind of device or of several; and parts of them.

Work that spans devices of several kinds goes at the pace of the slowest, in the memory of the smallest: a mixed cluster
has the *binding* device and, below the level that joins its parts, the binding links. What lies within one part, such
as a pipeline stage, has that part's own: `part_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from math import gcd, prod
from operator import mul
from typing import Any

from shardwright.cost.clusters.cluster import Cluster, Part
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.topology import Level
from shardwright.pcg.errors import ClusterError


def join_clusters(clusters: Sequence[Cluster], link: Level, name: str | None = None) -> Cluster:
    """`clusters` in the order of their ranks, joined by `link`.

    `link.size` says what it joins: the clusters as wholes, or their units, such as nodes that share one network; then
    `link` takes the place of the clusters' own outermost level for what spans several of them.

    Raises:
        ClusterError: fewer than two clusters, different backends, or units that are not equal.
    """
    if len(clusters) < 2:
        raise ClusterError(f"Cluster.join: expected at least two clusters, got {len(clusters)}; one needs no joining")
    backends = sorted({cluster.backend for cluster in clusters})
    if len(backends) > 1:
        raise ClusterError(
            f"Cluster.join: expected one backend, got {' and '.join(backends)}; they do not reach others"
        )
    parts = [part for cluster in clusters for part in cluster.parts or (Part(cluster.device, cluster.levels),)]
    inner = _joined_units(clusters, link)
    mixed = len({part.device for part in parts}) > 1 or any(part.levels != parts[0].levels for part in parts)
    return Cluster(
        name=name or _names(clusters),
        device=slowest_device([part.device for part in parts]),
        levels=(*inner, link),
        backend=clusters[0].backend,
        provenance="; ".join(dict.fromkeys(cluster.provenance for cluster in clusters)),
        parts=tuple(parts) if mixed else (),
    )


def part_of(cluster: Cluster, ranks: range) -> Cluster:
    """The cluster that consecutive `ranks` make: their devices and the links between them, as fast as these are alone.

    Raises:
        ClusterError: no ranks, ranks with gaps, or ranks that the cluster does not have.
    """
    if not ranks or ranks.step != 1 or ranks.start < 0 or ranks.stop > cluster.num_devices:
        given = "no ranks" if not ranks else f"{ranks!r}"
        advice = f"give consecutive ranks from 0 to {cluster.num_devices - 1}"
        raise ClusterError(f"cluster {cluster.name!r}: a part needs ranks of it, got {given}; {advice}")
    if len(ranks) == cluster.num_devices:
        return cluster
    parts = [Part(part.device, _cut(part.levels, inside)) for part, inside in _touched(cluster, ranks)]
    mixed = len(parts) > 1
    return replace(
        cluster,
        name=f"{cluster.name}[{ranks.start}:{ranks.stop}]",
        device=slowest_device([part.device for part in parts]),
        levels=_cut(cluster.levels, ranks) if mixed else parts[0].levels,
        parts=tuple(parts) if mixed else (),
    )


_LEAST = ("memory_bytes", "memory_bytes_per_s", "matmul_efficiency", "attention_efficiency",
          "attention_backward_efficiency")  # fmt: skip
_MOST = ("op_overhead_s", "kernel_s", "update_overhead_s", "step_overhead_s")


def slowest_device(devices: Sequence[Device]) -> Device:
    """The device whose every rate is the least of `devices`; itself where all are one kind.

    Its context leaves as much of its memory as the fullest kind has free. Its multiprocessors are those of the slowest
    kind; what was measured on one kind alone (kernels, operators, paces, first uses) is left out.
    """
    first, *others = dict.fromkeys(devices)
    if not others:
        return first
    every = (first, *others)
    binding: dict[str, Any] = {}
    for entry in fields(Device):
        if entry.name in (*_LEAST, *_MOST):
            choose = min if entry.name in _LEAST else max
            binding[entry.name] = choose(getattr(device, entry.name) for device in every)
    free_bytes = min(device.memory_bytes - device.context_bytes for device in every)
    precisions = dict.fromkeys(precision for device in every for precision in device.flops_per_s)
    reached = {
        precision: min(device.peak_flops_per_s(precision) * device.matmul_efficiency for device in every)
        for precision in precisions
    }
    return Device(
        name=" + ".join(dict.fromkeys(device.name for device in every)),
        flops_per_s={precision: rate / binding["matmul_efficiency"] for precision, rate in reached.items()},
        kind="cpu" if any(device.kind == "cpu" for device in every) else "cuda",
        num_units=min(every, key=lambda device: device.peak_flops_per_s("fp16") * device.matmul_efficiency).num_units,
        context_bytes=binding["memory_bytes"] - free_bytes,
        **binding,
    )


def slowest_level(levels: Sequence[Level], size: int) -> Level:
    """`size` units at the least bandwidth and the longest latency of `levels`, with the links of the slowest."""
    slowest = min(levels, key=lambda level: level.shared_bytes_per_s).resized(size)
    return replace(slowest, latency_s=max(level.latency_s for level in levels))


def _joined_units(clusters: Sequence[Cluster], link: Level) -> tuple[Level, ...]:
    """The binding levels of one of the equal units that `link` joins."""
    total = sum(cluster.num_devices for cluster in clusters)
    unit, rest = divmod(total, link.size)
    inner = [_levels_of(cluster, unit) for cluster in clusters]
    units = [levels for levels in inner if levels is not None]
    capacities = sorted({size for levels in units for size in accumulate((x.size for x in levels), mul)})
    if rest or len(units) < len(inner):
        shapes = ", ".join(f"{c.name}: {' × '.join(str(level.size) for level in c.levels)}" for c in clusters)
        raise ClusterError(
            f"Cluster.join: {link.name!r} joins {link.size} equal units, {total} devices do not make them ({shapes}); "
            "give link.size as the number of clusters where these are equal, else of their nodes, with equally many "
            "devices per node"
        )
    clash = next(((inside, around) for inside, around in pairwise(capacities) if around % inside), None)
    if clash is not None:
        raise ClusterError(
            f"Cluster.join: units of {clash[0]} and of {clash[1]} devices do not nest, so no level joins both; give "
            "clusters whose levels join numbers of devices that divide each other"
        )
    cut = [_cut_at(levels, capacities) for levels in units]
    return tuple(slowest_level(levels, levels[0].size) for levels in zip(*cut, strict=True))


def _cut_at(levels: Sequence[Level], capacities: Sequence[int]) -> list[Level]:
    """Levels whose units have these numbers of devices, by `Level.resized`: 8 on one switch are 2 times 4 on it.

    Exact for switches; of a mesh or a ring that is cut, what joins the pieces is taken as one of their size.
    """
    found: list[Level] = []
    joined, ends = 1, list(accumulate((level.size for level in levels), mul))
    for capacity in capacities:
        level = levels[next(i for i, end in enumerate(ends) if capacity <= end)]
        found.append(level.resized(capacity // joined))
        joined = capacity
    return found


def _levels_of(cluster: Cluster, unit: int) -> tuple[Level, ...] | None:
    """The innermost levels that join exactly `unit` devices; None where there are none such."""
    for count in range(len(cluster.levels) + 1):
        if prod(level.size for level in cluster.levels[:count]) == unit:
            return cluster.levels[:count]
    return None


def _touched(cluster: Cluster, ranks: range) -> Iterator[tuple[Part, range]]:
    """The parts that hold some of `ranks`, each with these as its own ranks."""
    start = 0
    for part in cluster.parts or (Part(cluster.device, cluster.levels),):
        inside = range(max(ranks.start - start, 0), min(ranks.stop - start, part.num_devices))
        if inside:
            yield part, inside
        start += part.num_devices


def _cut(levels: Sequence[Level], ranks: range) -> tuple[Level, ...]:
    """The levels between consecutive `ranks`.

    Units are the largest that the ranks fill: 4 devices of one node and 4 of the next are two units of 4.
    """
    found: list[Level] = []
    capacity = joined = 1  # devices in a unit of the level below: in full, and those that `ranks` fill
    for level in levels:
        capacity *= level.size
        is_outermost = ranks.start // capacity == (ranks.stop - 1) // capacity
        filled = len(ranks) if is_outermost else gcd(ranks.start, ranks.stop, capacity)
        if filled > joined or (is_outermost and not found):
            found.append(level.resized(filled // joined))
        if is_outermost:
            break
        joined = filled
    return tuple(found)


def _names(clusters: Sequence[Cluster]) -> str:
    counts = Counter(cluster.name for cluster in clusters)
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())
