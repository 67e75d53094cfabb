"""Proves algebraic rules by index semantics: equal dims, and equal elements as sums of products."""

from __future__ import annotations

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.verifier.elements import Evaluator, Tensor
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.normal import Equality
from shardwright.verifier.solver import Failure, is_valid, refute
from shardwright.verifier.symbols import Symbols


def prove_equation(rule: Equation) -> Failure | None:
    """None if the rule is proven for all sizes and ranks; otherwise what broke."""
    try:
        return _failure(rule)
    except RuleError as error:
        return Failure(str(error))


def _failure(rule: Equation) -> Failure | None:
    symbols = Symbols()
    conditions = [symbols.condition(g) for g in rule.guard]
    run = Evaluator(rule, symbols)
    left = [run.tensor(root) for root in rule.left]
    given = [formula for _, formula in run.needs]  # the graph that is matched is well-formed
    run.needs.clear()
    right = [run.tensor(root) for root in rule.right]
    given += [size >= 1 for size in symbols.sizes.values()] + conditions
    for what, formula in run.needs:
        if not is_valid(formula, given):
            return refute(what, formula, given, [])
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if (failure := _unequal(f"root {number}", a, b, run, given)) is not None:
            return failure
    return None


def _unequal(title: str, left: Tensor, right: Tensor, run: Evaluator, given: list[Formula]) -> Failure | None:
    index: list[Number] = []
    ranges: list[Formula] = []
    if len(left.dims) != len(right.dims):
        return Failure(f"{title}: {len(left.dims)} dimensions against {len(right.dims)}")
    for number, (a, b) in enumerate(zip(left.dims, right.dims, strict=True)):
        index.append(z3.Int(f"y{number}"))
        if a.splice or b.splice:
            if not a.splice or not b.splice:
                return Failure(f"{title}: dimension {number} is a splice on one side only")
            continue
        if not is_valid(a.size == b.size, given):
            return refute(f"{title}: size of dimension {number}", a.size == b.size, given, [])
        ranges.append(z3.And(index[-1] >= 0, index[-1] < a.size))
    ours, theirs = left.element(tuple(index)), right.element(tuple(index))
    equal = Equality([*given, *run.symbols.laws(), *ranges], _distinct(run.shifts))
    return None if equal.holds(ours, theirs) else Failure(f"{title}: elements differ")


def _distinct(shifts: list[Number]) -> list[Number]:
    """The offsets that bound indices may differ by, each once."""
    return list({str(s): s for s in map(z3.simplify, shifts) if str(s) != "0"}.values())
