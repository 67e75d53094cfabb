"""`shardwright rules` and `--rules`: results on stdout, progress on stderr, and a status that says what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright import generation
from shardwright import judging as driver
from shardwright.pcg.choice import Split
from shardwright.pcg.graph import Node
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType
from shardwright.substitutions.generator.sources import ContextSource
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import choices, derive
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier.certificates import prover_digest
from shardwright.verifier.choices import Certified
from shardwright.verifier.lemmas import LEMMAS
from tests.each import each
from tests.shardwright.command import Run, write
from tests.shardwright.fakes import FakeContext

SERIAL = CATALOGUE["linear_of_sum"].to_json()
FALSE = {**SERIAL, "name": "false", "right": ["add(linear(x, w), linear(x, w))"]}
BROKEN = {**SERIAL, "name": "broken", "left": ["linea(x, w)"]}
ROW = derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b")).to_json()
PLACED = {
    "form": "equation", "name": "placed", "variables": {"x": "m i", "w": "o i"}, "axes": ["a"],
    "layouts": {"x": ["S(1)"], "w": ["S(1)"]}, "left": ["linear(combine(x, axis=a), combine(w, axis=a))"],
    "right": ["reduce(linear(x, w), axis=a)"], "implied_by": ["linear_of_sum"], "parameters": [],
}  # fmt: skip


@each("command", ["", "generate", "verify", "list", "show", "coverage"])
def test_every_command_has_help_with_examples(run: Run, command: str) -> None:
    status, out, _ = run("rules", *filter(None, [command]), "--help")
    assert status == 0
    assert f"  shardwright rules {command or 'generate'}" in out


# ---- verify ----


@pytest.mark.usefixtures("fresh_workers")
def test_true_rules_pass(run: Run) -> None:
    status, out, err = run("rules", "verify", write(SERIAL, ROW, STEP_RULES["all_to_all"].to_json()), "--no-base")
    assert status == 0, out
    assert out.startswith("PASSED: mine.json, 3 rules in ")
    assert "  3 certified, 0 refuted, 0 unknown" in out
    assert err.startswith("verify: reading the rules\n")


def test_every_rule_is_judged_whatever_the_others_are(run: Run) -> None:
    status, out, _ = run("rules", "verify", write(BROKEN, FALSE, 3, SERIAL), "--no-base", "--jobs", "2")
    assert status == 1
    assert "FAILED: mine.json, 4 rules in " in out
    assert "  1 certified, 1 refuted, 0 unknown, 2 malformed" in out
    assert "MALFORMED: broken\n  rules[0]: rule 'broken': field 'left[0]': term 'linea(x, w)'" in out
    assert (
        "MALFORMED: ?\n  rules[2]: rule '?': expected an object, got 3" in out or "rules[2]: expected an object" in out
    )
    assert "REFUTED: false\n  rules[1]: linear(add(x, y), w) = add(linear(x, w), linear(x, w))" in out
    assert "false is false for " in out  # with small tensors:
    assert "  right = " in out


def test_an_unknown_rule_is_said_loudly_and_is_no_failure(run: Run) -> None:
    row = {"form": "row", "row": "softmax", "pattern": "a b -> a b", "choice": "b", "operands": ["S(1)"],
           "result": "S(1)", "guard": ["k | b"]}  # fmt: skip
    status, out, _ = run("rules", "verify", write(row), "--no-base")
    assert status == 0
    assert "UNKNOWN: softmax [a b -> a b] by b\n" in out
    assert "no softmax is known to have the pattern 'a b -> a b'" in out
    assert "1 UNKNOWN: neither proven nor refuted, and never used; reasons above" in out


UNFIT = {**SERIAL, "name": "unfit", "variables": {"x": "m i", "y": "o i", "w": "o i"}}


def test_a_rule_that_no_tensors_fit_is_malformed(run: Run) -> None:
    never = {**SERIAL, "name": "never", "guard": ["o < 1"]}
    status, out, _ = run("rules", "verify", write(UNFIT, never, SERIAL), "--no-base")
    assert status == 1
    assert "  1 certified, 0 refuted, 0 unknown, 2 malformed" in out
    assert "MALFORMED: unfit\n  rules[0]: linear(add(x, y), w) = " in out
    assert "field 'left[0]': add(x, y) has no shape: " in out
    assert "field 'guard[0]': no sizes satisfy o < 1" in out
    found = json.loads(run("rules", "verify", write(UNFIT), "--no-base", "--format", "json")[1])
    assert [rule["outcome"] for rule in found["rules"]] == ["malformed"]


def test_verdicts_are_plain_data_too(run: Run) -> None:
    status, out, _ = run("rules", "verify", write(SERIAL, FALSE, BROKEN), "--no-base", "--format", "json")
    found = json.loads(out)
    assert status == 1
    assert found["passed"] is False
    assert found["counts"] == {"certified": 1, "refuted": 1, "unknown": 0, "malformed": 1}
    assert [rule["outcome"] for rule in found["rules"]] == ["certified", "refuted", "malformed"]
    assert found["rules"][0]["axioms"]
    assert "is false for" in found["rules"][1]["reason"]
    assert "field 'left[0]'" in found["rules"][2]["reason"]
    assert found["lemmas"] == {}


def test_what_takes_too_long_is_unknown(run: Run) -> None:
    status, out, _ = run("rules", "verify", write(SERIAL), "--no-base", "--limit", "1e-9")
    assert status == 0
    assert "0 certified, 0 refuted, 1 unknown" in out  # the limit may end what comes before the proof, too


def test_certificates_in_the_file_are_not_believed(run: Run) -> None:
    forged = {**FALSE, "certificate": {"axioms": [], "prover": prover_digest()}}
    assert run("rules", "verify", write(forged), "--no-base")[0] == 1


def test_the_rules_and_lemmas_below_are_proven_too(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("shipped.json").write_text(json.dumps({"version": 1, "rules": [ROW, SERIAL]}))
    monkeypatch.setattr(driver, "SHIPPED", Path("shipped.json"))
    status, out, _ = run("rules", "verify", write(SERIAL))
    assert status == 0, out
    assert "  1 certified, 0 refuted, 0 unknown" in out
    assert "  shipped rules that proofs rest on: 1 certified, 0 refuted, 0 unknown" in out
    assert f"  lemmas: {len(LEMMAS)} of {len(LEMMAS)} proven" in out


@each(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"{", "line 1: expected JSON"),
        (b"\xff", "expected JSON text in UTF-8"),
        (b"rules: none", "line 1: expected JSON"),
        (b'{"version": 1, "rules": [', "line 1: expected JSON, got: Expecting value; the file is truncated"),
        (b"[1, 2, 3]", "expected an object with the fields 'version' and 'rules' (docs/rules.md), got [1, 2, 3]"),
        (b"3", "expected an object with the fields 'version' and 'rules' (docs/rules.md), got 3"),
        (b'{"version": 1, "rules": {}}', "field 'rules': expected a list of rules, got {}"),
        (b'{"version": 2, "rules": []}', "version 2, expected 1"),
        (b"[" * 100_000, "expected rules, got JSON nested too deeply"),
        (b'{"version": 1, "rules": [' + b"1" * 5000 + b"]}", "expected rules, got a value that cannot be read"),
        (b"[]", "expected an object with the fields 'version' and 'rules'"),
    ],
)
def test_a_file_that_is_none_is_an_error(run: Run, content: bytes, message: str) -> None:
    Path("mine.json").write_bytes(content)
    for command in (["verify"], ["list"], ["show", "x"]):
        status, out, err = run("rules", *command, "mine.json")
        assert (status, out) == (2, "")
        assert f"error: mine.json: {message}" in err


def test_no_file_and_a_folder_are_errors(run: Run, tmp_path: Path) -> None:
    assert (
        "none.json: there is no such rule file; check the path, or make one with"
        in run("rules", "list", "none.json")[2]
    )
    assert "cannot read the rule file (Is a directory)" in run("rules", "verify", str(tmp_path))[2]


# ---- list and show ----


def test_the_shipped_rules_are_listed(run: Run) -> None:
    status, out, _ = run("rules", "list", "--form", "steps")
    assert status == 0
    assert f": {len(STEP_RULES)} of " in out.splitlines()[0]
    assert "all_to_all" in out


def test_lists_are_filtered(run: Run) -> None:
    name = write(SERIAL, PLACED, ROW, CATALOGUE["neg_of_neg"].to_json())

    def listed(*options: str) -> list[str]:
        found = json.loads(run("rules", "list", name, "--format", "json", *options)[1])
        return [rule["name"] for rule in found]

    row = "linear [a b, c b -> a c] by b"
    assert listed() == ["linear_of_sum", "placed", row, "neg_of_neg"]
    assert listed("--form", "serial") == ["linear_of_sum", "neg_of_neg"]
    assert listed("--form", "placement") == ["placed"]
    assert listed("--operator", "linear", "--operator", "add") == ["linear_of_sum"]
    assert listed("--minimal") == ["linear_of_sum", row, "neg_of_neg"]
    assert listed("--search", "COMBINE") == ["placed"]
    text = run("rules", "list", name)[1]
    assert text.splitlines()[0] == "mine.json: 4 of 4 rules"
    assert "placement  implied    linear(combine(x, axis=a), combine(w, axis=a)) = " in text


def test_a_list_names_malformed_rules_on_stderr(run: Run) -> None:
    status, out, err = run("rules", "list", write(BROKEN, SERIAL))
    assert status == 0
    assert "1 of 2 rules" in out
    assert "mine.json: rules[0] 'broken': rule 'broken': field 'left[0]'" in err


def test_an_equation_is_shown_with_both_graphs(run: Run) -> None:
    status, out, _ = run("rules", "show", "fuse_two_linears")
    assert status == 0
    assert out.startswith("fuse_two_linears: serial terms (equation)\n")
    assert "\n  guard     none\n" in out
    assert "values    equal over the reals" in out
    assert "\nleft\n  linear" in out
    assert "└─ concat dim=0 #2                          [o+p i]\n" in out
    assert "as above" in out
    assert "\nproof\n" in out


def test_the_laws_of_a_proof_are_shown_with_what_they_say(run: Run) -> None:
    _, out, _ = run("rules", "show", "linear_of_sum")
    proof = out[out.index("\nproof\n") :]
    proven, trusted = proof.split("rests on, trusted:\n")
    assert "  distribute       (u + v) · w = u · w + v · w\n" in proven
    assert "  linear-sum       Σ (s + t) = Σ s + Σ t and Σ a·t = a·Σ t\n" in proven
    assert trusted.startswith("    index-semantics  a row computes what its index semantics says")
    plain = json.loads(run("rules", "show", "linear_of_sum", "--format", "json")[1])["certificate"]
    assert plain["statements"].keys() == set(plain["axioms"])


def test_a_placement_rule_is_shown_with_its_layouts(run: Run) -> None:
    status, out, _ = run("rules", "show", "placed", write(PLACED, SERIAL))
    assert status == 0
    left, right = out.split("\nleft\n")[1].split("\nright\n")
    assert "├─ combine axis=a  [m i] R\n" in left
    assert right.startswith("  reduce axis=a  [m o] R\n  └─ linear      [m o] P\n")
    assert "serial    both sides are one serial term" in out
    assert "implied by linear_of_sum" in out
    assert "not judged on this machine yet; `shardwright rules verify` does it now" in out
    write({**PLACED, "guard": ["i % a == 0"]}, SERIAL)
    assert run("rules", "verify", "mine.json", "--no-base")[0] == 0
    assert "certified by z3 " in run("rules", "show", "placed", "mine.json")[1]


def test_what_is_false_is_shown_with_what_was_found(run: Run) -> None:
    assert run("rules", "verify", write(FALSE), "--no-base")[0] == 1
    out = run("rules", "show", "false", "mine.json")[1]
    assert "judged on this machine, and not certified:\n  false is false for " in out


def test_rows_and_chains_are_shown_with_their_layouts(run: Run) -> None:
    name = write(ROW, STEP_RULES["reduce_scatter"].to_json())
    _, row, _ = run("rules", "show", "linear [a b", name)
    assert "x1      c b   S(1)    S(1)" in row
    assert "result  a c   P       C" in row
    _, chain, _ = run("rules", "show", "reduce_scatter", name)
    assert "reduce(a)                   a: R" in chain
    assert "values    equal over the reals: sums over devices are taken" in chain


def test_a_shown_rule_is_plain_data_too(run: Run) -> None:
    found = json.loads(run("rules", "show", "placed", write(PLACED, SERIAL), "--format", "json")[1])
    assert (found["kind"], found["implied_by"], found["certificate"]) == ("placement", ["linear_of_sum"], None)
    assert found["operators"] == ["combine", "linear", "reduce"]


def test_a_rule_that_is_not_there_or_not_well_is_an_error(run: Run) -> None:
    name = write(SERIAL, BROKEN, ROW)
    status, _, err = run("rules", "show", "nothing", name)
    assert (status, err) == (2, "error: mine.json: no rule is called 'nothing'; `shardwright rules list` shows all 3\n")
    assert (
        "2 rules have 'linear' in their names; say which: 'linear_of_sum', " in run("rules", "show", "linear", name)[2]
    )
    status, _, err = run("rules", "show", "broken", name)
    assert status == 2
    assert "error: mine.json: rules[1] 'broken': rule 'broken': field 'left[0]': term 'linea(x, w)'" in err


# ---- generate ----


def test_rules_are_generated_and_the_file_verifies(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext("few", ("neg",), ("neg_of_neg", "add_commutes"), str(tmp_path / "log"))
    monkeypatch.setattr(
        generation, "sources", lambda operators: [ContextSource("fake", "tests.shardwright.fakes:generate", context)]
    )
    status, out, err = run("rules", "generate", "--max-ops", "2", "-o", "rules.json", "--operators", "neg, neg")
    assert status == 0, err
    assert out.startswith("rules.json: 2 rules in ")
    assert "  certified          2  proven for all sizes and degrees" in out
    assert "generate: finding out which rules imply which\n" in err
    assert json.loads(Path("rules.json").read_text())["generator"]["operators"] == ["neg"]
    assert run("rules", "verify", "rules.json", "--no-base")[0] == 0
    out = run("rules", "generate", "--max-ops", "2", "-o", "rules.json", "--format", "json")[1]
    assert json.loads(out)["counts"]["certified"] == 2


def test_the_arguments_of_generate_are_checked(run: Run) -> None:
    assert "Missing option '--output'" in run("rules", "generate")[2]
    assert "'0' is not in the range" in run("rules", "generate", "--max-ops", "0", "-o", "x")[2].replace(
        "0 is", "'0' is"
    )
    _, _, err = run("rules", "generate", "--max-ops", "1", "-o", "x.json", "--operators", "lstm")
    assert "error: operators: 'lstm' is not generated; choose among " in err


# ---- plans from a rule file ----


def whole_rows(*names: str) -> list[dict[str, object]]:
    """Every rule of these rows for the patterns of the model below."""
    patterns = {"linear": "a b, c b -> a c", "relu": "a b -> a b"}
    found = []
    for name in names:
        pattern = Pattern.parse(patterns[name], 2 if name == "linear" else 1)
        found += [derive(name, pattern, choice).to_json() for choice in choices(ROWS[name], pattern)]
    return found


def test_the_search_uses_the_row_rules_of_a_file_and_no_others(run: Run) -> None:
    name = write(*whole_rows("linear"))
    status, out, err = run("plan", "models.py:net", "--rules", name, "--mesh", "x=2")
    assert status == 0, err
    assert "judging" not in err, "these are shipped rules"
    assert out.startswith("Net on local-2")
    certified = Certified.of_file(Path(name))
    tensor = TensorType((4, 8), "float32", (), True)
    assert certified(Node("n", "linear", ()), [tensor, tensor]) == {"R", "C", "P0", "P1", "_0", "i", "o"}
    assert certified(Node("n", "relu", ()), [tensor]) == {"R"}
    reason = certified.reason(Node("n", "relu", ()), [tensor], Split("_0"))
    assert reason == "the rule file has no rule 'relu [a b -> a b] by a'"
    assert certified.equations() == Certified().equations()


def test_the_search_uses_the_equations_of_a_file_and_no_others(run: Run) -> None:
    implied = {**CATALOGUE["add_commutes"].to_json(), "implied_by": ["linear_of_sum"]}
    proof_step = {**CATALOGUE["neg_of_neg"].to_json(), "search": False}
    certified = Certified.of_file(Path(write(SERIAL, PLACED, implied, proof_step)))
    assert certified.equations() == (CATALOGUE["linear_of_sum"],)
    tensor = TensorType((4, 8), "float32", (), True)
    assert "_0" in certified(Node("n", "relu", ()), [tensor])
    assert certified.steps() == Certified().steps()


def test_a_file_of_chains_is_the_only_source_of_chains(run: Run) -> None:
    certified = Certified.of_file(Path(write(STEP_RULES["all_to_all"].to_json())))
    assert certified.steps() == (STEP_RULES["all_to_all"],)


def test_what_of_a_file_is_not_certified_is_left_out_and_said(run: Run) -> None:
    status, _, err = run("plan", "models.py:net", "--rules", write(SERIAL, FALSE, BROKEN), "--mesh", "x=2")
    assert status == 0, err
    assert "mine.json: left out: rules[2] 'broken': rule 'broken': field 'left[0]'" in err
    assert "mine.json: left out: rules[1] 'false': " in err


def test_a_file_without_a_rule_to_use_is_an_error(run: Run) -> None:
    status, _, err = run("plan", "models.py:net", "--rules", write(FALSE, BROKEN), "--mesh", "x=2")
    assert status == 2
    assert "error: mine.json: no rule of it can be used; `shardwright rules verify mine.json` says why" in err


TWICE = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x, y):
        return (self.up(x) + self.up(y)).square().mean()

def twice():
    torch.manual_seed(0)
    return Twice(), {"x": torch.randn(32, 64), "y": torch.randn(32, 64)}
"""


def test_a_plan_that_a_rule_of_a_file_rewrote_verifies_with_it(run: Run) -> None:
    Path("twice.py").write_text(TWICE)
    name = write({**CATALOGUE["sum_of_linears"].to_json(), "name": "mine"})
    alone = ["twice.py:twice", "--cluster", "local:1"]
    status, _, err = run("plan", *alone, "--rules", name, "-o", "plan.json")
    assert status == 0, err
    assert [
        step[0] for r in json.loads(Path("plan.json").read_text())["report"]["rewrites"] for step in r["steps"]
    ] == ["mine"]
    for given in (["--cluster", "local:1"], ["--plan", "plan.json"]):
        status, out, err = run("verify", "twice.py:twice", *given, "--rules", name)
        assert status == 0, err
        assert out.startswith("PASSED: Twice on mesh")
    status, _, err = run("verify", "twice.py:twice", "--plan", "plan.json")
    assert status == 2
    assert "rule 'mine' is not certified here" in err


def test_many_rules_are_judged_by_workers_and_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_FEW", 2)
    monkeypatch.setattr(driver, "num_cpus", lambda: 2)
    guarded = [{**SERIAL, "name": f"from_{i}", "guard": [f"o > {i}"]} for i in range(3)]
    told: list[str] = []
    path = Path(write(*guarded, FALSE))
    certified = Certified.of_file(path, told.append, driver.jury(told.append))
    assert set(certified.by_name()) == {"from_0", "from_1", "from_2"}
    assert told[0] == "mine.json: judging 4 rules that this machine has not judged yet"
    assert "left out: rules[3] 'false': false is false for " in told[-1]
    assert set(Certified.of_file(path, judged=lambda rules: pytest.fail("judged again")).by_name()) == set(
        certified.by_name()
    )


def test_a_false_rule_that_claims_a_certificate_changes_no_model(run: Run) -> None:
    Path("twice.py").write_text(TWICE)
    claim = {"axioms": ["index-semantics"], "prover": prover_digest()}
    wrong = {**CATALOGUE["sum_of_linears"].to_json(), "name": "wrong", "right": ["linear(x, w)"], "certificate": claim}
    name = write(wrong, {**SERIAL, "certificate": claim})
    status, _, err = run("plan", "twice.py:twice", "--cluster", "local:1", "--rules", name, "-o", "plan.json")
    assert status == 0, err
    assert "left out: rules[0] 'wrong': wrong is false for " in err
    assert json.loads(Path("plan.json").read_text())["report"]["rewrites"] == []


@pytest.mark.usefixtures("forked")
def test_ranks_read_the_rule_file(run: Run) -> None:
    status, out, err = run("run", "models.py:net", "--rules", write(SERIAL), "--cluster", "local:2", "--steps", "1")
    assert status == 0, err
    assert out.startswith("step    1  loss ")
    status, _, err = run("run", "models.py:net", "--rules", write(FALSE), "--cluster", "local:2", "--steps", "1")
    assert status == 2
    told = "error: mine.json: no rule of it can be used; `shardwright rules verify mine.json` says why"
    assert err.count(told) == 1, err
