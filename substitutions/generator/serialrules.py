"""The way from pairs of equal serial terms to rules: re-check on new data, guards on ranks, fusions, canonical form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.generator import floatlaws
from shardwright.substitutions.generator.canonical import canonical
from shardwright.substitutions.generator.context import SerialContext
from shardwright.substitutions.generator.instances import Instance, chosen, instance, shape_of
from shardwright.substitutions.generator.modular import Array
from shardwright.substitutions.generator.nodes import TermNode, Valuation
from shardwright.substitutions.generator.pruning import Pruner
from shardwright.substitutions.generator.residues import CHAINS, Field, Parts
from shardwright.substitutions.generator.serialterms import Pair, SerialTerms
from shardwright.substitutions.generator.symbolicdims import plus
from shardwright.substitutions.generator.vocabulary import RowUse, attributes, plain, position
from shardwright.substitutions.terms import Apply, Term

T = TypeVar("T")
RootSides = tuple[tuple[Term, ...], tuple[Term, ...]]
"""The roots on the left, and on the right."""
RANKS = (1, 2, 0)
"""The ranks of splices in the re-check. Rank 0 comes last: a rule that fails there alone needs a guard."""


@dataclass
class _Trial:
    """A trial of terms on fresh data, at one assignment of sizes: as residues, and as floating point has them."""

    rank: int
    data: Instance
    residues: Valuation[RowUse, Parts]
    floats: Valuation[RowUse, Array]


class SerialRules:
    """The rules of a context: the pairs that hold on data by which nothing was grouped."""

    def __init__(self, context: SerialContext, seed: int) -> None:
        self.context, self.terms = context, SerialTerms(context, seed)
        self.pool, self.field = self.terms.pool, Field(CHAINS[1])
        self._pruner = Pruner(self.pool, seed)
        self._trials: list[_Trial] = []
        for number in range(len(RANKS)):
            self._trials.append(self._trial(number, seed))

    @property
    def counts(self) -> Counter[str]:
        return self.terms.counts

    def rules(self, max_ops: int, tick: Callable[[], None]) -> Iterator[Equation]:
        """Yield the rules of terms up to a number of operators, smaller ones first; `tick` is called now and then."""
        for pair in self.terms.pairs(max_ops):
            tick()
            if self._pruner.keeps(pair):
                yield from self._rules(pair)

    def _trial(self, number: int, seed: int) -> _Trial:
        rng = Random(f"recheck {seed} {number} {self.context.name}")
        rank, before = RANKS[number], [trial.data.sizes for trial in self._trials]
        sizes = chosen(self.context, rng, rank, 2, [i.sizes for i in self.pool.instances] + before)
        batches = [instance(self.context, self.field, sizes, rng.randrange(2**32)) for _ in range(2)]
        first, second = (batch.tensors for batch in batches)
        tensors = {v: tuple(np.concatenate(p) for p in zip(first[v], second[v], strict=True)) for v in first}
        generator = np.random.default_rng(rng.randrange(2**32))
        exact = {
            v: first[v][0] if kind.into else floatlaws.random(generator, shape_of(kind, sizes))
            for v, kind in self.context.types.items()
        }
        env = batches[0].sizes
        residues = Valuation(self.pool.nodes, lambda leaf: tensors[leaf.variable], _applied(self.field.evaluate, env))
        floats = Valuation(self.pool.nodes, lambda leaf: exact[leaf.variable], _applied(floatlaws.evaluate, env))
        return _Trial(rank, Instance(env, tensors), residues, floats)

    def _rules(self, pair: Pair) -> Iterator[Equation]:
        """Yield the pair as canonical rules: none where it is false, or where neither side binds the other's sizes.

        Where one side is a concatenation, its pieces are slices of the other side: a rule replaces them together.
        """
        guard = self._guard(pair)
        if guard is None:
            return
        used = dict.fromkeys(name for root in pair for name in self._variables(root))
        variables = tuple((name, self.context.dims[name]) for name in used)
        moves = self._moves(pair)
        left, right = ((self.pool.term(root),) for root in pair)
        ways = [[(left, right), (right, left)]]
        ways += [[rule] for rule in map(self._pieces, pair, pair[::-1]) if rule is not None]
        for sides in ways:
            for first, second in sides:
                with suppress(RuleError):
                    yield canonical(Equation("rule", variables, first, second, guard, moves))
                    break

    def _pieces(self, side: TermNode[RowUse], other: TermNode[RowUse]) -> RootSides | None:
        """Return the pieces of a concatenation, and the slices of the other side that equal them.

        None for other terms, and where a variable or a concatenation is on one of the sides: then nothing is computed
        together.
        """
        pieces = [self.pool.nodes[c] for c in side.operands]
        if side.use is None or side.use.op != "concat" or any(_gathers(node) for node in (other, *pieces)):
            return None
        dim = dict(side.use.attrs)["dim"]
        whole, slices, start = self.pool.term(other), list[Term](), "0"
        for c in side.operands:
            dims = self.pool.kinds[c].dims
            stop = plus(start, dims[next(i for i in plain(dims) if position(dims, i) == dim.text)])
            slices.append(Apply("slice", (whole,), attributes(dim=dim.text, start=start, stop=stop, step="1")))
            start = stop
        return tuple(map(self.pool.term, pieces)), tuple(slices)

    def _guard(self, pair: Pair) -> tuple[Expression, ...] | None:
        """Return the ranks that the rule needs, as a guard; None where it does not hold."""
        splices = [s for s in self.context.splices if any(s in self._spliced(root) for root in pair)]
        failed = [trial.rank for trial in self._trials if not self._holds(trial, pair)]
        if not failed:
            return ()
        if failed == [0] and splices:
            return tuple(expression(f"len({s}) > 0") for s in splices)
        return None

    def _spliced(self, root: TermNode[RowUse]) -> set[str]:
        return {d[1:] for v in self._variables(root) for d in self.context.types[v].dims if d.startswith("*")}

    def _variables(self, root: TermNode[RowUse]) -> list[str]:
        return [self.pool.nodes[c].variable for c in self.pool.leaves(root)]

    def _holds(self, trial: _Trial, pair: Pair) -> bool:
        left, right = map(trial.residues.of, pair)
        if left is None or right is None:
            return False
        at = min(self.pool.part, len(left) - 1)
        return np.array_equal(left[at], right[at])

    def _moves(self, pair: Pair) -> bool:
        """Return whether both sides are equal bit for bit."""
        for trial in self._trials[:2]:
            left, right = map(trial.floats.of, pair)
            if left is None or right is None or not np.array_equal(left, right):
                return False
        return True


def _gathers(node: TermNode[RowUse]) -> bool:
    """Return whether a term is a variable or a concatenation."""
    return node.use is None or node.use.op == "concat"


def _applied(
    function: Callable[[str, list[T], Mapping[str, Any]], T | None], sizes: Mapping[str, Any]
) -> Callable[[RowUse, list[T]], T | None]:
    """Return a function that applies an operator at these sizes; it gives None where it is undefined at these ranks."""

    def apply(use: RowUse, operands: list[T]) -> T | None:
        try:
            return function(use.op, operands, {key: value.evaluate(sizes) for key, value in use.attrs})
        except (ValueError, IndexError, GraphError, RuleError):
            return None

    return apply
