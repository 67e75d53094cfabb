"""Questions to Z3: premises that end with their block, and limits that do not depend on the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.pcg.optable import ROWS
from shardwright.verifier import solver
from shardwright.verifier.limits import Late
from shardwright.verifier.logic import z3
from shardwright.verifier.placement import denotation
from shardwright.verifier.reals import realproof
from shardwright.verifier.rows.claims import Encoding
from shardwright.verifier.solver import is_satisfiable, is_valid, premises
from tests.verifier.catalogue import cases

X, Y, Z = z3.Ints("x y z")


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


HARD = (X * X * X + Y * Y * Y + Z * Z * Z != 42, [X > 100])
"""Z3 does not find out in hours."""


def test_z3_gives_up_after_so_many_steps_and_not_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is at the moment, the same steps are taken."""
    for make, allowed in ((solver.new_solver, solver.STEPS), (realproof._solver.__wrapped__, realproof.STEPS)):
        used = []
        for _ in range(2):
            asked = make()
            asked.set("rlimit", allowed // 50)
            asked.add(*HARD[1], z3.Not(HARD[0]))
            before = num_steps(asked)
            assert solver.answer(asked) == z3.unknown
            used.append(num_steps(asked) - before)
        assert used[0] == pytest.approx(allowed // 50, rel=0.01)
        assert used[1] == pytest.approx(used[0], rel=0.01)
    monkeypatch.setattr(solver, "STEPS", 10)
    solver._shared.cache_clear()
    assert not is_valid(X * (Y + 1) * Z > X * Y * Z, [X > 0, Z > 0])
    solver._shared.cache_clear()
    monkeypatch.undo()
    assert is_valid(X * (Y + 1) * Z > X * Y * Z, [X > 0, Z > 0])


def test_no_solver_asks_the_clock() -> None:
    """But where Z3 is stuck in one of its steps, far beyond what steps take."""
    for make in (solver.new_solver, realproof._solver.__wrapped__, denotation._solver.__wrapped__):
        told = {str(name): value for name, value in made(make)}
        assert told["rlimit"] in (solver.STEPS, realproof.STEPS)
        assert told["timeout"] == 60_000


def test_what_is_stuck_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "STUCK_S", 0.05)
    asked = solver.new_solver()
    asked.add(*HARD[1], z3.Not(HARD[0]))
    with pytest.raises(Late):
        solver.answer(asked)


def made(make: Callable[[], Any]) -> list[tuple[str, object]]:
    """What a new solver is set to."""
    found: list[tuple[str, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(z3.Solver, "set", lambda self, name, value: found.append((name, value)))
        make()
    return found


def num_steps(asked: Any) -> int:
    statistics = asked.statistics()
    return statistics.get_key_value("rlimit count") if "rlimit count" in statistics.keys() else 0  # noqa: SIM118
