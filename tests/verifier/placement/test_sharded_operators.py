"""Operators that people shard by special code elsewhere, each by a proven row rule: what it says, and what it needs.

What needs more than a sum (softmax, losses, norms, attention over keys) are equations: `tests/test_decompositions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.pcg.choice import Split
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern, pattern_of
from shardwright.substitutions.rules.rowrules import RowRule, derive
from shardwright.verifier.falsifiers.falsify import falsify
from shardwright.verifier.rows.rowproof import prove
from tests.each import each
from tests.samples import Sample, below, flags, real, sample, targets


@dataclass(frozen=True)
class Sharding:
    """A sample with the factor to split (as the row's own factor string calls it), and the layouts that follow."""

    title: str
    row: str
    given: Sample
    factor: str
    operands: tuple[str, ...]
    result: str
    told: tuple[str, ...] = ()

    def rule(self) -> RowRule:
        pattern, names = self._pattern()
        return derive(self.row, pattern, Split(names[self.factor]))

    def layouts(self) -> tuple[tuple[Placement, ...], Placement]:
        """What is expected, with factors as the rule calls them."""
        names = self._pattern()[1]

        def named(text: str) -> Placement:
            placement = Placement.parse(text)
            return replace(placement, blocks=tuple(names[b] for b in placement.blocks))

        return tuple(map(named, self.operands)), named(self.result)

    def _pattern(self) -> tuple[Pattern, dict[str, str]]:
        signature = ROWS[self.row].signature(self.given.shapes, dict(self.given.attrs))
        pattern, letters = pattern_of(signature)
        return pattern, {f.name: letter for f, letter in zip(signature.factors, letters, strict=True)}


HEADS = (real(2, 16, 12, 6), real(2, 4, 20, 6), real(2, 4, 20, 10))
PLAIN = {"causal": False, "scale": None}
CASES = [
    Sharding("vocabulary-parallel embedding", "embedding",
             sample(real(20, 16), below(20, 4, 8), padding_idx=None, offset=0), "v", ("S(0)", "C"), "P", ("offset",)),
    Sharding("target's logit of a sharded vocabulary", "pick", sample(real(8, 20), targets(20, -100, 8), offset=0),
             "v", ("S(1)", "C"), "P", ("offset",)),
    Sharding("grouped heads by key head", "sdpa", sample(*HEADS, **PLAIN), "h", ("S(1)", "S(1)", "S(1)"), "S(1)"),
    Sharding("grouped heads within a key head", "sdpa", sample(*HEADS, **PLAIN), "r", ("S(1, h)", "C", "C"), "S(1, h)"),
    Sharding("mask of all heads, by head", "sdpa", sample(*HEADS, flags(2, 1, 12, 20), **PLAIN),
             "h", ("S(1)", "S(1)", "S(1)", "C"), "S(1)"),
    Sharding("mask by query", "sdpa", sample(*HEADS, flags(2, 1, 12, 20), **PLAIN),
             "q", ("S(2)", "C", "C", "S(2)"), "S(2)", ("offset",)),
    Sharding("causal, by query", "sdpa", sample(*HEADS, causal=True, scale=None),
             "q", ("S(2)", "C", "C"), "S(2)", ("offset",)),
    Sharding("mask of numbers for each head, by query", "sdpa", sample(*HEADS, real(16, 12, 20), **PLAIN),
             "q", ("S(2)", "C", "C", "S(1)"), "S(2)", ("offset",)),
    Sharding("concatenation along the sharded dimension", "concat", sample(real(4, 8), real(4, 8), dim=1),
             "d1", ("S(1)", "S(1)"), "S(1, n)"),
    Sharding("slice that is a block of the sharded dimension", "slice",
             sample(real(4, 24), dim=1, start=8, stop=16, step=1), "o", ("S(1, q)",), "S(1)", ("attrs",)),
    Sharding("split into heads, by head", "reshape", sample(real(4, 32), shape=(4, 8, 4)),
             "b", ("S(1)",), "S(1)", ("attrs",)),
    Sharding("split into heads, within a head", "reshape", sample(real(4, 32), shape=(4, 8, 4)),
             "c", ("S(1, b)",), "S(2)", ("attrs",)),
    Sharding("merged batch and sequence, by sequence", "reshape", sample(real(4, 8, 12), shape=(32, 12)),
             "b", ("S(1)",), "S(0, a)", ("attrs",)),
]  # fmt: skip


@each("case", CASES, ids=lambda c: c.title)
def test_it_is_a_proven_rule_with_these_layouts(case: Sharding) -> None:
    rule = case.rule()
    assert (rule.operands, rule.result) == case.layouts()
    assert rule.local == case.told
    assert prove(rule).certified
    for degree in (2, 4):
        assert falsify(rule, case.given.arrays(1), dict(case.given.attrs), degree) is None


@each("case", [c for c in CASES if c.told], ids=lambda c: c.title)
def test_it_needs_what_the_local_operator_is_told(case: Sharding) -> None:
    twin = replace(case.rule(), local=())
    failure = prove(twin).failure
    assert failure is not None
    assert failure.refuted


@each("case", [c for c in CASES if any("," in text for text in (*c.operands, c.result))], ids=lambda c: c.title)
def test_it_needs_its_blocks(case: Sharding) -> None:
    """The trap of fused weights: consecutive parts of a blocked dimension are other elements."""
    rule = case.rule()

    def plain(p: Placement) -> Placement:
        return replace(p, blocks=())

    failure = prove(replace(rule, operands=tuple(map(plain, rule.operands)), result=plain(rule.result))).failure
    assert failure is not None
    assert failure.refuted
