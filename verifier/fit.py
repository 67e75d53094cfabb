"""The search for malformed rules: no tensors fit them, so they claim nothing, whatever their sides compute.

A rule is well-formed if its guard holds for some sizes, and both sides have shapes, by the op table, at such sizes.
Dims with different names have different sizes unless the guard, or an operator that sums over both, equates them. Cases
that are not decided here, such as shapes with free attributes, are left to the proofs.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isqrt
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.factors import Shape
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.fields import short
from shardwright.substitutions.rules.attributes import types
from shardwright.substitutions.rules.rowrules import RowRule, check_pattern
from shardwright.substitutions.rules.rules import Rule
from shardwright.substitutions.terms import Apply, Term, Variable, applied, erase, subterms
from shardwright.verifier.algebra.symbols import Symbols
from shardwright.verifier.falsifiers.instances import RANKS, SIZES, drawn_sizes, satisfies
from shardwright.verifier.falsifiers.mismatch import ERRORS
from shardwright.verifier.proof import Failure
from shardwright.verifier.solver import is_satisfiable

_TRIES, _ENOUGH = 600, 12
_MAX_RANK = 64


def checked(rule: Rule, failure: Failure | None) -> Failure | None:
    """Return the failure of a proof, or instead the reason why the rule is malformed; None if neither."""
    if isinstance(rule, RowRule):
        return _foreign(rule) or failure
    if not isinstance(rule, Equation) or (failure is not None and failure.malformed):
        return failure
    if failure is None:
        return _no_sizes(rule) or _other_types(rule)
    return _no_sizes(rule) or (failure if failure.refuted else _no_shapes(rule) or failure)


def _malformed(field: str, what: str) -> Failure:
    return Failure(f"field {field!r}: {what}", malformed=True)


def _foreign(rule: RowRule) -> Failure | None:
    try:
        check_pattern(rule)
    except RuleError as error:
        return Failure(str(error), malformed=True)
    return None


# ---- guards ----


def _no_sizes(rule: Equation) -> Failure | None:
    """Return the failure of the condition that no sizes satisfy together with those before it, or None."""
    if not rule.guard:
        return None
    rng = random.Random(1)
    for _ in range(_TRIES):
        with suppress(RuleError, *ERRORS):
            if satisfies(rule, drawn_sizes(rule, rng, _pool(rule), _ranks(rule))):
                return None
    for i, condition in enumerate(rule.guard):
        if not _evaluates(rule, i):
            return _malformed(f"guard[{i}]", f"{condition} has no value for any sizes")
        if not _satisfiable(rule, i + 1):
            return _malformed(f"guard[{i}]", f"no sizes satisfy {', '.join(map(str, rule.guard[: i + 1]))}")
    return None


def _evaluates(rule: Equation, at: int) -> bool:
    rng = random.Random(1)
    for _ in range(_TRIES // 10):
        with suppress(RuleError, *ERRORS):
            rule.guard[at].evaluate(drawn_sizes(rule, rng, solve=False))
            return True
    return False


def _satisfiable(rule: Equation, count: int) -> bool:
    """Return whether the first conditions may hold together; True also if Z3 does not know or cannot express them."""
    symbols = Symbols({*rule.sizes, *rule.axes})
    splices = {name[1:] for _, dims in rule.variables for name in dims.names if name.startswith("*")}
    try:
        for condition in rule.guard[:count]:
            if condition.names & splices:
                return not _of_ranks(condition.tree) or any(
                    condition.evaluate(dict.fromkeys(splices, (1,) * rank)) for rank in range(_MAX_RANK)
                )
            symbols.assume(condition)
        return is_satisfiable(symbols.given([]))
    except (RuleError, *ERRORS):
        return True


def _of_ranks(tree: ast.expr) -> bool:
    """Return whether a condition is about a single number of dimensions."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"len"}
    return len(names) == 1


# ---- shapes ----


def _no_shapes(rule: Equation) -> Failure | None:
    """Return the failure of an operator without a shape at all sizes for which the operators before it have one."""
    rng, met = random.Random(2), 0
    left, right = (tuple(map(erase, side)) for side in (rule.left, rule.right))
    trials = {"left": _Trials(rule, left), "right": _Trials(rule, right)}
    for _ in range(_TRIES):
        try:
            sizes = drawn_sizes(rule, rng, _pool(rule), _ranks(rule), distinct=True)
            if not satisfies(rule, sizes) or not _general(rule, sizes):
                continue
        except (RuleError, *ERRORS):
            continue
        if trials["left"].fit(sizes) and (trials["right"].fit(sizes) or (met := met + 1) == _ENOUGH):
            break
    for side, trial in trials.items():
        if not trial.fits:
            return None if side == "left" and _equated(rule) else trial.failure(side)
    return None


def _general(rule: Equation, sizes: Mapping[str, Any]) -> bool:
    """Return whether no two dims are equal by accident, and none is 1, so that nothing is broadcast."""
    defined = set(map(_defined, rule.guard))
    plain = {n for _, dims in rule.variables for n in dims.names if not n.startswith("*")} - defined
    return len({sizes[name] for name in plain}) == len(plain) and all(sizes[name] > 1 for name in plain)


def _equated(rule: Equation) -> bool:
    """Return whether the left side fits by making sizes with different names equal, as a sum over both does."""
    from shardwright.verifier.algebra.shapes import evaluator, known

    try:
        run = evaluator(rule, known(rule))
        for root in rule.left:
            run.tensor(erase(root))
    except (RuleError, *ERRORS, AttributeError, RecursionError):
        return False
    return bool(run.equations)


class _Trials:
    """Trials of one side's shapes at many sizes; if they never exist, the first operator without one is reported."""

    def __init__(self, rule: Equation, roots: Sequence[Term]) -> None:
        self.rule, self.roots, self.fits = rule, roots, False
        self.order = list(dict.fromkeys(t for root in roots for t in subterms(root)))
        self.furthest, self.reached, self.said = -1, 0, ""

    def fit(self, sizes: Mapping[str, Any]) -> bool:
        """Return whether the side has shapes at these sizes."""
        shapes: dict[Term, Shape] = {}
        for at, term in enumerate(self.order):
            try:
                shapes[term] = self._shape(term, shapes, sizes)
            except (RuleError, *ERRORS) as error:
                self._note(at, str(error), sizes)
                return False
        self.fits = True
        return True

    def _shape(self, term: Term, shapes: Mapping[Term, Shape], sizes: Mapping[str, Any]) -> Shape:
        if isinstance(term, Variable):
            return self.rule.dims[term.name].shape(sizes)
        return term.shape([shapes[t] for t in term.operands], sizes)

    def _note(self, at: int, said: str, sizes: Mapping[str, Any]) -> None:
        if at > self.furthest:
            self.furthest, self.reached, self.said = at, 0, said
            names = {n.lstrip("*") for _, dims in self.rule.variables for n in dims.names}
            shown = ", ".join(f"{name} = {sizes[name]}" for name in sorted(names))
            self.said = f"{said} (at {shown})" if shown else said
        self.reached += at == self.furthest

    def failure(self, side: str) -> Failure | None:
        """Return the failure of the term that never fits; None if too few sizes were tried or attributes are free."""
        term = self.order[self.furthest]
        root = next(i for i, root in enumerate(self.roots) if term in subterms(root))
        if self.reached < _ENOUGH or self._open(term):
            return None
        return _malformed(f"{side}[{root}]", f"{short(term)} has no shape: {self.said}")

    def _open(self, term: Term) -> bool:
        """Return whether the shape depends on names that no variable has, which were drawn blindly."""
        known = {n.lstrip("*") for _, dims in self.rule.variables for n in dims.names}
        known |= set(map(_defined, self.rule.guard))
        shaping = (value for t in applied((term,)) for key, value in t.attrs if _shapes(t, key))
        return any(value.names - known for value in shaping)


def _defined(condition: Expression) -> str:
    """Return the name to which a condition gives a value, or ""."""
    match condition.tree:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()]):
            return name
        case _:
            return ""


def _shapes(term: Apply, key: str) -> bool:
    """Return whether an attribute may take part in shapes, as it consists of integers."""
    return not {"float", "bool", "str", "None"} & set(types(term.op, key))


def _pool(rule: Equation) -> tuple[int, ...]:
    """Return the sizes to try: small ones, and those related to the numbers in the rule."""
    numbers = {n for n in _numbers(rule) if n > 1}
    wanted = {m for n in numbers for m in (n - 1, n, n + 1, 2 * n, 3 * n, *_divisors(n)) if m > 1}
    return tuple(dict.fromkeys((*SIZES, 8, 9, *sorted(wanted))))


def _divisors(n: int) -> Iterator[int]:
    small = [d for d in range(2, min(isqrt(n), 10_000) + 1) if n % d == 0][:8]
    yield from (m for d in small for m in (d, n // d))


def _ranks(rule: Equation) -> tuple[int, ...]:
    return tuple(sorted({*RANKS, *(n + more for n in _numbers(rule) if n < _MAX_RANK for more in (0, 1, 2))}))


def _numbers(rule: Equation) -> Iterator[int]:
    """Yield the integers in a rule."""
    attrs = (value for t in rule.operators for _, value in t.attrs)
    for value in (*attrs, *rule.guard):
        yield from (n.value for n in ast.walk(value.tree) if isinstance(n, ast.Constant) and type(n.value) is int)


# ---- attributes ----


def _other_types(rule: Equation) -> Failure | None:
    """Return the failure of a right side's attribute that may get a value outside its type, such as None; or None."""
    bound: dict[str, set[str]] = {}
    for term in applied(rule.left):
        for key, value in term.attrs:
            if value.name is not None and value.name not in rule.sizes:
                allowed = set(types(term.op, key))
                bound[value.name] = bound.get(value.name, allowed) & allowed
    compared = set().union(*(_numeric(condition.tree) for condition in rule.guard))
    for term in applied(rule.right):
        for key, value in term.attrs:
            for name in sorted(value.names & bound.keys() - compared):
                if "None" in bound[name] and (value.name is None or "None" not in types(term.op, key)):
                    return Failure(f"{term.op}: {key}={value} where {name} is a number", {name: "None"})
    return None


def _numeric(tree: ast.expr) -> set[str]:
    """Return the names that must be numbers for a condition to hold, as None has no order."""
    if not isinstance(tree, ast.Compare):
        return set()
    numbers: set[str] = set()
    for op, left, right in zip(tree.ops, (tree.left, *tree.comparators), tree.comparators, strict=False):
        if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) or (
            isinstance(op, ast.Eq) and any(isinstance(x, ast.Constant) and x.value is not None for x in (left, right))
        ):
            numbers |= {node.id for x in (left, right) for node in ast.walk(x) if isinstance(node, ast.Name)}
    return numbers
