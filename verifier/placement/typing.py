"""The proof of placement rules: both sides have the same type, and are equal without their parallel operators.

All four parallel operators denote the identity, and a certified row rule says that the operator on devices denotes the
operator. So a well-typed term denotes its erasure, forward and backward, and two terms of the same type are equal if
their erasures are. A type is a layout per mesh axis. Sizes are symbolic: each stands for a different prime, so a number
identifies the sizes of which it is the product. The row rule that types an operator is that of its factor pattern,
which holds for all sizes of its factors. Every dimension that a type shards is divisible by the degree; the guard must
say so (`required_guard`).

Two axes that shard one dimension of one tensor are beyond these proofs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from shardwright.pcg.errors import GraphError, RuleError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS, PARTITION, step
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression, expression
from shardwright.substitutions.rules.pattern import pattern_of
from shardwright.substitutions.rules.primes import primes
from shardwright.substitutions.rules.rowrules import RowRule, choices, derive
from shardwright.substitutions.terms import Apply, Term, Variable, erase, free_attributes, variables_in
from shardwright.verifier.algebra.elements import Evaluator, extent, spliced
from shardwright.verifier.algebra.polys import Poly, poly, product
from shardwright.verifier.algebra.serialproof import prove_terms
from shardwright.verifier.algebra.shapes import evaluator, known
from shardwright.verifier.proof import Failure, Proof, attempted
from shardwright.verifier.rows.rowproof import proven

Divides = tuple[str, Poly]
"""A divisibility: an axis, and a size that its degree divides."""
_FIRST_PRIME = 101


@dataclass(frozen=True, slots=True)
class TermType:
    """A concrete shape, one layout per axis, and whether the value has a gradient."""

    shape: tuple[int, ...]
    layouts: Layouts
    grad: bool = True


class IllTypedError(RuleError):
    """The error of a term that has no type."""


def prove_placement(rule: Equation) -> Proof:
    """Prove a rule with axes. If there is no proof, the result has a `failure`."""
    return attempted(lambda: _proof(rule))


def _proof(rule: Equation) -> Proof:
    typing = Typing(rule)
    try:
        for number, (left, right) in enumerate(zip(rule.left, rule.right, strict=True)):
            types = typing.root("left", number, left), typing.root("right", number, right)
            if types[0].layouts != types[1].layouts:
                shown = [" ".join(map(str, t.layouts)) for t in types]
                what = f"root {number}: the left side is {shown[0]}, the right side {shown[1]}"
                return Proof(failure=Failure(what, ill_typed=True))
    except IllTypedError as error:
        return Proof(failure=Failure(str(error), malformed=True))
    if (failure := typing.unguarded()) is not None:
        return Proof(failure=failure)
    serial = _erasures(rule)
    return Proof(typing.axioms(serial.axioms), serial.failure)


def required_guard(rule: Equation) -> tuple[Expression, ...]:
    """Return the divisibilities that the types of a placement rule need; raise `RuleError` if it is ill-typed."""
    typing = Typing(rule)
    for term in (*rule.left, *rule.right):
        typing.of(term)
    return typing.guard()


def _erasures(rule: Equation) -> Proof:
    """Return the proof that the erasures are equal; identical terms need none."""
    pairs = [(erase(a), erase(b)) for a, b in zip(rule.left, rule.right, strict=True)]
    different = [(a, b) for a, b in pairs if a != b]
    return prove_terms(rule, *zip(*different, strict=True)) if different else Proof()


@dataclass
class Typing:
    """The types of one rule's terms, and the row rules and divisibilities on which they rest."""

    rule: Equation
    sizes: dict[str, Any] = field(init=False)
    rows: dict[str, RowRule] = field(default_factory=dict)
    needed: dict[Divides, None] = field(default_factory=dict)
    _types: dict[Term, TermType] = field(default_factory=dict)
    _evaluator: Evaluator = field(init=False)
    _primes: dict[str, int] = field(init=False)
    _indices: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        rule = self.rule
        if any(name.startswith("*") for _, dims in rule.variables for name in dims.names):
            raise RuleError(f"rule {rule.name!r}: variables of any rank have no layouts; give every dimension a name")
        if taken := set(rule.axes) & (rule.bound | set(rule.parameters)):
            raise RuleError(f"rule {rule.name!r}: {min(taken)!r} names a mesh axis and a size or attribute")
        symbols = known(rule)
        self._evaluator = evaluator(rule, symbols)
        names = [n for n in sorted(rule.sizes) if n not in symbols.solved]
        self._primes = dict(zip(names, primes(_FIRST_PRIME), strict=False))
        self.sizes = {**dict(free_attributes(rule.operators)), **self._primes}
        for name, digits in symbols.solved.items():
            self.sizes[name] = self._value(product(digits))
        indices = (t.operands[i] for t in rule.operators for i in t.indexes if i < len(t.operands))
        self._indices = frozenset(variables_in(indices))

    def _value(self, size: Poly) -> int:
        return sum(c * prod(self.sizes[str(a)] for a in atoms) for atoms, c in size.terms)

    # ---- types ----

    def root(self, side: str, number: int, term: Term) -> TermType:
        """Return the type of a root; an `IllTypedError` names its field."""
        try:
            return self.of(term)
        except IllTypedError as error:
            raise IllTypedError(f"field '{side}[{number}]': {error}") from None

    def of(self, term: Term) -> TermType:
        """Return the type of a term; raise `IllTypedError` if it has none."""
        if term not in self._types:
            kind = self._variable(term) if isinstance(term, Variable) else self._applied(term)
            self._check(term, kind)
            self._types[term] = kind
        return self._types[term]

    def _variable(self, term: Variable) -> TermType:
        shape = self.rule.dims[term.name].shape(self.sizes)
        layouts = tuple(place.at(self.sizes) for place in dict(self.rule.layouts)[term.name])
        if term.name in self._indices and any(x.kind == "P" for x in layouts):
            raise IllTypedError(f"{term}: indices cannot be partial sums")
        return TermType(shape, layouts, term.name not in self._indices)

    def _check(self, term: Term, kind: TermType) -> None:
        """Check that shards have dimensions in whole blocks, no two axes the same one; record divisibilities."""
        shards = [(axis, x) for axis, x in zip(self.rule.axes, kind.layouts, strict=True) if x.is_shard]
        for axis, x in shards:
            if not 0 <= x.dim < len(kind.shape) or kind.shape[x.dim] % x.blocks:
                raise IllTypedError(f"{term}: {x} of a value of rank {len(kind.shape)} along {axis}")
            self._need(axis, self._extent(term, x.dim), x.blocks, str(term))
        if len({x.dim for _, x in shards}) < len(shards):
            raise RuleError(f"{term}: two axes shard one dimension, which these proofs do not cover")

    def _extent(self, term: Term, dim: int) -> Poly:
        dims = self._evaluator.tensor(erase(term)).dims
        if spliced(dims[dim]):
            raise RuleError(f"{term}: a dimension without a size")
        return extent(dims[dim])

    def _need(self, axis: str, size: Poly, blocks: int, where: str) -> None:
        """Record that the degree must divide the size of a block."""
        rest = size.over(self._factored(blocks))
        if rest is None:
            raise RuleError(f"{where}: {size} in {blocks} blocks is no product of sizes")
        self.needed[axis, rest] = None

    def _factored(self, number: int) -> Poly:
        """Return the product of sizes for which a number stands."""
        product = poly(1)
        for name, prime in self._primes.items():
            while number and number % prime == 0:
                product, number = product * poly(name), number // prime
        return product * number

    def _applied(self, term: Apply) -> TermType:
        operands = [self.of(operand) for operand in term.operands]
        return self._parallel(term, operands[0]) if term.op in PARALLEL_OPS else self._operator(term, operands)

    def _parallel(self, term: Apply, operand: TermType) -> TermType:
        attrs = dict(term.attrs)
        axis = self.rule.axes.index(str(attrs["axis"]))
        dim, blocks = -1, 1
        if term.op == PARTITION:
            dim = attrs["dim"].evaluate(self.sizes)
            if type(dim) is not int:
                raise IllTypedError(f"{term}: {dim} is not a dimension")
            blocks = attrs["blocks"].evaluate(self.sizes) if "blocks" in attrs else 1
        try:
            after = step(term.op, axis, operand.layouts[axis], dim, blocks).after
        except GraphError as error:
            raise IllTypedError(f"{term}: {error}") from None
        return TermType(operand.shape, (*operand.layouts[:axis], after, *operand.layouts[axis + 1 :]), operand.grad)

    def _operator(self, term: Apply, operands: Sequence[TermType]) -> TermType:
        attrs = {key: value.evaluate(self.sizes) for key, value in term.attrs}
        signature = ROWS[term.op].signature([t.shape for t in operands], attrs)
        self._check_shape(term, signature.result_shape)
        layouts = [
            self._along(term, signature, axis, [t.layouts[number] for t in operands], [t.grad for t in operands])
            for number, axis in enumerate(self.rule.axes)
        ]
        return TermType(signature.result_shape, tuple(layouts), any(t.grad for t in operands) or not operands)

    def _check_shape(self, term: Apply, shape: tuple[int, ...]) -> None:
        """Check that the shape at primes is the symbolic one, so that nothing was broadcast or cut by accident."""
        dims = self._evaluator.tensor(erase(term)).dims
        known_dims = [(i, extent(d)) for i, d in enumerate(dims) if not spliced(d)]
        if len(dims) != len(shape) or any(
            self._value(size) != shape[i]
            for i, size in known_dims
            if all(isinstance(a, str) for m, _ in size.terms for a in m)
        ):
            raise RuleError(f"{term}: has shape {list(shape)} at sizes {self.sizes}, which is not its symbolic one")

    def _along(
        self, term: Apply, signature: Signature, axis: str, have: Sequence[Layout], grads: Sequence[bool]
    ) -> Layout:
        """Return the result's layout along one axis, by the certified row rule with these operands."""
        reasons: list[str] = []
        for rule, sizes, size in _offered(term.op, signature, frozenset(x.blocks for x in have)):
            operands = [p.at(sizes) for p in rule.operands]
            if not all(
                a == b or (not g and {a.kind, b.kind} == {"R", "C"})
                for a, b, g in zip(operands, have, grads, strict=True)
            ):
                continue
            if (failure := proven(rule).failure) is not None:
                reasons.append(f"{rule.name}: {failure}")
                continue
            self.rows[rule.hash] = rule
            if size:
                self._need_factor(axis, size, term)
            return rule.result.at(sizes)
        where = f"{term.op} of operands in {', '.join(map(str, have))} along {axis}"
        if reasons:
            raise RuleError(f"{where}: {reasons[0]}")
        raise IllTypedError(f"{where}: no row rule types it")

    def _need_factor(self, axis: str, size: int, term: Apply) -> None:
        """Record that a split factor must be divisible: a product of sizes, or a whole dimension of some value."""
        factored = self._factored(size)
        if any(not atoms for atoms, c in factored.terms if c != 1) or factored.constant not in (None, 1):
            for inner in (*term.operands, term):
                for dim, extent_ in enumerate(self._types[inner].shape if inner in self._types else ()):
                    if extent_ == size:
                        self.needed[axis, self._extent(inner, dim)] = None
                        return
            whole = {d: self._extent(term, d) for d in range(len(self._evaluator.tensor(erase(term)).dims))}
            match = next((p for p in whole.values() if self._value(p) == size), None)
            if match is None:
                raise RuleError(f"{term}: the split factor of size {size} is no product of sizes")
            factored = match
        self.needed[axis, factored] = None

    # ---- what the types rest on ----

    def axioms(self, serial: tuple[str, ...]) -> tuple[str, ...]:
        """Return the row rules by hash, and the axioms of their proofs and of the proof of the erasures."""
        used = {"index-semantics", *serial, *(axiom for rule in self.rows.values() for axiom in proven(rule).axioms)}
        return (*(f"row {key}" for key in sorted(self.rows)), *sorted(used))

    def guard(self) -> tuple[Expression, ...]:
        """Return the divisibilities that are not implied by others, as conditions."""
        needed = [
            (axis, size) for axis, size in self.needed
            if size.constant is None
            and not any(a == axis and s != size and _implies([s], size) for a, s in self.needed)
        ]  # fmt: skip
        return tuple(sorted((_condition(axis, size) for axis, size in needed), key=str))

    def unguarded(self) -> Failure | None:
        """Return the first divisibility that the guard does not imply, with sizes for which it fails; or None."""
        given: dict[str, list[Poly]] = {}
        for condition in self.rule.guard:
            if (divided := self._divisibility(condition)) is not None:
                given.setdefault(divided[0], []).append(divided[1])
        for axis, size in self.needed:
            if not _implies(given.get(axis, []), size):
                ones = {str(a): "1" for atoms, _ in size.terms for a in atoms}
                degree = sum(c for _, c in size.terms) + 1
                return Failure(f"not guarded: {_condition(axis, size)}", {axis: str(degree), **ones})
        return None

    def _divisibility(self, condition: Expression) -> Divides | None:
        match condition.tree:
            case ast.Compare(
                left=ast.BinOp(left=left, op=ast.Mod(), right=ast.Name(id=axis)),
                ops=[ast.Eq()],
                comparators=[ast.Constant(value=0)],
            ) if axis in self.rule.axes:
                return axis, self._evaluator.symbols.number(left)
            case _:
                return None


def _implies(given: Sequence[Poly], size: Poly) -> bool:
    """Return whether divisors of `given` divide the size: it is one of them, or each term is a multiple of one."""
    return size in given or all(
        any(Poly(((atoms, 1),)).over(g) is not None for g in given if g.terms) for atoms, _ in size.terms
    )


def _condition(axis: str, size: Poly) -> Expression:
    text = str(size)
    return expression(f"({text}) % {axis} == 0")


@lru_cache(maxsize=8192)
def _offered(
    op: str, signature: Signature, blocks: frozenset[int]
) -> tuple[tuple[RowRule, Mapping[str, int], int], ...]:
    """Return every rule that the row offers here, with the sizes of its factors and of the factor that it splits."""
    row, refined, rules = ROWS[op], [signature], list[tuple[RowRule, Mapping[str, int], int]]()
    if not row.random:
        refined += [
            signature.refined(number, n)
            for n in sorted(blocks - {1})
            for number, factor in enumerate(signature.factors)
            if factor.role != "fixed" and factor.name != row.offset and factor.size % n == 0 and factor.size > n
        ]
    for refinement in refined:
        pattern, letters = pattern_of(refinement)
        sizes = {letter: f.size for f, letter in zip(refinement.factors, letters, strict=True)}
        for choice in choices(row, pattern):
            with suppress(GraphError, RuleError):
                rule = derive(op, pattern, choice)
                rules.append((rule, sizes, sizes[rule.factor] if rule.factor else 0))
    return tuple(rules)
