"""From pairs of equal graphs to rules: pruning, canonical form, guards.

A pair is dropped when a common subterm may as well be a variable: the rule with the variable says more. Whether it may
is decided by the erasures with a hole in them, by fingerprint unless they are one term.

Canonical form: operands of commutative operators in order of their structure, the larger side on the left, variables
and sizes named in order of appearance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator.field import Parts
from shardwright.substitutions.generator.names import Names
from shardwright.substitutions.generator.typed import PlacedType, TypedOperator
from shardwright.substitutions.generator.typedgraphs import TypedGraphs
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.terms import Apply, Term, Variable

_NAME = re.compile(r"[A-Za-z_]\w*")
_MOVING = frozenset({"permute", "reshape", "slice", "concat", "expand", "partition", "combine", "replicate"})
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
        self._keys: dict[int, tuple[int, str]] = {}
        self._renamed: dict[tuple[str, tuple[str, ...]], Expression] = {}
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
                text, sides, names = self._canonical(graph, other)
                if text in found:
                    counts["duplicate"] += 1
                else:
                    found[text] = self._equation(sides, names, self._of.kind[same])
        return list(found.values())

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

    # ---- canonical form ----

    def _key(self, number: int) -> tuple[int, str]:
        """Number of operators and structure of a class, whatever its variables are called."""
        if number not in self._keys:
            self._keys[number] = self._graph_key(self._of.terms[number])
        return self._keys[number]

    def _graph_key(self, graph: Graph) -> tuple[int, str]:
        if graph[0] < 0:
            kind = self._typing.types[graph[2]]
            return 0, f"{len(kind.shape.extents)}:{' '.join(map(str, self._places(kind)))}"
        step, keys = self._step(graph), [self._key(c) for c in graph[1:]]
        if step.commutes:
            keys.sort()
        shown = "".join(f",{k}={v}" if k in ("axis", "dim", "dims") else f",{k}" for k, v in step.attrs)
        return sum(n for n, _ in keys) + 1, f"{step.op}({','.join(t for _, t in keys)}{shown})"

    def _canonical(self, graph: Graph, other: Graph) -> tuple[str, tuple[Graph, Graph], Names]:
        left, right = self._graph_key(graph), self._graph_key(other)
        orders = [(graph, other), (other, graph)]
        if left != right:
            orders = orders[:1] if left > right or other[0] < 0 else orders[1:]
        options = []
        for sides in orders:
            names = Names(self._of)
            text = " = ".join(self._text(side, names) for side in sides)
            options.append((f"{text} for {names.declared(self._typing)}", sides, names))
        return min(options, key=lambda option: option[0])

    def _operands(self, graph: Graph) -> Sequence[int]:
        return sorted(graph[1:], key=self._key) if self._step(graph).commutes else graph[1:]

    def _text(self, graph: Graph, names: Names) -> str:
        if graph[0] < 0:
            return names.variable(graph)
        step = self._step(graph)
        operands = [self._text(self._of.terms[c], names) for c in self._operands(graph)]
        attrs = [f"{k}={self._rename(k, v, names)}" for k, v in step.attrs]
        return f"{step.op}({', '.join([*operands, *attrs])})"

    def _term(self, graph: Graph, names: Names) -> Term:
        if graph[0] < 0:
            return Variable(names.variable(graph))
        step = self._step(graph)
        operands = tuple(self._term(self._of.terms[c], names) for c in self._operands(graph))
        return Apply(step.op, operands, tuple((k, self._rename(k, v, names)) for k, v in step.attrs))

    def _rename(self, key: str, value: Expression, names: Names) -> Expression:
        found = value.names if key != "axis" else ()
        if not found:
            return value
        new = tuple(f"{n}:{names.size(n)}" for n in sorted(found))
        if (value.text, new) not in self._renamed:
            text = _NAME.sub(lambda m: names.size(m[0]) if m[0] in found else m[0], value.text)
            self._renamed[value.text, new] = expression(text)
        return self._renamed[value.text, new]

    def _places(self, kind: PlacedType) -> tuple[Placement, ...]:
        return tuple(
            Placement(x.kind, x.dim, () if x.blocks == 1 else tuple(self._typing.sizes.text(x.blocks).split(" * ")))
            for x in kind.layouts
        )

    # ---- the rule ----

    def _equation(self, sides: tuple[Graph, Graph], names: Names, result: int) -> Equation:
        left, right = (self._term(side, names) for side in sides)
        layouts = tuple(
            (name, tuple(Placement(p.kind, p.dim, tuple(map(names.size, p.blocks))) for p in self._places(kind)))
            for name, kind in names.kinds(self._typing)
        )
        guard = tuple(sorted(set(self._guard(sides, names, result)), key=str))
        axes, moves = self._of.context.axes, self._moves(sides, result)
        rule = Equation("", names.dims(), (left,), (right,), guard, moves, axes, layouts)
        ops = "_".join(step.op for step in map(self._step, self._ordered(sides[0])))
        return replace(rule, name=f"{ops}_{rule.hash[:10]}")

    def _ordered(self, graph: Graph) -> Iterator[Graph]:
        if graph[0] >= 0:
            yield graph
            for number in self._operands(graph):
                yield from self._ordered(self._of.terms[number])

    def _guard(self, sides: tuple[Graph, Graph], names: Names, result: int) -> Iterator[Expression]:
        """Every dimension that some value has sharded divides by the degree of the axis."""
        needed = self._divides(self._typing.types[result]).union(
            *(self._needs(c) for side in sides for c in (side[1:] if side[0] >= 0 else ())),
            *(self._divides(self._typing.types[side[2]]) for side in sides if side[0] < 0),
        )
        sizes = self._typing.sizes
        for axis, value in sorted(needed):
            if not any(a == axis and v != value and value % v == 0 for a, v in needed):
                text = self._rename("", expression(sizes.text(value)), names).text
                yield expression(f"({_sorted_product(text)}) % {axis} == 0")
        for side in sides if self._erased(sides[0], _HOLE) != self._erased(sides[1], _HOLE) else ():
            for graph in self._ordered(side):
                if self._step(graph).op == "slice":
                    yield from self._bounds(graph, names)

    def _bounds(self, graph: Graph, names: Names) -> Iterator[Expression]:
        """A slice stays inside its dimension; the first of equal blocks does by itself."""
        attrs = dict(self._step(graph).attrs)
        text = self._typing.sizes.text(
            self._typing.types[self._of.kind[graph[1]]].shape.extents[int(attrs["dim"].text)]
        )
        if attrs["stop"].text not in text.split(" * "):
            yield self._rename("", expression(f"{attrs['stop']} <= {text}"), names)

    def _divides(self, kind: PlacedType) -> frozenset[tuple[str, int]]:
        """(axis, size) such that the degree of the axis divides the size."""
        pairs = zip(self._of.context.axes, kind.layouts, strict=True)
        return frozenset((a, kind.shape.extents[x.dim] // x.blocks) for a, x in pairs if x.is_shard)

    def _needs(self, number: int) -> frozenset[tuple[str, int]]:
        if number not in self._guards:
            graph, own = self._of.terms[number], self._divides(self._typing.types[self._of.kind[number]])
            self._guards[number] = own.union(*map(self._needs, graph[1:])) if graph[0] >= 0 else own
        return self._guards[number]

    def _moves(self, sides: tuple[Graph, Graph], result: int) -> bool:
        """Whether both sides are equal bit for bit: nothing is summed over devices, and the erasures are one term."""
        kinds = {result} | {self._of.kind[c] for side in sides for c in self._within(side)}
        kinds |= {side[2] for side in sides if side[0] < 0}
        if any(x.kind == "P" for kind in kinds for x in self._typing.types[kind].layouts):
            return False
        ops = {self._step(g).op for side in sides for g in self._graphs(side) if g[0] >= 0}
        return ops <= _MOVING or self._erased(sides[0], _HOLE) == self._erased(sides[1], _HOLE)


def _sorted_product(text: str) -> str:
    return text if "+" in text or "-" in text else " * ".join(sorted(text.split(" * ")))
