"""The enumeration of the typed terms of a placement context, grouped by what they denote.

All parallel operators denote the identity, so two well-typed terms are equal exactly when their variables have the
same types, their results do, and their erasures are equal serially. A term is therefore three numbers: the types of
the variables that it uses, its own type, and the value of its erasure, found by fingerprint. Terms are enumerated by
number of operators; operands are representatives, the smallest terms of their class. A term that falls into a class
that exists already is a rule: it equals the representative.

Terms of the full number of operators are only made if they hold a parallel operator: the others are serial terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from shardwright.substitutions.generator.context import PlacementContext
from shardwright.substitutions.generator.nodes import Classes, TermNode
from shardwright.substitutions.generator.residues import Field, Parts
from shardwright.substitutions.generator.typetable import Template, TensorShape, TypedOperator, TypeTable

_BATCH = 16
ClassesByType = dict[int, dict[int, list[int]]]
"""Type -> variables that are used -> classes."""
Head = tuple[int, tuple[int, ...], bool]
"""The first operands: the variables that they use, their classes, whether they are serial."""


class Values:
    """The values of serial terms, by fingerprint: equal ones have one number."""

    def __init__(self, typing: TypeTable, seed: int) -> None:
        self._typing, self._field, self._rng = typing, Field(), np.random.default_rng(seed)
        self.data: list[Parts] = []
        self._numbers: dict[bytes, int] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def variable(self, name: str) -> int:
        sizes, context = self._typing.sizes.small, self._typing.context
        limit = sizes[context.limits[name]] if name in context.limits else None
        return self._number(self._draw(context.dims[name].shape(sizes), limit))

    def another(self, number: int, index: bool) -> Parts:
        """Return a random tensor of the shape of this one."""
        limits = [self._typing.sizes.small[size] for size in self._typing.context.limits.values()]
        return self._draw(self.data[number][0].shape[1:], min(limits) if index else None)

    def _draw(self, shape: tuple[int, ...], limit: int | None) -> Parts:
        """Return a batch of random tensors."""
        if limit is not None:
            return (self._rng.integers(0, limit, (_BATCH, *shape)),)
        draws = [self._field.random(self._rng, shape, self._typing.context.parts) for _ in range(_BATCH)]
        return tuple(np.concatenate(parts) for parts in zip(*draws, strict=True))

    def apply(self, step: TypedOperator, operands: tuple[int, ...]) -> int:
        """Return the number of the value that the operator makes of these values."""
        key = (step.number, *operands)
        if key not in self._known:
            self._known[key] = self._number(self.evaluate(step, [self.data[v] for v in operands]))
        return self._known[key]

    def evaluate(self, step: TypedOperator, operands: Sequence[Parts]) -> Parts:
        return self._field.evaluate(step.op, operands, step.values)

    def _number(self, data: Parts) -> int:
        digest = self.digest(data)
        if digest not in self._numbers:
            self._numbers[digest] = len(self.data)
            self.data.append(data)
        return self._numbers[digest]

    @staticmethod
    def digest(data: Parts) -> bytes:
        """Return a digest of the first part, which alone is known of every value."""
        first = np.ascontiguousarray(data[0])
        return repr(first.shape).encode() + first.tobytes()


class PlacedTerms(Classes[TypedOperator]):
    """The classes of typed terms of one context, up to a number of operators.

    nodes     of every class: its first term, with its `value` and its type, `kind`
    pairs     terms that fell into a class that existed, and that class
    """

    def __init__(self, context: PlacementContext, seed: int) -> None:
        super().__init__()
        self.context, self.typing = context, TypeTable(context)
        self.values = Values(self.typing, seed)
        self.pairs: list[tuple[TermNode[TypedOperator], int]] = []
        self.num_graphs, self._top = 0, 0
        self._serial: list[bool] = []
        self._uses: list[tuple[int, ...]] = []
        self._use_numbers: dict[tuple[int, ...], int] = {}
        self._merged: dict[tuple[int, int], int] = {}
        self._classes: dict[tuple[int, int, int], int] = {}
        self.value: list[int] = []
        self.kind: list[int] = []
        self._buckets: list[ClassesByType] = []
        self._applied: set[tuple[int, tuple[TensorShape, ...]]] = set()
        self._templates = [t for text in context.operators for t in Template.parse(text)]
        self._operators: list[TypedOperator] = []

    def run(self, max_ops: int, tick: Callable[[], None] = lambda: None) -> None:
        """Enumerate every graph of up to `max_ops` operators; `tick` is called now and then."""
        self._top = max_ops
        self._add_variables()
        for size in range(1, max_ops + 1):
            self._learn_shapes()
            level: ClassesByType = {}
            self._buckets.append(level)
            self._parallel(size, level)
            for step in self._operators:
                self._apply(step, size, level)
                tick()

    def _add_variables(self) -> None:
        level: ClassesByType = {}
        self._buckets.append(level)
        for number, name in enumerate(self.context.variables):
            types = self.typing.variable(name)
            value = self.values.variable(name)
            for kind in types:
                use = [-1] * len(self.context.variables)
                use[number] = kind
                self._found(TermNode(None, (), name), self._use(tuple(use)), kind, value, level)

    def _use(self, use: tuple[int, ...]) -> int:
        if use not in self._use_numbers:
            self._use_numbers[use] = len(self._uses)
            self._uses.append(use)
        return self._use_numbers[use]

    def _merge(self, left: int, right: int) -> int:
        """Return the variables of both; -1 where one has two types."""
        key = (left, right)
        if key not in self._merged:
            pairs = list(zip(self._uses[left], self._uses[right], strict=True))
            clash = any(a != b and a >= 0 and b >= 0 for a, b in pairs)
            self._merged[key] = -1 if clash else self._use(tuple(max(a, b) for a, b in pairs))
        return self._merged[key]

    def _found(self, term: TermNode[TypedOperator], use: int, kind: int, value: int, level: ClassesByType) -> None:
        """Add a term: as the representative of a new class, or as equal to the representative of its class."""
        self.num_graphs += 1
        number = len(self.nodes)
        same = self._classes.setdefault((use, kind, value), number)
        if same != number:
            self.pairs.append((term, same))
            return
        self.nodes.append(term._replace(number=number))
        self.value.append(value)
        self.kind.append(kind)
        serial = self._serial
        serial.append(term.use is None or (not term.use.parallel and all(serial[c] for c in term.operands)))
        level.setdefault(kind, {}).setdefault(use, []).append(number)

    def _learn_shapes(self) -> None:
        """Instantiate the operators on the shapes that exist by now."""
        shapes = list(dict.fromkeys(self.typing.types[t].shape for level in self._buckets for t in level))
        for number, template in enumerate(self._templates):
            for operands in product(shapes, repeat=template.arity):
                if (number, operands) in self._applied:
                    continue
                self._applied.add((number, operands))
                if (made := self.typing.apply(template, operands)) is not None:
                    self._operators.append(made[0])

    def _parallel(self, size: int, level: ClassesByType) -> None:
        add, value = self._found, self.value
        for kind, uses in list(self._buckets[size - 1].items()):
            for step, after in self.typing.moves(kind):
                for use, classes in uses.items():
                    for number in classes:
                        add(TermNode(step, (number,)), use, after, value[number], level)

    def _apply(self, step: TypedOperator, size: int, level: ClassesByType) -> None:
        for needs, result in step.rows:
            for sizes in _compositions(size - 1, len(needs)):
                heads: list[Head] = [(-1, (), True)]
                for need, at in zip(needs[:-1], sizes[:-1], strict=True):
                    heads = list(self._extended(heads, need, at))
                if heads:
                    self._last(
                        step, heads, self._buckets[sizes[-1]].get(needs[-1], {}), result, level, size == self._top
                    )

    def _extended(self, heads: Sequence[Head], need: int, size: int) -> Iterator[Head]:
        serial = self._serial
        for use, classes in list(self._buckets[size].get(need, {}).items()):
            for head, operands, plain in heads:
                merged = use if head < 0 else self._merge(head, use)
                if merged >= 0:
                    yield from ((merged, (*operands, number), plain and serial[number]) for number in classes)

    def _last(
        self,
        step: TypedOperator,
        heads: Sequence[Head],
        uses: Mapping[int, list[int]],
        result: int,
        level: ClassesByType,
        top: bool,
    ) -> None:
        """Add terms by their last operand, the inner loop; among the largest terms, serial ones are left out."""
        add, value, known, commutes, serial = self._found, self.value, self.values.apply, step.commutes, self._serial
        for use, classes in list(uses.items()):
            for head, operands, plain in heads:
                merged = use if head < 0 else self._merge(head, use)
                if merged < 0:
                    continue
                values, skip = tuple([value[c] for c in operands]), top and plain
                for number in classes:
                    if (commutes and number < operands[0]) or (skip and serial[number]):
                        continue
                    term = TermNode(step, (*operands, number))
                    add(term, merged, result, known(step, (*values, value[number])), level)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `total` as an ordered sum of `parts` numbers from 0."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)
