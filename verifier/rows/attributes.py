"""The proof of local operators' attributes: the row's own `localize` is run on symbolic sizes.

If a row's attributes depend on sizes, the dependence is defined here once for the global operator, as a function of the
factors' sizes. The same function of the local sizes gives the attributes that the local operator must have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from shardwright.pcg.attrs import Attrs
from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS
from shardwright.pcg.row import LocalShapes, keep_attrs, local_result_shape
from shardwright.pcg.rows.contractions import local_groups
from shardwright.pcg.rows.indexing import local_places
from shardwright.pcg.rows.structural import local_slice
from shardwright.substitutions.rules.pattern import Pattern
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.rows.claims import Claim, Encoding


class Path:
    """The branches that one symbolic run takes: first the given decisions, then always True."""

    def __init__(self, decisions: tuple[bool, ...] = ()) -> None:
        self.decisions = list(decisions)
        self.conditions: list[Formula] = []

    def decide(self, condition: Formula) -> bool:
        simple = z3.simplify(condition, som=True)
        if z3.is_true(simple) or z3.is_false(simple):
            return z3.is_true(simple)
        if len(self.conditions) == len(self.decisions):
            self.decisions.append(True)
        taken = self.decisions[len(self.conditions)]
        self.conditions.append(condition if taken else z3.Not(condition))
        return taken

    def others(self, num_given: int) -> Iterator[tuple[bool, ...]]:
        """Yield the paths that leave this one after the given decisions."""
        for at in range(num_given, len(self.decisions)):
            yield (*self.decisions[:at], False)


class Sym(int):
    """A symbolic integer for code that is written for `int`. A quotient remembers its divisor."""

    expr: Number
    divisor: Number | None
    path: Path

    def __new__(cls, expr: Number, path: Path, divisor: Number | None = None) -> Sym:
        made = super().__new__(cls, 1)
        made.expr, made.path, made.divisor = expr, path, divisor
        return made

    def __mul__(self, other: int) -> Sym:
        return Sym(self._plain() * _expr(other), self.path)

    def __add__(self, other: int) -> Sym:
        return Sym(self._plain() + _expr(other), self.path)

    def __sub__(self, other: int) -> Sym:
        return Sym(self._plain() - _expr(other), self.path)

    def __floordiv__(self, other: int) -> Sym:
        return Sym(self._plain(), self.path, _expr(other))

    __rmul__, __radd__ = __mul__, __add__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and self.path.decide(self._plain() == _expr(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return self.path.decide(self._plain() < _expr(other))

    def __le__(self, other: int) -> bool:
        return self.path.decide(self._plain() <= _expr(other))

    def __gt__(self, other: int) -> bool:
        return self.path.decide(self._plain() > _expr(other))

    def __ge__(self, other: int) -> bool:
        return self.path.decide(self._plain() >= _expr(other))

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = int.__hash__

    def _plain(self) -> Number:
        if self.divisor is not None:
            raise RuleError(
                "a row's `localize` computes with a quotient; the verifier proves quotients only as results"
            )
        return self.expr


def _expr(value: int) -> Number:
    return value._plain() if isinstance(value, Sym) else z3.IntVal(value)


FactorSizes = Mapping[str, Number]


def _extents(dims: tuple[tuple[str, ...], ...], sizes: FactorSizes, path: Path) -> tuple[Sym, ...]:
    return tuple(Sym(z3.Product([z3.IntVal(1), *(sizes[name] for name in dim)]), path) for dim in dims)


def _result_shape(pattern: Pattern, sizes: FactorSizes, path: Path) -> dict[str, Any]:
    return {"shape": _extents(pattern.result, sizes, path)}


def _groups(pattern: Pattern, sizes: FactorSizes, path: Path) -> dict[str, Any]:
    """Return the number of groups: the size of the leading factors that the channels of input and result share."""
    pairs = zip(pattern.operands[0][1], pattern.operands[1][0], strict=False)
    common = tuple(before for before, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {"groups": _extents((common,), sizes, path)[0]}


def _slice(pattern: Pattern, sizes: FactorSizes, path: Path) -> dict[str, Any]:
    """Return the attributes of block q of equal blocks `(q! o) -> o`, or of any fixed slice `x! -> y!`."""
    pairs = zip(pattern.operands[0], pattern.result, strict=True)
    dim = next((d for d, (before, after) in enumerate(pairs) if before != after), 0)
    if pattern.operands[0][dim][1:] == pattern.result[dim]:
        block, (inside,) = z3.Int("q"), _extents((pattern.result[dim],), sizes, path)
        return {"dim": dim, "start": Sym(block * inside.expr, path), "stop": Sym((block + 1) * inside.expr, path)}
    return {"dim": dim, "start": Sym(z3.Int("start"), path), "stop": Sym(z3.Int("stop"), path)}


def _places(pattern: Pattern, sizes: FactorSizes, path: Path) -> dict[str, Any]:
    """Return the dimension in which the result differs from the rows, and how many places it has."""
    pairs = zip(pattern.result, pattern.operands[-1], strict=True)
    dim = next(d for d, (mine, other) in enumerate(pairs) if mine != other)
    return {"dim": dim, "places": _extents((pattern.result[dim],), sizes, path)[0]}


Localize = Callable[[Attrs, LocalShapes], Attrs]
BY_SIZE: Mapping[Localize, Callable[[Pattern, FactorSizes, Path], dict[str, Any]]] = {
    local_result_shape: _result_shape,
    local_groups: _groups,
    local_slice: _slice,
    local_places: _places,
}
"""The attributes that follow from sizes, by `Row.localize`."""


def attribute_claims(row_name: str, encoding: Encoding, localized: bool) -> Iterator[Claim]:
    """Yield the claims that the local operator's attributes are those of its own sizes, on every path of `localize`."""
    row = ROWS[row_name]
    if row.localize is keep_attrs:
        return
    if row.localize not in BY_SIZE:
        raise RuleError(
            f"{row_name} localizes its attributes; say how they follow from sizes in verifier/rows/attributes.py"
        )
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        decisions = pending.pop()
        path = Path(decisions)
        claims = list(_one_path(row_name, encoding, localized, path))
        pending += path.others(len(decisions))
        yield from ((title, z3.Implies(z3.And(path.conditions), claim)) for title, claim in claims)


def _one_path(row_name: str, encoding: Encoding, localized: bool, path: Path) -> Iterator[Claim]:
    pattern, follow = encoding.pattern, BY_SIZE[ROWS[row_name].localize]
    attrs, wanted = (follow(pattern, sizes, path) for sizes in (encoding.whole, encoding.part))
    whole, part = ([_extents(d, n, path) for d in pattern.tensors] for n in (encoding.whole, encoding.part))
    shapes = LocalShapes(tuple(whole[:-1]), whole[-1], tuple(part[:-1]), part[-1])
    given: dict[str, Any] = dict(ROWS[row_name].localize(attrs, shapes)) if localized else attrs
    for key, want in wanted.items():
        pairs = zip(given[key], want, strict=True) if isinstance(want, tuple) else [(given[key], want)]
        for got, expected in pairs:
            if isinstance(expected, Sym):
                yield from _equal(f"attribute {key}", got, expected.expr)


def _equal(title: str, got: Sym, expected: Number) -> Iterator[Claim]:
    """Yield the claims of an equality; exact division is proven through the product (lemma `exact`)."""
    if got.divisor is None:
        yield title, got.expr == expected
        return
    yield f"{title} divides by a positive number", got.divisor >= 1
    yield title, got.expr == got.divisor * expected
