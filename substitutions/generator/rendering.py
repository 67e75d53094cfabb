"""From pairs of equal graphs to rules: pruning, guards, canonical form.

A pair is dropped when a common subterm may as well be a variable: the rule with the variable says more. Whether it may
is decided by the erasures with a hole in them, by fingerprint unless they are one term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator import bits
from shardwright.substitutions.generator.canonical import canonical, key, named
from shardwright.substitutions.generator.field import Parts
from shardwright.substitutions.generator.rings import Array
from shardwright.substitutions.generator.typed import PlacedType, TypedOperator
from shardwright.substitutions.generator.typedgraphs import TypedGraphs
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.terms import Apply, Term, Variable

_HOLE = -1
Graph = tuple[int, ...]
"""(operator, operand classes), or (-1, variable, type)."""


class Renderer:
    """Makes the rules of an enumeration."""

    def __init__(self, enumeration: TypedGraphs) -> None:
        self._of, self._typing = enumeration, enumeration.typing
        self._inside: dict[int, frozenset[int]] = {}
        self._moved: dict[Graph, frozenset[str]] = {}
        self._serial: dict[Graph, int] = {}
        self._interned: dict[tuple[object, ...], int] = {}
        self._general: dict[tuple[int, int], bool] = {}
        self._terms: dict[Graph, Term] = {}
        self._bits: dict[Graph, Array | None] = {}
        self._guards: dict[int, frozenset[tuple[str, int]]] = {}

    def rules(self, counts: Counter[str]) -> list[Equation]:
        """The rules of all pairs, each once; counts what is dropped."""
        found: dict[str, Equation] = {}
        for graph, same in self._of.pairs:
            other = self._of.terms[same]
            if len(self._axes(graph) | self._axes(other)) < len(self._of.context.axes):
                counts["serial" if len(self._of.context.axes) == 1 else "fewer axes"] += 1
            elif not self._of.values.data[self._of.value[same]][0].any():
                counts["zero"] += 1
            elif self._special(graph, same):
                counts["subterm"] += 1
            else:
                rule = canonical(self._equation((graph, other), self._of.kind[same]))
                counts["duplicate"] += key(rule) in found
                found.setdefault(key(rule), rule)
        return [named(rule) for rule in found.values()]

    # ---- what is in a graph ----

    def _step(self, graph: Graph) -> TypedOperator:
        return self._typing.steps[graph[0]]

    def _axes(self, graph: Graph) -> frozenset[str]:
        """The axes that parallel operators move along."""
        if graph not in self._moved:
            own = [dict(self._step(graph).attrs)["axis"].text] if graph[0] >= 0 and self._step(graph).parallel else []
            below = (self._axes(self._of.terms[c]) for c in graph[1:]) if graph[0] >= 0 else ()
            self._moved[graph] = frozenset(own).union(*below)
        return self._moved[graph]

    def _graphs(self, graph: Graph) -> Iterator[Graph]:
        yield graph
        if graph[0] >= 0:
            for number in self._within(graph):
                yield self._of.terms[number]

    def _within(self, graph: Graph) -> frozenset[int]:
        """The classes of everything that a graph is made of, but for itself."""
        return frozenset().union(*map(self._subterms, graph[1:])) if graph[0] >= 0 else frozenset()

    def _subterms(self, number: int) -> frozenset[int]:
        if number not in self._inside:
            self._inside[number] = self._within(self._of.terms[number]) | {number}
        return self._inside[number]

    # ---- special cases of other rules ----

    def _special(self, graph: Graph, same: int) -> bool:
        """Whether a common subterm may as well be a variable."""
        common = {c for c in self._within(graph) & self._subterms(same) if self._of.terms[c][0] >= 0}
        maximal = (c for c in common if not any(c in self._within(self._of.terms[d]) for d in common))
        return any(self._generalizes(graph, self._of.terms[same], same, hole) for hole in maximal)

    def _generalizes(self, graph: Graph, other: Graph, same: int, hole: int) -> bool:
        left = self._erased(graph, hole)
        right = _HOLE if same == hole else self._erased(other, hole)
        if left == right:
            return True
        if (left, right) not in self._general:
            index = self._typing.types[self._of.kind[hole]].shape.index
            fresh = self._of.values.another(self._of.value[hole], index)
            sides = [self._value(graph, hole, fresh), fresh if same == hole else self._value(other, hole, fresh)]
            first, second = map(self._of.values.digest, sides)
            self._general[left, right] = first == second
        return self._general[left, right]

    def _erased(self, graph: Graph, hole: int) -> int:
        """The number of the serial term that is left of a graph, in which one class is a hole."""
        key = (hole, *graph)
        if key not in self._serial:
            self._serial[key] = self._erase(graph, hole)
        return self._serial[key]

    def _erase(self, graph: Graph, hole: int) -> int:
        if graph[0] < 0:
            return self._interned.setdefault(("variable", graph[1]), len(self._interned))
        operands = [_HOLE if c == hole else self._erased(self._of.terms[c], hole) for c in graph[1:]]
        step = self._step(graph)
        if step.parallel:
            return operands[0]
        return self._interned.setdefault((step.op, step.attrs, *operands), len(self._interned))

    def _value(self, graph: Graph, hole: int, fresh: Parts) -> Parts:
        values = self._of.values
        if graph[0] < 0:
            return values.data[self._of.value[self._class(graph)]]
        operands = [fresh if c == hole else self._value(self._of.terms[c], hole, fresh) for c in graph[1:]]
        step = self._step(graph)
        return operands[0] if step.parallel else values.evaluate(step, operands)

    def _class(self, variable: Graph) -> int:
        return next(i for i, term in enumerate(self._of.terms) if term == variable)

    # ---- the rule ----

    def _equation(self, sides: tuple[Graph, Graph], result: int) -> Equation:
        """The pair as a rule in the names of its context."""
        kinds = self._variables(sides)
        variables = tuple((name, self._of.dims[name]) for name in kinds)
        layouts = tuple((name, self._places(kind)) for name, kind in kinds.items())
        left, right = sorted(map(self._term, sides), key=lambda term: isinstance(term, Variable))
        guard, axes = tuple(dict.fromkeys(self._guard(sides, result))), self._of.context.axes
        return Equation("rule", variables, (left,), (right,), guard, self._moves(sides, result), axes, layouts)

    def _variables(self, sides: tuple[Graph, Graph]) -> dict[str, PlacedType]:
        """The types of the variables that occur, by name."""
        names = [name for name, _ in self._of.context.variables]
        leaves = {graph[1:] for side in sides for graph in self._graphs(side) if graph[0] < 0}
        return {names[number]: self._typing.types[kind] for number, kind in sorted(leaves)}

    def _term(self, graph: Graph) -> Term:
        if graph[0] < 0:
            return Variable(self._of.context.variables[graph[1]][0])
        if graph not in self._terms:
            operands = tuple(self._term(self._of.terms[c]) for c in graph[1:])
            self._terms[graph] = Apply(self._step(graph).op, operands, self._step(graph).attrs)
        return self._terms[graph]

    def _places(self, kind: PlacedType) -> tuple[Placement, ...]:
        return tuple(
            Placement(x.kind, x.dim, () if x.blocks == 1 else tuple(self._typing.sizes.text(x.blocks).split(" * ")))
            for x in kind.layouts
        )

    def _guard(self, sides: tuple[Graph, Graph], result: int) -> Iterator[Expression]:
        """Every dimension that some value has sharded divides by the degree of the axis."""
        needed = self._divides(self._typing.types[result]).union(
            *(self._needs(c) for side in sides for c in (side[1:] if side[0] >= 0 else ())),
            *(self._divides(self._typing.types[side[2]]) for side in sides if side[0] < 0),
        )
        for axis, value in sorted(needed):
            if not any(a == axis and v != value and value % v == 0 for a, v in needed):
                yield expression(f"({self._typing.sizes.text(value)}) % {axis} == 0")
        for side in sides if self._erased(sides[0], _HOLE) != self._erased(sides[1], _HOLE) else ():
            for graph in self._graphs(side):
                if graph[0] >= 0 and self._step(graph).op == "slice":
                    yield from self._bounds(graph)

    def _bounds(self, graph: Graph) -> Iterator[Expression]:
        """A slice stays inside its dimension; the first of equal blocks does by itself."""
        attrs = dict(self._step(graph).attrs)
        text = self._typing.sizes.text(
            self._typing.types[self._of.kind[graph[1]]].shape.extents[int(attrs["dim"].text)]
        )
        if attrs["stop"].text not in text.split(" * "):
            yield expression(f"{attrs['stop']} <= {text}")

    def _divides(self, kind: PlacedType) -> frozenset[tuple[str, int]]:
        """(axis, size) such that the degree of the axis divides the size."""
        pairs = zip(self._of.context.axes, kind.layouts, strict=True)
        return frozenset((a, kind.shape.extents[x.dim] // x.blocks) for a, x in pairs if x.is_shard)

    def _needs(self, number: int) -> frozenset[tuple[str, int]]:
        if number not in self._guards:
            graph, own = self._of.terms[number], self._divides(self._typing.types[self._of.kind[number]])
            self._guards[number] = own.union(*map(self._needs, graph[1:])) if graph[0] >= 0 else own
        return self._guards[number]

    # ---- equal bit for bit ----

    def _moves(self, sides: tuple[Graph, Graph], result: int) -> bool:
        """Whether both sides are equal bit for bit: nothing is summed over devices, and the erasures are exact."""
        kinds = {result} | {self._of.kind[c] for side in sides for c in self._within(side)}
        kinds |= {side[2] for side in sides if side[0] < 0}
        if any(x.kind == "P" for kind in kinds for x in self._typing.types[kind].layouts):
            return False
        if self._erased(sides[0], _HOLE) == self._erased(sides[1], _HOLE):
            return True
        left, right = (self._exact(side) for side in sides)
        return left is not None and right is not None and np.array_equal(left, right)

    def _exact(self, graph: Graph) -> Array | None:
        """The erasure in the arithmetic of `bits.py`; None where that does not know an operator."""
        if graph not in self._bits:
            self._bits[graph] = self._computed(graph)
        return self._bits[graph]

    def _computed(self, graph: Graph) -> Array | None:
        if graph[0] < 0:
            first = self._of.values.data[self._of.value[self._class(graph)]][0][:1]
            index = self._typing.types[graph[2]].shape.index
            return first if index else bits.random(np.random.default_rng(graph[1]), first.shape[1:])
        operands: list[Array] = []
        for number in graph[1:]:
            value = self._exact(self._of.terms[number])
            if value is None:
                return None
            operands.append(value)
        step = self._step(graph)
        return operands[0] if step.parallel else bits.evaluate(step.op, operands, step.values)
