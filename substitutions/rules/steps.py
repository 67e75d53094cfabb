"""Rules of the parallel operators: chains of typed steps that may replace each other.

    [reduce_scatter]   partition(d, n, a) ∘ reduce(a)  =  reduce_scatter(d, n, a)   on P

A rule starts from the layouts of one tensor on one or two mesh axes, called a and b, of degrees k and l. Both chains
lead to the same layouts and leave the same values on every device. Besides the four parallel operators a chain may use
the collectives that the lowering runs for a composition in one go:

    reduce_scatter(d, n, a)     P → S(d, n)        device p gets slice p of the sum
    gather_copy(a)              S(d, n) → C        every device gets all slices
    reduce_copy(a)              P → C              every device gets the sum
    all_to_all(e, m, a)         S(d, n) → S(e, m)  device p gets slice p along e of every slice along d
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.moves import MOVES
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE
from shardwright.substitutions import fields

_ENDS = {kind.function: ends for ends, kind in MOVES.items()}
_NEEDS_DIM = [function for function, (_, after) in _ENDS.items() if after == "S"]
_STEP = re.compile(r"(\w+)\((?:(\w+), (\w+), )?([ab])\)")
_LAYOUT = re.compile(r"R|C|P|S\((\w+), (\w+)\)")


@dataclass(frozen=True, slots=True)
class SymbolicLayout:
    """A symbolic layout on one axis: a kind and, for `S`, the names of its dimension and of its number of blocks."""

    kind: str
    dim: str = ""
    blocks: str = ""

    def __str__(self) -> str:
        return f"S({self.dim}, {self.blocks})" if self.kind == "S" else self.kind

    @classmethod
    def parse(cls, text: str) -> SymbolicLayout:
        match = _LAYOUT.fullmatch(text)
        if not match:
            raise RuleError(f"layout {text!r} is not one of R, C, P or S(d, n)")
        return cls("S", match[1], match[2]) if match[1] else cls(text)


@dataclass(frozen=True, slots=True)
class SymbolicStep:
    """An operator of a chain along one axis; `dim` and `blocks` where it makes a shard."""

    op: str
    axis: str
    dim: str = ""
    blocks: str = ""

    def __str__(self) -> str:
        return f"{self.op}({self.dim}, {self.blocks}, {self.axis})" if self.dim else f"{self.op}({self.axis})"

    @classmethod
    def parse(cls, text: str) -> SymbolicStep:
        """Read a step. Raises `RuleError` for an unknown operator, and for a dimension that is missing or too many."""
        match = _STEP.fullmatch(text)
        if not match or match[1] not in _ENDS:
            raise RuleError(f"step {text!r}: expected one of {sorted(_ENDS)} as in 'partition(d, n, a)' or 'reduce(a)'")
        if (match[1] in _NEEDS_DIM) != bool(match[2]):
            raise RuleError(f"step {text!r}: {match[1]} is given {'no' if match[2] else 'a'} dimension")
        return cls(match[1], match[4], match[2] or "", match[3] or "")

    def after(self, before: SymbolicLayout) -> SymbolicLayout:
        """Return the layout to which the step leads from `before`. Raises `RuleError` where it is not defined there."""
        start, end = _ENDS[self.op]
        if before.kind != start:
            raise RuleError(f"{self} steps from {start}, got {before}")
        return SymbolicLayout(end, self.dim, self.blocks) if end == "S" else SymbolicLayout(end)


@dataclass(frozen=True, slots=True)
class StepRule:
    """left = right for a tensor that starts in these layouts, axis by axis; steps are listed in order of execution."""

    name: str
    start: tuple[tuple[str, SymbolicLayout], ...]
    left: tuple[SymbolicStep, ...]
    right: tuple[SymbolicStep, ...]

    @property
    def equation(self) -> str:
        """The rule as one line, in order of execution."""
        start = ", ".join(f"{axis}: {place}" for axis, place in self.start)
        left, right = ("; ".join(map(str, side)) or "nothing" for side in (self.left, self.right))
        return f"{left} = {right} from {start}"

    @property
    def guard(self) -> tuple[str, ...]:
        """The conditions on the sizes: every shard's blocks are whole."""
        return tuple(f"{n}*{'k' if axis == 'a' else 'l'} | {d}" for axis, d, n in sorted(set(self.shards)))

    @property
    def shards(self) -> list[tuple[str, str, str]]:
        """The axis, dimension and number of blocks of every shard that the tensor is ever in."""
        places = [(axis, p.dim, p.blocks) for axis, p in self.start if p.kind == "S"]
        return places + [(m.axis, m.dim, m.blocks) for m in (*self.left, *self.right) if m.dim]

    def end(self, moves: tuple[SymbolicStep, ...]) -> dict[str, SymbolicLayout]:
        """Return the layouts after a chain. Raises `RuleError` where it is ill-typed."""
        places = dict(self.start)
        for move in moves:
            if move.axis not in places:
                raise RuleError(f"rule {self.name!r}: {move} moves along axis {move.axis!r}, which has no layout")
            places[move.axis] = move.after(places[move.axis])
            dims = [p.dim for p in places.values() if p.kind == "S"]
            if len(set(dims)) < len(dims):
                raise RuleError(
                    f"rule {self.name!r}: after {move} two axes shard dimension {dims[0]}; the order matters then"
                )
        return places

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form (docs/rules.md)."""
        return {
            "form": "steps",
            "name": self.name,
            "start": {axis: str(place) for axis, place in self.start},
            "left": [str(move) for move in self.left],
            "right": [str(move) for move in self.right],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRule:
        """Read the JSON form. Raises a `RuleError` that names the rule, the field and the mistake."""
        with fields.located(f"rule {fields.name_of(data)!r}"):
            record = fields.record(data, ("name", "start", "left", "right"), ("form",))
            start = fields.text_map(record, "start", SymbolicLayout.parse)
            if not start or set(start) - {"a", "b"}:
                raise RuleError(f"field 'start': expected layouts on the axes a and b, got {sorted(start)}")
            left, right = (fields.each(record, side, SymbolicStep.parse) for side in ("left", "right"))
            if not left:
                raise RuleError("field 'left': no steps; an empty chain would match anything")
            rule = cls(fields.text(record, "name"), tuple(start.items()), left, right)
            for moves in (left, right):
                rule.end(moves)
        return rule

    @property
    def hash(self) -> str:
        """The digest that names the rule."""
        return fields.digest(self.to_json())


def steps(name: str, start: Mapping[str, str], left: str, right: str) -> StepRule:
    """Return a rule from its text; steps are separated by `;`, in order of execution."""
    with fields.located(f"rule {name!r}"):
        places = tuple((axis, SymbolicLayout.parse(text)) for axis, text in start.items())
        sides = [tuple(SymbolicStep.parse(s.strip()) for s in side.split(";") if s.strip()) for side in (left, right)]
        return StepRule(name, places, *sides)


CANCELLATIONS = (
    steps("combine_of_partition", {"a": "R"}, "partition(d, n, a); combine(a)", ""),
    steps("partition_of_combine", {"a": "S(d, n)"}, "combine(a); partition(d, n, a)", ""),
)

COLLECTIVES = (
    steps("reduce_scatter", {"a": "P"}, "reduce(a); partition(d, n, a)", "reduce_scatter(d, n, a)"),
    steps("gather_copy", {"a": "S(d, n)"}, "combine(a); replicate(a)", "gather_copy(a)"),
    steps("reduce_copy", {"a": "P"}, "reduce(a); replicate(a)", "reduce_copy(a)"),
    steps("all_to_all", {"a": "S(d, n)"}, "combine(a); partition(e, m, a)", "all_to_all(e, m, a)"),
    steps("all_reduce", {"a": "P"}, "reduce(a)", "reduce_scatter(d, n, a); combine(a)"),
    steps("all_reduce_copy", {"a": "P"}, "reduce_copy(a)", "reduce_scatter(d, n, a); gather_copy(a)"),
    steps("all_to_all_back", {"a": "S(d, n)"}, "all_to_all(e, m, a); all_to_all(d, n, a)", ""),
    steps("all_to_all_chain", {"a": "S(d, n)"}, "all_to_all(e, m, a); all_to_all(f, o, a)", "all_to_all(f, o, a)"),
)


def _plain(axis: str, dim: str, blocks: str) -> dict[str, tuple[str, str]]:
    """Return, by parallel operator along an axis, the layout from which it starts, and its step."""
    return {
        PARTITION: ("R", f"partition({dim}, {blocks}, {axis})"),
        COMBINE: (f"S({dim}, {blocks})", f"combine({axis})"),
        REPLICATE: ("R", f"replicate({axis})"),
        REDUCE: ("P", f"reduce({axis})"),
    }


COMMUTATIONS = tuple(
    steps(f"{first}_then_{second}", {"a": start_a, "b": start_b}, f"{on_a}; {on_b}", f"{on_b}; {on_a}")
    for first, (start_a, on_a) in _plain("a", "d", "n").items()
    for second, (start_b, on_b) in _plain("b", "e", "m").items()
)

STEP_RULES: Mapping[str, StepRule] = {rule.name: rule for rule in (*CANCELLATIONS, *COLLECTIVES, *COMMUTATIONS)}
"""Every rule of the parallel operators, by name."""
