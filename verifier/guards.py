"""The weakest guard under which a rule is true: conditions that make a false rule true.

Candidates are equations of two sizes, `len(b) > 0`, orders of slice bounds and sizes, and divisibilities. Few
conditions are tried before more, and weak ones before strong ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from shardwright.pcg.errors import RuleError, ShardwrightError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.terms import applied
from shardwright.verifier.algebra.serialproof import prove_equation
from shardwright.verifier.certificates import prove
from shardwright.verifier.falsifiers.falsify_serial import falsify_equation
from shardwright.verifier.placement.typing import required_guard
from shardwright.verifier.proof import BEYOND

MAX_ATOMS = 2
MAX_TRIED = 400


def weakest_guard(rule: Equation, atoms: Sequence[Expression] | None = None) -> tuple[Expression, ...] | None:
    """Return the fewest conditions, added to the rule's own, under which it is certified; None if none are found.

    Without `atoms`, candidates are taken from the rule. For a placement rule, they are the divisibilities that its
    typing needs. The result is () if the rule is true as it stands.
    """
    if rule.axes:
        return _of_placement(rule)
    candidates = tuple(candidate_atoms(rule)) if atoms is None else tuple(atoms)
    tried = 0
    for count in range(MAX_ATOMS + 1):
        for chosen in combinations(candidates, count):
            tried += 1
            if tried > MAX_TRIED:
                return None
            if _certified(rule, chosen):
                return chosen
    return None


def _certified(rule: Equation, extra: Sequence[Expression]) -> bool:
    """Return whether the rule is proven under more conditions that can hold together with its own."""
    try:
        guarded = replace(rule, guard=(*rule.guard, *extra))
    except RuleError:  # a condition on a name that the left side does not bind
        return False
    return prove_equation(guarded) is None and prove(guarded).certified and (not extra or _applies(guarded))


def _applies(rule: Equation) -> bool:
    """Return whether the left side has instances under the guard; a contradiction would prove anything."""
    try:
        return falsify_equation(rule, trials=2) is None
    except RuleError:
        return False


def _of_placement(rule: Equation) -> tuple[Expression, ...] | None:
    try:
        needed = required_guard(rule)
    except (ShardwrightError, *BEYOND):
        return None
    missing = tuple(g for g in needed if g not in rule.guard)
    guarded = replace(rule, guard=(*rule.guard, *missing))
    return missing if prove(guarded).certified else None


def candidate_atoms(rule: Equation) -> Iterator[Expression]:
    """Yield conditions under which rules of this kind are true, weak ones first."""
    splices = sorted(n[1:] for _, dims in rule.variables for n in dims.names if n.startswith("*"))
    yield from (expression(f"len({b}) > 0") for b in dict.fromkeys(splices))
    sizes = sorted(n for n in rule.sizes if n in rule.bound)
    bounds = list(dict.fromkeys(_bounds(rule)))
    yield from (expression(f"{a} <= {b}") for a, b in _orders(bounds, sizes))
    yield from (expression(f"{p} == iota(len({b}))") for p in _opaque(rule) for b in dict.fromkeys(splices))
    yield from (expression(f"{a} % {b} == 0") for a, b in permutations(sizes, 2))
    yield from (expression(f"{a} == {b}") for a, b in combinations((*sizes, *(b for b in bounds if b not in sizes)), 2))


def _bounds(rule: Equation) -> Iterator[str]:
    """Yield the named bounds of slices, as text; numbers are ordered already."""
    for term in applied(rule.left):
        yield from (str(v) for k, v in term.attrs if k in ("start", "stop") and isinstance(v.tree, ast.Name))


def _orders(bounds: Sequence[str], sizes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs (a, b) for conditions a <= b: between bounds, and between bounds and sizes."""
    yield from permutations(bounds, 2)
    for bound in bounds:
        for size in sizes:
            if size != bound:
                yield bound, size
                yield size, bound


def _opaque(rule: Equation) -> Iterator[str]:
    """Yield the names of permutations."""
    names = (v.name for term in applied(rule.left) for k, v in term.attrs if k == "dims" and v.name is not None)
    yield from dict.fromkeys(names)
