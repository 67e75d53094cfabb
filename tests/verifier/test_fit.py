"""Rules that fit no tensors: malformed, with the field and the reason; whatever fits is left to the proofs."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.pcg.offers import parse_choice
from shardwright.substitutions.equations import Equation, equation
from shardwright.substitutions.match import places
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, derive
from shardwright.verifier.certificates import Certificate, certify, prove
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.falsifiers.instances import left_graph
from shardwright.verifier.fit import checked
from shardwright.verifier.judge import judge
from tests.each import each

MATRIX = {"x": "m n"}
TWO = {"x": "m n", "y": "k l"}


def serial(left: str, right: str, *guard: str, variables: dict[str, str] = MATRIX, **more: Any) -> Equation:
    return equation("rule", variables, left, right, guard=guard, **more)


def placed(left: str, right: str, *guard: str, **layouts: str) -> Equation:
    """`x="m n in S(0)"`, along one axis."""
    split = {v: text.split(" in ") for v, text in layouts.items()}
    return equation("rule", {v: dims for v, (dims, _) in split.items()}, left, right, guard=guard, axes=("a",),
                    layouts={v: [place] for v, (_, place) in split.items()})  # fmt: skip


SHAPES = [
    (serial("add(x, w)", "add(w, x)", variables={"x": "m i", "w": "o i"}),
     "field 'left[0]': add(x, w) has no shape: factor string '..., ... -> ...': "),
    (serial("softmax(x, dim=5)", "neg(x)"), "field 'left[0]': softmax(x, dim=5) has no shape: attribute 'dim' is 5"),
    (serial("softmax(x, dim=0)", "softmax(x, dim=5)"), "field 'right[0]': softmax(x, dim=5) has no shape"),
    (serial("softmax(x, dim=-1)", "neg(x)"), "field 'left[0]': softmax(x, dim=-1) has no shape"),
    (serial("sum(neg(x), dims=(2,), keepdim=False)", "neg(x)"), "attribute 'dims' is (2,), not different dimensions"),
    (serial("permute(x, dims=(0, 0))", "x"), "field 'left[0]': permute(x, dims=(0, 0)) has no shape"),
    (serial("permute(x, dims=p)", "x", "p == iota(3)"), "field 'left[0]': permute(x, dims=p) has no shape"),
    (serial("relu(concat(x, y, dim=0))", "concat(relu(x), relu(y), dim=0)", variables={"x": "m n", "y": "n"}),
     "field 'left[0]': concat(x, y, dim=0) has no shape: concat of shapes ["),
    (serial("linear(x, y)", "neg(linear(neg(x), y))", variables={"x": "m n", "y": "n"}),
     "field 'left[0]': linear(x, y) has no shape: factor string '... i, o i -> ... o': expected 2 dimensions"),
    (serial("reshape(x, shape=(m, n, 2))", "x"), "reshape(x, shape=(m, n, 2)) has no shape: reshape of ["),
    (serial("reshape(x, shape=(0, m))", "x"), "reshape(x, shape=(0, m)) has no shape: "),
    (serial(f"reshape(x, shape=({', '.join(['1000000000'] * 3)}))", "x"), "1000000000)) has no shape: reshape of ["),
    (serial("layer_norm(x, w, w, normalized_dims=5, eps=e)", "x", variables={"x": "m n", "w": "n"}),
     "has no shape: attribute 'normalized_dims' is 5 for a tensor of rank 2"),
    (placed("softmax(x, dim=5)", "x", x="m n in R"), "field 'left[0]': softmax(x, dim=5) has no shape"),
    (placed("add(combine(x, axis=a), y)", "y", "m % a == 0", x="m n in S(0)", y="k n in R"),
     "field 'left[0]': add(x, y) has no shape"),
]  # fmt: skip

GUARDS = [
    (serial("relu(relu(x))", "relu(x)", "m < 0"), "field 'guard[0]': no sizes satisfy m < 0"),
    (serial("relu(relu(x))", "relu(x)", "m == 0"), "field 'guard[0]': no sizes satisfy m == 0"),
    (serial("relu(relu(x))", "neg(x)", "m > n", "n > m"), "field 'guard[1]': no sizes satisfy m > n, n > m"),
    (serial("relu(relu(x))", "relu(x)", "m % 4 == 7"), "field 'guard[0]': no sizes satisfy m % 4 == 7"),
    (serial("relu(relu(x))", "relu(x)", "len(b) < 0", variables={"x": "*b n"}), "no sizes satisfy len(b) < 0"),
    (serial("relu(relu(x))", "relu(x)", "m // 0 == 1"), "field 'guard[0]': m // 0 == 1 has no value for any sizes"),
    (serial("relu(relu(x))", "relu(x)", "m < 'a'"), "field 'guard[0]': m < 'a' has no value for any sizes"),
    (serial("relu(x)", "reshape(relu(x), shape=(m, n // g, g))", "n % g == 0", "g > n", parameters=("g",)),
     "field 'guard[1]': no sizes satisfy n % g == 0, g > n"),
    (placed("relu(combine(x, axis=a))", "combine(relu(x), axis=a)", "a < 1", x="m n in S(0)"),
     "field 'guard[0]': no sizes satisfy a < 1"),
    (placed("relu(combine(x, axis=a))", "combine(relu(x), axis=a)", "m % a == 0", "a > m", x="m n in S(0)"),
     "field 'guard[1]': no sizes satisfy m % a == 0, a > m"),
]  # fmt: skip

LAYOUTS = [
    (placed("relu(reduce(x, axis=a))", "relu(x)", x="m n in S(0)"),
     "field 'left[0]': reduce(x, axis=a): reduce steps from P along its axis, got S(0)"),
    (placed("reduce(x, axis=a)", "combine(x, axis=a)", x="m n in P"),
     "field 'right[0]': combine(x, axis=a): combine steps from S(d) along its axis, got P"),
    (placed("partition(x, axis=a, dim=5)", "x", x="m n in R"),
     "field 'left[0]': partition(x, axis=a, dim=5): S(5) of a value of rank 2 along a"),
    (placed("relu(reduce(x, axis=a))", "reduce(relu(x), axis=a)", x="m n in P"),
     "field 'right[0]': relu of operands in P along a: no row rule types it"),
]  # fmt: skip


@each(("rule", "message"), [*SHAPES, *GUARDS, *LAYOUTS], ids=lambda x: x if isinstance(x, str) else "")
def test_what_fits_no_tensors_is_malformed(rule: Equation, message: str) -> None:
    found = judge(rule, explain=False)
    assert found.outcome == "malformed", found.reason
    assert message in found.reason
    assert message in str(certify(rule))


@pytest.mark.parametrize(
    "rule",
    [
        serial("relu(relu(x))", "relu(x)", "m == 1000000000"),
        serial("linear(x, y)", "neg(linear(neg(x), y))", variables=TWO),  # n and l are summed over: they are one size
        serial("slice(x, dim=0, start=0, stop=1000, step=1)", "neg(slice(neg(x), dim=0, start=0, stop=1000, step=1))"),
        placed("relu(combine(x, axis=a))", "combine(relu(x), axis=a)", "m % a == 0", "a > 100", x="m n in S(0)"),
    ],
)
def test_what_fits_some_tensors_is_proven(rule: Equation) -> None:
    assert prove(rule).failure is None


@each(
    "rule",
    [
        serial("softmax(neg(neg(x)), dim=5)", "softmax(x, dim=5)", variables={"x": "*b n"}),  # of six dimensions
        serial("expand(x, shape=(2, m, 5))", "neg(expand(neg(x), shape=(2, m, 5)))"),  # n is 5
        serial("neg(reshape(x, shape=(m, h, d)))", "reshape(neg(x), shape=(m, h, d))"),
        serial("relu(relu(x))", "relu(x)", "len(b) > 4", variables={"x": "*b n"}),
        serial("permute(x, dims=p)", "neg(permute(neg(x), dims=p))"),
        serial("reshape(x, shape=s)", "neg(reshape(neg(x), shape=s))"),
        serial("neg(reshape(x, shape=(1000,)))", "reshape(neg(x), shape=(1000,))"),
    ],
)
def test_what_fits_only_some_tensors_or_cannot_be_told_is_not_malformed(rule: Equation) -> None:
    assert judge(rule, explain=False).outcome in ("unknown", "certified")


@each("rule", CATALOGUE.values(), ids=lambda rule: rule.name)
def test_every_hand_named_rule_fits_even_if_its_proof_is_not_found(rule: Equation) -> None:
    from shardwright.verifier.proof import Failure

    lost = Failure("no proof")
    assert checked(rule, lost) is lost
    assert checked(rule, None) is None


# ---- attributes ----

SDPA = {"q": "b h i d", "k": "b h j d", "v": "b h j e"}
SCALED = (
    "sdpa(q, k, v, causal=False, scale=c)",
    "sdpa(mul(q, full(shape=(), value=c, dtype='float64')), k, v, causal=False, scale=1.0)",
)


def test_an_optional_attribute_is_no_number_unless_the_guard_says_so() -> None:
    failure = checked(serial(*SCALED, variables=SDPA), None)
    assert str(failure) == "full: value=c where c is a number: false for c = None"
    for guard in ("c > 0", "c == 0.5"):
        assert checked(serial(*SCALED, guard, variables=SDPA), None) is None
    assert checked(serial(*SCALED, "c != 0", variables=SDPA), None) is not None


def test_prover_falsifier_and_matcher_agree_on_an_attribute_without_a_value() -> None:
    """A left side that lets `scale` be None, beside a right side that computes with it, is false without a guard."""
    loose, guarded = serial(*SCALED, variables=SDPA), serial(*SCALED, "c > 0", variables=SDPA)
    assert not isinstance(certify(loose), Certificate)
    assert "c = None" in str(falsify_equation(loose, trials=20))
    assert isinstance(certify(guarded), Certificate)
    assert falsify_equation(guarded, trials=20) is None
    sizes = {name: 2 for dims in SDPA.values() for name in dims.split()}
    for scale, found in ((None, 0), (0.5, 1)):
        graph, _ = left_graph(loose, {**sizes, "c": scale})
        assert len(places(guarded, graph)) == found
        assert len(places(loose, graph)) == 1


def test_an_optional_attribute_may_be_another_optional_one() -> None:
    left = "embedding(w, i, padding_idx=p)"
    assert checked(serial(left, f"neg(neg({left}))", variables={"w": "v h", "i": "m"}), None) is None


# ---- row rules ----


def test_a_row_rule_of_a_pattern_that_the_row_never_has_is_not_certified() -> None:
    own = derive("linear", Pattern.parse("a b, c b -> a c", 2), parse_choice("b"))
    foreign = RowRule("linear", "a b, c b -> c a", parse_choice("b"), own.operands, Placement.parse("P"), own.guard)
    assert isinstance(certify(own), Certificate)
    assert "field 'pattern': linear never has the pattern 'a b, c b -> c a'" in str(certify(foreign))
