from __future__ import annotations

import pytest

from shardwright.pcg.choice import WHOLE, Split
from shardwright.pcg.errors import LayoutError, RuleError
from shardwright.pcg.layout import Layout, S
from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern, letter, pattern_of
from shardwright.substitutions.rules.rowrules import RowRule, choices, derive
from shardwright.substitutions.rules.rules import rule_from_json
from tests.each import each
from tests.samples import SAMPLES

LINEAR = Pattern.parse("a b, c b -> a c", 2)


def pattern(row: str, *shapes: tuple[int, ...], **attrs: object) -> str:
    return str(pattern_of(ROWS[row].signature(shapes, attrs))[0])  # type: ignore[arg-type]


# ---- patterns ----


@each(
    ("row", "shapes", "attrs", "expected"),
    [
        ("linear", [(4, 8, 12), (16, 12)], {}, "a b c, d c -> a b d"),
        ("slice", [(4, 24)], {"dim": 1, "start": 8, "stop": 16, "step": 1}, "a (b! c) -> a c"),
        ("slice", [(4, 24)], {"dim": 1, "start": 8, "stop": 15, "step": 1}, "a b! -> a c!"),
        ("add", [(4, 8), ()], {}, "a b,  -> a b"),
        ("full", [], {"shape": (4,), "value": 0, "dtype": "float32"}, "-> a"),
        ("mul", [(4, 1), (4, 8)], {}, "a 1, a b -> a b"),
    ],
)
def test_a_pattern_forgets_sizes_and_names(
    row: str, shapes: list[tuple[int, ...]], attrs: dict[str, object], expected: str
) -> None:
    found = pattern(row, *shapes, **attrs)
    assert found == expected
    assert str(Pattern.parse(found, len(shapes))) == found


@each("row", SAMPLES)
def test_every_pattern_prints_and_parses(row: str) -> None:
    for given in SAMPLES[row]:
        signature = ROWS[row].signature(given.shapes, dict(given.attrs))
        found, names = pattern_of(signature)
        assert Pattern.parse(str(found), len(found.operands)) == found
        sizes = {names[i]: f.size for i, f in enumerate(signature.factors)}
        assert found.shapes(sizes) == (*given.shapes, signature.result_shape)


def test_there_are_always_letters_left() -> None:
    assert [letter(i) for i in (0, 25, 26, 53)] == ["a", "z", "a1", "b2"]


@pytest.mark.parametrize(
    ("text", "num_operands", "message"),
    [
        ("a b, c b", 2, "expected 2 operands, '->' and a result"),
        ("a b -> a", 2, "expected 2 operands, '->' and a result"),
        ("a B -> a", 1, "cannot read 'a B'; expected factors"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_an_error(text: str, num_operands: int, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Pattern.parse(text, num_operands)


# ---- placements ----


@each("text", ["R", "C", "P", "S(0)", "S(2, a)", "S(1, a*b1)"])
def test_placements_print_and_parse(text: str) -> None:
    assert str(Placement.parse(text)) == text


@each("text", ["Q", "S()", "S(-1)", "S(0, 2)", "S(0,a*)"])
def test_a_placement_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(RuleError, match=r"is not one of R, C, P, S\(dim\) or S\(dim, a\*b\)"):
        Placement.parse(text)


def test_a_placement_at_concrete_sizes_is_a_layout() -> None:
    assert Placement.parse("S(1, a*b)").at({"a": 3, "b": 4}) == S(1, 12)
    assert Placement.parse("C").at({}) == Layout("C")
    assert Placement.parse("C").dual == Placement.parse("P")


# ---- rules ----


def test_the_rules_of_a_linear_layer() -> None:
    found = {choice: derive("linear", LINEAR, choice).equation for choice in choices(ROWS["linear"], LINEAR)}
    assert found == {
        "R": "linear(x0:R, x1:R) : R",
        "C": "linear(x0:C, x1:C) : C",
        "P0": "linear(x0:P, x1:C) : P where additive 0",
        "P1": "linear(x0:C, x1:P) : P where additive 1",
        "a": "linear(x0:S(0), x1:C) : S(0) where k | a",
        "b": "linear(x0:S(1), x1:S(1)) : P where k | b and numeric",
        "c": "linear(x0:C, x1:S(0)) : S(1) where k | c",
    }


def test_blocks_are_products_of_factors_not_numbers() -> None:
    rule = derive("reshape", Pattern.parse("(a b c) -> a b c", 1), Split("c"))
    assert [str(p) for p in (*rule.operands, rule.result)] == ["S(0, a*b)", "S(2)"]


@each("row", SAMPLES)
def test_rules_are_what_split_layouts_derives_at_every_size(row: str) -> None:
    for given in SAMPLES[row]:
        signature = ROWS[row].signature(given.shapes, dict(given.attrs))
        found, names = pattern_of(signature)
        sizes = {names[i]: f.size for i, f in enumerate(signature.factors)}
        for index, factor in enumerate(signature.factors):
            if factor.role != "fixed":
                rule = derive(row, found, Split(names[index]))
                layouts = tuple(p.at(sizes) for p in rule.operands), rule.result.at(sizes)
                assert layouts == signature.split_layouts(index)


def test_what_the_local_operator_is_told() -> None:
    assert derive("embedding", Pattern.parse("a b, c -> c b", 2), parse_choice("a")).local == ("offset",)
    assert derive("embedding", Pattern.parse("a b, c -> c b", 2), parse_choice("b")).local == ()
    assert derive("dropout", Pattern.parse("a b -> a b", 1), parse_choice("b")).local == ("shard",)
    assert derive("reshape", Pattern.parse("(a b) -> a b", 1), Split("a")).local == ("attrs",)
    assert derive("reshape", Pattern.parse("(a b) -> a b", 1), WHOLE).local == ()


@each("row", SAMPLES)
def test_every_rule_has_a_json_form_that_reads_back(row: str) -> None:
    for given in SAMPLES[row]:
        found, _ = pattern_of(ROWS[row].signature(given.shapes, dict(given.attrs)))
        for choice in choices(ROWS[row], found):
            rule = derive(row, found, choice)
            assert rule_from_json(rule.to_json()) == rule


def test_the_hash_names_the_rule() -> None:
    rule = derive("linear", LINEAR, parse_choice("a"))
    assert rule.hash == RowRule.from_json(rule.to_json()).hash
    assert rule.hash != derive("linear", LINEAR, parse_choice("b")).hash


@each(
    ("change", "message"),
    [
        (
            {"form": "other"},
            "rule '\\?': field 'form': expected one of 'row', 'steps', 'equation', got 'other'",
        ),
        ({"row": "nothing"}, "row rule 'nothing': field 'row': operator 'nothing' has no row in the op table"),
        ({"pattern": None}, "row rule 'linear': field 'pattern' is missing"),
        ({"pattern": "a ->"}, "expected 2 operands"),
        ({"result": "Q"}, "placement 'Q' is not one of"),
    ],
)
def test_a_malformed_row_rule_is_an_error(change: dict[str, object], message: str) -> None:
    data = {**derive("linear", LINEAR, parse_choice("a")).to_json(), **change}
    with pytest.raises(RuleError, match=message):
        rule_from_json({key: value for key, value in data.items() if value is not None})


def test_something_else_than_an_object_is_no_rule() -> None:
    with pytest.raises(RuleError, match=r"rule '\?': expected an object with the field 'form', got \[\]"):
        rule_from_json([])


def test_a_row_offers_no_other_choices() -> None:
    with pytest.raises(LayoutError, match="linear is not jointly linear in operands"):
        derive("linear", LINEAR, parse_choice("P0,1"))
    with pytest.raises(LayoutError, match="softmax cannot be split along 'b'"):
        derive("softmax", Pattern.parse("a b! -> a b!", 1), parse_choice("b"))


def test_too_many_factors_are_an_error() -> None:
    text = " ".join(letter(i) for i in range(513))
    with pytest.raises(RuleError, match="relu: a pattern of 513 factors; at most 512 are supported"):
        derive("relu", Pattern.parse(f"{text} -> {text}", 1), parse_choice("a"))
