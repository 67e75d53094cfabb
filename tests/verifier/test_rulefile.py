"""Rule files of any origin: every mistake is named by rule and field, and the other rules are still read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.pcg.errors import RuleError
from shardwright.pcg.offers import parse_choice
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.fields import digest
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import derive
from shardwright.substitutions.rules.rules import rule_from_json
from shardwright.substitutions.rules.steps import STEP_RULES
from shardwright.verifier import rulefile
from shardwright.verifier.rulefile import RuleFile, read_rules
from tests.each import each

ROW = derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b")).to_json()
STEPS = STEP_RULES["all_to_all"].to_json()
SERIAL = CATALOGUE["linear_of_sum"].to_json()
PLACED = equation(
    "placed", {"x": "m (h d)", "w": "o i"}, "reshape(linear(combine(x, axis=a), combine(w, axis=a)), shape=(m, h, d))",
    "reshape(reduce(linear(x, w), axis=a), shape=(m, h, d))", guard=("h * d == i", "n < d"), axes=("a",),
    layouts={"x": ("S(1)",), "w": ("S(1)",)}, parameters=("n",),
).to_json()  # fmt: skip
GOOD = [ROW, STEPS, SERIAL, PLACED]


def file_of(tmp_path: Path, *rules: object, **head: object) -> RuleFile:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"version": 1, **head, "rules": list(rules)}))
    return read_rules(path)


def problem(tmp_path: Path, rule: object) -> str:
    """What is wrong with a rule between two good ones, which are read all the same."""
    found = file_of(tmp_path, STEPS, rule, SERIAL)
    assert [entry.rule is None for entry in found.entries] == [False, True, False]
    return f"{found.entries[1].where}: {found.entries[1].problem}"


@each("rule", CATALOGUE.values(), ids=lambda rule: rule.name)
def test_every_hand_named_rule_survives_its_json_form(rule: Equation) -> None:
    assert rule_from_json(json.loads(json.dumps(rule.to_json()))) == rule


def test_good_rules_are_read(tmp_path: Path) -> None:
    found = file_of(tmp_path, *GOOD)
    assert not found.malformed
    assert [rule.to_json() for _, rule in found.good] == GOOD
    assert [entry.name for entry in found.entries][1:] == ["all_to_all", "linear_of_sum", "placed"]
    assert [(entry.key, entry.data) for entry in found.entries] == [(digest(rule), rule) for rule in GOOD]


EQUATIONS = [
    ({"left": "linear(x, w)"}, "field 'left': expected a list of text, got 'linear(x, w)'"),
    ({"left": []}, "field 'left': the pattern is empty; give at least one root"),
    ({"left": [""]}, "field 'left[0]': expected text, got none"),
    ({"left": [3]}, "field 'left[0]': expected text, got 3"),
    ({"left": ["x"]}, "field 'left[0]': the bare variable x would match anything"),
    ({"left": ["linea(x, w)"]}, "field 'left[0]': term 'linea(x, w)': operator 'linea' has no row in the op table"),
    ({"left": ["linear(add(x, y, w))"]}, "field 'left[0]': add has 2 operands, got 3 in add(x, y, w)"),
    ({"left": ["linear(add(x, y), w, dim=1)"]}, "w, dim=1): got an unexpected keyword argument 'dim'"),
    ({"left": ["mul(add(x, y), w, dim=1)"]}, "field 'left[0]': mul has no attributes, got 'dim'"),
    ({"left": ["linear(sum(add(x, y), dims=(0,)), w)"]}, "dims=(0,)): missing a required argument: 'keepdim'"),
    ({"left": ["linear(add(x, y)), w)"]}, "field 'left[0]': term 'linear(add(x, y)), w)' cannot be read: unmatched"),
    ({"left": ["neg(" * 500 + "x" + ")" * 500]}, "cannot be read: too many nested parentheses"),
    ({"left": ["-" * 5000 + "x"]}, "cannot be read: it is nested too deeply"),
    ({"left": ["x" * 9000]}, "field 'left[0]': 9000 characters; at most 8000 are read"),
    ({"left": ["neg(x)"] * 200}, "field 'left': 200 entries; at most 100 are read"),
    ({"left": ["add(x, y)\u202e"]}, r"field 'left[0]': the character '\u202e' does not belong in a rule"),
    ({"left": ["linear(add(x, y), w)"], "right": ["linear(z, w)"]}, "field 'right': variable 'z' has no dims"),
    ({"variables": {"x": "*b i", "y": "*b i", "w": "o i", "v": "o"}}, "field 'variables.v': 'v' does not occur on"),
    ({"variables": ["x"]}, "field 'variables': expected an object, got ['x']"),
    ({"variables": {"x": 3, "y": "*b i", "w": "o i"}}, "field 'variables.x': expected text, got 3"),
    ({"variables": {"x": "*b *c", "y": "*b i", "w": "o i"}}, "field 'variables.x': dims '*b *c': at most one splice"),
    ({"variables": {"x": "len i", "y": "*b i", "w": "o i"}}, "field 'variables.x': 'len' is a reserved word"),
    ({"variables": {"x y": "i"}}, "field 'variables': 'x y' is not a name"),
    ({"guard": "o > 1"}, "field 'guard': expected a list of text, got 'o > 1'"),
    ({"guard": ["o > z"]}, "field 'guard': 'z' is not bound by the left side"),
    ({"guard": ["o + 1"]}, "field 'guard[0]': expected a comparison such as 'o > 1', got 'o + 1'"),
    ({"guard": ["True"]}, "field 'guard[0]': expected a comparison such as 'o > 1', got 'True'"),
    ({"guard": ["o < nan"]}, "field 'guard': 'nan' is not bound by the left side"),
    ({"left": ["linear(softmax(add(x, y), dim='all'), w)"]},
     "field 'left[0]': softmax: dim: expected an integer, got 'all'"),
    ({"left": ["linear(softmax(add(x, y), dim=0.5), w)"]}, "softmax: dim: expected an integer, got 0.5"),
    ({"left": ["linear(sum(add(x, y), dims=(0,), keepdim=1), w)"]}, "sum: keepdim: expected True or False, got 1"),
    ({"left": ["linear(permute(add(x, y), dims=(0.5, 1)), w)"]}, "dims: expected a tuple of integers, got (0.5, 1)"),
    ({"right": ["embedding(x, y, padding_idx='a')"]},
     "field 'right[0]': embedding: padding_idx: expected an integer or None, got 'a'"),
    ({"variables": {"x": "*b i", "y": "*b i", "w": " ".join(f"o{i}" for i in range(65))}},
     "field 'variables.w': 65 dimensions; at most 64 are read"),
    ({"variables": {"x": "*b i", "y": "*b i", "w": " ".join(["o"] * 100_000)}}, "199999 characters; at most 8000 are"),
    ({"guard": ["o >"]}, "field 'guard[0]': expression 'o >' cannot be read"),
    ({"guard": ["o < 2147483648"]}, "field 'guard[0]': the number 2147483648 is out of range; sizes are below 2^31"),
    ({"guard": ["o < 1" + "0" * 5000]}, "field 'guard[0]': expression"),
    ({"guard": ["o < 1e999"]}, "field 'guard[0]': the number inf is not finite"),
    ({"guard": ["o.size > 1"]}, "Attribute is not part of the language"),
    ({"moves": "yes"}, "field 'moves': expected true or false, got 'yes'"),
    ({"axes": ["a"]}, "layouts: 'w' has no layout"),
    ({"axes": ["a", "a"], "layouts": {v: ["R", "R"] for v in "xyw"}}, "field 'axes': 'a' is named twice"),
    ({"axes": ["2"], "layouts": {v: ["R"] for v in "xyw"}}, "field 'axes': '2' is not a name"),
    ({"layouts": {"x": []}}, "field 'layouts': layouts are along mesh axes; name them in 'axes'"),
    ({"axes": ["a"], "layouts": {"x": "R"}}, "field 'layouts.x': expected a list of text, got 'R'"),
    ({"axes": ["a"], "layouts": {v: ["Q"] for v in "xyw"}}, "field 'layouts.x[0]': placement 'Q' is not one of"),
    ({"axes": ["a"], "layouts": {v: ["S(2)"] for v in "xyw"}},
     "field 'layouts.w': S(2) shards dimension 2, but w has the dims 'o i'"),
    ({"axes": ["a"], "layouts": {v: ["R", "R"] for v in "xyw"}}, "layouts: 'x' has 2 for the axes (a); give one"),
    ({"left": ["linear(add(combine(x, axis=a), y), w)"]}, "moves along a, which is not among axes []"),
    ({"parameters": ["n"]}, "field 'parameters': 'n' is used nowhere"),
    ({"parameters": ["o"]}, "field 'parameters': 'o' is bound by the left side already"),
    ({"parameters": ["n", "n"]}, "field 'parameters': 'n' is named twice"),
    ({"name": 7}, "rules[1] '?': rule '?': field 'name': expected text, got 7"),
    ({"name": ""}, "rules[1] '?': rule '?': field 'name': expected text, got none"),
    ({"name": "all_to_all"}, "field 'name': 'all_to_all' is the name of rules[0] already"),
    ({"lhs": []}, "unknown field 'lhs'; expected 'name', 'variables', 'left', 'right', 'form', 'guard'"),
    ({"form": "theorem"}, "field 'form': expected one of 'row', 'steps', 'equation', got 'theorem'"),
    ({"form": ["row"]}, "field 'form': expected one of 'row', 'steps', 'equation', got ['row']"),
    ({"implied_by": ["nobody"]}, "field 'implied_by': the file has no rule 'nobody'"),
    ({"implied_by": ["sum"]}, "field 'implied_by': it is implied by itself, in a circle"),
    ({"search": 1}, "field 'search': expected true or false, got 1"),
]  # fmt: skip


@each(("change", "message"), EQUATIONS, ids=[m[:60] for _, m in EQUATIONS])
def test_a_malformed_equation_is_named_with_its_field(
    tmp_path: Path, change: Mapping[str, object], message: str
) -> None:
    said = problem(tmp_path, {**SERIAL, "name": "sum", **change})
    assert message in said
    assert said.startswith("rules[1] 'sum': ") or "name" in change
    assert len(said) < 1000 or "characters" not in said


STEP_ERRORS = [
    ({"start": {}}, "field 'start': expected layouts on the axes a and b, got []"),
    ({"start": {"q": "R"}}, "field 'start': expected layouts on the axes a and b, got ['q']"),
    ({"start": {"a": "S(d)"}}, "field 'start.a': layout 'S(d)' is not one of R, C, P or S(d, n)"),
    ({"left": []}, "field 'left': no steps; an empty chain would match anything"),
    ({"left": ["combine(b)"]}, "combine(b) moves along axis 'b', which has no layout"),
    ({"left": ["reduce(a)"]}, "reduce(a) steps from P, got S(d, n)"),
    ({"left": ["shuffle(a)"]}, "field 'left[0]': step 'shuffle(a)': expected one of"),
    ({"right": {"a": 1}}, "field 'right': expected a list of text, got {'a': 1}"),
    ({"guard": []}, "unknown field 'guard'"),
]


@each(("change", "message"), STEP_ERRORS, ids=[m[:60] for _, m in STEP_ERRORS])
def test_a_malformed_chain_is_named_with_its_field(tmp_path: Path, change: Mapping[str, object], message: str) -> None:
    assert message in problem(tmp_path, {**STEPS, "name": "chain", **change})


ROW_ERRORS = [
    ({"row": "lstm"}, "field 'row': operator 'lstm' has no row in the op table"),
    ({"pattern": "a b -> a"}, "field 'pattern': pattern 'a b -> a': expected 2 operands"),
    ({"pattern": "a b, c b -> a b"}, "linear never has the pattern 'a b, c b -> a b'; on these operands it is"),
    ({"pattern": "a b, c d -> a c"}, "linear never has the pattern 'a b, c d -> a c'"),
    ({"choice": "z"}, "field 'choice': 'z' is none of R, C, P with operands (P0 or P0,1), or a factor of"),
    ({"choice": "P7"}, "field 'choice': 'P7' names operand 7 of 2"),
    ({"operands": ["S(1)", "S(2)"]}, "field 'operands[1]': S(2) shards dimension 2 of 2"),
    ({"operands": ["S(1)"]}, "expected 1 operands, '->' and a result"),
    ({"operands": ["S(1, z)", "S(1)"]}, "field 'operands[0]': S(1, z): 'z' is not a factor of"),
    ({"result": "S(5)"}, "field 'result': S(5) shards dimension 5 of 2"),
    ({"result": 5}, "field 'result': expected text, got 5"),
    ({"guard": ["b > 1"]}, "field 'guard[0]': 'b > 1' is none of 'k | a', 'numeric' or 'additive 0'"),
    ({"local": ["name"]}, "field 'local[0]': 'name' is none of attrs, offset or shard"),
    ({"name": "x"}, "unknown field 'name'"),
]


@each(("change", "message"), ROW_ERRORS, ids=[m[:60] for _, m in ROW_ERRORS])
def test_a_malformed_row_rule_is_named_with_its_field(
    tmp_path: Path, change: Mapping[str, object], message: str
) -> None:
    assert message in problem(tmp_path, {**ROW, **change})


def test_what_is_no_rule_at_all_leaves_the_others_alone(tmp_path: Path) -> None:
    found = file_of(tmp_path, 1, None, "x", [], {}, True, SERIAL)
    assert [entry.rule is None for entry in found.entries] == [True] * 6 + [False]
    assert "expected an object, got 1" in found.entries[0].problem
    assert found.entries[4].problem == "rule '?': field 'form': expected one of 'row', 'steps', 'equation', got None"


def test_a_key_given_twice_is_an_error_of_its_rule(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    twice = json.dumps(SERIAL).replace('"guard"', '"moves": true, "guard"')
    path.write_text('{"version": 1, "rules": [' + twice + "," + json.dumps(STEPS) + "]}")
    first, second = read_rules(path).entries
    assert "unknown field 'moves (given twice)'" in first.problem
    assert second.rule is not None


def test_circles_of_implication_are_found(tmp_path: Path) -> None:
    def named(name: str, *implied_by: str) -> dict[str, Any]:
        return {**SERIAL, "name": name, "implied_by": list(implied_by)}

    found = file_of(tmp_path, named("a", "b"), named("b", "a"), named("c", "d"), named("d"), named("e", "a"))
    assert [entry.name for entry in found.malformed] == ["a", "b", "e"]


def test_what_older_versions_said_of_proofs_is_not_read(tmp_path: Path) -> None:
    for said in ({"axioms": ["digits"], "solver": "z3 4"}, 3, None, {"by": "me"}):
        found = file_of(tmp_path, {**SERIAL, "certificate": said}, prover={"digest": "anything"})
        assert not found.malformed
        assert found.entries[0].data == SERIAL


def test_known_rules_are_not_parsed_again_and_what_is_beside_them_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = tmp_path / "rules.json", {digest(rule) for rule in GOOD}
    odd = [
        {**ROW, "name": "a row has none"}, {**SERIAL, "name": "line\nbreak"}, {**SERIAL, "name": 7},
        {k: v for k, v in STEPS.items() if k != "name"}, {**STEPS, "name": " "}, {**STEPS, "name": "x", "search": 1},
        {**STEPS, "name": "y", "implied_by": ["nobody"]}, {**SERIAL, "moves": 0}, {**SERIAL, "left": ["linear(x, w)"]},
    ]  # fmt: skip
    path.write_text(json.dumps({"version": 1, "rules": [*GOOD, *odd]}))
    fresh, again = read_rules(path), read_rules(path, known)
    told = [(e.name, e.problem, e.key, e.data, e.rule) for e in fresh.entries]
    assert told == [(e.name, e.problem, e.key, e.data, e.rule) for e in again.entries]
    assert [bool(entry.problem) for entry in again.entries] == [False] * len(GOOD) + [True] * len(odd)
    path.write_text(json.dumps({"version": 1, "rules": GOOD}))
    monkeypatch.setattr(rulefile, "rule_from_json", lambda data: pytest.fail("parsed"))
    assert [entry.name for entry in read_rules(path, known).entries] == [entry.name for entry in fresh.entries[:4]]


def test_rules_are_found_by_name_or_part_of_it(tmp_path: Path) -> None:
    found = file_of(tmp_path, *GOOD)
    assert found.named("placed").position == 3
    assert found.named("_of_su").name == "linear_of_sum"
    with pytest.raises(RuleError, match="no rule is called 'nothing'; `shardwright rules list` shows all 4"):
        found.named("nothing")
    with pytest.raises(RuleError, match="4 rules have 'l' in their names; say which: 'linear "):
        found.named("l")


# ---- anything at all ----

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
        ["", "x", "R", "S(1)", "linear(x, w)", "a b -> a", "k | a", "*b i", "-x", "((x))", "x;y", "x" * 9000, "1" * 20]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in plain data, inside out."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [place for key, item in items for place in places(item, (*here, key))] + [here]


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = changed(copy[place[0]], place[1:], new)
    return copy


def judged(data: object) -> None:
    """A rule is read, or is a `RuleError`; nothing else."""
    try:
        rule = rule_from_json(data)
    except RuleError as error:
        str(error).encode()
        return
    assert rule_from_json(json.loads(json.dumps(rule.to_json()))) == rule


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_mutated_rules_are_read_or_are_rule_errors(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places(rule)))
        rule = changed(rule, place, data.draw(JSON))
    judged(rule)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_mutated_text_is_read_or_is_a_rule_error(data: st.DataObject) -> None:
    """Cut, doubled and inserted characters inside the texts of a rule."""
    rule = data.draw(st.sampled_from(GOOD))
    texts = [p for p in places(rule) if isinstance(at(rule, p), str)]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(texts))
        text = at(rule, place)
        start, stop = (data.draw(st.integers(0, len(text))) for _ in range(2))
        extra = data.draw(
            st.sampled_from(["", "(", ")", ",", "*", " ", "x", "1", "-", "\n", "'", "=", "**x", "é", ";"])
        )
        rule = changed(rule, place, text[:start] + extra + text[stop:])
    judged(rule)


def at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW)
@given(data=JSON)
def test_anything_is_read_or_is_a_rule_error(data: Any) -> None:
    judged(data)
    judged({"form": "equation", "name": "x", "variables": data, "left": data, "right": data})


def test_a_name_that_cannot_be_shown_is_not(tmp_path: Path) -> None:
    """Half of a surrogate pair has no UTF-8."""
    (entry,) = file_of(tmp_path, {**SERIAL, "name": "\ud800"}).entries
    assert entry.name == "?"
    assert entry.problem == r"rule '?': field 'name': the character '\ud800' does not belong in a rule"
