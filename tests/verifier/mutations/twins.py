"""Wrong twins: systematic mutations of true rules. A verifier that certifies one of them is broken.

a shard moves to another dimension, its blocks change, or it is dropped; C becomes R and R becomes C (the gradient is
then wrong); the result's layout changes; another operand is made partial; what the local operator is told is dropped;
a guard is dropped, or asks the degree to divide another factor; a factor that may not be split is split
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.pcg.choice import Split
from shardwright.pcg.errors import GraphError
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.substitutions.rules.rowrules import RowRule, derive
from shardwright.substitutions.rules.steps import StepRule, SymbolicLayout, SymbolicStep
from tests.verifier.mutations.termtwins import equation_twins, placement_twins, term_twins

Twin = tuple[str, RowRule]


def row_twins(rule: RowRule) -> Iterator[Twin]:
    """Every mutation of a row rule, with what was done to it."""
    pattern = rule.shapes()
    for number, (dims, placement) in enumerate(zip(pattern.operands, rule.operands, strict=True)):
        for wrong in _wrong(placement, dims):
            operands = (*rule.operands[:number], wrong, *rule.operands[number + 1 :])
            yield f"operand {number}: {placement} → {wrong}", replace(rule, operands=operands)
    for wrong in _wrong(rule.result, pattern.result):
        yield f"result: {rule.result} → {wrong}", replace(rule, result=wrong)
    for told in rule.local:
        yield f"not told its {told}", replace(rule, local=tuple(x for x in rule.local if x != told))
    for condition in rule.guard:
        rest = tuple(x for x in rule.guard if x != condition)
        yield f"without guard {condition!r}", replace(rule, guard=rest)
        for wrong in _wrong_condition(condition, rule, pattern):
            yield f"guard {condition!r} → {wrong!r}", replace(rule, guard=(wrong, *rest))


def _wrong_condition(condition: str, rule: RowRule, pattern: Pattern) -> Iterator[str]:
    """Another factor that the degree divides, another operand that is not rounded."""
    kind, _, said = condition.partition(" ")
    if kind == "k":
        yield from (f"k | {factor}" for factor in pattern.factors if factor != said[2:])
    elif kind == "additive":
        yield from (f"additive {i}" for i in range(len(rule.operands)) if str(i) != said)


def _wrong(placement: Placement, dims: tuple[tuple[str, ...], ...]) -> Iterator[Placement]:
    if placement.kind != "S":
        yield from (Placement(kind) for kind in "RCP" if kind != placement.kind)  # type: ignore[arg-type]
        return
    yield Placement("C")
    yield Placement("P")
    other = next((d for d in range(len(dims)) if d != placement.dim and dims[d]), None)
    if other is not None:
        yield Placement("S", other)
    if placement.blocks:
        yield Placement("S", placement.dim)
    elif len(dims[placement.dim]) > 1:
        yield Placement("S", placement.dim, dims[placement.dim][:1])


def fixed_twins(row: str, pattern: Pattern) -> Iterator[Twin]:
    """Rules that split a factor which must stay whole, as if it could be split."""
    for factor in sorted(pattern.fixed):
        freed = Pattern(pattern.operands, pattern.result, pattern.fixed - {factor})
        try:
            rule = derive(row, freed, Split(factor))
        except GraphError:
            continue
        yield f"{factor} is split though it is fixed", replace(rule, pattern=str(pattern))


# ---- rules of the parallel operators ----


def step_twins(rule: StepRule) -> Iterator[tuple[str, StepRule]]:
    """Mutations of the right side: a step dropped, its dimension or blocks changed, sums and copies exchanged."""
    for side, moves in (("left", rule.left), ("right", rule.right)):
        for at, move in enumerate(moves):
            for wrong in _wrong_move(move):
                changed = (*moves[:at], *wrong, *moves[at + 1 :])
                what = f"{side}: {move} → {'; '.join(map(str, wrong)) or 'nothing'}"
                yield what, replace(rule, **{side: changed})
    flipped = {"R": "C", "C": "R", "P": "R"}
    for at, (axis, place) in enumerate(rule.start):
        if place.kind in flipped:
            start = (*rule.start[:at], (axis, SymbolicLayout(flipped[place.kind])), *rule.start[at + 1 :])
            yield f"start {axis}: {place} → {flipped[place.kind]}", replace(rule, start=start)


def _wrong_move(move: SymbolicStep) -> Iterator[tuple[SymbolicStep, ...]]:
    yield ()
    if move.dim:
        yield (replace(move, dim="z"),)
        yield (replace(move, blocks="z"),)
    swapped = {"reduce": "replicate", "replicate": "reduce", "combine": "reduce", "gather_copy": "replicate",
               "reduce_copy": "replicate"}  # fmt: skip
    if move.op in swapped:
        yield (replace(move, op=swapped[move.op]),)


__all__ = ["equation_twins", "fixed_twins", "placement_twins", "row_twins", "step_twins", "term_twins"]
