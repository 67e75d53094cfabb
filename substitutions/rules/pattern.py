"""Shape-free factor patterns: resolved factor strings without their sizes and names.

    linear on [4, 8, 12], [16, 12]     resolves to "_0 _1 i, o i -> _0 _1 o"      pattern "a b c, d c -> a b d"
    slice, the second of three blocks  resolves to "d0 (q! o) -> d0 o"            pattern "a (b! c) -> a c"

Two operators with the same row and the same pattern are split by the same rules, whatever their sizes: rules and
certificates are keyed by patterns. Factors are called a, b, c, … in order of appearance; fixed ones carry a `!`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.pcg.errors import RuleError
from shardwright.pcg.factors import Factor, Signature

FactorDims = tuple[tuple[str, ...], ...]
_DIM = re.compile(r"\([^()]*\)|[a-z]\d*!?|1")


def letter(index: int) -> str:
    """Return the name of a factor: a … z, a1 … z1, …"""
    return chr(ord("a") + index % 26) + (str(index // 26) if index >= 26 else "")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern: the factors that make up each dimension of the operands and of the result, major first."""

    operands: tuple[FactorDims, ...]
    result: FactorDims
    fixed: frozenset[str]

    @property
    def tensors(self) -> tuple[FactorDims, ...]:
        """The operands and, last, the result."""
        return (*self.operands, self.result)

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of appearance."""
        return tuple(dict.fromkeys(name for dims in self.tensors for dim in dims for name in dim))

    @property
    def splittable(self) -> tuple[str, ...]:
        return tuple(name for name in self.factors if name not in self.fixed)

    @property
    def summed(self) -> tuple[str, ...]:
        """The splittable factors that the result does not have."""
        remaining = {name for dim in self.result for name in dim}
        return tuple(name for name in self.splittable if name not in remaining)

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """Return the factor string that this pattern stands for, at these sizes."""
        names = self.factors
        index = {name: i for i, name in enumerate(names)}
        summed = set(self.summed)
        factors = tuple(
            Factor(n, sizes[n], "fixed" if n in self.fixed else "sum" if n in summed else "map") for n in names
        )
        tensors = [tuple(tuple(index[n] for n in dim) for dim in dims) for dims in self.tensors]
        return Signature(factors, tuple(tensors[:-1]), tensors[-1])

    def shapes(self, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the operands and, last, of the result."""
        return tuple(tuple(prod(sizes[n] for n in dim) for dim in dims) for dims in self.tensors)

    def __str__(self) -> str:
        sides = [" ".join(self._dim(dim) for dim in dims) for dims in self.tensors]
        return f"{', '.join(sides[:-1])} -> {sides[-1]}".strip()

    def _dim(self, dim: tuple[str, ...]) -> str:
        marked = [f"{name}!" if name in self.fixed else name for name in dim]
        return "1" if not marked else marked[0] if len(marked) == 1 else f"({' '.join(marked)})"

    @classmethod
    def parse(cls, text: str, num_operands: int) -> Pattern:
        """Return the pattern that `str` printed as `text`. Raises `RuleError` for anything else."""
        left, arrow, right = text.partition("->")
        sides = [*(left.split(",") if num_operands else []), right]
        if not arrow or len(sides) != num_operands + 1:
            raise RuleError(f"pattern {text!r}: expected {num_operands} operands, '->' and a result")
        tensors: list[FactorDims] = []
        fixed: set[str] = set()
        for side in sides:
            tokens = _DIM.findall(side)
            if "".join(tokens).replace(" ", "") != side.replace(" ", ""):
                raise RuleError(f"pattern {text!r}: cannot read {side.strip()!r}; expected factors a, b!, (a b) or 1")
            members = [tuple(token.strip("()").split()) if token != "1" else () for token in tokens]
            fixed.update(name[:-1] for dim in members for name in dim if name.endswith("!"))
            tensors.append(tuple(tuple(name.rstrip("!") for name in dim) for dim in members))
        return cls(tuple(tensors[:-1]), tensors[-1], frozenset(fixed))


@lru_cache(maxsize=65536)
def pattern_of(signature: Signature) -> tuple[Pattern, tuple[str, ...]]:
    """Return the pattern of a resolved factor string, and its name for each of `signature.factors`."""
    order = list(dict.fromkeys(f for dims in (*signature.operands, signature.result) for dim in dims for f in dim))
    names = {f: letter(i) for i, f in enumerate(order)}

    def rename(dims: tuple[tuple[int, ...], ...]) -> FactorDims:
        return tuple(tuple(names[f] for f in dim) for dim in dims)

    fixed = frozenset(names[f] for f in order if signature.factors[f].role == "fixed")
    pattern = Pattern(tuple(map(rename, signature.operands)), rename(signature.result), fixed)
    return pattern, tuple(names[f] for f in range(len(signature.factors)))
