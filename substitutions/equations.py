"""Equations: rules that say that two terms are equal, as data.

    [slice_of_linear]
    slice(linear(x, w), dim=len(b), start=s, stop=t, step=1) = linear(x, slice(w, dim=0, start=s, stop=t, step=1))
        for x: *b i, w: o i

A rule is used from left to right; its converse is another rule where it is useful. Several roots (separated by `;`)
are replaced together. Sizes are symbolic; `where` conditions must hold besides.

A **serial** rule has no mesh axes. A **placement** rule has: every variable has a layout per axis, and its terms hold
parallel operators. Both sides then have one type and one erasure:

    [split_the_sum]
    linear(combine(x, axis=a), combine(w, axis=a)) = reduce(linear(x, w), axis=a)
        for x: m i in S(1), w: o i in S(1)

Attributes are those of the logical operator; what a device computes with follows from its row (`Row.localize`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS, PARTITION, REDUCE
from shardwright.substitutions import fields
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.terms import Apply, Dims, Term, Variable, applied, erase, parse_term, variables_in


@dataclass(frozen=True)
class Equation:
    """left = right, for all tensors of these dims and all sizes that satisfy the guard.

    name        the rule's name
    variables   the dims of every variable
    left        the roots of the pattern
    right       what each root is replaced by
    guard       conditions on sizes and attributes
    moves       only data moves: both sides are equal bit for bit, not just over the reals
    axes        the mesh axes of a placement rule; none for a serial rule
    layouts     the layouts of every variable of a placement rule, one per axis
    parameters  sizes that the left side does not bind: whoever applies the rule chooses them, as the guard allows
    """

    name: str
    variables: tuple[tuple[str, Dims], ...]
    left: tuple[Term, ...]
    right: tuple[Term, ...]
    guard: tuple[Expression, ...] = ()
    moves: bool = False
    axes: tuple[str, ...] = ()
    layouts: tuple[tuple[str, tuple[Placement, ...]], ...] = ()
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"rule {self.name!r}"
        self._check_layouts(where)
        if not self.left:
            raise RuleError(f"{where}: field 'left': the pattern is empty; give at least one root")
        if len(self.left) != len(self.right):
            counts = f"{len(self.left)} roots on the left, {len(self.right)} on the right"
            raise RuleError(f"{where}: field 'right': {counts}; give as many")
        for i, root in enumerate(self.left):
            if isinstance(root, Variable):
                raise RuleError(f"{where}: field 'left[{i}]': the bare variable {root} would match anything")
        declared = {name for name, _ in self.variables}
        for side, terms in (("left", self.left), ("right", self.right)):
            used = variables_in(terms)
            if used - declared:
                raise RuleError(f"{where}: field {side!r}: variable {min(used - declared)!r} has no dims")
            if side == "left" and declared - used:
                name = min(declared - used)
                raise RuleError(f"{where}: field 'variables.{name}': {name!r} does not occur on the left")
        bound = self.bound.union(self.parameters, self.axes)  # an axis stands for its degree
        for key, free in (("right", self._names(self.right)), ("guard", {n for g in self.guard for n in g.names})):
            if free - bound:
                raise RuleError(f"{where}: field {key!r}: {min(free - bound)!r} is not bound by the left side")

    def _check_layouts(self, where: str) -> None:
        """Check that every variable has a layout for every axis, and that parallel operators move along these axes."""
        given, declared = dict(self.layouts), {name for name, _ in self.variables}
        if self.axes and declared != set(given):
            odd = min(declared ^ set(given))
            raise RuleError(f"{where}: layouts: {odd!r} has {'no layout' if odd in declared else 'no dims'}")
        for name, placements in self.layouts:
            if len(placements) != len(self.axes):
                raise RuleError(
                    f"{where}: layouts: {name!r} has {len(placements)} for the axes ({', '.join(self.axes)}); "
                    "give one per axis"
                )
        for term in self.operators:
            if term.op in PARALLEL_OPS:
                self._check_parallel(where, term)

    def _check_parallel(self, where: str, term: Apply) -> None:
        attrs, wanted = dict(term.attrs), {"axis"} | ({"dim"} if term.op == PARTITION else set())
        if not wanted <= set(attrs) <= wanted | ({"blocks"} if term.op == PARTITION else set()):
            raise RuleError(f"{where}: {term}: expected the attributes {', '.join(sorted(wanted))}")
        if str(attrs["axis"]) not in self.axes:
            raise RuleError(f"{where}: {term} moves along {attrs['axis']}, which is not among axes {list(self.axes)}")
        if len(term.operands) != 1:
            raise RuleError(f"{where}: {term}: a parallel operator has one operand, got {len(term.operands)}")

    @staticmethod
    def _names(roots: tuple[Term, ...]) -> set[str]:
        return {name for term in applied(roots) for key, value in term.attrs if key != "axis" for name in value.names}

    @property
    def bound(self) -> frozenset[str]:
        """The sizes and attributes that a match binds."""
        sizes = {name.removeprefix("*") for _, dims in self.variables for name in dims.names}
        read = {name for t in applied(self.left) for key, value in t.attrs if key != "axis" for name in value.binds}
        return frozenset(sizes | read)

    @property
    def sizes(self) -> frozenset[str]:
        """The names that are at least 1: sizes of variables, entries of shapes on the left, and parameters."""
        sizes = {name for _, dims in self.variables for name in dims.names if not name.startswith("*")}
        shapes = [value for t in applied(self.left) for key, value in t.attrs if key == "shape" and value.name is None]
        return frozenset(sizes).union(*(value.scalars for value in shapes), self.parameters)

    @property
    def erased(self) -> Equation | None:
        """The serial rule that is left when parallel operators are dropped; None where its sides are then equal."""
        left, right = (tuple(map(erase, side)) for side in (self.left, self.right))
        pairs = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
        if not pairs:
            return None
        oriented = [(b, a) if isinstance(a, Variable) else (a, b) for a, b in pairs]
        used = variables_in(root for pair in oriented for root in pair)
        variables = tuple((name, dims) for name, dims in self.variables if name in used)
        return Equation(
            self.name, variables, tuple(a for a, _ in oriented), tuple(b for _, b in oriented),
            tuple(g for g in self.guard if not g.names & set(self.axes)), self.moves, parameters=self.parameters,
        )  # fmt: skip

    @property
    def operators(self) -> Iterator[Apply]:
        """The operators of both sides, operands first, each as often as it is used."""
        return applied((*self.left, *self.right))

    @cached_property
    def any_kind(self) -> bool:
        """Return whether variables may be bools: only where neither side computes, as bools are no numbers."""
        ops = {term.op for term in self.operators}
        return all(op != REDUCE if op in PARALLEL_OPS else ROWS[op].moves for op in ops)

    @cached_property
    def needs(self) -> frozenset[str]:
        """The operators of the left side."""
        return frozenset(term.op for term in applied(self.left))

    @cached_property
    def dims(self) -> Mapping[str, Dims]:
        return dict(self.variables)

    @property
    def equation(self) -> str:
        """The rule as one line."""
        return self.claim + (f" where {', '.join(map(str, self.guard))}" if self.guard else "")

    @cached_property
    def claim(self) -> str:
        """The same without the guard."""
        left, right = ("; ".join(map(str, roots)) for roots in (self.left, self.right))
        places = {name: f" in {' '.join(map(str, layouts))}" for name, layouts in self.layouts}
        variables = ", ".join(f"{name}: {dims}{places.get(name, '')}" for name, dims in self.variables)
        return f"{left} = {right} for {variables}"

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form (docs/rules.md)."""
        data: dict[str, Any] = {
            "form": "equation",
            "name": self.name,
            "variables": {name: str(dims) for name, dims in self.variables},
            "left": [str(root) for root in self.left],
            "right": [str(root) for root in self.right],
            "guard": [str(condition) for condition in self.guard],
            "moves": self.moves,
        }
        if self.axes:
            data["axes"] = list(self.axes)
            data["layouts"] = {name: [str(p) for p in placements] for name, placements in self.layouts}
        if self.parameters:
            data["parameters"] = list(self.parameters)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Equation:
        """Read the JSON form. Raises a `RuleError` that names the rule, the field and the mistake."""
        with fields.located(f"rule {fields.name_of(data)!r}"):
            record = fields.record(data, _REQUIRED, _OPTIONAL)
            return cls(
                fields.text(record, "name"),
                tuple(fields.text_map(record, "variables", Dims.parse).items()),
                fields.each(record, "left", parse_term),
                fields.each(record, "right", parse_term),
                fields.each(record, "guard", expression),
                fields.flag(record, "moves"),
                fields.texts(record, "axes"),
                tuple(fields.texts_map(record, "layouts", Placement.parse).items()),
                fields.texts(record, "parameters"),
            )

    @cached_property
    def hash(self) -> str:
        """The digest that names the rule."""
        return fields.digest(self.to_json())

    def converse(self, name: str) -> Equation:
        """Return the rule from right to left."""
        return replace(self, name=name, left=self.right, right=self.left)


_REQUIRED = ("name", "variables", "left", "right")
_OPTIONAL = ("form", "guard", "moves", "axes", "layouts", "parameters")


def equation(
    name: str,
    variables: Mapping[str, str],
    left: str,
    right: str,
    guard: tuple[str, ...] = (),
    moves: bool = False,
    axes: tuple[str, ...] = (),
    layouts: Mapping[str, Sequence[str]] | None = None,
    parameters: tuple[str, ...] = (),
) -> Equation:
    """Return a rule from its text; roots are separated by `;`."""
    sides = {"left": left, "right": right}
    return Equation.from_json({
        "name": name, "variables": variables, "guard": guard, "moves": moves, "axes": axes, "layouts": layouts or {},
        "parameters": parameters, **{side: [root.strip() for root in text.split(";")] for side, text in sides.items()},
    })  # fmt: skip
