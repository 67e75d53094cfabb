"""The rules that smaller rules imply: a rule is implied if rewriting with kept, smaller rules joins its two sides.

Rules are taken in order of size. Both sides are rewritten, a bounded number of times, by the rules kept so far,
anywhere in the term; where a term is reached from both sides, the rules on the way imply the rule. A rule that is not
found implied within the bound is kept: the catalogue may be larger than the smallest one, and is never too small. A
rule that replaces several roots and follows from rules of one root alone is kept too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, permutations, product
from typing import Any

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.generator.canonical import joined
from shardwright.substitutions.generator.groundterms import (
    AXES,
    Asked,
    DirectedRule,
    GroundSizes,
    GroundType,
    Terms,
    needs,
)
from shardwright.substitutions.terms import Apply, Term, Variable, applied, is_splice, variables_in

EXPANSIONS = 8
GROWTH = 1
Needs = tuple[tuple[str, int], ...]
Edge = tuple[str, Needs]
"""The rule that rewrites, and what its guard asks of the sizes."""
PatternShape = tuple[Any, ...] | None
"""A pattern's operator with the shapes of its operands, or None for a variable: rules are looked up by it."""


def implications(rules: Sequence[Equation], expansions: int = EXPANSIONS) -> dict[str, tuple[str, ...]]:
    """Return, for every rule by name, the smaller rules that imply it; none for the rules of the minimal catalogue."""
    run = Reduction(expansions)
    return {rule.name: run.implied_by(rule) for rule in sorted(rules, key=_rank)}


def _rank(rule: Equation) -> tuple[object, ...]:
    """Return a sort key: serial rules first, then small ones, then those that fit more tensors."""
    entries = [entry for _, dims in rule.variables for entry in dims.entries]
    plain = sum(1 + 2 * (len(entry) > 1) for entry in entries if not is_splice(entry))
    fixed = sum(not any(map(is_splice, dims.entries)) for _, dims in rule.variables)
    return (len(rule.axes), _size(rule), plain, fixed, len(rule.guard), rule.name)


def _size(rule: Equation) -> int:
    """Return the number of distinct operators of either side, together."""
    return sum(len(set(applied(side))) for side in (rule.left, rule.right))


class Reduction:
    """The rules kept so far, and the terms that they rewrite."""

    def __init__(self, expansions: int = EXPANSIONS) -> None:
        self.terms, self.sizes, self.expansions = Terms(), GroundSizes(), expansions
        self._kept: dict[PatternShape, list[tuple[DirectedRule, int]]] = {}
        self._several: set[str] = set()
        self._next: dict[int, dict[int, Edge]] = {}
        self._done: dict[int, list[int]] = {}
        self._seen: dict[int, dict[PatternShape, int]] = {}
        self._shaped: dict[int, tuple[PatternShape, ...]] = {}
        self._asked: dict[Asked, int] = {}
        self._bound: dict[tuple[object, ...], Mapping[str, Any] | None] = {}

    def implied_by(self, rule: Equation) -> tuple[str, ...]:
        """Return the kept rules that imply this one; if there are none, keep it.

        A rule of several roots is kept where rules of one root alone imply it: used from left to right, they do not put
        in the concatenation that holds its roots together.
        """
        sides = self._sides(rule)
        names = None if sides is None else self._joined(*sides, self._given(rule))
        if names is not None and len(rule.left) > 1 and names.isdisjoint(self._several):
            names = None
        if names is None:
            self._keep(rule)
        return tuple(sorted(names or ()))

    def _sides(self, rule: Equation) -> tuple[int, int] | None:
        """Return both sides at fixed sizes; None where they are not rewritten: parameters, many axes, or ill-typed."""
        if rule.parameters or len(rule.axes) > len(AXES):
            return None
        env = self._env(rule)
        try:
            variables = {name: self._variable(rule, name, env) for name, _ in rule.variables}
            left, right = (self.terms.build(joined(side), variables, env) for side in (rule.left, rule.right))
        except (RuleError, KeyError):
            return None
        return None if left is None or right is None else (left, right)

    def _given(self, rule: Equation) -> frozenset[tuple[str, int]]:
        """Return what the guard of a rule grants to the rules that rewrite it."""
        return frozenset(needs(rule, self._env(rule), self.sizes.splices) or ())

    def _env(self, rule: Equation) -> dict[str, Any]:
        return self.sizes.env(rule) | dict(zip(rule.axes, AXES, strict=False))

    def _variable(self, rule: Equation, name: str, env: Mapping[str, Any]) -> int:
        layouts = tuple(place.at(env) for place in dict(rule.layouts)[name]) if rule.axes else ()
        return self.terms.variable(name, GroundType(rule.dims[name].shape(env), layouts))

    def _keep(self, rule: Equation) -> None:
        if rule.parameters:
            return
        if len(rule.left) > 1:
            self._several.add(rule.name)
        one, other = joined(rule.left), joined(rule.right)
        for left, right in ((one, other), (other, one)):
            if isinstance(left, Apply) and variables_in([right]) <= variables_in([left]):
                direction = DirectedRule(rule, left, right)
                request = self._asked.setdefault(direction.required, len(self._asked))
                self._kept.setdefault(_shape(left), []).append((direction, request))

    # ---- rewriting ----

    def _joined(self, left: int, right: int, given: frozenset[tuple[str, int]]) -> set[str] | None:
        """Return the rules on a way from one side to the other, or None; smallest terms are rewritten first."""
        limit = max(self.terms.sizes[left], self.terms.sizes[right]) + GROWTH
        ways: list[dict[int, tuple[int, str]]] = [{left: (-1, "")}, {right: (-1, "")}]
        queues = [[(self.terms.sizes[side], side)] for side in (left, right)]
        for _ in range(self.expansions):
            for here, queue in enumerate(queues):
                if not queue:
                    continue
                _, number = heapq.heappop(queue)
                for other, (name, asks) in self._rewritten(number).items():
                    if other in ways[here] or self.terms.sizes[other] > limit or not _granted(asks, given):
                        continue
                    ways[here][other] = (number, name)
                    if other in ways[1 - here]:
                        return _names(ways[0], other) | _names(ways[1], other)
                    heapq.heappush(queue, (self.terms.sizes[other], other))
        return None

    def _rewritten(self, number: int) -> Mapping[int, Edge]:
        """Return what kept rules make of a term; it is remembered, and extended by rules kept since."""
        edges = self._next.setdefault(number, {})
        node, kind = self.terms.nodes[number], self.terms.types[number]
        if not node.op:
            return edges
        done = self._done.setdefault(number, [0] * len(node.operands))
        for position, operand in enumerate(node.operands):
            inside = self._rewritten(operand)
            fresh, done[position] = list(islice(inside.items(), done[position], None)), len(inside)
            for other, edge in fresh:
                operands = (*node.operands[:position], other, *node.operands[position + 1 :])
                made = self.terms.apply(node.op, node.attrs, operands)
                if made is not None and self.terms.types[made] == kind:
                    edges.setdefault(made, edge)
        seen = self._seen.setdefault(number, {})
        for shape in self._shapes(number):
            rules = self._kept.get(shape, ())
            if len(rules) == seen.get(shape, 0):
                continue
            leaves, attrs = self._parts(shape, number)
            for direction, request in rules[seen.get(shape, 0) :]:
                for made, asks in self._applied(direction, request, leaves, attrs):
                    if made != number and self.terms.types[made] == kind:
                        edges.setdefault(made, (direction.rule.name, asks))
            seen[shape] = len(rules)
        return edges

    def _shapes(self, number: int) -> tuple[PatternShape, ...]:
        """Return the shapes of patterns that may match a term, except that of a variable."""
        if number not in self._shaped:
            node = self.terms.nodes[number]
            below = [(None, *self._shapes(operand)) for operand in node.operands]
            self._shaped[number] = tuple((node.op, *shapes) for shapes in product(*below)) if node.op else ()
        return self._shaped[number]

    def _parts(self, shape: PatternShape, number: int) -> tuple[list[int], list[tuple[str, Any]]]:
        """Return a term's subterms at the variables of a pattern of this shape, and the attributes of its operators."""
        if shape is None:
            return [number], []
        leaves, attrs, node = list[int](), list[tuple[str, Any]](), self.terms.nodes[number]
        for below, operand in zip(shape[1:], node.operands, strict=True):
            more, others = self._parts(below, operand)
            leaves, attrs = leaves + more, attrs + others
        return leaves, [*attrs, *node.attrs]

    def _applied(
        self, direction: DirectedRule, request: int, leaves: Sequence[int], attrs: Sequence[tuple[str, Any]]
    ) -> Iterator[tuple[int, Needs]]:
        for one, other in direction.repeated:
            if leaves[one] != leaves[other]:
                return
        numbers = [leaves[at] for at in direction.variables.values()]
        kinds = tuple([self.terms.kinds[number] for number in numbers])
        types = [self.terms.types[number] for number in numbers]
        for axes in _axes(direction.rule.axes):
            key = (request, kinds, tuple(axes.values()))
            if key not in self._bound:
                self._bound[key] = direction.required.bound(types, axes)
            if (bound := self._bound[key]) is None:
                continue
            env = {**axes, **bound}
            if not direction.solved(types, attrs, env):
                continue
            try:
                made = self.terms.build(direction.right, dict(zip(direction.variables, numbers, strict=True)), env)
                asks = needs(direction.rule, env, self.sizes.splices)
            except (RuleError, KeyError):
                continue
            if made is not None and asks is not None:
                yield made, asks


def _shape(term: Term) -> PatternShape:
    return None if isinstance(term, Variable) else (term.op, *map(_shape, term.operands))


@lru_cache(maxsize=64)
def _axes(axes: tuple[str, ...]) -> tuple[Mapping[str, str], ...]:
    """Return every assignment of ground axes to the axes of a rule."""
    if len(axes) > len(AXES):
        return ()
    return tuple(dict(zip(axes, order, strict=True)) for order in permutations(AXES, len(axes)))


def _names(ways: Mapping[int, tuple[int, str]], number: int) -> set[str]:
    """Return the rules on the way to a term."""
    names: set[str] = set()
    while number >= 0:
        number, name = ways[number]
        names.add(name)
    return names - {""}


def _granted(asks: Needs, given: frozenset[tuple[str, int]]) -> bool:
    """Return whether a guard grants the needs of a rewrite: a degree divides the multiples of what it divides."""
    return all(any(a == axis and (not of or size % of == 0) for a, of in given) for axis, size in asks)
