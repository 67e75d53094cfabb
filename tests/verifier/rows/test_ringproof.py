"""A ring is proven from the split along queries, a move and the merge of means; what breaks one of them refutes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwright.pcg.offers import parse_choice
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, derive, sending_choices
from shardwright.verifier.certificates import Certificate, certify
from shardwright.verifier.falsifiers.falsify import falsify
from shardwright.verifier.proof import Failure
from shardwright.verifier.rows import ringproof
from shardwright.verifier.rows.rowproof import prove, proven
from tests.each import each

PATTERN = Pattern.parse("a (b c) d e!, a b f! e!, a b f! g! -> a (b c) d g!", 3)
RULE = derive("sdpa", PATTERN, parse_choice("d@f"))


def failure(rule: RowRule) -> str:
    found = prove(rule).failure
    assert found is not None
    return str(found)


def test_it_rests_on_the_split_on_the_move_and_on_the_merge() -> None:
    assert sending_choices(ROWS["sdpa"], PATTERN) == ("d@f",)
    assert (RULE.factor, list(map(str, RULE.operands)), str(RULE.result)) == ("d", ["S(2)"] * 3, "S(2)")
    assert (RULE.guard, RULE.local) == (("k | d", "k | f"), ("offset",))
    assert RowRule.from_json(RULE.to_json()) == RULE
    split = proven(derive("sdpa", PATTERN, parse_choice("d"))).axioms
    assert set(prove(RULE).axioms) == {*split, *ringproof.LEMMAS}
    assert isinstance(certify(RULE), Certificate)


@each(
    "mask, place",
    [("a 1 d f!", "S(2)"), ("d f!", "S(0)"), ("a (b c) d f!", "S(2)"), ("a 1 1 f!", "C"), ("1 1 d 1", "S(2)")],
)
def test_a_mask_stays_with_the_queries(mask: str, place: str) -> None:
    """A device has all columns of it, and its rows if it has any; no other layout is proven."""
    pattern = Pattern.parse(f"a (b c) d e!, a b f! e!, a b f! g!, {mask} -> a (b c) d g!", 4)
    assert sending_choices(ROWS["sdpa"], pattern) == ("d@f",)
    rule = derive("sdpa", pattern, parse_choice("d@f"))
    assert list(map(str, rule.operands)) == ["S(2)"] * 3 + [place]
    assert isinstance(certify(rule), Certificate)
    for other in (Placement("R"), Placement("P"), Placement("S", mask.split().index("f!") if "f!" in mask else 0)):
        assert f"operand 3 is {other}, which does not become {place}" in failure(
            replace(rule, operands=(*rule.operands[:3], other))
        )


def test_every_other_layout_is_refuted() -> None:
    for place in (Placement("C"), Placement("R"), Placement("P")):
        for at in range(3):
            operands = (*RULE.operands[:at], place, *RULE.operands[at + 1 :])
            assert f"operand {at} is {place}, which does not become" in failure(replace(RULE, operands=operands))
        assert f"the result is {place}, split along d it is S(2): ill-typed" in failure(replace(RULE, result=place))
    for dim in (0, 1, 3):
        operands = (RULE.operands[0], Placement("S", dim), RULE.operands[2])
        assert f"operand 1 is S({dim}), which does not become C" in failure(replace(RULE, operands=operands))


def test_guards_and_what_the_device_is_told_are_needed() -> None:
    for left in ((), ("k | d",), ("k | f",)):
        assert "not guarded: the degree divides the factor: false for" in failure(replace(RULE, guard=left))
    assert "the local operator is told [], split along d ['offset']" in failure(replace(RULE, local=()))


def test_other_factors_do_not_travel() -> None:
    for choice in ("f@d", "a@f", "d@a", "d@g", "c@f"):
        guard = tuple(f"k | {name}" for name in choice.split("@"))
        twin = replace(RULE, choice=parse_choice(choice), guard=guard)
        assert any(told in failure(twin) for told in ("do not travel along", "cannot be split along"))


def test_a_part_that_is_not_proven_refutes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ringproof, "prove_steps", lambda rule: Failure(f"no proof of {rule.name}"))
        assert "no proof of gather_copy" in failure(RULE)
    with monkeypatch.context() as patch:
        patch.setattr(ringproof, "MEANS", frozenset())
        assert "what sdpa gives for parts of its keys is not known to merge" in failure(RULE)


@pytest.mark.parametrize("causal", [False, True])
def test_the_falsifier_finds_no_counterexample_but_one_for_a_twin(causal: bool) -> None:
    """A device that is not told where its queries begin sees too few keys; the others see all."""
    rng, attrs = np.random.default_rng(0), {"causal": causal, "scale": None}
    arrays = [rng.standard_normal(shape) for shape in ((2, 4, 12, 3), (2, 2, 12, 3), (2, 2, 12, 5))]
    for degree in (2, 3):
        assert falsify(RULE, arrays, attrs, degree) is None
        assert (falsify(replace(RULE, local=()), arrays, attrs, degree) is not None) == causal


def test_the_row_is_a_mean_of_values_whose_weights_are_each_of_one_key() -> None:
    """What the proof takes from the row's meaning: means over parts of the keys, merged, are the mean over all."""
    rng, row = np.random.default_rng(1), ROWS["sdpa"].numpy
    q, k, v = (rng.standard_normal((3, n, 4)) for n in (5, 8, 8))
    parts = [(k[:, part], v[:, part]) for part in (slice(0, 3), slice(3, 4), slice(4, 8))]
    weights = [np.exp(q @ np.swapaxes(own, 1, 2) / 2).sum(-1, keepdims=True) for own, _ in parts]
    means = [row(q, *part, causal=False, scale=None) for part in parts]
    merged = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    assert np.allclose(merged, row(q, k, v, causal=False, scale=None))


def test_a_mask_is_a_part_of_each_weight() -> None:
    """So means over parts merge under one, too, also where a query sees no key of a part."""
    rng, row = np.random.default_rng(1), ROWS["sdpa"].numpy
    q, k, v = (rng.standard_normal((3, n, 4)) for n in (5, 8, 8))
    mask = rng.standard_normal((5, 8))
    mask[2, :3] = -np.inf
    parts = [slice(0, 3), slice(3, 8)]
    weights = [np.exp(q @ np.swapaxes(k[:, p], 1, 2) / 2 + mask[:, p]).sum(-1, keepdims=True) for p in parts]
    means = [row(q, k[:, p], v[:, p], mask[:, p], causal=False, scale=None) for p in parts]
    merged = sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)
    assert np.allclose(merged, row(q, k, v, mask, causal=False, scale=None))
