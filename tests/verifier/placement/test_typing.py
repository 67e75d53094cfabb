"""Placement rules: proven by types and erasures, audited by what typed terms denote, refuted device by device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.terms import Apply
from shardwright.verifier.algebra.polys import ONE, Poly, poly
from shardwright.verifier.certificates import Certificate, certify
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.placement import typing as typing_module
from shardwright.verifier.placement.denotation import denotes_equal
from shardwright.verifier.placement.typing import Typing, prove_placement, required_guard
from shardwright.verifier.proof import Failure, Proof
from tests.each import each
from tests.verifier.mutations.twins import equation_twins

Placed = tuple[dict[str, str], str, str, str, tuple[str, ...]]


def placed(name: str, variables: dict[str, str], left: str, right: str, guard: tuple[str, ...] = ()) -> Equation:
    """`variables` maps names to "dims in layouts"."""
    split = {v: text.split(" in ") for v, text in variables.items()}
    layouts = {v: places.split("; ") for v, (_, places) in split.items()}
    axes = ("a", "b")[: len(next(iter(layouts.values())))]
    dims = {v: text for v, (text, _) in split.items()}
    return equation(name, dims, left, right, guard=guard, axes=axes, layouts=layouts)


TRUE = [
    placed("row_parallel", {"x": "m i in S(1)", "w": "o i in S(1)"},
           "linear(combine(x, axis=a), combine(w, axis=a))", "reduce(linear(x, w), axis=a)", ("i % a == 0",)),
    placed("column_parallel", {"x": "m i in R", "w": "o i in S(0)"}, "linear(x, combine(w, axis=a))",
           "combine(linear(replicate(x, axis=a), w), axis=a)", ("o % a == 0",)),
    placed("heads", {"x": "m (h d) in S(1)"}, "reshape(combine(x, axis=a), shape=(m, h, d))",
           "combine(reshape(x, shape=(m, h, d)), axis=a)", ("h % a == 0",)),
    placed("blocks", {"x": "m (h d) in S(1, h)"}, "reshape(combine(x, axis=a), shape=(m, h, d))",
           "combine(reshape(x, shape=(m, h, d)), axis=a)", ("d % a == 0",)),
    placed("fused", {"x": "m n in S(1)", "y": "m n in S(1)"}, "combine(concat(x, y, dim=1), axis=a)",
           "concat(combine(x, axis=a), combine(y, axis=a), dim=1)", ("n % a == 0",)),
    placed("vocabulary", {"w": "v h in S(0)", "i": "m in R"}, "embedding(combine(w, axis=a), i, padding_idx=None)",
           "reduce(embedding(w, i, padding_idx=None), axis=a)", ("v % a == 0",)),
    placed("sum_of_partials", {"x": "m n in P", "y": "m n in P"}, "add(reduce(x, axis=a), reduce(y, axis=a))",
           "reduce(add(x, y), axis=a)"),
    placed("two_axes", {"x": "m i in S(0); C", "w": "o i in C; S(0)"}, "linear(x, w)", "linear(neg(neg(x)), w)",
           ("m % a == 0", "o % b == 0")),
    placed("with_a_serial_rule", {"x": "m i in R", "y": "m i in R", "w": "o i in R"}, "linear(add(x, y), w)",
           "reduce(add(linear(partition(x, axis=a, dim=1), partition(w, axis=a, dim=1)),"
           " linear(partition(y, axis=a, dim=1), partition(w, axis=a, dim=1))), axis=a)", ("i % a == 0",)),
    placed("inside_of_blocks", {"x": "m (h d) in S(1, d)"}, "relu(combine(x, axis=a))", "combine(relu(x), axis=a)",
           ("h % a == 0",)),
    placed("a_sum_of_sizes", {"x": "m n in R", "z": "m o in R"}, "relu(concat(x, z, dim=1))",
           "combine(relu(partition(concat(x, z, dim=1), axis=a, dim=1)), axis=a)", ("(n + o) % a == 0",)),
    placed("several_roots", {"x": "m n in R", "y": "o n in S(0)"}, "relu(x); neg(combine(y, axis=a))",
           "relu(x); combine(neg(y), axis=a)", ("o % a == 0",)),
    placed("parts_of_indices", {"w": "v h in R", "i": "m in C"}, "relu(embedding(w, i, padding_idx=None))",
           "relu(embedding(w, i, padding_idx=None))"),
    placed("values_of_attributes", {"w": "v h in C", "i": "m in S(0)"}, "neg(neg(embedding(w, i, padding_idx=pad)))",
           "embedding(w, i, padding_idx=pad)", ("m % a == 0",)),
    placed("parts_of_made_indices", {"w": "v h in R", "i": "m in C"},
           "embedding(w, slice(i, dim=0, start=0, stop=m, step=1), padding_idx=None)",
           "embedding(w, i, padding_idx=None)"),
    placed("pairs", {"x": "m n in R", "y": "m n in R"}, "relu(concat(x, y, dim=1))",
           "combine(relu(partition(concat(x, y, dim=1), axis=a, dim=1, blocks=2)), axis=a)", ("n % a == 0",)),
    placed("two_sizes_along_one_axis", {"x": "m n in S(0)", "y": "o n in S(0)"},
           "relu(combine(x, axis=a)); neg(combine(y, axis=a))", "combine(relu(x), axis=a); combine(neg(y), axis=a)",
           ("m % a == 0", "o % a == 0")),
]  # fmt: skip

WRONG = [
    (placed("type", {"x": "m i in S(1)", "w": "o i in S(1)"}, "linear(combine(x, axis=a), combine(w, axis=a))",
            "linear(x, w)", ("i % a == 0",)), "root 0: the left side is R, the right side P"),
    (placed("unreplicated", {"x": "m i in R", "w": "o i in S(0)"}, "linear(x, combine(w, axis=a))",
            "combine(linear(x, w), axis=a)", ("o % a == 0",)),
     "linear of operands in R, S(0) along a: no row rule types it"),
    (placed("bias", {"x": "m n in P", "c": "n in R"}, "add(reduce(x, axis=a), c)", "reduce(add(x, c), axis=a)"),
     "add of operands in P, R along a: no row rule types it"),
    (placed("nonlinear", {"x": "m n in P"}, "relu(reduce(x, axis=a))", "reduce(relu(x), axis=a)"),
     "relu of operands in P along a: no row rule types it"),
    (placed("dim", {"x": "m n in S(0)"}, "combine(x, axis=a)", "combine(neg(x), axis=a)", ("m % a == 0",)),
     "root 0: elements differ"),
    (placed("step", {"x": "m n in S(0)"}, "combine(x, axis=a)", "reduce(x, axis=a)", ("m % a == 0",)),
     "reduce steps from P along its axis, got S(0)"),
    (placed("heads", {"x": "m (h d) in S(1)"}, "reshape(combine(x, axis=a), shape=(m, h, d))",
            "combine(reshape(x, shape=(m, h, d)), axis=a)", ("(h * d) % a == 0",)), "not guarded: h % a == 0"),
    (placed("rank", {"x": "m n in S(2)"}, "combine(x, axis=a)", "combine(x, axis=a)"),
     "S(2) of a value of rank 2 along a"),
    (placed("below", {"x": "m n in R"}, "relu(x); neg(x)", "relu(x); partition(neg(x), axis=a, dim=-1)"),
     "field 'right[1]': partition(neg(x), axis=a, dim=-1): S(-1) of a value of rank 2 along a"),
    (placed("no_dim", {"x": "m n in R"}, "partition(x, axis=a, dim=(1,))", "partition(x, axis=a, dim=(1,))"),
     "field 'left[0]': partition(x, axis=a, dim=(1,)): (1,) is not a dimension"),
    (placed("no_blocks", {"x": "m n in R"}, "partition(x, axis=a, dim=1, blocks=m)", "relu(x)"),
     "S(1,101) of a value of rank 2 along a"),
    (placed("second_root", {"x": "m n in R"}, "relu(x); neg(x)", "relu(x); replicate(neg(x), axis=a)"),
     "root 1: the left side is R, the right side C"),
    (placed("mixed", {"x": "m n in R", "y": "m n in C"}, "add(x, y)", "add(y, x)"),
     "add of operands in R, C along a: no row rule types it"),
    (placed("constant", {"x": "m n in C"}, "add(full(shape=(m, n), value=1.0), x)",
            "add(x, full(shape=(m, n), value=1.0))"),
     "add of operands in R, C along a: no row rule types it"),
    (placed("mixed_inside", {"x": "m n in R", "y": "m n in C"}, "add(relu(x), relu(y))", "add(relu(y), relu(x))"),
     "add of operands in R, C along a: no row rule types it"),
    (placed("mixed_lookup", {"w": "v h in R", "i": "m in R", "y": "m h in C"},
            "add(embedding(w, i, padding_idx=None), y)", "add(y, embedding(w, i, padding_idx=None))"),
     "add of operands in R, C along a: no row rule types it"),
    (placed("one_of_two", {"x": "m n in R", "z": "m o in R"}, "relu(concat(x, z, dim=1))",
            "combine(relu(partition(concat(x, z, dim=1), axis=a, dim=1)), axis=a)", ("n % a == 0",)),
     "not guarded: (n + o) % a == 0"),
    (placed("blocks_of_one", {"x": "m n in S(1, n)"}, "relu(combine(x, axis=a))", "combine(relu(x), axis=a)"),
     "relu of operands in S(1,103) along a: no row rule types it"),
    (placed("twice", {"x": "m n in S(1)"}, "relu(combine(x, axis=a))", "combine(relu(x), axis=a)",
            ("(2 * n) % a == 0",)), "not guarded: n % a == 0"),
    (placed("number", {"x": "m 1 in R", "y": "m 1 in R"}, "relu(concat(x, y, dim=1))",
            "combine(relu(partition(concat(x, y, dim=1), axis=a, dim=1)), axis=a)"), "not guarded: 2 % a == 0"),
    (placed("one_axis_of_ids", {"w": "v h in C; C", "i": "m in C; P"}, "embedding(w, i, padding_idx=None)",
            "embedding(w, i, padding_idx=None)"), "i: indices cannot be partial sums"),
    (placed("partial_ids", {"w": "v h in C", "i": "m in P"}, "embedding(w, i, padding_idx=None)",
            "embedding(w, i, padding_idx=None)"), "i: indices cannot be partial sums"),
]  # fmt: skip


@each("rule", TRUE, ids=lambda rule: rule.name)
def test_true_placement_rules_are_proven_twice_and_not_falsified(rule: Equation) -> None:
    proved = prove_placement(rule)
    assert proved.failure is None, str(proved.failure)
    assert denotes_equal(rule)
    assert falsify_equation(rule) is None
    assert sorted(map(str, required_guard(rule))) == sorted(map(str, rule.guard))


@each(("rule", "message"), WRONG, ids=lambda x: x.name if isinstance(x, Equation) else "")
def test_wrong_placement_rules_are_refuted_with_the_reason(rule: Equation, message: str) -> None:
    failure = prove_placement(rule).failure
    assert failure is not None
    assert message in failure.claim
    assert not denotes_equal(rule)


@each("rule", TRUE, ids=lambda rule: rule.name)
def test_wrong_twins_are_refuted_and_both_proofs_agree_on_them(rule: Equation) -> None:
    for what, twin in equation_twins(rule):
        certified = prove_placement(twin).failure is None
        assert denotes_equal(twin) == certified, f"{what}: {twin.equation}"
        if certified:
            assert falsify_equation(twin) is None, f"{what}: {twin.equation}"


def test_a_dropped_guard_is_refuted_by_sizes() -> None:
    failure = prove_placement(replace(TRUE[0], guard=())).failure
    assert failure is not None
    assert str(failure) == "not guarded: i % a == 0: false for a = 2, i = 1"
    assert failure.refuted


def test_a_certificate_names_the_row_rules_that_type_both_sides() -> None:
    found = certify(TRUE[0])
    assert isinstance(found, Certificate)
    assert sum(axiom.startswith("row ") for axiom in found.axioms) == 2
    assert {"digits", "split-sum", "chain-rule", "index-semantics"} <= set(found.axioms)


def test_a_failure_says_of_what_kind_it_is() -> None:
    kinds = {
        "type": Failure("root 0: the left side is R, the right side P", ill_typed=True),
        "rank": Failure("field 'left[0]': x: S(2) of a value of rank 2 along a", malformed=True),
        "heads": Failure("not guarded: h % a == 0", {"a": "2", "h": "1"}),
    }
    rules = {rule.name: rule for rule, _ in reversed(WRONG)}
    for name, failure in kinds.items():
        assert prove_placement(rules[name]).failure == failure, name
    sums = next(rule for rule in TRUE if rule.name == "a_sum_of_sizes")
    failure = prove_placement(replace(sums, guard=())).failure
    assert failure == Failure("not guarded: (n + o) % a == 0", {"a": "3", "n": "1", "o": "1"})


def test_a_size_that_others_make_up_divides_as_they_do() -> None:
    for blocks, dim, needed in ((", blocks=h", 2, "d % a == 0"), ("", 1, "h % a == 0")):
        x, y = f"reshape(partition(x, axis=a, dim=1{blocks}), shape=(m, h, d))", f"partition(y, axis=a, dim={dim})"
        rule = placed("solved", {"x": "m n in R", "y": "m h d in R"}, f"add({x}, {y})", f"add({y}, {x})",
                      ("n == h * d", needed))  # fmt: skip
        assert prove_placement(rule).failure is None, needed
        assert list(map(str, required_guard(rule))) == [needed]


def test_a_size_is_told_from_its_number() -> None:
    """Every size has a prime of its own, so that a number that happens to be divisible is no product of sizes."""
    names = [f"s{i}" for i in range(20)]
    rule = placed("long", {"x": " ".join(names) + " in R"}, "relu(x)", "relu(x)")
    primes = [n for n in range(101, 400) if all(n % d for d in range(2, n))]
    assert list(Typing(rule).sizes.values()) == primes[:20]
    accident = "partition(concat(x, z, dim=1), axis=a, dim=1, blocks=2)"  # 101 + 103 is even
    rule = placed("accident", {"x": "m n in R", "z": "m o in R"}, accident, accident)
    assert "n + o in 2 blocks is no product of sizes" in str(prove_placement(rule).failure)


def test_a_name_is_of_an_axis_or_of_a_size() -> None:
    rule = equation("named", {"x": "b a"}, "relu(x)", "relu(x)", axes=("a", "b"), layouts={"x": ["R", "R"]})
    assert "'a' names a mesh axis and a size or attribute" in str(prove_placement(rule).failure)


def test_no_row_rule_is_believed_without_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing_module, "proven", lambda rule: Proof(failure=Failure(f"no proof of {rule.choice}")))
    failure = prove_placement(TRUE[1]).failure
    assert failure is not None
    assert not failure.refuted
    assert failure.claim.startswith("linear of operands in R, R along a: linear")
    assert failure.claim.endswith("no proof of R: not proven")


def test_every_split_factor_is_to_be_divisible(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, str]] = []
    monkeypatch.setattr(Typing, "_need_factor", lambda self, axis, size, term: asked.append((axis, size, term.op)))
    typing = Typing(TRUE[1])
    typing.of(TRUE[1].left[0])
    typing.of(TRUE[1].right[0])
    assert asked == [("a", typing.sizes["o"], "linear")]


def test_what_one_degree_divides_says_nothing_of_another() -> None:
    rule = placed("two_axes", {"x": "m (h d) in S(1); R", "y": "m (h d) in R; S(1)"},
                  "reshape(combine(x, axis=a), shape=(m, h, d)); neg(combine(y, axis=b))",
                  "combine(reshape(x, shape=(m, h, d)), axis=a); combine(neg(y), axis=b)",
                  ("h % a == 0", "(d * h) % b == 0"))  # fmt: skip
    assert prove_placement(rule).failure is None
    assert sorted(map(str, required_guard(rule))) == ["d * h % b == 0", "h % a == 0"]
    for left_out in range(2):
        assert prove_placement(replace(rule, guard=(rule.guard[left_out],))).failure is not None


def test_an_extent_that_is_no_polynomial_is_left_alone() -> None:
    rule = placed("rest", {"x": "m n in C"}, "relu(slice(x, dim=1, start=m, stop=n, step=1))",
                  "slice(relu(x), dim=1, start=m, stop=n, step=1)")  # fmt: skip
    assert prove_placement(rule).failure is None


def test_a_number_is_no_condition() -> None:
    """Whether a degree divides it is no matter of sizes, so that no guard can say it."""
    number = next(rule for rule, _ in WRONG if rule.name == "number")
    assert required_guard(number) == ()


def _typing(*typed: str) -> tuple[Typing, list[Apply]]:
    """Typing of terms over x: m n and z: m o; those of `typed` have their types."""
    roots = "; ".join(typed)
    rule = placed("terms", {"x": "m n in R", "z": "m o in R"}, roots, roots)
    terms = [term for term in rule.left if isinstance(term, Apply)]
    return Typing(rule), terms


def test_a_shape_at_primes_is_the_symbolic_one() -> None:
    typing, (term,) = _typing("concat(x, z, dim=1)")
    m, n, o = (typing.sizes[name] for name in "mno")
    typing._check_shape(term, (m, n + o))
    for shape in ((m, n), (n + o, m), (m,), (m, n + o, 1), (m + 1, n + o)):
        with pytest.raises(RuleError, match="which is not its symbolic one"):
            typing._check_shape(term, shape)


def test_a_split_factor_is_a_product_of_sizes_or_a_whole_dimension() -> None:
    typing, (joined, summed) = _typing("concat(x, z, dim=1)", "sum(concat(x, z, dim=1), dims=(1,), keepdim=False)")
    m, n, o = (typing.sizes[name] for name in "mno")
    cases: list[tuple[Apply, int, Poly]] = [
        (joined, n, poly("n")), (joined, m * n, poly("m") * poly("n")), (joined, 2 * m, poly("m") * 2),
        (joined, 1, ONE), (joined, n + o, poly("n") + poly("o")), (summed, n + o, poly("n") + poly("o")),
    ]  # fmt: skip
    for term, size, needed in cases:
        for typed in (False, True):  # before and after the operator itself has its type
            typing, _ = _typing("concat(x, z, dim=1)", "sum(concat(x, z, dim=1), dims=(1,), keepdim=False)")
            for inside in (*term.operands, *([term] if typed else [])):
                typing.of(inside)
            typing._need_factor("a", size, term)
            assert list(typing.needed) == [("a", needed)], (size, typed)
    with pytest.raises(RuleError, match="the split factor of size 997 is no product of sizes"):
        typing._need_factor("a", 997, joined)


def test_variables_of_any_rank_have_no_layouts() -> None:
    rule = placed("any", {"x": "*b n in R"}, "relu(x)", "relu(x)")
    failure = prove_placement(rule).failure
    assert "variables of any rank have no layouts; give every dimension a name" in str(failure)
    with pytest.raises(RuleError, match="variables of any rank"):
        required_guard(rule)


def test_two_axes_on_one_dimension_are_unknown() -> None:
    rule = placed("both", {"x": "m n in S(0); S(0)"}, "relu(x)", "relu(relu(x))", ("m % a == 0", "m % b == 0"))
    failure = prove_placement(rule).failure
    assert failure is not None
    assert "two axes shard one dimension" in failure.claim
    assert not failure.refuted


def test_a_counterexample_shows_types_or_tensors() -> None:
    wrong = placed("type", {"x": "m i in S(1)"}, "combine(x, axis=a)", "combine(neg(x), axis=a)", ("i % a == 0",))
    text = str(falsify_equation(wrong))
    assert text.startswith("type is false for a = 2, ")
    assert "  x [" in text
    cut = placed("cut", {"x": "m i in R"}, "relu(x)", "partition(relu(x), axis=a, dim=0)", ("m % a == 0",))
    assert "another type than" in str(falsify_equation(cut))
