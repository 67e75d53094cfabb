"""Device meshes: named axes over the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.pcg.errors import GraphError


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks. Ranks are numbered row-major: the last axis varies fastest.

    `Mesh.of(dp=4, tp=2)` is a 4 × 2 mesh in which ranks 0 and 1 differ along `tp`.
    """

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise GraphError(f"mesh: {len(self.names)} axis names for {len(self.sizes)} sizes; give one size per name")
        if len(set(self.names)) != len(self.names):
            raise GraphError(f"mesh: axis names {list(self.names)} repeat; give every axis its own name")
        for name, size in zip(self.names, self.sizes, strict=True):
            if not name.isidentifier():
                raise GraphError(f"mesh: axis name {name!r} is not an identifier; use letters, digits and '_'")
            if size < 1:
                raise GraphError(f"mesh: axis {name!r} has size {size}; expected a positive integer")

    @classmethod
    def of(cls, **axes: int) -> Mesh:
        """The mesh with these axes, outermost first."""
        return cls(tuple(axes), tuple(axes.values()))

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, name: str) -> int:
        """The position of axis `name`; a `GraphError` where the mesh has none of that name."""
        if name not in self.names:
            raise GraphError(f"axis {name!r} is not in the mesh {self}; choose one of {list(self.names)}")
        return self.names.index(name)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Every device's coordinates, in rank order."""
        for rank in range(self.num_devices):
            yield self.coordinate(rank)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinates of one rank."""
        position: list[int] = []
        for size in reversed(self.sizes):
            rank, digit = divmod(rank, size)
            position.append(digit)
        return tuple(reversed(position))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + "]"
