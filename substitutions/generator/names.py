"""Canonical names of the variables and sizes of a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.substitutions.generator.typed import PlacedType, TypeTable
from shardwright.substitutions.generator.typedgraphs import TypedGraphs
from shardwright.substitutions.terms import Dims

_VARIABLES = ("x", "y", "z", "w", "u", "v", "t", "x1", "y1", "z1")
_SIZES = ("m", "i", "o", "n", "h", "d", "j", "k", "l", "p", "q", "r", "m1", "i1", "o1", "n1")


class Names:
    """Canonical names, given in order of appearance."""

    def __init__(self, enumeration: TypedGraphs) -> None:
        self._context = enumeration.context
        self._variables: dict[str, tuple[str, int]] = {}
        self._sizes: dict[str, str] = {}
        self._dims: Mapping[str, Dims] = enumeration.dims

    def variable(self, graph: tuple[int, ...]) -> str:
        own = self._context.variables[graph[1]][0]
        if own not in self._variables:
            self._variables[own] = (_VARIABLES[len(self._variables)], graph[2])
            for name in self._dims[own].names:
                self._sizes.setdefault(name, _SIZES[len(self._sizes)])
        return self._variables[own][0]

    def size(self, name: str) -> str:
        """The new name of a size; constants, which no variable has, keep theirs."""
        return self._sizes.get(name, name)

    def dims(self) -> tuple[tuple[str, Dims], ...]:
        return tuple(
            (new, Dims(tuple(tuple(map(self.size, entry)) for entry in self._dims[own].entries)))
            for own, (new, _) in self._variables.items()
        )

    def kinds(self, typing: TypeTable) -> Iterator[tuple[str, PlacedType]]:
        for new, kind in self._variables.values():
            yield new, typing.types[kind]

    def declared(self, typing: TypeTable) -> str:
        layouts = [str(kind.layouts) for _, kind in self.kinds(typing)]
        return "; ".join(f"{name}: {dims} {x}" for (name, dims), x in zip(self.dims(), layouts, strict=True))
