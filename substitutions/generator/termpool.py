"""Compact storage of enumerated serial terms: one representative per class of terms with one fingerprint.

The *nodes* of a term are the classes of the operators in it, itself included, so that a term's number of operators,
shared subterms counted once, is the size of a union.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from shardwright.substitutions.generator.instances import Instance
from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.nodes import Classes, TermNode
from shardwright.substitutions.generator.residues import Field, Parts
from shardwright.substitutions.generator.vocabulary import RowUse, SymbolicType

CHUNK = 2048
ABOUT = 1 << 40


@dataclass
class Shelf:
    """The classes of one type: their ids by number of operators, and their tensors at every instance."""

    ids: list[list[int]] = field(default_factory=list)
    values: list[Parts] = field(default_factory=list)

    def of(self, ops: int) -> list[int]:
        """Return the classes whose terms have this many operators."""
        return self.ids[ops] if ops < len(self.ids) else []


class TermPool(Classes[RowUse]):
    """The classes of a serial context."""

    def __init__(self, field: Field, instances: Sequence[Instance], part: int, about: Sequence[str] = ()) -> None:
        super().__init__()
        self.field, self.instances, self.part, self.about = field, tuple(instances), part, frozenset(about)
        self.kinds: list[SymbolicType] = []
        self.masks: list[int] = []
        self.rows: list[int] = []
        self.shelves: dict[SymbolicType, Shelf] = {}
        self.known: dict[SymbolicType, dict[int, int]] = {}
        self._attrs: dict[tuple[int, int], dict[str, Any]] = {}

    def variables(self, types: Mapping[str, SymbolicType]) -> None:
        """Add classes for the variables."""
        for number, (name, kind) in enumerate(types.items()):
            values = [instance.tensors[name] for instance in self.instances]
            self._add(TermNode(None, (), name), kind, 1 << number, int(self.fingerprints(values)[0]))
            self._store(kind, values)

    def grow(self, kind: SymbolicType, use: RowUse, operands: Array, prints: Array) -> None:
        """Add new classes of terms `use(operands)`, one a row of class ids, with their fingerprints."""
        for row, print_ in zip(operands.tolist(), prints.tolist(), strict=True):
            mask = self.mark(use)
            for c in row:
                mask |= self.masks[c]
            self._add(TermNode(use, tuple(row)), kind, mask, print_)
        for start in range(0, len(operands), CHUNK):
            self._store(kind, self.evaluate(use, operands[start : start + CHUNK]))

    def mark(self, use: RowUse) -> int:
        """Return the bit of the masks that says whether a term has an operator that rules are about."""
        return ABOUT if use.op in self.about else 0

    def _add(self, node: TermNode[RowUse], kind: SymbolicType, mask: int, print_: int) -> None:
        number, shelf = len(self.nodes), self.shelves.setdefault(kind, Shelf())
        self.nodes.append(node._replace(number=number))
        self.kinds.append(kind)
        self.masks.append(mask)
        self.rows.append(sum(map(len, shelf.ids)))
        ops = len(self.inside(number))
        while len(shelf.ids) <= ops:
            shelf.ids.append([])
        shelf.ids[ops].append(number)
        self.known.setdefault(kind, {})[print_] = number

    def _store(self, kind: SymbolicType, values: Sequence[Parts]) -> None:
        shelf = self.shelves[kind]
        old = shelf.values or [tuple(part[:0] for part in parts) for parts in values]
        pairs = (zip(before, after, strict=True) for before, after in zip(old, values, strict=True))
        shelf.values = [tuple(map(np.concatenate, parts)) for parts in pairs]

    # ---- evaluation ----

    def evaluate(self, use: RowUse, operands: Array) -> list[Parts]:
        """Return the tensors of `use` on each row of classes, at every instance."""
        rows = np.asarray(self.rows)[operands]
        shelves = [self.shelves[self.kinds[c]] for c in operands[0].tolist()]
        results: list[Parts] = []
        for at in range(len(self.instances)):
            taken = [tuple(part[rows[:, j]] for part in shelf.values[at]) for j, shelf in enumerate(shelves)]
            results.append(self.computed(use, taken, at))
        return results

    def computed(self, use: RowUse, operands: Sequence[Parts], at: int) -> Parts:
        """Return the tensor of `use` on the operands' tensors, at one instance."""
        key = (use.number, at)
        if key not in self._attrs:
            self._attrs[key] = {name: value.evaluate(self.instances[at].sizes) for name, value in use.attrs}
        return self.field.evaluate(use.op, operands, self._attrs[key])

    def stored(self, number: int, at: int) -> Parts:
        """Return the tensor of one class, at one instance."""
        row = self.rows[number]
        return tuple(part[row : row + 1] for part in self.shelves[self.kinds[number]].values[at])

    def prints(self, use: RowUse, operands: Array) -> Array:
        """Return the fingerprints of `use` on each row of classes."""
        chunks = [operands[i : i + CHUNK] for i in range(0, len(operands), CHUNK)]
        return np.concatenate([self.fingerprints(self.evaluate(use, chunk)) for chunk in chunks])

    def fingerprints(self, values: Sequence[Parts]) -> Array:
        """Return 64 bits for each of a batch of tensors."""
        total = np.zeros(len(values[0][0]), np.uint64)
        for number, parts in enumerate(values):
            flat = parts[min(self.part, len(parts) - 1)].reshape(len(total), -1).astype(np.uint64)
            total += (mixed(flat * weights(number, flat.shape[1]))).sum(1, dtype=np.uint64)
        return total

    # ---- tuples of operands ----

    def tuples(self, kinds: Sequence[SymbolicType], total: int) -> Array:
        """Return all tuples of classes of these types that hold `total` distinct operators together, one a row."""
        groups = {0: (np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64))}
        for number, kind in enumerate(kinds):
            targets = [total] if number == len(kinds) - 1 else range(total + 1)
            wanted = {u: [self._extended(*groups[a], kind, u) for a in groups if a <= u] for u in targets}
            groups = {u: tuple(map(np.concatenate, zip(*parts, strict=True))) for u, parts in wanted.items() if parts}
        return groups[total][0] if total in groups else np.zeros((0, len(kinds)), np.int64)

    def _extended(self, ids: Array, sets: Array, kind: SymbolicType, total: int) -> tuple[Array, Array]:
        """Return rows of classes with the nodes in them, longer by a class of `kind`, that have `total` nodes."""
        extended = [(np.zeros((0, ids.shape[1] + 1), np.int64), np.zeros((0, total), np.int64))]
        for ops in range(total + 1):
            others = np.asarray(self.shelves[kind].of(ops), np.int64)
            shared = sets.shape[1] + ops - total
            if not len(others) or not len(ids) or not 0 <= shared <= min(sets.shape[1], ops):
                continue
            theirs = np.asarray([self.inside(c) for c in others.tolist()], np.int64).reshape(len(others), ops)
            for left, right in _pairs(sets, theirs, shared):
                union = _union(sets[left], theirs[right], total)
                extended.append((np.column_stack([ids[left], others[right]]), union))
        return np.concatenate([i for i, _ in extended]), np.concatenate([s for _, s in extended])


@lru_cache(maxsize=1024)
def weights(number: int, count: int) -> Array:
    """Return random odd words."""
    return np.random.default_rng([number, count]).integers(1, 2**63, count, np.uint64) * np.uint64(2) + np.uint64(1)


def mixed(bits: Array) -> Array:
    """Return a bijection of 64-bit words that spreads every bit."""
    bits = (bits ^ (bits >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return bits ^ (bits >> np.uint64(29))


def _pairs(left: Array, right: Array, shared: int) -> Iterator[tuple[Array, Array]]:
    """Yield rows of both sides that have exactly `shared` nodes in common."""
    if shared:
        a, b = _joined(left, right, shared)
    else:
        a = np.repeat(np.arange(len(left)), len(right))
        b = np.tile(np.arange(len(right)), len(left))
    step = 1 << 18
    for start in range(0, len(a), step):
        i, j = a[start : start + step], b[start : start + step]
        if left.shape[1] and right.shape[1]:
            common = (left[i][:, :, None] == right[j][:, None, :]).sum((1, 2))
            i, j = i[common == shared], j[common == shared]
        if len(i):
            yield i, j


def _joined(left: Array, right: Array, shared: int) -> tuple[Array, Array]:
    """Return pairs of rows, each once, among which are all that have `shared` nodes in common.

    Where one side has to hold all nodes of the other, only the other's last node, its root, is looked for.
    """
    left, right = (side[:, -1:] if shared == side.shape[1] else side for side in (left, right))
    by_node: dict[int, list[int]] = {}
    for row, nodes in enumerate(right.tolist()):
        for node in nodes:
            by_node.setdefault(node, []).append(row)
    rows = {node: np.asarray(numbers) for node, numbers in by_node.items()}
    pairs: list[tuple[Array, Array]] = []
    for row, nodes in enumerate(left.tolist()):
        matching = [rows[node] for node in nodes if node in rows]
        if matching:
            matches = np.unique(np.concatenate(matching)) if len(matching) > 1 else matching[0]
            pairs.append((np.full(len(matches), row), matches))
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def _union(left: Array, right: Array, total: int) -> Array:
    nodes = np.sort(np.concatenate([left, right], 1), 1)
    fresh = np.ones(nodes.shape, bool)
    fresh[:, 1:] = nodes[:, 1:] != nodes[:, :-1]
    return nodes[fresh].reshape(len(nodes), total)
