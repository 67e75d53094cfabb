"""The mutation test of the prover: nothing false is certified. A sample; `make bench-rules` runs all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from shardwright.generation import generate_one
from shardwright.pcg.offers import parse_choice
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.generator.sources import ContextSource, sources
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.decompositions import DECOMPOSITIONS, MAXIMUM
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, derive
from shardwright.substitutions.rules.rules import Rule
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.lemmas import LEMMAS, Lemma
from shardwright.verifier.logic import z3
from shardwright.verifier.proof import Proof
from tests.each import each
from tests.samples import SAMPLES
from tests.verifier.catalogue import MORE, admits, cases, pattern_for
from tests.verifier.mutations import mutation
from tests.verifier.mutations.lemmatwins import judge_lemma, lemma_twins
from tests.verifier.mutations.mutation import Mutant, adjoint_mutants, judged, judgement, mutants, sweep
from tests.verifier.mutations.termtwins import guard_twins
from tests.verifier.mutations.twins import placement_twins, row_twins
from tests.verifier.placement.derivation import AXIOMS


def samples(rule: RowRule) -> Iterable[tuple[list[Any], dict[str, Any]]]:
    """The samples of a row that have the rule's pattern and dtypes."""
    for given in (*SAMPLES[rule.row], *MORE.get(rule.row, ())):
        if str(pattern_for(rule.row, given)) == rule.pattern and admits(rule, given):
            yield given.arrays(1), dict(given.attrs)


IN_PARTS = {rule.name for rule in (*DECOMPOSITIONS, *MAXIMUM)}


@pytest.mark.parametrize("part", range(2))
def test_no_mutant_of_a_serial_rule_or_a_step_is_certified_if_it_is_false(part: int) -> None:
    rules = [rule for rule in CATALOGUE.values() if rule.name not in IN_PARTS]
    found = sweep([*rules, *STEP_RULES.values()], start=part, every=24)
    assert found.num_mutants > 30
    assert not found.wrong
    assert not found.unknown


def test_no_mutant_of_an_operator_in_parts_is_certified_if_it_is_false() -> None:
    """Some are unknown: what is detached may be any number, so many mutations of a maximum are true."""
    found = sweep(DECOMPOSITIONS, start=1, every=40)
    assert found.num_mutants > 20
    assert not found.wrong
    assert found.total("unknown") < found.num_mutants / 4


@each("row", ["linear", "embedding", "slice", "softmax", "dropout", "layer_norm"])
def test_no_mutant_of_a_row_rule_is_certified_if_it_is_false(row: str) -> None:
    found = sweep([case.rule for case in cases(row)], every=5, samples=samples)
    assert found.num_mutants > 5
    assert not found.wrong


@each("source", sources()[4::20], ids=lambda source: source.name)
def test_no_mutant_of_a_generated_rule_is_certified_if_it_is_false(source: ContextSource) -> None:
    """A sample: a few mutants of every twentieth context of the generator."""
    found = sweep(generate_one(source.function, source.context, 2, 0, lambda counts: None), every=17)
    assert found.num_mutants
    assert not found.wrong


def test_a_wrong_axiom_is_caught_by_its_own_proof() -> None:
    found = sweep([CATALOGUE[name] for name in AXIOMS], start=3, every=20)
    assert found.num_mutants > 15
    assert not found.wrong
    assert not found.unknown
    assert found.total("type") + found.total("z3") + found.total("counterexample") > found.total("true")


def test_every_wrong_adjoint_is_ill_typed() -> None:
    found = list(adjoint_mutants())
    assert len(found) == 12
    assert {mutant.outcome for mutant in found} == {"type"}
    assert found[0].reason == "partition steps from R along its axis, got S(0); insert the step that leads there"


def test_no_wrong_prover_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "prove", lambda rule: Proof())
    found = sweep([CATALOGUE["linear_of_sum"], STEP_RULES["reduce_scatter"]])
    assert found.wrong
    assert any("is false for" in mutant.reason for mutant in found.wrong)


FALSE = equation("wrong", {"x": "*b i", "w": "o i", "c": "o"}, "add(linear(x, w), c)", "linear(x, add(w, c))")
SQUARES = equation("wrong", {"x": "*b", "y": "*b"}, "mul(add(x, y), add(x, y))", "add(mul(x, x), mul(y, y))")


@pytest.mark.parametrize(
    ("rule", "outcomes"),
    [
        (FALSE, {"type", "z3"}),
        (SQUARES, {"z3", "counterexample"}),
        (equation("true", {"x": "*b", "y": "*b"}, "add(x, y)", "add(y, x)"), {"true"}),
        (derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b")), {"true"}),
    ],
    ids=["ill-typed", "false", "true", "a row"],
)
def test_a_rule_comes_to_one_outcome(rule: Rule, outcomes: set[str]) -> None:
    assert judgement(rule)[0] in outcomes


def test_a_rule_that_no_sizes_fit_cannot_be_falsified() -> None:
    never = equation("never", {"x": "n"}, "neg(x)", "x", guard=("n < 0",))
    outcome, why = mutation.falsified(never)
    assert (outcome, why) == ("not run", "rule 'never': no small sizes satisfy its left side and guard")


def test_a_certified_rule_that_no_operands_run_is_counted_apart() -> None:
    """Whatever is certified and was run is called true; the rest is not."""
    softmax = derive("softmax", Pattern.parse("a b! -> a b!", 1), parse_choice("a"))
    assert judgement(softmax)[0] == "not run"
    assert "no operands of the pattern 'a b! -> a b!' that a can split are at hand" in judgement(softmax)[1]
    found = mutation.Sweep()
    found.add(judged(Mutant("row", softmax.name, "nothing", softmax)))
    found.merge(found)
    assert found.total("not run") == len(found.not_run) == 2
    assert not found.true


def test_a_sweep_counts_by_form_and_keeps_what_needs_explaining() -> None:
    rules = [CATALOGUE["add_commutes"], STEP_RULES["all_reduce"]]
    found = sweep(rules)
    assert set(found.counts) == {"serial", "steps"}
    assert found.num_mutants == len(list(mutants(rules))) == sum(map(found.total, mutation.OUTCOMES))
    assert len(found.true) == found.total("true")
    merged = mutation.Sweep()
    merged.merge(found)
    merged.merge(found)
    assert merged.num_mutants == 2 * found.num_mutants


def test_mutants_are_distinct_and_none_is_a_rule() -> None:
    rules = [CATALOGUE["add_commutes"], CATALOGUE["sub_as_add"]]
    found = [mutant.rule.hash for mutant in mutants(rules)]
    assert len(found) == len(set(found))
    assert not {rule.hash for rule in rules} & set(found)


# ---- placement rules ----

BIASED = equation(
    "bias_after_the_sum",
    {"x": "m i", "w": "o i", "c": "o"},
    "add(linear(combine(x, axis=a), combine(w, axis=a)), c)",
    "add(reduce(linear(x, w), axis=a), c)",
    axes=("a", "b"),
    layouts={"x": ["S(1)", "R"], "w": ["S(1)", "R"], "c": ["R", "R"]},
)


def twins_of(rule: Equation) -> dict[str, str]:
    return {twin.equation: what for what, twin in placement_twins(rule)}


@each(
    ("wrong", "what"),
    [
        ("add(linear(x, w), c)", "right: reduce dropped"),
        ("reduce(add(linear(x, w), c), axis=a)", "right: reduce moved behind add"),
        ("add(linear(x, w), reduce(c, axis=a))", "right: reduce moved from operand 0 to 1"),
        ("add(linear(reduce(x, axis=a), w), c)", "right: reduce moved to operand 0 of linear"),
        ("add(replicate(linear(x, w), axis=a), c)", "right: reduce → its adjoint replicate"),
        ("add(combine(linear(x, w), axis=a), c)", "right: reduce → combine"),
        ("add(partition(linear(x, w), axis=a, dim=0), c)", "right: reduce → partition"),
        ("add(reduce(linear(x, w), axis=b), c)", "right: reduce along b"),
        ("sub(reduce(linear(x, w), axis=a), c)", "right: add → sub"),
    ],
)
def test_a_placement_rule_is_mutated_in_every_way(wrong: str, what: str) -> None:
    found = {str(twin.right[0]): said for said, twin in placement_twins(BIASED) if twin.left == BIASED.left}
    assert found[wrong] == what


def test_layouts_and_axes_are_mutated() -> None:
    found = {what for what, _ in placement_twins(BIASED)}
    assert {"x in R instead of S(1)", "x in C instead of S(1)", "x in P instead of S(1)", "x in S(0) instead of S(1)",
            "c in C instead of R", "c in S(0) instead of R", "axes swapped in the layouts",
            "left: combine dropped"} <= found  # fmt: skip


def test_partitions_are_mutated_in_dimension_and_blocks() -> None:
    rule = equation("cut", {"x": "m i"}, "relu(partition(x, axis=a, dim=1))", "partition(relu(x), axis=a, dim=1)",
                    axes=("a",), layouts={"x": ["R"]})  # fmt: skip
    found = {what for what, _ in placement_twins(rule)}
    assert {"right: partition of dim 1 + 1", "right: partition of dim 0", "right: partition in 2 blocks"} <= found


def test_guards_are_mutated_in_every_way() -> None:
    rule = equation("cut", {"x": "m i"}, "relu(partition(x, axis=a, dim=1))", "partition(relu(x), axis=a, dim=1)",
                    ("i % a == 0", "m < i", "m <= 8"), axes=("a",), layouts={"x": ["R"]})  # fmt: skip
    found = {what for what, _ in guard_twins(rule)}
    assert found == {
        "without guard i % a == 0", "guard i % a == 0 → m % a == 0", "guard i % a == 0 → a % i == 0",
        "guard i % a == 0 → i % a == 1", "guard i % a == 0 → i * 2 % a == 0",
        "without guard m < i", "guard m < i → m <= i + 0", "guard m < i → i <= m",
        "without guard m <= 8", "guard m <= 8 → m <= 8 + 1", "guard m <= 8 → 8 <= m",
    }  # fmt: skip


@pytest.mark.parametrize("what", ["m % a == 0", "a % i == 0", "i * 2 % a == 0", "i % a == 1"])
def test_a_divisibility_that_is_not_the_one_that_is_needed_does_not_do(what: str) -> None:
    rule = equation("cut", {"x": "m i"}, "relu(partition(x, axis=a, dim=1))", "partition(relu(x), axis=a, dim=1)",
                    ("i % a == 0",), axes=("a",), layouts={"x": ["R"]})  # fmt: skip
    twins = {str(twin.guard[-1]): twin for _, twin in guard_twins(rule) if twin.guard}
    assert judgement(rule) == ("true", "")
    assert judgement(twins[what])[0] == "z3"


def test_the_guard_of_a_row_rule_is_mutated() -> None:
    found = {what for what, _ in row_twins(derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b")))}
    assert {"without guard 'k | b'", "guard 'k | b' → 'k | a'", "guard 'k | b' → 'k | c'"} <= found
    partial = derive("add", Pattern.parse("a, a -> a", 2), parse_choice("P0,1"))
    assert "guard 'additive 0,1' → 'additive 0'" in {what for what, _ in row_twins(partial)}


# ---- lemmas ----


@each("name", LEMMAS)
def test_every_mutated_lemma_fails_or_is_true(name: str) -> None:
    outcomes = [judge_lemma(twin)[0] for twin in lemma_twins(LEMMAS[name])]
    assert outcomes
    assert set(outcomes) <= {"z3", "counterexample", "true", "unknown"}


def test_a_lemma_that_z3_got_wrong_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.verifier.mutations import lemmatwins

    n, m = z3.Ints("n m")
    wrong = Lemma("wrong", "n < m", lambda: [([n >= 0, m >= 0], n <= m)])
    monkeypatch.setattr(lemmatwins, "is_valid", lambda goal, given: True)
    assert "wrong" in {judge_lemma(twin)[0] for twin in lemma_twins(wrong)}


def test_a_judged_mutant_says_why() -> None:
    found = judged(Mutant("serial", "bias", "moved", FALSE))
    assert found.outcome in ("type", "z3")
    assert found.reason


def test_indices_are_the_same_replicated_and_copied() -> None:
    """They carry no gradient: a table that is split by vocabulary reads either."""
    rule = equation(
        "lookup", {"x": "m i", "y": "o"},
        "embedding(partition(reduce(x, axis=a), axis=a, dim=0), y, padding_idx=pad, offset=0)",
        "embedding(x, y, padding_idx=pad, offset=0)",
        axes=("a",), layouts={"x": ["P"], "y": ["R"]}, guard=("m % a == 0",),
    )  # fmt: skip
    assert judgement(rule) == ("true", "")


@pytest.mark.parametrize(("slow", "outcome", "why"), [
    ("prove", "unknown", "no proof within 0.2 s"),
    ("_counterexample", "not run", "not falsified within 0.2 s"),
    ("_wrong_gradient", "not run", "gradients not compared within 0.2 s"),
])  # fmt: skip
def test_a_mutant_that_takes_for_ever_is_given_up(
    monkeypatch: pytest.MonkeyPatch, slow: str, outcome: str, why: str
) -> None:
    def never(*arguments: object) -> None:
        while True:
            pass

    monkeypatch.setattr(mutation, "LIMIT_S", 0.2)
    monkeypatch.setattr(mutation, "prove", lambda rule: Proof(("proven",)))
    monkeypatch.setattr(mutation, "_counterexample", lambda rule, samples: "")
    monkeypatch.setattr(mutation, slow, never)
    rule = equation("sum_of_negs", {"x": "m"}, "reduce(neg(x), axis=a)", "neg(reduce(x, axis=a))", axes=("a",),
                    layouts={"x": ["P"]})  # fmt: skip
    found, reason = judgement(rule)
    assert (found, reason.startswith(why)) == (outcome, True)
