"""The pruning of pairs that say less than another pair.

    the same up to names
    a subterm that may be any tensor       relu(add(f(x), y)) = relu(add(y, f(x)))
    a variable that may be two             add(x, add(x, y)) = add(add(x, x), y)

Fingerprints decide whether it may, on data of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.nodes import TermNode, Valuation
from shardwright.substitutions.generator.residues import Parts
from shardwright.substitutions.generator.serialterms import Pair
from shardwright.substitutions.generator.termpool import TermPool
from shardwright.substitutions.generator.vocabulary import RowUse, SymbolicType

SAMPLES, SPLIT_SAMPLES = 4, 2
MAX_OCCURRENCES = 4
_Key = tuple[tuple[object, ...], ...]


class Pruner:
    """A memory of the pairs of one pool that were seen."""

    def __init__(self, pool: TermPool, seed: int) -> None:
        self.pool = pool
        self._rng = np.random.default_rng([seed, 1])
        self._seen: set[_Key] = set()
        self._general: dict[_Key, bool] = {}
        self._fresh: dict[tuple[int, int], Parts] = {}
        self._kinds: dict[SymbolicType, int] = {}

    def keeps(self, pair: Pair) -> bool:
        """Return whether the pair is new, and no instance of a pair with a variable in place of a common subterm."""
        key = self._key(pair)
        if key in self._seen:
            return False
        self._seen.add(key)
        left, right = map(self._inside, pair)
        return not (
            self._repeats(pair)
            or any(self._generalizes(pair, hole) for hole in sorted(left & right, reverse=True))
            or any(self._splits(pair, variable) for variable in self._variables(pair))
            or any(self._generalizes(pair, hole) for hole in sorted(left ^ right, reverse=True))
        )

    def _inside(self, node: TermNode[RowUse]) -> set[int]:
        """Return the classes of the operators in a term, and its own where it is a class."""
        return self.pool.within(node).union([node.number] if node.number >= 0 and node.use else [])

    def _key(self, pair: Pair, hole: int = -1) -> _Key:
        """Return a key of the pair, with variables and the hole known by their types and order of occurrence only."""
        nodes, numbers, entries = self.pool.nodes, dict[int, int](), list[tuple[object, ...]]()

        def leaf(kind: SymbolicType) -> tuple[object, ...]:
            return ("", self._kinds.setdefault(kind, len(self._kinds)))

        def visit(c: int) -> int:
            if c not in numbers:
                node = nodes[c]
                entry = leaf(self.pool.kinds[c]) if c == hole or node.use is None else applied(node)
                numbers[c] = len(entries)
                entries.append(entry)
            return numbers[c]

        def applied(node: TermNode[RowUse]) -> tuple[object, ...]:
            assert node.use is not None
            return (node.use.number, *[visit(c) for c in node.operands])

        for root in pair:
            entries.append((visit(root.number),) if root.number >= 0 else applied(root))
        return tuple(entries)

    def _generalizes(self, pair: Pair, hole: int) -> bool:
        key = self._key(pair, hole)
        if key not in self._general:
            self._general[key] = all(self._equal(pair, hole, at) for at in range(len(self.pool.instances)))
        return self._general[key]

    def _equal(self, pair: Pair, hole: int, at: int) -> bool:
        """Return whether both sides are equal at one instance when the class `hole` is any tensor of its type."""
        left, right = (self._read(self._value(root, hole, at)) for root in pair)
        return bool((left == right).all())

    def _read(self, value: Parts) -> Array:
        return value[min(self.pool.part, len(value) - 1)]

    # ---- a variable that may be two ----

    def _repeats(self, pair: Pair) -> bool:
        """Return whether a variable occurs so often that the pair is about multiples and powers of it."""
        return any(max(Counter(self.pool.leaves(root)).values()) > MAX_OCCURRENCES for root in pair)

    def _variables(self, pair: Pair) -> list[int]:
        """Return the variables that occur more than twice, or twice on one side."""
        left, right = (Counter(self.pool.leaves(root)) for root in pair)
        return [v for v, count in (left + right).items() if count > 2 or 2 in (left[v], right[v])]

    def _splits(self, pair: Pair, variable: int) -> bool:
        """Return whether some of the variable's occurrences may be another tensor, decided for all choices at once."""
        count = sum(self.pool.leaves(root).count(variable) for root in pair)
        choices = np.arange(1, 1 << (count - 1))
        chosen = np.repeat((choices[:, None] >> np.arange(count)) & 1, SPLIT_SAMPLES, 0).astype(bool)
        for at in range(len(self.pool.instances)):
            here, there = self.pool.stored(variable, at), self._any(variable, at)
            tensors = iter([_chosen(column, here, there) for column in chosen.T])
            left, right = (self._read(self._spread(root, variable, tensors, at)) for root in pair)
            equal = (left == right).reshape(max(len(left), len(right)), -1).all(1)
            passed = np.broadcast_to(equal, len(chosen)).reshape(-1, SPLIT_SAMPLES).all(1)
            if not passed.any():
                return False
            chosen = chosen[np.repeat(passed, SPLIT_SAMPLES)]
        return True

    def _spread(self, root: TermNode[RowUse], variable: int, tensors: Iterator[Parts], at: int) -> Parts:
        """Return a term's tensor when each occurrence of the variable is the next tensor, a batch of choices."""
        if root.number == variable:
            return next(tensors)
        if root.number >= 0 and variable not in self.pool.leaves(root):
            return self.pool.stored(root.number, at)
        assert root.use is not None
        operands = [self._spread(self.pool.nodes[c], variable, tensors, at) for c in root.operands]
        return self.pool.computed(root.use, operands, at)

    # ---- data ----

    def _value(self, root: TermNode[RowUse], hole: int, at: int) -> Parts:
        """Return the tensor of a term when the class `hole` is any tensor of its type."""
        pool = self.pool
        known: dict[int, Parts | None] = {hole: self._any(hole, at)}
        known |= {c: pool.stored(c, at) for c in self._inside(root) if hole not in pool.inside(c)}
        value = Valuation(
            pool.nodes, lambda leaf: pool.stored(leaf.number, at), lambda use, xs: pool.computed(use, xs, at), known
        ).of(root)
        assert value is not None
        return value

    def _any(self, hole: int, at: int) -> Parts:
        """Return a batch of random tensors of the type of a class."""
        if (hole, at) not in self._fresh:
            self._fresh[hole, at] = self._random(hole, self.pool.stored(hole, at))
        return self._fresh[hole, at]

    def _random(self, hole: int, stored: Parts) -> Parts:
        shape = (SAMPLES, *stored[0].shape[1:])
        if self.pool.kinds[hole].into:
            return (self._rng.integers(0, stored[0].max() + 1, shape, np.int64),)
        rings = zip(stored, self.pool.field.rings, strict=False)
        return tuple(self._rng.integers(1, ring.p, shape, np.int64) for _, ring in rings)


def _chosen(column: Array, here: Parts, there: Parts) -> Parts:
    """Return one of two tensors for each choice and sample."""
    pick = column.reshape(-1, *(1,) * (here[0].ndim - 1))
    samples = np.arange(len(column)) % SPLIT_SAMPLES
    return tuple(np.where(pick, q[samples], p) for p, q in zip(here, there, strict=True))
