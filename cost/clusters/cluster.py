"""Clusters: devices, the links between them by level, and the source of each figure.

Clusters can be joined by one more level of links, of one kind of device or of several, and cut into parts. Work that
spans devices of several kinds goes at the pace of the slowest, in the memory of the smallest: a mixed cluster has the
*binding* device and, below the level that joins its parts, the binding links. Work within one part, such as a pipeline
stage, has that part's own device and links: `Cluster.part`.

The other ways to make a cluster are functions of the modules beside this one; the package makes them methods of
`Cluster`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise, takewhile
from math import gcd, prod
from operator import mul
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

from shardwright.cost.clusters.device import Device, slowest_device
from shardwright.cost.clusters.schedules import Schedules, schedules_of
from shardwright.cost.clusters.topology import Level, slowest_level
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.files import write_whole

FORMAT = "shardwright-cluster"
VERSION = 2

Backend = Literal["nccl", "gloo"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True, slots=True)
class CollectiveLine:
    """A measured line: a collective in groups of `group_size` ranks, all at once, took latency_s + s_per_byte · bytes.

    `bytes` is counted as in `shardwright.cost.collectives.communication`: the full tensor of one group. `fit_error` is
    the median relative error of the line against the measurements, or None where it was not fitted here.
    """

    collective: Collective
    group_size: int
    latency_s: float
    s_per_byte: float
    fit_error: float | None = None

    def __post_init__(self) -> None:
        checks.choice(self.collective, "CollectiveLine", "collective", COLLECTIVES)
        checks.canonical(self, {
            "group_size": (checks.positive_int, "how many ranks took part"),
            "latency_s": (checks.non_negative, "seconds"),
            "s_per_byte": (checks.positive, "seconds per byte"),
        })  # fmt: skip
        if self.group_size < 2:
            problem = f"expected at least 2, got {self.group_size}; one rank alone communicates nothing, remove it"
            raise checks.FieldError("CollectiveLine", "group_size", problem)
        if self.fit_error is not None:
            checks.canonical(self, {"fit_error": (checks.non_negative, "shares of the measured time")})


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """Consecutive ranks of a mixed cluster: equal devices and the links between them, innermost first."""

    device: Device
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        _check_devices_and_links(self, "ClusterPart")

    @property
    def num_devices(self) -> int:
        return prod(level.size for level in self.levels)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices joined by levels of links, innermost first; rank r lies in unit r // size of the first level.

    Attributes:
        device: every rank's. In a mixed cluster the binding one: the least rate of each kind, the least memory.
        levels: what joins all ranks; in a mixed cluster at the pace of the slowest part.
        provenance: where the figures come from: "default", "datasheet: …" or "measured <date> …".
        collectives: measured lines, used in place of the model of the links; only for clusters of one level.
        parts: of a mixed cluster, in the order of their ranks; empty where all devices and links are equal.
        schedules: what collectives may run by beside the library's own algorithms: None, "synthesized" or the path of a
            folder of schedules; kept as `Schedules`.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: Backend
    provenance: str
    collectives: tuple[CollectiveLine, ...] = ()
    parts: tuple[ClusterPart, ...] = ()
    schedules: Schedules | None = None

    preset: ClassVar[_Preset]
    mixed: ClassVar[Callable[[Sequence[tuple[str, int] | tuple[str, int, int]]], Cluster]]
    local: ClassVar[Callable[[int], Cluster]]
    detect: ClassVar[_Detect]
    load: ClassVar[Callable[[str | os.PathLike[str]], Cluster]]
    from_json: ClassVar[_FromJson]

    def __post_init__(self) -> None:
        checks.canonical(self, {
            "name": (checks.text, "what people call the cluster"),
            "provenance": (checks.text, "where the figures come from"),
        })  # fmt: skip
        _check_devices_and_links(self, "Cluster")
        lines = _checked_tuple(self.collectives, "Cluster", "collectives", CollectiveLine)
        object.__setattr__(self, "collectives", lines)
        object.__setattr__(self, "parts", _checked_tuple(self.parts, "Cluster", "parts", ClusterPart))
        object.__setattr__(self, "schedules", schedules_of(self.schedules))
        checks.choice(self.backend, "Cluster", "backend", BACKENDS)
        if self.backend == "nccl" and self.device.kind == "cpu":
            problem = "expected 'gloo' for a device of kind 'cpu', got 'nccl'; NCCL moves data between GPUs only"
            raise checks.FieldError("Cluster", "backend", problem)
        if self.collectives and len(self.levels) > 1:
            problem = f"measured lines describe a cluster of one level, this one has {len(self.levels)}; remove them"
            raise checks.FieldError("Cluster", "collectives", problem)
        if self.parts:
            self._check_parts()

    def _check_parts(self) -> None:
        sizes = [part.num_devices for part in self.parts]
        if sum(sizes) != self.num_devices:
            problem = (
                f"expected {self.num_devices} devices, as the levels join, got {' + '.join(map(str, sizes))} = "
                f"{sum(sizes)}; devices that no level joins are disconnected: correct the sizes of the levels"
            )
            raise checks.FieldError("Cluster", "parts", problem)
        if self.device != slowest_device([part.device for part in self.parts]):
            problem = (
                f"expected the slowest of the parts' devices, got {self.device.name!r}; use Cluster.mixed or .join"
            )
            raise checks.FieldError("Cluster", "device", problem)

    @property
    def num_devices(self) -> int:
        return prod(level.size for level in self.levels)

    @property
    def per_machine(self) -> int:
        """The number of devices of a machine: those that levels of links inside machines join."""
        return prod(level.size for level in takewhile(lambda level: level.kind != "network", self.levels))

    @property
    def _own_parts(self) -> tuple[ClusterPart, ...]:
        """The cluster's parts; a cluster of equal devices is one part."""
        return self.parts or (ClusterPart(self.device, self.levels),)

    def summary(self) -> str:
        """Return a line for people: size, device, links, provenance."""
        links = " × ".join(f"{level.size} {level.name}" for level in self.levels)
        kinds = [(f"{part.num_devices} ", part.device) for part in self.parts] or [("", self.device)]
        devices = " + ".join(f"{count}{device.name} ({device.memory_bytes / 2**30:.0f} GiB)" for count, device in kinds)
        return f"{self.name}: {links}, {devices}, {self.backend}; {self.provenance}"

    def part(self, ranks: range) -> Cluster:
        """Return the cluster of consecutive `ranks`, such as those of a pipeline stage: as fast as these are alone.

        Raises:
            ClusterError: no ranks, ranks with gaps, or ranks that the cluster does not have.
        """
        if not ranks or ranks.step != 1 or ranks.start < 0 or ranks.stop > self.num_devices:
            given = "no ranks" if not ranks else f"{ranks!r}"
            advice = f"give consecutive ranks from 0 to {self.num_devices - 1}"
            raise ClusterError(f"cluster {self.name!r}: a part needs ranks of it, got {given}; {advice}")
        if len(ranks) == self.num_devices:
            return self
        parts = [ClusterPart(part.device, _cut(part.levels, inside)) for part, inside in _touched(self, ranks)]
        mixed = len(parts) > 1
        return replace(
            self,
            name=f"{self.name}[{ranks.start}:{ranks.stop}]",
            device=slowest_device([part.device for part in parts]),
            levels=_cut(self.levels, ranks) if mixed else parts[0].levels,
            parts=tuple(parts) if mixed else (),
        )

    @classmethod
    def join(cls, clusters: Sequence[Cluster], link: Level, name: str | None = None) -> Cluster:
        """Join clusters, in the order of their ranks, by `link`: sites, pods, or nodes of several kinds.

        `link.size` is the number of units that `link` joins. A unit is a whole cluster, or a part of each cluster, such
        as a node where all nodes share one network; then `link` replaces the clusters' own outermost level between
        units. Nodes of unlike sizes are joined in units that divide them: 8 GPUs and 4 are `link.size` = 3 units of 4.
        Everything between units counts as slow as `link`, even inside a node; work in one part, such as a pipeline
        stage, has that part's own links.

        Raises:
            ClusterError: fewer than two clusters, several backends, or units that the clusters do not make.
        """
        if len(clusters) < 2:
            raise ClusterError(
                f"Cluster.join: expected at least two clusters, got {len(clusters)}; one needs no joining"
            )
        backends = sorted({cluster.backend for cluster in clusters})
        if len(backends) > 1:
            problem = f"expected one backend, got {' and '.join(backends)}; they do not reach others"
            raise ClusterError(f"Cluster.join: {problem}")
        if len({cluster.schedules for cluster in clusters}) > 1:
            raise ClusterError("Cluster.join: expected the same schedules in all clusters, got others; set them after")
        parts = tuple(part for cluster in clusters for part in cluster._own_parts)
        return cls(
            name=name or _names(clusters),
            device=slowest_device([part.device for part in parts]),
            levels=(*_joined_units(clusters, link), link),
            backend=clusters[0].backend,
            provenance="; ".join(dict.fromkeys(cluster.provenance for cluster in clusters)),
            parts=parts if len(set(parts)) > 1 else (),
            schedules=clusters[0].schedules,
        )

    def with_schedules(self, schedules: Schedules | str | os.PathLike[str] | None) -> Cluster:
        """Return the cluster with schedules: "synthesized", the path of a folder, or None for the library alone.

        Raises:
            ClusterError, ScheduleError: the folder has none, or a file cannot be read.
        """
        return replace(self, schedules=schedules_of(schedules))

    def to_json(self) -> dict[str, object]:
        """Return the JSON form, described by `cost/clusters/cluster.schema.json`."""
        plain, left_out = replace(self, schedules=None), {"schedules", "device" if self.parts else "parts"}
        fields = {name: value for name, value in asdict(plain).items() if name not in left_out}
        schedules = {} if self.schedules is None else {"schedules": self.schedules.to_json()}
        return {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(fields)), **schedules}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form to `path`, whole or not at all, and make its folder where there is none."""
        text = json.dumps(self.to_json(), indent=2) + "\n"
        write_whole(Path(path), text, "the cluster file", ClusterError, make_folder=True)


class _Preset(Protocol):
    def __call__(self, name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster: ...


class _Detect(Protocol):
    def __call__(self, environ: Mapping[str, str] = ...) -> Cluster: ...


class _FromJson(Protocol):
    def __call__(self, data: object, source: str = "cluster") -> Cluster: ...


def threads_per_rank(num_ranks: int) -> int:
    """Return the number of CPU threads of each of `num_ranks` ranks here; calibration and launcher use it."""
    checks.positive_int(num_ranks, "threads_per_rank", "num_ranks", "how many ranks share this machine")
    return max(1, (os.cpu_count() or 1) // num_ranks)


def _check_devices_and_links(owner: ClusterPart | Cluster, name: str) -> None:
    if not isinstance(owner.device, Device):
        raise checks.FieldError(name, "device", f"expected a Device, got {owner.device!r}; construct one")
    object.__setattr__(owner, "levels", _checked_tuple(owner.levels, name, "levels", Level))
    if not owner.levels:
        raise checks.FieldError(name, "levels", "expected at least one level, got none; give the innermost first")


def _checked_tuple(value: object, owner: str, name: str, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(entry, kind) for entry in value):
        raise checks.FieldError(owner, name, f"expected a tuple of {kind.__name__}, got {value!r}; construct them")
    return tuple(value)


def _joined_units(clusters: Sequence[Cluster], link: Level) -> tuple[Level, ...]:
    """Return the binding levels of one of the equal units that `link` joins."""
    total = sum(cluster.num_devices for cluster in clusters)
    unit, rest = divmod(total, link.size)
    pieces = gcd(*(cluster.levels[0].size for cluster in clusters))
    inner = [
        _levels_of(cluster, unit) or (_innermost(cluster, unit) if unit == pieces else None) for cluster in clusters
    ]
    units = [levels for levels in inner if levels is not None]
    capacities = sorted({size for levels in units for size in accumulate((x.size for x in levels), mul)})
    if rest or len(units) < len(inner):
        shapes = ", ".join(f"{c.name}: {' × '.join(str(level.size) for level in c.levels)}" for c in clusters)
        raise ClusterError(
            f"Cluster.join: {link.name!r} joins {link.size} equal units, {total} devices do not make them ({shapes}); "
            "give link.size as the number of clusters where these are equal, else of their nodes where these are, else "
            f"{total // pieces}, of units of {pieces}"
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
    """Return levels whose units have these numbers of devices, by `Level.resized`: 8 on one switch are 2 × 4 on it.

    The result is exact for switches. Where a mesh or a ring is cut, the link between the pieces is taken as a level of
    their number.
    """
    cut_levels: list[Level] = []
    joined, ends = 1, list(accumulate((level.size for level in levels), mul))
    for capacity in capacities:
        level = levels[next(i for i, end in enumerate(ends) if capacity <= end)]
        cut_levels.append(level.resized(capacity // joined))
        joined = capacity
    return cut_levels


def _levels_of(cluster: Cluster, unit: int) -> tuple[Level, ...] | None:
    """Return the innermost levels that join exactly `unit` devices, or None."""
    for count in range(len(cluster.levels) + 1):
        if prod(level.size for level in cluster.levels[:count]) == unit:
            return cluster.levels[:count]
    return None


def _innermost(cluster: Cluster, unit: int) -> tuple[Level, ...]:
    """Return the level that joins `unit` devices of one unit of the innermost level; none for one device."""
    return (cluster.levels[0].resized(unit),) if unit > 1 else ()


def _touched(cluster: Cluster, ranks: range) -> Iterator[tuple[ClusterPart, range]]:
    """Yield the parts that hold some of `ranks`, each with these as its own ranks."""
    start = 0
    for part in cluster._own_parts:
        inside = range(max(ranks.start - start, 0), min(ranks.stop - start, part.num_devices))
        if inside:
            yield part, inside
        start += part.num_devices


def _cut(levels: Sequence[Level], ranks: range) -> tuple[Level, ...]:
    """Return the levels between consecutive `ranks`.

    Units are the largest that the ranks fill: 4 devices of one node and 4 of the next are two units of 4.
    """
    between: list[Level] = []
    capacity = joined = 1  # devices in a unit of the level below: in full, and those that `ranks` fill
    for level in levels:
        capacity *= level.size
        is_outermost = ranks.start // capacity == (ranks.stop - 1) // capacity
        filled = len(ranks) if is_outermost else gcd(ranks.start, ranks.stop, capacity)
        if filled > joined or (is_outermost and not between):
            between.append(level.resized(filled // joined))
        if is_outermost:
            break
        joined = filled
    return tuple(between)


def _names(clusters: Sequence[Cluster]) -> str:
    counts = Counter(cluster.name for cluster in clusters)
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())
