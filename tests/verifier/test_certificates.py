from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pcg.graph import Node, make_attrs
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.types import TensorType
from shardwright.substitutions.equations import equation
from shardwright.substitutions.rules.catalogue import CATALOGUE, SEARCHED
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import derive
from shardwright.substitutions.rules.rules import Rule, kind_of
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.substitutions.terms import parse_term
from shardwright.verifier import choices
from shardwright.verifier.catalogue import Catalogue
from shardwright.verifier.certificates import PROOFS, SCOPE, Certificate, certify
from shardwright.verifier.choices import Certified, rule_of
from shardwright.verifier.judge import judge
from shardwright.verifier.solver import version
from tests.each import each

LINEAR = derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b"))
PLACED = equation(
    "split_the_sum", {"x": "m i", "w": "o i"}, "linear(combine(x, axis=a), combine(w, axis=a))",
    "reduce(linear(x, w), axis=a)", guard=("i % a == 0",), axes=("a",), layouts={"x": ("S(1)",), "w": ("S(1)",)},
)  # fmt: skip


def tensor(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape, dtype, (), dtype.startswith("float"))


def node(op: str, **attrs: object) -> Node:
    return Node("n", op, (), make_attrs(**attrs))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def certified() -> Certified:
    return Certified(Catalogue())


# ---- certificates ----


def test_a_certificate_names_rule_axioms_guard_scope_and_solver() -> None:
    found = certify(LINEAR)
    assert isinstance(found, Certificate)
    assert (found.rule, found.name) == (LINEAR.hash, "linear [a b, c b -> a c] by b")
    assert {"digits", "split-sum", "chain-rule"} <= set(found.axioms)
    assert found.guard == ("k | b", "numeric")
    assert (found.scope, found.solver) == (SCOPE, version())


@pytest.mark.parametrize(
    ("rule", "proofs"),
    [(LINEAR, 1), (STEP_RULES["reduce_scatter"], 1), (CATALOGUE["linear_of_sum"], 2), (PLACED, 2)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_certificate_names_every_proof_that_there_is_for_rules_of_its_kind(rule: Rule, proofs: int) -> None:
    found = certify(rule)
    assert isinstance(found, Certificate)
    assert found.proofs == PROOFS[kind_of(rule)]
    assert len(found.proofs) == proofs


@pytest.mark.parametrize(
    ("rule", "second", "message"),
    [
        (
            CATALOGUE["linear_of_sum"],
            "reals.realproof.equal_in_reals",
            "proven by normal forms, by real arithmetic: not proven",
        ),
        (
            PLACED,
            "placement.denotation.denotes_equal",
            "proven by typing and erasure, by typed denotation: not proven",
        ),
    ],
    ids=["serial", "placement"],
)
def test_what_one_proof_alone_proves_is_unknown(
    rule: Rule, second: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two it is."""
    monkeypatch.setattr(f"shardwright.verifier.{second}", lambda *given: False)
    assert message in str(certify(rule))
    found = judge(rule)
    assert (found.outcome, found.certificate) == ("unknown", None)
    assert found.reason == message


def test_erasures_that_only_normal_forms_prove_equal_make_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second proof of a placement rule rests on that of the serial rule that is its erasure."""
    monkeypatch.setattr("shardwright.verifier.placement.denotation.equal_in_reals", lambda *given: False)
    merged = replace(PLACED, name="merged", right=(parse_term("reduce(matmul(x, permute(w, dims=(1, 0))), axis=a)"),))
    assert "by typed denotation: not proven" in str(certify(merged))
    monkeypatch.undo()
    assert isinstance(certify(merged), Certificate)


def test_a_warm_store_answers_without_loading_z3_or_torch() -> None:
    code = (
        "import sys\n"
        "from shardwright.verifier.choices import Certified\n"
        "certified = Certified()\n"
        "assert certified.equations() and certified.steps()\n"
        "assert 'z3' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---- choices ----


def test_a_linear_layer_has_its_four_splits_and_its_pass_throughs(certified: Certified) -> None:
    choices = certified(node("linear"), [tensor(8, 12, 16), tensor(20, 16)])
    assert choices == {"R", "C", "P0", "P1", "_0", "_1", "i", "o"}


def test_every_choice_has_a_certificate_that_is_remembered(certified: Certified) -> None:
    operands = [tensor(8, 16), tensor(20, 16)]
    found = certified.certificate(node("linear"), operands, parse_choice("i"))
    assert found is not None
    assert found.rule == rule_of(node("linear"), operands, parse_choice("i")).hash
    assert certified.used[found.rule] == found


def test_sizes_and_names_do_not_matter(certified: Certified) -> None:
    small, large = ([tensor(n, 2 * n), tensor(3 * n, 2 * n)] for n in (4, 512))
    assert rule_of(node("linear"), small, parse_choice("o")) == rule_of(node("linear"), large, parse_choice("o"))


@each(
    ("op", "attrs", "operands", "choice", "reason"),
    [
        ("cast", {"dtype": "int64"}, [tensor(8)], "P0", "guard 'additive 0': bools or rounding among the dtypes"),
        ("expand", {"shape": (4, 8)}, [tensor(8, dtype="bool")], "P0",
         "guard 'additive 0': bools or rounding among the dtypes"),
        ("matmul", {}, [tensor(4, 8, dtype="bool"), tensor(8, 4, dtype="bool")], "k",
         "guard 'numeric': the result is of bools, which are not summed"),
        ("relu", {}, [tensor(0, 4)], "_1", "guard 'k | b': a factor has size 0"),
        ("softmax", {"dim": 1}, [tensor(4, 8)], "d1",
         "softmax does not offer the choice 'd1'; it has ['C', 'R', 'd0']"),
        ("opaque", {}, [tensor(4)], "x", "opaque: an operator without a row runs on whole tensors only"),
    ],
)  # fmt: skip
def test_what_is_not_certified_has_a_reason(
    certified: Certified, op: str, attrs: dict[str, object], operands: list[TensorType], choice: str, reason: str
) -> None:
    assert choice not in certified(node(op, **attrs), operands)
    assert certified.reason(node(op, **attrs), operands, parse_choice(choice)) == reason
    assert certified.certificate(node(op, **attrs), operands, parse_choice(choice)) is None


def test_what_is_certified_has_no_reason_against_it(certified: Certified) -> None:
    assert certified.reason(node("softmax", dim=1), [tensor(4, 8)], parse_choice("d0")) is None
    assert certified.reason(node("opaque"), [tensor(4)], parse_choice("R")) is None


@each(
    ("op", "attrs", "operands", "choice"),
    [
        ("linear", {}, [tensor(8, 16), tensor(48, 16)], "o/3"),
        ("add", {}, [tensor(8, 48), tensor(48)], "_1/3"),
        ("slice", {"dim": 1, "start": 24, "stop": 48, "step": 1}, [tensor(8, 48)], "o/3"),
        ("reshape", {"shape": (8, 6, 8)}, [tensor(8, 48)], "b/2"),
        ("conv2d", {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 4},
         [tensor(2, 8, 6, 6), tensor(12, 2, 3, 3)], "g/2"),
    ],
)  # fmt: skip
def test_splits_within_blocks_are_proven_when_asked_for(
    certified: Certified, op: str, attrs: dict[str, object], operands: list[TensorType], choice: str
) -> None:
    assert choice not in certified(node(op, **attrs), operands)
    assert certified.reason(node(op, **attrs), operands, parse_choice(choice)) is None
    assert choice in certified(node(op, **attrs), operands, [parse_choice(choice)])
    found = certified.certificate(node(op, **attrs), operands, parse_choice(choice))
    assert found is not None
    assert found.rule == rule_of(node(op, **attrs), operands, parse_choice(choice)).hash


@each(
    ("op", "attrs", "operands", "choice", "reason"),
    [
        ("linear", {}, [tensor(8, 16), tensor(48, 16)], "o/5",
         "factor 'o' has size 48, which does not fall into 5 blocks"),
        ("linear", {}, [tensor(8, 16), tensor(48, 16)], "z/3", "linear cannot be split along 'z/3'"),
        ("softmax", {"dim": 1}, [tensor(4, 8)], "d1/2", "softmax cannot be split along"),
        ("embedding", {"padding_idx": None}, [tensor(8, 4), tensor(3, dtype="int64")], "v/2",
         "embedding needs consecutive parts; it is not split in blocks"),
        ("matmul", {}, [tensor(4, 8, dtype="bool"), tensor(8, 4, dtype="bool")], "k/2",
         "guard 'numeric': the result is of bools, which are not summed"),
    ],
)  # fmt: skip
def test_splits_within_blocks_that_are_not_certified_have_a_reason(
    certified: Certified, op: str, attrs: dict[str, object], operands: list[TensorType], choice: str, reason: str
) -> None:
    assert choice not in certified(node(op, **attrs), operands, [parse_choice(choice)])
    assert reason in str(certified.reason(node(op, **attrs), operands, parse_choice(choice)))


def test_an_operator_without_a_row_runs_replicated(certified: Certified) -> None:
    assert certified(node("opaque"), [tensor(4)]) == {"R"}


def test_a_rule_that_fails_its_proof_never_becomes_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "certify", lambda rule: "made to fail")
    certified = Certified(Catalogue())
    assert certified(node("relu"), [tensor(4)]) == frozenset()
    assert certified.reason(node("relu"), [tensor(4)], parse_choice("R")) == "made to fail"
    assert certified.equations() == ()
    assert certified.steps() == ()


def test_the_search_gets_rules_by_name(certified: Certified) -> None:
    assert [rule.name for rule in certified.equations(["linear_of_sum"])] == ["linear_of_sum"]
    assert {rule.name for rule in certified.equations()} == set(SEARCHED)
    assert {rule.name for rule in certified.steps()} == set(STEP_RULES)
