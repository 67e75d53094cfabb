"""The checks of equations that come from outside, field by field, before anyone tries to prove them."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import RESERVED, Expression
from shardwright.substitutions.fields import located, short
from shardwright.substitutions.rules.attributes import check_type, semantics
from shardwright.substitutions.terms import Apply, applied

MAX_OPERATORS = 200
"""The most operators on one side of a rule."""
MAX_RANK = 64
"""The most dimensions of one variable."""
MAX_INT = 2**31 - 1


def equation_from_json(data: Mapping[str, Any]) -> Equation:
    """Read an equation's JSON form. Raises a `RuleError` that names the rule, the field and the mistake."""
    rule = Equation.from_json(data)
    with located(f"rule {rule.name!r}"):
        check_equation(rule)
    return rule


def check_equation(rule: Equation) -> None:
    """Raise a `RuleError` for names, operators, numbers and layouts that no tensor program can have."""
    _check_names(rule)
    for side, roots in (("left", rule.left), ("right", rule.right)):
        num_operators = 0
        for i, root in enumerate(roots):
            for term in applied([root]):
                num_operators += 1
                _check_apply(term, f"field '{side}[{i}]'")
        if num_operators > MAX_OPERATORS:
            raise RuleError(f"field {side!r}: {num_operators} operators; at most {MAX_OPERATORS} are read")
    for i, condition in enumerate(rule.guard):
        if not isinstance(condition.tree, ast.Compare):
            raise RuleError(f"field 'guard[{i}]': expected a comparison such as 'o > 1', got {str(condition)!r}")
        _check_numbers(condition, f"field 'guard[{i}]'")
    _check_axes(rule)
    _check_parameters(rule)


def _check_names(rule: Equation) -> None:
    for variable, dims in rule.variables:
        if len(dims.entries) > MAX_RANK:
            raise RuleError(
                f"field 'variables.{variable}': {len(dims.entries)} dimensions; at most {MAX_RANK} are read"
            )
        for name in (variable, *(n.lstrip("*") for n in dims.names)):
            if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
                raise RuleError(f"field 'variables.{variable}': {name!r} is a reserved word; choose another name")


def _check_apply(term: Apply, where: str) -> None:
    if term.op in PARALLEL_OPS:
        return
    num_wanted = _num_operands(term.op)
    if num_wanted is not None and len(term.operands) != num_wanted:
        raise RuleError(f"{where}: {term.op} has {num_wanted} operands, got {len(term.operands)} in {short(term)}")
    signature = semantics(term.op)
    if signature is None and term.attrs:
        raise RuleError(f"{where}: {term.op} has no attributes, got {term.attrs[0][0]!r} in {short(term)}")
    if signature is not None:
        try:
            signature.bind(*term.operands, **dict(term.attrs))
        except TypeError as error:
            raise RuleError(f"{where}: {short(term)}: {error}") from None
    for key, value in term.attrs:
        with located(f"{where}: {term.op}: {key}"):
            check_type(term.op, key, value)
        _check_numbers(value, f"{where}: {term.op}: {key}")


@lru_cache(maxsize=256)
def _num_operands(op: str) -> int | None:
    """Return how many operands the row has, where its factor string says so, or None."""
    factors = ROWS[op].factors
    return len(factors.partition("->")[0].split(",")) if isinstance(factors, str) else None


def _check_numbers(expression: Expression, where: str) -> None:
    for node in ast.walk(expression.tree):
        value = node.value if isinstance(node, ast.Constant) else 0
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise RuleError(f"{where}: the number {str(value)[:24]} is out of range; sizes are below 2^31")
        if isinstance(value, float) and not isfinite(value):
            raise RuleError(f"{where}: the number {value} is not finite")


def _check_axes(rule: Equation) -> None:
    if (twice := _twice(rule.axes)) is not None:
        raise RuleError(f"field 'axes': {twice!r} is named twice")
    for axis in rule.axes:
        if not axis.isidentifier() or keyword.iskeyword(axis):
            raise RuleError(f"field 'axes': {axis!r} is not a name")
    if rule.layouts and not rule.axes:
        raise RuleError("field 'layouts': layouts are along mesh axes; name them in 'axes'")
    ranks = {v: len(d.entries) for v, d in rule.variables if not any(n.startswith("*") for n in d.names)}
    for variable, placements in rule.layouts:
        for place in placements:
            if place.kind == "S" and place.dim >= ranks.get(variable, MAX_INT):
                dims = dict(rule.variables)[variable]
                raise RuleError(
                    f"field 'layouts.{variable}': {place} shards dimension {place.dim}, but {variable} has the "
                    f"dims '{dims}'"
                )


def _check_parameters(rule: Equation) -> None:
    if (twice := _twice(rule.parameters)) is not None:
        raise RuleError(f"field 'parameters': {twice!r} is named twice")
    used = {n for g in rule.guard for n in g.names}
    used |= {n for t in applied(rule.right) for _, value in t.attrs for n in value.names}
    for name in rule.parameters:
        if name in rule.bound:
            raise RuleError(f"field 'parameters': {name!r} is bound by the left side already")
        if name not in used:
            raise RuleError(f"field 'parameters': {name!r} is used nowhere")


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
