import contextlib

import pytest

from shardwright.pcg.optable import ROWS
from shardwright.verifier.limits import Late
from shardwright.verifier.logic import z3
from shardwright.verifier.rows.claims import Encoding
from shardwright.verifier.solver import is_satisfiable, is_valid, premises
from tests.verifier.catalogue import cases

X, Y = z3.Ints("x y")


def test_what_is_given_may_grow_between_questions() -> None:
    given = [X >= 1]
    with premises(given) as known:
        assert known.imply(X >= 0)
        assert not known.imply(X + Y >= 2)
        given.append(Y >= 1)
        assert known.imply(X + Y >= 2)
        assert known.hold()
        given.append(Y < 1)
        assert not known.hold()
        assert known.imply(X == Y)  # of contradictions, anything follows
    assert not is_valid(X >= 0), "the next question starts without premises"
    assert is_valid(X >= 0, [X >= 1])
    assert is_satisfiable([X >= 1, Y >= 1])
    assert not is_satisfiable([X >= 1, X < 1])


def test_a_question_within_another_has_premises_of_its_own() -> None:
    with premises([X >= 1]) as known:
        assert not is_valid(X >= 0)
        assert known.imply(X >= 0)
    with contextlib.suppress(ValueError), premises([X >= 1]) as known:
        assert known.imply(X + Y >= Y)
        raise ValueError
    assert not is_valid(X >= 0)


def test_a_solver_that_lost_its_way_is_not_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = z3.Solver.check, 0

    def astray(solver: object) -> object:
        nonlocal calls
        calls += 1
        return z3.unknown if calls == 1 else original(solver)

    monkeypatch.setattr(z3.Solver, "check", astray)
    with premises([X >= 1]) as known:
        assert known.imply(X >= 0)
        assert calls == 2
        known.given.append(Y >= 1)
        calls = 0
        assert not known.imply(X + Y >= 3)
        assert known.imply(X + Y >= 2)


def test_premises_end_with_their_block() -> None:
    with premises([X >= 1]) as known:
        assert known.imply(X >= 0)
    with pytest.raises(RuntimeError, match="asked after the end of `with premises`"):
        known.imply(X >= -1 + Y)
    assert not is_valid(X >= 0)


@pytest.mark.parametrize(("method", "call"), [(m, n) for m in ("push", "add", "pop") for n in (1, 2)] + [("check", 1)])
@pytest.mark.parametrize("after", [False, True])
def test_a_time_limit_leaves_nothing_behind(
    method: str, after: bool, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may strike between any two instructions, those of the clean-up included."""
    original, calls = getattr(z3.Solver, method), 0

    def struck(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Late
        result = original(*arguments)
        if calls == call:
            raise Late
        return result

    with monkeypatch.context() as patch, contextlib.suppress(Late):
        patch.setattr(z3.Solver, method, struck)
        is_valid(X >= 0, [X >= 1])
    assert calls >= call
    for _ in range(2):
        assert not is_valid(X >= 0)
        assert is_valid(X >= 0, [X >= 1])


def test_an_encoding_says_once_what_is_given() -> None:
    for name in ROWS:
        rule = next(iter(cases(name))).rule
        encoding = Encoding(rule.shapes(), rule.factor)
        for names in (names for dims in encoding.pattern.tensors for names in dims):
            for _ in range(2):
                encoding.product(names)
                assert encoding.within(names).eq(encoding.index(names, local=True))
        texts = [str(z3.simplify(formula)) for formula in encoding.given]
        assert len(texts) == len(set(texts)), rule.name
