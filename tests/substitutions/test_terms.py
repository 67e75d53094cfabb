from __future__ import annotations

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import equation
from shardwright.substitutions.expressions import expression
from shardwright.substitutions.rules.catalogue import CATALOGUE, SEARCHED
from shardwright.substitutions.rules.rules import rule_from_json
from shardwright.substitutions.rules.steps import STEP_RULES, steps
from shardwright.substitutions.rules.wellformed import equation_from_json
from shardwright.substitutions.terms import Dims, parse_term
from tests.each import each


@each(
    ("text", "value"),
    [
        ("o // 3 + 1", 3),
        ("-o", -6),
        ("(*b, 3, o)", (4, 5, 3, 6)),
        ("len(b)", 2),
        ("iota(len(b))", (0, 1)),
        ("compose(p, q)", (1, 2, 0)),
        ("0 <= o < 7", True),
        ("o % 4 == 0", False),
        ("'none'", "none"),
    ],
)
def test_expressions_have_values(text: str, value: object) -> None:
    assert expression(text).evaluate({"o": 6, "b": (4, 5), "p": (2, 1, 0), "q": (1, 0, 2)}) == value


@each(
    ("text", "message"),
    [
        ("o +", "expression 'o \\+' cannot be read"),
        ("open('x')", r"calls open\('x'\); only \['compose', 'iota', 'len'\] may be called"),
        ("o.size", "Attribute is not part of the language"),
        ("[o]", "List is not part of the language"),
        ("o if p else q", "IfExp is not part of the language"),
        ("b'x'", "the constant b'x' is not allowed"),
    ],
)
def test_what_is_not_an_expression_is_an_error(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        expression(text)


def test_an_expression_without_a_value_is_an_error() -> None:
    with pytest.raises(RuleError, match="name 'o' is not bound; bound are \\['n'\\]"):
        expression("o + n").evaluate({"n": 1})
    with pytest.raises(RuleError, match="expression 'n // 0' has no value for"):
        expression("n // 0").evaluate({"n": 1})
    with pytest.raises(RuleError, match=r"\*b cannot be evaluated here"):
        expression("len(*b)").evaluate({"b": (1, 2)})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear(x", "term 'linear\\(x' cannot be read"),
        ("nothing(x)", "operator 'nothing' has no row in the op table"),
        ("relu(x + y)", "x \\+ y is neither a variable nor an operator applied to terms"),
        ("relu(x, **y)", "attributes are given by name"),
    ],
)
def test_what_is_not_a_term_is_an_error(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_term(text)


@each(
    ("dims", "shape", "sizes"),
    [
        ("*b i", (4, 5, 6), {"b": (4, 5), "i": 6}),
        ("*b i", (6,), {"b": (), "i": 6}),
        ("m *b i", (4, 6), {"m": 4, "b": (), "i": 6}),
        ("o i", (4, 6), {"o": 4, "i": 6}),
        ("", (), {}),
        ("o i", (4,), None),
        ("*b i", (), None),
        ("*b", (0, 4), None),
        ("m (h d)", (4, 6), {"m": 4}),
        ("*b 1 n", (4, 1, 6), {"b": (4,), "n": 6}),
        ("*b 1 n", (4, 2, 6), None),
        ("1", (1,), {}),
    ],
)
def test_dims_bind_sizes(dims: str, shape: tuple[int, ...], sizes: dict[str, object] | None) -> None:
    assert Dims.parse(dims).bind(shape) == sizes


@each(
    ("text", "message"),
    [
        ("*a *b", "at most one splice"),
        ("n n", "every name once"),
        ("n (h n)", "every name once"),
        ("2", "dims '2': expected names such as 'm i', '\\*b i', '\\(h d\\)' or the literal 1"),
        ("(h)", "a product has two or more names, as in '\\(h d\\)'; got '\\(h\\)'"),
        ("(h *b)", "a product has two or more names"),
        ("(h 1)", "a product has two or more names"),
        ("(h d", "a product has two or more names, as in '\\(h d\\)'; got '\\('"),
        ("h d)", "expected names"),
    ],
)
def test_dims_that_cannot_be_read_are_an_error(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Dims.parse(text)


@each("text", ["m i", "*b i", "m (h d)", "*b 1 n", "1", ""])
def test_dims_print_as_they_are_read(text: str) -> None:
    assert str(Dims.parse(text)) == text


@each(
    ("shape", "known", "found"),
    [
        ((4, 6), {"h": 2}, {"d": 3}),
        ((4, 6), {}, {}),
        ((4, 6), {"h": 4}, None),
        ((4, 6), {"h": 2, "d": 4}, None),
        ((4, 6), {"h": 0}, None),
    ],
)
def test_a_product_gives_the_factor_that_is_not_known(
    shape: tuple[int, ...], known: dict[str, int], found: dict[str, int] | None
) -> None:
    assert Dims.parse("m (h d)").factored(shape, known) == found


def test_dims_have_a_shape_at_sizes() -> None:
    dims = Dims.parse("*b 1 (h d)")
    assert dims.shape({"b": (4, 5), "h": 2, "d": 3}) == (4, 5, 1, 6)
    with pytest.raises(RuleError, match=r"dims '\*b 1 \(h d\)': no size for 'd'"):
        dims.shape({"b": (), "h": 2})


@each(
    ("text", "value", "names"),
    [
        ("s", (4, 5), {"s": (4, 5)}),
        ("(m, h, d)", (4, 2, 3), {"m": 4, "h": 2, "d": 3}),
        ("(*b, 3, d)", (4, 5, 3, 7), {"b": (4, 5), "d": 7}),
        ("(m, 2 * h)", (4, 6), {"m": 4}),
        ("(m, h)", (4,), {}),
        ("(m, *b, h)", (4,), {}),
        ("m + 1", 4, {}),
    ],
)
def test_attributes_bind_the_names_they_hold(text: str, value: object, names: dict[str, object]) -> None:
    assert expression(text).read(value) == names


# ---- equations ----


@each("name", CATALOGUE)
def test_every_equation_has_a_json_form_that_reads_back(name: str) -> None:
    rule = CATALOGUE[name]
    assert rule_from_json(rule.to_json()) == rule
    assert equation_from_json(rule.to_json()).hash == rule.hash


def test_the_catalogue_names_no_rule_twice() -> None:
    assert len({rule.hash for rule in CATALOGUE.values()}) == len(CATALOGUE)
    assert set(SEARCHED) < set(CATALOGUE)


def test_an_equation_reads_as_one() -> None:
    assert CATALOGUE["linear_of_sum"].equation == (
        "linear(add(x, y), w) = add(linear(x, w), linear(y, w)) for x: *b i, y: *b i, w: o i"
    )
    assert CATALOGUE["permute_of_none"].equation.endswith("for x: *b where p == iota(len(b))")


@each(
    ("variables", "left", "right", "guard", "message"),
    [
        ({"x": "n"}, "x", "x", (), "field 'left\\[0\\]': the bare variable x would match anything"),
        ({"x": "n"}, "relu(x)", "relu(x); x", (), "1 roots on the left, 2 on the right; give as many"),
        ({}, "relu(x)", "x", (), "field 'left': variable 'x' has no dims"),
        ({"x": "n"}, "relu(x)", "relu(y)", (), "field 'right': variable 'y' has no dims"),
        ({"x": "n", "y": "n"}, "relu(x)", "x", (), "field 'variables.y': 'y' does not occur on the left"),
        ({"x": "n"}, "relu(x)", "permute(x, dims=p)", (), "'p' is not bound by the left side"),
        ({"x": "n"}, "relu(x)", "x", ("m > 1",), "'m' is not bound by the left side"),
        ({"x": "n"}, "nothing(x)", "x", (), "operator 'nothing' has no row"),
    ],
)
def test_a_malformed_equation_is_an_error_that_names_it(
    variables: dict[str, str], left: str, right: str, guard: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RuleError, match=f"rule 'odd': .*{message}"):
        equation("odd", variables, left, right, guard=guard)


def test_a_missing_field_of_an_equation_is_an_error() -> None:
    with pytest.raises(RuleError, match="rule 'odd': field 'variables' is missing"):
        rule_from_json({"form": "equation", "name": "odd"})


# ---- steps ----


@each("name", STEP_RULES)
def test_every_chain_has_a_json_form_that_reads_back(name: str) -> None:
    rule = STEP_RULES[name]
    assert rule_from_json(rule.to_json()) == rule
    assert rule_from_json(rule.to_json()).hash == rule.hash


def test_a_chain_reads_in_order_of_execution() -> None:
    rule = STEP_RULES["reduce_scatter"]
    assert rule.equation == "reduce(a); partition(d, n, a) = reduce_scatter(d, n, a) from a: P"
    assert rule.guard == ("n*k | d",)


@pytest.mark.parametrize(
    ("start", "left", "message"),
    [
        ({"a": "R"}, "jump(a)", "step 'jump\\(a\\)': expected one of"),
        ({"a": "R"}, "partition(a)", "partition is given a dimension|partition is given no dimension"),
        ({"a": "R"}, "reduce(d, n, a)", "reduce is given"),
        ({"a": "Q"}, "", "layout 'Q' is not one of R, C, P or S\\(d, n\\)"),
    ],
)
def test_a_malformed_chain_is_an_error_that_names_it(start: dict[str, str], left: str, message: str) -> None:
    with pytest.raises(RuleError, match=f"rule 'odd': .*({message})"):
        steps("odd", start, left, "")


def test_a_missing_field_of_a_chain_is_an_error() -> None:
    with pytest.raises(RuleError, match="rule 'odd': field 'start' is missing"):
        rule_from_json({"form": "steps", "name": "odd"})


def test_a_chain_along_an_axis_without_a_layout_is_an_error() -> None:
    rule = steps("odd", {"a": "R"}, "reduce(b)", "")
    with pytest.raises(RuleError, match=r"rule 'odd': reduce\(b\) moves along axis 'b', which has no layout"):
        rule.end(rule.left)
