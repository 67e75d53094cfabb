"""Clusters: devices, the links between them by level, and where each figure comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.topology import Level
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError

FORMAT = "shardwright-cluster"
VERSION = 2

Backend = Literal["nccl", "gloo"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]

BACKENDS: tuple[Backend, ...] = ("nccl", "gloo")
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


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
        owner = "CollectiveLine"
        checks.choice(self.collective, owner, "collective", COLLECTIVES)
        group_size = checks.positive_int(self.group_size, owner, "group_size", "how many ranks took part")
        if group_size < 2:
            problem = f"expected at least 2, got {group_size}; one rank alone communicates nothing, remove the line"
            raise checks.FieldError(owner, "group_size", problem)
        object.__setattr__(self, "group_size", group_size)
        object.__setattr__(self, "latency_s", checks.non_negative(self.latency_s, owner, "latency_s", "seconds"))
        s_per_byte = checks.positive(self.s_per_byte, owner, "s_per_byte", "seconds per byte")
        object.__setattr__(self, "s_per_byte", s_per_byte)
        if self.fit_error is not None:
            error = checks.non_negative(self.fit_error, owner, "fit_error", "shares of the measured time")
            object.__setattr__(self, "fit_error", error)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive ranks of a mixed cluster: equal devices and the links between them, innermost first."""

    device: Device
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        _check_devices_and_links(self, "Part")

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
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    backend: Backend
    provenance: str
    collectives: tuple[CollectiveLine, ...] = ()
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        checks.text(self.name, "Cluster", "name", "what people call the cluster")
        checks.text(self.provenance, "Cluster", "provenance", "where the figures come from")
        _check_devices_and_links(self, "Cluster")
        lines = _checked_tuple(self.collectives, "Cluster", "collectives", CollectiveLine)
        object.__setattr__(self, "collectives", lines)
        object.__setattr__(self, "parts", _checked_tuple(self.parts, "Cluster", "parts", Part))
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
        from shardwright.cost.clusters.parts import slowest_device

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

    def summary(self) -> str:
        """One line for people: size, device, links, provenance."""
        links = " × ".join(f"{level.size} {level.name}" for level in self.levels)
        kinds = [(f"{part.num_devices} ", part.device) for part in self.parts] or [("", self.device)]
        devices = " + ".join(f"{count}{device.name} ({device.memory_bytes / 2**30:.0f} GiB)" for count, device in kinds)
        return f"{self.name}: {links}, {devices}, {self.backend}; {self.provenance}"

    def part(self, ranks: range) -> Cluster:
        """The cluster of consecutive `ranks`, such as those of a pipeline stage: their own devices and links.

        Raises:
            ClusterError: no ranks, ranks with gaps, or ranks that the cluster does not have.
        """
        from shardwright.cost.clusters.parts import part_of

        return _same(part_of(cast("Any", self), ranks))

    # ------------------------------------------------------------------------------------------------- constructors

    @classmethod
    def local(cls, num_ranks: int) -> Cluster:
        """`num_ranks` CPU ranks on this machine under gloo: as `calibrate` measured it, or else built-in defaults."""
        from shardwright.cost.calibration.local import local_cluster

        return _same(local_cluster(num_ranks))

    @classmethod
    def preset(cls, name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
        """A common machine, such as `preset("dgx-h100", nodes=64)`; `PRESETS` of `cost.clusters.presets` lists them."""
        from shardwright.cost.clusters.presets import preset_cluster

        return _same(preset_cluster(name, nodes, devices_per_node))

    @classmethod
    def mixed(cls, machines: Sequence[tuple[str, int]]) -> Cluster:
        """Common machines of several kinds in one network: `mixed([("dgx-h100", 4), ("dgx-a100", 4)])`."""
        from shardwright.cost.clusters.presets import preset_mix

        return _same(preset_mix(machines))

    @classmethod
    def join(cls, clusters: Sequence[Cluster], link: Level, name: str | None = None) -> Cluster:
        """Clusters in the order of their ranks, joined by `link`: sites, pods, or nodes of several kinds.

        `link.size` is the number of clusters, or that of their nodes where these share one network.

        Raises:
            ClusterError: fewer than two clusters, several backends, or units of different sizes.
        """
        from shardwright.cost.clusters.parts import join_clusters

        return _same(join_clusters(cast("Any", clusters), link, name))

    @classmethod
    def detect(cls) -> Cluster:
        """The cluster that this process runs on: its GPUs or CPU ranks, by torchrun's environment if there is one."""
        from shardwright.cost.clusters.detect import detect_cluster

        return _same(detect_cluster(os.environ))

    # --------------------------------------------------------------------------------------------------------- files

    def to_json(self) -> dict[str, object]:
        """The JSON form, described by `cost/clusters/cluster.schema.json`."""
        fields = {name: value for name, value in asdict(self).items() if name != ("device" if self.parts else "parts")}
        return {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(fields))}

    @classmethod
    def from_json(cls, data: object, source: str = "cluster") -> Cluster:
        """The cluster that `to_json` wrote. `source` names the file in errors.

        Raises:
            ClusterError: naming the field, what was expected, what was found and what to do.
        """
        from shardwright.cost.clusters.cluster_json import read_cluster

        return _same(read_cluster(data, source))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form to `path`, whole or not at all; makes the folder where there is none."""
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            reason = error.strerror or error
            raise ClusterError(f"{target}: cannot write the cluster file ({reason}); choose a writable path") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file.

        Raises:
            ClusterError: the file is absent, truncated, or describes an impossible cluster.
        """
        from shardwright.cost.clusters.cluster_json import load_cluster

        return _same(load_cluster(Path(path)))


def threads_per_rank(num_ranks: int) -> int:
    """How many CPU threads each of `num_ranks` ranks on this machine gets; calibration and launcher use the same."""
    checks.positive_int(num_ranks, "threads_per_rank", "num_ranks", "how many ranks share this machine")
    return max(1, (os.cpu_count() or 1) // num_ranks)


def _same(cluster: object) -> Cluster:
    """`cluster`, for pyright: it sees this file as `cost.clusters.cluster` too, with a class of its own."""
    return cast("Cluster", cluster)


def _check_devices_and_links(owner: Part | Cluster, name: str) -> None:
    if not isinstance(owner.device, Device):
        raise checks.FieldError(name, "device", f"expected a Device, got {owner.device!r}; construct one")
    object.__setattr__(owner, "levels", _checked_tuple(owner.levels, name, "levels", Level))
    if not owner.levels:
        raise checks.FieldError(name, "levels", "expected at least one level, got none; give the innermost first")


def _checked_tuple(value: object, owner: str, name: str, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(entry, kind) for entry in value):
        raise checks.FieldError(owner, name, f"expected a tuple of {kind.__name__}, got {value!r}; construct them")
    return tuple(value)
