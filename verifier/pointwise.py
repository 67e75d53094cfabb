"""A second proof of rules that compute element by element: real arithmetic, decided by Z3.

Rows that act on each element read every variable at one place, so a variable is one real number, whatever is broadcast.
Products, quotients, relu, abs, maxima and minima are Z3's own; other functions are uninterpreted, and so is any other
term, such as a matrix product, which stands for one number wherever it occurs. Whether the shapes agree is not asked
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.terms import Apply, Term, Variable
from shardwright.verifier.logic import Formula, Number, Solver, z3

TIMEOUT_MS = 500
_OPAQUE = ("exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "sin", "cos", "erf", "softplus", "silu", "gelu")
_BINARY: Mapping[str, Callable[[Number, Number], Number]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "maximum": lambda x, y: z3.If(x > y, x, y),
    "minimum": lambda x, y: z3.If(x < y, x, y),
}
_UNARY: Mapping[str, Callable[[Number], Number]] = {
    "neg": lambda x: -x,
    "relu": lambda x: z3.If(x > 0, x, z3.RealVal(0)),
    "abs": lambda x: z3.If(x > 0, x, -x),
    "contiguous": lambda x: x,
}


@lru_cache(maxsize=1)
def _solver() -> Solver:
    solver = z3.SolverFor("QF_UFNRA")
    solver.set("timeout", TIMEOUT_MS)
    return solver


def pointwise_equal(rule: Equation) -> bool:
    """Whether both sides are equal as numbers, wherever the left side exists. False also for unknown."""
    if not all(_computes(root) for root in rule.left):
        return False
    exists: list[Formula] = []
    left = [_number(root, exists) for root in rule.left]
    given, needs = list(exists), list[Formula]()
    right = [_number(root, needs) for root in rule.right]
    solver = _solver()
    solver.push()
    try:
        goal = z3.And(*needs, *(a == b for a, b in zip(left, right, strict=True)))
        solver.add(*given, z3.Not(goal))
        return solver.check() == z3.unsat
    finally:
        solver.pop()


def _computes(term: Term) -> bool:
    """Whether the outermost row acts on each element."""
    known = {*_BINARY, *_UNARY, *_OPAQUE, "div", "reciprocal"}
    return isinstance(term, Apply) and term.op in known


def _number(term: Term, exists: list[Formula]) -> Number:
    """The value of a term at one place; `exists` collects what is divided by."""
    if isinstance(term, Variable):
        return z3.Real(term.name)
    if not _computes(term):
        return z3.Real(f"term {term}")
    values = [_number(operand, exists) for operand in term.operands]
    if term.op in _BINARY:
        return _BINARY[term.op](*values)
    if term.op in _UNARY:
        return _UNARY[term.op](*values)
    if term.op in ("div", "reciprocal"):
        exists.append(values[-1] != 0)
        return (values[0] if term.op == "div" else z3.RealVal(1)) / values[-1]
    title = ", ".join([term.op, *(f"{key}={value}" for key, value in term.attrs)])
    return z3.Function(title, z3.RealSort(), z3.RealSort())(*values)
