"""Contexts of terms: a context is a few typed variables and the operators enumerated over them.

    serial("slices", "x: *b n, y: *b n, c", "slice add mul", cuts=cut("n", "s:t"), extents="t - s", about="slice")
    placed("lookup", "w: v h, t: n -> v", "embedding(padding_idx=pad) relu softmax(dim=1)")

Variables have dims as in rules. `t: n -> v` is an index tensor of dims n whose values are below v; `c` alone is a
number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.generator.symbolicdims import extent, monomials
from shardwright.substitutions.generator.vocabulary import VOCABULARY, Reach, RowWay, SymbolicType
from shardwright.substitutions.terms import Dims

RING = "add sub mul neg"
SliceBounds = Mapping[str, tuple[tuple[str, str], ...]]
"""dimension -> the (start, stop) of slices"""
_OPERATOR = re.compile(r"\w+(?:\((?:[^()]|\([^()]*\))*\))?")


@dataclass(frozen=True)
class Context:
    """A context: variables and operators.

    name       what progress calls it
    variables  name -> dims, and the size that values of index tensors stay below
    operators  names in the vocabulary, or operators with their attributes
    """

    name: str
    variables: Mapping[str, str]
    operators: tuple[str, ...]

    @cached_property
    def dims(self) -> Mapping[str, Dims]:
        """The dims of every variable."""
        return {name: Dims.parse(text.partition("->")[0]) for name, text in self.variables.items()}

    @cached_property
    def limits(self) -> Mapping[str, str]:
        """The index variables, each with the size that its values stay below."""
        return {name: text.partition("->")[2].strip() for name, text in self.variables.items() if "->" in text}


@dataclass(frozen=True)
class SerialContext(Context):
    """A context of serial terms; its operators are names in the vocabulary.

    cuts       dimension -> the (start, stop) that slices take
    extents    dimensions of results besides those of variables
    parts      how many parts a number has: one, and one more for every exponential inside another
    part       the part that fingerprints read: 0, or 1 where logarithms matter
    samples    how many assignments of sizes fingerprints read
    about      a rule must have one of these operators; empty: any (other contexts hold the rules without them)
    """

    cuts: SliceBounds = field(default_factory=dict)
    extents: tuple[str, ...] = ()
    parts: int = 1
    part: int = 0
    samples: int = 2
    about: tuple[str, ...] = ()

    @cached_property
    def types(self) -> Mapping[str, SymbolicType]:
        """The type of every variable."""
        return {
            name: SymbolicType(tuple(map(_extent, dims.entries)), self.limits.get(name, ""))
            for name, dims in self.dims.items()
        }

    @cached_property
    def ways(self) -> tuple[RowWay, ...]:
        return tuple(VOCABULARY[name] for name in self.operators)

    @cached_property
    def reach(self) -> Reach:
        """The structural operators that are possible here: products among the dims of variables may be split."""
        used = {d for t in self.types.values() for d in t.dims}
        pairs = [entry for dims in self.dims.values() for entry in dims.entries if len(entry) == 2]
        splits = {_extent(entry): ((entry[0], entry[1]),) for entry in pairs}
        return Reach(self.cuts, splits, frozenset(used | set(self.extents)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sizes, and the bounds of slices, that an instance fixes."""
        texts = [d for d in self.reach.extents if not d.startswith("*")]
        texts += [*self.limits.values(), *(bound for cuts in self.cuts.values() for pair in cuts for bound in pair)]
        return tuple(sorted({name for text in texts for names, _ in monomials(text) for name in names}))

    @cached_property
    def dimensions(self) -> tuple[str, ...]:
        """The sizes that variables have."""
        names = {name for dims in self.dims.values() for name in dims.names if name[0] != "*"}
        limits = {name for limit in self.limits.values() for names, _ in monomials(limit) for name in names}
        return tuple(sorted(names | limits))

    @cached_property
    def splices(self) -> tuple[str, ...]:
        return tuple(sorted({d[1:] for t in self.types.values() for d in t.dims if d.startswith("*")}))


def _extent(entry: Sequence[str]) -> str:
    """Return the dimension that an entry of dims is."""
    return extent("*".join(entry) or "1")


@dataclass(frozen=True)
class PlacementContext(Context):
    """A context of terms along mesh axes; its operators have attributes, as `softmax(dim=1)`, where they need any.

    axes    the mesh axes
    whole   sizes that are never sharded
    sizes   the prime that a size stands for, where the choice matters
    small   the size at which fingerprints are taken, where the choice matters
    parts   of the numbers that fingerprints are made of: one, and one more for exponentials
    """

    axes: tuple[str, ...] = ("a",)
    whole: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    small: Mapping[str, int] = field(default_factory=dict)
    parts: int = 2

    def __post_init__(self) -> None:
        sizes = {name for dims in self.dims.values() for name in dims.names}
        if sizes & set(self.axes):
            raise RuleError(f"context {self.name!r}: {min(sizes & set(self.axes))!r} names a size and an axis")


def cut(dim: str, *pairs: str) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return slices of a dimension: `cut("n", "s:t")` cuts n from s to t."""
    bounds = (pair.partition(":") for pair in pairs)
    return {dim: tuple((start, stop) for start, _, stop in bounds)}


def serial(
    name: str, variables: str, operators: str, *, extents: str = "", about: str = "", **options: Any
) -> SerialContext:
    """Return a serial context from text; `options` are the other fields."""
    dims = tuple(extents.split(", ")) if extents else ()
    return SerialContext(
        name, _variables(variables), tuple(operators.split()), extents=dims, about=tuple(about.split()), **options
    )


def placed(name: str, variables: str, operators: str, **options: Any) -> PlacementContext:
    """Return a placement context from text; `options` are the other fields."""
    return PlacementContext(name, _variables(variables), tuple(_OPERATOR.findall(operators)), **options)


def _variables(text: str) -> dict[str, str]:
    parts = (variable.partition(":") for variable in text.split(", "))
    return {name: dims.strip() for name, _, dims in parts}
