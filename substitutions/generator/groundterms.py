"""Terms at fixed sizes, which reduction rewrites.

Every size stands for a prime of its own, so that a shape says which sizes it is made of and an equation between shapes
holds for all sizes. Terms are interned; each has a shape and, under a placement rule's axes, a layout per axis,
inferred from the operators' factor strings. A rule rewrites a term where its pattern fits and the type stays the same:
a placement rule is true exactly when both sides have one type and one erasure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.offers import offered
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.parallel import PARALLEL_OPS, step
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.generator.canonical import ROOTS
from shardwright.substitutions.placement import Placement
from shardwright.substitutions.rules.primes import primes
from shardwright.substitutions.terms import Dims, Term, Variable, applied, free_attributes, subterms

AXES = ("a", "b")


class GroundType(NamedTuple):
    """A shape, and a layout per axis."""

    shape: tuple[int, ...]
    layouts: Layouts


class Ground(NamedTuple):
    """An operator with its attributes' values on terms, or a variable (`op` empty)."""

    op: str
    attrs: tuple[tuple[str, Any], ...]
    operands: tuple[int, ...]


@dataclass
class GroundSizes:
    """The number that every name stands for: primes for sizes, small numbers for starts of slices.

    `splices` are the numbers that splices are made of.
    """

    of: dict[str, Any] = field(default_factory=dict)
    splices: set[int] = field(default_factory=set)
    _fresh: Iterator[int] = field(default_factory=lambda: primes(1009))
    _small: int = 3

    def env(self, rule: Equation) -> dict[str, Any]:
        """Return the values of a rule's names. A name of one kind means the same in all rules, which so share terms."""
        env: dict[str, Any] = {}
        for _, dims in rule.variables:
            for name in dims.names:
                env[name.lstrip("*")] = self._number(name)
        terms = list(applied((*rule.left, *rule.right)))
        for key in ("stop", "start"):
            for term in terms:
                for name in dict(term.attrs)[key].names if key in dict(term.attrs) else ():
                    if name not in env:
                        env[name] = self._number(f"{key} {name}")
        for name, value in free_attributes(terms):
            env.setdefault(name, value)
        for term in terms:
            for key, value in term.attrs:
                for name in value.names if key != "axis" else ():
                    env.setdefault(name, self._number(f"*{name}"))
        return env

    def _number(self, name: str) -> int | tuple[int, int]:
        if name not in self.of:
            if name.startswith("*"):
                self.of[name] = (next(self._fresh), next(self._fresh))
                self.splices.update(self.of[name])
            elif name.startswith(("start ", "stop ")):
                self._small += 2
                self.of[name] = self._small + (400 if name.startswith("stop ") else 0)
            else:
                self.of[name] = next(self._fresh)
        return self.of[name]


class Terms:
    """The ground terms, interned."""

    def __init__(self) -> None:
        self.nodes: list[Ground] = []
        self.types: list[GroundType] = []
        self.kinds: list[int] = []
        """The number of a term's type; equal types have one number."""
        self.sizes: list[int] = []
        self._kinds: dict[GroundType, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._results: dict[tuple[object, ...], GroundType | None] = {}

    def variable(self, name: str, kind: GroundType) -> int:
        """Return the variable of this name and type."""
        return self._intern(("", name, kind), Ground("", (("name", name),), ()), kind)

    def apply(self, op: str, attrs: tuple[tuple[str, Any], ...], operands: tuple[int, ...]) -> int | None:
        """Return the term, or None where the operator does not fit."""
        key = (op, attrs, operands)
        if key in self._numbers:
            return self._numbers[key]
        kinds = tuple(self.types[i] for i in operands)
        if (op, attrs, kinds) not in self._results:
            self._results[op, attrs, kinds] = _result(op, attrs, kinds)
        kind = self._results[op, attrs, kinds]
        return None if kind is None else self._intern(key, Ground(op, attrs, operands), kind)

    def _intern(self, key: tuple[object, ...], node: Ground, kind: GroundType) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.types.append(kind)
            self.kinds.append(self._kinds.setdefault(kind, len(self._kinds)))
            self.sizes.append(bool(node.op) + sum(self.sizes[i] for i in node.operands))
        return self._numbers[key]

    def build(self, term: Term, variables: Mapping[str, int], env: Mapping[str, Any]) -> int | None:
        """Return a term of a rule, or None where it does not fit. Axes are names in `env`."""
        if isinstance(term, Variable):
            return variables[term.name]
        operands: list[int] = []
        for operand in term.operands:
            built = self.build(operand, variables, env)
            if built is None:
                return None
            operands.append(built)
        attrs = tuple((key, value.evaluate(env)) for key, value in term.attrs)
        return self.apply(term.op, attrs, tuple(operands))


def _result(op: str, attrs_: tuple[tuple[str, Any], ...], kinds: tuple[GroundType, ...]) -> GroundType | None:
    attrs = dict(attrs_)
    try:
        if op == ROOTS:
            return _together(kinds)
        if op in PARALLEL_OPS:
            return _stepped(op, attrs, kinds[0])
        signature = ROWS[op].signature([kind.shape for kind in kinds], attrs)
        layouts = zip(*(kind.layouts for kind in kinds), strict=True)
        split = [_split(ROWS[op], signature, along) for along in layouts]
    except (GraphError, ValueError, IndexError, TypeError, ZeroDivisionError):
        return None
    whole = tuple(layout for layout in split if layout is not None)
    return GroundType(signature.result_shape, whole) if len(whole) == len(split) else None


def _together(kinds: Sequence[GroundType]) -> GroundType:
    """Return the type of several roots, one after the other."""
    shape = tuple(size for kind in kinds for size in (len(kind.shape), *kind.shape))
    return GroundType(shape, tuple(layout for kind in kinds for layout in kind.layouts))


def _stepped(op: str, attrs: Mapping[str, Any], kind: GroundType) -> GroundType:
    axis = AXES.index(attrs["axis"])
    after = step(op, axis, kind.layouts[axis], attrs.get("dim", -1), attrs.get("blocks", 1)).after
    return GroundType(kind.shape, (*kind.layouts[:axis], after, *kind.layouts[axis + 1 :]))


def _split(row: Row, signature: Signature, operands: Sequence[Layout]) -> Layout | None:
    """Return the result's layout along an axis where the operands have these; None where no choice asks for them."""
    blocks = {layout.blocks for layout in operands if layout.is_shard}
    for choice, needed, result in offered(row, signature, lambda size: blocks):
        if needed == tuple(operands) or (choice.factors and all(map(_same, needed, operands))):
            return result
    return None


def _same(needed: Layout, given: Layout) -> bool:
    return needed == given or {needed.kind, given.kind} == {"R", "C"}


# ---- matching ----


@dataclass(frozen=True, eq=False)
class DirectedRule:
    """A rule from one side to the other."""

    rule: Equation
    left: Term
    right: Term

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """The variables of the left side in order of occurrence, each as often as it occurs."""
        return tuple(t.name for t in subterms(self.left) if isinstance(t, Variable))

    @cached_property
    def variables(self) -> dict[str, int]:
        """The place of each variable's first occurrence among the leaves."""
        first_places: dict[str, int] = {}
        for at, name in enumerate(self.leaves):
            first_places.setdefault(name, at)
        return first_places

    @cached_property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """The pairs of leaves that are one variable: its first occurrence and another one."""
        firsts = [(self.variables[name], at) for at, name in enumerate(self.leaves)]
        return tuple((first, at) for first, at in firsts if first != at)

    @cached_property
    def attrs(self) -> tuple[tuple[str, Expression], ...]:
        """The attributes of the left side's operators, operands first."""
        return tuple(attr for t in applied([self.left]) for attr in t.attrs)

    @cached_property
    def required(self) -> Asked:
        """The dims and layouts that the rule asks of its variables."""
        layouts = dict(self.rule.layouts)
        return Asked(tuple((self.rule.dims[v], layouts.get(v, ())) for v in self.variables), self.rule.axes)

    def solved(self, types: Sequence[GroundType], attrs: Sequence[tuple[str, Any]], env: dict[str, Any]) -> bool:
        """Return whether sizes and attributes fit; add to `env`, which begins with axes and the sizes bound by types.

        `types` are those of the variables, and `attrs` the attributes that a term has where the left side has its own.
        """
        if [key for key, _ in self.attrs] != [key for key, _ in attrs]:
            return False
        pairs = [(want, have) for (_, want), (_, have) in zip(self.attrs, attrs, strict=True)]
        for want, have in pairs:
            for size, value in want.read(have).items():
                env.setdefault(size, value)
        for name, kind in zip(self.variables, types, strict=True):
            solution = self.rule.dims[name].factored(kind.shape, env)
            if solution is None:
                return False
            env.update(solution)
        try:
            fits = all(want.evaluate(env) == have for want, have in pairs)
        except (RuleError, TypeError):
            return False
        return fits and self._blocks(dict(zip(self.variables, types, strict=True)), env)

    def _blocks(self, types: Mapping[str, GroundType], env: Mapping[str, Any]) -> bool:
        """Return whether the variables lie in as many blocks as a placement rule says."""
        for name, placements in self.rule.layouts:
            layouts = types[name].layouts
            for axis, placement in zip(self.rule.axes, placements, strict=True):
                if any(b not in env for b in placement.blocks):
                    return False
                have = layouts[AXES.index(env.get(axis, axis))]
                if have.blocks != prod(env[b] for b in placement.blocks):
                    return False
        return True


class Asked(NamedTuple):
    """The dims and layouts of a pattern's variables, in order of occurrence: many rules ask for the same."""

    of: tuple[tuple[Dims, tuple[Placement, ...]], ...]
    axes: tuple[str, ...]

    def bound(self, kinds: Sequence[GroundType], axes: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the sizes that variables of these types give to names that stand alone; None where types misfit."""
        env: dict[str, Any] = {}
        for (dims, placements), kind in zip(self.of, kinds, strict=True):
            if not all(
                _lies(kind.layouts, AXES.index(axes.get(axis, axis)), placement)
                for axis, placement in zip(self.axes, placements, strict=False)
            ):
                return None
            sizes = dims.bind(kind.shape)
            if sizes is None or any(env.setdefault(name, value) != value for name, value in sizes.items()):
                return None
        return env


def _lies(layouts: Layouts, at: int, placement: Placement) -> bool:
    """Return whether a layout is the one that a rule asks for, numbers of blocks aside."""
    return at < len(layouts) and (layouts[at].kind, layouts[at].dim) == (placement.kind, placement.dim)


@lru_cache(maxsize=4096)
def _divided(guard: Expression) -> tuple[Expression, str]:
    """Return the size and the axis of a guard `size % axis == 0`; for other guards, the guard and ""."""
    match guard.tree:
        case ast.Compare(left=ast.BinOp(left=size, op=ast.Mod(), right=ast.Name(id=axis))):
            return Expression(ast.unparse(size)), axis
        case _:
            return guard, ""


def needs(rule: Equation, env: Mapping[str, Any], splices: AbstractSet[int]) -> tuple[tuple[str, int], ...] | None:
    """Return what a guard needs: (axis, size that its degree divides), ("len", 0) for a rank, ("", 0) for an order.

    None where it does not hold at these sizes. `splices` are the numbers that stand for an unknown number of
    dimensions.
    """
    conditions: list[tuple[str, int]] = []
    for guard in rule.guard:
        size, axis = _divided(guard)
        if axis in rule.axes:
            conditions.append((env.get(axis, axis), size.evaluate(env)))
            continue
        match guard.tree:
            case ast.Compare(left=ast.Call(args=[ast.Name(id=splice)])) if set(env[splice]) <= splices:
                conditions.append(("len", 0))
            case ast.Compare(left=ast.Call(args=[ast.Name()])):
                continue
            case _ if guard.names & set(rule.axes) or guard.evaluate(env) is not True:
                return None
            case _:
                conditions.append(("", 0))
    return tuple(conditions)
