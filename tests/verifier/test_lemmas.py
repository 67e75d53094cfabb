import pytest

from shardwright.pcg.errors import RuleError
from shardwright.verifier import lemmas
from shardwright.verifier.lemmas import LEMMAS, Lemma, require
from shardwright.verifier.logic import z3
from shardwright.verifier.proof import Failure
from shardwright.verifier.solver import is_satisfiable, is_valid, refute
from tests.each import each


@each("name", LEMMAS)
def test_every_lemma_is_proven(name: str) -> None:
    assert require(name) == name


@each("name", LEMMAS)
def test_no_lemma_holds_because_its_hypotheses_contradict_each_other(name: str) -> None:
    for given, goal in LEMMAS[name].obligations():
        assert is_satisfiable([*given, goal])


def _wrong_digits() -> list[lemmas.Obligation]:
    k, c, p, r = z3.Ints("k c p r")
    return [([p >= 0, p < k, r >= 0, r < c], p * k + r < k * c)]


def test_a_false_lemma_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Lemma("wrong", "p·k + r < k·c", _wrong_digits)
    monkeypatch.setattr(lemmas, "LEMMAS", {**LEMMAS, "wrong": wrong})
    with pytest.raises(RuleError, match=r"lemma 'wrong' is not proven: obligation 0 of 'p·k \+ r < k·c'"):
        require("wrong")


def test_a_counterexample_has_small_distinct_sizes() -> None:
    n, m = z3.Ints("n m")
    failure = refute("n is m", n == m, [n >= 1, m >= 1], [n, m])
    assert str(failure) == "n is m: false for n = 2, m = 3"
    assert failure.refuted


def test_what_is_neither_proven_nor_refuted_says_so() -> None:
    n = z3.Int("n")
    failure = refute("a true claim", n * n >= 0, [], [n])
    assert str(failure) == "a true claim: not proven"
    assert not failure.refuted
    assert str(Failure("two layouts", ill_typed=True)) == "two layouts: ill-typed"


def test_validity_is_relative_to_what_is_given() -> None:
    n = z3.Int("n")
    assert is_valid(n * n >= n, [n >= 1])
    assert not is_valid(n * n > n, [n >= 1])
