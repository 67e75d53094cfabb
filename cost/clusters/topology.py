"""Levels of a network: the units that a level joins, by which links, and how fast.

    switch      every unit sends to every other at its full bandwidth: NVSwitch, one Ethernet or InfiniBand switch
    ring        links to the two neighbours only
    mesh        a link of its own to every other unit (MI300X, PCIe bridges); with `dims` a grid without wraparound
    pcie        devices under one root complex or PCIe switch, each with its own lanes; several root complexes take one
                more level, which joins the processors
    rail        the i-th devices of all units meet in one switch (rail-optimised): other pairs cross the spine, to which
                `oversubscription` applies, or pass a device of their own unit by NVLink
    torus       a grid of `dims` that wraps around, links to two neighbours in each dimension
    fat-tree    a tree of switches, full where `oversubscription` is 1; else every unit is a leaf of its own, and larger
                leaves are two levels: the leaf, and one that joins leaves

A slow link between sites is a level like any other: kind "network", a small bandwidth, a long latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

from shardwright.pcg import checks

LinkKind = Literal["nvlink", "pcie", "network", "host"]
Topology = Literal["switch", "ring", "mesh", "pcie", "rail", "torus", "fat-tree"]

LINK_KINDS: tuple[LinkKind, ...] = get_args(LinkKind)
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
GRIDS: tuple[Topology, ...] = ("torus", "mesh")


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the network: `size` units of the level below (at the innermost level: devices), joined by links.

    Attributes:
        bandwidth_bytes_per_s: sustained bandwidth of one *device* out of its unit, one way, all its links of this level
            together, while all others send too; where the level is oversubscribed, as long as its upper part allows.
        latency_s: of one hop.
        kind: of the links; libraries choose their algorithms by it. "host" is the memory of one machine.
        topology: which units have links to which; the module's docstring lists them.
        oversubscription: when all devices send across the level at once, each has 1/oversubscription of its bandwidth;
            on a rail-optimised level, only traffic that changes rails has.
        dims: the grid of a torus, or of a mesh that is one; its product is `size`. Neighbours in the last dimension
            have consecutive numbers.
    """

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: LinkKind = "network"
    topology: Topology = "switch"
    oversubscription: float = 1.0
    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.canonical(self, {
            "name": (checks.text, "what joins the units, such as 'nvlink' or 'network'"),
            "size": (checks.positive_int, "how many units of the level below this level joins"),
            "bandwidth_bytes_per_s": (checks.positive, "bytes per second"),
            "latency_s": (checks.non_negative, "seconds"),
            "oversubscription": (_ratio, "times what the level carries; 1 is a full network"),
        })  # fmt: skip
        checks.choice(self.kind, "Level", "kind", LINK_KINDS)
        checks.choice(self.topology, "Level", "topology", TOPOLOGIES)
        object.__setattr__(self, "dims", _checked_dims(self.dims, self.size, self.topology))

    @property
    def shared_bytes_per_s(self) -> float:
        """The bandwidth of a device out of its unit when all devices send across this level at once."""
        return self.bandwidth_bytes_per_s / self.oversubscription

    def resized(self, size: int) -> Level:
        """Return this level with `size` neighbouring units in place of all, or with more of the same kind.

        A piece of a ring is a line; a piece of a grid is the grid of its last dimensions, no longer wrapped around. In
        a mesh each unit keeps its links to the units that are left, and so only that part of its bandwidth.
        """
        if size == self.size:
            return self
        if self.dims:
            return replace(self, size=size, topology="mesh", dims=_last_dims(self.dims, size))
        if self.topology == "ring" and size < self.size:
            return replace(self, size=size, topology="mesh", dims=(size,))
        bandwidth = self.bandwidth_bytes_per_s
        if self.topology == "mesh" and 1 < size < self.size:
            bandwidth *= (size - 1) / (self.size - 1)
        return replace(self, size=size, bandwidth_bytes_per_s=bandwidth)


def slowest_level(levels: Sequence[Level], size: int) -> Level:
    """Return `size` units at the least bandwidth and the longest latency, with the slowest level's links."""
    slowest = min(levels, key=lambda level: level.shared_bytes_per_s).resized(size)
    return replace(slowest, latency_s=max(level.latency_s for level in levels))


def _last_dims(dims: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the grid of `size` consecutive units: whole rows of the last dimensions if possible, else a line."""
    rows = 1
    for i in reversed(range(len(dims))):
        if size % rows == 0 and size // rows <= dims[i]:
            return (size // rows, *dims[i + 1 :])
        rows *= dims[i]
    return (size,)


def _ratio(value: object, owner: str, name: str, meaning: str) -> float:
    ratio = checks.positive(value, owner, name, meaning)
    if ratio < 1:
        raise checks.FieldError(owner, name, f"expected a number of at least 1, got {value!r}; give it in {meaning}")
    return ratio


def _checked_dims(value: object, size: int, topology: Topology) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        problem = f"expected a list of positive integers, got {value!r}; give the grid, such as [4, 4]"
        raise checks.FieldError("Level", "dims", problem)
    meaning = "how many units lie along one dimension of the grid"
    dims = tuple(checks.positive_int(dim, "Level", f"dims[{i}]", meaning) for i, dim in enumerate(value))
    if dims and topology not in GRIDS:
        problem = f"expected none for topology {topology!r}, got {list(dims)}; remove them or make it a 'torus'"
        raise checks.FieldError("Level", "dims", problem)
    if topology == "torus" and not dims:
        problem = f"expected the grid of the torus, got none; give dims whose product is {size}"
        raise checks.FieldError("Level", "dims", problem)
    if dims and prod(dims) != size:
        problem = (
            f"expected a grid of {size} units, got {list(dims)}, which joins {prod(dims)}; the other units have no "
            "links: correct the dims or the size"
        )
        raise checks.FieldError("Level", "dims", problem)
    return dims
