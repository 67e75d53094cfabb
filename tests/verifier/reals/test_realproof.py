"""Second proofs in real arithmetic: they agree with the first on true rules, and prove no wrong one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardwright
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier.algebra.polys import poly
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.logic import z3
from shardwright.verifier.reals import reals_sums
from shardwright.verifier.reals.numbers import RealNumbers
from shardwright.verifier.reals.realproof import equal_in_reals
from tests.each import each, some
from tests.verifier import laws
from tests.verifier.mutations.termtwins import equation_twins

CASES = {**laws.FUNCTIONS, **laws.INDICES, **laws.SUMS, **laws.DEFINED}


def proven_again(rule: Equation) -> bool:
    return equal_in_reals(rule, rule.left, rule.right)


SECOND = Path(shardwright.__file__).parents[1] / "verifier" / "reals"
FILES = ("numbers", "numbersums", "reals", "reals_moves", "reals_sums", "realproof")
NORMAL_FORMS = {"monomials", "normal", "families", "powers", "laws", "lawbook"}


@each("name", CASES)
def test_true_rules_have_a_second_proof_and_wrong_ones_have_none(name: str) -> None:
    variables, left, rights, wrongs = CASES[name]
    proven = [proven_again(equation(name, variables, left, right)) for right in rights]
    assert all(proven)
    assert not any(proven_again(equation(name, variables, left, wrong)) for wrong in wrongs)


@each("name", laws.NOT_PROVEN)
def test_a_right_side_that_exists_for_fewer_tensors_has_no_second_proof(name: str) -> None:
    assert not proven_again(equation(name, *laws.NOT_PROVEN[name]))


@each(
    "name",
    [*laws.EXISTING],
)
def test_a_quotient_exists_where_the_left_side_divides_by_the_same(name: str) -> None:
    assert proven_again(equation(name, *laws.EXISTING[name]))


@each("name", CATALOGUE)
def test_no_wrong_twin_of_a_named_rule_has_a_second_proof(name: str) -> None:
    twins = list(equation_twins(CATALOGUE[name]))
    for what, twin in some(twins, 3):
        if proven_again(twin):  # a true variant
            assert falsify_equation(twin, trials=12) is None, f"{what}: {twin.equation}"


def test_every_named_rule_has_a_second_proof() -> None:
    assert not [name for name, rule in CATALOGUE.items() if not proven_again(rule)]


def test_the_second_proof_imports_nothing_of_the_normal_forms() -> None:
    for file in FILES:
        tree = ast.parse((SECOND / f"{file}.py").read_text())
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {m.rpartition(".")[2] for m in modules} & NORMAL_FORMS, file


def test_a_wrong_row_is_seen_by_the_other_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were x·wᵀ summed with a wrong sign in one of the two proofs, they would not agree."""
    true = CATALOGUE["linear_as_matmul"]
    assert proven_again(true)
    right = reals_sums.SUMS["linear"]
    wrong = {**reals_sums.SUMS, "linear": lambda reals, term, index: -right(reals, term, index)}
    monkeypatch.setattr("shardwright.verifier.reals.realproof.SUMS", wrong)
    assert not proven_again(true)


def test_equal_sums_are_one_constant_whatever_their_indices_are_called() -> None:
    numbers = RealNumbers(lambda atom: True)
    i, j, k = z3.Ints("~i ~j @k")
    x, y = (z3.Function(name, z3.IntSort(), z3.IntSort(), z3.RealSort()) for name in "xy")
    n = poly("n")
    one = numbers.total([(i, n), (j, n)], x(i, k) * 2 * y(i, j))
    other = numbers.total([(j, n), (i, n)], y(j, i) * x(j, k))
    assert numbers.flat(one).eq(numbers.flat(2 * other))
    assert not numbers.flat(one).eq(numbers.flat(2 * numbers.total([(j, n), (i, n)], y(i, j) * x(j, k))))
    assert numbers.flat(numbers.total([(i, n)], x(k, k))).eq(numbers.flat(numbers.size(n) * x(k, k)))
