"""Meshes: named axes over the ranks of a cluster, and over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from keyword import iskeyword
from math import prod
from numbers import Integral

from shardwright.pcg.errors import GraphError

TIME = "mb"
"""The name of the axis along which a rank runs microbatches, one after the other; always the first."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks. Ranks are numbered row-major: the last axis varies fastest.

    `Mesh.of(dp=4, tp=2)` is a 4 × 2 mesh in which ranks 0 and 1 differ along `tp`. Its *members* are its ranks; on
    `Mesh.of(mb=3, dp=4, tp=2)`, where each rank runs three microbatches, they are these microbatches of all ranks.
    """

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise GraphError(f"mesh: {len(self.names)} axis names for {len(self.sizes)} sizes; give one size per name")
        if len(set(self.names)) != len(self.names):
            raise GraphError(f"mesh: axis names {list(self.names)} repeat; give every axis its own name")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not (name.isidentifier() and name.isascii()) or iskeyword(name):
                raise GraphError(f"mesh: axis name {name!r} is not an identifier; use letters, digits and '_'")
            if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
                raise GraphError(f"mesh: axis {name!r} has size {size!r}; expected a positive integer")
        if TIME in self.names[1:]:
            raise GraphError(f"mesh: {TIME!r} names the microbatches and comes first, got {list(self.names)}")

    @classmethod
    def of(cls, **axes: int) -> Mesh:
        """Return the mesh with these axes, outermost first."""
        return cls(tuple(axes), tuple(axes.values()))

    @property
    def num_members(self) -> int:
        return prod(self.sizes)

    @property
    def num_microbatches(self) -> int:
        return self.sizes[0] if TIME in self.names else 1

    @property
    def num_devices(self) -> int:
        return self.num_members // self.num_microbatches

    @property
    def devices(self) -> Mesh:
        """The mesh of the axes of ranks alone."""
        return Mesh(self.names[1:], self.sizes[1:]) if TIME in self.names else self

    @property
    def device_sizes(self) -> tuple[int, ...]:
        """The number of devices along each axis; 1 along the axis of time."""
        return tuple(1 if name == TIME else size for name, size in zip(self.names, self.sizes, strict=True))

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """Return the position of axis `name`; raise a `GraphError` if the mesh has none of that name."""
        if name not in self.names:
            raise GraphError(f"axis {name!r} is not in the mesh {self}; choose one of {list(self.names)}")
        return self.names.index(name)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield every member's coordinates: those of the first microbatch in rank order, then those of the next."""
        for member in range(self.num_members):
            yield self.coordinate(member)

    def coordinate(self, member: int) -> tuple[int, ...]:
        """Return the coordinates of one member; those of the first microbatch are numbered like the ranks."""
        position: list[int] = []
        for size in reversed(self.sizes):
            member, digit = divmod(member, size)
            position.append(digit)
        return tuple(reversed(position))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + "]"
