"""Wrong twins of the lemmas that every proof stands on: each must fail, or be true as well.

One hypothesis is dropped, or one place of the goal is changed: a comparison made sharper, an equation off by one, a sum
for a product, a remainder for a quotient, one integer for another. A twin that Z3 proves is checked on small integers,
by an evaluator that shares nothing with Z3 but the formula.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.verifier.lemmas import Lemma, Obligation
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.solver import is_valid, refute

Env = Mapping[str, int]
_TRIALS = 4000
_RANGE = (-2, 5)


@dataclass(frozen=True, slots=True)
class LemmaTwin:
    """A changed obligation of a lemma."""

    lemma: str
    obligation: int
    what: str
    claim: Obligation


def lemma_twins(lemma: Lemma) -> Iterator[LemmaTwin]:
    """Every twin of every obligation of a lemma."""
    for number, (given, goal) in enumerate(lemma.obligations()):
        for at, hypothesis in enumerate(given):
            rest = [*given[:at], *given[at + 1 :]]
            yield LemmaTwin(lemma.name, number, f"without {hypothesis}", (rest, goal))
        for what, wrong in _mutations(goal):
            yield LemmaTwin(lemma.name, number, what, (given, wrong))
        integers = [c for c in _constants(goal) if z3.is_int(c)]
        for x, y in zip(integers, integers[1:] + integers[:1], strict=True):
            if len(integers) > 1:
                yield LemmaTwin(lemma.name, number, f"{y} for {x}", (given, z3.substitute(goal, (x, y))))


def judge_lemma(twin: LemmaTwin) -> tuple[str, str]:
    """The twin's outcome, as in `mutation`, and the numbers that refute it."""
    given, goal = twin.claim
    found = _counterexample(given, goal)
    shown = ", ".join(f"{name} = {value}" for name, value in (found or {}).items())
    if is_valid(goal, given):
        return ("wrong", shown) if found else ("true", "")
    if found:
        return "counterexample", shown
    failure = refute(twin.what, goal, given, [])
    return ("z3" if failure.refuted else "unknown"), str(failure)


def _mutations(formula: Formula) -> Iterator[tuple[str, Formula]]:
    """The formula with one place changed."""
    for wrong in _changed(formula):
        yield f"{formula} → {wrong}", wrong
    children = formula.children()
    for at, child in enumerate(children):
        for what, wrong in _mutations(child):
            yield what, formula.decl()(*children[:at], wrong, *children[at + 1 :])


def _changed(e: Formula) -> Iterator[Formula]:
    children = e.children()
    if z3.is_lt(e):
        yield children[0] + 1 < children[1]
    elif z3.is_le(e):
        yield children[0] < children[1]
    elif z3.is_ge(e):
        yield children[0] > children[1]
    elif z3.is_eq(e) and z3.is_arith(children[0]):
        yield children[0] == children[1] + 1
    elif z3.is_mul(e):
        yield z3.Sum(children)
    elif z3.is_add(e):
        yield children[0] - z3.Sum(children[1:])
    elif z3.is_idiv(e):
        yield children[0] % children[1]
    elif z3.is_mod(e):
        yield children[0] / children[1]


def _constants(e: Formula) -> list[Number]:
    """The free constants, each once, by name."""
    found: dict[str, Number] = {}
    pending = [e]
    while pending:
        node = pending.pop()
        if z3.is_const(node) and node.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            found[str(node)] = node
        pending += node.children()
    return [found[name] for name in sorted(found)]


# ---- small integers ----


def _counterexample(given: list[Formula], goal: Formula) -> Mapping[str, int] | None:
    """Small integers that satisfy the hypotheses and not the goal; None also for formulas of other sorts."""
    constants = list({str(c): c for formula in (*given, goal) for c in _constants(formula)}.values())
    if any(not z3.is_int(c) for c in constants) or any(map(_applies, (*given, goal))):
        return None
    names, rng = [str(c) for c in constants], random.Random(0)
    hypotheses, claim = [_compiled(h) for h in given], _compiled(goal)
    for _ in range(_TRIALS):
        env = {name: rng.randint(*_RANGE) for name in names}
        try:
            if all(holds(env) for holds in hypotheses) and not claim(env):
                return env
        except ZeroDivisionError:  # Z3 divides by zero as it likes
            continue
    return None


def _applies(e: Formula) -> bool:
    """Whether a formula applies a function that means nothing, or speaks of reals."""
    own = e.num_args() > 0 and e.decl().kind() == z3.Z3_OP_UNINTERPRETED
    return own or z3.is_real(e) or any(map(_applies, e.children()))


def _compiled(e: Formula) -> Callable[[Env], int | bool]:
    if z3.is_int_value(e) or z3.is_true(e) or z3.is_false(e):
        value = e.as_long() if z3.is_int_value(e) else bool(z3.is_true(e))
        return lambda env: value
    if z3.is_const(e):
        name = str(e)
        return lambda env: env[name]
    operands, calculate = [_compiled(child) for child in e.children()], _CALCULATE[e.decl().kind()]
    return lambda env: calculate(*(operand(env) for operand in operands))


def _product(*values: int) -> int:
    found = 1
    for value in values:
        found *= value
    return found


def _quotient(a: int, b: int) -> int:
    """Z3's division: the remainder is not negative."""
    return a // b if b > 0 else -(a // -b)


_CALCULATE: Mapping[int, Callable[..., int | bool]] = {
    z3.Z3_OP_AND: lambda *v: all(v),
    z3.Z3_OP_OR: lambda *v: any(v),
    z3.Z3_OP_NOT: lambda v: not v,
    z3.Z3_OP_IMPLIES: lambda a, b: not a or b,
    z3.Z3_OP_ITE: lambda condition, a, b: a if condition else b,
    z3.Z3_OP_LT: lambda a, b: a < b,
    z3.Z3_OP_LE: lambda a, b: a <= b,
    z3.Z3_OP_GT: lambda a, b: a > b,
    z3.Z3_OP_GE: lambda a, b: a >= b,
    z3.Z3_OP_EQ: lambda a, b: a == b,
    z3.Z3_OP_ADD: lambda *v: sum(v),
    z3.Z3_OP_SUB: lambda a, *v: a - sum(v),
    z3.Z3_OP_MUL: _product,
    z3.Z3_OP_UMINUS: lambda v: -v,
    z3.Z3_OP_IDIV: _quotient,
    z3.Z3_OP_MOD: lambda a, b: a - b * _quotient(a, b),
}
