"""Symbolic dimensions: sums of products of size names, as canonical text, so that equal dimensions are equal strings.

o + p        after a concatenation          n - s       what a slice leaves
d*h          after a merge of h and d       *b          any number of dimensions (a splice)
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from math import prod

Monomials = tuple[tuple[tuple[str, ...], int], ...]


@lru_cache(maxsize=65536)
def monomials(text: str) -> Monomials:
    """Return the sum that a text of names, integers, +, - and * stands for."""
    return _monomials(ast.parse(text, mode="eval").body)


def _monomials(tree: ast.expr) -> Monomials:
    match tree:
        case ast.Constant(value=int(value)):
            return _sum({(): value})
        case ast.Name(id=name):
            return (((name,), 1),)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = _monomials(left), _monomials(right)
            if isinstance(op, ast.Mult):
                return _product(a, b)
            sign = -1 if isinstance(op, ast.Sub) else 1
            return _added(a, tuple((names, sign * count) for names, count in b))
        case _:
            raise ValueError(f"{ast.unparse(tree)} is not a sum of products")


def _sum(terms: Mapping[tuple[str, ...], int]) -> Monomials:
    return tuple(sorted((names, count) for names, count in terms.items() if count))


def _added(a: Monomials, b: Monomials) -> Monomials:
    terms = dict(a)
    for names, count in b:
        terms[names] = terms.get(names, 0) + count
    return _sum(terms)


def _product(a: Monomials, b: Monomials) -> Monomials:
    total: Monomials = ()
    for names, count in a:
        total = _added(total, tuple((tuple(sorted(names + more)), count * times) for more, times in b))
    return total


def _text(terms: Monomials) -> str:
    written = ""
    for names, count in sorted(terms, key=lambda term: (term[1] < 0, term[0])):
        factors = [*([str(abs(count))] if abs(count) != 1 or not names else []), *names]
        sign = (" - " if written else "-") if count < 0 else " + " if written else ""
        written += sign + "*".join(factors)
    return written or "0"


@lru_cache(maxsize=65536)
def extent(text: str) -> str:
    """Return the canonical text."""
    return text if text.startswith("*") else _text(monomials(text))


@lru_cache(maxsize=65536)
def plus(a: str, b: str) -> str:
    """Return a + b."""
    return _text(_added(monomials(a), monomials(b)))


@lru_cache(maxsize=65536)
def minus(a: str, b: str) -> str:
    """Return a - b."""
    return _text(_added(monomials(a), tuple((names, -count) for names, count in monomials(b))))


@lru_cache(maxsize=65536)
def times(a: str, b: str) -> str:
    """Return a · b."""
    return _text(_product(monomials(a), monomials(b)))


def size(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the dimension's size; not for splices."""
    return sum(count * prod(sizes[name] for name in names) for names, count in monomials(dim))
