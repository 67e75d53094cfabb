"""The judgement of one rule ends with a verdict, whatever the rule is."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from shardwright.pcg.choice import Split
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, derive
from shardwright.substitutions.rules.rules import Rule
from shardwright.substitutions.rules.steps import STEP_RULES, steps
from shardwright.substitutions.rules.wellformed import equation_from_json
from shardwright.verifier import judge as module
from shardwright.verifier.falsifiers.exactness import inexact
from shardwright.verifier.falsifiers.mismatch import Mismatch
from shardwright.verifier.judge import RuleVerdict, judge
from shardwright.verifier.proof import Proof
from tests.each import each

LINEAR = derive("linear", Pattern.parse("a b, c b -> a c", 2), Split("b"))
PLACED = equation(
    "split_the_sum", {"x": "m i", "w": "o i"}, "linear(combine(x, axis=a), combine(w, axis=a))",
    "reduce(linear(x, w), axis=a)", guard=("i % a == 0",), axes=("a",), layouts={"x": ("S(1)",), "w": ("S(1)",)},
)  # fmt: skip


@pytest.mark.parametrize(
    "rule", [LINEAR, PLACED, CATALOGUE["linear_of_sum"], STEP_RULES["all_to_all"]], ids=lambda r: r.name
)
def test_true_rules_are_certified(rule: Rule) -> None:
    found = judge(rule)
    assert (found.outcome, found.reason) == ("certified", "")
    assert found.certificate is not None
    assert found.certificate.rule == rule.hash
    assert found.time_s > 0


WRONG = [
    (equation("swapped", {"x": "*b", "y": "*b"}, "sub(x, y)", "sub(y, x)"), "swapped is false for "),
    (steps("never", {"a": "P"}, "reduce(a); replicate(a)", "reduce(a)"), "a type other than"),
    (RowRule("relu", "a b -> a b", Split("a"), (Placement.parse("P"),), Placement.parse("P"), ("k | a",)), "relu"),
    (replace(LINEAR, result=Placement("R")), "is false for degree 2"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "message"), WRONG, ids=[rule.name for rule, _ in WRONG])
def test_false_rules_are_refuted(rule: Rule, message: str) -> None:
    found = judge(rule, explain=False)
    assert found.outcome == "refuted"
    assert found.certificate is None
    assert message in found.reason


def test_counterexamples_are_small_tensors() -> None:
    lines = judge(WRONG[0][0]).reason.splitlines()
    assert [line.split()[0] for line in lines] == ["swapped", "x", "y", "left", "right"]


def test_a_rule_that_sums_in_another_order_does_not_only_move_data() -> None:
    found = judge(equation_from_json({**CATALOGUE["linear_of_sum"].to_json(), "moves": True}))
    assert found.outcome == "refuted"
    assert found.reason.startswith("field 'moves': not bit for bit: linear_of_sum is false for ")


def test_a_counterexample_to_a_gradient_says_so() -> None:
    found = judge(equation("detached", {"x": "*b"}, "neg(x)", "neg(detach(x))"), explain=False)
    assert found.outcome == "refuted"
    assert found.reason.splitlines()[-1].strip() == ("the values are equal; these are derivatives, which are not")


def test_a_placement_rule_that_says_that_it_only_moves_data_is_held_to_it() -> None:
    found = judge(replace(PLACED, moves=True))
    assert (found.outcome, found.reason) == ("refuted", "field 'moves': reduce adds up what the devices hold")


def test_a_placement_rule_that_regroups_sums_is_held_to_what_it_says() -> None:
    def rule(name: str, right: str) -> Equation:
        left = "add(add(combine(x, axis=a), combine(y, axis=a)), combine(z, axis=a))"
        return equation(name, dict.fromkeys("xyz", "m i"), left, f"combine({right}, axis=a)", guard=("i % a == 0",),
                        axes=("a",), layouts={x: ["S(1)"] for x in "xyz"}, moves=True)  # fmt: skip

    found = judge(rule("regrouped", "add(x, add(y, z))"))
    assert found.outcome == "refuted"
    assert found.reason.startswith("field 'moves': not bit for bit: regrouped is false for ")
    assert judge(rule("delayed", "add(add(x, y), z)")).outcome == "certified"


@each("rule", [r for r in CATALOGUE.values() if r.moves], ids=lambda rule: rule.name)
def test_rules_that_only_move_data_are_exact(rule: Equation) -> None:
    assert inexact(rule) is None


def test_a_rule_that_sums_does_not_only_move_data() -> None:
    assert inexact(CATALOGUE["linear_of_sum"]) is not None


def test_large_tensors_are_cut_to_one_line() -> None:
    data = np.arange(1000.0).reshape(10, 5, 20)
    text = str(Mismatch("rule", {}, {"x": data}, data, data))
    assert max(map(len, text.splitlines())) < 250
    assert "  x [10, 5, 20] = [ 0.  1.  2.  3." in text


def test_a_false_equation_that_a_guard_mends_says_so() -> None:
    data = CATALOGUE["rows_of_concat"].to_json()
    found = judge(equation_from_json({**data, "guard": ["s <= t"]}))
    assert (found.outcome, found.hint) == ("refuted", "t <= i")
    assert judge(equation_from_json({**data, "guard": ["s <= t"]}), explain=False).hint == ""
    assert judge(WRONG[0][0]).hint == ""
    assert judge(equation_from_json({**PLACED.to_json(), "guard": []})).hint == "i % a == 0"


def test_a_row_rule_of_a_pattern_that_its_row_never_has_is_not_certified() -> None:
    found = judge(RowRule("softmax", "a b -> a b", Split("b"), LINEAR.operands[:1], LINEAR.operands[0], ("k | b",)))
    assert found == RuleVerdict("unknown", None, "no softmax is known to have the pattern 'a b -> a b'")


def test_the_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(rule: Rule) -> None:
        while True:
            pass

    monkeypatch.setattr(module, "prove", slow)
    monkeypatch.setattr(module, "_counterexample", slow)
    start = time.process_time()
    found = judge(LINEAR, limit_s=0.2)
    assert (found.outcome, found.reason) == ("unknown", "no proof within 0.2 s")
    assert 0.25 < time.process_time() - start < 1, "the limit, for a proof and for a counterexample"
    assert not found.final, "more time may prove it"


def test_a_limit_is_of_work_and_not_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for other processes is not given up earlier for that."""

    def waiting(rule: Rule) -> Proof:
        time.sleep(0.4)
        return Proof()

    monkeypatch.setattr(module, "prove", waiting)
    assert judge(LINEAR, limit_s=0.2).outcome == "certified"


def test_a_prover_that_stumbles_certifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(rule: Rule) -> None:
        raise KeyError("x")

    monkeypatch.setattr(module, "prove", stumble)
    monkeypatch.setattr(module, "_counterexample", stumble)
    found = judge(LINEAR)
    assert (found.outcome, found.reason) == ("unknown", "the prover failed: KeyError: 'x'")


def test_other_threads_judge_without_a_limit() -> None:
    found: list[RuleVerdict] = []
    thread = threading.Thread(target=lambda: found.append(judge(STEP_RULES["reduce_scatter"])))
    thread.start()
    thread.join()
    assert [verdict.outcome for verdict in found] == ["certified"]


@each(
    "rule",
    [
        equation("many_terms", {"x": "*b"}, "add(" * 40 + "x" + ", x)" * 40, "x"),
        equation("wide", {"x": "*b"}, "neg(permute(x, dims=iota(10)))", "neg(x)"),
        equation("far", {"x": "n"}, "slice(x, dim=0, start=2147483647, stop=2147483647, step=1)", "neg(x)"),
        equation("no_dim", {"x": "n"}, "sum(x, dims=(7,), keepdim=False)", "neg(x)"),
        equation("nothing_fits", {"x": "n"}, "neg(x)", "x", guard=("n < 0",)),
        equation("text", {"x": "n"}, "neg(x)", "x", guard=("'a' < n",)),
        equation("big_shape", {"x": "n"}, "reshape(x, shape=(n * n * n * n * n * n * n * n * n,))", "x"),
    ],
    ids=lambda rule: rule.name,
)
def test_odd_rules_are_judged(rule: Rule) -> None:
    assert judge(rule, limit_s=5, explain=False).outcome in ("refuted", "unknown", "malformed")
