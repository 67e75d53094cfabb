"""A dispatch is proven from the split along what rows name and two moves; what breaks one of them refutes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, derive, sending_choices
from shardwright.verifier.certificates import Certificate, certify
from shardwright.verifier.logic import z3
from shardwright.verifier.proof import Failure
from shardwright.verifier.rows import dispatchproof
from shardwright.verifier.rows.rowproof import prove, proven

PATTERN = Pattern.parse("a b!, a c, a c, d b! (e! f), d f g -> a g", 5)
RULE = derive("experts", PATTERN, parse_choice("d>a"))


def failure(rule: RowRule) -> str:
    found = prove(rule).failure
    assert found is not None
    return str(found)


def test_it_rests_on_the_split_and_on_the_moves() -> None:
    assert sending_choices(ROWS["experts"], PATTERN) == ("d>a",)
    assert sending_choices(ROWS["linear"], Pattern.parse("a b, c b -> a c", 2)) == ()
    assert (RULE.factor, RULE.choice.factors, RULE.choice.outward) == ("d", ("d", "a"), "a")
    assert (set(map(str, RULE.operands)), str(RULE.result), RULE.local) == ({"S(0)"}, "S(0)", ("offset",))
    assert RULE.guard == ("k | d", "k | a", "numeric")
    assert RowRule.from_json(RULE.to_json()) == RULE
    axioms = prove(RULE).axioms
    assert set(proven(derive("experts", PATTERN, parse_choice("d"))).axioms) | {"digits", "linear-sum"} == set(axioms)
    assert isinstance(certify(RULE), Certificate)


def test_every_other_layout_is_refuted() -> None:
    for place in (Placement("C"), Placement("R"), Placement("P"), Placement("S", 1)):
        leads = f"is {place}, from which no move along a leads to"
        for at in range(5):
            operands = (*RULE.operands[:at], place, *RULE.operands[at + 1 :])
            assert f"operand {at} {leads}" in failure(replace(RULE, operands=operands))
        assert f"the result {leads} P: ill-typed" in failure(replace(RULE, result=place))


def test_guards_and_what_the_device_is_told_are_needed() -> None:
    for number, condition in enumerate(("the degree divides the factor",) * 2 + ("sums of bools are bools",)):
        guard = (*RULE.guard[:number], *RULE.guard[number + 1 :])
        assert f"not guarded: {condition}: false for" in failure(replace(RULE, guard=guard))
    assert "the local operator is told [], split along d ['offset']" in failure(replace(RULE, local=()))


def test_rows_are_counted_by_what_all_that_is_sent_has() -> None:
    for choice in ("d>c", "f>a", "d>g"):
        twin = replace(RULE, choice=parse_choice(choice), guard=(*RULE.guard, f"k | {choice[2]}", "k | f"))
        assert f"are not counted by {choice[2]} and sent by what they name along {choice[0]}" in failure(twin)


def test_a_part_that_is_not_proven_and_a_row_that_adds_elsewhere_refute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(dispatchproof, "prove_steps", lambda rule: Failure(f"no proof of {rule.name}"))
        assert "no proof of gather_copy" in failure(RULE)
    with monkeypatch.context() as patch:
        patch.setitem(
            dispatchproof.BODIES, "experts", lambda x: z3.If(x[1] == z3.Real("position"), x[2], z3.RealVal(1))
        )
        found = list(dispatchproof.broken(RULE, derive("experts", PATTERN, parse_choice("d"))))
        assert [str(f).partition(":")[0] for f in found] == ["a row adds nothing to what it does not name"]
        patch.delitem(dispatchproof.BODIES, "experts")
        found = list(dispatchproof.broken(RULE, derive("experts", PATTERN, parse_choice("d"))))
        assert str(found[0]) == "what experts adds to a row that does not name the expert is not known: not proven"
