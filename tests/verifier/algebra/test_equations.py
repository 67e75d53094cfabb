"""Algebraic rules: proven twice, not falsified; and their wrong twins: refuted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.decompositions import DECOMPOSITIONS, MAXIMUM
from shardwright.substitutions.terms import parse_term
from shardwright.verifier.algebra.serialproof import prove_equation
from shardwright.verifier.certificates import prove
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from tests.each import each, some
from tests.verifier.mutations.mutation import falsified
from tests.verifier.mutations.twins import equation_twins
from tests.verifier.placement.derivation import AXIOMS, INDEX_ONLY, derives

DERIVED = [name for name in CATALOGUE if name not in (*AXIOMS, *INDEX_ONLY)]
IN_PARTS = [rule.name for rule in (*DECOMPOSITIONS, *MAXIMUM)]
ROW = {"x": "*b i", "w": "o i"}


@each("name", CATALOGUE)
def test_every_rule_is_proven_by_index_semantics(name: str) -> None:
    assert prove_equation(CATALOGUE[name]) is None


@each("name", CATALOGUE)
def test_no_rule_is_falsified_on_small_tensors(name: str) -> None:
    assert falsify_equation(CATALOGUE[name], trials=20) is None


@each("name", DERIVED)
def test_every_rule_that_is_no_axiom_follows_from_the_axioms(name: str) -> None:
    """The two encodings agree: an audit of each by the other."""
    assert derives(CATALOGUE[name])


@each("name", [name for name in CATALOGUE if name not in IN_PARTS])
def test_every_wrong_twin_is_refuted_with_a_counterexample(name: str) -> None:
    for what, twin in some(equation_twins(CATALOGUE[name]), 5):
        (_, failure), (outcome, found) = prove(twin), falsified(twin)
        if failure is None:  # a true variant, as x + y for y + x
            assert outcome == "true", f"{what}: certified, but {found}"
        else:  # numbers that satisfy another guard may be too few to be found at random
            refuted = outcome in ("type", "counterexample") or ("guard" in what and failure.refuted)
            assert refuted, f"{twin.equation} ({what}): neither proven nor refuted"


@each("name", [name for name in IN_PARTS if not name.endswith("usual_scale")])
def test_no_wrong_twin_of_a_decomposition_is_certified(name: str) -> None:
    """Most are refuted. What is left changes how a maximum is taken whose value does not matter.

    A sample of each rule's; `make bench-rules` has all of them.
    """
    twins = some(equation_twins(CATALOGUE[name]), 15)
    false = [twin for _, twin in twins if falsified(twin)[0] in ("type", "counterexample")]
    assert len(false) >= 0.6 * len(twins)
    certified = [twin.equation for twin in false if prove(twin).failure is None]
    assert not certified


@pytest.mark.parametrize("name", ["softmax_in_parts", "cross_entropy_in_parts"])
def test_a_maximum_that_has_a_gradient_is_another_rule(name: str) -> None:
    """With one of two equal maxima detached, values agree and gradients do not."""
    true = CATALOGUE[name]
    (right,) = true.right
    text = str(right)
    at = text.index("detach(x)")
    wrong = replace(true, right=(parse_term(text[:at] + "x" + text[at + len("detach(x)") :]),))
    assert prove_equation(wrong) is not None
    assert falsify_equation(wrong, trials=20) is not None


@pytest.mark.parametrize("name", ["fuse_two_linears", "linear_by_sum", "sum_of_muls"])
def test_no_false_twin_follows_from_the_axioms(name: str) -> None:
    for what, twin in equation_twins(CATALOGUE[name]):
        if falsify_equation(twin, trials=12) is not None:
            assert not derives(twin), f"{twin.equation} ({what}) is false"


WRONG = [
    ("reduce_bias", {"x": "*b i", "w": "o i", "c": "o"}, "add(linear(x, w), c)", "linear(x, add(w, c))"),
    ("square_of_sum", {"x": "*b", "y": "*b"}, "mul(add(x, y), add(x, y))", "add(mul(x, x), mul(y, y))"),
    ("relu_of_sum", {"x": "*b", "y": "*b"}, "relu(add(x, y))", "add(relu(x), relu(y))"),
    ("transposed_twice", {"x": "n m"}, "permute(x, dims=(1, 0))", "x"),
    ("first_half", {"x": "*b i", "y": "*b j"},
     "slice(concat(x, y, dim=len(b)), dim=len(b), start=0, stop=s, step=1)", "x"),
]  # fmt: skip


@each(("name", "variables", "left", "right"), WRONG)
def test_well_known_mistakes_are_refuted(name: str, variables: dict[str, str], left: str, right: str) -> None:
    wrong = equation(name, variables, left, right)
    assert prove_equation(wrong) is not None
    assert falsify_equation(wrong, trials=20) is not None


def test_a_guard_on_ranks_is_needed_and_found() -> None:
    """Without a leading dimension, x wᵀ is no matrix product: the falsifier found this one."""
    true = CATALOGUE["linear_as_matmul"]
    wrong = Equation("unguarded", true.variables, true.left, true.right)
    assert prove_equation(wrong) is not None
    assert "b = ()" in str(falsify_equation(wrong, trials=20))


def test_a_mismatch_prints_its_tensors() -> None:
    found = falsify_equation(equation("wrong", {"x": "n"}, "neg(x)", "x"), seed=1)
    assert found is not None
    first, tensor, left, right = str(found).splitlines()
    assert first.startswith("wrong is false for n = ")
    assert tensor.startswith("  x [")
    assert left.startswith("  left [")
    assert right.startswith("  right = ")


def test_a_rule_beyond_the_index_semantics_is_unknown_not_certified() -> None:
    failure = prove_equation(equation("round", {"x": "*b i"}, "ceil(x)", "ceil(x)"))
    assert failure is not None
    assert (
        str(failure)
        == "ceil has no index semantics for algebraic rules; add them in verifier/algebra/elements.py: not proven"
    )
    assert not failure.refuted


def test_a_rule_that_no_small_sizes_fit_cannot_be_falsified() -> None:
    never = equation("never", {"x": "n"}, "neg(x)", "x", guard=("n < 0",))
    with pytest.raises(RuleError, match="rule 'never': no small sizes satisfy its left side and guard"):
        falsify_equation(never)


CUT = "slice(x, dim=len(b), start={0}, stop=i, step=1)"


@each(
    ("left", "right", "guard", "message"),
    [
        ("linear(x, w)", "linear(w, x)", (), "root 0: dimension 0 is a splice on one side only"),
        ("linear(x, w)", "linear(w, w)", (), r"root 0: dimension 0 is a splice on one side only"),
        ("add(x, w)", "add(x, w)", (), r"add\(x, w\): dimensions agree: dimension b against o"),
        ("sum(x, dims=(1,), keepdim=False)", "x", (), "1 does not name one dimension"),
        ("sum(x, dims=(0,), keepdim=False)", "x", (), "0 does not name one dimension"),
        ("sum(x, dims=s, keepdim=False)", "x", (), "beyond the index semantics of verifier/algebra/elements.py"),
        ("slice(x, dim=s, start=0, stop=1, step=1)", "x", (), "s does not name one dimension"),
        ("reshape(x, shape=(2, 3))", "x", (), "beyond the index semantics of verifier/algebra/elements.py"),
        (CUT.format("True"), "x", (), "True is not a number"),
        (CUT.format("(i, 2)"), "x", (), r"\(i, 2\): only integers, names, \+ - \* // % are understood in proofs"),
        ("relu(x)", "x", ("i == len(b)",), r"len\(b\): not a permutation or shape that proofs understand"),
        ("relu(x)", "x", ("i",), "guard i is not a comparison"),
    ],
)
def test_what_proofs_do_not_understand_is_named(left: str, right: str, guard: tuple[str, ...], message: str) -> None:
    failure = prove_equation(equation("odd", ROW if "w" in left else {"x": "*b i"}, left, right, guard=guard))
    assert failure is not None
    assert re.search(message, failure.claim), failure.claim
    assert not failure.refuted


def test_a_matrix_whose_rows_are_a_splice_cannot_be_multiplied_over_them() -> None:
    failure = prove_equation(equation("odd", {"x": "i *b", "w": "o i"}, "linear(x, w)", "linear(x, w)"))
    assert failure is not None
    assert "summed dimensions agree: dimension b against i" in failure.claim
