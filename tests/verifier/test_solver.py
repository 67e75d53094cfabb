import pytest

from shardwright.pcg.optable import ROWS
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


def test_a_question_within_another_is_an_error() -> None:
    with premises([X >= 1]), pytest.raises(RuntimeError, match="the solver holds those of another question"):
        is_valid(X >= 0)
    with pytest.raises(ValueError, match="stop"), premises([X >= 1]):
        raise ValueError("stop")
    assert not is_valid(X >= 0)


def test_an_encoding_says_once_what_is_given() -> None:
    for name in ROWS:
        rule = next(iter(cases(name))).rule
        encoding = Encoding(rule.shapes(), rule.factor)
        for names in (names for dims in encoding.pattern.tensors for names in dims):
            for _ in range(2):
                encoding.product(names)
                assert encoding.within(names).eq(encoding.index(names, local=True))
        texts = [str(formula) for formula in encoding.given]
        assert len(texts) == len(set(texts)), rule.name
