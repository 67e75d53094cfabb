"""From pairs of terms to rules: exact re-check on other data, guards on ranks, canonical form, names.

generate_context(context, max_ops, seed, report)     all candidate rules of one context
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any, TypeVar

import numpy as np

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator import bits
from shardwright.substitutions.generator.canonical import canonical, key, named
from shardwright.substitutions.generator.extents import plus
from shardwright.substitutions.generator.field import CHAINS, Field, Parts
from shardwright.substitutions.generator.pools import Pool, PoolNode
from shardwright.substitutions.generator.pruning import Pruner
from shardwright.substitutions.generator.rings import Array
from shardwright.substitutions.generator.serial import Pair, SerialTerms
from shardwright.substitutions.generator.universe import Instance, SerialContext, chosen, instance, shape_of
from shardwright.substitutions.generator.vocabulary import attributes, plain, position
from shardwright.substitutions.terms import Apply, Term, Variable, subterms

T = TypeVar("T")
Sides = tuple[tuple[Term, ...], tuple[Term, ...]]
"""The roots on the left, and on the right."""
RANKS = (1, 2, 0)
"""The ranks of splices in the re-check. Rank 0 comes last: a rule that fails there alone needs a guard."""


def generate_context(
    context: SerialContext,
    max_ops: int,
    seed: int = 0,
    report: Callable[[Mapping[str, int]], None] = lambda counts: None,
) -> list[Equation]:
    """The candidate rules of one context, re-checked, pruned and named; the same for the same seed.

    `report` is given counts now and then, and at the end: those of `SerialTerms`, and "candidates" after pruning.
    """
    run = SerialTerms(context, seed)
    pruner, check, found = Pruner(run.pool, seed), Recheck(context, run.pool, seed), dict[str, Equation]()
    for pair in run.pairs(max_ops):
        if not pruner.keeps(pair):
            continue
        for rule in check.rules(pair):
            found.setdefault(key(rule), rule)
        report({**run.counts, "candidates": len(found)})
    report({**run.counts, "candidates": len(found)})
    return [named(rule) for rule in found.values()]


def size_of(rule: Equation) -> int:
    """The distinct operators of either side, together."""
    sides = (chain.from_iterable(map(subterms, side)) for side in (rule.left, rule.right))
    return sum(len({term for term in side if isinstance(term, Apply)}) for side in sides)


@dataclass
class _Trial:
    """Fresh data at one assignment of sizes, and what each class is there."""

    rank: int
    data: Instance
    bits: Mapping[str, Array]
    values: dict[int, Parts | None] = field(default_factory=dict)
    exact: dict[int, Array | None] = field(default_factory=dict)


class Recheck:
    """Decides whether a pair of terms holds on data that nothing was grouped by, and writes it as a rule."""

    def __init__(self, context: SerialContext, pool: Pool, seed: int) -> None:
        self.context, self.pool = context, pool
        self.field = Field(CHAINS[1])
        self._terms: dict[int, Term] = {}
        self._trials: list[_Trial] = []
        for number in range(len(RANKS)):
            self._trials.append(self._trial(number, seed))

    def _trial(self, number: int, seed: int) -> _Trial:
        rng = Random(f"recheck {seed} {number} {self.context.name}")
        rank, before = RANKS[number], [trial.data.sizes for trial in self._trials]
        sizes = chosen(self.context, rng, rank, 2, [i.sizes for i in self.pool.instances] + before)
        batches = [instance(self.context, self.field, sizes, rng.randrange(2**32)) for _ in range(2)]
        first, second = (batch.tensors for batch in batches)
        tensors = {v: tuple(np.concatenate(p) for p in zip(first[v], second[v], strict=True)) for v in first}
        generator = np.random.default_rng(rng.randrange(2**32))
        exact = {
            v: first[v][0] if kind.into else bits.random(generator, shape_of(kind, sizes))
            for v, kind in self.context.types.items()
        }
        return _Trial(rank, Instance(batches[0].sizes, tensors), exact)

    def rules(self, pair: Pair) -> Iterator[Equation]:
        """The pair as canonical rules: none where it is false, or where neither side binds the other's sizes.

        Where one side is a concatenation, its pieces are slices of the other side: a rule that replaces them together.
        """
        guard = self._guard(pair)
        if guard is None:
            return
        used = dict.fromkeys(name for root in pair for name in self._names(root))
        variables = tuple((name, self.context.dims[name]) for name in used)
        moves = self._moves(pair)
        left, right = ((self._term(root),) for root in pair)
        ways = [[(left, right), (right, left)]]
        ways += [[found] for found in map(self._pieces, pair, pair[::-1]) if found is not None]
        for sides in ways:
            for first, second in sides:
                with suppress(RuleError):
                    yield canonical(Equation("rule", variables, first, second, guard, moves))
                    break

    def _pieces(self, side: PoolNode, other: PoolNode) -> Sides | None:
        """What a concatenation is made of, and the slices of the other side that these are.

        None for other terms, and where a variable or a concatenation is on one of the sides: nothing is computed at
        once then.
        """
        pieces = [self.pool.nodes[c] for c in side.operands]
        if side.use is None or side.use.op != "concat" or any(_gathers(node) for node in (other, *pieces)):
            return None
        dim = dict(side.use.attrs)["dim"]
        whole, slices, start = self._term(other), list[Term](), "0"
        for c in side.operands:
            dims = self.pool.kinds[c].dims
            stop = plus(start, dims[next(i for i in plain(dims) if position(dims, i) == dim.text)])
            slices.append(Apply("slice", (whole,), attributes(dim=dim.text, start=start, stop=stop, step="1")))
            start = stop
        return tuple(map(self._term, pieces)), tuple(slices)

    def _guard(self, pair: Pair) -> tuple[Expression, ...] | None:
        """What the rule needs of ranks; None where it does not hold."""
        splices = [s for s in self.context.splices if any(s in self._spliced(root) for root in pair)]
        failed = [trial.rank for trial in self._trials if not self._holds(trial, pair)]
        if not failed:
            return ()
        if failed == [0] and splices:
            return tuple(expression(f"len({s}) > 0") for s in splices)
        return None

    def _spliced(self, root: PoolNode) -> set[str]:
        return {d[1:] for v in self._names(root) for d in self.context.types[v].dims if d.startswith("*")}

    def _names(self, root: PoolNode) -> list[str]:
        if root.use is None:
            return [root.variable]
        return [name for c in root.operands for name in self._names(self.pool.nodes[c])]

    # ---- both sides on fresh data ----

    def _holds(self, trial: _Trial, pair: Pair) -> bool:
        left, right = (self._value(trial, root) for root in pair)
        if left is None or right is None:
            return False
        at = min(self.pool.part, len(left) - 1)
        return np.array_equal(left[at], right[at])

    def _value(self, trial: _Trial, root: PoolNode) -> Parts | None:
        if root.use is None:
            return trial.data.tensors[root.variable]
        operands: list[Parts] = []
        for c in root.operands:
            if c not in trial.values:
                trial.values[c] = self._value(trial, self.pool.nodes[c])
            value = trial.values[c]
            if value is None:
                return None
            operands.append(value)
        return _computed(lambda op, attrs: self.field.evaluate(op, operands, attrs), root, trial.data.sizes)

    def _moves(self, pair: Pair) -> bool:
        """Whether both sides are equal bit for bit."""
        for trial in self._trials[:2]:
            left, right = (self._exact(trial, root) for root in pair)
            if left is None or right is None or not np.array_equal(left, right):
                return False
        return True

    def _exact(self, trial: _Trial, root: PoolNode) -> Array | None:
        if root.use is None:
            return trial.bits[root.variable]
        operands: list[Array] = []
        for c in root.operands:
            if c not in trial.exact:
                trial.exact[c] = self._exact(trial, self.pool.nodes[c])
            value = trial.exact[c]
            if value is None:
                return None
            operands.append(value)
        return _computed(lambda op, attrs: bits.evaluate(op, operands, attrs), root, trial.data.sizes)

    # ---- as terms ----

    def _term(self, root: PoolNode) -> Term:
        if root.use is None:
            return Variable(root.variable)
        for c in root.operands:
            if c not in self._terms:
                self._terms[c] = self._term(self.pool.nodes[c])
        return Apply(root.use.op, tuple(self._terms[c] for c in root.operands), root.use.attrs)


def _gathers(node: PoolNode) -> bool:
    """Whether a term is a variable or a concatenation."""
    return node.use is None or node.use.op == "concat"


def _computed(function: Callable[[str, Mapping[str, Any]], T], root: PoolNode, sizes: Mapping[str, Any]) -> T | None:
    """What the operator gives; None where it is not defined at these ranks."""
    assert root.use is not None
    try:
        return function(root.use.op, {key: value.evaluate(sizes) for key, value in root.use.attrs})
    except (ValueError, IndexError, GraphError, RuleError):
        return None
