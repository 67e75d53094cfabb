"""What every condition of a match keeps out, on the graph that nothing else would keep out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shardwright.pcg.graph import Graph
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.substitutions.apply import apply
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.match import PartialMatch, extended, places
from shardwright.substitutions.rules.catalogue import CATALOGUE
from tests.substitutions.test_rewrite import graph, rewritten_ok

FUSE = CATALOGUE["fuse_two_linears"]


def roots(rule: Equation, before: Graph) -> list[tuple[str, ...]]:
    """The roots of every match, each applied and checked to compute the same."""
    found = places(rule, before)
    for match in found:
        rewritten_ok(_with_inputs(before), apply(rule, _with_inputs(before), match))
    return [match.roots for match in found]


def _with_inputs(before: Graph) -> Graph:
    return parse_graph(print_graph(before, types=False).replace("parameter()", "input()"))


# ---- cycles ----


@pytest.mark.parametrize("between", ["%c = relu(%a)", "%d = neg(%a)\n%e = neg(%d)\n%c = relu(%e)"])
def test_roots_are_not_replaced_together_where_one_needs_the_other(between: str) -> None:
    """y = x (relu(x vᵀ))ᵀ: fusing both products would need the second weight before it is there."""
    text = f"x[8, 8]\nv[8, 8]\n%a = linear(%x, %v)\n{between}\n%b = linear(%x, %c)"
    assert roots(FUSE, graph(text, outputs="a b")) == []
    assert roots(FUSE, graph(text.replace("%a)", "%v)"), outputs="a b")) == [("a", "b")]


def test_a_root_that_others_read_in_many_ways_is_looked_at_once() -> None:
    """The paths below the first root double with each sum; the nodes do not."""
    doubled = "\n".join(f"%s{i + 1} = add(%s{i}, %s{i})" for i in range(60))
    text = f"x[4, 8]\nv[6, 8]\nw[6, 8]\n%s0 = linear(%x, %v)\n%b = linear(%x, %w)\n{doubled}"
    assert [match.roots for match in places(FUSE, graph(text, outputs="s60 b"))] == [("s0", "b")]


def test_a_variable_is_no_node_that_disappears() -> None:
    """neg(neg(x)) + x with x = the inner neg: it would be needed after it is gone."""
    rule = equation("folded", {"x": "n", "y": "n"}, "add(neg(x), y)", "sub(y, x)")
    assert roots(rule, graph("x[4]\n%a = neg(%x)\n%b = add(%a, %a)", outputs="b")) == []
    assert roots(rule, graph("x[4]\n%a = neg(%x)\n%b = add(%a, %x)", outputs="b")) == [("b",)]


def test_equal_terms_are_one_node_and_different_terms_are_two() -> None:
    rule = equation("twice", {"x": "n"}, "add(neg(x), neg(x))", "neg(add(x, x))")
    both = "x[4]\n%a = neg(%x)\n%b = neg(%x)\n"
    assert roots(rule, graph(both + "%c = add(%a, %b)\n%d = relu(%b)", outputs="c d")) == []
    assert roots(rule, graph(both + "%c = add(%a, %a)\n%d = relu(%b)", outputs="c d")) == [("c",)]
    other = equation("other", {"x": "n", "y": "n"}, "add(neg(x), neg(y))", "neg(add(x, y))")
    assert roots(other, graph(both + "%c = add(%a, %a)\n%d = relu(%b)", outputs="c d")) == []
    assert roots(other, graph(both + "%c = add(%a, %b)", outputs="c")) == [("c",)]


def test_a_variable_is_one_node() -> None:
    rule = equation("doubled", {"x": "n"}, "add(x, x)", "add(add(x, x), sub(x, x))")
    assert roots(rule, graph("x[4]\ny[4]\n%a = add(%x, %y)", outputs="a")) == []
    assert roots(rule, graph("x[4]\ny[4]\n%a = add(%y, %y)", outputs="a")) == [("a",)]


# ---- order ----


def test_roots_with_attributes_match_in_any_order() -> None:
    """What the attributes tell apart is one match, wherever the nodes stand."""
    first, second = (
        f"%{n} = slice(%h) {{dim=1, start={a}, step=1, stop={b}}}" for n, a, b in (("q", 0, 4), ("k", 4, 8))
    )
    before = "x[4, 8]\nw[8, 8]\n%h = linear(%x, %w)\n"
    for lines in ((first, second), (second, first)):
        assert roots(CATALOGUE["unfuse_two_linears"], graph(before + "\n".join(lines), outputs="q k")) == [("q", "k")]


def test_roots_are_looked_for_beside_what_is_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of products in a long graph: the second is among the readers of the first one's operand."""
    text = "\n".join(f"x{i}[4, 8]\nv{i}[6, 8]\nw{i}[6, 8]" for i in range(20))
    text += "".join(f"\n%a{i} = linear(%x{i}, %v{i})\n%b{i} = linear(%x{i}, %w{i})" for i in range(20))
    tried: list[int] = []
    copy = PartialMatch.copy
    monkeypatch.setattr(PartialMatch, "copy", lambda state: tried.append(1) or copy(state))
    found = places(FUSE, graph(text, outputs=" ".join(f"a{i} b{i}" for i in range(20))))
    assert [match.roots for match in found] == [(f"a{i}", f"b{i}") for i in range(20)]
    assert len(tried) == 40 + 2 * 40
    chained = equation("chained", {"x": "n"}, "neg(relu(x)); exp(neg(relu(x)))", "neg(relu(x)); exp(neg(relu(x)))")
    text = "\n".join(f"x{i}[4]\n%r{i} = relu(%x{i})\n%n{i} = neg(%r{i})\n%e{i} = exp(%n{i})" for i in range(20))
    tried.clear()
    assert len(places(chained, graph(text, outputs=" ".join(f"n{i} e{i}" for i in range(20))))) == 20
    assert len(tried) == 20 + 20


# ---- sizes, attributes, guards ----


def test_guards_are_conditions() -> None:
    rule = equation("even", {"x": "n"}, "neg(x)", "neg(neg(neg(x)))", guard=("n % 2 == 0", "n > 2"))
    for size, count in ((2, 0), (3, 0), (4, 1)):
        assert len(roots(rule, graph(f"x[{size}]\n%a = neg(%x)", outputs="a"))) == count


def test_attributes_have_the_values_that_the_rule_says() -> None:
    rule = equation("turned", {"x": "m n"}, "permute(x, dims=(1, 0))", "permute(permute(x, dims=(0, 1)), dims=(1, 0))")
    for dims, count in (("(1, 0)", 1), ("(0, 1)", 0)):
        assert len(roots(rule, graph(f"x[4, 4]\n%a = permute(%x) {{dims={dims}}}", outputs="a"))) == count
    one = equation(
        "one", {"x": "m n"}, "sum(x, dims=(0,), keepdim=False)", "neg(neg(sum(x, dims=(0,), keepdim=False)))"
    )
    for keepdim, count in (("False", 1), ("True", 0)):
        text = f"x[4, 4]\n%a = sum(%x) {{dims=(0,), keepdim={keepdim}}}"
        assert len(roots(one, graph(text, outputs="a"))) == count


def test_what_an_attribute_is_decides_where_a_size_is_another() -> None:
    """The size is bound by the variable first: `stop` has to be it."""
    rule = equation("whole", {"x": "n"}, "slice(x, dim=0, start=0, stop=n, step=1)", "neg(neg(x))")
    for stop, count in ((4, 1), (3, 0)):
        text = f"x[4]\n%a = slice(%x) {{dim=0, start=0, step=1, stop={stop}}}"
        assert len(places(rule, graph(text, outputs="a"))) == count


def test_a_name_that_is_a_tuple_is_no_size() -> None:
    rule = equation("named", {"x": "m n"}, "permute(x, dims=p)", "permute(x, dims=p)", guard=("p + 1 > 0",))
    assert places(rule, graph("x[4, 6]\n%a = permute(%x) {dims=(1, 0)}", outputs="a")) == []


def test_a_dimension_has_at_least_one_element() -> None:
    rule = equation("split", {"x": "m (h d)"}, "relu(reshape(x, shape=(m, h, d)))", "reshape(relu(x), shape=(m, h, d))")
    for shape, heads, count in (((4, 6), (2, 3), 1), ((1, 1), (1, 1), 1), ((4, 0), (0, 3), 0)):
        text = f"x[{shape[0]}, {shape[1]}]\n%y = reshape(%x) {{shape=({shape[0]}, {heads[0]}, {heads[1]})}}\n"
        assert len(places(rule, graph(text + "%z = relu(%y)", outputs="z"))) == count


def test_what_has_no_value_is_no_match() -> None:
    """`m (n c)` of 6 in four blocks: c is no number, and the rule's guard has no value."""
    rule = equation("cut", {"x": "(n c)"}, "relu(x)", "neg(neg(relu(x)))", parameters=("n",))
    before = graph("x[6]\n%y = relu(%x)", outputs="y")
    assert [len(places(rule, before, [n])) for n in (1, 2, 3, 4)] == [1, 1, 1, 0]


def test_operators_have_the_operands_and_attributes_of_the_term() -> None:
    rule = equation("loud", {"x": "n"}, "relu(x)", "relu(relu(x))")
    text = "x[4]\n%a = neg(%x)\n%b = relu(%a)\n%c = relu(%b)"
    assert roots(rule, graph(text, outputs="c")) == [("b",), ("c",)]
    inner = equation("inner", {"x": "n"}, "exp(relu(x))", "exp(neg(neg(relu(x))))")
    assert roots(inner, graph("x[4]\n%a = neg(%x)\n%b = exp(%a)", outputs="b")) == []
    short = equation("short", {"x": "n"}, "slice(x, dim=0, start=0, stop=n)", "neg(neg(x))")
    assert places(short, graph("x[4]\n%a = slice(%x) {dim=0, start=0, step=1, stop=4}", outputs="a")) == []
    joined = equation("joined", {"x": "n", "y": "n"}, "concat(x, y, dim=0)", "neg(neg(concat(x, y, dim=0)))")
    three = graph("x[4]\ny[4]\n%a = concat(%x, %y, %x) {dim=0}\n%b = concat(%x, %y) {dim=0}", outputs="a b")
    assert roots(joined, three) == [("b",)]


def test_places_are_matches_with_every_choice_of_the_parameters() -> None:
    rule = equation(
        "blocks", {"x": "(n c) (k d)"}, "relu(x)",
        "reshape(relu(reshape(x, shape=(n, c, k, d))), shape=(n * c, k * d))",
        parameters=("n", "k"),
    )  # fmt: skip
    before = graph("x[4, 6]\n%y = relu(%x)", outputs="y")
    found = [(m.sizes["n"], m.sizes["k"], m.sizes["c"], m.sizes["d"]) for m in places(rule, before, (1, 2, 3))]
    assert found == [(n, k, 4 // n, 6 // k) for n in (1, 2) for k in (1, 2, 3)]
    assert [m.roots for m in places(FUSE, before)] == []
    text = "x[4, 8]\nv[6, 8]\nw[6, 8]\n%a = linear(%x, %v)\n%b = linear(%x, %w)"
    assert [m.roots for m in places(FUSE, graph(text, outputs="a b"), (2,))] == [("a", "b")]


# ---- what replaces the match ----


def test_a_root_keeps_its_type() -> None:
    """-x of a cast to whole numbers is whole, that of x is not: the root keeps its name, so only its type tells."""
    rule = equation("uncast", {"x": "n"}, "neg(cast(x, dtype=d))", "neg(x)")
    for dtype, count in (("int64", 0), ("float32", 1)):
        text = f"x[4]\n%a = cast(%x) {{dtype='{dtype}'}}\n%b = neg(%a)"
        assert len(places(rule, graph(text, outputs="b"))) == count
    second = equation("second", {"x": "n"}, "neg(x); neg(cast(x, dtype=d))", "neg(x); exp(x)")
    text = "x[4]\n%a = cast(%x) {dtype='int64'}\n%c = neg(%x)\n%b = neg(%a)"
    assert places(second, graph(text, outputs="c b")) == []


def test_no_match_where_the_replacement_has_no_type() -> None:
    rule = equation("turned", {"x": "*b"}, "relu(x)", "permute(permute(relu(x), dims=(1, 0)), dims=(1, 0))")
    assert len(places(rule, graph("x[4, 6]\n%y = relu(%x)", outputs="y"))) == 1
    assert places(rule, graph("x[4]\n%y = relu(%x)", outputs="y")) == []


def test_new_names_are_free() -> None:
    before = graph(
        "x[4, 8]\nv[6, 8]\nw[6, 8]\ngate_concat[1]\ngate_concat_1[1]\ngate_concat_2[1]\n"
        "%gate = linear(%x, %v)\n%up = linear(%x, %w)",
        outputs="gate up gate_concat gate_concat_1 gate_concat_2",
    )
    after = apply(FUSE, before, places(FUSE, before)[0])
    assert [node.name for node in after.nodes if not node.is_leaf] == ["gate_concat_3", "gate_linear", "gate", "up"]


# ---- placement rules, in parallel graphs ----

PARALLEL = """
mesh [dp=2, tp=2]
%x = input() {dtype='float32', grad=True, layouts=('S(0)', 'R'), shape=(8, 12), target='x'}
%w = parameter() {dtype='float32', grad=True, layouts=('R', 'S(0,3)'), shape=(12, 12), target='w'}
%v = combine(%w) {axis='tp'}
%r = relu(%v) split(dp=R, tp=R)
%s = partition(%r) {axis='tp', blocks=3, dim=0}
%y = neg(%x) split(dp=_0, tp=R)
%z = partition(%y) {axis='tp', blocks=1, dim=1}
%u = combine(%z) {axis='tp'}
outputs
"""
COMBINED = {"x": "(n d) m"}


def placed(
    term: str, layouts: Mapping[str, tuple[str, ...]], dims: Mapping[str, str], axes: str, guard: str = ""
) -> Equation:
    conditions = (guard,) if guard else ()
    places_ = {name: list(found) for name, found in layouts.items()}
    return equation("placed", dims, term, term, guard=conditions, axes=tuple(axes.split()), layouts=places_)


def found_in(rule: Equation, axes: Mapping[str, str], before: Graph | None = None) -> list[str]:
    """The nodes that the only root of a placement rule stands for."""
    whole = before or parse_graph(PARALLEL.strip())
    found = extended(PartialMatch(whole, rule, axes), rule.left)
    return [state.placed[rule.left[0]] for state in found if state.solved()]


def test_axes_of_a_rule_are_axes_of_the_mesh() -> None:
    rule = placed("combine(x, axis=a)", {"x": ("S(0, n)",)}, COMBINED, "a")
    assert found_in(rule, {"a": "tp"}) == ["v"]
    assert found_in(rule, {"a": "dp"}) == []
    both = placed("neg(x)", {"x": ("S(0)", "R")}, {"x": "m n"}, "a b")
    assert found_in(both, {"a": "dp", "b": "tp"}) == ["y"]
    assert found_in(both, {"a": "tp", "b": "dp"}) == []


def test_variables_have_the_layouts_of_the_rule() -> None:
    for layout, dims, found in (
        ("S(0, n)", "(n d) m", ["v"]), ("S(0)", "n m", []), ("S(1)", "n m", ["u"]), ("R", "n m", [])
    ):  # fmt: skip
        assert found_in(placed("combine(x, axis=a)", {"x": (layout,)}, {"x": dims}, "a"), {"a": "tp"}) == found


def test_a_partition_has_the_blocks_of_the_rule() -> None:
    plain = placed("partition(x, axis=a, dim=d)", {"x": ("R",)}, {"x": "m n"}, "a")
    assert found_in(plain, {"a": "tp"}) == ["z"]
    blocked = placed("partition(x, axis=a, dim=0, blocks=n)", {"x": ("R",)}, {"x": "(n d) m"}, "a")
    assert found_in(blocked, {"a": "tp"}) == ["s"]


def test_guards_speak_of_the_degrees_of_the_mesh() -> None:
    guarded = "m % a == 0"
    rule = placed("combine(x, axis=a)", {"x": ("S(1)",)}, {"x": "n m"}, "a", guarded)
    assert found_in(rule, {"a": "tp"}) == ["u"]
    for guard, found in (("n > 3 * a", ["u"]), ("n > 4 * a", [])):
        rule = placed("combine(x, axis=a)", {"x": ("S(1)",)}, {"x": "n m"}, "a", guard)
        assert found_in(rule, {"a": "tp"}) == found


def test_in_a_serial_graph_neither_layouts_nor_degrees_are_looked_at() -> None:
    rule = placed("neg(x)", {"x": ("S(1)",)}, {"x": "n m"}, "a", "m % a == 0")
    before = graph("x[4, 7]\n%y = neg(%x)", outputs="y")
    assert found_in(rule, {}, before) == ["y"]
    sized = placed("neg(x)", {"x": ("S(1)",)}, {"x": "n m"}, "a", "m > 7")
    assert found_in(sized, {}, before) == []
