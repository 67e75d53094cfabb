"""The canonical form of a rule, serial or placement, whichever way round and with whatever names it was found.

Operands of commutative operators stand in order of structure, the larger side on the left; variables, sizes and axes
are named in order of appearance. Rules with several roots keep their direction and the order of their roots.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product

from shardwright.pcg.errors import RuleError
from shardwright.pcg.optable import ROWS
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.generator.symbolicdims import extent
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.attributes import CONSTANTS
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.substitutions.terms import Apply, Dims, Term, Variable, applied, subterms

ROOTS = "roots"
"""The operator that holds several roots together where a side has to be one term."""
_VARIABLES = ("x", "y", "z", "w", "v", "u", "t", "s", "r", "q")
_SPLICES = ("b", "a", "c", "e")
_SIZES = ("i", "o", "k", "n", "m", "h", "d", "j", "l", "p", "q", "r", "s", "t", "u", "v", "w", "y", "z")
_AXES = ("a", "b", "c")
TermPair = tuple[Term, Term]


def commutes(op: str) -> bool:
    """Return whether an operator's operands can be exchanged; parallel operators and `roots` never commute."""
    return op in ROWS and ROWS[op].commutative


def canonical(rule: Equation) -> Equation:
    """Return the rule in canonical form, nameless. Raises `RuleError` if no side binds the other."""
    best: tuple[tuple[int, int], str, Equation] | None = None
    for sides in _forms((joined(rule.left), joined(rule.right))):
        for left, right in (sides, sides[::-1]) if len(rule.left) == 1 else (sides,):
            size = (-_num_ops(left), _num_ops(right))
            if isinstance(left, Variable) or (best is not None and size > best[0]):
                continue
            try:
                named = _named(rule, left, right)
            except RuleError:
                continue
            if best is None or (size, named.equation) < best[:2]:
                best = (size, named.equation, named)
    if best is None:
        raise RuleError(f"rule {rule.name!r}: neither side binds the sizes of the other")
    return best[2]


def named(rule: Equation) -> Equation:
    """Return a canonical rule under its name: of the same hand-named rule, or made of its operators and a hash."""
    known = _hand_named().get(rule.claim)
    if known is not None and set(known.guard) == set(rule.guard):
        return known
    ops = [list(dict.fromkeys(t.op for t in _preorder(root) if isinstance(t, Apply))) for root in rule.left]
    digest = hashlib.sha256(rule.claim.encode()).hexdigest()[:6]
    return replace(rule, name=f"{'_and_'.join('_of_'.join(each[:3]) for each in ops)}_{digest}")


@lru_cache(maxsize=1)
def _hand_named() -> Mapping[str, Equation]:
    """Return the hand-named rules by their canonical text; of a rule and its converse, the first counts."""
    by_claim: dict[str, Equation] = {}
    for rule in CATALOGUE.values():
        if not rule.parameters:
            by_claim.setdefault(canonical(replace(rule, guard=())).claim, rule)
    return by_claim


def joined(roots: tuple[Term, ...]) -> Term:
    """Return several roots as one term, whose operator the op table does not have."""
    return roots[0] if len(roots) == 1 else Apply(ROOTS, roots, ())


def _roots(term: Term) -> tuple[Term, ...]:
    return term.operands if isinstance(term, Apply) and term.op == ROOTS else (term,)


def _preorder(term: Term) -> Iterator[Term]:
    yield term
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from _preorder(operand)


# ---- the order of commutative operands ----


@lru_cache(maxsize=200_000)
def _structure(term: Term) -> tuple[object, ...]:
    """Return a sort key: the number of distinct operators, then the shape of the term without names of variables."""
    if isinstance(term, Variable):
        return (0, "", ())
    return (_num_ops(term), term.op, tuple(_structure(operand) for operand in term.operands))


def _num_ops(term: Term) -> int:
    return len(set(applied([term])))


def _forms(sides: TermPair) -> Iterator[TermPair]:
    """Yield both sides with commutative operands sorted, in every order where the structure does not decide.

    Equal terms stay equal. The rule that says that an operator commutes is left as it is.
    """
    left, right = ([order for order in _orders(side) if _num_ops(order) <= _num_ops(side)] for side in sides)
    forms = [(a, b) for a, b in product(left, right) if a != b]
    yield from forms if forms and left[0] != right[0] else [sides]


@lru_cache(maxsize=200_000)
def _orders(term: Term) -> tuple[Term, ...]:
    if isinstance(term, Variable):
        return (term,)
    orders: list[Term] = []
    for operands in product(*map(_orders, term.operands)):
        orders += [Apply(term.op, order, term.attrs) for order in _sorted(term.op, operands)]
    return tuple(dict.fromkeys(orders))


def _sorted(op: str, operands: tuple[Term, ...]) -> list[tuple[Term, ...]]:
    if not commutes(op) or operands[0] == operands[1]:
        return [operands]
    first, second = map(_structure, operands)
    if first == second:
        return [operands, operands[::-1]]
    return [operands if first > second else operands[::-1]]


# ---- names ----


def _named(rule: Equation, left: Term, right: Term) -> Equation:
    leaves = [t.name for side in (left, right) for t in subterms(side) if isinstance(t, Variable)]
    variables = dict(zip(dict.fromkeys(leaves), _VARIABLES, strict=False))
    if len(variables) < len(set(leaves)):
        raise RuleError(f"rule {rule.name!r}: more variables than names for them")
    sizes, axes = _sizes(rule, list(variables), (left, right)), _axes(rule, (left, right))
    dims = tuple((new, _dims(rule.dims[old], sizes)) for old, new in variables.items())
    items = (*sorted(sizes.items()), *axes.items())
    sides = [_renamed(side, tuple(variables.items()), items) for side in (left, right)]
    guard = tuple(sorted((renamed(g, items) for g in rule.guard), key=str))
    layouts = tuple((new, _layouts(rule, old, axes, sizes)) for old, new in variables.items()) if axes else ()
    first, second = map(_roots, sides)
    return Equation("rule", dims, first, second, guard, rule.moves, tuple(axes.values()), layouts)


def _axes(rule: Equation, sides: TermPair) -> dict[str, str]:
    """Return new names of axes, in the order in which parallel operators move along them."""
    moved = [str(value) for t in applied(sides) for key, value in t.attrs if key == "axis"]
    return dict(zip(dict.fromkeys([*moved, *rule.axes]), _AXES, strict=False))


def _layouts(rule: Equation, variable: str, axes: Mapping[str, str], sizes: Mapping[str, str]) -> tuple[Placement, ...]:
    """Return the layouts of a variable, in the new order of the axes."""
    layouts = dict(zip(rule.axes, dict(rule.layouts)[variable], strict=True))
    blocks = {axis: tuple(sorted(sizes.get(name, name) for name in layouts[axis].blocks)) for axis in axes}
    return tuple(Placement(layouts[axis].kind, layouts[axis].dim, blocks[axis]) for axis in axes)


def _sizes(rule: Equation, variables: list[str], sides: TermPair) -> dict[str, str]:
    """Return new names of sizes, in order of appearance in the dims of the variables, then in attributes."""
    names = [name for v in variables for name in rule.dims[v].names]
    for term in applied(sides):
        names += [name for key, value in term.attrs if key != "axis" for name in sorted(value.names)]
    splices = [n[1:] for n in dict.fromkeys(names) if n.startswith("*")]
    plain = [n for n in dict.fromkeys(names) if not n.startswith("*") and n not in splices and n not in CONSTANTS]
    if len(splices) > len(_SPLICES) or len(plain) > len(_SIZES):
        raise RuleError(f"rule {rule.name!r}: more sizes than names for them")
    return {old: new for names, given in ((splices, _SPLICES), (plain, _SIZES)) for old, new in zip(names, given)}  # noqa: B905


def _dims(dims: Dims, sizes: Mapping[str, str]) -> Dims:
    def new(name: str) -> str:
        return "*" + sizes[name[1:]] if name.startswith("*") else sizes[name]

    return Dims(tuple(tuple(map(new, entry)) for entry in dims.entries))


@lru_cache(maxsize=200_000)
def _renamed(term: Term, variables: tuple[tuple[str, str], ...], sizes: tuple[tuple[str, str], ...]) -> Term:
    if isinstance(term, Variable):
        return Variable(dict(variables)[term.name])
    attrs = tuple((key, renamed(value, sizes)) for key, value in term.attrs)
    return Apply(term.op, tuple(_renamed(operand, variables, sizes) for operand in term.operands), attrs)


@lru_cache(maxsize=100_000)
def renamed(value: Expression, sizes: tuple[tuple[str, str], ...]) -> Expression:
    """Return an expression with sizes renamed, its sums of products in canonical order."""
    return Expression(ast.unparse(_ordered(_Renaming(dict(sizes)).visit(ast.parse(value.text, mode="eval").body))))


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id))


def _ordered(tree: ast.expr) -> ast.expr:
    """Return the expression with each of its sums of products in canonical order."""
    plain = (ast.Name, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.expr_context)
    match tree:
        case ast.Tuple(elts=items):
            return ast.Tuple([_ordered(item) for item in items])
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return ast.Compare(_ordered(left), ops, [_ordered(part) for part in rest])
        case ast.BinOp(left=left, op=ast.Mod() as op, right=right):
            return ast.BinOp(_ordered(left), op, right)
        case ast.BinOp() if all(isinstance(node, plain) for node in ast.walk(tree)):
            return ast.parse(extent(ast.unparse(tree)), mode="eval").body
        case _:
            return tree
