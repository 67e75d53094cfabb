"""Mutated axioms of the op table: a row that declares too much must be caught by the audit of its NumPy semantics.

A fixed factor is declared splittable, or operands are declared linear that are not. Where the audit finds nothing, the
declaration would be true: the row is stricter than its operator, and is listed.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from shardwright.pcg.errors import GraphError
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.rules.pattern import Pattern
from tests.each import each
from tests.samples import SAMPLES, Sample
from tests.verifier.catalogue import pattern_for
from tests.verifier.rows.test_semantics import EVERY, Array, evaluate, pick, sizes_of

TRUE_SPLITS = {
    ("any", "b"),  # NumPy adds bools by "or"; partial values are sums of numbers
    ("any", "c"),
    ("gather", "d"),  # each index picks for itself
    ("sdpa", "g"),  # the features of the values
}
"""Fixed factors, by the letter of their pattern, that could be split: here rows are stricter than their operators."""
TRUE_SUMS = {
    ("concat", (0, 1, 2)),
    ("index_put", (0, 2)),
    ("layer_norm", (1, 2)),  # weight and bias together
    ("rms_norm", (1,)),
    ("sdpa", (2,)),  # for fixed queries and keys
    ("dropout", (0,)),  # for a fixed mask
}
"""Operands in which an operator is jointly linear though its row does not say so."""
_ERRORS = (GraphError, ValueError, IndexError, TypeError, ZeroDivisionError)


def same(left: Array, right: Array) -> bool:
    return left.shape == right.shape and bool(np.allclose(left, right, rtol=1e-6, atol=1e-8, equal_nan=True))


def commutes(row: str, given: Sample, pattern: Pattern, factor: str) -> bool:
    """Whether picking positions of a factor commutes with the operator, in two ways of picking."""
    size = sizes_of(row, given)[factor]
    try:
        whole = evaluate(row, given, pattern, factor, range(size))
        if factor in pattern.summed:
            parts = [evaluate(row, given, pattern, factor, [i]) for i in range(size)]
            return same(sum(parts[1:], parts[0]), whole)
        chosen = [np.random.default_rng(s).permutation(size)[: max(1, size // 2)].tolist() for s in (0, 1)]
        return all(
            same(evaluate(row, given, pattern, factor, p), pick(whole, pattern.result, factor, sizes_of(row, given), p))
            for p in chosen
        )
    except _ERRORS:
        return False


def freed(row: str) -> list[tuple[Sample, Pattern, str]]:
    """Every fixed factor of every sample, declared splittable. Factors of size 1 are the same either way."""
    found = []
    for given in EVERY[row]:
        pattern = pattern_for(row, given)
        for factor in sorted(pattern.fixed):
            if sizes_of(row, given)[factor] > 1:
                rest = Pattern(pattern.operands, pattern.result, pattern.fixed - {factor})
                found.append((given, rest, factor))
    return found


@each("row", [row for row in EVERY if freed(row)])
def test_a_factor_that_is_wrongly_splittable_is_caught(row: str) -> None:
    uncaught = {(row, factor) for given, pattern, factor in freed(row) if commutes(row, given, pattern, factor)}
    assert uncaught == {entry for entry in TRUE_SPLITS if entry[0] == row}


def undeclared(row: str) -> set[tuple[int, ...]]:
    """Sets of real operands that the row does not declare jointly linear."""
    sets: set[tuple[int, ...]] = set()
    for given in SAMPLES[row]:
        real = given.differentiable
        sets |= {chosen for n in range(1, len(real) + 1) for chosen in combinations(real, n)}
    return sets - set(ROWS[row].linear_in)


def is_linear(row: str, given: Sample, chosen: tuple[int, ...]) -> bool:
    x, y = given.arrays(1), given.arrays(2)
    y = [b if i in chosen else a for i, (a, b) in enumerate(zip(x, y, strict=True))]
    both = [a + b if i in chosen else a for i, (a, b) in enumerate(zip(x, y, strict=True))]
    zero = [np.zeros_like(a) if i in chosen else a for i, a in enumerate(x)]
    run = ROWS[row].numpy
    try:
        with np.errstate(all="ignore"):
            results = [np.asarray(run(*arrays, **given.attrs)) for arrays in (both, x, y, zero)]
    except _ERRORS:
        return False
    return results[0].dtype.kind == "f" and same(results[0], results[1] + results[2]) and not np.any(results[3])


@each("row", [row for row in SAMPLES if undeclared(row)])
def test_operands_that_are_wrongly_linear_are_caught(row: str) -> None:
    uncaught = set()
    for chosen in undeclared(row):
        fitting = [given for given in SAMPLES[row] if set(chosen) <= set(given.differentiable)]
        if all(is_linear(row, given, chosen) for given in fitting):
            uncaught.add((row, chosen))
    assert uncaught == {entry for entry in TRUE_SUMS if entry[0] == row}
