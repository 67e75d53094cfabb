"""The catalogue file that we write: round trips, provers, what the search takes from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.pcg.offers import parse_choice
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.fields import digest
from shardwright.substitutions.rules.catalogue import CATALOGUE, SEARCHED
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import derive
from shardwright.substitutions.rules.rules import Rule, kind_of
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier import catalogue, store
from shardwright.verifier.catalogue import PLAIN, SHIPPED, Catalogue, Note
from shardwright.verifier.certificates import PROOFS, Certificate, certify, rule_guard
from shardwright.verifier.store import Verdicts
from tests.each import each
from tests.verifier.collect import ship

LINEAR = derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b"))
PLACED = equation(
    "split_the_sum", {"x": "m i", "w": "o i"}, "linear(combine(x, axis=a), combine(w, axis=a))",
    "reduce(linear(x, w), axis=a)", axes=("a",), layouts={"x": ("S(1)",), "w": ("S(1)",)},
)  # fmt: skip
EVERY_FORM = [LINEAR, CATALOGUE["fuse_two_linears"], STEP_RULES["all_to_all"], PLACED]


def shipped(monkeypatch: pytest.MonkeyPatch, path: Path, *rules: Rule) -> None:
    """Make a package of these rules at a path: the file, and made-up proofs."""
    kept = Catalogue()
    for rule in rules:
        kept.add(rule)
    kept.save(path)
    monkeypatch.setattr(store, "SHIPPED_PROOFS", path.with_suffix(".jsonl"))
    ship(((rule, made_up(rule)) for rule in rules), store.SHIPPED_PROOFS)


def made_up(rule: Rule) -> Certificate:
    return Certificate(rule.hash, rule.name, ("an axiom",), rule_guard(rule), "z3 0", PROOFS[kind_of(rule)])


@pytest.mark.parametrize("rule", EVERY_FORM, ids=lambda r: r.name)
def test_a_catalogue_keeps_every_form_of_rule(tmp_path: Path, rule: Rule) -> None:
    kept, path = Catalogue(generator={"max_ops": 3, "seed": 0}), tmp_path / "rules.json"
    kept.add(rule, None, Note(("linear_of_sum",), search=False))
    kept.save(path)
    again = Catalogue.load(path)
    assert again.certificates.keys() == {rule.hash}.intersection(Verdicts.shipped())
    assert again.rules == kept.rules == {rule.hash: rule}
    assert again.notes == kept.notes
    assert again.generator == kept.generator
    assert list(path.parent.iterdir()) == [path]


def test_certificates_are_kept_as_they_were_earned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rules = tmp_path / "rules.json", [CATALOGUE["linear_of_sum"], STEP_RULES["reduce_scatter"], LINEAR]
    shipped(monkeypatch, path, *rules, PLACED)
    earned = [found for rule in rules if isinstance(found := certify(rule), Certificate)]
    ship(zip(rules, earned, strict=True), store.SHIPPED_PROOFS)
    again = Catalogue.load(path)
    assert again.certificates == {rule.hash: found for rule, found in zip(rules, earned, strict=True)}
    assert again.rule(PLACED.hash) == PLACED


def test_saving_is_deterministic(tmp_path: Path) -> None:
    for name, rules in (("one", EVERY_FORM), ("two", EVERY_FORM[::-1])):
        kept = Catalogue()
        for rule in rules:
            kept.add(rule, made_up(rule))
        kept.save(tmp_path / name)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()


def test_the_proofs_of_another_prover_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rules.json"
    shipped(monkeypatch, path, LINEAR)
    assert Catalogue.load(path).certificates == {LINEAR.hash: made_up(LINEAR)}
    monkeypatch.setattr(store, "prover_digest", lambda: "another")
    assert not Catalogue.load(path).certificates
    assert Catalogue.load(path).rules


def test_a_missing_catalogue_is_empty(tmp_path: Path) -> None:
    assert not len(Catalogue.load(tmp_path / "none.json"))


def test_a_certificate_belongs_to_the_very_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose rule was changed by hand has no certificate for what it says now."""
    path, rule = tmp_path / "rules.json", CATALOGUE["sub_as_add"]
    shipped(monkeypatch, path, rule, CATALOGUE["neg_of_neg"])
    assert rule in Catalogue.load(path).searched()
    path.write_text(path.read_text().replace("add(x, neg(y))", "add(neg(x), y)"))
    changed = Catalogue.load(path)
    assert [str(found.right[0]) for found in changed.rules.values() if isinstance(found, Equation)] == [
        "x",
        "add(neg(x), y)",
    ]
    assert changed.searched() == (CATALOGUE["neg_of_neg"],)
    assert changed.certificates.keys() == {CATALOGUE["neg_of_neg"].hash}


@pytest.mark.parametrize("rule", EVERY_FORM, ids=lambda r: r.name)
def test_a_hash_can_be_taken_without_reading_the_rule(rule: Rule) -> None:
    assert digest(json.loads(json.dumps(rule.to_json()))) == rule.hash


def test_the_search_takes_certified_serial_equations_that_nothing_implies() -> None:
    kept = Catalogue()
    one, two, three, four = (CATALOGUE[n] for n in ("linear_of_sum", "neg_of_neg", "mul_commutes", "relu_of_relu"))
    kept.add(one, made_up(one))
    kept.add(two, made_up(two), Note(implied_by=("linear_of_sum",)))
    kept.add(three, made_up(three), Note(search=False))
    kept.add(four)
    kept.add(PLACED, made_up(PLACED))
    kept.add(LINEAR, made_up(LINEAR))
    assert kept.searched() == (one,)
    assert kept.forms() == {"row", "equation"}


def test_what_the_search_takes_survives_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "rules.json", Catalogue()
    one, two = CATALOGUE["linear_of_sum"], CATALOGUE["neg_of_neg"]
    shipped(monkeypatch, path, one, two, PLACED)
    for rule, note in ((one, PLAIN), (two, Note(search=False)), (PLACED, PLAIN)):
        kept.add(rule, None, note)
    kept.save(path)
    assert Catalogue.load(path).searched() == (one,)


@each(
    ("text", "message"),
    [
        ("", "the file is empty; expected rules"),
        ("{", "line 1: expected JSON, got: Expecting property name"),
        ('{"version": 1,\n "rules": [{"form": "row"', "line 2: expected JSON, got: Expecting ',' delimiter.*truncated"),
        ("[]", r"expected an object with the fields 'version' and 'rules' \(docs/rules.md\), got \[\]"),
        ('{"rules": []}', r"expected an object with the fields 'version' and 'rules'.*got the fields \['rules'\]"),
        ('{"version": 9, "rules": []}', "version 9, expected 1; generate the file again"),
        ('{"version": true, "rules": []}', "version True, expected 1"),
        ('{"version": 1, "rules": {}}', r"field 'rules': expected a list of rules, got \{\}"),
        ('{"version": 1, "rules": [], "prover": 3}', "field 'prover': expected an object, got 3"),
        ('{"version": 1, "rules": [], "generator": []}', r"field 'generator': expected an object, got \[\]"),
        ('{"version": 1, "rules": [], "rule": []}', "unknown field 'rule'"),
        ('{"version": 1, "version": 1, "rules": []}', r"unknown field 'version \(given twice\)'"),
        ("[" * 100_000, "JSON nested too deeply"),
        ('{"version": ' + "1" * 5000 + "}", "a value that cannot be read"),
    ],
)
def test_a_file_that_is_no_catalogue_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(RuleError, match=message):
        Catalogue.load(path)


def test_what_is_no_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rules.json"
    path.write_bytes(b'{"version": 1, "rules": ["\xff\xfe"]}')
    with pytest.raises(RuleError, match="expected JSON text in UTF-8, got other bytes"):
        Catalogue.load(path)
    with pytest.raises(RuleError, match=r"cannot read the rule file \(Is a directory\)"):
        Catalogue.load(tmp_path)
    with pytest.raises(RuleError, match="there is no such rule file; check the path, or make one with"):
        catalogue.read_head(tmp_path / "none.json")
    monkeypatch.setattr(catalogue, "MAX_BYTES", 1 << 20)
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(RuleError, match="more than 1 MiB; is it a rule file"):
        Catalogue.load(path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rules.json").mkdir()
    with pytest.raises(RuleError, match=r"rules.json: cannot write the rules: Is a directory; choose a writable path"):
        Catalogue().save(tmp_path / "rules.json")
    assert [p.name for p in tmp_path.iterdir()] == ["rules.json"]


def test_the_shipped_proofs_fit_this_prover_and_the_shipped_rules() -> None:
    found = Catalogue.load()
    assert found.certificates, "the shipped proofs are another prover's: run `python -m tests.verifier.collect`"
    assert set(found.certificates) == set(found) == set(Verdicts.shipped())
    assert all(rule.hash in found.certificates for rule in (*CATALOGUE.values(), *STEP_RULES.values()))
    assert {CATALOGUE[name] for name in SEARCHED} <= set(found.searched())


def test_every_shipped_rule_is_proven_anew() -> None:
    """The proofs of the package are what this prover finds, rule by rule; nothing else vouches for them."""
    found = Catalogue.load()
    wrong = {
        rule.name: proof for key, rule in found.rules.items() if (proof := certify(rule)) != found.certificates[key]
    }
    assert not wrong


def test_the_shipped_catalogue_is_one_rule_a_line() -> None:
    first, *lines, last = SHIPPED.read_text(encoding="utf-8").splitlines()
    assert first.endswith('"rules": [')
    assert last == "]}"
    assert all(json.loads(line.rstrip(","))["form"] in ("row", "steps", "equation") for line in lines)
