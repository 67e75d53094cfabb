"""Running a row's own `localize` on symbolic sizes."""

from __future__ import annotations

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.verifier.logic import z3
from shardwright.verifier.rows.attributes import Path, Sym


def sizes(path: Path) -> tuple[Sym, Sym]:
    return Sym(z3.Int("n"), path), Sym(z3.Int("m"), path)


def test_symbolic_integers_compute() -> None:
    n, m = sizes(Path())
    assert str((n * 2 + m - 1).expr) == "n*2 + m - 1"
    quotient = n * m // m
    assert (str(quotient.expr), str(quotient.divisor)) == ("n*m", "m")


def test_a_quotient_is_a_result_not_an_operand() -> None:
    n, m = sizes(Path())
    with pytest.raises(
        RuleError, match="a row's `localize` computes with a quotient; the verifier proves quotients only"
    ):
        assert n // m + 1


def test_every_path_through_comparisons_is_taken() -> None:
    seen = set()
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        decisions = pending.pop()
        path = Path(decisions)
        n, m = sizes(path)
        outcome = "equal" if n == m else "less" if n < m else "more" if m <= n else "never"
        seen.add((outcome, str(z3.And(path.conditions))))
        pending += path.others(len(decisions))
    assert [outcome for outcome, _ in sorted(seen)] == ["equal", "less", "more", "never"]
    assert ("less", "And(Not(n == m), n < m)") in seen


def test_comparisons_that_need_no_decision_take_none() -> None:
    path = Path()
    n, _ = sizes(path)
    assert n == n * 1
    assert n >= n - 1
    assert n + 1 > n
    assert not path.conditions


def test_truth_is_a_comparison_with_zero() -> None:
    path = Path((False,))
    assert Sym(z3.Int("n"), path)
    assert len(path.conditions) == 1


def test_the_hash_is_an_integers() -> None:
    n, _ = sizes(Path())
    assert isinstance(hash(n), int)
