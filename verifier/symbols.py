"""The constants and functions that an algebraic rule is proven with: sizes, attributes, permutations, shapes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.expressions import Expression
from shardwright.verifier.logic import Formula, Number, z3


@dataclass
class Symbols:
    """Z3 constants by name. Sizes are at least 1; attributes are any integers; permutations and shapes are opaque."""

    sizes: dict[str, Number] = field(default_factory=dict)
    nonempty: set[str] = field(default_factory=set)
    opaque_used: bool = False

    @cached_property
    def _opaque(self) -> Number:
        return z3.DeclareSort("Attribute")

    @cached_property
    def _at(self) -> Number:
        return z3.Function("at", self._opaque, z3.IntSort(), z3.IntSort())

    @cached_property
    def _compose(self) -> Number:
        return z3.Function("compose", self._opaque, self._opaque, self._opaque)

    @cached_property
    def _flat(self) -> Number:
        return z3.Function("flat", self._opaque, z3.IntSort(), z3.IntSort())

    @cached_property
    def _unflat(self) -> Number:
        return z3.Function("unflat", self._opaque, z3.IntSort(), z3.IntSort())

    def size(self, name: str) -> Number:
        """The size of a dimension."""
        return self.sizes.setdefault(name, z3.Int(name))

    def number(self, value: Expression) -> Number:
        """An integer expression over sizes and attributes."""
        return self._number(value.tree)

    def _number(self, tree: ast.expr) -> Number:
        match tree:
            case ast.Constant(value=bool()):
                raise RuleError(f"{ast.unparse(tree)} is not a number")
            case ast.Constant(value=int(value)):
                return z3.IntVal(value)
            case ast.Name(id=name):
                return self.sizes.get(name, z3.Int(name))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._number(left) + self._number(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return self._number(left) - self._number(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._number(left) * self._number(right)
            case _:
                raise RuleError(f"{ast.unparse(tree)}: only integers, names, +, - and * are understood in proofs")

    def opaque(self, value: Expression) -> Number:
        """A permutation or shape."""
        return self._attribute(value.tree)

    def shape(self, name: str) -> Number:
        return z3.Const(name, self._opaque)

    def _attribute(self, tree: ast.expr) -> Number:
        match tree:
            case ast.Name(id=name):
                return z3.Const(name, self._opaque)
            case ast.Call(func=ast.Name(id="compose"), args=[p, q]):
                return self._compose(self._attribute(p), self._attribute(q))
            case ast.Call(func=ast.Name(id="iota")):
                return z3.Const("iota", self._opaque)
            case _:
                raise RuleError(f"{ast.unparse(tree)}: not a permutation or shape that proofs understand")

    def at(self, permutation: Number, index: Number) -> Number:
        """Where the element at `index` of a permuted tensor comes from."""
        self.opaque_used = True
        return self._at(permutation, index)

    def reread(self, before: Number, after: Number, index: Number) -> Number:
        """Where the element at `index` of a tensor reshaped to `after` comes from."""
        self.opaque_used = True
        return self._unflat(before, self._flat(after, index))

    def laws(self) -> list[Formula]:
        """The assumed laws of permutations and row-major order, where they are used; their left sides are triggers."""
        if not self.opaque_used:
            return []
        p, q, s = z3.Consts("p q s", self._opaque)
        j, n = z3.Ints("j n")
        iota = z3.Const("iota", self._opaque)
        composed = self._at(self._compose(p, q), j)
        round_trip = self._flat(s, self._unflat(s, n))
        return [
            z3.ForAll([p, q, j], composed == self._at(p, self._at(q, j)), patterns=[composed]),
            z3.ForAll([j], self._at(iota, j) == j, patterns=[self._at(iota, j)]),
            z3.ForAll([s, n], round_trip == n, patterns=[round_trip]),
        ]

    def condition(self, guard: Expression) -> Formula:
        """A guard as a formula; `len(b) > 0` is remembered as a fact about the rank."""
        tree = guard.tree
        match tree:
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=splice)]),
                ops=[ast.Gt()],
                comparators=[ast.Constant(value=0)],
            ):
                self.nonempty.add(splice)
                return z3.BoolVal(True)
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Call() as right]):
                return self._attribute(left) == self._attribute(right)
            case ast.Compare(left=left, ops=ops, comparators=rest):
                values = [self._number(part) for part in (left, *rest)]
                return z3.And([_compare(op, a, b) for op, a, b in zip(ops, values, values[1:], strict=False)])
            case _:
                raise RuleError(f"guard {guard} is not a comparison")


def _compare(op: ast.cmpop, a: Number, b: Number) -> Formula:
    match op:
        case ast.Eq():
            return a == b
        case ast.NotEq():
            return a != b
        case ast.Lt():
            return a < b
        case ast.LtE():
            return a <= b
        case ast.Gt():
            return a > b
        case _:
            return a >= b
