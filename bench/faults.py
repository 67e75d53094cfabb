"""Small faults of the kind that slips into code: a file's every mutant, one changed expression or statement each.

Comparisons and their edges, constants off by one, `and` for `or`, conditions turned round, guards and statements
left out, swapped arguments, keys that lack an element, `max` for `min`, + for −, one layout for another.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "argmin": "argmax", "R": "C", "C": "R", "P": "R"}
LETTERS = {"R": "C", "C": "R", "S": "P", "P": "S"}
SYMMETRIC = ("min", "max")
EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
OUTSIDE = ("annotation", "returns", "decorator_list")
"""Fields that do nothing when the code runs."""


class Edit(NamedTuple):
    """Put `new` into a field of the node that `ast.walk` meets as number `parent`; None: leave it out."""

    parent: int
    field: str
    position: int | None
    new: ast.AST | None


@dataclass(frozen=True)
class Mutant:
    """A module with one fault: where, the statement before and after."""

    module: str
    line: int
    within: str
    before: str
    after: str
    edit: Edit

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the mutant's identity, which holds whatever else is changed in its file."""
        return self.module, self.within, self.before, self.after


def mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    found: dict[tuple[str, str, str, str], Mutant] = {}
    for statement, within, parent, field, position in _statements(tree):
        edits = [(None, e) for e in _left_out(statement, numbers[id(parent)], field, position)]
        edits += [(e, e) for e in _changed(statement, numbers)]
        before = shown(statement)
        for inside, edit in edits:
            after = "pass" if inside is None else shown(_statement_after(tree, edit, numbers[id(statement)]))
            mutant = Mutant(module, statement.lineno, within, before, after, edit)
            found.setdefault(mutant.key, mutant)
    return [m for m in found.values() if m.before != m.after]


def mutated(source: str, edit: Edit) -> ast.Module:
    """The module with the fault."""
    return _edited(ast.parse(source), edit)


def shown(statement: ast.stmt) -> str:
    """A simple statement, or the head of one that holds others; a guard with its one line."""
    if isinstance(statement, ast.If) and len(statement.body) == 1 and isinstance(statement.body[0], EXITS):
        return ast.unparse(ast.If(statement.test, statement.body, [])).replace("\n   ", "")
    bare = copy.copy(statement)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if getattr(bare, name, None):
            setattr(bare, name, [])
    return "\n".join(line for line in ast.unparse(bare).splitlines() if not line.startswith("@"))


def _statement_after(tree: ast.Module, edit: Edit, number: int) -> ast.stmt:
    return list(ast.walk(_edited(copy.deepcopy(tree), edit, replace_only=True)))[number]  # type: ignore[return-value]


def _edited(tree: ast.Module, edit: Edit, replace_only: bool = False) -> ast.Module:
    parent = next(node for number, node in enumerate(ast.walk(tree)) if number == edit.parent)
    if edit.position is None:
        setattr(parent, edit.field, edit.new)
    elif edit.new is None:
        del getattr(parent, edit.field)[edit.position]
        if isinstance(parent, ast.Dict):
            del parent.values[edit.position]
    else:
        getattr(parent, edit.field)[edit.position] = edit.new
    return ast.fix_missing_locations(tree)


# ---- statements ----

Place = tuple[ast.stmt, str, ast.AST, str, int]


def _statements(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[Place]:
    """Every statement, the function it stands in, and where."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for position, child in enumerate(getattr(tree, name, None) or ()):
            if isinstance(child, ast.stmt):
                yield child, ".".join(within), tree, name, position
            inner = (child.name,) if isinstance(child, ast.FunctionDef | ast.ClassDef) else ()
            yield from _statements(child, (*within, *inner))


def _left_out(statement: ast.stmt, parent: int, field: str, position: int) -> Iterator[Edit]:
    """The edit that leaves out a statement whose absence is no error by itself."""
    match statement:
        case ast.If(body=[*_, last], orelse=[]) if isinstance(last, EXITS):
            pass
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            pass
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            pass
        case _:
            return
    yield Edit(parent, field, position, ast.Pass())


def _changed(statement: ast.stmt, numbers: dict[int, int]) -> Iterator[Edit]:
    """Every edit of an expression of the statement itself, not of the statements that it holds."""
    if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom) or _is_text(statement) or _is_type(statement):
        return
    pending: list[tuple[ast.AST, bool]] = [(statement, False)]
    while pending:
        node, in_key = pending.pop(0)
        in_key = in_key or _holds_key(node)
        yield from _in_place(node, numbers[id(node)], in_key)
        for field, value in ast.iter_fields(node):
            if field in OUTSIDE or (isinstance(node, ast.keyword) and node.arg == "strict"):
                continue
            many = isinstance(value, list)
            for position, child in enumerate(value if many else [value]):
                if not isinstance(child, ast.AST) or isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                    continue
                for new in _alternatives(child):
                    yield Edit(numbers[id(node)], field, position if many else None, new)
                pending.append((child, in_key and field != "func"))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_type(statement: ast.stmt) -> bool:
    """True if a statement gives a type a name: `Kind = Literal[...]`."""
    return isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith(("Literal[", "tuple["))


def _holds_key(node: ast.AST) -> bool:
    """True if a tuple below is a key, by which things are distinguished or sorted."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.keyword(arg=str(name)):
            return name == "key"
        case ast.Call(func=ast.Attribute(attr="get" | "setdefault"), args=[ast.Tuple(), *_]):
            return True
        case _:
            return False


# ---- expressions ----


def _in_place(node: ast.AST, number: int, in_key: bool) -> Iterator[Edit]:
    """Edits that leave out or swap parts of a node."""
    match node:
        case ast.Tuple(elts=elements, ctx=ast.Load()) if in_key and len(elements) > 1:  # a text there is a mere label
            yield from (
                Edit(number, "elts", i, None) for i, e in enumerate(elements) if not isinstance(e, ast.Constant)
            )
        case ast.comprehension(ifs=conditions):
            yield from (Edit(number, "ifs", i, None) for i in range(len(conditions)))
        case ast.Dict(keys=keys) if len(keys) > 1:
            yield from (Edit(number, "keys", i, None) for i in range(len(keys)))
        case _:
            pass


def _alternatives(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that may stand in the place of this one by mistake."""
    match node:
        case ast.Compare(left, [op, *rest], comparators) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)](), *rest], comparators)
            if rest and type(rest[0]) in COMPARISONS:
                yield ast.Compare(left, [op, COMPARISONS[type(rest[0])](), *rest[1:]], comparators)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield from (_one_or_all(op, [*values[:i], *values[i + 1 :]]) for i in range(len(values)))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(value=value):
            yield from (ast.Constant(other) for other in _constants(value))
        case ast.Name(name, ast.Load()) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(value, name, ast.Load()) if name in NAMES:
            yield ast.Attribute(value, NAMES[name], ast.Load())
        case ast.Call(func, arguments, keywords) if ast.unparse(func) not in SYMMETRIC:
            yield from (ast.Call(func, swapped, keywords) for swapped in _swaps(arguments))
        case ast.Tuple(elements, ast.Load()) if all(isinstance(e, ast.Constant) for e in elements):
            yield from (ast.Tuple(swapped, ast.Load()) for swapped in _swaps(elements))
        case _:
            pass


def _one_or_all(op: ast.boolop, values: list[ast.expr]) -> ast.expr:
    return values[0] if len(values) == 1 else ast.BoolOp(op, values)


def _constants(value: object) -> Sequence[float | str]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [2 * value or 1.0]
    return [LETTERS[value]] if isinstance(value, str) and value in LETTERS else []


def _swaps(values: Sequence[ast.expr]) -> Iterator[list[ast.expr]]:
    """Neighbours of one shape, swapped."""
    for i, (a, b) in enumerate(pairwise(values)):
        plain = isinstance(a, ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.Call)
        if plain and type(a) is type(b) and ast.unparse(a) != ast.unparse(b):
            yield [*values[:i], b, a, *values[i + 2 :]]
