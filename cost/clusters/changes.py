"""A cluster as it would be with other machines, links or devices, for what-if questions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.device import Device, slowest_device
from shardwright.cost.clusters.presets import PRESETS, preset_cluster
from shardwright.cost.clusters.topology import Level
from shardwright.pcg.errors import ClusterError

NODES, BANDWIDTH, MEMORY, FLOPS = "nodes", "bandwidth", "memory", "flops"
ChangeLike = str | int
_FORM = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(x|[kMGT]?B)?")
_UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a quantity: to `factor` times the old value, or to `value`."""

    text: str
    factor: float | None = None
    value: float | None = None

    @classmethod
    def of(cls, name: str, given: ChangeLike) -> Change:
        """Return the change that a text such as `2x`, `0.5x`, `16`, or (memory) `80GB` gives. Raises `ClusterError`."""
        match = _FORM.fullmatch(str(given).strip())
        number, unit = match.groups() if match else ("0", None)
        if float(number) <= 0 or (unit not in (None, "x") and name != MEMORY):
            raise ClusterError(f"{name}={given}: {_wanted(name)}")
        if unit == "x":
            return cls(str(given), factor=float(number))
        if name in (BANDWIDTH, FLOPS) or (name == MEMORY and unit is None):
            raise ClusterError(f"{name}={given}: {_wanted(name)}")
        return cls(str(given), value=float(number) * _UNITS[unit or "B"])

    def apply(self, old: float) -> float:
        """Return the changed quantity."""
        return old * self.factor if self.factor is not None else self.value or old

    def count(self, name: str, old: int) -> int:
        """Return the changed number of things. Raises `ClusterError` where it is not a whole number."""
        new = self.apply(old)
        if new < 1 or new != int(new):
            raise ClusterError(f"{name}={self.text}: of {old} that would be {new:g}; give what makes a whole number")
        return int(new)


def _wanted(name: str) -> str:
    if name in (BANDWIDTH, FLOPS):
        return f"give a factor, such as {name}=2x"
    return f"give a factor or {'bytes' if name == MEMORY else 'a number'}, such as {name}=2x or {name}=" + (
        "80GB" if name == MEMORY else "16"
    )


def changed(cluster: Cluster, changes: Mapping[str, Change]) -> Cluster:
    """Return the cluster with other `nodes`, `bandwidth`, `memory` or `flops`.

    Bandwidth is that of links between machines, or of all links where there are none. Memory and flops are each
    device's.

    Raises:
        ClusterError: the cluster does not determine the changed one, such as one of several kinds of machines.
    """
    if NODES in changes:
        cluster = _with_nodes(cluster, changes[NODES])
    if BANDWIDTH in changes:
        cluster = _with_bandwidth(cluster, changes[BANDWIDTH])
    for name, apply in ((MEMORY, _with_memory), (FLOPS, _with_flops)):
        if name in changes:
            cluster = _with_devices(cluster, lambda d, change=apply, c=changes[name]: change(d, c))
    changes_text = ", ".join(f"{name}={change.text}" for name, change in changes.items())
    return replace(cluster, provenance=f"{cluster.provenance}; changed: {changes_text}") if changes else cluster


def num_nodes(cluster: Cluster) -> int:
    """Return the number of a cluster's machines: the units that networks join."""
    return prod(level.size for level in cluster.levels if level.kind == "network")


def _with_nodes(cluster: Cluster, change: Change) -> Cluster:
    if cluster.parts:
        raise ClusterError(
            f"nodes={change.text}: {cluster.name} has machines of several kinds, and nothing says which there would be "
            "more of; plan for a cluster with them"
        )
    old = num_nodes(cluster)
    new, each = change.count(NODES, old), cluster.num_devices // old
    if cluster.name in PRESETS and cluster == preset_cluster(cluster.name, old, each):
        return preset_cluster(cluster.name, new, each)
    if not cluster.levels or cluster.levels[-1].kind != "network":
        raise ClusterError(
            f"nodes={change.text}: {cluster.name} is one machine, and nothing says what would join it to others; plan "
            "for a cluster with a network"
        )
    *inner, last = cluster.levels
    if new * last.size % old:
        raise ClusterError(
            f"nodes={change.text}: {cluster.name} has {old // last.size} in each unit of {last.name!r}; give a multiple"
        )
    return replace(cluster, levels=(*inner, last.resized(new * last.size // old)))


def _with_bandwidth(cluster: Cluster, change: Change) -> Cluster:
    between = [level.kind == "network" for level in cluster.levels]
    factor = change.factor or 1.0

    def scaled(levels: Sequence[Level]) -> tuple[Level, ...]:
        return tuple(
            replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)
            if level.kind == "network" or not any(between)
            else level
            for level in levels
        )

    lines = tuple(replace(line, s_per_byte=line.s_per_byte / factor) for line in cluster.collectives)
    parts = tuple(replace(part, levels=scaled(part.levels)) for part in cluster.parts)
    return replace(cluster, levels=scaled(cluster.levels), collectives=lines, parts=parts)


_Changing = Callable[[Device], Device]


def _with_devices(cluster: Cluster, change: _Changing) -> Cluster:
    parts = tuple(replace(part, device=change(part.device)) for part in cluster.parts)
    device = slowest_device([part.device for part in parts]) if parts else change(cluster.device)
    return replace(cluster, device=device, parts=parts)


def _with_memory(device: Device, change: Change) -> Device:
    return replace(device, memory_bytes=round(change.apply(device.memory_bytes)))


def _with_flops(device: Device, change: Change) -> Device:
    if device.kernels:
        raise ClusterError(
            f"flops={change.text}: the kernels of {device.name} were measured, and nothing says what they would take "
            "with other rates; ask of a plan for a preset"
        )
    factor = change.factor or 1.0
    rates = {precision: rate * factor for precision, rate in device.flops_per_s.items()}
    return replace(device, flops_per_s=rates, vector_flops_per_s=device.vector_flops_per_s * factor)
