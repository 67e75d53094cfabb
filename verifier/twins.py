"""Wrong twins: systematic mutations of true rules. A verifier that certifies one of them is broken.

a shard moves to another dimension, its blocks change, or it is dropped; C becomes R and R becomes C (the gradient is
then wrong); the result's layout changes; another operand is made partial; what the local operator is told is dropped;
a guard is dropped; a factor that may not be split is split
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.pcg.errors import GraphError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.pattern import Pattern
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rowrules import RowRule, derive
from shardwright.substitutions.steps import Move, Place, StepRule
from shardwright.substitutions.terms import Term, Variable

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
        yield f"without guard {condition!r}", replace(rule, guard=tuple(x for x in rule.guard if x != condition))


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
            rule = derive(row, freed, factor)
        except GraphError:
            continue
        yield f"{factor} is split though it is fixed", replace(rule, pattern=str(pattern))


# ---- algebraic rules ----

_OTHER_OP = {"add": "sub", "sub": "add", "mul": "add", "neg": "relu", "relu": "silu", "silu": "relu"}


def equation_twins(rule: Equation) -> Iterator[tuple[str, Equation]]:
    """Mutations of the right side and of the guard of an algebraic rule. Some are true variants."""
    for at, root in enumerate(rule.right):
        for what, wrong in _mutations(root, rule):
            right = (*rule.right[:at], wrong, *rule.right[at + 1 :])
            yield f"{what} in {root}", replace(rule, right=right)
    if len(rule.right) > 1:
        yield "roots swapped", replace(rule, right=rule.right[::-1])
    for condition in rule.guard:
        yield f"without guard {condition}", replace(rule, guard=tuple(g for g in rule.guard if g != condition))


def _mutations(term: Term, rule: Equation) -> Iterator[tuple[str, Term]]:
    """Every term that differs from this one in one place."""
    if isinstance(term, Variable):
        for other, dims in rule.variables:
            if other != term.name and dims == rule.dims[term.name]:
                yield f"{term} → {other}", Variable(other)
        return
    if term.op in _OTHER_OP:
        yield f"{term.op} → {_OTHER_OP[term.op]}", replace(term, op=_OTHER_OP[term.op])
    if len(term.operands) > 1 and term.operands[0] != term.operands[1]:
        yield f"{term.op} of swapped operands", replace(term, operands=term.operands[::-1])
    if len(term.operands) == 1:
        yield f"{term.op} dropped", term.operands[0]
    for at, (key, value) in enumerate(term.attrs):
        for wrong in _wrong_attribute(key, value, rule):
            attrs = (*term.attrs[:at], (key, wrong), *term.attrs[at + 1 :])
            yield f"{key}={value} → {wrong}", replace(term, attrs=attrs)
    for at, operand in enumerate(term.operands):
        for what, wrong in _mutations(operand, rule):
            yield what, replace(term, operands=(*term.operands[:at], wrong, *term.operands[at + 1 :]))


def _wrong_attribute(key: str, value: Expression, rule: Equation) -> Iterator[Expression]:
    if key in ("start", "stop"):
        yield expression(f"{value} + 1")
        yield expression(f"{value} - 1")
    elif key == "dim":
        yield expression("1" if str(value) == "0" else "0")
    elif key == "dims" and str(value).startswith("compose"):
        p, q = sorted(value.names)
        yield expression(f"compose({q}, {p})")
        yield expression(p)
    elif key == "shape":
        yield from (expression(name) for name in sorted({"s", "t"} & rule.bound) if name != str(value))


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
            start = (*rule.start[:at], (axis, Place(flipped[place.kind])), *rule.start[at + 1 :])
            yield f"start {axis}: {place} → {flipped[place.kind]}", replace(rule, start=start)


def _wrong_move(move: Move) -> Iterator[tuple[Move, ...]]:
    yield ()
    if move.dim:
        yield (replace(move, dim="z"),)
        yield (replace(move, blocks="z"),)
    swapped = {"reduce": "replicate", "replicate": "reduce", "combine": "reduce", "gather_copy": "replicate",
               "reduce_copy": "replicate"}  # fmt: skip
    if move.op in swapped:
        yield (replace(move, op=swapped[move.op]),)
