"""The way from pairs of equal typed terms to rules: pruning, guards, canonical form.

Some pairs are dropped, and counted: pairs without parallel operators along every axis (serial rules, or rules of fewer
axes), terms that are zero whatever their variables are, and pairs with a common subterm that may as well be a variable,
as the rule with the variable says more. The erasures with a hole in them decide whether it may be one, by fingerprint
unless they are one term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator import floatlaws
from shardwright.substitutions.generator.canonical import canonical
from shardwright.substitutions.generator.context import PlacementContext
from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.nodes import TermNode, Valuation
from shardwright.substitutions.generator.placedterms import PlacedTerms
from shardwright.substitutions.generator.residues import Parts
from shardwright.substitutions.generator.typetable import PlacedType, TypedOperator
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.terms import Variable

TypedTerm = TermNode[TypedOperator]
_HOLE = -1


class PlacedRules:
    """The rules of a placement context."""

    def __init__(self, context: PlacementContext, seed: int) -> None:
        self.context, self.terms, self.counts = context, PlacedTerms(context, seed), Counter[str]()
        self._typing, self._values, self._nodes = self.terms.typing, self.terms.values, self.terms.nodes
        self._moved = Valuation[TypedOperator, frozenset[str]](
            self._nodes, lambda leaf: frozenset(), lambda use, below: frozenset(use.axes).union(*below)
        )
        self._floats = Valuation[TypedOperator, Array](
            self._nodes,
            self._float,
            lambda use, operands: operands[0] if use.parallel else floatlaws.evaluate(use.op, operands, use.values),
        )
        self._erasures: dict[int, Valuation[TypedOperator, int]] = {}
        self._interned: dict[tuple[object, ...], int] = {}
        self._general: dict[tuple[int | None, int | None], bool] = {}

    def rules(self, max_ops: int, tick: Callable[[], None]) -> Iterator[Equation]:
        """Yield the rules of terms up to a number of operators; `tick` is called now and then."""

        def count() -> None:
            self.counts["graphs"], self.counts["fingerprints"] = self.terms.num_graphs, len(self._nodes)
            tick()

        self.terms.run(max_ops, count)
        count()
        for term, same in self.terms.pairs:
            if dropped := self._dropped(term, same):
                self.counts[dropped] += 1
            else:
                yield canonical(self._equation((term, self._nodes[same]), self.terms.kind[same]))

    def _dropped(self, term: TypedTerm, same: int) -> str:
        """Return why a pair makes no rule, or ""."""
        moved = [self._moved.of(side) or frozenset() for side in (term, self._nodes[same])]
        if len(moved[0] | moved[1]) < len(self.context.axes):
            return "serial" if len(self.context.axes) == 1 else "fewer axes"
        if not self._values.data[self.terms.value[same]][0].any():
            return "zero"
        return "subterm" if self._special(term, same) else ""

    # ---- special cases of other rules ----

    def _special(self, term: TypedTerm, same: int) -> bool:
        """Return whether a common subterm may as well be a variable."""
        common = self.terms.within(term).intersection(self.terms.inside(same))
        maximal = (c for c in common if not any(c != d and c in self.terms.inside(d) for d in common))
        return any(self._generalizes(term, self._nodes[same], hole) for hole in maximal)

    def _generalizes(self, term: TypedTerm, other: TypedTerm, hole: int) -> bool:
        left, right = (self._erased(side, hole) for side in (term, other))
        if left == right:
            return True
        if (left, right) not in self._general:
            values = self._values
            fresh = values.another(self.terms.value[hole], self._typing.types[self.terms.kind[hole]].shape.index)
            reading = Valuation[TypedOperator, Parts](
                self._nodes,
                lambda leaf: values.data[self.terms.value[leaf.number]],
                lambda use, operands: operands[0] if use.parallel else values.evaluate(use, operands),
                {hole: fresh},
            )
            first, second = (values.digest(reading.of(side) or ()) for side in (term, other))
            self._general[left, right] = first == second
        return self._general[left, right]

    def _erased(self, term: TypedTerm, hole: int = _HOLE) -> int | None:
        """Return the number of the serial term that is left of a term, in which one class is a hole."""
        if hole not in self._erasures:
            known: dict[int, int | None] = {} if hole == _HOLE else {hole: _HOLE}
            self._erasures[hole] = Valuation(
                self._nodes,
                lambda leaf: self._intern("", leaf.variable),
                lambda use, operands: operands[0] if use.parallel else self._intern(use.op, use.attrs, *operands),
                known,
            )
        return self._erasures[hole].of(term)

    def _intern(self, *term: object) -> int:
        return self._interned.setdefault(term, len(self._interned))

    # ---- the rule ----

    def _equation(self, sides: tuple[TypedTerm, TypedTerm], result: int) -> Equation:
        """Return the pair as a rule in the names of its context."""
        leaves = sorted({c for side in sides for c in self.terms.leaves(side)})
        inner = {c for side in sides for c in self.terms.within(side)}
        types = [self._typing.types[kind] for kind in {result, *(self.terms.kind[c] for c in (*leaves, *inner))}]
        names = [self._nodes[c].variable for c in leaves]
        variables = tuple((name, self.context.dims[name]) for name in names)
        placed = (self._placements(self._typing.types[self.terms.kind[c]]) for c in leaves)
        left, right = sorted(map(self.terms.term, sides), key=lambda term: isinstance(term, Variable))
        one_erasure = self._erased(sides[0]) == self._erased(sides[1])
        guard = [*self._divisible(types)]
        if not one_erasure:
            guard += [bound for term in (*sides, *(self._nodes[c] for c in inner)) for bound in self._bounds(term)]
        return Equation(
            "rule", variables, (left,), (right,), tuple(dict.fromkeys(guard)),
            self._moves(sides, types, one_erasure), self.context.axes, tuple(zip(names, placed, strict=True)),
        )  # fmt: skip

    def _placements(self, kind: PlacedType) -> tuple[Placement, ...]:
        return tuple(
            Placement(x.kind, x.dim, () if x.blocks == 1 else tuple(self._typing.sizes.text(x.blocks).split(" * ")))
            for x in kind.layouts
        )

    def _divisible(self, types: Iterable[PlacedType]) -> Iterator[Expression]:
        """Yield guards: every dimension that some value has sharded divides by the degree of the axis."""
        needed = {
            (axis, kind.shape.extents[x.dim] // x.blocks)
            for kind in types
            for axis, x in zip(self.context.axes, kind.layouts, strict=True)
            if x.is_shard
        }
        for axis, value in sorted(needed):
            if not any(a == axis and v != value and value % v == 0 for a, v in needed):
                yield expression(f"({self._typing.sizes.text(value)}) % {axis} == 0")

    def _bounds(self, term: TypedTerm) -> Iterator[Expression]:
        """Yield the guard that a slice stays inside its dimension; the first of equal blocks does by itself."""
        if term.use is None or term.use.op != "slice":
            return
        attrs, operand = dict(term.use.attrs), self._typing.types[self.terms.kind[term.operands[0]]]
        text = self._typing.sizes.text(operand.shape.extents[int(attrs["dim"].text)])
        if attrs["stop"].text not in text.split(" * "):
            yield expression(f"{attrs['stop']} <= {text}")

    # ---- equal bit for bit ----

    def _moves(self, sides: tuple[TypedTerm, TypedTerm], types: Iterable[PlacedType], one_erasure: bool) -> bool:
        """Return whether both sides are equal bit for bit: nothing is summed over devices, and erasures are exact."""
        if any(x.kind == "P" for kind in types for x in kind.layouts):
            return False
        if one_erasure:
            return True
        left, right = map(self._floats.of, sides)
        return left is not None and right is not None and np.array_equal(left, right)

    def _float(self, leaf: TypedTerm) -> Array:
        first = self._values.data[self.terms.value[leaf.number]][0][:1]
        if self._typing.types[self.terms.kind[leaf.number]].shape.index:
            return first
        rng = np.random.default_rng(list(self.context.variables).index(leaf.variable))
        return floatlaws.random(rng, first.shape[1:])
