"""Matching and applying algebraic rules: text in, text out, and equal values."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shardwright.pcg.errors import RuleError
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.interpret import run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.substitutions.apply import apply
from shardwright.substitutions.equations import equation
from shardwright.substitutions.match import places
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier.falsifiers.instances import instance
from tests.each import each


def graph(text: str, *, outputs: str) -> Graph:
    """A serial graph from lines without types; `x[4, 8]` declares a parameter."""
    lines = ["mesh []"]
    for line in text.strip().splitlines():
        line = line.strip()
        if "=" not in line:
            name, _, shape = line.partition("[")
            dims = ", ".join(filter(None, shape.rstrip("]").split(", ")))
            dims += "," if dims and "," not in dims else ""
            line = f"%{name} = parameter() {{dtype='float32', grad=True, layouts=(), shape=({dims}), target='{name}'}}"
        lines.append(line)
    pairs = ", ".join(f"{key}=%{key}" for key in outputs.split())
    return parse_graph("\n".join([*lines, f"outputs {pairs}"]))


def rewritten(rule: str, before: Graph, number: int = 0) -> list[str]:
    """The operator nodes after applying a rule, as text, checked to compute the same."""
    after = apply(CATALOGUE[rule], before, places(CATALOGUE[rule], before)[number])
    rng = np.random.default_rng(0)
    leaves = {n.name: rng.standard_normal(before.types[n.name].shape) for n in before.nodes if n.is_leaf}
    values, expected = run_serial(after, leaves), run_serial(before, leaves)
    for (key, new), (_, old) in zip(after.outputs, before.outputs, strict=True):
        np.testing.assert_allclose(values[new], expected[old], atol=1e-12, err_msg=key)
    text = print_graph(after, types=False).splitlines()
    return [line.split(" @")[0].strip() for line in text if line.startswith("%") and "parameter()" not in line]


def test_two_linears_of_one_input_are_fused() -> None:
    before = graph("x[4, 8]\nv[6, 8]\nw[10, 8]\n%gate = linear(%x, %v)\n%up = linear(%x, %w)", outputs="gate up")
    assert rewritten("fuse_two_linears", before) == [
        "%gate_concat = concat(%v, %w) {dim=0}",
        "%gate_linear = linear(%x, %gate_concat)",
        "%gate = slice(%gate_linear) {dim=1, start=0, step=1, stop=6}",
        "%up = slice(%gate_linear) {dim=1, start=6, step=1, stop=16}",
    ]


def test_a_fused_projection_with_bias_is_taken_apart() -> None:
    before = graph(
        "x[4, 8]\nw[12, 8]\nc[12]\n%h = linear(%x, %w)\n%y = add(%h, %c)\n"
        "%q = slice(%y) {dim=1, start=0, step=1, stop=4}\n%k = slice(%y) {dim=1, start=4, step=1, stop=8}\n"
        "%v = slice(%y) {dim=1, start=8, step=1, stop=12}",
        outputs="q k v",
    )
    lines = rewritten("unfuse_three_affine", before)
    assert lines[:4] == [
        "%q_slice = slice(%w) {dim=0, start=0, step=1, stop=4}",
        "%q_linear = linear(%x, %q_slice)",
        "%q_slice_1 = slice(%c) {dim=0, start=0, step=1, stop=4}",
        "%q = add(%q_linear, %q_slice_1)",
    ]
    assert len(lines) == 12


def test_two_permutations_become_one_and_none_disappears() -> None:
    before = graph(
        "x[4, 8, 6]\n%a = permute(%x) {dims=(1, 2, 0)}\n%b = permute(%a) {dims=(2, 0, 1)}\n%y = relu(%b)", outputs="y"
    )
    assert rewritten("permute_of_permute", before) == ["%b = permute(%x) {dims=(0, 1, 2)}", "%y = relu(%b)"]
    once = apply(CATALOGUE["permute_of_permute"], before, places(CATALOGUE["permute_of_permute"], before)[0])
    assert rewritten("permute_of_none", once) == ["%y = relu(%x)"]


def test_an_output_that_becomes_a_variable_is_redirected() -> None:
    before = graph("x[4]\n%a = neg(%x)\n%y = neg(%a)", outputs="y")
    after = apply(CATALOGUE["neg_of_neg"], before, places(CATALOGUE["neg_of_neg"], before)[0])
    assert after.outputs == (("y", "x"),)


def test_new_nodes_carry_the_source_of_what_they_replace() -> None:
    before = graph("x[4, 8]\nv[6, 8]\nw[10, 8]\n%gate = linear(%x, %v)\n%up = linear(%x, %w)", outputs="gate up")
    nodes = tuple(
        node
        if node.is_leaf
        else type(node)(node.name, node.op, node.inputs, node.attrs, (), Source(f"mlp.{node.name}"))
        for node in before.nodes
    )
    after = apply(
        CATALOGUE["fuse_two_linears"],
        moved := Graph(nodes, before.outputs),
        places(CATALOGUE["fuse_two_linears"], moved)[0],
    )
    assert [str(n.source) for n in after.nodes if not n.is_leaf] == ["mlp.gate"] * 3 + ["mlp.up"]


# ---- where a rule does not match ----


def test_no_match_where_a_value_that_disappears_is_read_elsewhere() -> None:
    text = "x[4, 8]\nw[6, 8]\nc[]\n%s = mul(%x, %c)\n%y = linear(%s, %w)\n"
    assert not places(CATALOGUE["linear_of_scaled"], graph(text + "%z = relu(%s)", outputs="y z"))
    assert places(CATALOGUE["linear_of_scaled"], graph(text, outputs="y"))


def test_no_match_where_a_value_that_disappears_is_an_output() -> None:
    text = "x[4, 8]\nw[6, 8]\nc[]\n%s = mul(%x, %c)\n%y = linear(%s, %w)"
    assert not places(CATALOGUE["linear_of_scaled"], graph(text, outputs="y s"))


def test_no_match_where_shapes_broadcast() -> None:
    assert not places(CATALOGUE["add_commutes"], graph("x[4, 8]\ny[1, 8]\n%z = add(%x, %y)", outputs="z"))


def test_no_match_of_unequal_attributes() -> None:
    text = "x[4, 8]\n%a = permute(%x) {dims=(1, 0)}"
    assert not places(CATALOGUE["permute_of_none"], graph(text, outputs="a"))


def test_no_match_where_replacing_roots_together_closes_a_cycle() -> None:
    text = "x[8, 8]\nv[8, 8]\n%a = linear(%x, %v)\n%b = linear(%x, %a)"
    assert not places(CATALOGUE["fuse_two_linears"], graph(text, outputs="a b"))


def test_one_place_is_one_match() -> None:
    text = "x[4, 8]\nu[6, 8]\nv[6, 8]\nw[6, 8]\n%a = linear(%x, %u)\n%b = linear(%x, %v)\n%c = linear(%x, %w)"
    found = [match.roots for match in places(CATALOGUE["fuse_two_linears"], graph(text, outputs="a b c"))]
    assert found == [("a", "b"), ("a", "c"), ("b", "c")]
    three = places(CATALOGUE["fuse_three_linears"], graph(text, outputs="a b c"))
    assert [match.roots for match in three] == [("a", "b", "c")]


def test_no_match_where_the_dtype_would_change() -> None:
    text = "x[4]\n%a = cast(%x) {dtype='int64'}\n%b = neg(%a)\n%c = neg(%b)\n%d = cast(%c) {dtype='float32'}"
    dropped = equation("dropped", {"x": "n"}, "cast(x, dtype=d)", "x")
    assert not places(dropped, graph(text, outputs="d"))


def test_rules_are_for_serial_graphs() -> None:
    parallel = Graph((), (), Mesh.of(dp=2))
    with pytest.raises(
        RuleError, match=r"rule 'neg_of_neg' applies to serial graphs; this one is on the mesh \[dp=2\]"
    ):
        places(CATALOGUE["neg_of_neg"], parallel)


def test_a_match_of_another_graph_is_an_error() -> None:
    before = graph("x[4]\n%a = neg(%x)\n%y = neg(%a)", outputs="y")
    match = places(CATALOGUE["neg_of_neg"], before)[0]
    other = graph("x[4]\n%y = neg(%x)", outputs="y")
    with pytest.raises(RuleError, match="the match names %a, which this graph does not have; match again"):
        apply(CATALOGUE["neg_of_neg"], other, match)


# ---- the whole catalogue ----


@each("name", CATALOGUE)
def test_every_rule_matches_its_own_left_side_and_keeps_the_values(name: str) -> None:
    rng, found = random.Random(3), 0
    while found < 3:
        made = instance(CATALOGUE[name], rng)
        if made is None:
            continue
        found += 1
        before, own = made
        found_here = places(CATALOGUE[name], before, [own.sizes[parameter] for parameter in CATALOGUE[name].parameters])
        assert found_here, print_graph(before)
        rewritten_ok(before, apply(CATALOGUE[name], before, found_here[0]))


def rewritten_ok(before: Graph, after: Graph) -> None:
    rng = np.random.default_rng(0)
    kinds = {n.name: before.types[n.name] for n in before.leaves("input")}
    leaves = {
        name: rng.standard_normal(kind.shape) if kind.grad else rng.integers(0, 2, kind.shape)
        for name, kind in kinds.items()
    }
    values, expected = run_serial(after, leaves), run_serial(before, leaves)
    for (_, new), (_, old) in zip(after.outputs, before.outputs, strict=True):
        np.testing.assert_allclose(values[new], expected[old], atol=1e-9)
        assert after.types[new].erased() == before.types[old].erased()


# ---- products and literal dims ----

SPLIT = equation("split", {"x": "m (h d)"}, "relu(reshape(x, shape=(m, h, d)))", "reshape(relu(x), shape=(m, h, d))")


def test_a_product_is_bound_by_the_attribute_that_splits_it() -> None:
    before = graph("x[4, 6]\n%y = reshape(%x) {shape=(4, 2, 3)}\n%z = relu(%y)", outputs="z")
    (match,) = places(SPLIT, before)
    assert match.sizes == {"m": 4, "h": 2, "d": 3}
    after = print_graph(apply(SPLIT, before, match), types=False)
    assert "%z = reshape(%z_relu) {shape=(4, 2, 3)}" in after


def test_a_reshape_that_mixes_digits_is_no_split() -> None:
    before = graph("x[4, 6]\n%y = reshape(%x) {shape=(2, 4, 3)}\n%z = relu(%y)", outputs="z")
    assert places(SPLIT, before) == []


def test_a_factor_follows_from_the_product_and_a_parameter() -> None:
    rule = equation(
        "blocks", {"x": "m (n c)"}, "relu(x)", "reshape(relu(reshape(x, shape=(m, n, c))), shape=(m, n * c))",
        parameters=("n",),
    )  # fmt: skip
    before = graph("x[4, 6]\n%y = relu(%x)", outputs="y")
    (match,) = places(rule, before, [3])
    assert match.sizes == {"m": 4, "n": 3, "c": 2}
    assert places(rule, before, [4]) == []


def test_a_literal_1_is_a_dimension_of_size_1() -> None:
    rule = equation("row", {"x": "m n", "r": "1 n"}, "add(x, r)", "add(r, x)")
    assert len(places(rule, graph("x[4, 6]\nr[1, 6]\n%y = add(%x, %r)", outputs="y"))) == 1
    assert places(rule, graph("x[4, 6]\nr[4, 6]\n%y = add(%x, %r)", outputs="y")) == []


def test_a_size_bound_twice_must_agree() -> None:
    before = graph("x[4, 6]\n%y = reshape(%x) {shape=(4, 2, 3)}\n%z = reshape(%y) {shape=(4, 6)}", outputs="z")
    rule = equation("back", {"x": "m (h d)"}, "reshape(reshape(x, shape=(m, h, d)), shape=(m, h * d))", "x")
    assert len(places(rule, before)) == 1
    mixed = graph("x[4, 6]\n%y = reshape(%x) {shape=(4, 2, 3)}\n%z = reshape(%y) {shape=(6, 4)}", outputs="z")
    assert places(rule, mixed) == []


def test_a_rule_about_numbers_does_not_match_a_mask_of_bools() -> None:
    """Where a mask of numbers is added, a mask of bools chooses."""
    heads = "q[1, 2, 4, 8]\nk[1, 2, 4, 8]\nv[1, 2, 4, 8]\n"
    rule = CATALOGUE["masked_attention_in_parts"]
    for mask, count in (("m[4, 4]\n", 1), ("m[4, 4]\n%b = gt(%m, %m)\n", 0)):
        used = "b" if "gt" in mask else "m"
        before = graph(heads + mask + f"%y = sdpa(%q, %k, %v, %{used}) {{causal=False, scale=0.5}}", outputs="y")
        assert len(places(rule, before, [2])) == count


def test_bools_match_only_what_moves_them() -> None:
    """The sum of two bools is a bool, so twice True is True, although doubling is exact on numbers."""
    total = "sum({}, dims=(0,), keepdim=False)"
    doubled = total.format("mul(x, full(shape=(), value=2, dtype='int64'))")
    twice = equation("twice", {"x": "m"}, total.format("add(x, x)"), doubled, moves=True)
    for added, count in (("m", 1), ("b", 0)):
        before = graph(
            f"m[4]\n%b = gt(%m, %m)\n%s = add(%{added}, %{added})\n%y = sum(%s) {{dims=(0,), keepdim=False}}",
            outputs="y",
        )
        assert len(places(twice, before)) == count
    turned = graph("m[4, 6]\n%b = gt(%m, %m)\n%s = permute(%b) {dims=(0, 1)}\n%y = relu(%m)", outputs="s")
    assert len(places(CATALOGUE["permute_of_none"], turned)) == 1
