"""A file proposes, the prover of this machine disposes: nothing that a file says of its rules is believed.

What the machine keeps of its proofs survives runs at the same time, cut files and other provers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.rules import Rule
from shardwright.verifier import store
from shardwright.verifier.catalogue import SHIPPED
from shardwright.verifier.certificates import SCOPE, RuleVerdict, prover_digest
from shardwright.verifier.choices import Certified
from shardwright.verifier.judge import judge, one_by_one
from shardwright.verifier.solver import version
from shardwright.verifier.store import Verdicts

GONE = equation("relu_of_scaled", {"x": "*b", "c": ""}, "relu(mul(x, c))", "x").to_json()
CLAIMS = {"prover": {"digest": prover_digest(), "solver": version(), "scope": SCOPE}}


def claiming(data: dict[str, Any]) -> dict[str, Any]:
    """The rule with all that a file of ours has ever said of a proven one."""
    told = {"axioms": ["index-semantics"], "guard": data.get("guard", []), "solver": version(), "scope": SCOPE}
    return {**data, "certificate": {**told, "prover": prover_digest()}}


def file_of(folder: Path, *rules: dict[str, Any]) -> Path:
    path = folder / "rules.json"
    path.write_text(json.dumps({"version": 1, **CLAIMS, "rules": list(rules)}))
    return path


def test_a_false_equation_that_claims_a_certificate_is_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    path = file_of(tmp_path, claiming(GONE), claiming(CATALOGUE["linear_of_sum"].to_json()))
    assert set(Certified.of_file(path, told.append).by_name()) == {"linear_of_sum"}
    assert any("left out: rules[0] 'relu_of_scaled': relu_of_scaled is false for " in text for text in told)
    with pytest.raises(RuleError, match="no rule of it can be used"):
        Certified.of_file(file_of(tmp_path, claiming(GONE)))


def test_a_shipped_rule_that_was_edited_has_lost_its_proof(tmp_path: Path) -> None:
    """Every text of a rule in a copy of the shipped file, head and all."""
    path, name = tmp_path / "rules.json", "sum_of_linears"
    right = json.dumps(list(map(str, CATALOGUE[name].right)))
    text = SHIPPED.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if f'"name": "{name}"' in line)
    edited = line.replace(f'"right": {right}', '"right": ["linear(x, w)"]')
    assert edited != line
    path.write_text(text.replace(line, edited), encoding="utf-8")
    assert name in Certified.of_file(SHIPPED).by_name()
    assert name not in Certified.of_file(path).by_name()


# ---- what the machine keeps ----


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where proofs are kept: nothing is there yet, and the package has none."""
    monkeypatch.setattr(store, "SHIPPED_PROOFS", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = Verdicts.here().path
    assert path is not None
    assert prover_digest() in path.name
    return path


def unheard_of(number: int) -> list[Equation]:
    """True rules that nobody has proven yet."""
    return [equation(f"from_{i}", {"x": "n"}, "neg(neg(x))", "x", guard=(f"n > {i}",)) for i in range(number)]


class Jury:
    """Judges, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, rules: Sequence[Rule]) -> Iterator[tuple[Rule, RuleVerdict]]:
        self.asked += [rule.name for rule in rules]
        return one_by_one(rules)


def test_what_was_judged_once_is_not_judged_again(tmp_path: Path, kept: Path) -> None:
    rules = [CATALOGUE[name].to_json() for name in ("linear_of_sum", "neg_of_neg")]
    path, jury, told = file_of(tmp_path, *rules, GONE), Jury(), list[str]()
    first, told_first = Certified.of_file(path, told.append, jury), told.copy()
    assert jury.asked == ["linear_of_sum", "neg_of_neg", "relu_of_scaled"]
    assert told_first[0] == f"{path}: judging 3 rules that this machine has not judged yet"
    jury, told = Jury(), list[str]()
    again = Certified.of_file(path, told.append, jury)
    assert jury.asked == []
    assert told == told_first[1:]
    assert again.store.certificates == first.store.certificates
    assert again.by_name() == first.by_name()
    assert [found.solver for found in again.store.certificates.values()] == [version()] * 2


def test_what_is_kept_was_judged_here(tmp_path: Path, kept: Path) -> None:
    """Whatever a file claims, on its own or beside true rules; also of the rules that it hides in other fields."""
    Certified.of_file(file_of(tmp_path, claiming(CATALOGUE["neg_of_neg"].to_json()), claiming(GONE)))
    verdicts = Verdicts.here()
    (false,) = (key for key in verdicts if verdicts.failure(key))
    assert set(verdicts) == {CATALOGUE["neg_of_neg"].hash, false}
    assert verdicts.certificate(false, GONE) is None
    assert verdicts.failure(false).startswith("relu_of_scaled is false for ")


def test_other_provers_judge_for_themselves(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, jury = file_of(tmp_path, CATALOGUE["neg_of_neg"].to_json()), Jury()
    Certified.of_file(path, judged=jury)
    monkeypatch.setattr(store, "prover_digest", lambda: "another")
    Certified.of_file(path, judged=jury)
    assert jury.asked == ["neg_of_neg"] * 2


def test_what_was_given_up_for_time_is_judged_again(kept: Path) -> None:
    rule, verdicts = CATALOGUE["neg_of_neg"], Verdicts.here()
    verdicts.keep([(rule, RuleVerdict("unknown", None, "no proof within 1 s", final=False))])
    assert verdicts.failure(rule.hash) == "no proof within 1 s"
    assert not kept.exists()
    verdicts.keep([(rule, judge(rule))])
    assert (rule.hash in Verdicts.here(), verdicts.failure(rule.hash)) == (True, "")


def test_what_was_judged_before_an_interruption_is_kept(kept: Path) -> None:
    one, two = CATALOGUE["neg_of_neg"], CATALOGUE["relu_of_relu"]

    def interrupted() -> Iterator[tuple[Rule, RuleVerdict]]:
        yield one, judge(one)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Verdicts.here().keep(interrupted())
    assert one.hash in Verdicts.here()
    assert two.hash not in Verdicts.here()


def test_a_file_that_is_cut_or_damaged_anywhere_loses_lines_and_never_lies(kept: Path) -> None:
    rules = [CATALOGUE[name] for name in ("neg_of_neg", "linear_of_sum", "relu_of_relu")]
    Verdicts.here().keep((rule, judge(rule)) for rule in rules)
    whole, content = Verdicts.here(), kept.read_bytes()
    for at in range(0, len(content), 7):
        for damaged in (content[:at], content[:at] + b"\xff" + content[at + 1 :], content[:at] + content[at + 1 :]):
            kept.write_bytes(damaged)
            found = Verdicts.here()
            assert set(found) <= set(whole)
            assert set(found) or damaged == content[:at], "one byte costs two lines at most"
            assert all(found.certificate(key, GONE) == whole.certificate(key, GONE) for key in found)
    kept.write_bytes(content[:-20])  # killed while it wrote the last line: the next run's are whole
    verdicts = Verdicts.here()
    verdicts.keep([(rules[2], judge(rules[2])), (CATALOGUE["add_commutes"], judge(CATALOGUE["add_commutes"]))])
    assert set(Verdicts.here()) == {*set(whole), CATALOGUE["add_commutes"].hash}


def test_nothing_is_written_twice(kept: Path) -> None:
    rule = CATALOGUE["neg_of_neg"]
    for _ in range(3):
        Verdicts.here().keep([(rule, judge(rule))])
    assert kept.read_text().count(rule.hash) == 1


def test_runs_at_the_same_time_lose_nothing(kept: Path) -> None:
    code = """
import sys
from shardwright.verifier.certificates import RuleVerdict
from shardwright.verifier.store import Verdicts
from tests.verifier.test_store import unheard_of
rules, verdicts = unheard_of(300), Verdicts.here()
for rule in rules[int(sys.argv[1])::3]:
    verdicts.keep([(rule, RuleVerdict("unknown", None, "x" * 3000))])
"""
    root = Path(__file__).parents[2]
    runs = [subprocess.Popen([sys.executable, "-c", code, str(i)], cwd=root) for i in range(3)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0, 0]
    assert set(Verdicts.here()) == {rule.hash for rule in unheard_of(300)}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, kept: Path) -> None:
    path, jury = file_of(tmp_path, CATALOGUE["neg_of_neg"].to_json()), Jury()
    kept.parent.parent.write_text("a file where the folder would be")
    for _ in range(2):
        assert set(Certified.of_file(path, judged=jury).by_name()) == {"neg_of_neg"}
    assert jury.asked == ["neg_of_neg"] * 2


def test_rules_that_differ_in_anything_but_their_name_have_other_hashes() -> None:
    """Whole ones: of short hashes two can be made that agree, one of a true rule."""
    rule = CATALOGUE["linear_of_sum"]
    assert len(rule.hash) == 64
    assert replace(rule, name="other").hash == rule.hash
    others = unheard_of(50)
    assert len({other.hash for other in others}) == 50
