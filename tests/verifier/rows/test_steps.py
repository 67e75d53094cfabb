"""Rules of the parallel operators: proven, not falsified; and their wrong twins: refuted."""

from __future__ import annotations

import pytest

from shardwright.pcg.layout import C, P, R, S
from shardwright.pcg.parallel import ADJOINT, step
from shardwright.substitutions.rules.steps import STEP_RULES, steps
from shardwright.verifier.falsifiers.falsify_steps import falsify_steps
from shardwright.verifier.rows.stepproof import prove_steps
from tests.each import each
from tests.verifier.mutations.twins import step_twins


@each("name", STEP_RULES)
def test_every_rule_is_proven(name: str) -> None:
    assert prove_steps(STEP_RULES[name]) is None


@each("name", STEP_RULES)
def test_no_rule_is_falsified_at_two_degrees_per_axis(name: str) -> None:
    assert falsify_steps(STEP_RULES[name]) is None


@each("name", STEP_RULES)
def test_every_wrong_twin_is_refuted(name: str) -> None:
    twins = list(step_twins(STEP_RULES[name]))
    assert twins
    for what, twin in twins:
        found = falsify_steps(twin)
        if prove_steps(twin) is None:  # a true variant: another dimension on the way
            assert found is None, f"{what}: certified, but {found}"
        else:
            assert found is not None, f"{twin.equation} ({what}): neither proven nor refuted"


def test_replicating_and_then_reducing_is_not_the_identity() -> None:
    """reduce ∘ replicate is k · id: the types forbid it."""
    wrong = steps("wrong", {"a": "R"}, "replicate(a); reduce(a)", "")
    failure = prove_steps(wrong)
    assert failure is not None
    assert str(failure) == "reduce(a) steps from P, got C: ill-typed"
    assert "not defined: reduce(a) steps from P, got C" in str(falsify_steps(wrong))


def test_a_scatter_of_the_wrong_dimension_ends_in_another_type() -> None:
    failure = prove_steps(steps("wrong", {"a": "P"}, "reduce(a); partition(d, n, a)", "reduce_scatter(e, n, a)"))
    assert str(failure) == "the left side ends in a: S(d, n), the right side in a: S(e, n): ill-typed"


def test_two_axes_on_one_dimension_are_left_to_their_order() -> None:
    failure = prove_steps(steps("wrong", {"a": "R", "b": "R"}, "partition(d, n, a); partition(d, m, b)", ""))
    assert failure is not None
    assert "two axes shard dimension d; the order matters then" in failure.claim


def test_a_dimension_that_each_side_shards_along_another_axis_is_not_judged() -> None:
    left, right = "partition(d, n, a); combine(a)", "partition(d, n, b); combine(b)"
    failure = prove_steps(steps("odd", {"a": "R", "b": "R"}, left, right))
    assert failure is not None
    assert failure.claim == "rule 'odd': dimension d is sharded by two axes"


@pytest.mark.parametrize(
    ("op", "before"), [("partition", R), ("combine", S(0)), ("replicate", R), ("reduce", P)], ids=list(ADJOINT)
)
def test_the_gradient_steps_back_in_dual_layouts(op: str, before: object) -> None:
    move = step(op, 0, before, dim=0)  # type: ignore[arg-type]
    back = move.adjoint
    assert back.op == ADJOINT[op]
    assert (back.before, back.after) == (move.after.dual, move.before.dual)
    assert back.adjoint == move
    assert {R.dual: "R", C.dual: "P", P.dual: "C"} == {R: "R", P: "P", C: "C"}
