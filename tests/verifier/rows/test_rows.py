"""Every row rule: certified, not falsified; and its wrong twins: refuted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import is_float
from shardwright.substitutions.rules.pattern import Pattern, letter
from shardwright.substitutions.rules.rowrules import RowRule, derive
from shardwright.verifier.falsifiers.falsify import Counterexample, falsify
from shardwright.verifier.logic import Formula, z3
from shardwright.verifier.rows import attributes, claims, rowproof
from shardwright.verifier.rows.claims import Encoding, tensor_claims
from shardwright.verifier.rows.rowproof import prove
from shardwright.verifier.rows.semantics import adjoint, forward
from shardwright.verifier.solver import Premises, refute
from tests.each import each, some
from tests.samples import SAMPLES
from tests.verifier.catalogue import DEGREES, Case, admits, cases
from tests.verifier.mutations.twins import fixed_twins, row_twins


def counterexample(rule: RowRule, case: Case) -> Counterexample | None:
    """The first counterexample among the samples that have the rule's pattern and dtypes."""
    return next(
        (
            found
            for given in case.samples
            if admits(rule, given)
            for degree in DEGREES
            if (found := falsify(rule, given.arrays(1), dict(given.attrs), degree))
        ),
        None,
    )


@each("row", SAMPLES)
def test_every_rule_of_every_row_is_certified(row: str) -> None:
    for case in cases(row):
        proof = prove(case.rule)
        assert proof.certified, f"{case.rule.equation}: {proof.failure}"


@each("row", SAMPLES)
def test_no_rule_is_falsified_at_two_degrees_forward_or_backward(row: str) -> None:
    for case in cases(row):
        assert not (found := counterexample(case.rule, case)), str(found)


def _same_without_gradient(case: Case) -> bool:
    """No gradient flows through any sample, so that R and C are the same layout."""
    row = case.rule.row
    floats = any(
        is_float(dtype) and is_float(ROWS[row].result_dtype(s.dtypes, dict(s.attrs)))
        for s in case.samples
        for dtype in s.dtypes
    )
    return not ROWS[row].differentiable or not floats


def kinds_of_twins(row: str) -> Iterator[tuple[str, RowRule, Case]]:
    """The first wrong twin of each kind: what was done to which kind of rule, whatever the dimension or operand."""
    seen = set[tuple[str, str]]()
    for case in cases(row):
        split = case.rule.factor
        kind = case.rule.choice if split is None else "sum" if split in case.pattern.summed else "split"
        for what, twin in row_twins(case.rule):
            key = (kind, re.sub(r"\d+", "", what))
            if key not in seen:
                seen.add(key)
                yield what, twin, case


@each("row", some(SAMPLES, len(SAMPLES) // 2))
def test_wrong_twins_of_every_kind_are_refuted(row: str) -> None:
    """`make bench-rules` has all of them."""
    for what, twin, case in kinds_of_twins(row):
        proof = prove(twin)
        if proof.certified:  # a true variant: the falsifier must agree
            assert not (found := counterexample(twin, case)), f"{what}: {found}"
            assert "not told its attrs" in what or not case.rule.operands, f"{twin.equation}: {what}"
        elif not (proof.failure and proof.failure.refuted):
            missing = f"{case.rule.name}: {what} is neither proven nor refuted: {proof.failure}"
            assert counterexample(twin, case) or _same_without_gradient(case), missing


@each("row", [row for row in SAMPLES if any(case.pattern.fixed for case in cases(row))])
def test_factors_that_must_stay_whole_are_never_split(row: str) -> None:
    for case in cases(row):
        for what, twin in fixed_twins(row, case.pattern):
            assert not prove(twin).certified, f"{twin.name}: {what}"


@each(
    ("row", "factor"),
    [("softmax", "b"), ("log_softmax", "b"), ("layer_norm", "c"), ("rms_norm", "c"), ("cumsum", "b"), ("amax", "b"),
     ("cross_entropy_sum", "b"), ("sort_values", "b"), ("conv2d", "d"), ("concat", "d"), ("sdpa", "f")],
)  # fmt: skip
def test_splitting_what_must_stay_whole_has_a_concrete_counterexample(row: str, factor: str) -> None:
    """The traps of the trade: softmax, norms and losses over a sharded dimension, concatenation by a plain shard."""
    twins = [(twin, case) for case in cases(row) for what, twin in fixed_twins(row, case.pattern) if what[0] == factor]
    found = next(filter(None, (counterexample(*twin) for twin in twins)))
    assert re.match(rf"{row} \[.*\] by {factor} is false for degree 2: ", str(found))


# ---- single rules, as a person would write them down ----


def rule(row: str, pattern: str, num_operands: int, choice: str) -> RowRule:
    return derive(row, Pattern.parse(pattern, num_operands), parse_choice(choice))


def test_row_parallel_linear_is_proven_from_the_sum_lemmas() -> None:
    proof = prove(rule("linear", "a b, c b -> a c", 2, "b"))
    assert proof.certified
    assert "split-sum" in proof.axioms
    assert "chain-rule" in proof.axioms


def test_linearity_of_a_product_is_proven_but_of_a_convolution_declared() -> None:
    product = prove(rule("linear", "a b, c b -> a c", 2, "P0"))
    assert "additive-sum" in product.axioms
    assert not [a for a in product.axioms if a.startswith("declared")]
    convolution = prove(rule("conv2d", "a (b c) d! e!, (b f) c g! h! -> a (b f) i! j!", 2, "P0"))
    assert "declared: conv2d is linear in [0]" in convolution.axioms


def test_a_refuted_rule_names_the_claim_and_the_sizes() -> None:
    twin = replace(rule("linear", "a b, c b -> a c", 2, "b"), result=rule("linear", "a b, c b -> a c", 2, "R").result)
    failure = prove(twin).failure
    assert failure is not None
    assert str(failure).startswith("forward: terms summed for a result in R: false for k = 2, c = 3, N_a = 5, N_c = 7")


def test_a_copied_operand_whose_gradient_is_not_summed_is_refuted_backward_only() -> None:
    true = rule("linear", "a b, c b -> a c", 2, "a")
    twin = replace(true, operands=(true.operands[0], rule("linear", "a b, c b -> a c", 2, "R").operands[0]))
    failure = prove(twin).failure
    assert failure is not None
    assert failure.claim == "gradient of operand 1: terms summed for a result in R"


def test_vocabulary_parallel_embedding_needs_its_offset() -> None:
    true = rule("embedding", "a b, c -> c b", 2, "a")
    assert prove(true).certified
    failure = prove(replace(true, local=())).failure
    assert failure is not None
    assert failure.claim == "forward: equal positions along a"


def test_questions_about_a_concatenation_do_not_grow_with_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient per operand, and every operand in each of them: a dense block has dozens."""
    asked = list[int]()

    def count(self: Premises, formula: Formula) -> bool:
        asked[-1] += 1
        return imply(self, formula)

    imply = Premises.imply
    monkeypatch.setattr(Premises, "imply", count)
    for num_operands in (2, 4, 20):
        claims._holds.cache_clear()
        rowproof._broken_claim.cache_clear()
        asked.append(0)
        operands = [f"a {letter(2 + i)}! b" for i in range(num_operands)]
        pattern = f"{', '.join(operands)} -> a {letter(2 + num_operands)}! b"
        assert prove(rule("concat", pattern, num_operands, "b")).certified
        terms = 1 + num_operands
        asked[-1] -= terms  # of each, how many terms are summed
    assert asked[0] == asked[1] == asked[2] > 0


def test_attributes_are_proven_by_running_the_rows_own_localize() -> None:
    true = rule("slice", "a (b! c) -> a c", 1, "c")
    assert prove(true).certified
    failure = prove(replace(true, local=())).failure
    assert failure is not None
    assert "attribute start" in failure.claim


def test_a_row_with_unknown_localize_is_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "BY_SIZE", {})
    rowproof._broken_claim.cache_clear()
    failure = prove(rule("slice", "a (b! c) -> a c", 1, "c")).failure
    assert failure is not None
    assert (
        "slice localizes its attributes; say how they follow from sizes in verifier/rows/attributes.py" in failure.claim
    )


def test_a_repeated_factor_is_not_certified() -> None:
    diagonal = Pattern.parse("a a -> a", 1)
    failure = prove(derive("reshape", diagonal, parse_choice("a"))).failure
    assert failure is not None
    assert failure.claim == "a tensor has one factor twice, so that its digits are not free"


def test_the_falsifier_refuses_operands_of_another_pattern() -> None:
    given = SAMPLES["linear"][0]
    with pytest.raises(RuleError, match=r"linear \[a b, c b -> a c\] by a: these operands have the pattern a b c, d c"):
        falsify(rule("linear", "a b, c b -> a c", 2, "a"), given.arrays(), {}, 2)


def test_a_counterexample_prints_its_tensors() -> None:
    given = SAMPLES["linear"][1]
    true = rule("linear", "a b, c b -> a c", 2, "a")
    found = falsify(replace(true, result=true.operands[1]), given.arrays(), {}, 2)
    lines = str(found).splitlines()
    assert (
        lines[0]
        == "linear [a b, c b -> a c] by a is false for degree 2: device 0 (C) has shape [4, 16], expected [8, 16]"
    )
    assert lines[1].startswith("  x0 [8, 12] = ")


@each("row", ["linear", "reshape", "sdpa", "conv2d", "embedding"])
def test_no_claim_holds_because_its_hypotheses_contradict_each_other(row: str) -> None:
    for case in cases(row):
        for term in (forward(case.rule), *(adjoint(case.rule, j) for j in range(len(case.rule.operands)))):
            encoding = Encoding(term.pattern, case.rule.factor)
            for number, (dims, placement) in enumerate(zip(term.pattern.operands, term.operands, strict=True)):
                list(tensor_claims(encoding, str(number), dims, placement))
            assert refute("nothing", z3.BoolVal(False), encoding.given, encoding.sizes).model is not None
