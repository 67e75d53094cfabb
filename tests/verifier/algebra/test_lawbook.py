"""The laws that certificates name: each is stated, proven or trusted, and noted where it is applied."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import shardwright
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier.algebra.lawbook import FACTS, LAWS, rested_on
from shardwright.verifier.catalogue import Catalogue
from shardwright.verifier.certificates import prove
from shardwright.verifier.lemmas import LEMMAS, TRUSTED, statement
from tests.each import each
from tests.verifier import laws

ROOT = Path(shardwright.__file__).parents[1]
B = {"x": "*b", "y": "*b", "z": "*b"}
ONE = {"x": "n"}
MASK = "le(arange(dtype='int64', start=0, step=1, stop=n), full(dtype='int64', shape=(), value=3))"
RARE = [
    equation("even", ONE, "cos(neg(x))", "cos(x)"),
    equation("scaled", ONE, "amax(add(x, x), dims=(0,), keepdim=False)",
             "add(amax(x, dims=(0,), keepdim=False), amax(x, dims=(0,), keepdim=False))"),
    equation("masked", ONE, f"where({MASK}, where({MASK}, x, neg(x)), neg(x))", f"where({MASK}, x, neg(x))"),
]  # fmt: skip
TRUE = [
    equation(name, variables, left, right)
    for name, (variables, left, rights, _) in {**laws.FUNCTIONS, **laws.INDICES, **laws.SUMS, **laws.DEFINED}.items()
    for right in rights
]
EXISTING = [equation(name, *laws.EXISTING[name]) for name in laws.EXISTING]


def applied(rule: Equation) -> set[str]:
    axioms, failure = prove(rule)
    assert failure is None, f"{rule.equation}: {failure}"
    return set(axioms)


APPLIED = [
    ({"x": "*b"}, "neg(neg(x))", "x", {"mul-associates"}),
    (B, "add(y, x)", "add(x, y)", {"add-commutes"}),
    (B, "mul(x, add(y, z))", "add(mul(x, y), mul(x, z))", {"distribute"}),
    (B, "sub(add(x, y), y)", "x", {"collect", "add-associates"}),
    (B, "exp(add(x, y))", "mul(exp(x), exp(y))", {"exp"}),
    (B, "log(mul(exp(x), exp(y)))", "add(x, y)", {"exp", "log"}),
    (B, "relu(relu(x))", "relu(x)", {"relu-of-nonnegative"}),
    (B, "maximum(add(x, z), add(y, z))", "add(maximum(x, y), z)", {"max-of-shifted", "max-commutes", "add-commutes"}),
    (B, "tanh(neg(x))", "neg(tanh(x))", {"odd-functions"}),
    ({"x": "*b"}, "permute(permute(x, dims=p), dims=q)", "permute(x, dims=compose(p, q))", {"permutations"}),
    ({"x": "n m"}, "permute(permute(x, dims=(1, 0)), dims=(1, 0))", "x", set[str]()),
    ({"x": "n m"}, "sum(sum(x, dims=(1,), keepdim=False), dims=(0,), keepdim=False)",
     "sum(sum(x, dims=(0,), keepdim=False), dims=(0,), keepdim=False)", {"linear-sum", "exchange-sum"}),
    ({"x": "n i", "y": "i", "w": "o i"}, "linear(x, mul(y, w))", "linear(mul(x, y), w)", {"mul-associates"}),
    ({"x": "n i", "y": "n i", "w": "o i"}, "linear(add(x, y), w)", "add(linear(x, w), linear(y, w))",
     {"distribute", "linear-sum"}),
]  # fmt: skip


@each(("variables", "left", "right", "laws_"), APPLIED, ids=[case[1] for case in APPLIED])
def test_a_certificate_names_the_laws_that_its_proof_applied(
    variables: dict[str, str], left: str, right: str, laws_: set[str]
) -> None:
    found = applied(equation("named", {v: dims for v, dims in variables.items() if v in left}, left, right))
    assert found - {"mul-commutes"} == {"index-semantics", *laws_}


def test_the_same_rule_has_the_same_axioms_whatever_was_proven_before() -> None:
    rules = [CATALOGUE[name] for name in sorted(CATALOGUE)[::4]]
    assert [prove(rule).axioms for rule in rules] == [prove(rule).axioms for rule in reversed(rules)][::-1]


def test_every_law_and_fact_is_applied_by_some_true_rule() -> None:
    found = set[str]().union(*map(applied, (*TRUE, *EXISTING, *RARE, *CATALOGUE.values())))
    assert found <= {*LEMMAS, *TRUSTED}
    assert {*LAWS, *FACTS} <= found


def test_every_law_that_the_source_notes_is_in_the_book() -> None:
    files = ("normal", "families", "powers", "laws", "elements_moves", "elements_pointwise", "elements_sums")
    text = "".join((ROOT / "verifier" / "algebra" / f"{name}.py").read_text() for name in files)
    calls = re.findall(r"(?:noted|used\.add|used\.update)\((.*)\)", text)
    named = set(chain.from_iterable(re.findall(r'"([a-z]+(?:-[a-z]+)*)"', call) for call in calls))
    kinds = {"abs", "sum", "poly", "fn relu"}  # of factors, in conditions
    assert named - kinds <= {*LEMMAS, *TRUSTED}


def test_facts_come_with_the_laws_that_are_written_from_them() -> None:
    assert rested_on({"log-of-product", "collect"}) == ("collect", "exp", "log", "log-of-product")
    assert all(fact in FACTS for law in LAWS.values() for fact in law.facts)


def test_the_trust_base_in_the_docs_lists_every_fact_and_law() -> None:
    text = (ROOT / "docs" / "proofs.md").read_text()
    trusted = text[text.index("## What is trusted") : text.index("## What is outside")]
    assert not [name for name in (*TRUSTED, *LAWS) if f"`{name}`" not in trusted]


def test_every_axiom_of_a_shipped_certificate_has_a_statement() -> None:
    axioms = {axiom for found in Catalogue.load().certificates.values() for axiom in found.axioms}
    assert axioms
    assert not [a for a in axioms if not statement(a) and not a.startswith(("row ", "declared: "))]
