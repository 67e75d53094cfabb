"""The second proof of placement rules: typed terms as uninterpreted functions, and their denotations.

Every layout is a separate sort, so an ill-typed term cannot be written. `den` maps each sort to the sort of logical
tensors. Parallel operators and operators on devices are functions between sorts. These axioms about them are assumed,
with a trigger on either side:

    den(partition(x)) = den(x), and so for combine, replicate and reduce
    den(op_{S(1) S(1) → P}(x, w)) = op(den(x), den(w))      for every row rule that types an operator of the rule

A rule holds if its roots have the same sort, and den(left) = den(right) follows. The only code shared with `typing` is
the rows: steps between layouts are defined here once more, the layout of an operator's result is read off its row's
factor string, and divisibility is checked at instances whose sizes satisfy the guard and nothing more.

If the erasures differ, they form a serial rule. It is assumed as one more axiom if it is proven in real arithmetic, the
second proof of serial rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, product
from typing import Any

from shardwright.pcg.choice import Choice, Split, indivisible
from shardwright.pcg.errors import GraphError, RuleError, ShardwrightError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout
from shardwright.pcg.offers import alone
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.parallel import COMBINE, PARALLEL_OPS, PARTITION, REDUCE
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.primes import primes
from shardwright.substitutions.terms import Apply, Term, Variable, erase, free_attributes, variables_in
from shardwright.verifier.logic import Formula, Number, Solver, z3
from shardwright.verifier.proof import BEYOND
from shardwright.verifier.reals.realproof import equal_in_reals
from shardwright.verifier.solver import answer, new_solver, scope

_FIRST_PRIME = 211
_DEGREES = (6, 10)  # composite: a multiple of half a degree need not be a multiple of the degree
_MAX_INSTANCES, _MAX_DEGREES = 8, 100


@dataclass(frozen=True)
class _Typed:
    """A term of the encoding: its shape, its layouts and its expression."""

    shape: tuple[int, ...]
    layouts: tuple[Layout, ...]
    index: bool
    expression: Number


@lru_cache(maxsize=1)
def _solver() -> Solver:
    """Return the one solver for all rules, used with push and pop."""
    return new_solver()


@lru_cache(maxsize=1)
def _logical() -> Number:
    return z3.DeclareSort("Logical")


@lru_cache(maxsize=4096)
def _sort(layouts: str) -> Number:
    return z3.DeclareSort(f"In[{layouts}]")


@lru_cache(maxsize=4096)
def _den(layouts: str) -> Number:
    """Return the function from values in these layouts to the logical tensors that they denote."""
    return z3.Function(f"den {layouts}", _sort(layouts), _logical())


@lru_cache(maxsize=4096)
def _plain(symbol: str, count: int) -> Number:
    """Return an operator on logical tensors."""
    return z3.Function(symbol, *[_logical()] * count, _logical())


@lru_cache(maxsize=4096)
def _on_devices(name: str, symbol: str, operands: tuple[str, ...], result: str) -> tuple[Number, Formula]:
    """Return a function between sorts, and the axiom that it denotes `symbol`, or its operand if `symbol` is "".

    The axiom, den(local) = logical, is instantiated where either side occurs.
    """
    function = z3.Function(name, *map(_sort, operands), _sort(result))
    names = [z3.Const(f"x{i}", _sort(layouts)) for i, layouts in enumerate(operands)]
    dens = [_den(layouts)(x) for x, layouts in zip(names, operands, strict=True)]
    local, logical = function(*names), _plain(symbol, len(dens))(*dens) if symbol else dens[0]
    equal = _den(result)(local) == logical
    return function, z3.ForAll(names, equal, patterns=[local, logical]) if names else equal


def denotes_equal(rule: Equation) -> bool:
    """Return whether each pair of roots has one sort, and den(left) = den(right) follows; False also for unknown."""
    encoding, pairs = _Encoding(rule, {}), list[tuple[_Typed, _Typed]]()
    try:
        for sizes in _instances(rule):
            encoding = _Encoding(rule, sizes)
            pairs = [(encoding.term(a), encoding.term(b)) for a, b in zip(rule.left, rule.right, strict=True)]
            if any(a.layouts != b.layouts or a.shape != b.shape for a, b in pairs):
                return False
    except (ShardwrightError, *BEYOND):
        return False
    if not pairs:  # no sizes that satisfy the guard were found
        return False
    goal = z3.And([encoding.den(a) == encoding.den(b) for a, b in pairs])
    with scope(_solver()) as solver:
        solver.add(*encoding.axioms.values(), *encoding.serial(), z3.Not(goal))
        return answer(solver) == z3.unsat


def _instances(rule: Equation) -> Iterator[dict[str, Any]]:
    """Yield sizes that satisfy the guard and no other divisibility.

    If the degree of an axis must divide a product, there is one instance for each factor that it may divide.
    """
    base: dict[str, Any] = dict(zip(sorted(rule.sizes, reverse=True), primes(_FIRST_PRIME), strict=False))
    base |= {axis: _degree(rule, axis, least) for axis, least in zip(rule.axes, _DEGREES, strict=False)}
    conditions = [g for g in rule.guard if g.names & set(rule.axes) and g.names - set(rule.axes)]
    for chosen in islice(product(*(sorted(g.names - set(rule.axes)) for g in conditions)), _MAX_INSTANCES):
        sizes = dict(base)
        for condition, name in zip(conditions, chosen, strict=True):
            (axis,) = condition.names & set(rule.axes)
            degree, size = sizes[axis], sizes[name]
            divisors = (d for d in range(1, degree + 1) if degree % d == 0)
            tried = (*(size * d for d in divisors), *range(size, size + degree))
            holds = (n for n in tried if condition.evaluate({**sizes, name: n}) is True)
            sizes[name] = next(holds, sizes[name])
        if all(g.evaluate(sizes) is True for g in rule.guard):
            yield sizes


def _degree(rule: Equation, axis: str, least: int) -> int:
    """Return a multiple of the least degree that satisfies the guard's conditions on this axis alone."""
    conditions = [g for g in rule.guard if g.names and g.names <= {axis}]
    tried = range(least, least * _MAX_DEGREES, least)
    return next((n for n in tried if all(g.evaluate({axis: n}) is True for g in conditions)), least)


@dataclass
class _Encoding:
    rule: Equation
    sizes: dict[str, Any]
    axioms: dict[str, Formula] = field(default_factory=dict)
    _made: dict[Term, _Typed] = field(default_factory=dict)
    _indices: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        rule = self.rule
        for name, value in free_attributes(rule.operators):
            self.sizes.setdefault(name, value)
        indices = (t.operands[i] for t in rule.operators for i in t.indexes if i < len(t.operands))
        self._indices = frozenset(variables_in(indices))

    # ---- terms ----

    def term(self, term: Term) -> _Typed:
        if term not in self._made:
            typed = self._variable(term) if isinstance(term, Variable) else self._applied(term)
            dims = [x.dim for x in typed.layouts if x.is_shard]
            for axis, x in zip(self.rule.axes, typed.layouts, strict=True):
                if x.is_shard and (dims.count(x.dim) > 1 or typed.shape[x.dim] % (x.blocks * self.sizes[axis])):
                    raise RuleError(f"{term}: {x} does not divide {typed.shape} by {self.sizes[axis]}")
            self._made[term] = typed
        return self._made[term]

    def _variable(self, term: Variable) -> _Typed:
        layouts = tuple(place.at(self.sizes) for place in dict(self.rule.layouts)[term.name])
        shape = self.rule.dims[term.name].shape(self.sizes)
        return _Typed(shape, layouts, term.name in self._indices, z3.Const(term.name, _sort(_text(layouts))))

    def _applied(self, term: Apply) -> _Typed:
        operands = [self.term(operand) for operand in term.operands]
        if term.op in PARALLEL_OPS:
            return self._stepped(term, operands[0])
        attrs = {key: value.evaluate(self.sizes) for key, value in term.attrs}
        signature = ROWS[term.op].signature([x.shape for x in operands], attrs)
        layouts = tuple(
            self._result(term.op, signature, [(x.layouts[i], x.index) for x in operands], self.sizes[axis])
            for i, axis in enumerate(self.rule.axes)
        )
        symbol = _symbol(term, [len(x.shape) for x in operands])
        return _Typed(signature.result_shape, layouts, False, self._function(symbol, symbol, operands, layouts))

    def _stepped(self, term: Apply, operand: _Typed) -> _Typed:
        """Encode a parallel operator; the layouts before and after it are defined here once more."""
        attrs = dict(term.attrs)
        axis = self.rule.axes.index(str(attrs["axis"]))
        before = operand.layouts[axis]
        starts = {PARTITION: "R", COMBINE: "S", REDUCE: "P"}.get(term.op, "R")
        if before.kind != starts:
            raise RuleError(f"{term}: no such function on {before}")
        if term.op == PARTITION:
            blocks = attrs["blocks"].evaluate(self.sizes) if "blocks" in attrs else 1
            after = Layout("S", attrs["dim"].evaluate(self.sizes), blocks)
        else:
            after = Layout("R" if term.op in (COMBINE, REDUCE) else "C")
        layouts = (*operand.layouts[:axis], after, *operand.layouts[axis + 1 :])
        return _Typed(operand.shape, layouts, operand.index, self._function(term.op, "", [operand], layouts))

    def _function(self, name: str, symbol: str, operands: Sequence[_Typed], layouts: Sequence[Layout]) -> Number:
        """Apply a function between sorts to operands, and record its axiom."""
        texts, result = tuple(_text(x.layouts) for x in operands), _text(layouts)
        local = f"{name}: {'; '.join(texts)} -> {result}"
        function, self.axioms[local] = _on_devices(local, symbol, texts, result)
        return function(*(x.expression for x in operands))

    def _result(self, op: str, signature: Signature, have: Sequence[tuple[Layout, bool]], degree: int) -> Layout:
        row = ROWS[op]
        for choice in _choices(row, signature, have):
            try:
                operands, result = choice.layouts(signature, row)
            except GraphError:
                continue
            fits = (
                a == x or (free and {a.kind, x.kind} == {"R", "C"}) for a, (x, free) in zip(operands, have, strict=True)
            )
            if all(fits) and indivisible(signature, [choice], [degree]) is None:
                return result
        raise RuleError(f"{op}: no such function on {', '.join(str(x) for x, _ in have)}")

    # ---- axioms ----

    def den(self, typed: _Typed) -> Number:
        return _den(_text(typed.layouts))(typed.expression)

    def serial(self) -> list[Formula]:
        """Return the serial equations of roots whose erasures differ, as facts about logical tensors, if proven."""
        pairs = [(erase(a), erase(b)) for a, b in zip(self.rule.left, self.rule.right, strict=True)]
        pairs = [(a, b) for a, b in pairs if a != b]
        if not pairs or not equal_in_reals(self.rule, *zip(*pairs, strict=True)):
            return []
        return [self._erased(a) == self._erased(b) for a, b in pairs]

    def _erased(self, term: Term) -> Number:
        """Return the erasure of a term over the variables' logical tensors."""
        if isinstance(term, Variable):
            return self.den(self.term(term))
        operands = [self._erased(operand) for operand in term.operands]
        ranks = [len(self._rank(operand)) for operand in term.operands]
        return _plain(_symbol(term, ranks), len(operands))(*operands)

    def _rank(self, term: Term) -> tuple[int, ...]:
        if isinstance(term, Variable):
            return self.rule.dims[term.name].shape(self.sizes)
        return term.shape([self._rank(t) for t in term.operands], self.sizes)


def _choices(row: Row, signature: Signature, have: Sequence[tuple[Layout, bool]]) -> list[Choice]:
    """Return every choice that may require such operands."""
    names = [f.name for f in signature.factors if f.role != "fixed"]
    blocks = sorted({x.blocks for x, _ in have} - {1})
    blocked = [Split(f.name, n) for f in signature.factors for n in blocks if f.name in names and f.size % n == 0]
    return [*alone(row, names), *blocked]


def _symbol(term: Apply, ranks: Sequence[int]) -> str:
    """Return the name of an operator on logical tensors, by its attributes and the ranks of its operands."""
    return f"{term.op}({', '.join(f'{key}={value}' for key, value in term.attrs)}) {' '.join(map(str, ranks))}"


def _text(layouts: Sequence[Layout]) -> str:
    return " ".join(map(str, layouts))
