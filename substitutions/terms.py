"""Terms: the two sides of an algebraic rule, as data.

    slice(linear(x, w), dim=len(b), start=s, stop=t, step=1)

A term is a variable, or an op-table row or a parallel operator applied to terms, with attributes that are expressions
over sizes. A variable has dims, written like a factor string's side: `*b i` is any number of leading dimensions, called
b, and a last one, i; `(h d)` is one dimension of size h·d, and `1` one of size 1. Parallel operators name their mesh
axis, and `partition` what it cuts:

    reduce(linear(partition(x, axis=a, dim=1), partition(w, axis=a, dim=1)), axis=a)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.pcg.factors import Shape
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS
from shardwright.substitutions.expressions import Expression, expression


@dataclass(frozen=True, slots=True)
class Variable:
    """A pattern variable, which stands for any tensor of its dims."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Apply:
    """A row of the op table, or a parallel operator, applied to terms."""

    op: str
    operands: tuple[Term, ...]
    attrs: tuple[tuple[str, Expression], ...] = ()

    @property
    def indexes(self) -> Mapping[int, tuple[int, int]]:
        """`Row.indexes`: variables at these operands hold integers below the size of the dimension they point into.

        Logits without a batch have their classes in dimension 0.
        """
        return ROWS[self.op].indexes if self.op in ROWS else {}

    @cached_property
    def inside(self) -> tuple[Term, ...]:
        """The term's subterms and itself, operands first."""
        return (*chain.from_iterable(map(subterms, self.operands)), self)

    def shape(self, operands: Sequence[Shape], sizes: Mapping[str, Any]) -> Shape:
        """Return the shape of a row's result at these sizes. Raises `GraphError` where the operands do not fit."""
        attrs = {key: value.evaluate(sizes) for key, value in self.attrs}
        return ROWS[self.op].signature(operands, attrs).result_shape

    def __str__(self) -> str:
        attrs = (f"{key}={value}" for key, value in self.attrs)
        return f"{self.op}({', '.join([*map(str, self.operands), *attrs])})"


Term = Variable | Apply


def free_attributes(applied: Iterable[Apply]) -> Iterator[tuple[str, Any]]:
    """Yield the names that stand for attributes on which no shape depends, each with a value."""
    for term in applied:
        free = ROWS[term.op].free if term.op in ROWS else {}
        yield from ((name, free[key]) for key, value in term.attrs if key in free for name in sorted(value.names))


def erase(term: Term) -> Term:
    """Return the serial term that is left when the parallel operators, which denote the identity, are dropped."""
    if isinstance(term, Variable):
        return term
    if term.op in PARALLEL_OPS:
        return erase(term.operands[0])
    return Apply(term.op, tuple(map(erase, term.operands)), term.attrs)


def subterms(term: Term) -> tuple[Term, ...]:
    """Return the term and everything inside it, operands first."""
    return term.inside if isinstance(term, Apply) else (term,)


def applied(roots: Iterable[Term]) -> Iterator[Apply]:
    """Return every operator in these terms, operands first, as often as it is used."""
    return (term for root in roots for term in subterms(root) if isinstance(term, Apply))


def variables_in(roots: Iterable[Term]) -> set[str]:
    """Return the variables that occur in these terms."""
    return {term.name for root in roots for term in subterms(root) if isinstance(term, Variable)}


def parse_term(text: str) -> Term:
    """Read a term. Raises a `RuleError` that says what is wrong with it."""
    try:
        tree = ast.parse(text, mode="eval").body
        return _term(tree, text)
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else error
        raise RuleError(f"term {text!r} cannot be read: {why}") from None
    except (RecursionError, MemoryError):
        raise RuleError(f"term {text[:60]!r}... cannot be read: it is nested too deeply") from None


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


_DIM = re.compile(r"\([^()]*\)|[^\s()]+|[()]")
BoundSizes = dict[str, int | tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Dims:
    """The dims of a variable, one entry each: names of sizes whose product is the dimension.

    m        ("m",)        one size
    (h d)    ("h", "d")    a product, major first
    1        ()            the literal 1: what NumPy broadcasts
    *b       ("*b",)       any number of dimensions; at most one entry is such a splice
    """

    entries: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Read dims. Raises `RuleError` for anything but names, products and 1 with at most one splice."""
        entries = tuple(_entry(token, text) for token in _DIM.findall(text))
        names = [name.removeprefix("*") for entry in entries for name in entry]
        if sum(name.startswith("*") for entry in entries for name in entry) > 1 or len(set(names)) < len(names):
            raise RuleError(f"dims {text!r}: at most one splice, and every name once")
        return cls(entries)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, in order; a splice with its star."""
        return tuple(name for entry in self.entries for name in entry)

    @property
    def splice(self) -> int | None:
        """The index of the entry that is a splice, or None."""
        return next((i for i, entry in enumerate(self.entries) if is_splice(entry)), None)

    @lru_cache(maxsize=1 << 16)  # noqa: B019  values, which live as long as the rules
    def split(self, shape: tuple[int, ...]) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] | None:
        """Return each entry with the extents that it stands for; None where the rank does not fit or an extent is 0."""
        at = len(self.entries) if self.splice is None else self.splice
        tail = max(len(self.entries) - at - 1, 0)
        spare = len(shape) - (len(self.entries) - (self.splice is not None))
        if 0 in shape or spare < 0 or (spare > 0 and self.splice is None):
            return None
        lead, middle, last = shape[:at], shape[at : len(shape) - tail], shape[len(shape) - tail :]
        parts = [(n,) for n in lead] + ([middle] if self.splice is not None else []) + [(n,) for n in last]
        return tuple(zip(self.entries, parts, strict=True))

    def bind(self, shape: tuple[int, ...]) -> BoundSizes | None:
        """Return the sizes that `shape` gives to names that stand alone; None where it does not fit or is empty.

        A product leaves its factors open: other variables or attributes bind them (`factored` then checks).
        """
        if (parts := self.split(shape)) is None or any(not e and extents != (1,) for e, extents in parts):
            return None
        sizes: BoundSizes = {e[0]: extents[0] for e, extents in parts if len(e) == 1 and not is_splice(e)}
        return sizes | {e[0][1:]: extents for e, extents in parts if is_splice(e)}

    def factored(self, shape: tuple[int, ...], sizes: Mapping[str, Any]) -> BoundSizes | None:
        """Return the sizes that products of `shape` add to `sizes`: the one factor of a product that is not known yet.

        None where a dimension is not the product of its factors; a product with two unknown factors adds nothing.
        """
        solved: dict[str, Any] = {}
        for entry, extents in self.split(shape) or ():
            if len(entry) < 2:
                continue
            known = {**sizes, **solved}
            unknown = [name for name in entry if name not in known]
            rest = prod(known[name] for name in entry if name in known)
            if len(unknown) > 1:
                continue
            if rest < 1 or extents[0] % rest or (not unknown and extents[0] != rest):
                return None
            solved |= dict.fromkeys(unknown, extents[0] // rest)
        return solved

    def shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape at these sizes. Raises `RuleError` for a name that has none."""
        missing = [name for name in self.names if name.removeprefix("*") not in sizes]
        if missing:
            raise RuleError(f"dims {str(self)!r}: no size for {missing[0]!r}")
        parts = (tuple(sizes[e[0][1:]]) if is_splice(e) else (prod(sizes[n] for n in e),) for e in self.entries)
        return tuple(extent for part in parts for extent in part)

    def __str__(self) -> str:
        return " ".join("1" if not e else e[0] if len(e) == 1 else f"({' '.join(e)})" for e in self.entries)


def is_splice(entry: tuple[str, ...]) -> bool:
    """Return whether an entry of dims stands for any number of dimensions."""
    return len(entry) == 1 and entry[0].startswith("*")


def _entry(token: str, text: str) -> tuple[str, ...]:
    """Return the names of one dimension."""
    if token == "1":
        return ()
    names = tuple(token[1:-1].split()) if token.startswith("(") and token != "(" else (token,)
    if token.startswith("(") and (len(names) < 2 or not all(name.isidentifier() for name in names)):
        raise RuleError(f"dims {text!r}: a product has two or more names, as in '(h d)'; got {token!r}")
    if any(not name.removeprefix("*").isidentifier() for name in names):
        raise RuleError(f"dims {text!r}: expected names such as 'm i', '*b i', '(h d)' or the literal 1")
    return names
