"""Placement rules: what the enumeration finds, that it is true on devices, and that the prover agrees."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardwright.pcg.errors import LayoutError, RuleError
from shardwright.pcg.mesh import Mesh
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.generator.canonical import canonical
from shardwright.substitutions.generator.context import PlacementContext, placed
from shardwright.substitutions.generator.contexts.placement import PLACEMENT_CONTEXTS
from shardwright.substitutions.generator.primesizes import PrimeSizes
from shardwright.substitutions.generator.sources import candidates
from shardwright.substitutions.generator.typetable import PlacedType, Template, TensorShape, TypeTable
from shardwright.substitutions.terms import Apply, subterms
from shardwright.verifier.placement.typing import prove_placement, required_guard
from tests.each import each, some
from tests.verifier import gradients
from tests.verifier.gradients import gradient_difference
from tests.verifier.rechecking import recheck

DENSE = placed("d", "x: m i, w: o i", "linear relu softmax(dim=1) permute(dims=(1, 0))")
HEADS = placed("h", "x: m (h d)", "reshape(shape=(m, h, d)) relu concat(dim=1)")
LOOKUP = placed("l", "w: v h, t: n -> v", "embedding(padding_idx=pad) add")
LOSS = placed("c", "x: m v, t: m -> v", "cross_entropy_sum(ignore_index=ignore, label_smoothing=smoothing)")
AXES = placed("t", "x: m i", "relu", axes=("a", "b"))
SMALL = (DENSE, HEADS, LOOKUP, LOSS, AXES)


@pytest.fixture(scope="module")
def found() -> Mapping[str, list[Equation]]:
    return {context.name: candidates(context, 3, 0) for context in SMALL}


@each(
    ("context", "text"),
    [
        ("d", ("linear(combine(x, axis=a), combine(y, axis=a)) = reduce(linear(x, y), axis=a)"
              " for x: i o in S(1), y: k o in S(1) where o % a == 0")),
        ("d", ("combine(linear(replicate(x, axis=a), y), axis=a) = linear(x, combine(y, axis=a))"
              " for x: i o in R, y: k o in S(0) where k % a == 0")),
        ("d", ("reduce(linear(replicate(x, axis=a), y), axis=a) = linear(x, reduce(y, axis=a))"
              " for x: i o in R, y: k o in P")),
        ("d", ("softmax(combine(x, axis=a), dim=1) = combine(softmax(x, dim=1), axis=a)"
              " for x: i o in S(0) where i % a == 0")),
        ("d", ("permute(partition(x, axis=a, dim=1), dims=(1, 0)) = partition(permute(x, dims=(1, 0)), axis=a, dim=0)"
              " for x: i o in R where o % a == 0")),
        ("d", ("relu(partition(relu(x), axis=a, dim=0)) = partition(relu(x), axis=a, dim=0)"
              " for x: i o in R where i % a == 0")),
        ("h", ("reshape(combine(x, axis=a), shape=(i, o, k)) = combine(reshape(x, shape=(i, o, k)), axis=a)"
              " for x: i (o k) in S(1, o) where k % a == 0")),
        ("h", ("concat(combine(x, axis=a), combine(x, axis=a), dim=1) = combine(concat(x, x, dim=1), axis=a)"
              " for x: i (o k) in S(1) where k * o % a == 0")),
        ("l", ("reduce(embedding(x, replicate(y, axis=a), padding_idx=pad), axis=a) ="
              " embedding(combine(x, axis=a), y, padding_idx=pad) for x: i o in S(0), y: k in R where i % a == 0")),
        ("c", ("cross_entropy_sum(combine(x, axis=a), combine(y, axis=a), ignore_index=ignore,"
              " label_smoothing=smoothing) ="
              " reduce(cross_entropy_sum(x, y, ignore_index=ignore, label_smoothing=smoothing), axis=a)"
              " for x: i o in S(0), y: i in S(0) where i % a == 0")),
        ("t", ("reduce(combine(x, axis=b), axis=a) = combine(reduce(x, axis=a), axis=b)"
              " for x: i o in P S(1) where o % b == 0")),
    ],
)  # fmt: skip
def test_the_rules_of_rows_and_of_parallel_operators_come_out(
    found: Mapping[str, list[Equation]], context: str, text: str
) -> None:
    left, _, rest = text.partition(" = ")
    right, _, variables = rest.partition(" for ")
    assert {text, f"{right} = {left} for {variables}"} & {rule.equation for rule in found[context]}


def test_every_rule_is_proven_under_the_guard_that_typing_asks_for(found: Mapping[str, list[Equation]]) -> None:
    for rule in (rule for rules in found.values() for rule in rules):
        assert prove_placement(rule).failure is None, rule.equation
        assert set(required_guard(rule)) == set(rule.guard), rule.equation


def test_gradients_are_those_of_the_serial_graph(found: Mapping[str, list[Equation]]) -> None:
    rules = [rule for name in "dhlt" for rule in found[name]]
    for rule in random.Random(0).sample(rules, 20):
        assert gradient_difference(rule, Mesh(rule.axes, (2, 3)[: len(rule.axes)])) is None


def test_a_wrong_adjoint_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = equation("wrong", {"x": "m i", "w": "o i"}, "combine(linear(replicate(x, axis=a), w), axis=a)",
                    "linear(x, combine(w, axis=a))", axes=("a",), layouts={"x": ["R"], "w": ["S(0)"]})  # fmt: skip
    assert gradient_difference(rule, Mesh.of(a=2)) is None
    monkeypatch.setattr(gradients, "ADJOINT", {**gradients.ADJOINT, "replicate": "replicate"})
    with pytest.raises(LayoutError, match="copies at 0 and 1 differ"):
        gradient_difference(rule, Mesh.of(a=2))


@pytest.mark.parametrize(
    ("left", "right", "layout", "what"),
    [
        ("relu(combine(x, axis=a))", "combine(x, axis=a)", "S(0)", "different values"),
        ("permute(combine(x, axis=a), dims=(1, 0))", "permute(x, dims=(1, 0))", "S(0)", "the left is .* the right"),
        ("reduce(relu(x), axis=a)", "relu(reduce(x, axis=a))", "P", "relu has no split for operands in P"),
        ("combine(reduce(x, axis=a), axis=a)", "reduce(x, axis=a)", "P", "combine steps from S"),
    ],
)
def test_false_rules_differ_on_devices(left: str, right: str, layout: str, what: str) -> None:
    rule = equation("false", {"x": "m i"}, left, right, ("m % a == 0",), axes=("a",), layouts={"x": [layout]})
    assert re.search(what, recheck([rule])["false"])


def test_results_depend_on_the_seed_in_nothing(found: Mapping[str, list[Equation]]) -> None:
    again, other = candidates(DENSE, 3, 0), candidates(DENSE, 3, 5)
    assert again == found["d"]
    assert {rule.hash for rule in other} == {rule.hash for rule in again}


def test_what_is_dropped_is_counted() -> None:
    reports: list[dict[str, int]] = []
    rules = candidates(DENSE, 2, 0, lambda counts: reports.append(dict(counts)))
    last = reports[-1]
    assert last["candidates"] == len(rules) == len({rule.hash for rule in rules})
    assert last["graphs"] == last["fingerprints"] + sum(
        last.get(key, 0) for key in ("serial", "subterm", "duplicate", "candidates")
    )


def test_rules_about_nothing_are_left_out() -> None:
    """x - x = relu(-relu(x)) holds because both are zero."""
    context = placed("z", "x: m", "sub relu neg")
    last: dict[str, int] = {}
    rules = candidates(context, 3, 0, last.update)
    assert rules
    assert last["zero"]
    assert not [rule for rule in rules if "sub(x, x)" in rule.equation]


def test_common_subterms_become_variables(found: Mapping[str, list[Equation]]) -> None:
    """partition(combine(relu(x))) = relu(x) is partition(combine(x)) = x."""
    equations = {f"{rule.left[0]} = {rule.right[0]}" for rule in found["d"]}
    assert "partition(combine(x, axis=a), axis=a, dim=0) = x" in equations
    assert "partition(combine(relu(x), axis=a), axis=a, dim=0) = relu(x)" not in equations


def test_rules_of_two_axes_move_along_both(found: Mapping[str, list[Equation]]) -> None:
    assert found["t"]
    for rule in found["t"]:
        terms = [t for root in (*rule.left, *rule.right) for t in subterms(root) if isinstance(t, Apply)]
        assert {str(dict(t.attrs)["axis"]) for t in terms if "axis" in dict(t.attrs)} == {"a", "b"}


def test_contexts_are_units_of_work_and_hold_every_operator() -> None:
    assert pickle.loads(pickle.dumps(PLACEMENT_CONTEXTS)) == PLACEMENT_CONTEXTS
    assert len({context.name for context in PLACEMENT_CONTEXTS}) == len(PLACEMENT_CONTEXTS)
    ops = {text.partition("(")[0] for context in PLACEMENT_CONTEXTS for text in context.operators}
    assert ops >= {
        "linear", "matmul", "add", "mul", "relu", "tanh", "permute", "reshape", "concat", "slice", "sum", "softmax",
        "layer_norm", "rms_norm", "embedding", "conv2d", "sdpa", "cross_entropy_sum",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("context", some(PLACEMENT_CONTEXTS, 5), ids=lambda context: context.name)
def test_nothing_differs_on_devices(context: PlacementContext) -> None:
    rules = candidates(context, 3, 0)
    assert rules
    assert recheck(rules) == {}


# ---- typing ----


def test_sizes_are_read_off_numbers() -> None:
    sizes = PrimeSizes(placed("s", "x: m (h d)", ""))
    m, h, d = (sizes.of[name] for name in "mhd")
    sizes.learn([h, d])
    assert sizes.text(h * d) == "h * d"
    assert sizes.prefixes(h * d) == (1, h)
    assert sizes.text(2 * m) == "2 * m"
    assert sizes.name(m + h, "m + h")
    assert sizes.text(m + h) == "m + h"
    with pytest.raises(RuleError, match="no expression for the size 41; sizes are"):
        sizes.text(41)


def test_only_what_fits_is_applied() -> None:
    typing = TypeTable(LOOKUP)
    w, t = (typing.types[typing.variable(name)[0]].shape for name in "wt")
    embedding, add = (template for text in LOOKUP.operators for template in Template.parse(text))
    assert typing.apply(embedding, (w, t)) is not None
    assert typing.apply(embedding, (w, w)) is None  # no indices
    assert typing.apply(add, (w, t)) is None  # nothing is added to indices
    assert typing.apply(embedding, (TensorShape((w.extents[1], 3)), t)) is None  # indices count up to v


def test_slices_and_reshapes_keep_blocks_whole() -> None:
    """Otherwise the bounds of a slice would be sizes that no variable of the rule has."""
    typing = TypeTable(placed("b", "x: m i, w: (q o) i", ""))
    x, w = (typing.types[typing.variable(name)[0]].shape for name in "xw")
    cut = Template.parse("slice(dim=0, start=0, stop=o, step=1)")[0]
    merge = Template.parse("reshape(shape=(i, m))")[0]
    assert typing.apply(cut, (w,)) is not None
    assert typing.apply(cut, (TensorShape((3 * x.extents[0], x.extents[1])),)) is None
    assert typing.apply(merge, (x,)) is None


def test_two_axes_do_not_shard_one_dimension() -> None:
    typing = TypeTable(AXES)
    kinds: list[PlacedType] = [typing.types[number] for number in typing.variable("x")]
    assert {" ".join(map(str, kind.layouts)) for kind in kinds} >= {"S(0) S(1)", "P C", "R R"}
    assert not [kind for kind in kinds if str(kind.layouts[0]) == str(kind.layouts[1]) == "S(0)"]


def test_operators_are_given_without_operands() -> None:
    with pytest.raises(RuleError, match=r"operator 'relu\(x\)': expected an operator with attributes"):
        Template.parse("relu(x)")


def test_axes_have_canonical_names(found: Mapping[str, list[Equation]]) -> None:
    """A rule and its mirror image are one rule; the first axis that anything moves along is a."""
    mirrored = [
        equation(
            "r", {"x": "m n"}, f"reduce(combine(x, axis={b}), axis={a})", f"combine(reduce(x, axis={a}), axis={b})",
            (f"m % {b} == 0",), axes=("a", "b"), layouts={"x": places},
        )
        for a, b, places in (("a", "b", ["P", "S(0)"]), ("b", "a", ["S(0)", "P"]))
    ]  # fmt: skip
    one, other = map(canonical, mirrored)
    assert one == other
    assert one.claim in {rule.claim for rule in found["t"]}
    for rules in found.values():
        assert [canonical(replace(rule, name="rule")) for rule in rules] == [replace(r, name="rule") for r in rules]


def test_what_is_exact_in_floating_point_is_said_to_move() -> None:
    context = placed("e", "x: m i, y: m i", "add neg")
    moves = {rule.equation.split(" for ")[0]: rule.moves for rule in candidates(context, 3, 0)}
    exact = {text: flag for text, flag in moves.items() if "reduce" not in text and "combine" in text}
    assert exact
    assert any(exact.values())
    assert not any(flag for text, flag in moves.items() if "reduce" in text)


def test_a_name_is_a_size_or_an_axis() -> None:
    with pytest.raises(RuleError, match="context 'both': 'b' names a size and an axis"):
        placed("both", "x: b m", "relu", axes=("a", "b"))


def test_a_true_rule_is_not_refuted_because_its_kernel_is_too_large() -> None:
    """Where every size has to divide, the image is given the larger ones."""
    conv = "dilation=dilation, groups=1, padding=padding, stride=stride"
    rule = equation(
        "r", {"x": "n c h w", "k": "o c p q"}, f"conv2d(add(x, x), combine(k, axis=a), {conv})",
        f"conv2d(x, combine(add(k, k), axis=a), {conv})", tuple(f"{size} % a == 0" for size in "nchwopq"),
        axes=("a",), layouts={"x": ["R"], "k": ["S(2)"]},
    )  # fmt: skip
    assert recheck([rule]) == {}
