"""Typing of the terms that `placedterms.py` enumerates: operators as tables over small integers.

A *type* is a shape with one layout per mesh axis. What an operator's row offers along each axis (`offered`) decides
whether the operator may be applied to operands of given types, and which type results; the four parallel operators step
as `pcg/parallel.py` says. Both are looked up once per shape and kept as tables of type numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S
from shardwright.pcg.offers import offered
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator.canonical import commutes
from shardwright.substitutions.generator.context import PlacementContext
from shardwright.substitutions.generator.primesizes import PrimeSizes
from shardwright.substitutions.terms import Apply, parse_term

_ARITIES: Mapping[str, tuple[int, ...]] = {
    "concat": (2,), "layer_norm": (1, 3), "rms_norm": (1, 2), "sdpa": (3,), "cross_entropy_sum": (2,), "conv2d": (2,),
}  # fmt: skip
"""The numbers of operands that are enumerated, where the factor string does not say."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The extents of a value, and whether it holds indices."""

    extents: tuple[int, ...]
    index: bool = False


@dataclass(frozen=True, slots=True)
class PlacedType:
    """A shape in one layout per mesh axis."""

    shape: TensorShape
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class Template:
    """An operator of a context with its attributes."""

    op: str
    attrs: tuple[tuple[str, Expression], ...]
    arity: int

    @classmethod
    def parse(cls, text: str) -> list[Template]:
        """Read `softmax(dim=1)`: one template for each number of operands that the operator takes."""
        term = parse_term(text if text.endswith(")") else f"{text}()")
        if not isinstance(term, Apply) or term.operands:
            raise RuleError(f"operator {text!r}: expected an operator with attributes, such as 'softmax(dim=1)'")
        factors = ROWS[term.op].factors
        usual = (factors.count(",") + 1 if isinstance(factors, str) else 1,)
        return [cls(term.op, term.attrs, arity) for arity in _ARITIES.get(term.op, usual)]


@dataclass(frozen=True, slots=True)
class TypedOperator:
    """An operator on operands of one shape each, and every way in which it may be run.

    values  the attributes where fingerprints are taken
    axes    the axis along which a parallel operator moves; none of other operators
    rows    (the types of the operands, the type of the result), one per choice of splits
    """

    number: int
    op: str
    attrs: tuple[tuple[str, Expression], ...]
    values: Mapping[str, Any]
    axes: tuple[str, ...]
    rows: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def parallel(self) -> bool:
        return bool(self.axes)

    @property
    def commutes(self) -> bool:
        return commutes(self.op)


class TypeTable:
    """The types and operators of one context, made as they are met."""

    def __init__(self, context: PlacementContext) -> None:
        self.context, self.sizes = context, PrimeSizes(context)
        self.types: list[PlacedType] = []
        self._operator_numbers = count()
        self._numbers: dict[PlacedType, int] = {}
        self._moves: dict[int, tuple[tuple[TypedOperator, int], ...]] = {}
        self._whole = {self.sizes.of[name] for name in context.whole}
        self._limits = {name: self.sizes.of[size] for name, size in context.limits.items()}

    def number(self, kind: PlacedType) -> int:
        if kind not in self._numbers:
            self._numbers[kind] = len(self.types)
            self.types.append(kind)
        return self._numbers[kind]

    def variable(self, name: str) -> list[int]:
        """Return every type that a variable may have."""
        dims, index = self.context.dims[name], name in self._limits
        for entry in dims.entries:
            self.sizes.learn([self.sizes.of[n] for n in entry])
        shape = TensorShape(dims.shape(self.sizes.of), index)
        plain = (R, C) if index else (R, C, P)
        options = product(*[(*plain, *self._shards(shape)) for _ in self.context.axes])
        return [self.number(PlacedType(shape, layouts)) for layouts in options if _apart(layouts)]

    def _shards(self, shape: TensorShape) -> Iterator[Layout]:
        for dim, extent in enumerate(shape.extents):
            if extent > 1 and extent not in self._whole:
                yield from (S(dim, blocks) for blocks in self.sizes.prefixes(extent))

    # ---- parallel operators ----

    def moves(self, number: int) -> tuple[tuple[TypedOperator, int], ...]:
        """Return the parallel operators that step from a type: (operator, type after)."""
        if number not in self._moves:
            self._moves[number] = tuple(self._steps_from(number))
        return self._moves[number]

    def _steps_from(self, number: int) -> Iterator[tuple[TypedOperator, int]]:
        kind = self.types[number]
        for axis, (name, layout) in enumerate(zip(self.context.axes, kind.layouts, strict=True)):
            for op, after, attrs in self._single(kind.shape, layout):
                layouts = (*kind.layouts[:axis], after, *kind.layouts[axis + 1 :])
                if _apart(layouts):
                    result = self.number(PlacedType(kind.shape, layouts))
                    texts = tuple(sorted((k, expression(v)) for k, v in {"axis": name, **attrs}.items()))
                    rows = (((number,), result),)
                    yield TypedOperator(next(self._operator_numbers), op, texts, {}, (name,), rows), result

    def _single(self, shape: TensorShape, before: Layout) -> Iterator[tuple[str, Layout, dict[str, str]]]:
        if before == R:
            for after in self._shards(shape):
                blocks = {} if after.blocks == 1 else {"blocks": self.sizes.text(after.blocks)}
                yield PARTITION, after, {"dim": str(after.dim), **blocks}
            yield REPLICATE, C, {}
        elif before == P:
            yield REDUCE, R, {}
        elif before.is_shard:
            yield COMBINE, R, {}

    # ---- operators with a row ----

    def apply(self, template: Template, shapes: Sequence[TensorShape]) -> tuple[TypedOperator, TensorShape] | None:
        """Return the operator on operands of these shapes with the shape of its result; None where it does not fit."""
        row, extents = ROWS[template.op], [shape.extents for shape in shapes]
        if not self._indices_fit(template.op, shapes):
            return None
        try:
            attrs = {key: value.evaluate(self.sizes.of) for key, value in template.attrs}
            signature = row.signature(extents, attrs)
        except (GraphError, ValueError, IndexError, TypeError, ZeroDivisionError, RuleError):
            return None
        result = signature.result_shape
        large = [n for n in result if n != 1]
        if (
            any(n < 1 for n in result)
            or len(set(large)) < len(large)
            or not self._symbolic(template, extents, signature)
        ):
            return None
        shape = TensorShape(result)
        rows = tuple(self._rows(template.op, signature, shapes, shape))
        values = {key: value.evaluate(self.sizes.small) for key, value in template.attrs}
        return TypedOperator(next(self._operator_numbers), template.op, template.attrs, values, (), rows), shape

    def _indices_fit(self, op: str, shapes: Sequence[TensorShape]) -> bool:
        """Return whether index variables stand at index operands, and count up to the dimension that they index."""
        places = ROWS[op].indexes
        if [shape.index for shape in shapes] != [i in places for i in range(len(shapes))]:
            return False
        limits = set(self._limits.values())
        return all(
            0 <= dim < len(shapes[operand].extents) and shapes[operand].extents[dim] in limits
            for operand, dim in places.values()
        )

    def _symbolic(self, template: Template, shapes: Sequence[tuple[int, ...]], signature: Signature) -> bool:
        """Give every dimension of the result an expression; return False where one has none, or cuts across blocks."""
        fixed = any(signature.factors[f].role == "fixed" for dim in signature.result for f in dim)
        if template.op in ("reshape", "slice") and fixed:
            return False
        for extent, text in self._sums(template, shapes, signature.result_shape):
            if not self.sizes.name(extent, text):
                return False
        for dim in signature.result:
            self.sizes.learn([signature.factors[f].size for f in dim])
        return all(map(self.sizes.known, signature.result_shape))

    def _sums(self, template: Template, shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]
              ) -> Iterator[tuple[int, str]]:  # fmt: skip
        """Yield the extents of the result that are no products, with their expressions."""
        attrs, text = dict(template.attrs), self.sizes.text
        if template.op == "concat":
            dim = int(attrs["dim"].text)
            if len({shape[dim] for shape in shapes}) > 1:
                yield result[dim], " + ".join(text(shape[dim]) for shape in shapes)
        elif template.op == "conv2d":
            self._whole.update(result[2:])
            yield from zip(result[2:], "yx", strict=True)

    def _rows(self, op: str, signature: Signature, shapes: Sequence[TensorShape], result: TensorShape
              ) -> Iterator[tuple[tuple[int, ...], int]]:  # fmt: skip
        """Yield every way to run the operator: one of the row's choices per axis."""
        ways = [(needed, after) for _, needed, after in offered(ROWS[op], signature, self.sizes.prefixes)]
        for along in product(ways, repeat=len(self.context.axes)):
            needs = [tuple(way[0][i] for way in along) for i in range(len(shapes))]
            after = tuple(way[1] for way in along)
            if all(map(_apart, (*needs, after))):
                operands = (self.number(PlacedType(s, layouts)) for s, layouts in zip(shapes, needs, strict=True))
                yield tuple(operands), self.number(PlacedType(result, after))


def _apart(layouts: Layouts) -> bool:
    """Return whether no two axes shard one dimension: the order in which they do would matter."""
    dims = [x.dim for x in layouts if x.is_shard]
    return len(set(dims)) == len(dims)
