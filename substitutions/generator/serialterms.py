"""The enumeration of the serial terms of a context, which yields the pairs that have one fingerprint.

Terms grow by one operator at a time; operands are representatives, one for each class of terms with equal fingerprints,
so that a pair is never implied by an equal pair of operands. Operands of commutative operators stand in one order,
except in the terms that say that they commute. All terms of one operator and one type of operands are computed
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count, product
from typing import NamedTuple

import numpy as np

from shardwright.substitutions.generator.canonical import commutes
from shardwright.substitutions.generator.context import SerialContext
from shardwright.substitutions.generator.instances import instances
from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.nodes import TermNode
from shardwright.substitutions.generator.residues import Field
from shardwright.substitutions.generator.termpool import ABOUT, TermPool
from shardwright.substitutions.generator.vocabulary import RowUse, RowWay, SymbolicType


class Pair(NamedTuple):
    """Two terms of one type and fingerprint; the left one was met first."""

    left: TermNode[RowUse]
    right: TermNode[RowUse]


class _Block(NamedTuple):
    """The terms of one use of an operator, a row of classes each."""

    use: RowUse
    operands: Array
    prints: Array


class SerialTerms:
    """The terms of a context up to a number of operators.

    `counts` tells progress: "graphs" (terms looked at), "fingerprints" (classes of terms), "noise" (pairs with unbound
    variables).
    """

    def __init__(self, context: SerialContext, seed: int) -> None:
        self.context, self.counts, self.field = context, Counter[str](), Field()
        ranks = (1,) * context.samples
        self.pool = TermPool(self.field, list(instances(context, self.field, seed, ranks)), context.part, context.about)
        self.pool.variables(context.types)
        self._uses: dict[tuple[int, tuple[SymbolicType, ...]], tuple[RowUse, ...]] = {}
        self._numbers = count()

    def pairs(self, max_ops: int) -> Iterator[Pair]:
        """Yield the pairs, smaller terms first."""
        for ops in range(1, max_ops + 1):
            blocks = self._level(ops, last=ops == max_ops)
            for kind, pairs in blocks.items():
                yield from self._classified(kind, pairs, grow=ops < max_ops)

    def _level(self, ops: int, last: bool) -> dict[SymbolicType, list[_Block]]:
        """Return all terms with this many operators, by the type of their results.

        Of the `last` terms, only those with an operator that rules have to be about.
        """
        blocks: dict[SymbolicType, list[_Block]] = {}
        kinds = list(self.pool.shelves)
        for number, way in enumerate(self.context.ways):
            for operands in product(kinds, repeat=way.arity):
                uses = self._uses_of(number, way, operands)
                if not uses:
                    continue
                if ops > 1 and commutes(way.name) and len(operands[0].dims) < len(operands[1].dims):
                    continue
                rows = self.pool.tuples(operands, ops - 1)
                if ops > 1 and commutes(way.name) and operands[0] == operands[1]:
                    rows = rows[rows[:, 0] <= rows[:, 1]]
                for use in uses:
                    chosen = self._about(use, rows) if last else rows
                    if len(chosen):
                        blocks.setdefault(use.result, []).append(_Block(use, chosen, self.pool.prints(use, chosen)))
                        self.counts["graphs"] += len(chosen)
        return blocks

    def _about(self, use: RowUse, rows: Array) -> Array:
        """Return the rows of operands that make a term that a rule may have as its larger side."""
        if not self.context.about or use.op in self.context.about:
            return rows
        return rows[(np.asarray(self.pool.masks)[rows] >= ABOUT).any(1)]

    def _masks(self, block: _Block) -> Array:
        """Return the variables of each term, and whether it has an operator that rules are about."""
        return np.bitwise_or.reduce(np.asarray(self.pool.masks)[block.operands], 1) | self.pool.mark(block.use)

    def _uses_of(self, number: int, way: RowWay, operands: tuple[SymbolicType, ...]) -> tuple[RowUse, ...]:
        if (number, operands) not in self._uses:
            uses = way.uses(operands, self.context.reach)
            self._uses[number, operands] = tuple(use._replace(number=next(self._numbers)) for use in uses)
        return self._uses[number, operands]

    def _classified(self, kind: SymbolicType, blocks: list[_Block], grow: bool) -> Iterator[Pair]:
        """Yield each term with its class's representative; terms of new classes join the pool if it may `grow`."""
        prints = np.concatenate([block.prints for block in blocks])
        unique, first, inverse = np.unique(prints, return_index=True, return_inverse=True)
        known = self.pool.known.get(kind, {})
        representative = np.asarray([known.get(p, -1) for p in unique.tolist()], np.int64)
        starts = np.cumsum([0, *(len(block.prints) for block in blocks)])
        fresh = np.sort(first[representative < 0])
        self.counts["fingerprints"] += len(fresh)
        if grow:
            for block, start, stop in zip(blocks, starts, starts[1:], strict=False):
                rows = fresh[(fresh >= start) & (fresh < stop)] - start
                if len(rows):
                    self.pool.grow(kind, block.use, block.operands[rows], block.prints[rows])
        masks = np.concatenate([self._masks(block) for block in blocks])
        theirs = np.where(representative < 0, masks[first], np.asarray(self.pool.masks)[representative])
        new = np.zeros(len(prints), bool)
        new[fresh] = True
        repeated = ~new
        bound = repeated & (theirs[inverse] | ABOUT == masks | ABOUT)
        self.counts["noise"] += int(repeated.sum() - bound.sum())
        if self.context.about:
            bound &= (theirs[inverse] | masks) >= ABOUT

        def node(row: int) -> TermNode[RowUse]:
            block = int(np.searchsorted(starts, row, "right")) - 1
            return TermNode(blocks[block].use, tuple(blocks[block].operands[row - starts[block]].tolist()))

        for row in np.flatnonzero(bound).tolist():
            group = inverse[row]
            chosen = int(representative[group])
            yield Pair(self.pool.nodes[chosen] if chosen >= 0 else node(int(first[group])), node(row))
