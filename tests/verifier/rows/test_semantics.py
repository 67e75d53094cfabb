"""What proofs take from the op table is audited against the rows' NumPy semantics.

A factor string declares how an operator depends on its operands. Picking any positions of a splittable factor, in any
order, must then commute with the operator: this is the whole content of "a result cell is a sum of one body over cells
that share its digits", and that the body knows neither where it stands nor how long the factor is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.pcg.choice import Split
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.substitutions.rules.pattern import FactorDims, Pattern
from shardwright.substitutions.rules.rowrules import derive
from shardwright.verifier.rows.semantics import BODIES, adjoint, forward
from tests.each import each
from tests.samples import SAMPLES, Sample
from tests.verifier.catalogue import MORE, pattern_for

Array = np.ndarray[Any, np.dtype[Any]]
EVERY = {row: [*samples, *MORE.get(row, ())] for row, samples in SAMPLES.items()}


def pick(array: Array, dims: FactorDims, factor: str, sizes: dict[str, int], positions: Sequence[int]) -> Array:
    """The tensor restricted to some positions of one factor, wherever the factor is in it."""
    for dim, members in enumerate(dims):
        if factor in members:
            shape = array.shape
            split = array.reshape(*shape[:dim], *(sizes[m] for m in members), *shape[dim + 1 :])
            picked = np.take(split, positions, axis=dim + members.index(factor))
            return picked.reshape(*shape[:dim], -1, *shape[dim + 1 :])
    return array


def evaluate(row: str, given: Sample, pattern: Pattern, factor: str, positions: Sequence[int]) -> Array:
    """The operator on operands restricted to some positions of one factor, with its attributes localized."""
    sizes = sizes_of(row, given)
    arrays = given.arrays(3)
    parts = [pick(a, dims, factor, sizes, positions) for a, dims in zip(arrays, pattern.operands, strict=True)]
    fewer = {**sizes, factor: len(positions)}
    whole, local = pattern.shapes(sizes), pattern.shapes(fewer)
    shapes = LocalShapes(whole[:-1], whole[-1], local[:-1], local[-1])
    attrs = ROWS[row].localize(dict(given.attrs), shapes)
    with np.errstate(all="ignore"):
        return np.asarray(ROWS[row].numpy(*parts, **attrs))


def sizes_of(row: str, given: Sample) -> dict[str, int]:
    signature = ROWS[row].signature(given.shapes, dict(given.attrs))
    pattern = pattern_for(row, given)
    return dict(zip(pattern.factors, (signature.factors[i].size for i in _order(signature)), strict=True))


def _order(signature: Any) -> list[int]:
    return list(dict.fromkeys(f for dims in (*signature.operands, signature.result) for dim in dims for f in dim))


def splits(row: str) -> list[tuple[Sample, Pattern, str]]:
    """Every splittable factor of every sample, without those whose position the body may see."""
    if ROWS[row].random:
        return []
    found = []
    for given in EVERY[row]:
        pattern = pattern_for(row, given)
        for factor in pattern.splittable:
            rule = derive(row, pattern, Split(factor))
            if "offset" not in rule.local:
                found.append((given, pattern, factor))
    return found


@each("row", [row for row in EVERY if splits(row)])
def test_operators_commute_with_picking_positions(row: str) -> None:
    for given, pattern, factor in splits(row):
        size = sizes_of(row, given)[factor]
        everything = evaluate(row, given, pattern, factor, range(size))
        if factor in pattern.summed:
            parts = [evaluate(row, given, pattern, factor, [i]) for i in np.random.default_rng(0).permutation(size)]
            np.testing.assert_allclose(sum(parts[1:], parts[0]), everything, rtol=1e-9, atol=1e-9)
            continue
        positions = np.random.default_rng(0).permutation(size)[: max(1, size // 2)].tolist()
        picked = pick(everything, pattern.result, factor, sizes_of(row, given), positions)
        result = evaluate(row, given, pattern, factor, positions)
        np.testing.assert_allclose(result, picked, rtol=1e-9, atol=1e-9, err_msg=f"{row} [{pattern}] by {factor}")


def linear_sets(row: str) -> list[tuple[Sample, tuple[int, ...]]]:
    return [
        (given, chosen) for given in EVERY[row] for chosen in ROWS[row].partial_sets(given.dtypes, dict(given.attrs))
    ]


@each("row", [row for row in EVERY if linear_sets(row)])
def test_rows_are_linear_where_they_say_so(row: str) -> None:
    for given, chosen in linear_sets(row):
        x, y = given.arrays(1), given.arrays(2)
        y = [b if i in chosen else a for i, (a, b) in enumerate(zip(x, y, strict=True))]
        both = [a + b if i in chosen else a for i, (a, b) in enumerate(zip(x, y, strict=True))]
        zero = [np.zeros_like(a) if i in chosen else a for i, a in enumerate(x)]
        run = ROWS[row].numpy
        tolerance = 1e-5 if "float32" in given.attrs.values() else 1e-9
        np.testing.assert_allclose(
            run(*both, **given.attrs), run(*x, **given.attrs) + run(*y, **given.attrs), rtol=tolerance, atol=tolerance
        )
        assert not np.any(run(*zero, **given.attrs))


def test_every_body_that_is_written_out_is_of_a_row_with_linear_operands() -> None:
    assert set(BODIES) <= set(ROWS)
    assert all(ROWS[row].linear_in for row in BODIES)


def test_rows_without_a_random_draw_or_an_offset_see_no_positions() -> None:
    for row in ROWS:
        pattern = pattern_for(row, EVERY[row][0])
        positions = forward(derive(row, pattern, parse_choice("R"))).body.positions
        assert bool(positions) == (ROWS[row].random or ROWS[row].offset is not None)


def test_the_adjoint_of_a_product() -> None:
    """d(x wᵀ)/dx · dy is linear in dy and in w, does not depend on x, and sums over the output features."""
    term = adjoint(derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b")), 0)
    assert str(term.pattern) == "a b, c b, a c -> a b"
    assert term.pattern.summed == ("c",)
    assert term.body.linear == (frozenset([2]), frozenset([1]))
    assert term.body.ignores == frozenset([0])
    assert [str(p) for p in (*term.operands, term.result)] == ["S(1)", "S(1)", "C", "S(1)"]
