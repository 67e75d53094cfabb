"""Terms: the two sides of an algebraic rule, as data.

    slice(linear(x, w), dim=len(b), start=s, stop=t, step=1)

A term is a variable, or an op-table row or a parallel operator applied to terms, with attributes that are expressions
over sizes. A variable has dims, written like a factor string's side: `*b i` is any number of leading dimensions, called
b, and a last one, i. Parallel operators name their mesh axis, and `partition` what it cuts:

    reduce(linear(partition(x, axis=a, dim=1), partition(w, axis=a, dim=1)), axis=a)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.expressions import Expression, expression


@dataclass(frozen=True, slots=True)
class Variable:
    """A pattern variable: stands for any tensor of its dims."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Apply:
    """A row of the op table, or a parallel operator, applied to terms."""

    op: str
    operands: tuple[Term, ...]
    attrs: tuple[tuple[str, Expression], ...] = ()

    def __str__(self) -> str:
        attrs = (f"{key}={value}" for key, value in self.attrs)
        return f"{self.op}({', '.join([*map(str, self.operands), *attrs])})"


Term = Variable | Apply


def erase(term: Term) -> Term:
    """The serial term that is left when the parallel operators, which denote the identity, are dropped."""
    if isinstance(term, Variable):
        return term
    if term.op in PARALLEL_OPS:
        return erase(term.operands[0])
    return Apply(term.op, tuple(map(erase, term.operands)), term.attrs)


def subterms(term: Term) -> Iterator[Term]:
    """The term and everything inside it, operands first."""
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from subterms(operand)
    yield term


def parse_term(text: str) -> Term:
    """Read a term; a `RuleError` says what is wrong with it."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise RuleError(f"term {text!r} cannot be read: {error}") from None
    return _term(tree, text)


def _term(tree: ast.expr, text: str) -> Term:
    match tree:
        case ast.Name(id=name):
            return Variable(name)
        case ast.Call(func=ast.Name(id=op), args=args, keywords=keywords):
            if op not in ROWS and op not in PARALLEL_OPS:
                raise RuleError(f"term {text!r}: operator {op!r} has no row in the op table")
            named = [(k.arg, k.value) for k in keywords]
            if any(key is None for key, _ in named):
                raise RuleError(f"term {text!r}: attributes are given by name, not with **")
            attrs = sorted((str(key), expression(ast.unparse(value))) for key, value in named)
            return Apply(op, tuple(_term(arg, text) for arg in args), tuple(attrs))
        case _:
            raise RuleError(
                f"term {text!r}: {ast.unparse(tree)} is neither a variable nor an operator applied to terms"
            )


@dataclass(frozen=True, slots=True)
class Dims:
    """The dims of a variable: names of sizes, of which one may be a splice `*b`."""

    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Read dims; a `RuleError` for anything but names with at most one splice."""
        names = tuple(text.split())
        if any(not name.removeprefix("*").isidentifier() for name in names):
            raise RuleError(f"dims {text!r}: expected names such as 'm i' or '*b i'")
        if sum(name.startswith("*") for name in names) > 1 or len(set(names)) < len(names):
            raise RuleError(f"dims {text!r}: at most one splice, and every name once")
        return cls(names)

    def bind(self, shape: tuple[int, ...]) -> dict[str, int | tuple[int, ...]] | None:
        """The sizes that `shape` gives these names; None where it does not fit or is empty."""
        if 0 in shape:
            return None
        splice = next((i for i, name in enumerate(self.names) if name.startswith("*")), None)
        if splice is None:
            return dict(zip(self.names, shape, strict=True)) if len(shape) == len(self.names) else None
        tail = len(self.names) - splice - 1
        if len(shape) < splice + tail:
            return None
        env: dict[str, int | tuple[int, ...]] = dict(zip(self.names[:splice], shape[:splice], strict=True))
        env[self.names[splice][1:]] = shape[splice : len(shape) - tail]
        return env | dict(zip(self.names[splice + 1 :], shape[len(shape) - tail :], strict=True))

    def __str__(self) -> str:
        return " ".join(self.names)
