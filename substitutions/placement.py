"""Symbolic layouts: a layout along one mesh axis whose block count is a product of factors.

    S(1)        slice p of dimension 1
    S(0, a*b)   dimension 0 seen as a·b blocks, slice p of each

At concrete sizes `Placement.at` is a `pcg.layout.Layout`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwright.pcg.errors import RuleError
from shardwright.pcg.layout import Layout, LayoutKind

_PLACEMENT = re.compile(r"R|C|P|S\((\d+)(?:, ?([a-z]\d*(?:\*[a-z]\d*)*))?\)")


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """The layout of one tensor of a rule; `blocks` lists the factors whose product is the number of blocks."""

    kind: LayoutKind
    dim: int = -1
    blocks: tuple[str, ...] = ()

    @property
    def dual(self) -> Placement:
        """The layout of the gradient."""
        return Placement(Layout(self.kind).dual.kind, self.dim, self.blocks)

    def at(self, sizes: Mapping[str, int]) -> Layout:
        """Return the layout when the factors have these sizes."""
        return Layout(self.kind, self.dim, prod(sizes[name] for name in self.blocks))

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim}, {'*'.join(self.blocks)})" if self.blocks else f"S({self.dim})"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Return the placement that `str` printed as `text`. Raises `RuleError` for anything else."""
        match = _PLACEMENT.fullmatch(text)
        if not match:
            raise RuleError(f"placement {text!r} is not one of R, C, P, S(dim) or S(dim, a*b)")
        if text in ("R", "C", "P"):
            return cls(text)
        return cls("S", int(match[1]), tuple(match[2].split("*")) if match[2] else ())
