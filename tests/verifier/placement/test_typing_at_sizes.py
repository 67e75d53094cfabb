"""Symbolic types against inference at sizes: what typing says of all sizes is so at every small one.

Terms are drawn at random. Where a term has a type, inference gives it the same layouts at all sizes and degrees that
meet the guard which typing asks for, and none at the others; where it has none, inference finds none either.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from shardwright.pcg.choice import Split
from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.graph import Node, infer
from shardwright.pcg.layout import Layouts, check_layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import alone
from shardwright.pcg.optable import ROWS
from shardwright.pcg.types import TensorType
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.terms import Term, Variable
from shardwright.verifier.placement.typing import IllTypedError, Typing, required_guard

Sizes = Mapping[str, int]
SIZES = ("m", "h", "d", "o")
BEYOND = re.compile("two axes shard one dimension|beyond the index semantics|should have size|different rank|"
                    "elements, to|not a permutation|not different dimensions")  # fmt: skip
"""Why a term that is drawn has no typing: two axes on one dimension, or an operator that its operands do not fit."""
LARGE = {"m": 16, "h": 32, "d": 64, "o": 48}


def typed_at(rule: Equation, term: Term, sizes: Sizes, degrees: Mapping[str, int]) -> TensorType:
    """The type of a term at sizes, by inference; a `GraphError` or `RuleError` where it has none."""
    mesh = Mesh.of(**degrees)
    if isinstance(term, Variable):
        shape = rule.dims[term.name].shape(sizes)
        layouts = tuple(place.at(sizes) for place in dict(rule.layouts)[term.name])
        check_layouts(shape, layouts, mesh, term.name)
        index = term.name == "i"
        return TensorType(shape, "int64" if index else "float32", layouts, not index)
    operands = [typed_at(rule, operand, sizes, degrees) for operand in term.operands]
    attrs = {key: str(value) if key == "axis" else value.evaluate(sizes) for key, value in term.attrs}
    if term.op in ("partition", "combine", "replicate", "reduce"):
        return infer(Node("y", term.op, (), tuple(sorted(attrs.items()))), operands, mesh)
    return _by_any_split(term.op, attrs, operands, mesh)


def _by_any_split(op: str, attrs: dict[str, Any], operands: list[TensorType], mesh: Mesh) -> TensorType:
    """The type by whichever choices fit the operands; all that fit agree."""
    found: dict[Layouts, TensorType] = {}
    pairs = sorted({x.blocks for t in operands for x in t.layouts if x.is_shard} | {1})
    row = ROWS[op]
    signature = row.signature([t.shape for t in operands], attrs)
    splits = [Split(f.name, n) for f in signature.factors if f.role != "fixed" for n in pairs]
    choices = [*alone(row, ()), *splits]
    for split in product(choices, repeat=len(mesh)):
        try:
            kind = infer(Node("y", op, (), tuple(sorted(attrs.items())), split), operands, mesh)
        except GraphError:
            continue
        found[kind.layouts] = kind
    if not found:
        raise GraphError(f"{op} of {operands} has no type")
    assert len(found) == 1 or any(not t.grad for t in operands), f"{op} of {operands} has types {list(found)}"
    return next(iter(found.values()))


def drawn(rng: random.Random, depth: int) -> str:
    """A term over x and y: m (h d), w: o (h d), i: m, z: m o; its shapes may not fit."""
    if depth == 0:
        return rng.choice(["x", "x", "y"])
    inner = drawn(rng, depth - 1)
    other = drawn(rng, rng.randrange(depth)) if rng.random() < 0.5 else inner
    axis = rng.choice("ab")
    return rng.choice([
        f"relu({inner})", f"neg({inner})", f"add({inner}, {other})", f"mul({inner}, {other})", f"linear({inner}, w)",
        f"concat({inner}, {other}, dim={rng.randrange(2)})", f"permute({inner}, dims=(1, 0))",
        f"reshape({inner}, shape=(m, h, d))", f"reshape({inner}, shape=(m, h * d))",
        f"reshape({inner}, shape=(m * h, d))",
        f"sum({inner}, dims=({rng.randrange(2)},), keepdim={rng.random() < 0.5})", f"softmax({inner}, dim=1)",
        f"combine({inner}, axis={axis})", f"replicate({inner}, axis={axis})", f"reduce({inner}, axis={axis})",
        f"partition({inner}, axis={axis}, dim={rng.randrange(3)})",
        f"partition({inner}, axis={axis}, dim=1, blocks={rng.choice('hd')})",
        "embedding(w, i, padding_idx=None)",
        f"concat({inner}, z, dim=1)",
    ])  # fmt: skip


def rule_of(term: str, rng: random.Random) -> Equation:
    """The term as a rule on two axes, its variables in layouts at random."""
    layouts = ["R", "R", "C", "P", "S(0)", "S(1)", "S(1, h)", "S(1, d)"]
    dims = {"x": "m (h d)", "y": "m (h d)", "w": "o (h d)", "i": "m", "z": "m o"}
    used = {name: text for name, text in dims.items() if Variable(name) in _leaves(term)}
    places = {name: [rng.choice(layouts if name != "i" else ["R", "C", "S(0)"]), rng.choice(["R", "C", "S(0)"])]
              for name in used}  # fmt: skip
    if "y" in places and rng.random() < 0.8 and "x" in places:
        places["y"] = places["x"]
    return equation("drawn", used, term, term, axes=("a", "b"), layouts=places)


def _leaves(term: str) -> set[Variable]:
    return {Variable(name) for name in "xywiz" if f"({name}," in term or f"({name})" in term or f" {name}" in term}


def some_sizes(rng: random.Random) -> tuple[Sizes, Mapping[str, int]]:
    return {name: rng.choice([1, 2, 2, 3, 4, 6]) for name in SIZES}, {axis: rng.choice([2, 3, 4]) for axis in "ab"}


def typed_terms(number: int, seed: int) -> list[tuple[Equation, Typing | None]]:
    """Rules with their typing; None where it says that there is none. What is no rule, or `BEYOND` it, is left out."""
    rng, found = random.Random(seed), list[tuple[Equation, Typing | None]]()
    while len(found) < number:
        term = drawn(rng, rng.randint(1, 4))
        try:
            rule = rule_of(term, rng)
        except RuleError:
            continue
        typing: Typing | None = Typing(rule)
        try:
            typing.of(rule.left[0])
        except IllTypedError:
            typing = None
        except (GraphError, RuleError) as error:
            if not BEYOND.search(str(error)):
                raise
            continue
        found.append((rule, typing))
    return found


TERMS = 400


@pytest.fixture(scope="module")
def terms() -> list[tuple[Equation, Typing | None]]:
    return typed_terms(TERMS, 0)


def test_a_typed_term_has_its_type_at_all_sizes_that_meet_its_guard(
    terms: list[tuple[Equation, Typing | None]],
) -> None:
    rng = random.Random(1)
    met = missed = 0
    for rule, typing in terms:
        if typing is None:
            continue
        (term,), guard = rule.left, required_guard(rule)
        for _ in range(12):
            sizes, degrees = some_sizes(rng)
            holds = all(condition.evaluate({**sizes, **degrees}) is True for condition in guard)
            try:
                kind = typed_at(rule, term, sizes, degrees)
            except GraphError:
                assert not holds, f"{rule.claim} has no type for {sizes}, {degrees}, though {list(map(str, guard))}"
                missed += 1
                continue
            one = min(sizes.values()) == 1  # a factor of size 1 stands in the way of none beside it
            assert holds or one, f"{rule.claim} is {kind} for {sizes}, {degrees}, against {list(map(str, guard))}"
            if holds:
                met += 1
                symbolic = tuple(str(x) for x in typing.of(term).layouts)
                assert len(kind.layouts) == len(symbolic), rule.claim
                assert [x.kind for x in kind.layouts] == [s[0] for s in symbolic], f"{rule.claim} is {kind} at {sizes}"
                assert [x.dim for x in kind.layouts] == [x.dim for x in typing.of(term).layouts], rule.claim
    assert met > 300
    assert missed > 200


def test_a_term_without_a_type_has_none_at_sizes_that_all_degrees_divide(
    terms: list[tuple[Equation, Typing | None]],
) -> None:
    """But for lookups in a table in blocks, which typing leaves alone: an offset says where one part begins."""
    refused = 0
    for rule, typing in terms:
        if typing is not None or "embedding" in rule.claim:
            continue
        try:
            kind = typed_at(rule, rule.left[0], LARGE, {"a": 2, "b": 2})
        except GraphError:
            refused += 1
        else:
            pytest.fail(f"{rule.claim} is {kind}")
    assert refused > 30
