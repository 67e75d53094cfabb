"""Symbolic shapes and elements of terms: the index semantics of the rows that algebraic rules speak about.

A dimension has a symbolic size. A splice `*b`, any number of dimensions, is one dimension with one index for all of
them: rows act on leading dimensions point by point. Permuting or reshaping a whole splice maps that index by
functions of which the following is assumed, for index tuples j and offsets n in row-major order:

    at(compose(p, q), j) = at(p, at(q, j))        at(iota, j) = j
    flat(s, unflat(s, n)) = n                      reshape to t of shape s reads unflat(s, flat(t, j))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.pcg.errors import RuleError
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.expressions import Expression
from shardwright.substitutions.terms import Apply, Term, Variable
from shardwright.verifier.logic import Formula, Number, z3
from shardwright.verifier.normal import Cell, Monomial, Normal, applied, scaled, summed, times, where
from shardwright.verifier.symbols import Symbols

Index = tuple[Number, ...]
Element = Callable[[Index], Normal]


@dataclass(frozen=True, eq=False)
class Dim:
    """One dimension: a size, or a splice with a name."""

    size: Number | None
    splice: str = ""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A term's dims and its element at an index."""

    dims: tuple[Dim, ...]
    element: Element


@dataclass
class Evaluator:
    """Evaluates terms of one rule. `needs` collects what makes the operators well-formed."""

    rule: Equation
    symbols: Symbols
    needs: list[tuple[str, Formula]] = field(default_factory=list)
    shifts: list[Number] = field(default_factory=list)
    _made: dict[Term, Tensor] = field(default_factory=dict)
    _count: int = 0

    def tensor(self, term: Term) -> Tensor:
        """The dims and elements of a term; `RuleError` where it is ill-shaped or beyond these semantics."""
        if term not in self._made:
            self._made[term] = self._variable(term) if isinstance(term, Variable) else self._apply(term)
        return self._made[term]

    def _variable(self, variable: Variable) -> Tensor:
        entries = self.rule.dims[variable.name].entries
        if any(len(entry) != 1 for entry in entries):
            raise RuleError(f"variable {variable} has products or 1 among its dims")
        names = [entry[0] for entry in entries]
        dims = tuple(Dim(None, n[1:]) if n.startswith("*") else Dim(self.symbols.size(n)) for n in names)
        return Tensor(dims, lambda index: (Monomial(atoms=(Cell(variable.name, index),)),))

    def _apply(self, term: Apply) -> Tensor:
        operands = [self.tensor(operand) for operand in term.operands]
        if term.op not in SEMANTICS:
            raise RuleError(f"{term.op} has no index semantics for algebraic rules; add them in verifier/elements.py")
        return SEMANTICS[term.op](self, term, operands)

    def fresh(self) -> Number:
        """A new bound index."""
        self._count += 1
        return z3.Int(f"j{self._count}")

    def rank(self, x: Tensor) -> int:
        """The least rank that a tensor of these dims has: splices may be empty unless a guard says otherwise."""
        return sum(1 for d in x.dims if not d.splice or d.splice in self.symbols.nonempty)

    def require(self, what: str, formula: Formula) -> None:
        self.needs.append((what, formula))

    def same(self, what: str, left: Dim, right: Dim) -> None:
        """Both dims must have the same size."""
        if left.splice or right.splice:
            if left.splice != right.splice:
                raise RuleError(f"{what}: dimension {left.splice or left.size} against {right.splice or right.size}")
            return
        self.require(what, left.size == right.size)

    def position(self, dims: Sequence[Dim], value: Expression) -> int:
        """Which of `dims` an attribute such as `len(b)` names, whatever the length of the splices."""
        found = set[int]()
        for length in (0, 1, 2, 5):
            number = value.evaluate(dict.fromkeys(value.names, (1,) * length))
            starts = [sum(length if d.splice else 1 for d in dims[:i]) for i in range(len(dims))]
            found.add(next((i for i, s in enumerate(starts) if s == number and not dims[i].splice), -1))
        if len(found) != 1 or -1 in found:
            raise RuleError(f"{value} does not name one dimension")
        return found.pop()


def _unary(name: str) -> Callable[[Evaluator, Apply, Sequence[Tensor]], Tensor]:
    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        (x,) = operands
        title = ", ".join([name, *(f"{key}={value}" for key, value in term.attrs)])
        return Tensor(x.dims, lambda index: applied(title, x.element(index)))

    return semantics


def _neg(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    (x,) = operands
    return Tensor(x.dims, lambda index: scaled(x.element(index), -1))


def _pointwise(
    merge: Callable[[Normal, Normal], Normal],
) -> Callable[[Evaluator, Apply, Sequence[Tensor]], Tensor]:
    """Two operands, the shorter one aligned at the end, as NumPy broadcasts."""

    def semantics(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
        x, y = operands
        long, short = (x, y) if len(x.dims) >= len(y.dims) else (y, x)
        tail = long.dims[len(long.dims) - len(short.dims) :]
        for a, b in zip(tail, short.dims, strict=True):
            run.same(f"{term}: dimensions agree", a, b)

        def element(index: Index) -> Normal:
            def of(t: Tensor) -> Normal:
                return t.element(index[len(index) - len(t.dims) :])

            return merge(of(x), of(y))

        return Tensor(long.dims, element)

    return semantics


def _linear(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    x, w = operands
    _expect(term, _rank(w) == 2 and _rank(x) >= 1)
    run.same(f"{term}: summed dimensions agree", x.dims[-1], w.dims[1])
    size = _size(term, w.dims[1])

    def element(index: Index) -> Normal:
        i = run.fresh()
        return summed(times(x.element((*index[:-1], i)), w.element((index[-1], i))), i, size)

    return Tensor((*x.dims[:-1], w.dims[0]), element)


def _matmul(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    x, y = operands
    _expect(term, run.rank(x) >= 2 and run.rank(y) >= 2 and _rank(y) in (2, _rank(x)))
    run.same(f"{term}: summed dimensions agree", x.dims[-1], y.dims[-2])
    for a, b in zip(x.dims[:-2], y.dims[:-2], strict=False):
        run.same(f"{term}: leading dimensions agree", a, b)
    size = _size(term, x.dims[-1])

    def element(index: Index) -> Normal:
        k = run.fresh()
        lead = index[: len(y.dims) - 2]
        return summed(times(x.element((*index[:-1], k)), y.element((*lead, k, index[-1]))), k, size)

    return Tensor((*x.dims[:-1], y.dims[-1]), element)


def _slice(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    (x,), attrs = operands, dict(term.attrs)
    at = run.position(x.dims, attrs["dim"])
    start, stop, step = (run.symbols.number(attrs[key]) for key in ("start", "stop", "step"))
    extent = _size(term, x.dims[at])
    bounds = [start >= 0, start <= extent, stop >= 0, stop <= extent, step == 1]
    run.require(f"{term}: within bounds", z3.And(bounds))
    run.shifts += [start, -start]
    dims = (*x.dims[:at], Dim(z3.If(start <= stop, stop - start, 0)), *x.dims[at + 1 :])
    return Tensor(dims, lambda index: x.element((*index[:at], start + index[at], *index[at + 1 :])))


def _concat(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    at = run.position(operands[0].dims, dict(term.attrs)["dim"])
    sizes = [_size(term, x.dims[at]) for x in operands]
    starts = [z3.Sum([z3.IntVal(0), *sizes[:i]]) for i in range(len(sizes))]
    for x in operands[1:]:
        _expect(term, len(x.dims) == len(operands[0].dims))
        for d, (a, b) in enumerate(zip(operands[0].dims, x.dims, strict=True)):
            if d != at:
                run.same(f"{term}: other dimensions agree", a, b)
    run.shifts += [sign * start for start in starts for sign in (1, -1)]

    def element(index: Index) -> Normal:
        pieces: Normal = ()
        for x, start, size in zip(operands, starts, sizes, strict=True):
            local = index[at] - start
            piece = x.element((*index[:at], local, *index[at + 1 :]))
            pieces += where(where(piece, local < size), local >= 0)
        return pieces

    dims = operands[0].dims
    return Tensor((*dims[:at], Dim(z3.Sum(sizes)), *dims[at + 1 :]), element)


def _permute(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    (x,), dims = operands, dict(term.attrs)["dims"]
    if not dims.names:
        order = dims.evaluate({})
        _expect(term, sorted(order) == list(range(len(x.dims))) and not any(d.splice for d in x.dims))
        inverse = [order.index(d) for d in range(len(order))]
        return Tensor(tuple(x.dims[d] for d in order), lambda index: x.element(tuple(index[d] for d in inverse)))
    _expect(term, len(x.dims) == 1 and bool(x.dims[0].splice))
    p = run.symbols.opaque(dims)
    return Tensor(
        (Dim(None, f"{x.dims[0].splice} by {dims}"),), lambda index: x.element((run.symbols.at(p, index[0]),))
    )


def _reshape(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    (x,), shape = operands, dict(term.attrs)["shape"]
    _expect(term, len(x.dims) == 1 and bool(x.dims[0].splice) and shape.name is not None)
    before, after = run.symbols.shape(x.dims[0].splice), run.symbols.shape(str(shape))
    return Tensor((Dim(None, str(shape)),), lambda index: x.element((run.symbols.reread(before, after, index[0]),)))


def _sum(run: Evaluator, term: Apply, operands: Sequence[Tensor]) -> Tensor:
    (x,), attrs = operands, dict(term.attrs)
    _expect(term, str(attrs["dims"]) == "(0,)" and str(attrs["keepdim"]) == "False" and not x.dims[0].splice)
    size = _size(term, x.dims[0])

    def element(index: Index) -> Normal:
        m = run.fresh()
        return summed(x.element((m, *index)), m, size)

    return Tensor(x.dims[1:], element)


def _size(term: Apply, dim: Dim) -> Number:
    if dim.splice:
        raise RuleError(f"{term}: needs a plain dimension, got the splice {dim.splice}")
    return dim.size


def _rank(x: Tensor) -> int:
    return len(x.dims)


def _expect(term: Apply, condition: bool) -> None:
    if not condition:
        raise RuleError(f"{term}: beyond the index semantics of verifier/elements.py")


SEMANTICS: Mapping[str, Callable[[Evaluator, Apply, Sequence[Tensor]], Tensor]] = {
    "linear": _linear,
    "matmul": _matmul,
    "add": _pointwise(lambda x, y: x + y),
    "sub": _pointwise(lambda x, y: x + scaled(y, -1)),
    "mul": _pointwise(times),
    "neg": _neg,
    "relu": _unary("relu"),
    "silu": _unary("silu"),
    "slice": _slice,
    "concat": _concat,
    "permute": _permute,
    "reshape": _reshape,
    "sum": _sum,
}
"""The rows that algebraic rules may use. Everything pointwise and nonlinear is an uninterpreted function."""
